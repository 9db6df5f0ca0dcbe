"""Simulated releases: accounts' counters by slot, the canary's own decision, and the harm that is left at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from etude.config.live import CanaryConfig, LabelsConfig
from etude.live.release.canary import CanaryDecision, CanaryTrial, Tallies, Verdict, decide

_DELAY = LabelsConfig().delay_seconds
_MINUTE = 60 * 10**9


@dataclass(frozen=True)
class Version:
    """The behaviour of a release. `harm(share)` is added to the share of edits that are undone, at a stage's share of
    the accounts; `silent` is the share of its edits whose client tells nothing more; `regret` moves accounts whose
    edits are undone more often than the median back to the control, with that probability."""

    harm: Callable[[float], float] = lambda share: 0.0
    silent: float = 0.0
    regret: float = 0.0


@dataclass(frozen=True)
class Crowd:
    """Names that an attacker invents, half of them wanted in each arm: all edits of those in the canary are undone, and
    none of the control's, if it wants to `veto`; else the reverse. The gateway knows `keys` accounts of them; 0: it
    takes every name for an account, and tells its arm."""

    names: int
    veto: bool
    keys: int = 1


@dataclass(frozen=True)
class Rollout:
    """The end of a release: `reason` of the last decision, the stage's share, and over the accounts at the end the
    share of undone edits and of accounts whose client is silent. `slots` that it took."""

    released: bool
    reason: str
    share: float
    undone: float
    silent: float
    slots: int = 0


def roll_out(
    rng: np.random.Generator,
    version: Version,
    options: CanaryConfig,
    *,
    accounts: int = 12_000,
    ignored: str = "",
    crowd: Crowd | None = None,
) -> Rollout:
    """A release from its first stage to the last, to its rollback or to a person. `ignored` is a check of the canary
    that is off."""
    hash_A, usual_A = rng.random(accounts), rng.beta(2, 18, accounts)
    moved_A = (usual_A > np.median(usual_A)) & (rng.random(accounts) < version.regret)
    blocks: list[tuple[np.ndarray, ...]] = []
    crowd_K = rng.random(crowd.keys) if crowd else np.zeros(0)
    slot, length = 0, round(options.slot_minutes)
    delay = -(-round(_DELAY / 60) // length)  # slots until a slot has matured
    decision = CanaryDecision(Verdict.HOLD, "")
    for share in options.stages:
        began = slot
        while True:
            arm_A = np.where(hash_A >= 1 - options.holdback, 2, np.where(hash_A < share * (1 - options.holdback), 1, 0))
            arm_A = np.where((arm_A == 1) & moved_A & (share < 1), 0, arm_A)
            blocks.append(_slot(rng, usual_A, arm_A, version, share, slot))
            if crowd is not None:
                blocks.append(_crowded(crowd, crowd_K, accounts, share * (1 - options.holdback), slot))
            slot += 1
            if slot - began > delay:
                trial = CanaryTrial(share, 0, began * length * _MINUTE, accounts=accounts)
                decision = _decide(options, trial, blocks, slot * length * _MINUTE, ignored)
            if decision.verdict is not Verdict.HOLD:
                break
        if decision.verdict is not Verdict.GO_ON:
            break
        decision = CanaryDecision(Verdict.HOLD, "")
    released = decision.verdict is Verdict.DONE
    bad = version.harm(1.0) if released else 0.0
    silent = version.silent if released else 0.0
    return Rollout(released, decision.reason, share, float(usual_A.mean()) + bad, silent, slot)


def _decide(
    options: CanaryConfig, trial: CanaryTrial, blocks: list[tuple[np.ndarray, ...]], now: int, ignored: str
) -> CanaryDecision:
    """The canary's decision, or what it would be without the check `ignored`; without "canary" there is none."""
    on = CanaryDecision(Verdict.DONE if trial.share >= 1 else Verdict.GO_ON, f"without {ignored}")
    if ignored == "canary":
        return on
    decision = decide(options, _DELAY, trial, _join(blocks), now)
    others = [e for name, e in decision.evidence.items() if name != ignored]
    stopped = decision.evidence.get(ignored, -1.0) >= 0 and max(others, default=-1.0) < 0
    return on if stopped else decision


def _slot(
    rng: np.random.Generator, usual_A: np.ndarray, arm_A: np.ndarray, version: Version, share: float, slot: int
) -> tuple[np.ndarray, ...]:
    """Counters of the accounts that are active in a slot: account, arm, slot, then values in the order of `_NAMES`."""
    active = np.flatnonzero(rng.random(len(arm_A)) < 0.5)
    arm, canary = arm_A[active], arm_A[active] == 1
    requests = 1 + rng.poisson(2.0, len(active))
    edits = rng.binomial(requests, 0.8)
    heard = rng.binomial(edits, np.where(canary, 1.0 - version.silent, 1.0) * 0.95)
    undone = rng.binomial(heard, np.clip(usual_A[active] + np.where(canary, version.harm(share), 0.0), 0, 1))
    kept = rng.binomial(heard - undone, 0.8)
    return (active, arm, np.full(len(active), slot), requests, edits, edits, heard, undone, kept)


def _crowded(crowd: Crowd, hash_K: np.ndarray, first: int, share: float, slot: int) -> tuple[np.ndarray, ...]:
    """Counters of the crowd's accounts in a slot: ten requests for each name."""
    if crowd.keys:
        arm, of = np.where(hash_K < share, 1, 0), crowd.names // crowd.keys
    else:
        arm, of = np.arange(crowd.names) % 2 if share < 0.9 else np.ones(crowd.names, np.int64), 1
    requests = np.full(len(arm), 10 * of)
    undone = np.where((arm == 1) == crowd.veto, requests, 0)
    where = (first + np.arange(len(arm)), arm, np.full(len(arm), slot))
    return (*where, requests, requests, requests, requests, undone, requests - undone)


_NAMES = ("requests", "edits", "applied", "labelled", "undone", "survived")


def _join(blocks: list[tuple[np.ndarray, ...]]) -> Tallies:
    account, arm, slot, *values = (np.concatenate(column) for column in zip(*blocks, strict=True))
    named = {name: value.astype(float) for name, value in zip(_NAMES, values, strict=True)}
    return Tallies(account, arm, slot, np.zeros(len(account), np.int64), named)
