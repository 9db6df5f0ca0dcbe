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


def same_slots(tallies: Tallies, known: np.ndarray, arms: tuple[int, int], count: str, of: str) -> Contrast | None:
    """The ratio `count`/`of` of the accounts of the first of two arms, less that of the other, by the `known` rows;
    None with too few. A slot weighs n0 n1 / (n0 + n1), which no cost decides."""
    of_N = tallies.of(of)
    rows = np.flatnonzero(known & (of_N > 0) & np.isin(tallies.arm_N, arms))
    if not len(rows):
        return None
    slot = tallies.slot_N[rows] - tallies.slot_N[rows].min()
    new = tallies.arm_N[rows] == arms[0]
    size_AS = np.stack([np.bincount(slot[side], minlength=int(slot.max()) + 1) for side in (new, ~new)])
    enough = (size_AS.min(0) >= _FEWEST)[slot]
    rows, slot, new = rows[enough], slot[enough], new[enough]
    if not len(rows):
        return None
    rate = np.clip(tallies.of(count)[rows] / of_N[rows], 0.0, 1.0)
    arm = np.where(new, 0, 1)
    cell = arm * size_AS.shape[1] + slot
    mean_C = np.bincount(cell, rate, size_AS.size) / np.maximum(size_AS.ravel(), 1)
    weight_S = np.where(size_AS.min(0) >= _FEWEST, size_AS.prod(0) / np.maximum(size_AS.sum(0), 1), 0.0)
    weight_S = weight_S / weight_S.sum()
    mean = float(weight_S @ (mean_C[: size_AS.shape[1]] - mean_C[size_AS.shape[1] :]))
    size = size_AS.ravel()[cell]
    part = weight_S[slot] * (rate - mean_C[cell]) / size * np.sqrt(size / (size - 1.0))
    account = tallies.account_N[rows]
    sums_A = np.bincount(account, np.where(new, part, -part))
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
    arms' sizes must keep their ratio."""
    contrast = same_slots(tallies, np.ones(len(tallies.account_N), bool), (0, 2), "survived", "tries")
    if contrast is None or contrast.deviation <= 0:
        return None
    mean, reach = contrast.mean, contrast.reach(0.05, 1000)
    return Difference(mean, mean - reach, mean + reach, contrast.accounts, mean > reach, reach - mean)
