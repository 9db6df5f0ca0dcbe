"""Estimates with honest intervals: pass@k, and bootstraps that resample whole clusters of dependent tasks.

Samples of one task share the task, and tasks cut from one function share the code, so neither is an independent
observation. Every interval here resamples clusters (Cameron, Gelbach and Miller 2008, "pairs cluster bootstrap") and is
the 2.5 and 97.5 % quantile of the resampled means.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from etude.records import Record

RESAMPLES = 10_000
TAIL = 0.025  # probability outside the interval, per side
_CELLS = 4_000_000  # resample counts held at once: 32 MB


class Estimate(Record, frozen=True):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def percent(self) -> str:
        """A share and its interval in percent."""
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def points(self) -> str:
        """A difference of shares and its interval in percentage points."""
        return f"{100 * self.mean:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of `k` samples passes, unbiased, when `c` of `n` passed: 1 - C(n-c, k) / C(n, k).
    Chen et al. 2021 (arXiv:2107.03374), equation 1, in the product form that needs no large binomials."""
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def pass_rate(
    results: Sequence[Sequence[bool]],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Mean over tasks of each task's share of passed samples, i.e. pass@1. `clusters` names the cluster of each task;
    without it every task is its own. Where all samples agree the bootstrap has nothing to resample, so the interval is
    the exact binomial one (Clopper and Pearson 1934) over the clusters; a single cluster says nothing about spread, so
    its interval is [0, 1]."""
    rates = _task_means(results)
    labels = _labels(clusters, len(rates))
    mean, count = float(rates.mean()), int(labels.max()) + 1
    if mean in (0.0, 1.0):
        reach = 1.0 - TAIL ** (1.0 / count)
        return Estimate(mean=mean, low=max(0.0, mean - reach), high=min(1.0, mean + reach))
    if count == 1:
        return Estimate(mean=mean, low=0.0, high=1.0)
    return _bootstrap(rates, labels, seed, resamples)


def paired_difference(
    before: Sequence[Sequence[bool]],
    after: Sequence[Sequence[bool]],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Mean over tasks of `after` minus `before`; both sides hold the same tasks in the same order. A single cluster
    gives [-1, 1]. Two sides that agree on every task give [0, 0]."""
    if len(before) != len(after):
        raise ValueError(f"a paired difference needs the same tasks on both sides, got {len(before)} and {len(after)}")
    differences = _task_means(after) - _task_means(before)
    labels = _labels(clusters, len(differences))
    if labels.max() == 0:
        return Estimate(mean=float(differences.mean()), low=-1.0, high=1.0)
    return _bootstrap(differences, labels, seed, resamples)


def mean_difference(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """The `paired_difference` of any figure of a task: its means on both sides, the same tasks in the same order."""
    if len(before) != len(after) or not before:
        raise ValueError(f"a paired difference needs the same tasks on both sides, got {len(before)} and {len(after)}")
    differences = np.asarray(after, float) - np.asarray(before, float)
    return _bootstrap(differences, _labels(clusters, len(differences)), seed, resamples)


def _task_means(results: Sequence[Sequence[bool]]) -> np.ndarray:
    if not results:
        raise ValueError("an estimate needs at least one task")
    if any(len(samples) == 0 for samples in results):
        raise ValueError("every task needs at least one sample; leave out tasks that have none")
    return np.array([sum(samples) / len(samples) for samples in results])


def _labels(clusters: Sequence[Hashable] | None, tasks: int) -> np.ndarray:
    """Cluster index of each task, numbered by first appearance."""
    if clusters is None:
        return np.arange(tasks)
    if len(clusters) != tasks:
        raise ValueError(f"{len(clusters)} cluster names for {tasks} tasks")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])


def _bootstrap(values: np.ndarray, labels: np.ndarray, seed: int, resamples: int) -> Estimate:
    """The mean of `values`, and its quantiles when whole clusters are drawn with replacement. Clusters differ in size,
    so a resampled mean is a sum over drawn clusters divided by the tasks drawn."""
    count = int(labels.max()) + 1
    sums, sizes = np.bincount(labels, values, count), np.bincount(labels, minlength=count)
    rng = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    chunk = max(1, _CELLS // count)
    for start in range(0, resamples, chunk):
        draws = rng.multinomial(count, np.full(count, 1.0 / count), size=min(chunk, resamples - start))
        means.append((draws @ sums) / (draws @ sizes))
    # "nearest" makes the quantile one of the resampled means, which interpolation would not
    low, high = np.quantile(np.concatenate(means), [TAIL, 1.0 - TAIL], method="nearest")
    return Estimate(mean=float(values.mean()), low=float(low), high=float(high))
