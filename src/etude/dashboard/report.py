"""The result of a run: the format of `report.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from etude.dashboard.text import percent
from etude.evals import Estimate, EvalResult, compare
from etude.ledger import FlaggedEpisode, ImpossibleCounts
from etude.records import Population, Record
from etude.rollout import Shift

if TYPE_CHECKING:
    from etude.ledger import GroupResult

CLOCKED = 0.02  # a report mentions a larger share of episodes ended by the wall time
LATER = 10  # from this step on groups are counted separately: before, the curriculum knows no task


class Utilisation(Record, frozen=True):
    """Share of the training time in which each kind of process computed, 0 to 1."""

    trainer: float
    engine: float


class MismatchSummary(Record, frozen=True):
    """Trainer against engine log-probabilities: means of k2 and k3, and the largest difference. Null: not measured."""

    k2: float | None
    k3: float | None
    max_abs: float | None


class CheatingFigures(Record, frozen=True):
    """Flags that the detectors gave to training episodes, by the names in grading/cheats.py."""

    flags: dict[str, int]  # episodes by flag
    violations: int  # episodes with at least one violation
    rewarded: int  # violations with a reward above zero; always 0
    flagged: tuple[FlaggedEpisode, ...]  # the last episodes with a violation
    impossible: ImpossibleCounts
    impossible_bound: float | None  # share of cheats that is still possible at 95 %; null if some were passed
    shifts: tuple[Shift, ...]


class RunSetup(Record, frozen=True):
    """The configuration of the run and the hardware it ran on."""

    name: str = ""
    model: str = ""
    dataset: str = ""
    hardware: str = ""


class WeightFigures(Record, frozen=True):
    """Sizes of the published versions, and the pauses of the engines at their swaps."""

    bytes_whole: int = 0  # of one whole version
    pauses: dict[int, float] = msgspec.field(default_factory=dict)  # pauses of engines in ms, by version


class HeldOutSide(Record, frozen=True):
    """One evaluation of the held-out tasks."""

    interval: Estimate  # pass@1
    pass_k: dict[int, float]
    behaviour: dict[str, float]  # means per episode
    outcomes: dict[str, int]  # episodes by outcome


class RepositoryFigures(Record, frozen=True):
    """pass@1 on the held-out tasks of one repository."""

    before: Estimate | None = None
    after: Estimate | None = None


class DamageFigures(Record, frozen=True):
    """pass@1 on the held-out tasks whose programs were broken in one way."""

    tasks: int
    before: float | None = None
    after: float | None = None


class ChangedTask(Record, frozen=True):
    """The pass rates of one held-out task."""

    id: str
    before: float
    after: float


class TrainingFigures(Record, frozen=True):
    """Figures of the training tasks. General learning shows in tasks played for the first time, memorised answers in
    tasks played again."""

    tasks: int  # that were played
    groups: int
    new: tuple[float, float] | None  # pass rate of the first group of each task: first and last quarter of the tasks
    again: int  # tasks of two groups or more
    first: float | None  # pass rate of the first group of a task that was played again, mean over the tasks
    last: float | None  # the same of its last group
    teach: float  # share of the groups whose members' rewards differ
    teach_later: float | None  # the same from step 10 on; null for a shorter run
    entropy: tuple[float, float] | None  # nats per sampled token, of the first and of the last step


class HeldOutFigures(Record, frozen=True):
    """The evaluations before and after training; null where one was left out."""

    before: HeldOutSide | None = None
    after: HeldOutSide | None = None
    tasks: int = 0
    functions: int = 0
    samples: int = 0  # episodes per task
    better: int = 0  # tasks that pass more often after training
    worse: int = 0
    repositories: dict[str, RepositoryFigures] = msgspec.field(default_factory=dict)  # empty if all are of one
    damage: dict[str, DamageFigures] = msgspec.field(default_factory=dict)  # by mutation operator, or kind of task
    unlearned: tuple[ChangedTask, ...] = ()  # tasks that pass less often than before, the greatest losses first


class RunReport(Record, frozen=True):
    """The content of `report.json`. Shares are 0 to 1, times in seconds; a figure that was not measured is null or
    empty."""

    seed: int
    seconds: float
    pass_before: float | None  # pass@1 on the held-out tasks
    pass_after: float | None
    paired_diff: Estimate | None  # after minus before, 95 %, clustered by function
    steps: int
    episodes: dict[str, int]  # training episodes by outcome
    versions: int
    bytes_published: int
    utilisation: Utilisation
    mismatch: MismatchSummary
    checks: dict[str, bool]  # at least ledger_conserved, weights_digest_served, tokens_prefix_property

    best: int | None = None  # the version that `etude serve RUN` takes
    serve: str = ""  # the command that serves it
    silent: float | None = None  # share of the groups without a gradient, since their members' rewards were equal
    notes: tuple[str, ...] = ()  # changes to make before the next run
    setup: RunSetup = RunSetup()
    stages: dict[str, float] = msgspec.field(default_factory=dict)  # seconds by stage
    held_out: HeldOutFigures = HeldOutFigures()
    training: TrainingFigures | None = None  # null if nothing was trained on
    trained: Population | None = None  # episodes of the groups that were trained on
    generated: Population | None = None  # all episodes that ended
    weights: WeightFigures = WeightFigures()
    cheating: CheatingFigures | None = None
    recovered: dict[str, int] = msgspec.field(default_factory=dict)  # by episodes' journals: `ledger.schema.RECOVERY`


def held_out_figures(before: EvalResult | None, after: EvalResult | None) -> tuple[HeldOutFigures, Estimate | None]:
    """The figures of the two evaluations, either of which may have been left out, and their paired difference."""
    measured = after or before
    if measured is None:
        return HeldOutFigures(), None
    both = compare(before, after) if before is not None and after is not None else None
    figures = HeldOutFigures(
        before=_side(before),
        after=_side(after),
        tasks=len(measured.tasks),
        functions=len({task.function for task in measured.tasks}),
        samples=measured.samples,
        better=both.better if both else 0,
        worse=both.worse if both else 0,
        repositories={
            name: RepositoryFigures(
                before=before and before.repositories.get(name), after=after and after.repositories.get(name)
            )
            for name in measured.repositories
        },
        damage=_by_damage(before, after),
        unlearned=_unlearned(before, after),
    )
    return figures, both.difference if both else None


def training_figures(
    groups: Sequence[GroupResult], steps: Sequence[Mapping[str, Any]], repositories: Mapping[str, str]
) -> TrainingFigures | None:
    """The figures of the groups that were trained on, in the order of training, and of their steps: lines of
    metrics.jsonl. `repositories` has the repository of each task: repositories differ in difficulty and come at
    different times."""
    rates: dict[str, list[float]] = {}
    for group in groups:
        if group.episodes:
            rates.setdefault(group.task_id, []).append(group.passed / group.episodes)
    if not rates or not steps:
        return None
    again = [own for own in rates.values() if len(own) > 1]
    later = [step for step in steps if step["step"] >= LATER]
    entropies = [step["entropy/mean"] for step in steps if "entropy/mean" in step]
    return TrainingFigures(
        tasks=len(rates),
        groups=sum(map(len, rates.values())),
        new=_quarters(rates, repositories),
        again=len(again),
        first=_mean([own[0] for own in again]),
        last=_mean([own[-1] for own in again]),
        teach=_teach(steps),
        teach_later=_teach(later) if later else None,
        entropy=(entropies[0], entropies[-1]) if entropies else None,
    )


def _quarters(rates: Mapping[str, Sequence[float]], repositories: Mapping[str, str]) -> tuple[float, float] | None:
    """The mean rate of first groups in the first and in the last quarter of each repository's tasks, in order of play.
    A repository counts by its number of tasks."""
    met: dict[str, list[float]] = {}
    for task, own in rates.items():
        met.setdefault(repositories.get(task, ""), []).append(own[0])
    early = [rate for own in met.values() for rate in own[: len(own) // 4]]
    late = [rate for own in met.values() for rate in own[len(own) - len(own) // 4 :]]
    return (fmean(early), fmean(late)) if early else None


def _teach(steps: Sequence[Mapping[str, Any]]) -> float:
    groups = sum(step["rollout/groups"] for step in steps)
    return 1 - sum(step["rollout/zero_variance"] for step in steps) / groups if groups else 0.0


def best_version(newest: int, difference: Estimate | None) -> int:
    """The newest version, unless it was measured to be worse than version 0 with 95 % confidence."""
    return 0 if difference is not None and difference.high < 0 else newest


def silence_advice(silent: float, pass_rate: float, warn: float) -> str | None:
    """Advice if more than the share `warn` of the groups had no gradient; `pass_rate` is the pass rate of all
    episodes."""
    if silent <= warn:
        return None
    if pass_rate < 0.2:
        why, cure = "the tasks are too hard", "give easier ones, or a model that was fine-tuned before"
    elif pass_rate > 0.8:
        why, cure = "the tasks are too easy", "give harder ones"
    else:
        why, cure = "most tasks pass always or never", "give tasks in between"
    return (
        f"{percent(silent, 0)} of the groups teach nothing: all their members got the same reward. "
        f"{percent(pass_rate, 0)} of all episodes pass, so {why}: {cure}, or a larger rollout.group"
    )


def _by_damage(before: EvalResult | None, after: EvalResult | None) -> dict[str, DamageFigures]:
    rates: dict[str, list[list[float]]] = {}  # by damage, the tasks' rates before and after
    for place, result in enumerate((before, after)):
        for task in result.tasks if result is not None else ():
            if task.passed:
                rates.setdefault(task.damage, [[], []])[place].append(fmean(task.passed))
    return {
        damage: DamageFigures(tasks=max(map(len, sides)), before=_mean(sides[0]), after=_mean(sides[1]))
        for damage, sides in sorted(rates.items())
        if damage
    }


def _mean(rates: Sequence[float]) -> float | None:
    return fmean(rates) if rates else None


def _unlearned(before: EvalResult | None, after: EvalResult | None) -> tuple[ChangedTask, ...]:
    if before is None or after is None:
        return ()
    known = {task.id: fmean(task.passed) for task in before.tasks if task.passed}
    changed = [ChangedTask(t.id, known[t.id], fmean(t.passed)) for t in after.tasks if t.passed and t.id in known]
    return tuple(sorted((c for c in changed if c.after < c.before), key=lambda c: c.after - c.before))


def clock_advice(before: EvalResult | None, after: EvalResult | None, seconds: float) -> str | None:
    """Advice if the wall time of an episode, `seconds`, ended more than a few of the held-out episodes."""
    shares = {when: of.clocked for when, of in (("before", before), ("after", after)) if of is not None}
    if max(shares.values(), default=0.0) <= CLOCKED:
        return None
    listing = ", ".join(f"{percent(share, 0)} {when} training" for when, share in shares.items())
    return (
        f"The clock ended held-out episodes ({listing}): the speed of this machine is in the figures. "
        f"Raise rollout.seconds, it is {seconds:g}"
    )


def _side(result: EvalResult | None) -> HeldOutSide | None:
    if result is None:
        return None
    return HeldOutSide(
        interval=result.pass_1, pass_k=result.pass_k, behaviour=result.behaviour, outcomes=result.outcomes
    )
