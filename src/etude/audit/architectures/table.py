"""A table of models and uses: each cell is measured against transformers' forward pass over the same folder.

A cell is `exact` within its limit, `refused` with the user's error message, or `silent`: accepted, with other
log-probabilities than transformers'. The trial that refuses models at load is not part of the measurement.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from etude.audit.architectures import vllm_column
from etude.audit.architectures.families import FAMILIES, Family, make
from etude.config import EngineConfig
from etude.errors import RunFailed, UserError
from etude.inference.engine.loading import load_engine
from etude.inference.engine.requests import Request
from etude.models import router_replay, support
from etude.models.key_values import positions
from etude.models.loading import load_config, load_model
from etude.models.text_models import auto_class
from etude.renderers import renderer_for
from etude.trainer.rl import trial

USES = ("rows", "shared prompts", "engine", "vLLM", "replay", "tools")
MEASURED = ("rows", "shared prompts", "engine", "replay")
_SEED = 1  # not that of the trial's rows
_SAMPLED = 12  # tokens that the engine generates

State = Literal["exact", "refused", "silent", "not run", "none"]


@dataclass(frozen=True)
class Cell:
    """One use of one model: the largest difference of log-probabilities in nats, or a message (`said`)."""

    state: State
    error: float | None = None
    said: str = ""


@dataclass(frozen=True)
class ModelRow:
    """One model: its cells by use."""

    name: str
    model_type: str
    cells: dict[str, Cell]

    @property
    def verdict(self) -> str:
        """`silent` if any cell is silent, else `refused` if rows, shared prompts or engine are, else `exact`."""
        if any(cell.state == "silent" for cell in self.cells.values()):
            return "silent"
        shown = (self.cells[use] for use in support.USES if use in self.cells)
        return "refused" if any(cell.state == "refused" for cell in shown) else "exact"


def rows(
    families: Sequence[Family] = FAMILIES,
    uses: Sequence[str] = USES,
    templates: Path | None = None,
    vllm: str | None = None,
) -> Iterator[ModelRow]:
    """The rows of small random models, made in a temporary folder one after the other. `templates` holds folders with
    tokenizer and chat template, by the names of the families' templates; `vllm` is a Python that has vLLM."""
    for family in families:
        with tempfile.TemporaryDirectory(prefix="etude-models-") as folder:
            row = examine(family.name, make(family, Path(folder) / family.model_type), uses, vllm)
        if "tools" in uses and templates is not None and family.template:
            row.cells["tools"] = tools(templates / family.template)
        yield row


def summary(table: Sequence[ModelRow]) -> dict[str, int]:
    """Counts of families: all, exact in rows, shared prompts and engine, refused in one of them, silently wrong in any
    use."""
    verdicts = Counter(row.verdict for row in table)
    return {"families": len(table)} | {name: verdicts[name] for name in ("exact", "refused", "silent")}


def examine(name: str, folder: Path, uses: Sequence[str] = USES, vllm: str | None = None) -> ModelRow:
    """The row of a Hugging Face folder. Raises UserError for a folder that holds no model."""
    return measured(name, Examined(folder, vllm), uses)


def measured(name: str, examined: Examined, uses: Sequence[str]) -> ModelRow:
    """The row of a folder that has been opened, and whose model may be loaded already."""
    folder = examined.folder
    cells = {use: tools(folder) if use == "tools" else examined.cell(use) for use in uses}
    return ModelRow(name, examined.config.get_text_config().model_type, cells)


