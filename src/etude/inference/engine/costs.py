"""The cost of a pass over n tokens, measured or learned, and the number of drafted tokens that are worth feeding.

A pass costs T(n). With R sequences that emit e_r tokens each, drafts are chosen to maximise sum log e_r - R log T(n).
For one sequence that is tokens per second; among several, a sequence's gain must outweigh the delay of all others
(proportional fairness; Kelly, 1997). A sequence that feeds K drafted tokens, each right with chance q, is expected to
emit 1 + q + ... + q^K.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

LARGEST = 512  # tokens of the largest pass that is measured, and drafted tokens of a pass
_REPEATS = 3
_DOUBLES = 64
_FORGOTTEN = 400  # passes
_SECONDS = 1.5  # measuring a curve takes at most this long, plus one pass


class CostCurve:
    """Seconds of a pass, by number of tokens: linear between the measured points, and monotone."""

    def __init__(self, tokens: Sequence[float], seconds: Sequence[float]) -> None:
        if len(tokens) < 2 or len(tokens) != len(seconds) or min(seconds) <= 0.0:
            raise ValueError("a cost curve needs at least two sizes with their positive seconds")
        self._tokens = np.array(tokens, dtype=np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, dtype=np.float64))
        self._slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
        self._worth: dict[tuple[int, int], bool] = {}

    @property
    def points(self) -> list[tuple[int, float]]:
        """(tokens, seconds) as measured and made monotone."""
        return [(int(n), float(s)) for n, s in zip(self._tokens, self._seconds, strict=True)]

    def seconds(self, tokens_N: np.ndarray | int) -> np.ndarray:
        """Seconds of passes over so many tokens."""
        beyond = np.maximum(np.asarray(tokens_N) - self._tokens[-1], 0) * self._slope
        return np.interp(tokens_N, self._tokens, self._seconds) + beyond

    def worth_drafting(self, sequences: int, tokens: int) -> bool:
        """Whether drafts that are always right would pay, in a pass with so many sequences and further tokens."""
        if (sequences, tokens) not in self._worth:
            if len(self._worth) > 4096:
                self._worth.clear()
            # Every sequence drafts K tokens.
            lengths_K = np.arange(1, max(2, LARGEST // sequences + 1))
            ratio_K = self.seconds(tokens + sequences * lengths_K) / self.seconds(tokens)
            alone = np.log1p(np.arange(1, LARGEST + 1))
            ratio_alone = self.seconds(tokens + np.arange(1, LARGEST + 1)) / self.seconds(tokens)
            gain = max((np.log1p(lengths_K) - np.log(ratio_K)).max(), (alone - sequences * np.log(ratio_alone)).max())
            self._worth[sequences, tokens] = bool(gain > 1e-9)
        return self._worth[sequences, tokens]

    def choose(self, sequences: int, tokens: int, limits: Sequence[int], rates: Sequence[float]) -> list[int]:
        """The number of drafted tokens to feed for each of the sequences that have a draft. `sequences` and `tokens`
        count the pass without drafts; `limits` and `rates` are the length of each draft and the chance that one of its
        tokens is right. Tokens are ordered by falling gain, so the best set of n tokens is the first n."""
        if not limits or max(limits) == 0:
            return [0] * len(limits)
        gains: list[np.ndarray] = []
        for limit, rate in zip(limits, rates, strict=True):
            powers = np.cumprod(np.full(min(limit, LARGEST), rate))
            emitted = 1.0 + np.concatenate(([0.0], np.cumsum(powers)))
            gains.append(np.diff(np.log(emitted)))
        owner = np.repeat(np.arange(len(gains)), [len(gain) for gain in gains])
        gain_N = np.concatenate(gains)
        order = np.argsort(-gain_N, kind="stable")[:LARGEST]
        total_N = np.cumsum(gain_N[order])
        ratio_N = self.seconds(tokens + np.arange(1, len(order) + 1)) / self.seconds(tokens)
        value_N = total_N - sequences * np.log(ratio_N)
        best = int(np.argmax(value_N))
        if value_N[best] <= 0.0:
            return [0] * len(limits)
        return np.bincount(owner[order[: best + 1]], minlength=len(limits)).tolist()


def measure(run: Callable[[int], None], largest: int) -> CostCurve:
    """The measured curve of `run(n)`, a pass over n tokens, for n = 1, the largest power of two up to `largest`, and as
    many of those between them as time allows. Each cost is the least of three, to leave out disturbances. The ends are
    measured first: beyond the largest measured size a curve would be extrapolated from noise."""
    sizes = [1 << bit for bit in range(largest.bit_length())]
    begin, least = time.perf_counter(), dict[int, float]()
    for size in _ends_first(sizes):
        if len(least) >= 2 and time.perf_counter() - begin > _SECONDS:
            break
        run(size)
        for _ in range(_REPEATS):
            start = time.perf_counter()
            run(size)
            least[size] = min(least.get(size, np.inf), time.perf_counter() - start)
            if time.perf_counter() - begin > _SECONDS:
                break
    return CostCurve(*zip(*sorted(least.items()), strict=True))


def _ends_first(sizes: Sequence[int]) -> list[int]:
    """The sizes in the order first, last, middle, the middles of both halves, and so on."""
    order, gaps = [sizes[0], sizes[-1]], [(0, len(sizes) - 1)]
    while gaps:
        first, last = gaps.pop(0)
        if last - first > 1:
            middle = (first + last) // 2
            order.append(sizes[middle])
            gaps += [(first, middle), (middle, last)]
    return order


class LearnedCosts:
    """The cost curve of an engine that cannot be measured before it serves, learned from its passes. Sizes are grouped
    by powers of two. A size that has not occurred for long is forgotten, so that a wrong estimate does not last. With
    only one size, a pass is assumed to cost twice as much with `_DOUBLES` tokens more."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[float, float, int]] = {}  # mean tokens, mean seconds, when
        self._passes = 0

    def note(self, tokens: int, seconds: float) -> None:
        """Record that a pass over `tokens` tokens took so many seconds."""
        self._passes += 1
        size = tokens.bit_length()
        n, t, _ = self._kept.get(size, (tokens, seconds, 0))
        # An outlier counts as at most three times the mean.
        share = 0.2
        mean = t + share * (min(seconds, 3.0 * t) - t)
        self._kept[size] = (n + share * (tokens - n), mean, self._passes)
        self._kept = {s: kept for s, kept in self._kept.items() if kept[2] > self._passes - _FORGOTTEN}

    def curve(self) -> CostCurve:
        """The curve of the passes noted so far."""
        points = [self._kept[size][:2] for size in sorted(self._kept)] or [(1.0, 1.0)]
        if len(points) == 1:
            tokens, seconds = points[0]
            points.append((tokens + _DOUBLES, 2.0 * seconds))
        tokens_N, seconds_N = zip(*points, strict=True)
        return CostCurve(tokens_N, seconds_N)
