"""Environments written in Python: tasks, tools and a reward of your own, named in the TOML by their import path.

    [tasks]
    environment = "my_module:MyEnvironment"
    arguments = { count = 500 }

Subclass `Environment`, and write `tasks` and `reward`. Its episodes are played by the same agent loop as coding tasks,
and go through the same ledger, groups, staleness bound and trainer. docs/environments.md has a worked example.

An environment decides the model's prompt and the reward. It may not do the following:
- bypass the ledger: etude admits, leases and records an episode, and trains on it once; `reward` only returns numbers;
- see hidden tests: an environment has no repository, and coding tasks are graded elsewhere;
- run the model's text outside a box: its methods run in the controller, with your rights. Give a task `files`, and use
  `episode.box.exec`, or the built-in tools in `box_tools`; never `eval` or `subprocess`.
"""

import asyncio
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import blake3
import msgspec
import numpy as np

from etude.config import RLConfig, import_object
from etude.errors import UserError
from etude.grading import Grade
from etude.harness import EpisodeSpec, Opening, UngradedEpisode, memory_of, run_from_opening
from etude.records import Budget, CodeTask, Focus, Outcome, Record, StopReason, Task, Turn
from etude.renderers import Renderer
from etude.rollout.python_tools import PythonTools, call_python
from etude.sandbox import Box, BoxError, Image, Limits, Sandbox
from etude.tasks import DATASET_FORMAT, Dataset, Manifest

CALL_SECONDS = 60.0  # that `setup`, `tools` or `reward` may take
BOX_SECONDS = 60.0  # to make a box
MAX_FAILURES = 10  # exceptions of these methods in a row, after which the run ends
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class EnvironmentTask(Record, frozen=True, kw_only=True):
    """One task of an environment. `answer` and `info` are for `reward`: the model never reads them.

    `files` (path -> text) are the start of a box; without files an episode has no box. `split` is "train", "heldout" or
    "": then `tasks.heldout_fraction` of all such tasks are held out, chosen by a hash of their ids.
    """

    id: str  # unique; letters, digits, ".", "_" and "-"
    prompt: str  # the user's message
    answer: str = ""
    split: str = ""
    files: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    info: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


@dataclass
class EnvironmentEpisode:
    """One episode, as the methods of an environment see it. Keep state of the episode in `state`."""

    task: EnvironmentTask
    seed: int = 0  # of this episode, for reproducible random numbers
    box: Box | None = None  # for tasks with `files`
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    # The following are known when `reward` is called.
    answer: str = ""  # text of the last turn, without thoughts and tool calls
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason = StopReason.FINISHED


class Environment(ABC):
    """Tasks, tools and a reward. The class is called with `[tasks.arguments]` as keyword arguments.

    Any method but `tasks` and `validate` may be `async`. Methods of several episodes run at the same time; those that
    are not `async` run in threads.
    """

    system: str = ""  # the system prompt
    pass_mark: float = 1.0  # an episode with at least this reward has passed, in evaluations and for the curriculum
    box_tools: tuple[str, ...] = ()  # built-in tools for tasks with `files`, e.g. ("run", "read", "edit")

    @abstractmethod
    def tasks(self) -> Iterable[EnvironmentTask]:
        """All tasks, the same ones at every call: a run that is resumed calls this again."""

    @abstractmethod
    def reward(self, episode: EnvironmentEpisode) -> float | Mapping[str, float]:
        """The reward of an ended episode: a number, or named parts that are summed.

        An exception counts as an infrastructure failure: the episode is repeated, twice at most. A BoxError that the
        agent caused, such as a missing file, is a reward of 0.
        """

    def tools(self, episode: EnvironmentEpisode) -> Sequence[Callable[..., Any]]:
        """Functions that the model may call in this episode; none: the model's first turn is its answer.

        The name, the docstring and the parameters (str, int, float, bool, list) are shown to the model.
        The result is shown as text. An exception is shown as text, too, and the episode goes on.
        """
        return ()

    def setup(self, episode: EnvironmentEpisode) -> None:  # noqa: B027 (optional)
        """Called before the first turn, e.g. to fill `episode.state`."""

    def validate(self, task: EnvironmentTask) -> None:  # noqa: B027 (optional)
        """Raises any exception if a task cannot be used, e.g. if its own answer does not pass.

        Called for every task before a run begins.
        """


