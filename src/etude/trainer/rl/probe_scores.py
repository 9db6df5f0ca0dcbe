"""The trainer's half of the logprob probes (`etude.rollout.probes`): its own scores, compared with the engines'."""

from __future__ import annotations

import time

import numpy as np
from transformers import PreTrainedModel

from etude.models.batch_invariant import batch_invariant
from etude.rollout import PROBES_KEPT, read_probe_sequences, take_probe_results
from etude.store import Store
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.guards import ProbeComparison
from etude.trainer.rl.mismatch import LOG_RATIO_LIMIT
from etude.trainer.rl.plan import TokenRows, rows


class TrainerProbes:
    """Scores of the probe sequences under the trainer's versions; without sequences nothing is scored. `exactly`: in
    the engine's bits, if both sides promise equal bits."""

    def __init__(self, store: Store, model: PreTrainedModel, *, exactly: bool) -> None:
        self._store, self._model, self._exactly = store, model, exactly
        sequences = tuple(np.array(ids) for ids in read_probe_sequences(store))
        self._tokens = TokenRows(sequences, tuple(np.arange(1, len(ids)) for ids in sequences))
        self._scores: dict[int, np.ndarray] = {}  # by version, oldest first: float64 [N]
        self._seconds = 0.0

    def score(self, version: int) -> None:
        """Scores the sequences with the model's weights, those of `version`, unless they have been scored."""
        if self.scored(version):
            return
        started = time.perf_counter()
        with batch_invariant(self._exactly):
            logprobs_N = evaluate(self._model, rows(self._tokens), self._tokens.count).logprobs_N
        self._scores[version] = logprobs_N.double().cpu().numpy()
        for old in [v for v in self._scores if v <= version - PROBES_KEPT]:
            del self._scores[old]
        self._seconds += time.perf_counter() - started

    def scored(self, version: int) -> bool:
        """Whether `score` has nothing to do for a version."""
        return version in self._scores or not self._tokens.rows

    def arrived(self) -> list[ProbeComparison]:
        """The engines' scores since the last call, of versions that were scored here."""
        if not self._tokens.rows:
            return []
        started = time.perf_counter()
        comparisons: list[ProbeComparison] = []
        for answer in take_probe_results(self._store):
            own_N = self._scores.get(answer.scored.version)
            theirs_N = np.concatenate([np.array(part, np.float64) for part in answer.scored.logprobs])
            if own_N is not None and len(own_N) == len(theirs_N):
                # NaN counts as the largest difference.
                d_N = np.nan_to_num(own_N - theirs_N, nan=LOG_RATIO_LIMIT).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
                k2, largest = float(np.square(d_N).mean() / 2), float(np.abs(d_N).max())
                comparisons.append(ProbeComparison(answer.engine, answer.scored.version, k2, largest))
        self._seconds += time.perf_counter() - started
        return comparisons

    def seconds(self) -> float:
        """Seconds spent on probes since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent
