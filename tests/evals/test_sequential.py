"""Statistics of a release against published tables, enumeration, numeric maximum likelihood and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from etude.evals.sequential import (
    accounts_per_arm,
    alpha_of_slot,
    log_evidence,
    mixture_evidence,
    plan_looks,
    ratio_p_value,
    sequence_reach,
)


@pytest.mark.parametrize(
    ("fractions", "bounds"),
    [
        # Lan and DeMets' bounds for O'Brien-Fleming spending, two-sided 5 %, as in `ldbounds`.
        ((0.25, 0.5, 0.75, 1.0), (4.3326, 2.9631, 2.3590, 2.0141)),
        ((0.2, 0.4, 0.6, 0.8, 1.0), (4.8769, 3.3570, 2.6803, 2.2898, 2.0310)),
        ((1.0,), (1.95996,)),
    ],
)
def test_bounds_are_the_published_ones(fractions: tuple[float, ...], bounds: tuple[float, ...]) -> None:
    assert plan_looks(fractions).bounds == pytest.approx(bounds, abs=2e-4)  # the tables have four digits


def test_a_plan_keeps_its_alpha_and_power() -> None:
    plan = plan_looks((0.3, 0.7, 1.0))
    generator = np.random.default_rng(1)
    steps = np.diff((0.0, *plan.fractions))
    z = 1.959964 + 0.841621
    for drift, passes in ((0.0, plan.alpha), (z * math.sqrt(plan.inflation), plan.power)):
        noise = generator.standard_normal((200_000, 3)) * np.sqrt(steps)
        scores = np.cumsum(noise + drift * steps, 1) / np.sqrt(plan.fractions)
        share = (np.abs(scores) > plan.bounds).any(1).mean()
        assert share == pytest.approx(passes, abs=0.004)  # more than four standard errors of 200,000 draws
    assert 1.0 < plan.inflation < 1.03
    assert plan.expected < 0.9


@pytest.mark.parametrize("fractions", [(), (0.5, 0.5, 1.0), (0.5,), (0.0, 1.0), (0.5, 1.2)])
def test_looks_that_are_no_plan_are_refused(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="rise to 1"):
        plan_looks(fractions)


def costs(generator: np.random.Generator, runs: int, pairs: int, new: float, old: float) -> np.ndarray:
    first, second = (generator.random((runs, pairs)) < rate for rate in (new, old))
    return first.astype(float) - second


def test_evidence_of_harm_is_rarely_false_and_soon_true() -> None:
    generator, bound = np.random.default_rng(2), math.log(100)
    equal = log_evidence(costs(generator, 2000, 2000, 0.1, 0.1)).max(1) >= bound
    assert equal.mean() <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / 2000)
    worse = log_evidence(costs(generator, 400, 2000, 0.2, 0.1)) >= bound
    assert worse.any(1).mean() > 0.99
    assert np.median(worse.argmax(1) + 1) <= 400


def test_evidence_is_a_fair_game() -> None:
    """Over all sequences of fair costs, the mean of E is 1: bets know nothing of what comes."""
    every = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=8)))
    assert np.exp(log_evidence(every)[:, -1]).mean() == pytest.approx(1.0, rel=1e-12)  # rounding of 6,561 terms
    shifted = log_evidence(every * 0.5 + 0.1, 0.1)[:, -1]
    assert np.exp(shifted).mean() == pytest.approx(1.0, rel=1e-12)


def test_evidence_wants_bounded_costs() -> None:
    for wrong in (np.array([1.5]), np.array([float("nan")])):
        with pytest.raises(ValueError, match=r"lie in \[-1, 1\]"):
            log_evidence(wrong)
    with pytest.raises(ValueError, match="margin"):
        log_evidence(np.zeros(2), 1.0)


def test_a_confidence_sequence_holds_at_all_counts_at_once() -> None:
    values = np.random.default_rng(3).standard_normal((1000, 2000))
    counts = np.arange(1, 2001)
    means = np.cumsum(values, 1) / counts
    reach = np.array([sequence_reach(1.0, int(n), 0.05, 500) for n in counts])
    missed = (np.abs(means[:, 99:]) > reach[99:]).any(1).mean()  # it holds for large counts: from 100 on
    assert missed <= 0.05
    at = 500
    assert sequence_reach(1.0, at, 0.05, at) < min(sequence_reach(1.0, at, 0.05, n) for n in (50, 5000))
    assert sequence_reach(1.0, 1) == math.inf


def test_sizes_of_arms() -> None:
    assert ratio_p_value((510, 490), (1, 1)) == pytest.approx(math.erfc(math.sqrt(0.2)), rel=1e-12)
    assert ratio_p_value((40, 30, 30), (1, 1, 1)) == pytest.approx(math.exp(-1.0), rel=1e-12)
    assert ratio_p_value((10, 20, 30, 40), (1, 1, 1, 1)) == pytest.approx(1.6974e-4, rel=1e-4)  # chi-square 20, 3
    assert ratio_p_value((0, 0), (1, 1)) == 1.0
    with pytest.raises(ValueError, match="shares"):
        ratio_p_value((1, 2), (1, 0))


def test_sizes_of_samples() -> None:
    assert accounts_per_arm(0.5, 0.05, plan_looks((1.0,))) == 1562  # 1,566 by the pooled variance
    assert sum(alpha_of_slot(k) for k in range(1, 100_000)) == pytest.approx(0.05, rel=1e-4)
    with pytest.raises(ValueError, match="between 0 and 1"):
        accounts_per_arm(0.98, 0.05, plan_looks((1.0,)))


def test_the_evidence_of_the_mixture_is_that_of_the_sequence_and_rarely_reaches_its_bound() -> None:
    """Where the confidence sequence just leaves 0, the e-value is 1/alpha; and over 2,000 sums of equal steps it ever
    reaches 1/alpha in at most alpha of them."""
    reach = sequence_reach(1.0, 400, alpha=0.01, tightest=100)
    assert math.exp(-mixture_evidence(reach * 20.0, 400)) == pytest.approx(0.01, rel=1e-9)
    sums = np.random.default_rng(7).normal(size=(2000, 300)).cumsum(1) / np.sqrt(np.arange(1, 301))
    counts = np.arange(1, 301) * np.array(0.04)
    evidence = 0.5 * (sums**2 * counts / (counts + 1) - np.log1p(counts))
    assert (evidence.max(1) >= math.log(20)).mean() <= 0.05
