"""Statistics of a release: tests that stay valid when they are read while accounts arrive.

    is it harmful?             log_evidence      a betting e-process; may stop the release at any moment
    is it better?              plan_looks        group-sequential looks, planned before the first account
    does it stay better?       sequence_reach    a confidence sequence, for a holdback that is watched for weeks
    is traffic split right?    ratio_evidence    an e-process of the sizes of the arms; `ratio_p_value` for one look

The unit is an account, not a request: requests of one account share an arm, a user and a repository.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
_BET = 0.5  # maximum share of the capital in one bet: 1 + bet * cost stays positive
_SPLITS = 100.0  # weight, in units, of the prior of a splitter's shares
_POINTS = 301  # of a look's density; odd, for Simpson's rule
_REACH = 9.0  # standard deviations at which a look's density is cut off


def log_evidence(costs_T: np.ndarray, margin: float = 0.0) -> np.ndarray:
    """Logarithm of E_t = prod_i (1 + bet_i (cost_i - margin)), float64 [..., T], for costs in [-1, 1] in the order of
    their arrival. A cost is that of an account in the new arm minus one in the old arm. If the mean cost is at most
    `margin`, the probability that E_t ever reaches 1/alpha is at most alpha (Ville's inequality). Bets depend on
    earlier costs alone: past mean over past second moment, the aGRAPA rule of Waudby-Smith and Ramdas 2023
    (arXiv:2010.09686, section B.2). Evidence that the cost is below `margin` is `log_evidence(-costs, -margin)`. Raises
    ValueError for costs out of [-1, 1] or a margin out of (-1, 1)."""
    costs = np.asarray(costs_T, float)
    if costs.size and (np.abs(costs).max() > 1.0 or not np.isfinite(costs).all()):
        raise ValueError("costs of an e-process lie in [-1, 1]")
    if not -1.0 < margin < 1.0:
        raise ValueError(f"the margin of an e-process lies in (-1, 1), got {margin}")
    excess = costs - margin
    sums = np.cumsum(excess, -1) - excess
    squares = np.cumsum(excess**2, -1) - excess**2 + 0.25  # as if one cost of 1/2 had come before
    bets = np.clip(sums / squares, 0.0, _BET)
    return np.cumsum(np.log1p(bets * excess), -1)


def sequence_reach(deviation: float, count: int, alpha: float = 0.05, tightest: int = 1000) -> float:
    """Half the width of a confidence sequence of a mean after `count` units with standard deviation `deviation`. It
    holds the mean at all counts at once with probability 1 - alpha, for large counts (Waudby-Smith et al. 2021,
    arXiv:2103.06476, theorem 2.2). It is tightest about `tightest` units."""
    if count < 2:
        return math.inf
    rate = _rate(alpha, tightest)
    t = count * rate + 1.0
    return deviation * math.sqrt(2.0 * t / (count**2 * rate) * math.log(math.sqrt(t) / alpha))


def mixture_evidence(z: float, units: float, tightest: int = 100) -> float:
    """Logarithm of an e-value against a mean of 0, from the mean in standard deviations of itself after `units` units:
    the test whose confidence sequence is `sequence_reach`, for large counts, too (Robbins 1970)."""
    rate = _rate(0.01, tightest)
    return 0.5 * (z * z * units * rate / (units * rate + 1.0) - math.log1p(units * rate))


def _rate(alpha: float, tightest: int) -> float:
    spread = -2.0 * math.log(alpha)
    return (spread + math.log(1.0 + spread)) / tightest


@dataclass(frozen=True)
class LookPlan:
    """Looks of a two-sided group-sequential test. `inflation` is its largest sample divided by that of one fixed look
    of the same power. `expected` is the expected sample divided by the same, if the planned effect is true."""

    fractions: tuple[float, ...]  # of the largest sample, increasing to 1
    bounds: tuple[float, ...]  # of |z| at each look
    alpha: float
    power: float
    inflation: float
    expected: float


def plan_looks(fractions: Sequence[float], alpha: float = 0.05, power: float = 0.8) -> LookPlan:
    """Bounds that spend alpha like the test of O'Brien and Fleming, in the form of Lan and DeMets 1983: each side has
    spent 2 - 2 Phi(z / sqrt(t)) at the share t, with z the 1 - alpha/4 quantile. Raises ValueError for fractions that
    do not rise to 1, or for an alpha or a power that is not a probability."""
    t = tuple(float(x) for x in fractions)
    if not t or t[0] <= 0 or any(b <= a for a, b in pairwise(t)) or abs(t[-1] - 1) > 1e-12:
        raise ValueError(f"looks are shares of the largest sample that rise to 1, got {list(fractions)}")
    if not 0 < alpha < 1 or not 0 < power < 1:
        raise ValueError(f"alpha and power are probabilities, got {alpha} and {power}")
    z = _NORMAL.inv_cdf(1 - alpha / 4)
    spent = [4 * _tail(z / math.sqrt(x)) for x in t]
    bounds: list[float] = []
    score = _Score()
    for x, now, before in zip(t, spent, [0.0, *spent], strict=False):
        bound = _bisect(lambda b, score=score, x=x: score.crosses(x, b), now - before)
        bounds.append(bound)
        score = score.within(x, bound)
    drift = _bisect(lambda d: -sum(_crossing(t, bounds, d)), -power)
    crossing = _crossing(t, bounds, drift)
    fixed = (_NORMAL.inv_cdf(1 - alpha / 2) + _NORMAL.inv_cdf(power)) ** 2
    mean = sum(p * x for p, x in zip(crossing, t, strict=True)) + (1.0 - sum(crossing))
    return LookPlan(t, tuple(bounds), alpha, power, drift**2 / fixed, mean * drift**2 / fixed)


def _bisect(falling: Callable[[float], float], value: float) -> float:
    low, high = 0.0, 12.0
    for _ in range(44):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def _crossing(t: Sequence[float], bounds: Sequence[float], drift: float) -> list[float]:
    """The probability that |z| first passes its bound at each look."""
    out: list[float] = []
    score = _Score(drift)
    for x, bound in zip(t, bounds, strict=True):
        out.append(score.crosses(x, bound))
        score = score.within(x, bound)
    return out


@dataclass(frozen=True)
class _Score:
    """The score of a test that no look has ended: normal with mean drift * t and variance t, cut at every look so far
    (Armitage, McPherson and Rowe 1969; Jennison and Turnbull 1999, chapter 19). `mass_P` is the probability that
    Simpson's rule gives to `at_P`."""

    drift: float = 0.0
    t: float = 0.0
    at_P: np.ndarray = field(default_factory=lambda: np.zeros(1))
    mass_P: np.ndarray = field(default_factory=lambda: np.ones(1))

    def crosses(self, t: float, bound: float) -> float:
        """The probability that |z| passes `bound` at t."""
        step, edge = math.sqrt(t - self.t), bound * math.sqrt(t)
        mean_P = self.at_P + self.drift * (t - self.t)
        tails = [_tail((edge - mean) / step) + _tail((edge + mean) / step) for mean in mean_P]
        return float(self.mass_P @ np.array(tails))

    def within(self, t: float, bound: float) -> _Score:
        """The score at t, cut at `bound`."""
        step, mean_P = t - self.t, self.at_P + self.drift * (t - self.t)
        reach = min(bound * math.sqrt(t), _REACH * math.sqrt(t) + abs(self.drift) * t)
        at_Q = np.linspace(-reach, reach, _POINTS)
        simpson_Q = np.full(_POINTS, 2.0)
        simpson_Q[1::2], simpson_Q[[0, -1]] = 4.0, 1.0
        density_QP = np.exp(-((at_Q[:, None] - mean_P) ** 2) / (2 * step)) / math.sqrt(2 * math.pi * step)
        return _Score(self.drift, t, at_Q, density_QP @ self.mass_P * simpson_Q * (at_Q[1] - at_Q[0]) / 3)


def _tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


def accounts_per_arm(base: float, lift: float, plan: LookPlan) -> int:
    """The maximum of accounts per arm with which a rise of the share `base` by `lift` is found with the plan's power.
    Both are in (0, 1), `lift` is absolute. Raises ValueError for shares out of (0, 1)."""
    new = base + lift
    if not 0 < base < 1 or not 0 < new < 1 or not lift:
        raise ValueError(f"shares lie between 0 and 1, got {base} and {new}")
    z = _NORMAL.inv_cdf(1 - plan.alpha / 2) + _NORMAL.inv_cdf(plan.power)
    return math.ceil(plan.inflation * z**2 * (base * (1 - base) + new * (1 - new)) / lift**2)


def ratio_p_value(counts: Sequence[int], shares: Sequence[float]) -> float:
    """The p-value of a chi-square test that the arms were split by `shares`: the probability of sizes that differ from
    them at least as much as `counts`. Below 0.001 the split is broken, and its other figures are meaningless. Raises
    ValueError."""
    if len(counts) != len(shares) or len(counts) < 2 or min(shares) <= 0 or min(counts) < 0:
        raise ValueError(f"counts {list(counts)} of shares {list(shares)}")
    total, whole = sum(counts), sum(shares)
    if total == 0:
        return 1.0
    expected = [total * share / whole for share in shares]
    x = sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True)) / 2
    degrees = len(counts) - 1
    # Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1), from Q(1/2, x) = erfc(sqrt x) or Q(1, x) = e^-x
    a, q = (0.5, math.erfc(math.sqrt(x))) if degrees % 2 else (1.0, math.exp(-x))
    while a < degrees / 2:
        q += math.exp(a * math.log(x) - x - math.lgamma(a + 1)) if x > 0 else 0.0
        a += 1.0
    return min(1.0, q)


