"""Measures a policy on the tasks of a dataset split, and compares two measurements of the same tasks.

Each task is played `samples` times. The seed of a sample depends only on the evaluation's seed, the task and the
sample's number, so two models meet the same seeds and their difference can be paired.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from etude.errors import RunFailed, UserError
from etude.evals.stats import Estimate, paired_difference, pass_at_k, pass_rate
from etude.records import Episode, Outcome, Record, Task

if TYPE_CHECKING:
    from etude.rollout import RolloutContext

RETRIES = 2  # of an episode lost to infrastructure
KS = (1, 2, 4, 8)
SHARES = {
    "undo": ("undo",),
    "tests run": ("tests_run",),
    "searches": ("calls/grep", "calls/search"),
    "malformed calls": ("malformed",),
    "cut turns": ("truncated",),
}
"""Behaviours whose share of episodes is counted, and the figures of an episode that show them."""
BEHAVIOUR = ("turns", "tests_run", "edits", "edit_errors", "malformed", "undo", "sampled_tokens")

Attempt = Callable[[Task, int, int, int, int], Awaitable[Episode]]  # task, task index, sample, attempt, seed
Progress = Callable[[int, int, int], None]  # samples done, samples in all, samples passed
Known = Mapping[tuple[str, int], Episode]  # (task, sample) -> the episode of an earlier start
_NOTHING_KNOWN: Known = {}


class TaskResult(Record, frozen=True):
    """The counted samples of one task, in order; `lost` is the number of samples that infrastructure lost."""

    id: str
    function: str
    passed: tuple[bool, ...]
    lost: int
    repository: str = ""
    damage: str = ""  # how its program was broken: a mutation operator, or the kind of task


class EvalResult(Record, frozen=True):
    """One measurement. As JSON (`msgspec.json.encode`):

    {"split": "heldout", "seed": 1, "samples": 4, "seconds": 21.7,
     "tasks": [{"id": "...", "function": "src/pydash/arrays.py::chunk", "passed": [true, false], "lost": 0}, ...],
     "pass_1": {"mean": 0.21, "low": 0.15, "high": 0.28},       95 %, clustered by function
     "pass_k": {"1": 0.21, "2": 0.30, "4": 0.41},               unbiased, tasks with fewer than k samples left out
     "outcomes": {"scored": 590, "timeout": 2},                 "infra", "quarantined": samples that were lost
     "retries": 1,                                              attempts repeated because infrastructure failed
     "stops": {"finished": 480, "turns": 112},
     "behaviour": {"turns": 3.1, "tests_run": 1.9, ...},        means per counted episode
     "tokens": {"prompt": 81200, "cached": 64000, "sampled": 900},  of all; prompts are counted by chat APIs alone
     "repositories": {"pydash-8.1.0": {"mean": 0.2, ...}, ...},  pass@1 of each, if there are several
     "shares": {"undo": 0.03, ...},                             of counted episodes, in which it occurs
     "version": 40}                                             weights of a run that were measured; else null
    """

    split: str
    seed: int
    samples: int
    seconds: float
    tasks: tuple[TaskResult, ...]
    pass_1: Estimate
    pass_k: dict[int, float]
    outcomes: dict[str, int]
    retries: int
    stops: dict[str, int]
    behaviour: dict[str, float]
    tokens: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    repositories: dict[str, Estimate] = msgspec.field(default_factory=dict[str, Estimate])
    shares: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    version: int | None = None

    @property
    def clocked(self) -> float:
        """The share of the counted episodes that ended at their limit of wall time."""
        return self.stops.get("seconds", 0) / max(1, sum(self.stops.values()))


class Comparison(Record, frozen=True):
    """The comparison of two measurements over their common tasks; `better`, `worse` and `same` count tasks by their
    pass rates."""

    before: Estimate
    after: Estimate
    difference: Estimate
    tasks: int
    functions: int
    better: int
    worse: int
    same: int


async def evaluate(
    context: RolloutContext,
    *,
    samples: int,
    split: str = "heldout",
    max_tasks: int | None = None,
    seed: int = 0,
    concurrency: int = 64,
    progress: Progress | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    known: Known = _NOTHING_KNOWN,
) -> EvalResult:
    """Play `samples` episodes of every task of `split`. `on_episode` is called with each new counted episode; `known`
    episodes are neither played nor reported. Raises UserError if the split is empty and RunFailed if every episode was
    lost."""
    tasks = pick_tasks(context.taskset.tasks, split, max_tasks)
    if not tasks:
        name = context.taskset.name
        raise UserError(f"the dataset {name} has no {split} tasks; choose another split or build it anew")
    # Imported here, because reports read results without the harness.
    from etude.rollout import EpisodeId, run_episode

    async def attempt(task: Task, index: int, sample: int, number: int, episode_seed: int) -> Episode:
        return await run_episode(context, task, EpisodeId(index, sample, number, episode_seed))

    return await run_suite(
        tasks,
        attempt,
        samples=samples,
        split=split,
        seed=seed,
        concurrency=concurrency,
        progress=progress,
        on_episode=on_episode,
        known=known,
    )


async def run_suite(
    tasks: Sequence[Task],
    attempt: Attempt,
    *,
    samples: int,
    split: str,
    seed: int,
    concurrency: int,
    progress: Progress | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    known: Known = _NOTHING_KNOWN,
) -> EvalResult:
    """The work of `evaluate`, for any way of playing one attempt. At most `concurrency` attempts run at a time."""
    if samples < 1 or concurrency < 1:
        raise ValueError(f"an evaluation needs samples >= 1 and concurrency >= 1, got {samples} and {concurrency}")
    started = time.monotonic()
    # A task's samples follow each other, since its boxes and its prompt are then prepared once. The order of tasks is
    # drawn, so that the running pass rate is fair early.
    drawn = sorted(range(len(tasks)), key=lambda index: _hash(tasks[index].id))
    work = iter([(index, sample) for index in drawn for sample in range(samples)])
    episodes: dict[tuple[int, int], Episode] = {}
    retries = passed = 0

    async def worker() -> None:
        nonlocal retries, passed
        for index, sample in work:
            task = tasks[index]
            episode = known.get((task.id, sample))
            for number in range(RETRIES + 1 if episode is None else 0):
                episode = await attempt(task, index, sample, number, episode_seed(seed, task.id, sample))
                if episode.outcome is not Outcome.INFRA:
                    break
                retries += number < RETRIES
            assert episode is not None
            episodes[index, sample] = episode
            passed += episode.passed
            if on_episode is not None and (task.id, sample) not in known and not episode.outcome.lost:
                on_episode(episode)
            if progress is not None:
                progress(len(episodes), len(tasks) * samples, passed)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(tasks) * samples)):
                group.create_task(worker())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # such as a UserError, which the user must see
    by_task = [[episodes[index, sample] for sample in range(samples)] for index in range(len(tasks))]
    return _summary(tasks, by_task, split, seed, samples, retries, time.monotonic() - started)


def compare(before: EvalResult, after: EvalResult, seed: int = 0) -> Comparison:
    """The paired difference over the common tasks of two measurements. Raises ValueError if there are none."""
    first, second = ({task.id: task for task in result.tasks if task.passed} for result in (before, after))
    shared = [name for name in first if name in second]
    if not shared:
        raise ValueError("the two evaluations share no task")
    functions = [first[name].function for name in shared]
    a, b = [first[name].passed for name in shared], [second[name].passed for name in shared]
    gains = [sum(y) / len(y) - sum(x) / len(x) for x, y in zip(a, b, strict=True)]
    return Comparison(
        before=pass_rate(a, functions, seed),
        after=pass_rate(b, functions, seed),
        difference=paired_difference(a, b, functions, seed),
        tasks=len(shared),
        functions=len(set(functions)),
        better=sum(gain > 0 for gain in gains),
        worse=sum(gain < 0 for gain in gains),
        same=sum(gain == 0 for gain in gains),
    )


def pick_tasks(tasks: Iterable[Task], split: str, max_tasks: int | None = None) -> list[Task]:
    """The tasks of `split` in dataset order. At most `max_tasks` are chosen by a hash, so that no module is favoured;
    several repositories give equal numbers, as far as they have the tasks."""
    chosen = [task for task in tasks if task.split == split]
    if max_tasks is None or len(chosen) <= max_tasks:
        return chosen
    ranks: Counter[str] = Counter()
    places: dict[str, tuple[int, int]] = {}  # (rank within the repository, hash) by id
    for task in sorted(chosen, key=lambda task: _hash(task.id)):
        places[task.id] = ranks[task.repository], _hash(task.id)
        ranks[task.repository] += 1
    kept = set(sorted(places, key=places.__getitem__)[:max_tasks])
    return [task for task in chosen if task.id in kept]


def episode_seed(seed: int, task_id: str, sample: int) -> int:
    """A 31-bit seed that depends only on its arguments; a retry repeats it."""
    return _hash(f"{seed}/{task_id}/{sample}") & 0x7FFFFFFF


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _summary(
    tasks: Sequence[Task],
    by_task: Sequence[Sequence[Episode]],
    split: str,
    seed: int,
    samples: int,
    retries: int,
    seconds: float,
) -> EvalResult:
    kept = [[e for e in episodes if not e.outcome.lost] for episodes in by_task]
    counted = [e for episodes in kept for e in episodes]
    if not counted:
        why = next((e.detail for episodes in by_task for e in episodes if e.detail), "no reason given")
        raise RunFailed(f"all {len(tasks) * samples} episodes of the evaluation were lost, the first for {why}")
    results = tuple(
        TaskResult(
            id=t.id,
            function=t.cluster,
            passed=tuple(e.passed for e in episodes),
            lost=samples - len(episodes),
            repository=t.repository,
            damage=t.damage,
        )
        for t, episodes in zip(tasks, kept, strict=True)
    )
    measured = [result for result in results if result.passed]
    return EvalResult(
        split=split,
        seed=seed,
        samples=samples,
        seconds=seconds,
        tasks=results,
        pass_1=pass_rate([r.passed for r in measured], [r.function for r in measured], seed),
        pass_k=_pass_ks([r.passed for r in measured], samples),
        outcomes=dict(Counter(str(e.outcome) for episodes in by_task for e in episodes)),
        retries=retries,
        stops=dict(Counter(str(e.stop_reason) for e in counted)),
        behaviour={name: sum(_behaviour(e, name) for e in counted) / len(counted) for name in BEHAVIOUR},
        tokens={name: int(sum(_tokens(e, name) for e in counted)) for name in ("prompt", "cached", "sampled")},
        repositories=_by_repository(measured, seed),
        shares={
            name: sum(any(e.metrics.get(figure, 0) > 0 for figure in figures) for e in counted) / len(counted)
            for name, figures in SHARES.items()
        },
    )


def _by_repository(measured: Sequence[TaskResult], seed: int) -> dict[str, Estimate]:
    """pass@1 of each repository; empty for a single repository."""
    names = sorted({result.repository for result in measured})
    if len(names) < 2:
        return {}
    parts = {name: [result for result in measured if result.repository == name] for name in names}
    return {name: pass_rate([r.passed for r in own], [r.function for r in own], seed) for name, own in parts.items()}


def _pass_ks(results: Sequence[Sequence[bool]], samples: int) -> dict[int, float]:
    rates: dict[int, float] = {}
    for k in KS:
        values = [pass_at_k(len(passed), sum(passed), k) for passed in results if len(passed) >= k]
        if k <= samples and values:
            rates[k] = sum(values) / len(values)
    return rates


def _behaviour(episode: Episode, name: str) -> float:
    return _tokens(episode, "sampled") if name == "sampled_tokens" else episode.metrics.get(name, 0.0)


def _tokens(episode: Episode, kind: str) -> float:
    """The number of tokens of an episode, from a chat API or from the segments."""
    own = episode.sampled_tokens if kind == "sampled" else 0
    return episode.metrics.get(f"{kind}_tokens", float(own))
