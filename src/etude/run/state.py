"""The state of a run: its open parts, which stay the same, and its progress, which changes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.ledger import Ledger
from etude.processes import Child, Process
from etude.protocol.backends import EngineClient
from etude.rollout import Concurrency, ProbeScorer, RolloutContext, Taskset
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
    trained: int = -1  # newest version whose groups are marked as consumed in the ledger
    live: int = 0  # episodes
    limit: int = 0  # of live episodes
    finished: int = 0  # episodes
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
    child: Child | None  # None for an engine that this process did not start
    health: dict[str, Any] | None = None  # the last report
    unanswered: float | None = None  # start of the silence, on the monotonic clock
    trouble: str = ""  # the error of the last failed request
    lost: str = ""  # why the engine gets no turns; empty: it serves
    asking: asyncio.Task[None] | None = None
    bringing: asyncio.Task[None] | None = None  # to a newer version
    fallen: bool = False  # an older version is served than before
    refused: int = 0  # failed updates in a row

    @property
    def version(self) -> int:
        """The version of the last report; -1 before the first."""
        return -1 if self.health is None else int(self.health["version"])


@dataclass(frozen=True)
class Engines:
    """The engines of a run: the state of each, the client of all, and the scorer of logprob probes."""

    states: Sequence[EngineState]
    client: EngineClient
    probes: ProbeScorer

    @property
    def serving(self) -> list[EngineState]:
        """The engines that get turns."""
        return [state for state in self.states if not state.lost]

    def lose(self, state: EngineState, why: str) -> bool:
        """Sends an engine's turns to the others from now on; False if no other engine serves."""
        if not any(other is not state for other in self.serving):
            return False
        if not state.lost:
            print(f"the engine at {state.url} is lost, the others play its turns: {why}", file=sys.stderr)
        state.lost = why
        self.client.lose(state.url)
        return True

    def regain(self, state: EngineState) -> None:
        """Sends turns to an engine again."""
        print(f"the engine at {state.url} is back", file=sys.stderr)
        state.lost = ""
        self.client.regain(state.url)

    async def aclose(self) -> None:
        """Cancels the running requests for reports and updates."""
        tasks = [task for state in self.states for task in (state.asking, state.bringing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Run:
    """The open parts of one run. `pool`, `progress` and `record` change."""

    folder: Path
    config: RLConfig
    pool: TaskPool
    impossible: Taskset | None
    training: RolloutContext  # of its episodes, with the tasks of the start
    measuring: RolloutContext  # of evaluations and impossible tasks
    ledger: Ledger
    weights: Store
    rollouts: Store
    sandbox: Sandbox
    engines: Engines
    children: list[Process]
    concurrency: Concurrency
    progress: Progress = field(default_factory=Progress)
    record: EngineRecord = field(default_factory=EngineRecord)

    @property
    def trainer(self) -> Process:
        """The trainer's process, or its ranks."""
        return next(child for child in self.children if child.name == "trainer")


def check_processes(run: Run) -> None:
    """Raises RunFailed, or UserError where the user can help, if a necessary process has died; one engine of several is
    not necessary."""
    if not run.sandbox.alive:
        raise RunFailed(f"the sandbox zygote died; nothing is lost: continue with `etude train --resume {run.folder}`")
    for child in run.children:
        if child.exit_code is None or (child.exit_code == 0 and child.name in ENDING):
            continue
        why = child.failure() or f"{child.end()}; see {child.log}"
        engine = next((state for state in run.engines.states if state.child is child), None)
        if engine is not None and (engine.lost or run.engines.lose(engine, why)):
            continue
        if child.exit_code == 2:  # the process printed one sentence for the user
            raise UserError(why)
        raise RunFailed(f"{why}; nothing is lost: continue with `etude train --resume {run.folder}`")


def last_version(weights: Store) -> int:
    """The newest published version; -1 before the first."""
    return max((m.version for m in manifests(weights)), default=-1)
