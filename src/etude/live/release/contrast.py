"""The difference of two arms in a ratio of counters, over the same slots of time; and the claims about it.

Accounts come and go by the hour, busy ones are seen sooner, and the canary grows from stage to stage. So the arms are
compared within a slot, where chance alone decided the arm, and the slots' differences are averaged. An account is in
many slots; its deviations are summed before they are squared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from etude.evals import mixture_evidence, plan_looks, sequence_reach

ARMS = ("control", "canary", "holdback")
OWN = 0.05
"""The share of the accounts from which a tenant is compared within itself."""
_FEWEST = 2  # accounts of an arm in a slot


@dataclass(frozen=True)
class Tallies:
    """Counters, one row for each account, arm and slot. Within a slot accounts are paired in the order of `account_N`,
    which must be independent of their costs; `arm_N` are places in ARMS, `cell_N` are tenants; a missing name in
    `values` counts zero. An account is what a key vouches for: the names that it invents are one account."""

    account_N: np.ndarray
    arm_N: np.ndarray
    slot_N: np.ndarray
    cell_N: np.ndarray
    values: Mapping[str, np.ndarray]

    def of(self, name: str) -> np.ndarray:
        """Values of a name, float64 [N]."""
        if name == "unlabelled":
            return np.maximum(self.of("edits") - self.of("labelled"), 0.0)
        if name == "tries":  # an invalid call would have been an edit
            return self.of("edits") + self.of("invalid_call")
        if name in ("failed", "asked"):  # a stray was asked of the arm, and another answered
            return self.of("errors" if name == "failed" else "requests") + self.of("strays")
        return self.values.get(name, np.zeros(len(self.account_N)))


@dataclass(frozen=True)
class Contrast:
    """`mean` of the difference, its standard `deviation`, and the accounts of both arms."""

    mean: float
    deviation: float
    accounts: tuple[int, int]

    @property
    def units(self) -> float:
        """n0 n1 / (n0 + n1) accounts."""
        one, other = self.accounts
        return one * other / (one + other)

    @property
    def evidence(self) -> float:
        """Logarithm of an e-value that the mean is not 0, valid at every look, if it is above 0; else no evidence."""
        if self.mean <= 0 or self.deviation <= 0:
            return 0.0
        return mixture_evidence(self.mean / self.deviation, self.units)

    def reach(self, alpha: float, tightest: int) -> float:
        """Half the width of the confidence sequence of the mean."""
        return sequence_reach(self.deviation * math.sqrt(self.units), int(self.units), alpha, tightest)


@dataclass(frozen=True)
class Difference:
    """Mean of the share of kept edits in the newer content's arm, less that of the other arm; `low` and `high` are its
    interval at the planned confidence. `better`: shown at this look, or by the sequence. `worst`: by how much the newer
    content may be worse, valid at every look. `p`: of the test that it is not better, by this look alone."""

    mean: float
    low: float
    high: float
    accounts: tuple[int, int]
    better: bool
    worst: float = 1.0
    p: float = 1.0

    @property
    def sentence(self) -> str:
        """The difference as text, in points."""
        mean, low, high = (f"{100 * share:+.1f}" for share in (self.mean, self.low, self.high))
        verdict = "better" if self.better else f"not shown better; worse by at most {100 * max(self.worst, 0.0):.1f}"
        return f"edits kept, of edits and invalid calls: {mean} points [{low}, {high}], {verdict}"


def tenants_of(tallies: Tallies) -> np.ndarray:
    """The tenant of each row, -1 for all with less than `OWN` of the accounts: int64 [N]."""
    if not len(tallies.cell_N):
        return tallies.cell_N
    cell_A = np.full(int(tallies.account_N.max()) + 1, -1)
    cell_A[tallies.account_N] = tallies.cell_N
    size_C = np.bincount(cell_A[cell_A >= 0], minlength=int(cell_A.max()) + 1)
    share_C = size_C / size_C.sum()
    return np.where(share_C[tallies.cell_N] >= OWN, tallies.cell_N, -1)


def same_slots(tallies: Tallies, known: np.ndarray, arms: tuple[int, int], count: str, of: str) -> Contrast | None:
    """The ratio `count`/`of` of the accounts of the first of two arms, less that of the other, by the `known` rows;
    None with too few. Arms are compared within a slot and a large tenant, which weigh n0 n1 / (n0 + n1): no cost
    decides that."""
    of_N = tallies.of(of)
    rows = np.flatnonzero(known & (of_N > 0) & ((tallies.arm_N == arms[0]) | (tallies.arm_N == arms[1])))
    if not len(rows):
        return None
    tenant = tenants_of(tallies)[rows] + 1
    part = (tallies.slot_N[rows] - tallies.slot_N[rows].min()) * (int(tenant.max()) + 1) + tenant
    new = tallies.arm_N[rows] == arms[0]
    size_AP = np.stack([np.bincount(part[side], minlength=int(part.max()) + 1) for side in (new, ~new)])
    enough = (size_AP.min(0) >= _FEWEST)[part]
    rows, part, new = rows[enough], part[enough], new[enough]
    if not len(rows):
        return None
    rate = np.clip(tallies.of(count)[rows] / of_N[rows], 0.0, 1.0)
    cell = np.where(new, 0, 1) * size_AP.shape[1] + part
    mean_C = np.bincount(cell, rate, size_AP.size) / np.maximum(size_AP.ravel(), 1)
    weight_P = np.where(size_AP.min(0) >= _FEWEST, size_AP.prod(0) / np.maximum(size_AP.sum(0), 1), 0.0)
    weight_P = weight_P / weight_P.sum()
    mean = float(weight_P @ (mean_C[: size_AP.shape[1]] - mean_C[size_AP.shape[1] :]))
    size = size_AP.ravel()[cell]
    share = weight_P[part] * (rate - mean_C[cell]) / size * np.sqrt(size / (size - 1.0))
    account = tallies.account_N[rows]
    sums_A = np.bincount(account, np.where(new, share, -share))
    counts = tuple(int(np.count_nonzero(np.bincount(account[side]))) for side in (new, ~new))
    return Contrast(mean, math.sqrt(float(sums_A @ sums_A)), (counts[0], counts[1]))


def lift_at(contrast: Contrast, shares: Sequence[float], share: float, alpha: float, least: int) -> Difference:
    """The look at the end of a stage, in a group-sequential test with looks at the stages' `shares`, at one-sided
    `alpha`. Before the end of the stage the result is a preview, and `better` has no meaning. `worst` is tightest about
    `least` accounts of the canary."""
    bound = _bounds(tuple(shares), 2 * alpha)[list(shares).index(share)]
    mean, reach = contrast.mean, bound * contrast.deviation
    worst = contrast.reach(0.1, least) - mean
    z = mean / contrast.deviation if contrast.deviation > 0 else 0.0
    return Difference(
        mean, mean - reach, mean + reach, contrast.accounts, mean > reach > 0, worst, 0.5 * math.erfc(z / math.sqrt(2))
    )


@cache
def _bounds(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    return plan_looks([share / shares[-1] for share in shares], alpha).bounds


def holdback_lift(tallies: Tallies) -> Difference | None:
    """The difference between control and holdback, as a confidence sequence of 95 %, which holds at every look. The
    arms' sizes must keep their ratio. Accounts of both arms are left out."""
    control, held = (np.unique(tallies.account_N[tallies.arm_N == arm]) for arm in (0, 2))
    of_one = ~np.isin(tallies.account_N, np.intersect1d(control, held))
    contrast = same_slots(tallies, of_one, (0, 2), "survived", "tries")
    if contrast is None or contrast.deviation <= 0:
        return None
    mean, reach = contrast.mean, contrast.reach(0.05, 1000)
    return Difference(mean, mean - reach, mean + reach, contrast.accounts, mean > reach, reach - mean)
