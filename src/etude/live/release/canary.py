"""The canary's decision: whether a release goes on to more accounts, holds, or is rolled back.

A pure function of the accounts' counters. Accounts are randomised, so an account is the unit: an account of the canary
is paired with accounts of the control that were active in the same slot of time and cell, and the differences of their
costs feed two kinds of e-process per guardrail:

    lasting   every account counts once in the whole release, in the first slot in which it has a partner
    slot      every account of one slot counts; slots share alpha as 1, 1/4, 1/9, ... so harm that begins late is seen
    grown     all slots of all accounts (`contrast.same_slots`): few accounts that come often show harm, too

All e-processes, and the test of the arms' sizes, together spend `canary.alpha`: the probability that an equal version
is stopped. A stop is not corrected over versions; the claim that a version is better is (`etude.evals.level_of`). A
tenant with at most half of the pairs gives at most the share `_ALONE` of the evidence that stops a release.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from etude.config.live import CanaryConfig
from etude.evals import alpha_of_slot, log_evidence, ratio_evidence
from etude.live.release.contrast import ARMS, OWN, Difference, Tallies, lift_at, same_slots, tenants_of

SUMMED = ("seconds", "followup", "survived")
"""Tallies whose value is `total`; the value of others is `count`."""
RATIO_ALPHA = 0.1
"""Share of alpha for the sizes of the arms; the guardrails have the rest."""
ALONE_MARGIN = 0.05
"""The increase in cost, over the control's last slot, that is allowed once all accounts have the release."""
LASTING, SLOTS, GROWN = 0.5, 0.25, 0.25  # shares of a guardrail's alpha for the three kinds
_PARTNERS = 4  # accounts of one arm in a group, at most
_ALONE = 0.9
_REACHED = 0.5  # share of the accounts that a stage could reach, of which it waits for at most `canary.least`
_UNITS = 25  # accounts, n0 n1 / (n0 + n1), from which means are about normal


class Verdict(StrEnum):
    """The verdict on a stage."""

    GO_ON = "go on"
    HOLD = "hold"
    OFFER = "offer"  # a person decides: neither better nor worse by more than the margin could be shown
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
    Guardrail("errors", "failed", "asked", 1 / 8),
    Guardrail("invalid calls", "invalid_call", "requests", 1 / 16),
    Guardrail("stops", "stopped", "requests", 1 / 16),
    Guardrail("dropped records", "dropped", "requests", 1 / 16),
    Guardrail("latency", "seconds", "requests", 1 / 16, ranked=True),
    Guardrail("more edits", "edits", "requests", 1 / 16),
    Guardrail("fewer edits", "edits", "requests", 1 / 16, fewer=True),
)


class TallyRow(NamedTuple):
    """A row of the table `tallies`: `account` is the one that a key vouches for, `cell` its tenant."""

    arm: str
    account: str
    slot: int
    name: str
    count: int
    total: float
    cell: str = ""


def tallies_of(rows: Iterable[TallyRow]) -> Tallies:
    """Rows of the table as arrays."""
    rows = list(rows)
    accounts = sorted({row.account for row in rows}, key=lambda name: hashlib.blake2b(name.encode()).digest())
    codes = {name: code for code, name in enumerate(accounts)}
    cells = {name: code for code, name in enumerate(sorted({row.cell for row in rows}))}
    places: dict[tuple[int, int, int, int], int] = {}
    cells_by_name: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        key = (codes[row.account], ARMS.index(row.arm), row.slot, cells[row.cell])
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
    """The stage of a release on trial. Times are nanoseconds; `share` is the stage's share of accounts. `alpha`: the
    one-sided level of its claim to be better. `accounts`: that were active in the week before; 0: unknown."""

    share: float
    began: int  # the release
    stage_began: int
    alpha: float = 0.025
    accounts: int = 0


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
    lift, controlled = None, [share for share in options.stages if share < 1]
    if trial.share in controlled:
        contrast = same_slots(tallies, tallies.slot_N < matured, (1, 0), "survived", "tries")
        if contrast is not None:
            lift = lift_at(contrast, controlled, trial.share, trial.alpha, options.least)
    worst = max(evidence, key=lambda name: evidence[name])
    if evidence[worst] >= 0:
        reason = f"{worst}: e-value {_power(evidence[worst])} its bound"
        return CanaryDecision(Verdict.ROLL_BACK, reason, accounts, evidence, lift)
    shown = lift if trial.share == max(controlled, default=0.0) else None
    verdict, reason = _progress(options, trial, accounts, tallies, ripe, now, shown)
    return CanaryDecision(verdict, reason, accounts, evidence, lift)


def _progress(
    options: CanaryConfig,
    trial: CanaryTrial,
    accounts: int,
    tallies: Tallies,
    ripe: np.ndarray,
    now: int,
    lift: Difference | None,
) -> tuple[Verdict, str]:
    """The verdict on a stage without evidence of harm; `lift` is that of the last stage with a control."""
    minutes, missing = (now - trial.stage_began) / 60e9, ""
    least = accounts_wanted(options, trial.share, trial.accounts)
    if accounts < least:
        missing = f"{accounts} of {least} accounts have matured"
    elif tallies.of("edits")[ripe].sum() and not tallies.of("labelled")[ripe].sum():
        missing = "no outcome of any edit has arrived, of either arm"
    late = minutes >= options.hours * 60
    if missing:
        return (Verdict.ROLL_BACK, f"{missing} after {options.hours:g} hours") if late else (Verdict.HOLD, missing)
    if minutes < options.minutes:
        return Verdict.HOLD, f"{minutes:.1f} of {options.minutes:g} minutes"
    if lift is not None and not lift.better and lift.worst > options.margin:
        wanted = f"{100 * options.margin:g} points are wanted"
        worst = f"edits kept may be fewer by {100 * lift.worst:.1f} points, at most {wanted}"
        return (Verdict.OFFER, f"{worst}, after {options.hours:g} hours") if late else (Verdict.HOLD, worst)
    reason = f"{accounts} accounts in {minutes:.1f} minutes without evidence of harm"
    return (Verdict.DONE if trial.share >= 1 else Verdict.GO_ON), reason


