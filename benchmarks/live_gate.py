"""Releases, simulated: how often the gate and the canary decide wrongly, and how soon harm is stopped.

gate/false-promote    share of versions worse by the margin that the gate's paired suite passes; 250 tasks, of which
                      10 % are passed by one of two equal versions alone, margin 5 points
gate/false-rollback   share of equal versions that the canary stops, at any look of any stage, over all guardrails
harm/pairs-to-stop    median pairs, one account of each arm, until 20 % undone edits instead of 10 % are stopped

The decisions are those of `etude.live.release.gate` and `etude.live.release.canary`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.table import row
from etude.config.live import CanaryConfig
from etude.evals.sequential import log_evidence
from etude.evals.suite import TaskResult
from etude.live.release.canary import (
    GUARDRAILS,
    LASTING,
    RATIO_ALPHA,
    CanaryDecision,
    CanaryTrial,
    Verdict,
    decide,
)
from etude.live.release.contrast import Difference, Tallies
from etude.live.release.gate import compare_paired

RATES = {"errors": 0.02, "invalid_call": 0.05, "stopped": 0.05, "dropped": 0.01, "followup": 0.1, "edits": 0.6}
QUICK_STAGES = CanaryConfig(stages=(0.1, 0.5, 1.0), minutes=20, least=40, holdback=0.02, slot_minutes=10, margin=0.2)


@dataclass(frozen=True)
class Population:
    """Accounts that differ: an account's rate of an event is Beta-distributed about the rate of its arm."""

    accounts: int = 800
    active: float = 0.4  # of a slot
    undone: float = 0.1
    kept: float = 0.6
    labelled: float = 0.9


@dataclass(frozen=True)
class Outcome:
    """How a simulated release ended."""

    stage: int
    share: float
    decision: CanaryDecision
    accounts: int  # of the canary, over all stages
    looks: tuple[Difference, ...]  # at the ends of stages


