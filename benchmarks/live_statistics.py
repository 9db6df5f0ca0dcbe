"""The live loop's claims, simulated: how often equal versions are called better, worse ones pass the gate, and how
much can be shown.

    python -m benchmarks.live_statistics [SCENARIO ...] [--quick] [--json]

lift-N              equal versions at N accounts, called better at any look of the canary, at one-sided 2.5 %. Accounts
                    differ in activity and in what they keep, and busy ones keep more; both change with the hour
gate-KIND-F-S       versions worse by the margin (5 points) that pass the gate: 500 tasks, F of a function, S samples
                    of each. KIND: `breaks` whole functions, `spread` over all tasks, `mixed`: some functions gain
releases            100 releases, one every five hours: false ones of those found better, and the share of the better
                    ones that is found, where a third is better by three standard deviations; beside it 6 alpha/(pi k)^2
firm-equal          a firm of 500 accounts: equal versions that reach all accounts, with nobody's approval
firm-harm           the same: versions that raise undone edits from 10 to 25 % and are stopped
names-veto          20 + 20 invented names of one key, among 12,000 accounts: equal versions that they stop
names-mask          60 + 60 among 600: versions with 25 instead of 10 % undone edits that they bring to all accounts
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.live_names import firm_equal, firm_harm, names_mask, names_veto
from etude.evals import PastTest, clustered_score, level_of, needed_score
from etude.live.release.contrast import Tallies, lift_at, same_slots

STAGES = (0.01, 0.05, 0.25)
SLOTS = 3  # of twenty minutes, in each stage
ALPHA = 0.025


def called_better(seed: int, accounts: int, lift: float = 0.0) -> float:
    """Whether a version is called better at any look; `lift` is added to what its answers are kept."""
    rng = np.random.default_rng((seed, accounts))
    held_A, draw_A, active_A = rng.random(accounts) < 0.02, rng.random(accounts), rng.beta(0.8, 1.2, accounts)
    tilt_A, hour = rng.normal(0, 0.8, accounts) + active_A, rng.random() * 24
    parts: list[tuple[np.ndarray, ...]] = []
    for share in STAGES:
        for _ in range(SLOTS):
            day = math.sin(2 * math.pi * (hour + len(parts) / 3) / 24)
            who = np.flatnonzero(rng.random(accounts) < active_A * (0.6 + 0.4 * day))
            arm = np.where(held_A[who], 2, np.where(draw_A[who] < share, 1, 0))
            rate = 1 / (1 + np.exp(-(0.2 + tilt_A[who] + 0.5 * day)))
            tries = rng.geometric(0.5, len(who))
            kept = rng.binomial(tries, np.clip(rate + lift * (arm == 1), 0, 1))
            parts.append((who, arm, np.full(len(who), len(parts)), tries, kept))
        account_N, arm_N, slot_N, tries_N, kept_N = (np.concatenate(column) for column in zip(*parts, strict=True))
        values = {"edits": tries_N.astype(float), "survived": kept_N.astype(float)}
        tallies = Tallies(account_N, arm_N, slot_N, np.zeros_like(arm_N), values)
        contrast = same_slots(tallies, np.ones(len(arm_N), bool), (1, 0), "survived", "tries")
        if contrast is not None and lift_at(contrast, STAGES, share, ALPHA, 100).better:
            return 1.0
    return 0.0


def promoted(
    seed: int, kind: str, size: int, samples: int, worse: float = 0.05, margin: float = 0.05, tasks: int = 500
) -> float:
    """Whether the gate's test lets a version pass that is worse by `worse`. A task of a passing function has a
    probability of a pass near 1, of another near 0; one of two equal versions alone passes a tenth of the tasks."""
    rng = np.random.default_rng((seed, size, samples))
    functions, edge = tasks // size, 0.5 - math.sqrt(0.25 - 0.05)
    passing_F, function_N = rng.random(functions) < 0.5, np.repeat(np.arange(functions), size)
    old_F = np.where(passing_F, 1 - edge, edge)
    if kind == "breaks":
        new_F = np.where(passing_F & (rng.random(functions) < 2 * worse / (1 - edge)), 0.0, old_F)
    elif kind == "spread":
        new_F = np.where(passing_F, old_F - 2 * worse, old_F)
    else:
        moves_F = rng.random(functions)
        falls = passing_F & (moves_F < 0.05 + 2 * worse / (1 - 2 * edge))
        new_F = np.where(falls, edge, np.where(~passing_F & (moves_F < 0.05), 1 - edge, old_F))
    old_N, new_N = ((rng.random((tasks, samples)) < rate_F[function_N][:, None]).mean(1) for rate_F in (old_F, new_F))
    return float(clustered_score(new_N - old_N, function_N, margin) > needed_score([size] * functions, 0.05))


@dataclass(frozen=True)
class Found:
    """Of one line of releases: false ones of those found better, and the found share of the better ones."""

    false: float
    share: float


def releases(seed: int, adaptive: bool, better: float = 1 / 3, shift: float = 3.0, count: int = 100) -> Found:
    """A line of releases, each tested once; `adaptive`: at the level of `level_of`, else at 6 alpha / (pi k)^2."""
    rng = np.random.default_rng((seed, 9))
    good = rng.random(count) < better
    past: list[PastTest] = []
    for number, z in enumerate(rng.normal(0, 1, count) + shift * good, 1):
        level = level_of(past, 0.05) if adaptive else 6 * 0.05 / (math.pi * number) ** 2
        p = 0.5 * math.erfc(float(z) / math.sqrt(2))
        past.append(PastTest(p, p <= level))
    hits = np.array([test.better for test in past])
    return Found(float((hits & ~good).sum() / max(1, hits.sum())), float((hits & good).sum() / max(1, good.sum())))


def _false(seed: int, adaptive: bool) -> float:
    return releases(seed, adaptive).false


def _share(seed: int, adaptive: bool) -> float:
    return releases(seed, adaptive).share


@dataclass(frozen=True)
class Claim:
    """A figure of one seed, whose mean over `runs` seeds (`quick` ones) is to be at most, or at least, `bound`."""

    figure: Callable[[int], float]
    bound: float
    runs: int = 1000
    quick: int = 40
    least: bool = False

    def holds(self, mean: float) -> bool:
        """Whether the mean is within the bound."""
        return mean >= self.bound if self.least else mean <= self.bound


CLAIMS: dict[str, Claim] = {
    **{f"lift-{n}": Claim(partial(called_better, accounts=n), 0.035, quick=40 if n < 100_000 else 6)
       for n in (3_000, 30_000, 120_000)},
    **{f"gate-{kind}-{size}-{samples}": Claim(partial(promoted, kind=kind, size=size, samples=samples), 0.06)
       for kind in ("breaks", "spread", "mixed") for size in (1, 2, 5) for samples in (1, 4)},
    "releases/false": Claim(partial(_false, adaptive=True), 0.05, quick=200),
    "releases/found": Claim(partial(_share, adaptive=True), 0.5, quick=200, least=True),
    "releases/found at 1 in k^2": Claim(partial(_share, adaptive=False), 1.0, quick=200),
    "firm-equal": Claim(firm_equal, 0.95, runs=200, quick=4, least=True),
    "firm-harm": Claim(firm_harm, 0.95, runs=200, quick=4, least=True),
    "names-veto": Claim(names_veto, 0.005, runs=200, quick=2),
    "names-mask": Claim(names_mask, 0.005, runs=200, quick=4),
}  # fmt: skip


def measure(names: Sequence[str], quick: bool) -> Iterator[tuple[str, float]]:
    """The mean figure of each claim, over seeds that no test has, as they come."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {
            name: pool.map(CLAIMS[name].figure, range(70_000, 70_000 + runs_of(name, quick)), chunksize=4)
            for name in names
        }
        for name, values in futures.items():
            yield name, float(np.mean(list(values)))


def runs_of(name: str, quick: bool) -> int:
    """The number of seeds."""
    return CLAIMS[name].quick if quick else CLAIMS[name].runs


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; 1 if a figure of the full runs is beyond its bound, 2 for an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_statistics", description=__doc__)
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help="beginning of names (default: all)")
    parser.add_argument("--quick", action="store_true", help="few seeds, seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    names = [name for name in CLAIMS if not arguments.scenario or name.startswith(tuple(arguments.scenario))]
    if not names:
        print(f"no scenario begins with {arguments.scenario[0]!r}: {', '.join(CLAIMS)}", file=sys.stderr)
        return 2
    means: dict[str, float] = {}
    print("| scenario | share | bound | seeds |\n|---|---|---|---|", flush=True)
    for name, mean in measure(names, arguments.quick):
        claim, means[name] = CLAIMS[name], mean
        bound = f"{'>=' if claim.least else '<='} {claim.bound:g}"
        print(f"| {name} | {mean:.4f} | {bound} | {runs_of(name, arguments.quick)} |", flush=True)
    if arguments.json:
        print(json.dumps(means))
    return int(not arguments.quick and not all(CLAIMS[name].holds(mean) for name, mean in means.items()))


if __name__ == "__main__":
    sys.exit(main())
