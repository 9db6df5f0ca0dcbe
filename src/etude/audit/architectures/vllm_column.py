"""The column vLLM of the table of architectures: a model in a real server of vLLM, started and updated as by a run.

The server takes a version in which every weight has another place, so that a part that is not updated, or updated
elsewhere, is seen. Log-probabilities of prompts before and after, and of sampled tokens, are compared with those of
transformers' own forward pass in the same type, bfloat16.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from etude.config import RLConfig
from etude.errors import UserError
from etude.models import support
from etude.models.key_values import positions
from etude.models.loading import load_model, named_tensors
from etude.protocol import GenerateRequest
from etude.protocol.backends import EngineClient, EngineError
from etude.records import Generation
from etude.run.engines import backend_of, engine_token, start_engines
from etude.store import open_store
from etude.weights.publisher import Publisher

_CONTEXT = 128
_SAMPLED = 12
_SECONDS = 600.0  # that a request may take
_DYING = 10.0  # that a server takes to end after a failure; its log says more than its answer
_NOISE = 4.0  # times the difference of transformers' own two attentions, as in a trial
_WHERE = re.compile(r"; see \S+$|http://\S+ |the inference server exited with code \d+: |etude\.errors\.UserError: ")


@dataclass(frozen=True)
class Measured:
    """The largest difference in nats and the allowed one, or the sentence of a refusal."""

    error: float = 0.0
    limit: float = 0.0
    refusal: str = ""


@dataclass(frozen=True)
class _Answers:
    """Log-probabilities of the rows before and after an update, and what was sampled after it."""

    before: list[np.ndarray]
    after: list[np.ndarray]
    sampled: list[Generation]


def measure(folder: Path, python: str, seed: int = 1) -> Measured:
    """Measures the model of a Hugging Face folder in a server of vLLM, by the Python that has it."""
    model = load_model(folder, dtype=torch.bfloat16)
    rows = support.trial_rows(model.config, seed, positions(model.config))
    with tempfile.TemporaryDirectory(prefix="etude-vllm-") as name:
        before = _truth(model, rows)
        _move(model)
        Publisher(open_store(f"{name}/weights")).publish(0, named_tensors(model), (), {}, last=True)
        try:
            answers = _answers(_run(folder, python), Path(name), rows)
        except (UserError, EngineError) as e:
            return Measured(refusal=_WHERE.sub("", str(e)).replace(f"follow {name}/weights", "be updated in vLLM"))
    whole = [np.array([*row, *g.ids]) for row, g in zip(rows, answers.sampled, strict=True)]
    after, ends = _truth(model, rows), [row[-_SAMPLED:] for row in _truth(model, whole)]
    pairs = (
        (answers.before, before),
        (answers.after, after),
        ([np.array(g.logprobs) for g in answers.sampled], ends),
    )
    noise = support.distance([support.plain_log_probs(model, row, "sdpa") for row in rows], after)
    limit = max(support.LIMIT_NARROW, _NOISE * noise)
    return Measured(max(support.distance(theirs, ours) for theirs, ours in pairs), limit)


def _truth(model: PreTrainedModel, rows: list[np.ndarray]) -> list[np.ndarray]:
    return [support.plain_log_probs(model, row) for row in rows]


@torch.no_grad()
def _move(model: PreTrainedModel) -> None:
    """Moves every element by one place, in the last dimension of its tensor."""
    for tensor in named_tensors(model).values():
        if tensor.ndim:
            tensor.copy_(tensor.roll(1, -1))


def _run(folder: Path, python: str) -> RLConfig:
    """A run whose engine is a small server of vLLM on the CPU."""
    inference = {
        "engine": "vllm",
        "python": python,
        "cache_mb": 256,
        "max_batch": 8,
        "args": ["--enforce-eager", "--skip-tokenizer-init", "--max-num-batched-tokens", f"{_CONTEXT}"],
    }
    rollout = {"context": _CONTEXT, "tokens": _CONTEXT // 2}
    tables = {"tasks": {"repository": "unused"}, "model": {"path": str(folder)}}
    return RLConfig.model_validate({**tables, "rollout": rollout, "inference": inference})


def _answers(run: RLConfig, place: Path, rows: list[np.ndarray]) -> _Answers:
    """The answers of a server that is started for them, and updated from the store in `place`. Raises UserError or
    EngineError if it does not start, cannot be updated, or refuses."""
    token = engine_token()
    children, (url,) = start_engines(place, run, place, token)
    try:
        return asyncio.run(_conversation(EngineClient([url], token, backend_of(place, run)), url, rows))
    except (UserError, EngineError):
        if children[0].ends(_DYING):
            raise UserError(children[0].end()) from None
        raise
    finally:
        for child in children:
            child.stop(10)


async def _conversation(client: EngineClient, url: str, rows: list[np.ndarray]) -> _Answers:
    ids = [row.tolist() for row in rows]

    async def scores() -> list[np.ndarray]:
        scored = await client.score(url, ids, _SECONDS)
        assert scored is not None, "the version changes when it is told to"
        return [np.array(row) for row in scored.logprobs]

    async with client:
        await client.check(url)
        before = await scores()
        await client.bring(url, 0)
        after = await scores()
        requests = [GenerateRequest(ids=row, max_tokens=_SAMPLED, seed=n) for n, row in enumerate(ids)]
        sampled = await asyncio.gather(*(client.generate(request, _SECONDS) for request in requests))
    return _Answers(before, after, list(sampled))
