"""Levels of a line of releases."""

import numpy as np
import pytest
from benchmarks.live_statistics import releases

from etude.evals.online import CANDIDATE, PastTest, level_of


def test_levels_start_at_a_share_and_findings_pay_for_more() -> None:
    """By hand, with the series k^-1.6 / 2.2857656."""
    first = 0.0125 / 2.2857656
    assert level_of([], 0.05) == pytest.approx(first, rel=1e-6)
    assert level_of([PastTest(0.3, False)], 0.05) == pytest.approx(first, rel=1e-6)  # a candidate costs nothing
    assert level_of([PastTest(0.9, False)], 0.05) == pytest.approx(first * 2**-1.6, rel=1e-6)
    found = level_of([PastTest(1e-4, True)], 0.05)
    assert found == pytest.approx(first + (0.025 - 0.0125) / 2.2857656, rel=1e-6)
    assert level_of([PastTest(1e-4, True)] * 200, 0.9) == CANDIDATE


def test_few_of_the_findings_are_false_and_most_of_the_better_are_found() -> None:
    found = [releases(seed, adaptive=True) for seed in range(60)]
    before = [releases(seed, adaptive=False) for seed in range(60)]
    assert np.mean([one.false for one in found]) <= 0.05
    assert np.mean([one.share for one in found]) >= 0.6 >= 3 * np.mean([one.share for one in before])