class Examined:
    """A folder, its model as ours and as transformers', and rows of ids with their right log-probabilities."""

    def __init__(self, folder: Path, vllm: str | None = None) -> None:
        self.folder, self.config, self._python = folder, load_config(folder), vllm
        self.rows = support.trial_rows(self.config, _SEED, positions(self.config))
        self._ours: PreTrainedModel | None = None
        self._theirs: Any = None

    @property
    def ours(self) -> PreTrainedModel:
        """The model as the trainer loads it."""
        self._ours = load_model(self.folder) if self._ours is None else self._ours
        return self._ours

    def truth(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities [T - 1] of each row by transformers alone."""
        if self._theirs is None:
            self._theirs = (
                auto_class(self.config)
                .from_pretrained(
                    self.folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
                )
                .eval()
            )
        log_probs = []
        for row in rows:
            ids_1T = torch.from_numpy(np.asarray(row, np.int64))[None]
            with torch.no_grad():
                logprobs_TV = self._theirs(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(-1)
            log_probs.append(logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None]).squeeze(1).numpy())
        return log_probs

    def cell(self, use: str) -> Cell:
        """The measured cell of a use."""
        measures: dict[str, Callable[[], Cell]] = {
            "rows": lambda: self._trained("rows", ("rows",)),
            "shared prompts": lambda: self._trained("shared prompts", ("packed", "streaming")),
            "engine": self._served,
            "replay": self._replayed,
            "vLLM": self._on_vllm,
        }
        try:
            return measures[use]()
        except (UserError, RunFailed) as e:
            return Cell("refused", None, str(e).removeprefix(f"{self.folder}: "))
        except Exception as e:  # accepted at load, failed later
            return Cell("silent", None, f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")

    @cached_property
    def right(self) -> list[np.ndarray]:
        """Log-probabilities [T - 1] of each of `rows` by transformers alone."""
        return self.truth(self.rows)

    @cached_property
    def limit(self) -> float:
        """The largest difference in nats that another order of summation explains."""
        return support.bound(self.truth, self.rows, self.right)

    def judged(self, measured: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> Cell:
        """The cell of measured log-probabilities: exact within the limit, else silent."""
        error = support.distance(measured, truth)
        return Cell("exact" if error <= self.limit else "silent", error)

    def _trained(self, use: Literal["rows", "shared prompts"], executions: Sequence[Any]) -> Cell:
        if reason := support.refusal(self.config, use) or trial.refusal(self.ours, use):
            return Cell("refused", None, reason)
        measured = [trial.log_probs(self.ours, execution, self.rows) for execution in executions]
        cells = [self.judged(each, self.right) for each in measured]
        return max(cells, key=lambda cell: (cell.state == "silent", cell.error))

    def _generated(self, routes: bool) -> list[tuple[np.ndarray, Any]]:
        """Rows that the engine generated in one batch: the ids of prompt and answer, and the generation."""
        if reason := support.refusal(self.config, "engine"):
            raise UserError(reason)
        config = EngineConfig(dtype="float32", cache_mb=16, documents_mb=1, speculate=False, prefill_tokens=16)
        engine = load_engine(self.folder, config, routes=routes)
        first, known, forced = 0 if routes else None, support.text_ids(self.config), ()
        if len(known) < self.config.get_text_config().vocab_size:  # what is sampled must not stand for an image
            forced = tuple(np.random.default_rng(_SEED).choice(known, _SAMPLED).tolist())
        requests = [
            Request(ids=row.tolist(), max_tokens=_SAMPLED, seed=i, routes_from=first, forced=forced)
            for i, row in enumerate(self.rows)
        ]
        running = [engine.submit(request) for request in requests]
        while not all(sequence.future.done() for sequence in running):
            engine.step()
        made = [sequence.future.result(0) for sequence in running]
        engine.close()
        return [(np.array([*r.ids, *g.ids]), g) for r, g in zip(requests, made, strict=True)]

    def _served(self) -> Cell:
        made = self._generated(routes=False)
        truth = self.truth([row for row, _ in made])
        ends = [whole[-len(g.ids) :] for whole, (_, g) in zip(truth, made, strict=True)]
        return self.judged([np.array(g.logprobs) for _, g in made], ends)

    def _replayed(self) -> Cell:
        """The cell of trainer rows that replay experts: the engine's, or the trainer's own if the engine is refused."""
        if reason := support.refusal(self.config, "rows"):
            return Cell("refused", None, reason)
        if not router_replay.routers(self.ours):
            return Cell("none", None, "no experts")
        if reason := trial.replay_refusal(self.ours):
            return Cell("refused", None, reason)
        if support.refusal(self.config, "engine"):
            replay, truth = trial.replayed(self.ours, self.rows), self.truth(self.rows)
        else:
            made = self._generated(routes=True)
            rows = [row for row, _ in made]
            routes = [g.routes.array() for _, g in made]
            replay, truth = trial.replayed(self.ours, rows, routes), self.truth(rows)
        cell = self.judged(replay.log_probs, truth)
        lost = 1 - replay.kept
        return cell if not lost else Cell("silent", cell.error, f"{lost:.1%} of the recorded experts were not taken")

    def _on_vllm(self) -> Cell:
        if self._python is None:
            return Cell("not run", None, "--vllm or $ETUDE_VLLM_PYTHON names a Python that has vLLM")
        measured = vllm_column.measure(self.folder, self._python)
        if measured.refusal:
            return Cell("refused", None, f"{self.config.get_text_config().model_type} {measured.refusal}")
        return Cell("exact" if measured.error <= measured.limit else "silent", measured.error)


def tools(folder: Path) -> Cell:
    """The dialect of the folder's chat template, by its round trip."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return Cell("none", None, "no template")
    try:
        return Cell("exact", None, renderer_for(folder).dialect)
    except UserError as e:
        return Cell("refused", None, str(e))
