"""The tasks of a run: of one environment, or a mixture of several whose tasks are drawn by weight.

In a mixture a task's id begins with the name of its environment. Every environment keeps its own held-out tasks.
"""

from __future__ import annotations

import inspect
import math
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import blake3
import msgspec
from msgspec import structs

from etude.errors import USERS_FAULTS, UserError
from etude.records import Task
from etude.rollout.environments.environment import Environment
from etude.tasks import Dataset

_TEXT, _FOLDER = (str, type(None)), (str, Path, type(None))
_ATTRIBUTES: dict[str, tuple[type, ...]] = {  # of environments
    "name": _TEXT, "system": _TEXT, "repository": _FOLDER, "site": _FOLDER, "pass_mark": (int, float),
    "box_tools": (tuple, list, set, frozenset),
}  # fmt: skip
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class TaskPart:
    """An environment with its tasks, sorted by id. `project` is the origin of the tasks, of which a run has one part at
    most, `digest` that of their files. `warnings` are limitations, for people. A package index in boxes leaves out
    `packages`, since they hold answers."""

    environment: Environment[Any]
    tasks: tuple[Task, ...]
    project: str = ""
    digest: str = ""
    warnings: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()
    dataset: Dataset | None = None  # of which the tasks are

    @property
    def name(self) -> str:
        """The name of the environment."""
        return self.environment.title

    def split(self, name: str) -> tuple[Task, ...]:
        """The tasks of split "train" or "heldout"."""
        return tuple(task for task in self.tasks if task.split == name)


class _TasksById(dict[str, Task]):
    def __init__(self, name: str, tasks: Mapping[str, Task]) -> None:
        super().__init__(tasks)
        self.name = name

    def __missing__(self, id: str) -> Task:
        raise UserError(f"{self.name} has no task {id} any more: the tasks must be the same at every start of a run")