def accounts_wanted(options: CanaryConfig, share: float, known: int) -> int:
    """The accounts that a stage of this share waits for, of `known` ones. A small firm's early stages reach too few for
    any proof, and wait for none; its last stage with a control waits for half of those that it reaches."""
    reach = math.floor(_REACHED * share * (1 - options.holdback) * known)
    if not known or reach >= options.least:
        return options.least
    proof = max((share for share in options.stages if share < 1), default=1.0)
    return 0 if share < proof else max(2, reach)


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
    """The largest logarithm of e-value over bound: at any time so far of pairs, now of all slots."""
    groups = _groups(guardrail, tallies, known, slower)
    worst = _excess(groups.lasting, LASTING * alpha, 0.0)
    for slot, pairs in groups.slots.items():
        margin = 0.0 if slot in groups.controlled else ALONE_MARGIN
        worst = max(worst, _excess(pairs, alpha_of_slot(slot - first + 1, SLOTS * alpha), margin))
    if guardrail.ranked:
        return worst
    arms = (0, 1) if guardrail.fewer else (1, 0)
    return max(worst, _grown(guardrail, tallies, known, arms, GROWN * alpha))


def _grown(guardrail: Guardrail, tallies: Tallies, known: np.ndarray, arms: tuple[int, int], alpha: float) -> float:
    """Logarithm of e-value over bound of all slots. What stops a release does so without each smaller tenant, too, but
    for the share `_ALONE`."""
    bound = -math.log(alpha)

    def evidence(rows: np.ndarray) -> float:
        contrast = same_slots(tallies, rows, arms, guardrail.count, guardrail.of)
        return 0.0 if contrast is None or contrast.units < _UNITS else contrast.evidence

    least = evidence(known) if tallies.of(guardrail.count).any() else 0.0
    if least >= bound:
        tenant_N = tenants_of(tallies)
        for tenant in np.unique(tenant_N[tenant_N >= 0]):
            others = known & (tenant_N != tenant)
            if 2 * len(np.unique(tallies.account_N[~others & known])) <= len(np.unique(tallies.account_N[known])):
                least = min(least, evidence(others) + _ALONE * bound)
    return least - bound


def _excess(pairs: _Pairs, alpha: float, margin: float) -> float:
    """The largest logarithm of e-value over bound so far. The evidence of tenants is multiplied; small tenants have one
    e-process together."""
    costs_T, bound = pairs.costs_T, -math.log(alpha)
    if not len(costs_T):
        return -bound
    share_C = np.bincount(pairs.cell_T) / len(costs_T)
    kind_T = np.where(share_C[pairs.cell_T] >= OWN, pairs.cell_T, -1)
    kinds, path_T = np.unique(kind_T), np.zeros(len(costs_T))
    for kind in kinds:
        at = np.flatnonzero(kind_T == kind)
        path = np.append(0.0, log_evidence(costs_T[at], margin))
        if len(kinds) > 1 and kind >= 0 and share_C[kind] <= 0.5:
            path = np.minimum(path, _ALONE * bound)
        path_T += path[np.searchsorted(at, np.arange(len(costs_T)), side="right")]
    return float(path_T.max(initial=0.0)) - bound


@dataclass(frozen=True)
class _Pairs:
    """Differences of cost, in [-1, 1], of disjoint groups of accounts, and their cells."""

    costs_T: np.ndarray
    cell_T: np.ndarray


def _pairs(parts: list[tuple[np.ndarray, int]]) -> _Pairs:
    costs = [part for part, _ in parts]
    cells = [np.full(len(part), cell) for part, cell in parts]
    return _Pairs(np.concatenate([np.zeros(0), *costs]), np.concatenate([np.zeros(0, np.int64), *cells]))


@dataclass(frozen=True)
class _AccountGroups:
    """Pairs of the whole release, and of each slot."""

    lasting: _Pairs
    slots: dict[int, _Pairs]
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
    lasting: list[tuple[np.ndarray, int]] = []
    slots: dict[int, list[tuple[np.ndarray, int]]] = {}
    edges = np.flatnonzero(np.diff(tallies.slot_N[rows]) | np.diff(tallies.cell_N[rows])) + 1
    for part in np.split(rows, edges) if len(rows) else ():
        slot, cell = int(tallies.slot_N[part[0]]), int(tallies.cell_N[part[0]])
        new, old = (part[tallies.arm_N[part] == arm] for arm in (1, 0))
        if slot in controlled:
            before[cell] = old
            fresh = [side[~used[tallies.account_N[side]]] for side in (new, old)]
            costs, taken = _differences(guardrail, rate_N, *fresh)
            used[tallies.account_N[taken]] = True
            lasting.append((costs, cell))
        elif guardrail.steady:
            old = before.get(cell, old)
        costs, _ = _differences(guardrail, rate_N, new, old)
        slots.setdefault(slot, []).append((costs, cell))
    return _AccountGroups(_pairs(lasting), {slot: _pairs(parts) for slot, parts in slots.items()}, controlled)


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


def _power(excess: float) -> str:
    return f"{math.exp(min(excess, 40.0)):.3g} times"
