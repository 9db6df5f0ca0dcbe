"""The trainer's half of the canaries (`etude.rollout.probes`): its own scores, and the engines' against them."""

from __future__ import annotations

import time

import numpy as np
import torch

from etude.models.batch_invariant import batch_invariant
from etude.rollout.probes import KEPT, read_sequences, take_answers
from etude.store import Store
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.guards import Canary
from etude.trainer.rl.loss import CLAMP
from etude.trainer.rl.plan import TokenRows, rows


class Canaries:
    """Scores of the fixed sequences under the trainer's versions. Without sequences nothing is ever scored.

    `exactly`: in the engine's bits, where both sides promise that.
    """

    def __init__(self, store: Store, model: torch.nn.Module, *, exactly: bool) -> None:
        self._store, self._model, self._exactly = store, model, exactly
        sequences = tuple(np.array(ids) for ids in read_sequences(store))
        self._tokens = TokenRows(sequences, tuple(np.arange(1, len(ids)) for ids in sequences))
        self._scores: dict[int, np.ndarray] = {}  # by version, oldest first: float64 [N]
        self._seconds = 0.0

    def score(self, version: int) -> None:
        """Scores the sequences with the model's weights, which are those of `version`, unless that is done."""
        if version in self._scores or not self._tokens.rows:
            return
        started = time.perf_counter()
        with batch_invariant(self._exactly):
            found_N = evaluate(self._model, rows(self._tokens), self._tokens.count).logprobs_N
        self._scores[version] = found_N.double().cpu().numpy()
        for old in [v for v in self._scores if v <= version - KEPT]:
            del self._scores[old]
        self._seconds += time.perf_counter() - started

    def arrived(self) -> list[Canary]:
        """What engines have answered since the last call, of the versions that were scored here."""
        if not self._tokens.rows:
            return []
        started = time.perf_counter()
        found: list[Canary] = []
        for answer in take_answers(self._store):
            own_N = self._scores.get(answer.scored.version)
            theirs_N = np.concatenate([np.array(part, np.float64) for part in answer.scored.logprobs])
            if own_N is not None and len(own_N) == len(theirs_N):
                # A score that is no number is as wrong as can be.
                d_N = np.nan_to_num(own_N - theirs_N, nan=CLAMP).clip(-CLAMP, CLAMP)
                k2, largest = float(np.square(d_N).mean() / 2), float(np.abs(d_N).max())
                found.append(Canary(answer.engine, answer.scored.version, k2, largest))
        self._seconds += time.perf_counter() - started
        return found

    def seconds(self) -> float:
        """What canaries have cost since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent
