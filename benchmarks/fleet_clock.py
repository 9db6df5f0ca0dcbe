"""A clock that jumps, and engines that exist on it alone: what a simulation of a fleet stands on.

On a `VirtualLoop` time passes when nothing is ready: it jumps to the next timer. What `asyncio.to_thread` would run in
a thread runs at once, and `time.monotonic` is the loop's time. `CpuMeter` measures the real CPU time of some of its
coroutines. `SimulatedEngines` is a backend of `EngineClient` whose servers sample at a rate, take seconds for a new
version, die, start again at another URL, stand still or are cut off.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import httpx2

from etude.protocol import GenerateRequest
from etude.protocol.backends import OnPart
from etude.records import Generation

T = TypeVar("T")
BEGIN = 1000.0  # the time of a loop's beginning
PART_SECONDS = 2.5  # of an answer; real servers send one every half second, which would only cost more here


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer whenever nothing is ready."""

    def __init__(self) -> None:
        self.now = BEGIN
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds of virtual time."""
        return self.now


class _Jump(selectors.SelectSelector):
    """A selector that moves the clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never comes")
        self._loop.now += max(timeout, 0.0)
        return []


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine on a virtual clock."""
    loop = VirtualLoop()

    async def at_once(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    with (
        patch("asyncio.to_thread", at_once),
        patch("time.monotonic", loop.time),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(main())


@dataclass
class CpuMeter:
    """The CPU time of coroutines, whatever else runs between their steps."""

    seconds: float = 0.0

    async def of(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, each step of which is measured."""
        return await _Measured(self, work)


class _Measured(Awaitable[T]):
    def __init__(self, meter: CpuMeter, work: Coroutine[Any, Any, T]) -> None:
        self._meter, self._work = meter, work

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            began = time.thread_time()
            try:
                waits = step()
            except StopIteration as end:
                return end.value
            finally:
                self._meter.seconds += time.thread_time() - began
            try:
                sent = yield waits
                step = lambda sent=sent: self._work.send(sent)  # noqa: E731
            except BaseException as e:
                step = lambda error=e: self._work.throw(error)  # noqa: E731


@dataclass(eq=False)
class SimulatedEngine:
    """A server. `version` is that of its weights, -1 before the first; `dead`: its process is gone."""

    url: str
    host: int
    version: int = -1
    dead: bool = False
    cut: bool = False  # off the network, it samples on
    reachable: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])

    def end(self) -> None:
        """Its process is killed: its connections break."""
        self.dead = True
        for future in self.running:
            if not future.done():
                future.set_exception(httpx2.ReadError("the connection is broken"))