def ratio_evidence(counts: Sequence[int], shares: Sequence[float]) -> float:
    """Logarithm of E = P(counts | shares drawn about `shares`) / P(counts | shares), for arms that are tested again and
    again. If the splitter is right, the probability that E ever reaches 1/alpha is at most alpha (Lindon and Malek
    2022, arXiv:2011.03567, equation 6, with a Dirichlet prior worth 100 units). Raises ValueError."""
    if len(counts) != len(shares) or len(counts) < 2 or min(shares) <= 0 or min(counts) < 0:
        raise ValueError(f"counts {list(counts)} of shares {list(shares)}")
    whole, total = sum(shares), sum(counts)
    evidence = math.lgamma(_SPLITS) - math.lgamma(_SPLITS + total)
    for n, share in zip(counts, shares, strict=True):
        p = share / whole
        evidence += math.lgamma(_SPLITS * p + n) - math.lgamma(_SPLITS * p) - n * math.log(p)
    return evidence


def alpha_of_slot(number: int, alpha: float = 0.05) -> float:
    """The share of alpha that the `number`-th slot (from 1) may spend, so that all slots together spend alpha:
    6 alpha / (pi k)^2."""
    if number < 1:
        raise ValueError(f"slots count from 1, got {number}")
    return 6.0 * alpha / (math.pi * number) ** 2