class EnvironmentFailed(Exception):
    """A method of the environment raised an exception, or took too long: the episode is repeated."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentDataset(Dataset):
    """The dataset of an environment's tasks, which plays and grades their episodes."""

    environment: Environment
    originals: Mapping[str, EnvironmentTask]  # by id
    failures: list[str] = field(default_factory=list[str])  # of the user's methods, in a row

    @cached_property
    def by_id(self) -> Mapping[str, Task]:  # type: ignore[override]
        """The tasks by id. A lookup raises UserError for a task that an earlier start of the run had."""
        return _TasksById({task.id: task for task in self.tasks})

    def image(self, task: Task) -> Image:
        """The files of the task in an otherwise empty folder."""
        self.repository.mkdir(parents=True, exist_ok=True)
        return Image(repository=self.repository, site=None, changes=task.changes)

    async def attempt(self, spec: EpisodeSpec, sandbox: Sandbox) -> tuple[UngradedEpisode, Grade, dict[str, float]]:
        """An episode, its grade, and the reward with its parts as metrics.

        Raises EnvironmentFailed, BoxError, EngineError or Aborted for an episode that is lost, and UserError if the
        environment's code is wrong in a way that no repetition mends.
        """
        box = None
        if spec.task.changes:
            async with asyncio.timeout(BOX_SECONDS):
                box = await sandbox.create(self.image(spec.task), Limits())
        try:
            episode, ungraded = await self.play(spec, box)
            if ungraded.timed_out:
                return ungraded, Grade(Outcome.TIMEOUT, 0.0, False, "a tool did not end in time", None), {}
            try:
                parts = self._parts(episode, await self._call(self.environment.reward, episode))
            except BoxError as e:
                if e.payer == "infra":
                    raise
                detail = f"the box was left unreadable: {e}"
                return ungraded, Grade(Outcome.SCORED, 0.0, False, detail, None), {"grade": 0.0}
            self.failures.clear()
        finally:
            if box is not None:
                await box.close()
        total = sum(parts.values())
        passed = total >= self.environment.pass_mark - 1e-9
        grade = Grade(Outcome.SCORED, total, passed, f"the environment's reward is {total:.4g}", None)
        return ungraded, grade, {"grade": total} | {f"environment/{name}": value for name, value in parts.items()}

    async def play(self, spec: EpisodeSpec, box: Box | None) -> tuple[EnvironmentEpisode, UngradedEpisode]:
        """An episode without its reward."""
        environment = self.environment
        episode = EnvironmentEpisode(self.originals[spec.task.id], spec.seed, box)
        await self._call(environment.setup, episode)
        functions = await self._call(environment.tools, episode)
        names = environment.box_tools if box is not None else ()
        tools = PythonTools(functions, names, box, spec.task, compact=spec.renderer.dialect == "compact")
        opening = _open(environment, episode.task, tools, spec.renderer)
        _check_fit(opening.prompt, self.name, episode.task, spec.budget)  # now with the tools in it
        ungraded = await run_from_opening(spec, opening)
        answer = _answer(ungraded, spec.renderer)
        return replace(episode, answer=answer, turns=ungraded.turns, stop_reason=ungraded.stop_reason), ungraded

    async def _call(self, method: Callable[[EnvironmentEpisode], Any], episode: EnvironmentEpisode) -> Any:
        """The result of a method. Raises EnvironmentFailed, UserError after many failures in a row, and BoxError."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result = await call_python(method, episode)
        except BoxError:
            raise
        except Exception as e:
            place = traceback.extract_tb(e.__traceback__)[-1]
            what = f"{type(e).__name__}: {e}" if not isinstance(e, TimeoutError) else f"no end in {CALL_SECONDS:.0f} s"
            sentence = (
                f"{self.name}.{method.__name__} of task {episode.task.id}: {what} ({place.filename}:{place.lineno})"
            )
            self.failures.append(sentence)
            if len(self.failures) >= MAX_FAILURES:
                raise UserError(f"{MAX_FAILURES} failures in a row, the last of {sentence}; mend it") from e
            raise EnvironmentFailed(sentence) from e
        return result

    def _parts(self, episode: EnvironmentEpisode, value: Any) -> dict[str, float]:
        """A reward by its parts. Raises UserError if it is not made of finite numbers."""
        parts = cast(Mapping[Any, Any], value) if isinstance(value, Mapping) else {"reward": value}
        try:
            numbers = {str(name): float(part) for name, part in parts.items() if not isinstance(part, str)}
        except (TypeError, ValueError):
            numbers = {}
        if len(numbers) != len(parts) or not np.isfinite(list(numbers.values())).all():
            raise UserError(
                f"{self.name}.reward returned {value!r} for task {episode.task.id}; it must return a finite number, or "
                "a dict of finite numbers by name"
            )
        return numbers


class _TasksById(dict[str, Task]):
    def __missing__(self, id: str) -> Task:
        raise UserError(
            f"the environment has no task {id} any more: its tasks must be the same at every start of a run"
        )


def environment_dataset(config: RLConfig, renderer: Renderer, folder: Path) -> EnvironmentDataset:
    """The tasks of `tasks.environment`; `folder` is the run's. Raises UserError for faulty tasks."""
    path = config.tasks.environment
    assert path is not None
    factory = import_object(path, "tasks.environment")
    try:
        environment = factory(**config.tasks.arguments)
    except Exception as e:
        raise UserError(f"tasks.environment: {path} cannot be made of tasks.arguments: {type(e).__name__}: {e}") from e
    if not isinstance(environment, Environment):
        raise UserError(f"tasks.environment: {path} is no subclass of etude.rollout.environment.Environment")
    name = type(environment).__name__
    originals = _valid_tasks(environment, name)
    # Tasks without a split are divided by a hash of their ids.
    free = sorted((t.id for t in originals.values() if not t.split), key=lambda id: blake3.blake3(id.encode()).digest())
    fraction = config.tasks.heldout_fraction
    heldout = set(free[: max(1, round(fraction * len(free)))] if fraction and len(free) > 1 else ())
    splits = {t.id: t.split or ("heldout" if t.id in heldout else "train") for t in originals.values()}
    if "train" not in splits.values():
        raise UserError(f'{name}.tasks gives no task for training: set split to "train", or give more tasks')
    if (config.eval.before or config.eval.after) and "heldout" not in splits.values():
        raise UserError(
            f"{name}.tasks gives no held-out task: set eval.before and eval.after to false, or hold some out"
        )
    for task in originals.values():
        _check_fit(renderer.prompt(_messages(environment, task)), name, task, config.rollout.budget())
    manifest = Manifest(
        format=DATASET_FORMAT,
        name=name,
        licence="",
        licence_source="",
        seed=config.seed,
        python_path=(),
        source_roots=(),
        visible="",
        options={},
        counts={},
        digests={},
    )
    root = folder / "environment"
    tasks = tuple(_task(originals[id], name, splits[id]) for id in sorted(originals))
    return EnvironmentDataset(
        root=root,
        name=name,
        repository=root,
        site=root,
        hidden=root,
        tasks=tasks,
        manifest=manifest,
        environment=environment,
        originals=originals,
    )