class SimulatedEngines:
    """The backend of `EngineClient` for simulated servers, of `rows` rows, of which each samples `rate` tokens a
    second. The id of a token is its position. `sampled` counts all tokens."""

    follows = True

    def __init__(self, rows: int, rate: float) -> None:
        self._rows, self._rate = rows, rate
        self.by_url: dict[str, SimulatedEngine] = {}
        self.sampled = 0

    def start(self, url: str, host: int) -> SimulatedEngine:
        """A new server."""
        engine = self.by_url[url] = SimulatedEngine(url, host)
        engine.reachable.set()
        return engine

    @property
    def alive(self) -> list[SimulatedEngine]:
        """The servers whose processes run."""
        return [engine for engine in self.by_url.values() if not engine.dead]

    async def generate(self, http: httpx2.AsyncClient, url: str, request: GenerateRequest, on_part: OnPart) -> None:
        """One answer, as parts."""
        loop, engine = asyncio.get_running_loop(), await self._connected(url, 5.0)
        left, position = request.max_tokens, len(request.ids)
        while left:
            slower = max(1.0, (len(engine.running) + 1) / self._rows)
            count, version, began = min(left, int(PART_SECONDS * self._rate / slower)), engine.version, loop.time()
            part: asyncio.Future[None] = loop.create_future()
            engine.running.add(part)
            timer = loop.call_later(count * slower / self._rate, _end, part)
            try:
                await part
                if not engine.reachable.is_set():
                    await engine.reachable.wait()
            except (httpx2.ReadError, asyncio.CancelledError):
                self.sampled += min(left if engine.cut else count, int((loop.time() - began) * self._rate / slower))
                raise
            finally:
                timer.cancel()
                engine.running.discard(part)
            if engine.dead:
                raise httpx2.ReadError("the connection is broken")
            self.sampled += count
            ids = list(range(position, position + count))
            left, position = left - count, position + count
            reason = "" if left else "length"
            on_part(Generation(ids=ids, logprobs=[-1.0] * count, versions=[version] * count, finish_reason=reason))

    async def health(self, http: httpx2.AsyncClient, url: str, timeout: float) -> dict[str, Any]:
        """The report of one server."""
        engine = await self._connected(url, timeout)
        return {
            "status": "ok", "error": "", "version": engine.version, "digest": digest_of(engine.version),
            "last_pause_ms": 1.0, "running": len(engine.running), "waiting": 0, "generated_tokens": 0,
            "busy_seconds": 0.0, "configuration": {"head": "float32", "log_softmax": "float32"},
        }  # fmt: skip

    async def score(self, http: httpx2.AsyncClient, url: str, sequences: Sequence[list[int]], decoded: bool) -> None:
        """Nothing is scored."""

    async def check(self, http: httpx2.AsyncClient, url: str) -> None:
        """Raises TransportError for a server that cannot be reached."""
        await self._connected(url, 10.0)

    async def bring(self, http: httpx2.AsyncClient, url: str, version: int) -> None:
        """Does nothing: the servers follow the store."""

    def note(self, url: str, version: int) -> None:
        """Does nothing: every token names its version."""

    async def _connected(self, url: str, timeout: float) -> SimulatedEngine:
        engine = self.by_url[url]
        if not engine.reachable.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await engine.reachable.wait()
            if not engine.reachable.is_set():
                raise httpx2.ReadTimeout("no answer")
        if engine.dead:
            raise httpx2.ConnectError("connection refused")
        return engine


def _end(part: asyncio.Future[None]) -> None:
    if not part.done():
        part.set_result(None)


def digest_of(version: int) -> str:
    """The digest that a simulated server reports of a version."""
    return f"digest-{version}"


@dataclass(frozen=True)
class Faults:
    """Mean seconds between two faults: of one engine's process, of one engine that stands still, and of the network,
    which cuts a share of the hosts off."""

    death: float = 50 * 3600.0
    wedge: float = 50 * 3600.0
    partition: float = 600.0
    share: float = 0.1
    lasts: tuple[float, float] = (60.0, 300.0)  # a partition, a standstill and a new start


async def disturb(
    engines: SimulatedEngines, faults: Faults, noise: random.Random, start: Callable[[int], Awaitable[None]]
) -> None:
    """Disturbs the servers until it is cancelled. `start` starts a new server on a host."""

    async def again_and_again(mean: Callable[[], float], fault: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(noise.expovariate(1 / mean()))
            group.create_task(fault())

    async def die() -> None:
        engine = noise.choice(engines.alive)
        engine.end()
        await asyncio.sleep(noise.uniform(*faults.lasts))
        await start(engine.host)

    async def stand_still(count: int, cut: bool) -> None:
        chosen = noise.sample(engines.alive, count)
        for engine in chosen:
            engine.cut = cut
            engine.reachable.clear()
        await asyncio.sleep(noise.uniform(*faults.lasts))
        for engine in chosen:
            engine.cut = False
            engine.reachable.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(again_and_again(lambda: faults.death / len(engines.alive), die))
        group.create_task(again_and_again(lambda: faults.wedge / len(engines.alive), lambda: stand_still(1, False)))
        part = round(faults.share * len(engines.alive))
        group.create_task(again_and_again(lambda: faults.partition, lambda: stand_still(part, True)))
