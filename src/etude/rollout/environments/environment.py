"""An environment: its tasks, the image of their boxes, and how their episodes are played and graded.

Users write `tasks` and a reward. By default an episode is a conversation with the tools of `tools` and `box_tools`, in
a box if the environment has a repository or files. The kinds of tasks that etude brings replace `image`, `play` and
`grade` (`code.py`, `edits.py`). docs/environments.md has worked examples.

Methods of an environment run in the controller, with its user's rights: the model's text is run in `episode.box`, or by
boxed tools, never by `eval` or `subprocess`.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

from etude.errors import UserError
from etude.grading import Grade
from etude.grading.cheats import Decoys
from etude.harness import (
    EngineModel,
    EpisodeSpec,
    Opening,
    UngradedEpisode,
    UsersBox,
    call_until,
    run_agent_loop,
    sentence_of,
)
from etude.records import MAX_REWARD, Budget, Outcome, StopReason, Task, Turn
from etude.renderers import printable
from etude.rollout.environments.agent import Agent, run_agent
from etude.rollout.environments.environment_tools import BOX_TOOLS, PythonTools
from etude.sandbox import Box, BoxError, Image, Limits, Sandbox
from etude.sandbox.egress import EgressRequest

BOX_SECONDS = 120.0  # to make a box, and to read the changes from it
CALL_SECONDS = 60.0  # that `setup`, `tools` or `reward` may take; their commands in the box end by then
BOX_GRACE_SECONDS = 2.0  # to read the result of such a command
MAX_FAILURES = 10  # exceptions of these methods in a row, after which the run ends
_REWARD = "_etude_reward"  # the attribute with the weight of a part of the reward

T = TypeVar("T", bound=Task)
F = TypeVar("F", bound=Callable[..., Any])


class EnvironmentFailed(Exception):
    """A method of the environment raised an exception, or took too long: the episode is repeated."""


@dataclass
class EnvironmentEpisode(Generic[T]):
    """One episode, as the methods of an environment see it. Keep state of the episode in `state`."""

    task: T
    seed: int = 0  # of this episode, for reproducible random numbers
    box: Box | None = None  # where the environment has a repository or files
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    # The following are known when `reward` is called.
    answer: str = ""  # text of the last turn, without thoughts and tool calls
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason = StopReason.FINISHED


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that has ended and is not graded yet. `evidence` is for `grade`: what `play` read from the box before
    the box was closed. `requests` are those that left the box; None if they are not known."""

    ungraded: UngradedEpisode
    evidence: Any = None
    decoys: Decoys | None = None
    requests: Sequence[EgressRequest] | None = None


@dataclass(frozen=True)
class GradedEpisode:
    """The grade of an episode, figures for its metrics, and the flags of the detectors of cheating."""

    grade: Grade
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    flags: tuple[str, ...] = ()


@cache
def _empty_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="etude-empty-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@overload
def reward(function: F) -> F: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def reward(function: Any = None, *, weight: float = 1.0) -> Any:
    """Marks a method of an environment as a part of its reward: `@reward` or `@reward(weight=0.2)`. The method takes
    the episode and returns a number. The reward is the sum of all parts, times their weights."""

    def mark(function: Any) -> Any:
        setattr(function, _REWARD, float(weight))
        return function

    return mark if function is None else mark(function)


