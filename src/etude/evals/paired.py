"""Is a version no worse on a suite? The test of paired gains whose tasks move together by function, and the margin that
a suite can defend.

Tasks of one function share code: a version that breaks the function fails all of them. So the function is the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


def clustered_score(gains_N: np.ndarray, function_N: np.ndarray, margin: float) -> float:
    """z of the test that the mean gain is above -`margin`: gains in [-1, 1] of tasks, new less old, and the function
    (int) of each. The smaller of two: the score over functions, whose variance is that of the excess over the margin,
    and at least that of functions that break as a whole; and the signed root of the exponential-tilting ratio (Efron
    1981), which a few broken functions make smaller. Raises ValueError."""
    gains, function = np.asarray(gains_N, float), np.asarray(function_N, np.int64)
    if not len(gains) or len(gains) != len(function) or np.abs(gains).max() > 1.0 or not 0 < margin < 1:
        raise ValueError(f"{len(gains)} gains, {len(function)} functions, margin {margin}")
    excess_F, size_F = np.bincount(function, gains + margin), np.bincount(function)
    excess_F, size_F = excess_F[size_F > 0], size_F[size_F > 0]
    variance = max(float(excess_F @ excess_F), margin * (1 - margin) * float(size_F @ size_F))
    score = float(excess_F.sum()) / math.sqrt(variance)
    if score <= 0 or excess_F.min() >= 0:
        return score
    unit_F = excess_F / np.abs(excess_F).max()
    tilt = _falls(lambda t: float(unit_F @ np.exp(-t * unit_F)), 0.0, 50.0)
    ratio = -2.0 * len(unit_F) * math.log(float(np.exp(-tilt * unit_F).mean()))
    return min(score, math.sqrt(max(ratio, 0.0)))


def needed_score(size_F: Sequence[int], alpha: float) -> float:
    """The z from which a version is no worse, at one-sided `alpha`, by the numbers of tasks of the functions: Student's
    quantile for the root of their effective number, since losses are skewed (by simulation, `live_statistics`)."""
    effective = sum(size_F) ** 2 / sum(size * size for size in size_F)
    z, free = _NORMAL.inv_cdf(1 - alpha), max(math.sqrt(effective), 2.0)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def defended_margin(size_F: Sequence[int], discordant: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest margin that a paired suite can defend, by the numbers of tasks of its functions. With it, two equal
    models whose passes differ on the share `discordant` of the tasks, each by itself, are found no worse with
    probability `power`. 1 for a suite that can defend none."""
    tasks, squares = sum(size_F), sum(size * size for size in size_F)
    noise, needed = discordant * tasks, needed_score(size_F, alpha)

    def short(margin: float) -> float:
        variance = max(noise + margin**2 * squares, margin * (1 - margin) * squares)
        return needed * math.sqrt(variance) - margin * tasks + _NORMAL.inv_cdf(power) * math.sqrt(noise)

    return _falls(short, 0.0, 1.0)


def _falls(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a function falls below 0; `high` if nowhere."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
