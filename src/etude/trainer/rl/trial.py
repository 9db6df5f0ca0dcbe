"""Decides by trial, before the first step, which executions of a model agree with transformers' own forward pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from etude.errors import RunFailed, UserError
from etude.models import router_replay, support
from etude.models.experts import observe
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.plan import Execution, TokenRows, plan, shape_of
from etude.trainer.sharding import reshard

_BUDGET = 30  # tokens of a pass; less than the trial's rows, so that a streamed prefix has several passes below it


def log_probs(model: PreTrainedModel, execution: Execution, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities [T - 1] of each row's ids [T] after the first, in the passes of an execution."""
    tokens = TokenRows(tuple(rows), tuple(np.arange(1, len(row)) for row in rows))
    passes = plan(tokens, execution, _BUDGET, shape_of(model))
    log_probs_N = evaluate(model, passes.parts, tokens.count).logprobs_N.cpu().numpy()
    return np.split(log_probs_N, np.cumsum([len(row) - 1 for row in rows])[:-1])


def refusal(model: PreTrainedModel, use: Literal["rows", "shared prompts"]) -> str:
    """The reason why the model's rows, or its shared prompts, are not computed exactly; "" if they are."""
    executions: tuple[Execution, ...] = ("rows",) if use == "rows" else ("packed", "streaming")
    reason = support.refusal(model.config, use)
    for execution in executions:
        reason = reason or _trial(model, use, partial(log_probs, model, execution))
    return reason


def _trial(model: PreTrainedModel, use: Literal["rows", "shared prompts"], ours: support.LogProbs) -> str:
    try:
        return support.trial(model, use, ours)
    finally:
        reshard(model)  # transformers' own pass has left whole weights in the place of this rank's rows


def allowed(model: PreTrainedModel, wanted: Execution | Literal["auto"]) -> Execution | Literal["auto"]:
    """The execution `wanted`, or in place of "auto", with a note, "rows" if prompts cannot be shared exactly. Raises
    UserError for an execution, or a model, that would not be computed exactly."""
    if why := refusal(model, "rows"):
        raise UserError(why)
    if wanted == "rows" or not (why := refusal(model, "shared prompts")):
        return wanted
    if wanted != "auto":
        raise UserError(why)
    print(f"note: every row is a pass of its own: {why.partition(': ')[0]}", file=sys.stderr, flush=True)
    return "rows"


@dataclass(frozen=True)
class Replayed:
    """Log-probabilities of rows under recorded experts, and the share of recorded experts that were used."""

    log_probs: list[np.ndarray]
    kept: float


def replayed(
    model: PreTrainedModel, rows: Sequence[np.ndarray], routes: Sequence[np.ndarray] | None = None
) -> Replayed:
    """Rows as separate passes under recorded experts, int16 [T - 1 or T, layers, K] each; without `routes`, under the
    experts of a pass without replay. Raises UserError for routers that cannot be replayed."""
    layers, slots = router_replay.shape(model)
    if routes is None:
        routes = [_own_routes(model, row) for row in rows]
    whole = []
    for row, route in zip(rows, routes, strict=True):
        unfed = np.full((len(row) - len(route), layers, slots), router_replay.UNFED, np.int16)
        whole.append(np.concatenate([route.astype(np.int16), unfed]))
    tokens = TokenRows(tuple(rows), tuple(np.arange(1, len(row)) for row in rows), tuple(whole))
    result = evaluate(model, plan(tokens, "rows", _BUDGET, shape_of(model)).parts, tokens.count)
    log_probs_N, sums = result.logprobs_N.cpu().numpy(), result.replayed
    by_row = np.split(log_probs_N, np.cumsum([len(row) - 1 for row in rows])[:-1])
    return Replayed(by_row, 1 - sums.refused / sums.slots if sums.slots else 0.0)


@torch.no_grad()
def _own_routes(model: PreTrainedModel, row: np.ndarray) -> np.ndarray:
    ids_1T = torch.from_numpy(row.astype(np.int64)).to(next(model.parameters()).device)[None]
    with observe() as choices:
        model.get_decoder()(input_ids=ids_1T, use_cache=False)
    return choices.stacked().cpu().numpy().astype(np.int16)


def replay_refusal(model: PreTrainedModel) -> str:
    """The reason why recorded experts cannot be replayed in this model, or "": tried with its own experts."""
    try:
        return _trial(model, "rows", lambda rows: replayed(model, rows).log_probs)
    except (UserError, RunFailed) as e:
        return str(e)
