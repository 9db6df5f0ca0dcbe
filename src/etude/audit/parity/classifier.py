"""A classifier two-sample test (Lopez-Paz and Oquab 2017, arXiv:1610.06545) on held-out samples.

Two classifiers in plain numpy, because boxes may differ by a sum of small differences (logistic regression) or by one
value out of a range (boosted stumps). The score is the area under the ROC curve on machines that were not trained
on: 0.5 is guessing, 1 is certainty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etude.evals import Estimate

FOLDS = 5
RIDGE = 3.0  # penalty of the standardised weights; small samples with many columns need it
NEWTON_STEPS = 15
ROUNDS, RATE, CUTS = 60, 0.3, 7  # boosting: stumps, shrinkage, thresholds per column
RESAMPLES = 1000
TAIL = 0.025

Fit = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


def auc(scores_N: np.ndarray, labels_N: np.ndarray) -> float:
    """Probability that a sample of class 1 scores higher than one of class 0, ties counted half (Mann and Whitney)."""
    positive, negative = int(labels_N.sum()), int((1 - labels_N).sum())
    if not positive or not negative:
        raise ValueError("an AUC needs samples of both classes")
    order = np.argsort(scores_N, kind="stable")
    ordered = scores_N[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ends = np.r_[starts[1:], len(ordered)]
    ranks_N = np.empty(len(ordered))
    ranks_N[order] = np.repeat((starts + ends + 1) / 2, ends - starts)
    return float((ranks_N[labels_N == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


def logistic(values_NC: np.ndarray, labels_N: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Ridge-penalised logistic regression by Newton's method; returns a function that scores rows."""
    mean_C, spread_C = values_NC.mean(0), values_NC.std(0)
    spread_C[spread_C == 0] = 1.0

    def design(rows_NC: np.ndarray) -> np.ndarray:
        scaled = np.clip((rows_NC - mean_C) / spread_C, -5, 5)
        return np.hstack([np.ones((len(scaled), 1)), scaled])

    x_NC = design(values_NC)
    penalty_C = np.full(x_NC.shape[1], RIDGE)
    penalty_C[0] = 1e-6
    weights_C = np.zeros(x_NC.shape[1])
    for _ in range(NEWTON_STEPS):
        p_N = _sigmoid(x_NC @ weights_C)
        slope_C = x_NC.T @ (labels_N - p_N) - penalty_C * weights_C
        curve_CC = (x_NC * (p_N * (1 - p_N))[:, None]).T @ x_NC + np.diag(penalty_C)
        step_C = np.linalg.solve(curve_CC, slope_C)
        weights_C += step_C
        if np.abs(step_C).max() < 1e-6:
            break
    return lambda rows_NC: design(rows_NC) @ weights_C


def stumps(values_NC: np.ndarray, labels_N: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Gradient-boosted decision stumps on the logistic loss (Friedman 2001); returns a function that scores rows."""
    cuts = [(c, cut) for c in range(values_NC.shape[1]) for cut in _cuts(values_NC[:, c])]
    if not cuts:
        return lambda rows_NC: np.zeros(len(rows_NC))
    above_NK = np.stack([values_NC[:, c] > cut for c, cut in cuts], axis=1).astype(float)
    count_K = above_NK.sum(0)
    score_N = np.zeros(len(labels_N))
    steps: list[tuple[int, float, float, float]] = []
    for _ in range(ROUNDS):
        p_N = _sigmoid(score_N)
        residual_N, weight_N = labels_N - p_N, p_N * (1 - p_N) + 1e-6
        up_K, up_weight_K = residual_N @ above_NK, weight_N @ above_NK
        down_K, down_weight_K = residual_N.sum() - up_K, weight_N.sum() - up_weight_K
        gain_K = up_K**2 / (up_weight_K + 1) + down_K**2 / (down_weight_K + 1)
        gain_K[(count_K == 0) | (count_K == len(labels_N))] = -1
        best = int(gain_K.argmax())
        low, high = down_K[best] / (down_weight_K[best] + 1), up_K[best] / (up_weight_K[best] + 1)
        score_N = score_N + RATE * np.where(above_NK[:, best] > 0, high, low)
        steps.append((cuts[best][0], cuts[best][1], RATE * low, RATE * high))

    def scored(rows_NC: np.ndarray) -> np.ndarray:
        return sum((np.where(rows_NC[:, c] > cut, high, low) for c, cut, low, high in steps), np.zeros(len(rows_NC)))

    return scored


def _cuts(column_N: np.ndarray) -> list[float]:
    """Thresholds between the values of a column, at most CUTS, at its quantiles."""
    values = np.unique(column_N)
    middles = (values[1:] + values[:-1]) / 2
    if len(middles) <= CUTS:
        return [float(cut) for cut in middles]
    quantiles = np.quantile(column_N, np.linspace(0, 1, CUTS + 2)[1:-1])
    return sorted({float(middles[np.abs(middles - q).argmin()]) for q in quantiles})


def _sigmoid(x_N: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x_N, -30, 30)))


def folds(machines: Sequence[str], labels_N: np.ndarray, seed: int = 0) -> np.ndarray:
    """The fold of each sample, [N]: whole machines, dealt out evenly on both sides.

    A side with one machine only cannot be held out: its samples are dealt out one by one (see `held_out`).
    """
    rng = np.random.default_rng(seed)
    fold_N = np.zeros(len(machines), int)
    for side in (0, 1):
        names = sorted({machines[i] for i in np.flatnonzero(labels_N == side).tolist()})
        if len(names) > 1:
            place = dict(zip(rng.permutation(names), np.arange(len(names)) % min(FOLDS, len(names)), strict=True))
            for i in np.flatnonzero(labels_N == side).tolist():
                fold_N[i] = place[machines[i]]
        else:
            side_N = rng.permutation(np.flatnonzero(labels_N == side))
            fold_N[side_N] = np.arange(len(side_N)) % FOLDS
    return fold_N


def held_out(machines: Sequence[str], labels_N: np.ndarray) -> bool:
    """Whether both sides have machines enough to be split by machine."""
    return all(len({machines[i] for i in np.flatnonzero(labels_N == side).tolist()}) > 1 for side in (0, 1))


def scores(values_NC: np.ndarray, labels_N: np.ndarray, fold_N: np.ndarray, fit: Fit) -> np.ndarray:
    """Each sample's score by a classifier that has not seen its fold, [N]."""
    scores_N = np.zeros(len(labels_N))
    for fold in np.unique(fold_N):
        held_N = fold_N == fold
        if len(np.unique(labels_N[~held_N])) == 2:
            scores_N[held_N] = fit(values_NC[~held_N], labels_N[~held_N])(values_NC[held_N])
    return scores_N


def interval(scores_N: np.ndarray, labels_N: np.ndarray, machines: Sequence[str], seed: int = 0) -> Estimate:
    """The AUC and its 95 % interval: a bootstrap over machines, within each side."""
    rng = np.random.default_rng(seed)
    sides = []
    for side in (0, 1):
        by_machine: dict[str, list[int]] = {}
        for i in np.flatnonzero(labels_N == side).tolist():
            by_machine.setdefault(machines[i], []).append(i)
        sides.append([np.array(rows) for rows in by_machine.values()])
    drawn = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([part[j] for part in sides for j in rng.integers(len(part), size=len(part))])
        drawn.append(auc(scores_N[rows], labels_N[rows]))
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL])
    return Estimate(mean=auc(scores_N, labels_N), low=float(low), high=float(high))