@dataclass(frozen=True)
class Taskset:
    """The tasks of a run or an evaluation, and the environments that play them. `weights` maps the name of an
    environment to its share of the groups; the shares of a mixture add up to 1. Without weights there is one part."""

    parts: tuple[TaskPart, ...]
    weights: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def mixed(self) -> bool:
        """Whether this is a mixture, which more parts may join."""
        return bool(self.weights)

    @property
    def name(self) -> str:
        """The names of the environments."""
        return " + ".join(part.name for part in self.parts)

    @cached_property
    def _places(self) -> dict[str, tuple[Task, Environment[Any], Task]]:
        """By id: a task, its environment, and the task as its environment has it."""
        return {
            each.id: (each, part.environment, task)
            for part in self.parts
            for task in part.tasks
            for each in [self._named(part, task)]
        }

    def _named(self, part: TaskPart, task: Task) -> Task:
        if not self.mixed:
            return task
        return structs.replace(task, id=f"{part.name}:{task.id}", repository=part.name)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks."""
        return tuple(task for task, _, _ in self._places.values())

    @cached_property
    def by_id(self) -> Mapping[str, Task]:
        """The tasks by their ids. A lookup raises UserError for a task that an earlier start of the run had."""
        return _TasksById(self.name, {id: place[0] for id, place in self._places.items()})

    def split(self, name: str) -> tuple[Task, ...]:
        """The tasks of split "train" or "heldout"."""
        return tuple(task for task in self.tasks if task.split == name)

    def of(self, task: Task) -> tuple[Environment[Any], Task]:
        """The environment of a task, and the task as the environment has it."""
        if not self.mixed:
            return self.parts[0].environment, task
        _, environment, own = self._places[task.id]
        return environment, own

    def each(self, change: Callable[[TaskPart], TaskPart | None]) -> Taskset | None:
        """The tasks with `change` applied to each part; parts that it drops are left out, weights stay. None if no part
        is left."""
        parts = tuple(part for part in map(change, self.parts) if part is not None)
        return replace(self, parts=parts) if parts else None


def mix(parts: Sequence[TaskPart], weights: Sequence[float], *, more: bool = False) -> Taskset:
    """Mixes several environments; a single one stays as it is, unless `more` will join it. `weights` are positive
    numbers. Raises UserError for two sources of one project, since one would hold out functions that the other trains
    on."""
    projects = Counter(part.project or part.name for part in parts)
    twice = next((name for name, count in projects.items() if count > 1), None)
    if twice is not None:
        raise UserError(
            f"two sources of tasks are of the project {twice}, and one would train on held-out functions of the "
            "other: keep one of them"
        )
    names = Counter(part.name for part in parts)
    if (name := next((name for name, count in names.items() if count > 1), None)) is not None:
        raise UserError(f"two sources of tasks are called {name}: rename one")
    if len(parts) == 1 and not more:
        return Taskset(tuple(parts))
    total = sum(weights)
    return Taskset(tuple(parts), {part.name: weight / total for part, weight in zip(parts, weights, strict=True)})


def task_part(environment: Environment[Any], heldout_fraction: float = 0.0) -> TaskPart:
    """An environment with its tasks, which are checked. Tasks without a split are divided by a hash of their ids:
    `heldout_fraction` of them are held out. Raises UserError."""
    environment.check_reward()
    _check_class(environment)
    name = environment.title
    for key in ("repository", "site"):
        if (folder := getattr(environment, key)) and not Path(folder).is_dir():
            raise UserError(f"{name}.{key}: {folder} is not a folder")
    tasks = _checked(environment)
    free = sorted(
        (id for id, task in tasks.items() if not task.split), key=lambda id: blake3.blake3(id.encode()).digest()
    )
    held_out = max(1, round(heldout_fraction * len(free))) if heldout_fraction and len(free) > 1 else 0
    splits = {id: "heldout" if number < held_out else "train" for number, id in enumerate(free)}
    ordered = tuple(structs.replace(tasks[id], split=splits.get(id, tasks[id].split)) for id in sorted(tasks))
    return TaskPart(environment, ordered, digest=_digest(environment, ordered))


def _digest(environment: Environment[Any], tasks: Sequence[Task]) -> str:
    """A digest of tasks and their files, the same at every start."""
    state = blake3.blake3(environment.title.encode())
    for task in tasks:
        image = environment.image(task)
        for part in (task, {} if image is None else dict(image.changes)):
            with suppress(ValueError, OverflowError, RecursionError):  # a field that JSON cannot hold
                state.update(msgspec.json.encode(part, enc_hook=_type_name, order="sorted"))
    return state.hexdigest()


def _type_name(value: object) -> str:
    """Instead of a value that has no JSON: its `repr` may hold an address."""
    return type(value).__qualname__


def _check_class(environment: Environment[Any]) -> None:
    """Raises UserError if an attribute has the name of something of `Environment`, and is something else: a method that
    takes other arguments, no method, or a name that is no text."""
    kind = type(environment).__name__
    for name in (name for name in dir(Environment) if not name.startswith("_")):
        base, own = getattr(Environment, name), getattr(environment, name)
        if not callable(base):
            continue
        taken = [parameter for parameter in inspect.signature(base).parameters if parameter != "self"]
        shape = f"({', '.join(taken)})"
        if not callable(own):
            raise UserError(f"{kind}.{name} is {own!r}, and environments have a method {name}{shape}: rename it")
        try:
            inspect.signature(own).bind(*taken)
        except TypeError as e:
            raise UserError(f"{kind}.{name} cannot be called as {name}{shape} ({e}): mend it, or rename it") from None
        except ValueError:  # a function in C, which has no signature
            pass
        asynchronous = inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own)
        if asynchronous and not inspect.iscoroutinefunction(base) and name not in ("setup", "tools", "reward"):
            raise UserError(f"{kind}.{name} is async, and its result is not awaited: write it without async")
    for name, kinds in _ATTRIBUTES.items():
        if not isinstance(value := getattr(environment, name), kinds):
            raise UserError(f"{kind}.{name} is {value!r}, and must be a {kinds[0].__name__}")
    if not math.isfinite(environment.pass_mark):
        raise UserError(f"{kind}.pass_mark is {environment.pass_mark}, and rewards are finite numbers")


def _check_task(name: str, task: Task) -> None:
    """Raises UserError if a field of a task, or what a property makes of the fields, has another type than `Task`
    says: records and reports hold them."""
    try:
        fields = {field: getattr(task, field) for field in Task.__struct_fields__}
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Task)
        for derived in ("cluster", "text", "damage"):
            if not isinstance(value := getattr(task, derived), str):
                raise TypeError(f"{derived} is {value!r}, and Task has a str of this name")
            value.encode()
        decided: Any = task.decided
        if not isinstance(decided, int | float):
            raise TypeError(f"decided is {decided!r}, and Task has a number of this name")
        if (budget := task.budget) is not None and min(
            budget.turns, budget.tokens, budget.context, budget.seconds
        ) <= 0:
            raise ValueError("the budget has numbers that are not above 0")
    except USERS_FAULTS as e:
        raise UserError(f"{name}.tasks: the task {task.id!r} cannot be used: {type(e).__name__}: {e}") from e


def _check_files(name: str, task: Task, files: Mapping[Any, Any]) -> None:
    """Raises UserError for what is no text by its path in the repository."""
    for path, text in files.items():
        parts = path.split("/") if isinstance(path, str) else [""]
        if parts[0] == "" or parts[-1] in ("", ".") or ".." in parts or "\0" in path:
            raise UserError(
                f"{name}.files of task {task.id}: {path!r} is no path of a file, relative to the repository"
            )
        if not isinstance(text, str):
            raise UserError(
                f"{name}.files of task {task.id}: {path} is {type(text).__name__}, and files are texts (str)"
            )
    paths = {posixpath.normpath(path) for path in files}
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    if both := sorted(paths & folders):
        raise UserError(f"{name}.files of task {task.id}: {both[0]} is a file and a folder")


def _checked(environment: Environment[Any]) -> dict[str, Task]:
    """The tasks by id. Raises UserError."""
    name = environment.title
    try:
        tasks: list[Any] = list(environment.tasks())
    except UserError:
        raise
    except USERS_FAULTS as e:
        raise UserError(f"{name}.tasks raised {type(e).__name__}: {e}") from e
    if not tasks:
        raise UserError(f"{name}.tasks gives no tasks")
    by_id: dict[str, Task] = {}
    for task in tasks:
        if not isinstance(task, Task):
            raise UserError(f"{name}.tasks gives {task!r}, which is no etude.Task")
        _check_task(name, task)
        if task.id in by_id:
            raise UserError(f"{name}.tasks: two tasks have the id {task.id!r}")
        if not _ID.fullmatch(task.id):
            raise UserError(f"{name}.tasks: the id {task.id!r} is not 1 to 100 letters, digits, '.', '_' and '-'")
        if task.split not in ("", "train", "heldout"):
            raise UserError(f"{name}.tasks: the split of {task.id} is {task.split!r}, neither train nor heldout")
        try:
            environment.validate(task)
        except USERS_FAULTS as e:
            raise UserError(f"{name}.validate refuses the task {task.id}: {type(e).__name__}: {e}") from e
        try:
            image = environment.image(task)
        except USERS_FAULTS as e:
            raise UserError(f"{name} gives no box for the task {task.id}: {type(e).__name__}: {e}") from e
        if image is not None:
            _check_files(name, task, image.changes)
        by_id[task.id] = task
    return by_id
