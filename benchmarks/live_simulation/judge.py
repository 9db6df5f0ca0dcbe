"""The figure of a scenario for one seed, with the stage that stops its fault on or off; and the table of all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import msgspec
import numpy as np

from benchmarks.live_simulation import bandit, faults
from benchmarks.live_simulation.rollouts import Rollout, Version, roll_out
from benchmarks.live_simulation.scenarios import Scenario, named
from benchmarks.live_simulation.traffic import CELLS, Signals, Turns, WindowLog, react, records, serve
from benchmarks.live_simulation.windows import DROPPED, LIVE, NULL, ORACLE, PLUS, TURNS, ZERO, LearningRun, Setting, run
from etude.config.live import CanaryConfig, LabelsConfig
from etude.evals import clustered_score
from etude.live.learn.attribution import labels
from etude.live.learn.timeline import distinct
from etude.live.log.records import Label, LabelState
from etude.live.log.scrub import scrubbed
from etude.live.simulate.users import SimulatedAccounts, draw_population

CANARY = CanaryConfig(slot_minutes=30.0, least=40)
_SUITE = 8000
_MARGIN = 0.01
_DRIFT = 0.003
TREATMENTS = {PLUS: "silence = +1", ZERO: "silence = 0", DROPPED: "silent turns dropped"}


@cache
def _run(seed: int, setting: Setting) -> LearningRun:
    return run(seed, setting)


def _share(name: str, variants: tuple[int, ...] = (0, 1, 2)) -> Callable[[int, Setting], float]:
    return lambda seed, setting: bandit.share_of(_run(seed, setting).logits[-1][:CELLS], name, variants)


def _against_clean(seed: int, setting: Setting) -> float:
    clean = _run(seed, Setting(versions=setting.versions, turns=setting.turns))
    return _run(seed, setting).utility[-1] / clean.utility[-1]


def _gain_kept(seed: int, setting: Setting) -> float:
    """Gain, as a share of that without the attacker's turns."""
    honest = _run(seed, Setting(fault="honest", versions=setting.versions, turns=setting.turns))
    return _run(seed, setting).gain / honest.gain


def _probe(seed: int, setting: Setting) -> float:
    first, *_, last = (float(bandit.probabilities(theta)[CELLS, 0, 0]) for theta in _run(seed, setting).logits)
    return abs(last - first)


def _first_window(seed: int, setting: Setting) -> tuple[np.random.Generator, SimulatedAccounts, Turns, Signals]:
    rng = np.random.default_rng((seed, 6))
    population = draw_population(rng)
    turns = serve(rng, population, bandit.probabilities(bandit.first_policy()), setting.turns)
    return rng, population, turns, react(rng, population, turns)


def _labels_that_differ(seed: int, setting: Setting) -> float:
    """Share of the turns whose label is another than that of the clean log."""
    rng, population, turns, signals = _first_window(seed, setting)
    if setting.fault == "reordered":
        signals = faults.second_thoughts(signals)
    dirty = {
        "clock-skew": lambda: faults.skewed(signals, turns, population),
        "reordered": lambda: faults.reordered(rng, signals),
    }[setting.fault]()
    log, other = records(population, turns, signals, 0), records(population, turns, dirty, 0)
    if not setting.guarded:
        other = faults.trusting(other, setting.fault)
    pairs = zip(_labels(log), _labels(other), strict=True)
    return float(np.mean([(a.state, a.reward) != (b.state, b.reward) for a, b in pairs]))


def _labels(log: WindowLog) -> list[Label]:
    rated = [turn.id for turn in log.turns]
    return labels(log.sessions, log.turns, log.suggestions, log.signals, log.cut, LabelsConfig(), rated=rated)


