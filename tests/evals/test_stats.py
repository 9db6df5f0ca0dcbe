"""Estimates against enumeration, and against the coverage they promise."""

from itertools import combinations, product

import numpy as np
import pytest

from etude.evals.stats import Estimate, paired_difference, pass_at_k, pass_rate


def exact_bootstrap(sums: list[float], sizes: list[int]) -> list[float]:
    """Every resampled mean, one per ordered draw of clusters."""
    draws = product(range(len(sums)), repeat=len(sums))
    return sorted(sum(sums[i] for i in d) / sum(sizes[i] for i in d) for d in draws)


def quantiles(means: list[float]) -> tuple[float, float]:
    last = len(means) - 1
    return means[round(0.025 * last)], means[round(0.975 * last)]


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(s) for s in combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_pass_at_k_survives_large_n():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, rel=1e-9)


def test_pass_rate_is_the_mean_over_tasks_not_over_samples():
    assert pass_rate([[True], [False, False, False]]).mean == 0.5


def test_interval_equals_the_enumerated_bootstrap():
    # 5 tasks in 4 clusters of sizes 2, 1, 1, 1; 256 ordered draws, so the quantiles can be enumerated
    results = [[True], [False], [True], [False], [False]]
    means = exact_bootstrap([1.0, 1.0, 0.0, 0.0], [2, 1, 1, 1])
    estimate = pass_rate(results, ["a", "a", "b", "c", "d"], seed=3)
    assert (estimate.low, estimate.high) == pytest.approx(quantiles(means))


def test_paired_interval_equals_the_enumerated_bootstrap():
    before = [[False, False], [True, False], [True, True], [False, True]]
    after = [[True, True], [True, True], [True, False], [True, True]]
    means = exact_bootstrap([1.0, 0.5, -0.5, 0.5], [1, 1, 1, 1])
    estimate = paired_difference(before, after, seed=0)
    assert estimate.mean == 0.375
    assert (estimate.low, estimate.high) == pytest.approx(quantiles(means))


def test_clusters_widen_the_interval_of_dependent_tasks():
    results = [[bool(cluster % 2)] for cluster in range(20) for _ in range(5)]
    alone = pass_rate(results)
    clustered = pass_rate(results, [cluster for cluster in range(20) for _ in range(5)])
    # five copies of one fact: the standard error grows by sqrt(5) = 2.2
    assert 1.8 < (clustered.high - clustered.low) / (alone.high - alone.low) < 2.6


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        rates = np.repeat(rng.beta(1.0, 2.0, size=40), 3)  # a function's tasks share its difficulty
        results = rng.random((120, 4)) < rates[:, None]
        estimate = pass_rate(results.tolist(), np.repeat(np.arange(40), 3).tolist(), seed=trial, resamples=1000)
        covered += estimate.low <= 1 / 3 <= estimate.high
    # 200 trials at 95 % have a standard deviation of 1.5 points; the percentile bootstrap falls short by one or two
    assert 0.90 <= covered / 200 <= 0.985


def test_pairing_is_narrower_than_two_separate_intervals():
    rng = np.random.default_rng(1)
    difficulty = rng.random(100)
    before = [(rng.random(4) < p).tolist() for p in difficulty]
    after = [(rng.random(4) < min(1.0, p + 0.1)).tolist() for p in difficulty]
    paired, a, b = paired_difference(before, after), pass_rate(before), pass_rate(after)
    assert paired.high - paired.low < (a.high - a.low) + (b.high - b.low)
    assert paired.mean == pytest.approx(b.mean - a.mean)


def test_seed_decides_the_interval():
    results = [[bool(i % 3)] for i in range(50)]
    assert pass_rate(results, seed=1) == pass_rate(results, seed=1)
    assert pass_rate(results, seed=1, resamples=100) != pass_rate(results, seed=2, resamples=100)


def test_agreement_gives_the_exact_binomial_interval():
    # 0 of 20: 1 - 0.025 ** (1 / 20) = 0.1684 (Clopper-Pearson table)
    assert pass_rate([[False]] * 20) == Estimate(mean=0.0, low=0.0, high=pytest.approx(0.1684, abs=1e-4))
    assert pass_rate([[True]] * 20) == Estimate(mean=1.0, low=pytest.approx(0.8316, abs=1e-4), high=1.0)


def test_one_cluster_says_nothing_about_spread():
    assert pass_rate([[True, False]]) == Estimate(mean=0.5, low=0.0, high=1.0)
    assert paired_difference([[False]], [[True]]) == Estimate(mean=1.0, low=-1.0, high=1.0)


def test_two_equal_sides_differ_by_nothing():
    results = [[True, False], [False, False]]
    assert paired_difference(results, results) == Estimate(mean=0.0, low=0.0, high=0.0)


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="at least one task"):
        pass_rate([])
    with pytest.raises(ValueError, match="at least one sample"):
        pass_rate([[]])
    with pytest.raises(ValueError, match="same tasks"):
        paired_difference([[True]], [])
    with pytest.raises(ValueError, match="cluster names"):
        pass_rate([[True]], ["a", "b"])


def test_many_clusters_are_resampled_in_pieces():
    results = [[bool(i % 2)] for i in range(1000)]
    estimate = pass_rate(results)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 0.5 / 1000**0.5, rel=0.05)
