"""What the gateway adds to an answer, and which signals a killed gateway loses.

p99-added-ms     99th percentile of the time of an answer through the gateway at 200 requests a second, less that of the
                 stub asked directly, in the same round; median over the rounds. Requests begin when they are due, not
                 when an earlier one has ended, and their time counts from then. Every turn is recorded: fetched,
                 scrubbed, encrypted, synced. Baseline: the same for a plain pass-through of Starlette and httpx2.
rps              answers a second with 32 clients that ask again at once
signals/lost     signals that were acknowledged and are not in the log, after kill -9 of the gateway at random moments
                 while signals come
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from benchmarks.table import row
from etude.errors import UserError
from etude.live.gateway.entries import Key, ServedEntry
from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.upstream import AWAY, Server
from etude.live.gateway.writer import LogWriter
from etude.live.log import schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.records import Arm, LivePolicy, ulid
from etude.live.log.tenants import create_key, set_policy

RATE, CLIENTS = 200, 32
START_SECONDS = 120.0
TENANT = "bench"
CHAT = json.dumps({"model": "stub", "messages": [{"role": "user", "content": "Fix `chunk` in arrays.py."}]}).encode()


def rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """The rows of this file, and what must hold."""
    with tempfile.TemporaryDirectory(prefix="etude-live-") as folder, ExitStack() as running:
        root = Path(folder)
        stub = running.enter_context(process(root, "stub", "benchmarks.live_stub", "stub"))
        proxy = running.enter_context(process(root, "proxy", "benchmarks.live_stub", "proxy", after=(stub,)))
        config, key = live_folder(root, stub)
        gateway = running.enter_context(gateway_process(root, config))
        seconds, rounds = (1.0, 3) if quick else (10.0, 5)
        figures = asyncio.run(
            _measured({"direct": stub, "pass-through": proxy, "gateway": gateway}, key, seconds, rounds)
        )
        missing = _unrecorded(root, figures.pop("answers"))
        lost, acknowledged = kill_rounds(root / "kills", stub, 2 if quick else 12, seed=1)
    added, plain = figures["gateway"] - figures["direct"], figures["pass-through"] - figures["direct"]
    shown = [
        row("gateway/p99-added-ms", added, "ms", f"pass-through {plain:.2f}; direct {figures['direct']:.2f} in all"),
        row("gateway/rps", figures["gateway rps"], "1/s", f"pass-through {figures['pass-through rps']:.0f}"),
        row("gateway/dropped-records", missing, "turns", "answered and not in the log"),
        row("signals/lost", lost, "signals", f"of {acknowledged} acknowledged"),
    ]
    within = added <= 2.0 or figures["gateway"] <= 1.5 * figures["pass-through"]
    return shown, {"gateway adds 2 ms, or half of a pass-through": within, "no acknowledged signal is lost": lost == 0}


@contextmanager
def process(
    folder: Path, name: str, module: str, *argv: str, after: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[str]:
    """The URL of `python -m MODULE ARGV READY_FILE AFTER`. It is killed in the end."""
    child, ready = start(folder, name, [sys.executable, "-m", module, *argv], after, env)
    try:
        yield wait_for(ready, child)
    finally:
        child.kill()
        child.wait()


def start(
    folder: Path, name: str, command: list[str], after: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Path]:
    """A process, and the file that tells its URL once it answers."""
    ready = folder / f"{name}.json"
    ready.unlink(missing_ok=True)
    with (folder / f"{name}.log").open("ab") as log:
        child = subprocess.Popen([*command, str(ready), *after], stdout=log, stderr=log, env=os.environ | (env or {}))
    return child, ready


def wait_for(ready: Path, child: subprocess.Popen[bytes]) -> str:
    """The URL of a process. Raises UserError if it ends or does not answer in time."""
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"{ready.stem} did not start: see {ready.with_suffix('.log')}")
        time.sleep(0.02)
    return json.loads(ready.read_text())["url"]


def live_folder(root: Path, upstream: str, database: str | None = None) -> tuple[Path, str]:
    """The configuration of a live loop before one server, and a key of a tenant that consents."""
    root.mkdir(exist_ok=True)
    config = root / "live.toml"
    lines = ['stage = "live"', f"folder = {json.dumps(str(root / 'live'))}"]
    lines += [f"database = {json.dumps(database)}"] if database else []
    lines += ["[[clusters]]", 'name = "a"', f"urls = [{json.dumps(upstream)}]", f'store = "{root}/store"']
    config.write_text("\n".join([*lines, "[gateway]", "port = 0", ""]))
    engine = open_log(root / "live", database)
    key = create_key(engine, TENANT, "bench")
    set_policy(engine, TENANT, LivePolicy(consent=True, requests_per_minute=10**7))
    engine.dispose()
    return config, key


@contextmanager
def gateway_process(root: Path, config: Path, clock: Path | None = None) -> Iterator[str]:
    """The URL of `etude live serve`; `clock`: the file of a `SetClock` that it reads in place of the machine's."""
    module = ["benchmarks.live_clock", str(clock)] if clock else ["etude.cli.main"]
    child, ready = start(root, "gateway", [sys.executable, "-m", *module, "live", "serve", str(config), "--ready-file"])
    try:
        yield wait_for(ready, child)
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(60)