def _counted_twice(seed: int, setting: Setting) -> float:
    """Share of the signals that count more often than they were meant."""
    rng, population, turns, signals = _first_window(seed, setting)
    log, other = records(population, turns, signals, 0), records(population, turns, faults.duplicated(rng, signals), 0)
    written = other.signals
    if not setting.guarded:
        written = [msgspec.structs.replace(s, event=str(n)) for n, s in enumerate(written)]
    return len(distinct(written, 2**62)) / len(distinct(log.signals, 2**62)) - 1.0


def _mean_error(seed: int, setting: Setting) -> float:
    """Error of the mean reward of edits where signals are late, against that of the clean log."""
    _, population, turns, signals = _first_window(seed, setting)
    means: list[float] = []
    for sent in (signals, faults.delayed(signals)):
        rows = _labels(records(population, turns, sent, 0))
        edits = [label for label, action in zip(rows, turns.action_N, strict=True) if action in (0, 1, 2, 3, 6)]
        if sent is not signals and not setting.guarded:  # no news is good news
            values = [(0.65, 1.0) if x.state == LabelState.CENSORED else (x.reward, 1.0) for x in edits]
        else:
            values = [(x.reward, x.weight) for x in edits if x.state == LabelState.MATURED]
        reward, weight = np.array(values).T
        means.append(float(reward @ weight / weight.sum()))
    return abs(means[1] - means[0])


def _released_harm(seed: int, setting: Setting) -> float:
    since = {"bad-at-1": 0.01, "bad-at-5": 0.05, "bad-at-25": 0.25, "bad-at-100": 1.0}[setting.fault]
    ended = _rollout(seed, setting, Version(lambda share: 0.15 * (share >= since)), "canary", "undone edits")
    return ended.undone


def _rollout(seed: int, setting: Setting, version: Version, off: str, check: str) -> Rollout:
    """A release, with the check `off` ignored unless guarded; one that another check stops counts as if nothing had."""
    ended = roll_out(np.random.default_rng((seed, 7)), version, CANARY, ignored="" if setting.guarded else off)
    by_another = setting.guarded and not ended.reason.startswith(check)
    return replace(ended, undone=1.0, silent=1.0) if by_another else ended


def _splitter(seed: int, setting: Setting) -> float:
    check = "sizes of the arms"
    return _rollout(seed, setting, Version(lambda share: 0.04, regret=0.9), check, check).undone


def _silent(seed: int, setting: Setting) -> float:
    check = "edits without an outcome"
    return _rollout(seed, setting, Version(silent=0.7), check, check).silent


def _slow_regression(seed: int, setting: Setting) -> float:
    """Points of correctness lost where each candidate fails another 0.3 % of the tasks than the one that is served,
    by chance, and each is compared with the incumbent and with the anchor, at twice the margin."""
    rng = np.random.default_rng((seed, 8))
    anchor = rng.random(_SUITE) < 0.5
    served, lost, kept = anchor, 0.0, 0.0
    for _ in range(setting.versions):
        lost = kept + _DRIFT
        flips = rng.random((2, _SUITE)) < 0.003  # noise of its answers, in both directions alike
        new = np.where(served, ~flips[0] & (rng.random(_SUITE) >= 2 * _DRIFT), flips[1])
        if _no_worse(new, served, _MARGIN) and (not setting.guarded or _no_worse(new, anchor, 2 * _MARGIN)):
            served, kept = new, lost
    return 100 * kept


def _no_worse(new: np.ndarray, old: np.ndarray, margin: float) -> bool:
    return clustered_score(new.astype(float) - old, np.arange(len(new)), margin) > 1.645


def _secret(seed: int, setting: Setting) -> float:
    """Planted keys in the requests that are kept."""
    rng = np.random.default_rng((seed, 9))
    letters = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
    keys = ["AKIA" + "".join(rng.choice(letters, 16)) for _ in range(100)]
    texts = [f"Fix the upload: it still has aws_key = '{key}' in line {n}." for n, key in enumerate(keys)]
    kept = [scrubbed(text)[0] for text in texts] if setting.guarded else texts
    return float(sum(key in text for key, text in zip(keys, kept, strict=True)))


