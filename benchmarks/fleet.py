"""What lost engines cost a run: three real servers of the bundled model behind the controller's watch, and a simulation
of many.

engines-killed/throughput-share   tokens per second while one server after another is killed (kill -9) and another is
                                  started in its place, over the undisturbed rate times the share of servers that lived
useful-tokens/share               1 - tokens that were sampled and lost / tokens sampled, at one killed server a minute
recovery/seconds                  from a kill until a turn of the killed server has its next token elsewhere; the median
recovery/wedged-seconds           the same for a server that stands still (SIGSTOP), not with `quick`
controller/tick-ms-at-1000        CPU time of a tick of the controller with 1,000 simulated engines; the median

The servers share two cores with the controller, and with each other: those that live become faster when one dies, and
the start of another makes them slower.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2

from benchmarks.fleet_clock import Faults
from benchmarks.fleet_simulation import simulate, watched_run
from benchmarks.table import Table
from etude.config import ServerConfig
from etude.processes import Child
from etude.protocol import GenerateRequest
from etude.protocol.backends import EngineClient, EtudeBackend, OnPart
from etude.records import Generation
from etude.run.engines import engine_url, spawn_engine
from etude.run.member import LOOK_SECONDS as MEMBER_SECONDS
from etude.run.state import Run
from etude.run.versions import observe_versions

NANO = Path("models/nano")
SERVERS, CONVERSATIONS = 3, 12
PROMPT, TOKENS = 64, 600
LOOK_SECONDS, TURN_SECONDS = 0.1, 120.0
TICK_MS, THROUGHPUT, USEFUL = 100.0, 0.8, 0.98


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks; `quick` kills two servers instead of five, and simulates fewer episodes."""
    table = Table("fleet")
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        asyncio.run(_servers(table, Path(folder), quick))
    figures = simulate(1000, 2_000, Faults(), 1, 2) if quick else simulate(1000, 20_000, Faults())
    ticks = (
        f"p99 {figures.tick_p99:.1f}, longest {figures.tick_most:.0f}, a garbage collection {figures.collection:.0f}"
    )
    counted = f"{ticks}; {figures.episodes:,} episodes, simulated"
    table.add("controller/tick-ms-at-1000", figures.tick_median, "ms", counted)
    table.checks.update(figures.checks, **{"99 of 100 ticks take less than 100 ms": figures.tick_p99 <= TICK_MS})
    return table.result()


