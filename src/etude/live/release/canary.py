"""The canary's decision: whether a release goes on to more accounts, holds, or is rolled back.

A pure function of the accounts' counters. Accounts are randomised, so an account is the unit: an account of the canary
is paired with accounts of the control that were active in the same slot of time and cell, and the differences of their
costs feed two kinds of e-process per guardrail:

    lasting   every account counts once in the whole release, in the first slot in which it has a partner
    slot      every account of one slot counts; slots share alpha as 1, 1/4, 1/9, ... so harm that begins late is seen

All e-processes, and the test of the arms' sizes, together spend `canary.alpha`: the probability that an equal version
is stopped. A stop is not corrected over versions; the claim that a version is better is (`alpha_of_version`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np

from etude.config.live import CanaryConfig
from etude.evals import alpha_of_version, log_evidence, plan_looks, ratio_evidence, sequence_reach
from etude.live.log.records import Arm

ARMS = (Arm.CONTROL, Arm.CANARY, Arm.HOLDBACK)
SUMMED = ("seconds", "followup", "survived")
"""Tallies whose value is `total`; the value of others is `count`."""
RATIO_ALPHA = 0.1
"""Share of alpha for the sizes of the arms; the guardrails have the rest."""
ALONE_MARGIN = 0.05
"""The increase in cost, over the control's last slot, that is allowed once all accounts have the release."""
LASTING = 0.75  # share of a guardrail's alpha for the lasting kind
_PARTNERS = 4  # accounts of one arm in a group, at most


class Verdict(StrEnum):
    """The verdict on a stage."""

    GO_ON = "go on"
    HOLD = "hold"
    ROLL_BACK = "roll back"
    DONE = "done"


@dataclass(frozen=True)
class Guardrail:
    """The cost of an account: `count` over `of`, in [0, 1]. With `fewer`, a lower ratio is the harm. With `ranked`,
    only the order of two accounts counts, after the canary's is divided by `canary.slower`. `matures`: known after
    `labels.delay_seconds`."""

    name: str
    count: str
    of: str
    share: float  # of the guardrails' alpha
    matures: bool = False
    fewer: bool = False
    ranked: bool = False

    @property
    def steady(self) -> bool:
        """Whether the cost is about the same at other hours of the day."""
        return not self.ranked and self.count != "edits"


GUARDRAILS = (
    Guardrail("undone edits", "undone", "applied", 1 / 4, matures=True),
    Guardrail("dissatisfied follow-ups", "followup", "requests", 1 / 8, matures=True),
    Guardrail("edits without an outcome", "unlabelled", "edits", 1 / 8, matures=True),
    Guardrail("errors", "errors", "requests", 1 / 8),
    Guardrail("invalid calls", "invalid_call", "requests", 1 / 16),
    Guardrail("stops", "stopped", "requests", 1 / 16),
    Guardrail("dropped records", "dropped", "requests", 1 / 16),
    Guardrail("latency", "seconds", "requests", 1 / 16, ranked=True),
    Guardrail("more edits", "edits", "requests", 1 / 16),
    Guardrail("fewer edits", "edits", "requests", 1 / 16, fewer=True),
)


class TallyRow(NamedTuple):
    """A row of the table `tallies`, with the cell of its account (its tenant)."""

    arm: str
    account: str
    slot: int
    name: str
    count: int
    total: float
    cell: str = ""


@dataclass(frozen=True)
class Tallies:
    """Counters, one row for each account, arm and slot. Within a slot accounts are paired in the order of `account_N`,
    which must be independent of their costs; `arm_N` are places in ARMS; a missing name in `values` counts zero."""

    account_N: np.ndarray
    arm_N: np.ndarray
    slot_N: np.ndarray
    cell_N: np.ndarray
    values: Mapping[str, np.ndarray]

    def of(self, name: str) -> np.ndarray:
        """Values of a name, float64 [N]."""
        if name == "unlabelled":
            return np.maximum(self.of("edits") - self.of("labelled"), 0.0)
        return self.values.get(name, np.zeros(len(self.account_N)))


