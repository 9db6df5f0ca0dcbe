"""The level at which each of many releases is tested, so that few of those found better are not.

SAFFRON (Ramdas, Zrnic, Wainwright and Jordan 2018, arXiv:1802.09098): a test whose p-value is above `CANDIDATE` costs
nothing, and each finding pays for further tests. The expected share of false ones among the findings stays at `alpha`
however many releases there are; a level shared over all of them for good, as 1/k^2, would starve the later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CANDIDATE = 0.5
_DECAY = 1.6
_ZETA = 2.2857656  # sum of k^-1.6
_START = 0.25  # share of alpha before the first finding


class PastTest(NamedTuple):
    """The p-value of a release's test, by its last look, and whether the release was found better."""

    p: float
    better: bool


def level_of(past: Sequence[PastTest], alpha: float) -> float:
    """The one-sided level of the next test after the `past` ones, in their order."""
    candidates = [test.better or test.p <= CANDIDATE for test in past]

    def share(since: int) -> float:  # of the budget of the finding before test `since`; 0: of the start
        idle = sum(not candidate for candidate in candidates[since:])
        return (idle + 1.0) ** -_DECAY / _ZETA

    budget, start = (1 - CANDIDATE) * alpha, _START * alpha
    level = start * share(0)
    for number, place in enumerate(place for place, test in enumerate(past, 1) if test.better):
        level += (budget - start if number == 0 else budget) * share(place)
    return min(level, CANDIDATE)