def _valid_tasks(environment: Environment, name: str) -> dict[str, EnvironmentTask]:
    """The tasks by id. Raises UserError."""
    try:
        tasks: list[Any] = list(environment.tasks())
    except Exception as e:
        raise UserError(f"{name}.tasks raised {type(e).__name__}: {e}") from e
    if not tasks:
        raise UserError(f"{name}.tasks gives no tasks")
    originals: dict[str, EnvironmentTask] = {}
    for task in tasks:
        if not isinstance(task, EnvironmentTask):
            raise UserError(f"{name}.tasks gives {task!r}, which is no EnvironmentTask")
        if not _ID.fullmatch(task.id) or task.id in originals:
            raise UserError(f"{name}.tasks: the id {task.id!r} is taken, or not made of letters, digits, '.', '_', '-'")
        if task.split not in ("", "train", "heldout"):
            raise UserError(f"{name}.tasks: the split of {task.id} is {task.split!r}, neither train nor heldout")
        try:
            environment.validate(task)
        except Exception as e:
            raise UserError(f"{name}.validate refuses the task {task.id}: {type(e).__name__}: {e}") from e
        originals[task.id] = task
    return originals


def _check_fit(prompt: Sequence[int], name: str, task: EnvironmentTask, budget: Budget) -> None:
    """Raises UserError for a prompt that leaves no room for an answer."""
    if len(prompt) >= budget.context:
        raise UserError(
            f"the prompt of {name}'s task {task.id} has {len(prompt)} tokens, and rollout.context is {budget.context}: "
            "raise it, or shorten the prompt"
        )


def _task(task: EnvironmentTask, name: str, split: str) -> Task:
    """The record of a task; `changes` are the files of its box."""
    return CodeTask(
        id=task.id,
        repository=name,
        kind="environment",
        operator="",
        function=task.id,
        split=split,
        prompt=task.prompt,
        focus=Focus(path="", first_line=1, last_line=1),
        source_roots=(),
        changes=task.files,
        solution={"answer": task.answer},
        visible_tests=(),
        fail_to_pass=(),
        pass_to_pass=(),
        difficulty={},
        licence="",
    )


def _messages(environment: Environment, task: EnvironmentTask, addition: str = "") -> list[dict[str, str]]:
    system = [{"role": "system", "content": environment.system}] if environment.system else []
    prompt = "\n\n".join(filter(None, (task.prompt, addition)))
    return [*system, {"role": "user", "content": prompt}]


def _open(environment: Environment, task: EnvironmentTask, tools: PythonTools, renderer: Renderer) -> Opening:
    """The first tokens. For models of the compact dialect the tools stand in the prompt."""
    compact = renderer.dialect == "compact"

    def prompt(memory: str = "") -> list[int]:
        addition = "\n\n".join(filter(None, (tools.summary() if compact else "", memory)))
        return renderer.prompt(_messages(environment, task, addition), () if compact else tools.schemas)

    async def reopen(summary: str, count: int) -> list[int]:
        return prompt(memory_of(summary, count, tools))

    return Opening(tools, prompt(), reopen)


def _answer(ungraded: UngradedEpisode, renderer: Renderer) -> str:
    """The text of the last sampled turn, without thoughts and calls."""
    if not ungraded.segments:
        return ""
    segment = ungraded.segments[-1]
    start, end = segment.spans()[-1]
    ids = segment.arrays()[0][start:end].tolist()
    return renderer.parse(ids, "stop" if ids and ids[-1] in renderer.stop_ids else "length").text.strip()