def tallies_of(rows: Iterable[TallyRow]) -> Tallies:
    """Rows of the table as arrays."""
    rows = list(rows)
    accounts = sorted({row.account for row in rows}, key=lambda name: hashlib.blake2b(name.encode()).digest())
    codes = {name: code for code, name in enumerate(accounts)}
    cells = {name: code for code, name in enumerate(sorted({row.cell for row in rows}))}
    places: dict[tuple[int, int, int, int], int] = {}
    cells_by_name: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        key = (codes[row.account], ARMS.index(Arm(row.arm)), row.slot, cells[row.cell])
        place = places.setdefault(key, len(places))
        value = row.total if row.name in SUMMED else float(row.count)
        cells_by_name.setdefault(row.name, []).append((place, value))
    columns = np.array(list(places), dtype=np.int64).reshape(-1, 4).T
    values = {name: np.zeros(len(places)) for name in cells_by_name}
    for name, entries in cells_by_name.items():
        np.add.at(values[name], [place for place, _ in entries], [value for _, value in entries])
    account_N, arm_N, slot_N, cell_N = columns
    return Tallies(account_N, arm_N, slot_N, cell_N, values)


@dataclass(frozen=True)
class CanaryTrial:
    """The stage of a release on trial. Times are nanoseconds; `share` is the stage's share of accounts, `number` counts
    releases from 1."""

    number: int
    share: float
    began: int  # the release
    stage_began: int


@dataclass(frozen=True)
class Difference:
    """Mean of `kept_per_account` in the newer content's arm, less that of the other arm; `low` and `high` are its
    interval at the planned confidence. `better`: shown at this look, or by the sequence."""

    mean: float
    low: float
    high: float
    accounts: tuple[int, int]
    better: bool

    @property
    def sentence(self) -> str:
        """The difference as text, in points."""
        mean, low, high = (f"{100 * share:+.1f}" for share in (self.mean, self.low, self.high))
        verdict = "better" if self.better else "no proof that it is better"
        return f"edits kept, of edits and invalid calls: {mean} points [{low}, {high}], {verdict}"


@dataclass(frozen=True)
class CanaryDecision:
    """The verdict and its reason. `evidence` is the logarithm of the e-value over its bound, by guardrail: 0 stops."""

    verdict: Verdict
    reason: str
    accounts: int = 0  # of the canary, in this stage, matured
    evidence: dict[str, float] = field(default_factory=dict[str, float])
    lift: Difference | None = None