# --- Load -------------------------------------------------------------------------------------------------------------


async def _measured(urls: dict[str, str], key: str, seconds: float, rounds: int) -> dict[str, float]:
    servers = {name: Server(url, name, key) for name, url in urls.items()}
    percentiles: dict[str, list[float]] = {name: [] for name in servers}
    for server in servers.values():
        await load(server, 100, 0.5)
    for _ in range(rounds):
        for name, server in servers.items():
            times = await load(server, RATE, seconds)
            percentiles[name].append(1e3 * float(np.percentile(times, 99)))
    shown = {name: statistics.median(values) for name, values in percentiles.items()}
    for name in ("pass-through", "gateway"):
        shown[f"{name} rps"] = await closed_loop(servers[name], CLIENTS, seconds)
    return shown | {"answers": servers["gateway"].answers}


async def load(server: Server, rate: float, seconds: float) -> list[float]:
    """Seconds of each answer, from the moment when its request was due. Raises one of AWAY, or RuntimeError."""
    begun = time.perf_counter()

    async def one(due: float) -> float:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await ask(server)
        return time.perf_counter() - due

    return await asyncio.gather(*(one(begun + number / rate) for number in range(int(rate * seconds))))


async def closed_loop(server: Server, clients: int, seconds: float) -> float:
    """Answers a second of clients that ask again at once."""
    end, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await ask(server)
            count += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return count / seconds


async def ask(server: Server, path: str = "/v1/chat/completions", body: bytes = CHAT) -> tuple[str, bytes]:
    """The generation's id and the body of an answer, which must be 200."""
    answer = await server.ask("POST", path, [(b"content-type", b"application/json")], body, 30.0)
    try:
        whole = b"".join([part async for part in answer.parts()])
    finally:
        answer.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} was answered {answer.status}: {whole[:200]!r}")
    return answer.header(b"x-etude-generation") or "", whole


def _unrecorded(root: Path, answers: float) -> float:
    """Turns that were answered and are not in the log, once the queue is empty."""
    engine, deadline = open_log(root / "live", None), time.monotonic() + 30
    count = 0
    while count < answers and time.monotonic() < deadline:
        time.sleep(0.2)
        with engine.connect() as connection:
            count = connection.execute(sa.select(sa.func.count()).select_from(schema.turns)).scalar_one()
    engine.dispose()
    return answers - count


# --- Kills ------------------------------------------------------------------------------------------------------------


def kill_rounds(
    root: Path, upstream: str, kills: int, seed: int, database: str | None = None, clients: int = 8
) -> tuple[int, int]:
    """Acknowledged signals that the log lacks, and how many were acknowledged, after kill -9 of the gateway at random
    moments."""
    config, key = live_folder(root, upstream, database)
    turns = _served_turns(root, database)
    command = [sys.executable, "-m", "etude.cli.main", "live", "serve", str(config), "--ready-file"]
    rng, acknowledged = random.Random(seed), set[str]()
    for number in range(kills):
        child, ready = start(root, f"killed-{number}", command)
        url = wait_for(ready, child)
        try:
            asyncio.run(
                _signalling(Server(url, "killed", key), turns, acknowledged, child, rng.uniform(0.05, 1.0), clients)
            )
        finally:
            child.kill()
            child.wait()
    engine = open_log(root / "live", database)
    with engine.connect() as connection:
        held = set(connection.scalars(sa.select(schema.signals.c.event)))
    engine.dispose()
    accounts = Accounts(root / "live")
    return sum(accounts.digest("event", TENANT, event) not in held for event in acknowledged), len(acknowledged)


def _served_turns(root: Path, database: str | None) -> list[str]:
    """Turns that may be signalled on."""
    engine, accounts = open_log(root / "live", database), Accounts(root / "live")
    queue, turns = RecordQueue(), [ulid() for _ in range(64)]
    writer = LogWriter(queue, engine, open_blobs(root / "live"), accounts)
    account = accounts.name(TENANT, "user")
    for turn in turns:
        queue.append(ServedEntry(turn, Key(0, Arm.CONTROL, account, TENANT), account))
    writer.close()
    engine.dispose()
    return turns


async def _signalling(
    server: Server, turns: list[str], acknowledged: set[str], child: subprocess.Popen[bytes], after: float, clients: int
) -> None:
    """Signals come from several clients; the gateway is killed `after` seconds."""

    async def client() -> None:
        while True:
            events = [
                {"response_id": random.choice(turns), "name": "undone", "event_id": ulid()}
                for _ in range(random.randint(1, 4))
            ]
            try:
                _, body = await ask(server, "/v1/feedback", msgspec.json.encode(events))
            except AWAY:
                return
            results = json.loads(body)["results"]
            acknowledged.update(each["event"] for each in results if each["status"] == "recorded")

    async def killer() -> None:
        await asyncio.sleep(after)
        child.kill()

    await asyncio.gather(killer(), *(client() for _ in range(clients)))
