"""The state of a run: its open parts, which stay the same, and its progress, which changes."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.fleet import Placed
from etude.ledger import Ledger, MemberState
from etude.processes import Child, Process
from etude.protocol.backends import EngineClient
from etude.rollout import Concurrency, ProbeScorer, RolloutContext, Taskset
from etude.run.jobs import RunFleet
from etude.run.resting import FailureRow
from etude.run.sources import BUILDER, TaskPool
from etude.sandbox import Sandbox
from etude.store import Store
from etude.weights import manifests

ENDING = ("trainer", BUILDER)  # children that end by themselves


@dataclass
class Progress:
    """Figures of a run for the terminal view and the watch loop."""

    served: int = 0  # version that every engine serves
    accepted: int = 0  # episodes of finished groups
    in_flight: int = 0  # admitted episodes without a result
    trained: int = -1  # newest version whose groups are marked as consumed in the ledger
    live: int = 0  # episodes
    limit: int = 0  # of live episodes
    offered: int = 0  # episodes that players play at a time
    finished: int = 0  # episodes of this process
    ended: int = 0  # episodes of the run, whoever has played them
    quarantined: int = 0  # episodes that a fault of etude has ended
    tests_run: int = 0
    tests_remembered: int = 0  # test runs answered from memory
    engine: dict[str, float] = field(default_factory=dict[str, float])  # load of all engines together


@dataclass
class EngineRecord:
    """The versions that the engines of a run were observed to serve."""

    digests: dict[int, str] = field(default_factory=dict[int, str])  # by version
    checked: int = 0  # comparisons of a served digest with the published one
    complaints: set[str] = field(default_factory=set[str])  # of engines that are not configured alike
    warned: set[str] = field(default_factory=set[str])  # sentences about engines that were printed
    pauses: dict[int, float] = field(default_factory=dict[int, float])  # ms that engines stood still, by version


@dataclass
class EngineState:
    """The controller's state of one engine."""

    url: str
    child: Child | None = None  # None for an engine that this process did not start
    name: str = ""  # in the fleet
    state: MemberState = "joining"
    why: str = ""  # it gets no turns
    leaving: str = ""  # why it was asked to leave; empty: it was not
    health: dict[str, Any] | None = None  # the last report
    unanswered: float | None = None  # start of the silence, on the monotonic clock
    behind: float | None = None  # since when another engine has served a newer version, on the monotonic clock
    trouble: str = ""  # the error of the last failed request
    asking: asyncio.Task[None] | None = None
    bringing: asyncio.Task[None] | None = None  # to a newer version
    fallen: bool = False  # an older version is served than before
    refused: int = 0  # failed updates in a row
    refusal: str = ""  # why this run cannot use it
    checked: bool = False  # whether the run has found that it can
    looked: float = -math.inf  # time of the last request for a report, on the monotonic clock
    noted: tuple[MemberState, str, int] | None = None  # what the ledger has of it

    @property
    def version(self) -> int:
        """The version of the last report; -1 before the first."""
        return -1 if self.health is None else int(self.health["version"])

    @property
    def member(self) -> tuple[MemberState, str, int]:
        """The state, its reason and the version: what players are shown."""
        return self.state, self.why, self.version

    @property
    def serves(self) -> bool:
        """Whether the engine gets turns."""
        return self.state == "serving"