FIGURES: dict[str, Callable[[int, Setting], float]] = {
    "discard-hack": _share("broken"),
    "question-hack": _share("question", (0, 1)),
    "short-edit-hack": _share("tiny"),
    "flattery": _share("flatter"),
    "sybils": _against_clean,
    "one-key": _gain_kept,
    "five-keys": _gain_kept,
    "lone-voter": _probe,
    "clock-skew": _labels_that_differ,
    "reordered": _labels_that_differ,
    "duplicates": _counted_twice,
    "delayed": _mean_error,
    "broken-splitter": _splitter,
    "silent-client": _silent,
    "slow-regression": _slow_regression,
    "secret": _secret,
    "bad-at-1": _released_harm,
    "bad-at-5": _released_harm,
    "bad-at-25": _released_harm,
    "bad-at-100": _released_harm,
}


@dataclass(frozen=True)
class Row:
    """A scenario over seeds: figures with the stage and without it, and in how many seeds the fault was stopped and
    its damage showed."""

    scenario: Scenario
    on: list[float]
    off: list[float]

    @property
    def stopped(self) -> int:
        """Seeds in which the stage stopped the fault."""
        return sum(self.scenario.stopped(value) for value in self.on)

    @property
    def shown(self) -> int:
        """Seeds in which the damage showed without the stage."""
        return sum(self.scenario.shows(value) for value in self.off)


def judge(name: str, seeds: Iterable[int], versions: int = 10, turns: int = 0) -> Row:
    """A scenario over seeds. `turns` of a window, by default those of the scenario. Raises KeyError for a name that is
    none."""
    scenario, figure = named(name), FIGURES[name]
    count = turns or scenario.turns or TURNS
    values = [
        [figure(seed, Setting(fault=name, guarded=on, versions=versions, turns=count)) for seed in seeds]
        for on in (True, False)
    ]
    return Row(scenario, *values)


@dataclass(frozen=True)
class Clean:
    """Hidden utility before and after, by what was learned from, one entry a seed."""

    start: list[float]
    end: dict[str, list[float]]

    def share(self, rewards: str) -> float:
        """Mean gain as a share of the oracle's."""
        start = np.mean(self.start)
        return float((np.mean(self.end[rewards]) - start) / (np.mean(self.end[ORACLE]) - start))


def compare(seeds: Sequence[int], versions: int = 10, turns: int = TURNS) -> Clean:
    """The live loop without a fault beside the oracle, the null and the naive treatments of silence."""
    runs = {
        rewards: [_run(seed, Setting(rewards, versions=versions, turns=turns)) for seed in seeds]
        for rewards in (LIVE, ORACLE, NULL, PLUS, ZERO, DROPPED)
    }
    return Clean([r.utility[0] for r in runs[LIVE]], {k: [r.utility[-1] for r in v] for k, v in runs.items()})


def simulate(
    names: Sequence[str], seeds: Sequence[int], versions: int = 10, turns: int = 0
) -> tuple[Clean | None, list[Row]]:
    """Scenarios ("clean" among them or not) over seeds, on all cores. Raises KeyError for a name that is none."""
    rows = {name: Row(named(name), [], []) for name in names if name != "clean"}
    clean = Clean([], {rewards: [] for rewards in (LIVE, ORACLE, NULL, PLUS, ZERO, DROPPED)})
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compared = [pool.submit(compare, [seed], versions, turns or TURNS) for seed in seeds if "clean" in names]
        judged = {name: [pool.submit(judge, name, [seed], versions, turns) for seed in seeds] for name in rows}
        for future in compared:
            part = future.result()
            clean.start.extend(part.start)
            for rewards, values in part.end.items():
                clean.end[rewards].extend(values)
        for name, all_futures in judged.items():
            for row in (future.result() for future in all_futures):
                rows[name].on.extend(row.on)
                rows[name].off.extend(row.off)
    return (clean if compared else None), list(rows.values())