def release(
    rng: np.random.Generator,
    options: CanaryConfig,
    population: Population,
    worse: dict[str, float] | None = None,
    from_stage: int = 0,
    splitter: float = 1.0,
) -> Outcome:
    """One release, looked at after every slot. `worse` are rates of the canary instead of the population's, from a
    stage on; a broken `splitter` gives the canary so many times its share."""
    slot = round(options.slot_minutes * 60e9)
    people = _Accounts(rng, options, population)
    parts: list[Tallies] = []
    stage, now, began = 0, 0, 0
    seen: set[int] = set()
    looks: list[Difference] = []
    for _ in range(200):
        share = options.stages[stage]
        rates = worse if worse and stage >= from_stage else {}
        parts.append(people.slot(now // slot, min(1.0, share * splitter), rates))
        seen.update(parts[-1].account_N[parts[-1].arm_N == 1].tolist())
        now += slot
        decision = decide(options, 0.0, CanaryTrial(share, 0, began), joined(parts), now)
        if decision.verdict in (Verdict.ROLL_BACK, Verdict.DONE, Verdict.OFFER):
            return Outcome(stage, share, decision, len(seen), tuple(looks))
        if decision.verdict is Verdict.GO_ON:
            looks += [decision.lift] if decision.lift else []
            stage, began = stage + 1, now
    raise AssertionError("a simulated release did not end")


class _Accounts:
    def __init__(self, rng: np.random.Generator, options: CanaryConfig, population: Population):
        self.rng, self.options, self.population = rng, options, population
        count = population.accounts
        self.hold_N, self.arm_N = rng.random(count) < options.holdback, rng.random(count)
        self.tilt_N = rng.normal(0, 0.5, count)  # of an account's rates, on the scale of log odds

    def slot(self, number: int, share: float, worse: dict[str, float]) -> Tallies:
        """Counters of one slot."""
        rng, people = self.rng, self.population
        who = np.flatnonzero(rng.random(people.accounts) < people.active)
        arm = np.where(self.hold_N[who], 2, np.where(self.arm_N[who] < share, 1, 0))
        requests = rng.geometric(0.4, len(who)).astype(float)

        def events(name: str, of: np.ndarray, rate: float) -> np.ndarray:
            rates = np.where(arm == 1, worse.get(name, rate), rate)
            odds = np.log(rates / (1 - rates)) + self.tilt_N[who]
            return rng.binomial(of.astype(int), 1 / (1 + np.exp(-odds))).astype(float)

        values = {"requests": requests} | {name: events(name, requests, rate) for name, rate in RATES.items()}
        slower = np.where(arm == 1, worse.get("seconds", 1.0), 1.0)
        values["seconds"] = requests * slower * np.exp(rng.normal(1.0, 0.5, len(who)))
        values["applied"] = events("applied", values["edits"], 0.8)
        values["undone"] = events("undone", values["applied"], people.undone)
        values["survived"] = events("survived", values["edits"], people.kept)
        values["labelled"] = events("labelled", values["edits"], people.labelled)
        return Tallies(who, arm, np.full(len(who), number), np.zeros(len(who), int), values)


def joined(parts: list[Tallies]) -> Tallies:
    """Slots after each other."""
    columns = [np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS]
    return Tallies(*columns, {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values})


_COLUMNS = ("account_N", "arm_N", "slot_N", "cell_N")


def pairs_to_stop(rng: np.random.Generator, runs: int, old: float = 0.1, new: float = 0.2, most: int = 4000) -> float:
    """Median pairs until the guardrail of undone edits stops, at its own share of the default alpha; one edit of each
    account counts."""
    costs_RT = (rng.random((runs, most)) < new).astype(float) - (rng.random((runs, most)) < old)
    share = next(g.share for g in GUARDRAILS if g.count == "undone")
    bound = -math.log(CanaryConfig().alpha * (1 - RATIO_ALPHA) * share * LASTING)
    crossed_RT = log_evidence(costs_RT) >= bound
    first = np.where(crossed_RT.any(1), crossed_RT.argmax(1) + 1, most)
    return float(np.median(first))


def false_promotions(
    rng: np.random.Generator,
    runs: int,
    samples: int,
    margin: float = 0.05,
    worse: float | None = None,
    tasks: int = 250,
    discordant: float = 0.1,
) -> float:
    """Share of versions worse by `worse` (by default the margin) that the gate's paired suite passes. A task has a
    probability of a pass near 0 or near 1, so that one alone of two equal versions passes the share `discordant`; two
    tasks of one function have the same."""
    worse = margin if worse is None else worse
    spread = discordant / 2  # p (1 - p), the same for all tasks
    edge = 0.5 - math.sqrt(0.25 - spread)
    passed = 0
    for _ in range(runs):
        high_N = np.repeat(rng.random(tasks // 2) < 0.5, 2)
        old_N = np.where(high_N, 1 - edge, edge)
        new_N = old_N - np.where(high_N, worse / high_N.mean(), 0.0)
        old, new = (
            [TaskResult(id=str(n), function=str(n // 2), passed=tuple(row), lost=0) for n, row in enumerate(draws)]
            for draws in ((rng.random((tasks, samples)) < p_N[:, None]).tolist() for p_N in (old_N, new_N))
        )
        passed += compare_paired("suite", old, new, margin, 0.05).passed
    return passed / runs


def rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Rows and checks. Seeds are those of no test."""
    runs, versions = (40, 400) if quick else (2000, 5000)
    promoted = false_promotions(np.random.default_rng(31), versions, samples=1)
    stopped = sum(
        release(np.random.default_rng(50_000 + seed), QUICK_STAGES, Population()).decision.verdict is Verdict.ROLL_BACK
        for seed in range(runs)
    )
    pairs = pairs_to_stop(np.random.default_rng(32), max(runs, 100))
    table = [
        row("gate/false-promote", promoted, "share", f"{versions} versions worse by the margin"),
        row("gate/false-rollback", stopped / runs, "share", f"{runs} equal versions"),
        row("harm/pairs-to-stop", pairs, "pairs", f"median of {max(runs, 100)}, 10 to 20 %"),
    ]
    # `quick`: of 40 releases at 1 % 4 or more, of 400 versions at 5 % 32 or more, have probabilities below 1 in 100.
    checks = {
        "false promotion at most 5 %": promoted <= (31 / 400 if quick else 0.05),
        "false rollback at most 1 %": stopped / runs <= (3 / 40 if quick else 0.01),
        "harm stopped within 400 pairs": pairs <= 400,
    }
    return table, checks