class _Watched(EtudeBackend):
    """The backend, and the server that each session's turn is at."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {}

    async def generate(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_part: OnPart) -> None:
        self.at[request.session or ""] = url
        await super().generate(http, url, request, on_part)


@dataclass
class _Servers:
    """The servers, the run that watches them, and what came from them."""

    folder: Path
    run: Run
    backend: _Watched
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    processes: dict[str, Child] = field(default_factory=dict[str, Child])
    kept: int = 0  # tokens that came
    sampled: int = 0  # by servers that were killed
    lost: dict[str, float] = field(default_factory=dict[str, float])  # sessions, and when their server was lost
    recovered: list[float] = field(default_factory=list[float])  # seconds
    ending: bool = False

    async def start(self) -> None:
        """Starts a server, which joins the ledger."""
        number = next(self.numbers)
        child = spawn_engine(ServerConfig(model=str(NANO), port=0, threads=1), self.folder, number)
        url = await asyncio.to_thread(engine_url, child, self.folder, number)
        self.processes[url] = child
        self.run.ledger.members.join(url, f"engine-{number}")

    async def sampled_by(self, url: str) -> int:
        """The tokens that a server has sampled."""
        return int((await self.run.engines.client.health(url))["generated_tokens"])

    async def strike(self, number: signal.Signals) -> str:
        """Sends a signal to the server with the most turns; returns its URL."""
        client = self.run.engines.client
        url = max(self.processes, key=client.unfinished)
        sampled = await self.sampled_by(url)
        now = time.monotonic()
        for pid in self.processes[url].pids.values():
            os.kill(pid, number)
        self.lost |= {session: now for session, at in self.backend.at.items() if at == url}
        self.sampled += sampled
        return url

    async def converse(self, name: int) -> None:
        """One turn after another."""
        for turn in itertools.count():
            if self.ending:
                return
            session = f"{name}-{turn}"
            ids = [(31 * turn + 7 * name + i) % 200 for i in range(PROMPT)]
            request = GenerateRequest(ids=ids, max_tokens=TOKENS, seed=turn, session=session)

            def came(part: Generation, session: str = session) -> None:
                self.kept += len(part.ids)
                if (since := self.lost.pop(session, None)) is not None:
                    self.recovered.append(time.monotonic() - since)

            await self.run.engines.client.generate(request, TURN_SECONDS, came)
            self.backend.at.pop(session)
            self.lost.pop(session, None)  # its last part was on its way

    async def watch(self) -> None:
        """What the controller does."""
        while True:
            await observe_versions(self.run)
            await asyncio.sleep(LOOK_SECONDS)

    async def until(self, count: int) -> None:
        """Waits until so many servers get turns."""
        async with asyncio.timeout(TURN_SECONDS):
            while len(self.run.engines.client.serving) != count:
                await asyncio.sleep(LOOK_SECONDS)


async def _servers(table: Table, folder: Path, quick: bool) -> None:
    backend = _Watched()
    trainer = SimpleNamespace(name="trainer", exit_code=None)
    run = watched_run(folder, EngineClient((), backend=backend), trainer)
    servers = _Servers(folder, run, backend)
    watching = asyncio.create_task(servers.watch())
    try:
        await asyncio.gather(*(servers.start() for _ in range(SERVERS)))
        await servers.until(SERVERS)
        turns = [asyncio.create_task(servers.converse(name)) for name in range(CONVERSATIONS)]
        await asyncio.sleep(2.0)
        undisturbed, _ = await _rate(servers, lambda: asyncio.sleep(6.0 if quick else 30.0))
        kills = 2 if quick else 5
        rate, alive = await _rate(servers, lambda: _kills(servers, kills, 3.0 if quick else 15.0))
        share = rate / (undisturbed * alive / SERVERS)
        recovered, servers.recovered = servers.recovered, []
        if not quick:
            url = await servers.strike(signal.SIGSTOP)
            await servers.until(SERVERS - 1)
            await asyncio.sleep(1.0)
            servers.processes.pop(url).popen.kill()
        servers.ending = True
        await asyncio.gather(*turns)
        sampled = servers.sampled + sum([await servers.sampled_by(url) for url in servers.processes])
        wasted = max(0, sampled - servers.kept) / kills  # in a minute at one kill a minute
        useful = 1 - wasted / (60 * rate + wasted)
        table.add(
            "engines-killed/throughput-share", share, "share", f"{kills} kills; {undisturbed:.0f} tokens/s before"
        )
        table.add("useful-tokens/share", useful, "share", f"{wasted:.0f} tokens a kill; one kill a minute")
        kept = f"{len(recovered)} turns, the longest {max(recovered):.2f}"
        table.add("recovery/seconds", statistics.median(recovered), "s", kept)
        if servers.recovered:
            table.add("recovery/wedged-seconds", statistics.median(servers.recovered), "s", "30 s of silence count")
        table.checks["throughput at least 0.8 of the survivors' share"] = share >= THROUGHPUT
        table.checks["useful tokens at least 0.98"] = useful >= USEFUL
        table.checks["every turn of a killed server went on within 10 s"] = max(recovered) <= 10.0
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        for child in servers.processes.values():
            child.stop(5)
        await run.engines.aclose()
        await run.engines.client.close()
        run.ledger.close()


async def _rate(servers: _Servers, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Tokens per second while the work is done, and the mean number of servers that lived."""
    began, kept, counts = time.monotonic(), servers.kept, list[int]()

    async def count() -> None:
        while True:
            counts.append(len(servers.processes))
            await asyncio.sleep(LOOK_SECONDS)

    counting = asyncio.create_task(count())
    await work()
    counting.cancel()
    return (servers.kept - kept) / (time.monotonic() - began), sum(counts) / len(counts)


async def _kills(servers: _Servers, count: int, pause: float) -> None:
    for _ in range(count):
        url = await servers.strike(signal.SIGKILL)
        servers.processes.pop(url).stop(1)
        await asyncio.sleep(MEMBER_SECONDS)  # then the process that watches the server says so
        servers.run.ledger.members.drain(url, "it was killed")
        servers.run.ledger.members.set([(url, "gone", "it was killed", -1)])
        await servers.until(SERVERS - 1)
        await servers.start()
        await servers.until(SERVERS)
        await asyncio.sleep(pause)
