"""Is a version no worse: the test whose unit is a function, and the margin that a suite defends."""

import math

import numpy as np
import pytest
from benchmarks.live_statistics import promoted

from etude.evals.paired import clustered_score, defended_margin, needed_score


def test_tasks_of_one_function_count_once() -> None:
    """Ten functions of which one breaks: the same evidence with one task of each as with eight."""
    gains = np.array([-1.0] + [0.0] * 9)
    once = clustered_score(gains, np.arange(10), 0.3)
    assert clustered_score(np.repeat(gains, 8), np.repeat(np.arange(10), 8), 0.3) == pytest.approx(once, rel=1e-12)
    assert clustered_score(np.repeat(gains, 8), np.arange(80), 0.3) > 2 * once
    assert clustered_score(np.full(50, -0.3), np.arange(50), 0.3) == pytest.approx(0.0, abs=1e-9)


def test_a_suite_without_a_difference_needs_enough_functions() -> None:
    """Nothing differs: the score is that of functions that break as a whole with probability `margin`."""
    assert clustered_score(np.zeros(200), np.arange(200) // 4, 0.05) == pytest.approx(math.sqrt(50 * 0.05 / 0.95))


def test_the_score_over_tilting_is_below_the_plain_one_where_losses_are_rare() -> None:
    gains = np.zeros(100)
    gains[:1] = -1.0
    excess = gains + 0.1
    plain = excess.sum() / math.sqrt(excess @ excess)
    assert 0 < clustered_score(gains, np.arange(100), 0.1) < plain


@pytest.mark.parametrize("wrong", [([], [], 0.1), ([0.1], [0, 1], 0.1), ([2.0], [0], 0.1), ([0.0], [0], 0.0)])
def test_wrong_arguments_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="functions, margin"):
        clustered_score(np.array(wrong[0]), np.array(wrong[1], int), wrong[2])


@pytest.mark.parametrize("kind", ["breaks", "spread", "mixed"])
def test_a_version_worse_by_the_margin_rarely_passes(kind: str) -> None:
    """Of 300 at 5 % more than 27 have a probability below 1 in 500."""
    assert sum(promoted(seed, kind, 2, 1) for seed in range(300)) <= 27


def test_the_margin_that_a_suite_defends() -> None:
    """An equal version passes at it with the planned power; more tasks of a function help less than more functions."""
    assert defended_margin([1] * 1546, 0.1) == pytest.approx(0.02034, abs=1e-4)
    assert defended_margin([5] * 50, 0.1) > 1.3 * defended_margin([1] * 250, 0.1)
    assert defended_margin([1], 0.1) == 1.0
    assert needed_score([1] * 10_000, 0.05) == pytest.approx(1.6602, abs=1e-3)
    margin = defended_margin([2] * 125, 0.1)
    kept = np.mean([promoted(seed, "spread", 2, 1, worse=0.0, margin=margin, tasks=250) for seed in range(400)])
    assert kept == pytest.approx(0.8, abs=0.06)