class Environment(ABC, Generic[T]):
    """Tasks, and how their episodes are played and graded. The class is called with `[tasks.arguments]` as keyword
    arguments.

    Methods that take an `EnvironmentEpisode` may be `async`. Methods of several episodes run at the same time; those
    that are not `async` run in threads.
    """

    name: str = ""  # in reports, and in the ids of a mixture; "": that of the class
    system: str = ""  # the system prompt
    pass_mark: float = 1.0  # an episode with at least this reward has passed, in evaluations and for the curriculum
    repository: str | Path = ""  # a folder that every box begins with, as a repository of the agent
    site: str | Path = ""  # a folder of its Python packages, as `pip install --target` makes
    box_tools: tuple[str, ...] = ()  # built-in tools for boxes, e.g. ("run", "read", "edit")

    @abstractmethod
    def tasks(self) -> Iterable[T]:
        """All tasks, the same ones at every call: a run that is resumed calls this again."""

    def reward(
        self, episode: EnvironmentEpisode[T]
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]:
        """The reward of an ended episode: a number, or named parts that are summed. By default the methods that are
        marked as `@reward` are the parts.

        An exception counts as an infrastructure failure: the episode is repeated, twice at most. A BoxError that the
        agent caused, such as a missing file, is a reward of 0.
        """
        return self._marked_parts(episode)

    def tools(self, episode: EnvironmentEpisode[T]) -> Sequence[Callable[..., Any]]:
        """Functions that the model may call in this episode; none: the model's first turn is its answer.

        The name, the docstring and the parameters (str, int, float, bool, list, dict, Literal) are shown to the model.
        The result is shown as text. An exception is shown as text, too, and the episode goes on; so does a call of more
        than 30 seconds, or those of the decorator `tool`.
        """
        return ()

    def setup(self, episode: EnvironmentEpisode[T]) -> Any:
        """Called before the first turn, e.g. to fill `episode.state`."""

    def validate(self, task: T) -> None:
        """Raises any exception if a task cannot be used, e.g. if its own answer does not pass.

        Called for every task before a run begins.
        """

    def files(self, task: T) -> Mapping[str, str]:
        """Text files by their paths that the box of a task begins with, over those of the repository."""
        return {}

    # Of an environment that plays its episodes in another way, or grades them elsewhere ------------------------------

    def image(self, task: T) -> Image | None:
        """The image of a task's box; None for episodes without a box."""
        files = dict(self.files(task))
        if not self.repository and not files:
            return None
        repository = Path(self.repository) if self.repository else _empty_folder()
        return Image(repository=repository, site=Path(self.site) if self.site else None, changes=files)

    def limits(self, task: T) -> Limits:
        """The limits of a task's box."""
        return Limits()

    async def play(self, spec: EpisodeSpec, box: Box | None, agent: Agent | None = None) -> PlayedEpisode:
        """Plays an episode, by the agent loop or an outside agent, and reads from the box what `grade` needs.

        Raises EnvironmentFailed, BoxError, EngineError or Aborted for an episode that is lost, and UserError if the
        environment's code is wrong in a way that no repetition mends.
        """
        episode = EnvironmentEpisode(cast(T, spec.task), spec.seed, None if box is None else cast(Box, UsersBox(box)))
        await self._call(self.setup, episode)
        if agent is None:
            ungraded = await run_agent_loop(spec, await self._open(spec, episode))
        else:
            assert box is not None, "check_inputs refuses an outside agent on tasks without a box"
            ungraded = await run_agent(spec, agent, box)
        episode.answer, episode.turns, episode.stop_reason = ungraded.answer, ungraded.turns, ungraded.stop_reason
        return PlayedEpisode(ungraded, await self._graded(episode, ungraded))

    async def grade(self, sandbox: Sandbox, task: T, played: PlayedEpisode) -> GradedEpisode:
        """Grades an episode after its box is closed. By default `play` has called `reward` in the open box."""
        return cast(GradedEpisode, played.evidence)

    # Of a run ---------------------------------------------------------------------------------------------------------

    def refusal(self, compact: bool, sandbox: str) -> str:
        """The reason why models of the compact dialect, or boxes of the type `sandbox`, cannot play the tasks; or
        ""."""
        if wrong := sorted({*self.box_tools} - BOX_TOOLS):
            return f"{self.title}.box_tools: {wrong[0]} is none of {', '.join(sorted(BOX_TOOLS))}"
        if compact and self.box_tools:
            return f"the model speaks the compact dialect, which has no box_tools: set {self.title}.box_tools to ()"
        return ""

    def decoys(self, task: T, seed: int, share: float) -> Decoys | None:
        """The decoys that lie in a task's box, for a share of the tasks."""
        return None

    def impossible(self, folder: Path) -> Environment[T] | None:
        """The impossible versions of the training tasks, with files below `folder`; None if there are none."""
        return None

    # Calls of users' methods ------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The name, or that of the class."""
        return self.name or type(self).__name__

    @cached_property
    def _failures(self) -> list[str]:
        """Failures of users' methods, in a row."""
        return []

    def _reward_parts(self) -> list[tuple[str, float]]:
        names = dict.fromkeys(name for kind in reversed(type(self).__mro__) for name in vars(kind))
        marked = ((name, getattr(getattr(type(self), name), _REWARD, None)) for name in names)
        return [(name, weight) for name, weight in marked if weight is not None]

    async def _marked_parts(self, episode: EnvironmentEpisode[T]) -> dict[str, Any]:
        """The marked parts of the reward, times their weights. One that is no number stays as it is."""
        parts: dict[str, Any] = {}
        for name, weight in self._reward_parts():
            value = await self._call(getattr(self, name), episode)
            try:
                parts[name] = value if isinstance(value, str) else weight * float(value)
            except (TypeError, ValueError):
                parts[name] = value
        return parts

    def check_reward(self) -> None:
        """Raises UserError for a class without a reward: neither a method `reward` of its own, nor methods marked as
        `@reward`, nor a `grade`; and for a marked method with the name of another method of environments."""
        kind, parts = type(self).__name__, [name for name, _ in self._reward_parts()]
        if taken := [name for name in parts if hasattr(Environment, name)]:
            raise UserError(f"{kind}.{taken[0]} is marked as @reward, and environments have another: rename it")
        own = {name for kind in type(self).__mro__ if kind is not Environment for name in vars(kind)}
        if not own & {"reward", "grade"} and not parts:
            raise UserError(f"{kind} has no reward: write the method `reward`, or mark methods as @reward")
        for base in type(self).__mro__:
            if "reward" in vars(base) and (marked := [name for name in parts if name in vars(base)]):
                raise UserError(f"{kind} has a method `reward`, and {marked[0]} is marked as @reward: keep one of them")

    def messages(self, task: T, addition: str = "") -> list[dict[str, str]]:
        """The first messages of an episode, with `addition` below the prompt."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": "\n\n".join(filter(None, (task.prompt, addition)))}]

    async def _open(self, spec: EpisodeSpec, episode: EnvironmentEpisode[T]) -> Opening:
        """The beginning of an episode. For models of the compact dialect the tools stand in the prompt."""
        functions = await self._call(self.tools, episode)
        names = self.box_tools if episode.box is not None else ()
        tools = PythonTools(functions, names, episode.box, spec.task, compact=spec.model.compact)

        async def messages(memory: str) -> list[dict[str, str]]:
            shown = tools.summary() if spec.model.compact else ""
            return self.messages(episode.task, "\n\n".join(filter(None, (shown, memory))))

        opening = Opening(tools, messages)
        if isinstance(spec.model, EngineModel):
            self.check_fit(episode.task, await spec.model.prompt(opening), spec.budget)
        return opening

    def check_fit(self, task: T, prompt: Sequence[int], budget: Budget) -> None:
        """Raises UserError for a prompt that leaves no room for an answer."""
        if len(prompt) >= budget.context:
            raise UserError(
                f"the prompt of {self.title}'s task {task.id} has {len(prompt)} tokens, and rollout.context is "
                f"{budget.context}: raise it, or shorten the prompt"
            )

    async def _graded(self, episode: EnvironmentEpisode[T], ungraded: UngradedEpisode) -> GradedEpisode:
        """The grade by `reward`, with its parts as figures."""
        if ungraded.timed_out:
            return GradedEpisode(Grade(Outcome.TIMEOUT, 0.0, False, "a tool did not end in time", None))
        try:
            parts = self._parts(episode, await self._call(self.reward, episode))
        except BoxError as e:
            if e.payer == "infra":
                raise
            return GradedEpisode(Grade(Outcome.SCORED, 0.0, False, f"the box was left unreadable: {e}", None))
        self._failures.clear()
        total = sum(parts.values())
        passed = total >= self.pass_mark - 1e-9
        detail = "; ".join(filter(None, (f"the environment's reward is {total:.4g}", ungraded.note)))
        grade = Grade(Outcome.SCORED, total, passed, detail, None)
        return GradedEpisode(grade, {f"environment/{name}": value for name, value in parts.items()})

    async def _call(self, method: Callable[[EnvironmentEpisode[T]], Any], episode: EnvironmentEpisode[T]) -> Any:
        """The result of a method. Raises EnvironmentFailed, UserError after many failures in a row, and BoxError."""
        task = episode.task.id
        try:
            async with asyncio.timeout(CALL_SECONDS + BOX_GRACE_SECONDS):
                # In a task of its own, for its context.
                return await asyncio.create_task(call_until(time.monotonic() + CALL_SECONDS, method, episode))
        except (Exception, asyncio.CancelledError) as e:
            caller = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and caller is not None and caller.cancelling():
                raise  # otherwise the exception is the method's own
            if isinstance(e, UserError | EnvironmentFailed):
                raise
            if isinstance(e, BoxError) and (e.payer == "infra" or method not in (self.setup, self.tools)):
                raise  # the agent may have broken what `reward` reads; before its first turn it has not
            place = traceback.extract_tb(e.__traceback__)[-1]
            what = sentence_of(e) if not isinstance(e, TimeoutError) else f"no end in {CALL_SECONDS:.0f} s"
            name = getattr(method, "__name__", "method")
            sentence = f"{self.title}.{name} of task {task}: {what} ({place.filename}:{place.lineno})"
            self._failures.append(sentence)
            if len(self._failures) >= MAX_FAILURES:
                self._failures.clear()  # a later evaluation counts anew
                raise UserError(f"{MAX_FAILURES} failures in a row, the last of {sentence}; mend it") from e
            raise EnvironmentFailed(sentence) from e

    def _parts(self, episode: EnvironmentEpisode[T], value: Any) -> dict[str, float]:
        """A reward by its parts. Raises UserError if it is not made of finite numbers."""
        parts = cast(Mapping[Any, Any], value) if isinstance(value, Mapping) else {"reward": value}
        try:
            numbers = {printable(str(name)): float(part) for name, part in parts.items() if not isinstance(part, str)}
        except (TypeError, ValueError, OverflowError):
            numbers = {}
        if len(numbers) != len(parts) or not abs(sum(numbers.values())) <= MAX_REWARD:
            raise UserError(
                f"{self.title}.reward returned {value!r} for task {episode.task.id}; it must return a finite number, "
                f"or a dict of finite numbers by name, of {MAX_REWARD:g} at most in all"
            )
        return numbers