def decide(
    options: CanaryConfig, delay_seconds: float, trial: CanaryTrial, tallies: Tallies, now: int
) -> CanaryDecision:
    """The decision at `now`. `tallies` are the counters since the release began; `delay_seconds` is the age at which
    outcomes of a turn are known: the attribution window, and time for late signals. Slots that have not ended (or not
    matured) don't count, so the same rows give the same decision."""
    slot = round(options.slot_minutes * 60e9)
    tallies = _of_one_arm(tallies, -(-trial.began // slot))
    ended, matured = now // slot, (now - round(delay_seconds * 1e9)) // slot
    stage = tallies.slot_N >= -(-trial.stage_began // slot)
    evidence = _split_evidence(options, trial, tallies, stage & (tallies.slot_N < ended))
    alpha = options.alpha * (1 - RATIO_ALPHA)
    for guardrail in GUARDRAILS:
        known = tallies.slot_N < (matured if guardrail.matures else ended)
        evidence[guardrail.name] = _harm(
            guardrail, tallies, known, alpha * guardrail.share, -(-trial.began // slot), options.slower
        )
    ripe = stage & (tallies.slot_N < matured) & (tallies.of("requests") > 0)
    accounts = len(np.unique(tallies.account_N[ripe & (tallies.arm_N == 1)]))
    lift = None
    if trial.share in options.stages and trial.share < 1:
        lift = _lift(options, trial, tallies, tallies.slot_N < matured)
    worst = max(evidence, key=lambda name: evidence[name])
    if evidence[worst] >= 0:
        reason = f"{worst}: e-value {_power(evidence[worst])} its bound"
        return CanaryDecision(Verdict.ROLL_BACK, reason, accounts, evidence, lift)
    verdict, reason = _progress(options, trial, accounts, tallies, ripe, now)
    return CanaryDecision(verdict, reason, accounts, evidence, lift)


def _progress(
    options: CanaryConfig, trial: CanaryTrial, accounts: int, tallies: Tallies, ripe: np.ndarray, now: int
) -> tuple[Verdict, str]:
    """The verdict on a stage without evidence of harm."""
    minutes = (now - trial.stage_began) / 60e9
    missing = ""
    if accounts < options.least:
        missing = f"{accounts} of {options.least} accounts have matured"
    elif tallies.of("edits")[ripe].sum() and not tallies.of("labelled")[ripe].sum():
        missing = "no outcome of any edit has arrived, of either arm"
    if missing and minutes >= options.hours * 60:
        return Verdict.ROLL_BACK, f"{missing} after {options.hours:g} hours"
    if missing:
        return Verdict.HOLD, missing
    if minutes < options.minutes:
        return Verdict.HOLD, f"{minutes:.1f} of {options.minutes:g} minutes"
    reason = f"{accounts} accounts in {minutes:.1f} minutes without evidence of harm"
    return (Verdict.DONE if trial.share >= 1 else Verdict.GO_ON), reason


def _of_one_arm(tallies: Tallies, first: int) -> Tallies:
    """Tallies without the slots before `first`, and without accounts in the slots in which they changed their arm."""
    keys = np.stack([tallies.slot_N, tallies.account_N])
    _, place_N, count_K = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    keep = (count_K[place_N.ravel()] == 1) & (tallies.slot_N >= first)
    values = {name: value_N[keep] for name, value_N in tallies.values.items()}
    return Tallies(tallies.account_N[keep], tallies.arm_N[keep], tallies.slot_N[keep], tallies.cell_N[keep], values)


def _split_evidence(options: CanaryConfig, trial: CanaryTrial, tallies: Tallies, seen: np.ndarray) -> dict[str, float]:
    """The evidence on the sizes of the arms in this stage, by accounts with requests."""
    wanted = ((1 - options.holdback) * (1 - trial.share), (1 - options.holdback) * trial.share, options.holdback)
    seen = seen & (tallies.of("requests") > 0)
    sizes = [len(np.unique(tallies.account_N[seen & (tallies.arm_N == arm)])) for arm in range(3)]
    arms = [arm for arm in range(3) if wanted[arm] > 0]
    if len(arms) < 2:
        return {}
    evidence = ratio_evidence([sizes[arm] for arm in arms], [wanted[arm] for arm in arms])
    return {"sizes of the arms": evidence + math.log(options.alpha * RATIO_ALPHA / len(options.stages))}


def _harm(guardrail: Guardrail, tallies: Tallies, known: np.ndarray, alpha: float, first: int, slower: float) -> float:
    """The largest logarithm of e-value over bound, at any time so far and of both kinds."""
    groups = _groups(guardrail, tallies, known, slower)
    worst = _excess(groups.lasting, LASTING * alpha, 0.0)
    for slot, costs in groups.slots.items():
        margin = 0.0 if slot in groups.controlled else ALONE_MARGIN
        worst = max(worst, _excess(costs, alpha_of_version(slot - first + 1, (1 - LASTING) * alpha), margin))
    return worst


def _excess(costs_T: np.ndarray, alpha: float, margin: float) -> float:
    return float(log_evidence(costs_T, margin).max(initial=0.0)) + math.log(alpha)


@dataclass(frozen=True)
class _AccountGroups:
    """Differences of cost, in [-1, 1], of disjoint groups of accounts."""

    lasting: np.ndarray
    slots: dict[int, np.ndarray]
    controlled: set[int]  # slots with accounts of the control


def _groups(guardrail: Guardrail, tallies: Tallies, known: np.ndarray, slower: float) -> _AccountGroups:
    """Groups of accounts of the canary and of the control: one to one if there are equally many, else one to at most
    four. In slots without a control, its last slot takes its place, for costs that do not depend on the hour."""
    of_N = tallies.of(guardrail.of)
    rows = np.flatnonzero(known & (of_N > 0))
    rows = rows[np.lexsort((tallies.account_N[rows], tallies.cell_N[rows], tallies.slot_N[rows]))]
    rate_N = np.zeros(len(of_N))
    rate_N[rows] = tallies.of(guardrail.count)[rows] / of_N[rows]
    if guardrail.ranked:
        rate_N[tallies.arm_N == 1] /= slower
    else:
        rate_N = np.clip(rate_N, 0.0, 1.0)
    used = np.zeros(int(tallies.account_N.max(initial=-1)) + 1, bool)
    controlled = set(tallies.slot_N[tallies.arm_N == 0].tolist())
    before: dict[int, np.ndarray] = {}  # the control's last rows, by cell
    lasting: list[np.ndarray] = [np.zeros(0)]
    slots: dict[int, list[np.ndarray]] = {}
    edges = np.flatnonzero(np.diff(tallies.slot_N[rows]) | np.diff(tallies.cell_N[rows])) + 1
    for part in np.split(rows, edges) if len(rows) else ():
        slot, cell = int(tallies.slot_N[part[0]]), int(tallies.cell_N[part[0]])
        new, old = (part[tallies.arm_N[part] == arm] for arm in (1, 0))
        if slot in controlled:
            before[cell] = old
            fresh = [side[~used[tallies.account_N[side]]] for side in (new, old)]
            costs, taken = _differences(guardrail, rate_N, *fresh)
            used[tallies.account_N[taken]] = True
            lasting.append(costs)
        elif guardrail.steady:
            old = before.get(cell, old)
        costs, _ = _differences(guardrail, rate_N, new, old)
        slots.setdefault(slot, []).append(costs)
    return _AccountGroups(
        np.concatenate(lasting), {slot: np.concatenate(rows) for slot, rows in slots.items()}, controlled
    )


def _differences(
    guardrail: Guardrail, rate_N: np.ndarray, new: np.ndarray, old: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mean difference of each group, and the used rows."""
    count = min(len(new), len(old))
    if not count:
        return np.zeros(0), np.zeros(0, np.int64)
    new_GA = new[: count * min(_PARTNERS, len(new) // count)].reshape(count, -1)
    old_GB = old[: count * min(_PARTNERS, len(old) // count)].reshape(count, -1)
    difference_GAB = rate_N[new_GA][:, :, None] - rate_N[old_GB][:, None, :]
    if guardrail.ranked:
        difference_GAB = np.sign(difference_GAB)
    costs_G = difference_GAB.mean((1, 2))
    return (-costs_G if guardrail.fewer else costs_G), np.concatenate([new_GA.ravel(), old_GB.ravel()])


def kept_per_account(tallies: Tallies, known: np.ndarray, arm: int, without: np.ndarray | None = None) -> np.ndarray:
    """The share of kept tries (edits, and invalid calls, which would have been edits) of each account of an arm, by the
    `known` rows, `without` some accounts."""
    tries_N = tallies.of("edits") + tallies.of("invalid_call")
    rows = np.flatnonzero(known & (tallies.arm_N == arm) & (tries_N > 0))
    if without is not None:
        rows = rows[~np.isin(tallies.account_N[rows], without)]
    accounts, place = np.unique(tallies.account_N[rows], return_inverse=True)
    kept, tries = np.zeros(len(accounts)), np.zeros(len(accounts))
    np.add.at(kept, place, tallies.of("survived")[rows])
    np.add.at(tries, place, tries_N[rows])
    return np.clip(kept / np.maximum(tries, 1e-9), 0.0, 1.0)


def _lift(options: CanaryConfig, trial: CanaryTrial, tallies: Tallies, known: np.ndarray) -> Difference | None:
    """The look at the end of a stage, in a group-sequential test with looks at the shares of the stages. Before the end
    of the stage the result is a preview, and `better` has no meaning."""
    canary = np.unique(tallies.account_N[tallies.arm_N == 1])
    new, old = kept_per_account(tallies, known, 1), kept_per_account(tallies, known, 0, without=canary)
    if min(len(new), len(old)) < 2:
        return None
    controlled = [share for share in options.stages if share < 1]
    bounds = _bounds(tuple(controlled), alpha_of_version(trial.number, options.lift_alpha))
    bound = bounds[controlled.index(trial.share)]
    mean, deviation = float(new.mean() - old.mean()), math.sqrt(new.var(ddof=1) / len(new) + old.var(ddof=1) / len(old))
    reach = bound * deviation
    return Difference(mean, mean - reach, mean + reach, (len(new), len(old)), mean > reach)


@cache
def _bounds(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    return plan_looks([share / shares[-1] for share in shares], alpha).bounds


def holdback_lift(tallies: Tallies) -> Difference | None:
    """The difference between control and holdback, as a confidence sequence of 95 %, which holds at every look. The
    arms' sizes must keep their ratio; the sequence counts n0 n1 / (n0 + n1) units. Accounts of both arms are left
    out."""
    control, held = (np.unique(tallies.account_N[tallies.arm_N == arm]) for arm in (0, 2))
    known = ~np.isin(tallies.account_N, np.intersect1d(control, held))
    new, old = kept_per_account(tallies, known, 0), kept_per_account(tallies, known, 2)
    if min(len(new), len(old)) < 2:
        return None
    units = len(new) * len(old) / (len(new) + len(old))
    deviation = math.sqrt(units * (new.var(ddof=1) / len(new) + old.var(ddof=1) / len(old)))
    mean, reach = float(new.mean() - old.mean()), sequence_reach(deviation, int(units))
    return Difference(mean, mean - reach, mean + reach, (len(new), len(old)), mean > reach)


def _power(excess: float) -> str:
    return f"{math.exp(min(excess, 40.0)):.3g} times"
