"""A run of many engines on a virtual clock: the real ledger, membership, client and controller loop; simulated engines,
tools and trainer.

The controller's loop (`etude.run.loop.rollouts`) admits, leases and watches. An episode has turns with tools between
them, and goes through the real client. The trainer takes groups as the real one does, and publishes manifests into a
real store. Engines die and start again at other addresses, stand still, and are cut off by the network
(`fleet_clock.py`). Of the controller, its CPU time is measured: real HTTP, boxes and tokens are not in it.

In a fleet, players have the tokens of live episodes; here they are in the controller's process, where a garbage
collection looks at each. So garbage is collected between ticks, unmeasured, and at the end once more, measured, when
nothing but the controller's own objects is left.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from benchmarks.fleet_clock import (
    CpuMeter,
    Faults,
    SimulatedEngine,
    SimulatedEngines,
    digest_of,
    disturb,
    run_virtually,
)
from etude.config import RLConfig
from etude.ledger import EpisodeLease, Ledger, blob_key
from etude.protocol import GenerateRequest
from etude.protocol.backends import EngineClient, EngineError
from etude.records import Anchor, EpisodeBlob, Group, Outcome, PolicyVersion
from etude.rollout import Concurrency
from etude.run import leased, loop, versions
from etude.run.jobs import RunFleet
from etude.run.state import EngineRecord, Engines, Progress, Run
from etude.store import open_store
from etude.weights import manifest as manifest_files
from etude.weights import manifests

ROWS, RATE = 16, 30.0  # of an engine; tokens a second of a row
LIVE = 8  # episodes for each engine
TURNS, TURN_TOKENS, PROMPT = 5, 300, 200  # the first two on average
TOOL_SECONDS, TURN_SECONDS = 20.0, 600.0
STEP_SECONDS, SWAP_SECONDS = 20.0, (5.0, 30.0)
LATE_SECONDS, LATE = 300.0, 0.002  # of a swap, and the share of such swaps
TURN_DEADLINE = versions.SILENT_SECONDS + 10.0  # a lost engine's silence, the time between two looks, and one part
RUN_DEADLINE = 60.0  # of a swap, for which admission waits
GROUP, STALENESS = 8, 2
COLLECT_SECONDS = 100.0  # between two garbage collections


@dataclass
class Fleet:
    """A simulated run, and what was seen of it."""

    engines: int
    steps: int
    prompts: int
    faults: Faults
    turns: int
    noise: random.Random
    backend: SimulatedEngines
    run: Run
    trainer: SimpleNamespace
    meter: CpuMeter = field(default_factory=CpuMeter)
    published: int = 0
    ticks: list[float] = field(default_factory=list[float])  # ms of CPU
    kept: int = 0  # tokens of recorded episodes
    failed: int = 0  # turns that no engine answered
    mistaken: int = 0  # answers whose tokens are not those of their positions
    gap: float = 0.0  # longest time in which a turn got no token
    idle: float = 0.0  # longest time in which no token came from any engine
    came: float = 0.0  # when the last one did
    oldest: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])  # version of an episode
    stale: int = 0  # versions that a token was behind the one it was trained on, at most
    started: int = 0  # engines
    collection: float = 0.0  # ms of CPU of a full garbage collection of the controller's objects


@dataclass(frozen=True)
class FleetFigures:
    """The result of a simulated run; ticks and a garbage collection in ms of CPU time, the rest in virtual seconds."""

    engines: int
    episodes: int
    conserved: bool
    sentence: str
    stale: int
    failed: int
    mistaken: int
    gap: float
    idle: float
    useful: float
    resumed: int
    started: int
    tick_median: float
    tick_p95: float
    tick_p99: float
    tick_most: float
    collection: float
    seconds: float

    @property
    def checks(self) -> dict[str, bool]:
        """What must hold of any such run."""
        return {
            "every episode is accounted for, and no group was trained on twice": self.conserved,
            "no token is staler than the bound": self.stale <= STALENESS,
            "no turn was lost, and each token was sampled for its position": not self.failed and not self.mistaken,
            "no turn waits for longer than two deadlines": self.gap <= 2 * TURN_DEADLINE,
            "the run never waits for longer than two deadlines": self.idle <= 2 * RUN_DEADLINE,
        }


def simulate(engines: int, episodes: int, faults: Faults, turns: int = TURNS, each: int = LIVE) -> FleetFigures:
    """Plays about so many episodes of so many turns on so many engines, `each` of which has so many at a time."""
    live, trainer = engines * each, SimpleNamespace(name="trainer", exit_code=None)
    prompts = max(1, live // (GROUP * STALENESS))
    steps = max(2, round(episodes / (prompts * GROUP)))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, redirect_stderr(StringIO()):
        backend = SimulatedEngines(ROWS, RATE)
        rollout = {"prompts": prompts, "group": GROUP, "staleness": STALENESS, "max_in_flight": live}
        client = EngineClient((), backend=cast(Any, backend))
        run = watched_run(Path(folder), client, trainer, {"rollout": rollout, "trainer": {"steps": steps}})
        fleet = Fleet(engines, steps, prompts, faults, turns, random.Random(1), backend, run, trainer)
        health = versions._health  # pyright: ignore[reportPrivateUsage]
        stack.enter_context(patch.object(leased, "play_leased", lambda _, lease: _play(fleet, lease)))
        stack.enter_context(patch.object(versions, "_health", lambda *words: fleet.meter.of(health(*words))))
        stack.callback(run.ledger.close)
        gc.disable()
        stack.callback(gc.unfreeze)  # what the loop has settled
        stack.callback(gc.enable)
        seconds = run_virtually(lambda: _whole(fleet))
        return _figures(fleet, seconds)


def watched_run(
    folder: Path, client: EngineClient, trainer: SimpleNamespace, tables: dict[str, Any] | None = None
) -> Run:
    """A run of which there is only the ledger, weights and engines. `tables` are those of its configuration."""
    own = {"weights": {"seconds": RUN_DEADLINE}, "inference": {"max_batch": ROWS, "start_seconds": 600.0}}
    config = RLConfig.model_validate({"tasks": {"repository": "unused"}} | own | (tables or {}))
    rollout = config.rollout
    names = range(2 * rollout.prompts * (rollout.staleness + 1))
    tasks = tuple(SimpleNamespace(id=f"task-{number}") for number in names)
    probes = SimpleNamespace(served=lambda url, version: None)
    most = rollout.max_in_flight
    assert isinstance(most, int)
    run = SimpleNamespace(
        folder=folder,
        config=config,
        pool=SimpleNamespace(taskset=SimpleNamespace(mixed=False, split=lambda _: tasks), waiting=()),
        ledger=Ledger.open(f"sqlite:///{folder}/ledger.db"),
        weights=open_store(f"{folder}/weights"),
        engines=Engines([], client, cast(Any, probes), elastic=True),
        children=[trainer],
        trainer=trainer,
        concurrency=Concurrency(most, most, most),
        fleet=RunFleet(),
        record=EngineRecord(),
        progress=Progress(),
        impossible=None,
        sandbox=SimpleNamespace(alive=True, stats=SimpleNamespace(misses=0, hits=0)),
    )
    return cast(Run, run)


async def _whole(fleet: Fleet) -> float:
    """The whole run; its virtual seconds."""
    began = fleet.came = time.monotonic()
    await _publish(fleet, 0, ())
    for host in range(fleet.engines):
        await _start(fleet, host)

    def tick(_: Progress) -> None:
        fleet.ticks.append(1e3 * fleet.meter.seconds)
        fleet.meter.seconds = 0.0

    async def control() -> None:
        await fleet.meter.of(loop.rollouts(fleet.run, tick))

    disturbance = disturb(fleet.backend, fleet.faults, fleet.noise, lambda host: _start(fleet, host))
    tasks = [asyncio.create_task(work) for work in (control(), _train(fleet), disturbance)]
    try:
        while not tasks[0].done():
            await asyncio.wait(tasks, timeout=COLLECT_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            gc.collect()
            for task in tasks:
                if task.done():
                    task.result()
        began_at = time.thread_time()
        gc.collect()
        fleet.collection = 1e3 * (time.thread_time() - began_at)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.run.engines.aclose()
    return time.monotonic() - began


async def _start(fleet: Fleet, host: int) -> None:
    """Starts an engine, which fetches the newest version and joins the ledger."""
    fleet.started += 1
    engine = fleet.backend.start(f"http://engine-{fleet.started}", host)
    engine.version = fleet.published
    fleet.run.ledger.members.join(engine.url, f"host-{host}")


async def _publish(fleet: Fleet, version: int, groups: tuple[int, ...]) -> None:
    """Writes a manifest; the engines follow, a few of them late."""
    manifest = PolicyVersion(
        run="simulated", writer="w", version=version, parent=None, delta=(), anchor=Anchor(version=0, parts=()),
        schema="s", digest=digest_of(version), changed=0, elements=0, groups=groups, created=0.0, metrics={},
    )  # fmt: skip
    manifest_files.create(fleet.run.weights, manifest)
    fleet.published = version
    clock = asyncio.get_running_loop()

    def swap(engine: SimulatedEngine) -> None:
        if not engine.reachable.is_set():
            clock.call_later(5.0, swap, engine)
        elif not engine.dead:
            engine.version = max(engine.version, version)

    for engine in fleet.backend.alive:
        late = fleet.noise.random() < LATE
        clock.call_later(LATE_SECONDS if late else fleet.noise.uniform(*SWAP_SECONDS), swap, engine)


async def _train(fleet: Fleet) -> None:
    """Takes groups as the trainer does, and publishes versions."""
    ledger = fleet.run.ledger
    for version in range(fleet.steps):
        groups: list[Group] = []
        while len(groups) < fleet.prompts:
            await asyncio.sleep(1.0)
            groups = ledger.ready_groups(fleet.prompts, in_order=False, due=version - STALENESS)
        members = [(group.id, member) for group in groups for member in range(GROUP)]
        fleet.stale = max(fleet.stale, version - min(fleet.oldest.pop(member, version) for member in members))
        await asyncio.sleep(STEP_SECONDS)
        ids = tuple(group.id for group in groups)
        await _publish(fleet, version + 1, ids)
        ledger.consume(ids, version + 1)
    fleet.trainer.exit_code = 0


async def _play(fleet: Fleet, lease: EpisodeLease) -> None:
    """Plays an episode and records it."""
    client, noise = fleet.run.engines.client, random.Random(f"{lease.group_id}/{lease.member}/{lease.attempt}")
    ids, tokens, oldest, outcome = list(range(PROMPT)), 0, fleet.published, Outcome.SCORED
    last = 0.0

    def progress(_: Any) -> None:
        nonlocal last
        now = time.monotonic()
        fleet.gap, last = max(fleet.gap, now - last), now
        fleet.idle, fleet.came = max(fleet.idle, now - fleet.came), now

    try:
        for _ in range(noise.randint(1, 2 * fleet.turns - 1)):
            request = GenerateRequest(ids=ids, max_tokens=noise.randint(1, 2 * TURN_TOKENS), seed=1)
            last = time.monotonic()
            answer = await client.generate(request, TURN_SECONDS, progress, oldest=lease.version)
            fleet.mistaken += answer.ids != list(range(len(ids), len(ids) + request.max_tokens))
            tokens, oldest = tokens + len(answer.ids), min(oldest, *answer.versions)
            ids = [*ids, *answer.ids]
            await asyncio.sleep(noise.expovariate(1 / TOOL_SECONDS))
    except (EngineError, TimeoutError):
        outcome, fleet.failed = Outcome.INFRA, fleet.failed + 1
    blob = EpisodeBlob(key=blob_key(lease.group_id, lease.member, lease.attempt), digest="d")
    taken = fleet.run.ledger.finish(
        lease, outcome=outcome, reward=1.0, passed=noise.random() < 0.5, blob=blob, tokens=tokens, min_version=oldest,
        metrics={},
    )  # fmt: skip
    if taken and outcome is Outcome.SCORED:
        fleet.kept += tokens
        fleet.oldest[lease.group_id, lease.member] = oldest
    fleet.run.progress.finished += 1


def _figures(fleet: Fleet, seconds: float) -> FleetFigures:
    proof = fleet.run.ledger.conservation(manifests(fleet.run.weights))
    median, p95, p99, most = np.percentile(fleet.ticks, (50, 95, 99, 100))
    return FleetFigures(
        engines=fleet.engines,
        episodes=proof.done[Outcome.SCORED.value],
        conserved=proof.ok,
        sentence=proof.sentence,
        stale=fleet.stale,
        failed=fleet.failed,
        mistaken=fleet.mistaken,
        gap=fleet.gap,
        idle=fleet.idle,
        useful=fleet.kept / fleet.backend.sampled,
        resumed=fleet.run.engines.client.resumed,
        started=fleet.started,
        tick_median=float(median),
        tick_p95=float(p95),
        tick_p99=float(p99),
        tick_most=float(most),
        collection=fleet.collection,
        seconds=seconds,
    )