@dataclass
class Engines:
    """The engines of a run: the state of each, the client of all, and the scorer of logprob probes. `elastic`: others
    may join, so that the run waits for a while when the last one is gone."""

    states: list[EngineState]
    client: EngineClient
    probes: ProbeScorer
    elastic: bool = False
    unserved: float | None = None  # since when no engine serves, on the monotonic clock
    looked: float = -math.inf  # when the ledger's table was read, on the monotonic clock
    _left: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])  # of engines that are forgotten

    @property
    def serving(self) -> list[EngineState]:
        """The engines that get turns."""
        return [state for state in self.states if state.serves]

    def add(self, url: str, name: str, child: Child | None = None, *, serves: bool = False) -> EngineState:
        """Adds an engine, or begins anew with one that was gone. One that `serves` gets turns at once: its check and
        the wait for its version come before the first episode."""
        for state in [state for state in self.states if state.url == url]:
            self.forget(state)
        state = EngineState(url, child, name)
        self.states.append(state)
        if serves:
            state.state, state.checked = "serving", True
            self.client.serve(url)
        return state

    def forget(self, state: EngineState) -> None:
        """Drops an engine that is gone."""
        self.client.lose(state.url)
        self.states.remove(state)
        for task in (state.asking, state.bringing):
            if task is not None:
                task.cancel()
                self._left.add(task)
                task.add_done_callback(self._left.discard)

    def lose(self, state: EngineState, why: str) -> bool:
        """Sends an engine's turns to the others from now on; False if no other engine serves, nor may join."""
        if not self.elastic and not any(other is not state for other in self.serving):
            return False
        if state.state != "gone":
            print(f"the engine at {state.url} is lost, the others play its turns: {why}", file=sys.stderr)
        state.state, state.why = "gone", why
        self.client.lose(state.url)
        return True

    def drain(self, state: EngineState, why: str) -> None:
        """Sends an engine no new turns."""
        print(f"the engine at {state.url} gets no new turns: {why}", file=sys.stderr)
        state.state, state.why = "draining", why
        self.client.drain(state.url)

    def serve(self, state: EngineState) -> None:
        """Sends turns to an engine that has joined, or has come back."""
        how = "has joined" if state.state == "joining" else "is back"
        print(f"the engine at {state.url} {how}", file=sys.stderr)
        state.state, state.why = "serving", ""
        self.client.serve(state.url)

    async def aclose(self) -> None:
        """Cancels the running requests for reports and updates; a swap that has begun ends first."""
        tasks = [task for state in self.states for task in (state.asking, state.bringing) if task is not None]
        tasks += self._left
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Play:
    """The open parts with which a process plays leased episodes. `pool` and `progress` change."""

    folder: Path
    config: RLConfig
    pool: TaskPool
    training: RolloutContext  # of the run's episodes, with the tasks of the start
    ledger: Ledger
    rollouts: Store
    sandbox: Sandbox
    progress: Progress = field(default_factory=Progress)
    row: FailureRow | None = None  # of a player; the controller never rests

    def check(self) -> None:
        """Raises RunFailed, or UserError where the user can help, if a necessary process has died."""
        if not self.sandbox.alive:
            raise RunFailed(
                f"the sandbox zygote died; nothing is lost: continue with `etude train --resume {self.folder}`"
            )


@dataclass(frozen=True, kw_only=True)
class Run(Play):
    """The open parts of one run. `pool`, `progress` and `record` change."""

    impossible: Taskset | None
    measuring: RolloutContext  # of evaluations and impossible tasks
    weights: Store
    engines: Engines
    children: list[Process | Placed]
    concurrency: Concurrency
    fleet: RunFleet = field(default_factory=RunFleet)
    record: EngineRecord = field(default_factory=EngineRecord)

    def __post_init__(self) -> None:
        """Of a run that is resumed, engines serve once they have the newest version."""
        self.progress.served = max(self.progress.served, last_version(self.weights))

    @property
    def trainer(self) -> Process | Placed:
        """The trainer's process, or its ranks."""
        return next(child for child in self.children if child.name == "trainer")

    def check(self) -> None:
        """See `check_processes`."""
        check_processes(self)


def check_processes(run: Run) -> None:
    """Raises RunFailed, or UserError where the user can help, if a necessary process has died; one engine of several is
    not necessary."""
    Play.check(run)
    run.fleet.check()
    for child in run.children:
        if child.exit_code is None or (child.exit_code == 0 and child.name in ENDING):
            continue
        why = child.failure() or f"{child.end()}; see {child.log}"
        engine = next((state for state in run.engines.states if state.child is child), None)
        if engine is not None and (engine.state == "gone" or run.engines.lose(engine, why)):
            continue
        if child.exit_code == 2:  # the process printed one sentence for the user
            raise UserError(why)
        raise RunFailed(f"{why}; nothing is lost: continue with `etude train --resume {run.folder}`")


def last_version(weights: Store) -> int:
    """The newest published version; -1 before the first."""
    return max((m.version for m in manifests(weights)), default=-1)
