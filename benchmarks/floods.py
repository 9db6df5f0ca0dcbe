"""What careless and hostile clients cost the others, and what they leave behind, at `etude serve` and at the gateway.

NAME/quiet-ms      an honest chat of 64 tokens, alone; the median
NAME/flooded-ms    the same beside 100 streams of four whole contexts each, which nobody reads
NAME/ratio         the second by the first
NAME/memory-mb     of the server, ten seconds after the last byte of 60 bodies of 6 MB that stand still

The flood and the honest client ask from one address; at the gateway they have keys of two tenants.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.live_gateway import gateway_process, live_folder, start, wait_for
from benchmarks.table import Table
from etude.live.log.accounts import open_log
from etude.live.log.records import LivePolicy
from etude.live.log.tenants import create_key, set_policy

STREAMS, CHOICES = 100, 4
BODIES, BODY_BYTES = 60, 6 << 20
WAIT_SECONDS = 10.0  # after which memory is back
SETTLE_SECONDS = 3.0  # between the flood's requests and the honest ones
ANSWER_SECONDS = 300.0
TOKENS = 64


def run(quick: bool) -> dict[str, Any]:
    """The figures of both servers; with `quick` of fewer requests."""
    table = Table("floods")
    with tempfile.TemporaryDirectory(prefix="etude-floods-") as folder, ExitStack() as running:
        root = Path(folder)
        command = [sys.executable, "-m", "etude.cli.main", "serve", "nano", "--port", "0", "--ready-file"]
        child, ready = start(root, "serve", command)
        running.callback(child.wait)
        running.callback(child.terminate)
        serve = wait_for(ready, child)
        config, key = live_folder(root, serve)
        other = _other_key(root)
        gateway = running.enter_context(gateway_process(root, config))
        servers = {"serve": (serve, child.pid, "", ""), "gateway": (gateway, _pid(root / "gateway.json"), key, other)}
        for name, (url, pid, honest, hostile) in servers.items():
            figures = asyncio.run(_flooded(url, honest, hostile, 5 if quick else 15))
            memory = asyncio.run(_standing(url, hostile, pid))
            ratio = figures["flooded"] / figures["quiet"]
            table.add(f"{name}/quiet-ms", 1e3 * figures["quiet"], "ms", f"{TOKENS} tokens")
            table.add(f"{name}/flooded-ms", 1e3 * figures["flooded"], "ms", f"longest {1e3 * figures['longest']:.0f}")
            table.add(f"{name}/ratio", ratio, "", "flooded by quiet")
            table.add(f"{name}/memory-mb", memory[2], "MB", f"before {memory[0]:.0f}; at most {memory[1]:.0f}")
            table.checks[f"{name}: an honest request waits at most twice its quiet time"] = ratio <= 2.0
            table.checks[f"{name}: memory is back within a tenth after ten seconds"] = memory[2] <= 1.1 * memory[0]
    return table.result()


def _other_key(root: Path) -> str:
    engine = open_log(root / "live", None)
    key = create_key(engine, "hostile", "hostile")
    set_policy(engine, "hostile", LivePolicy(consent=True, requests_per_minute=10**7))
    engine.dispose()
    return key


def _pid(ready: Path) -> int:
    return json.loads(ready.read_text())["pid"]


def _head(url: str, key: str, length: int) -> bytes:
    bearer = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{bearer}Connection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _chat(url: str, key: str, text: str, **more: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "ignore_eos": True} | more).encode()
    return _head(url, key, len(body)) + body


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    # The small limit: a client that does not read keeps nothing but the kernel's buffer.
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _ask(url: str, key: str, number: int) -> float:
    """Seconds of an honest request. Raises RuntimeError unless it is answered 200."""
    begun = time.perf_counter()
    async with asyncio.timeout(ANSWER_SECONDS), _connected(url) as (reader, writer):
        writer.write(_chat(url, key, f"Fix number {number}.", max_tokens=TOKENS, temperature=0))
        answer = await reader.read()
        while part := await reader.read(1 << 16):
            answer += part
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"an honest request was answered {answer[:300]!r}")
    return time.perf_counter() - begun


async def _stream(url: str, key: str, number: int) -> None:
    """A stream that nobody reads, until it is cancelled."""
    async with _connected(url) as (_, writer):
        writer.write(_chat(url, key, f"Tell story {number}.", n=CHOICES, stream=True))
        await asyncio.sleep(ANSWER_SECONDS)


async def _flooded(url: str, honest: str, hostile: str, count: int) -> dict[str, float]:
    quiet = [await _ask(url, honest, number) for number in range(count + 3)][3:]
    flood = [asyncio.create_task(_stream(url, hostile, number)) for number in range(STREAMS)]
    await asyncio.sleep(SETTLE_SECONDS)
    flooded = [await _ask(url, honest, 1000 + number) for number in range(count)]
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.sleep(SETTLE_SECONDS)
    return {"quiet": statistics.median(quiet), "flooded": statistics.median(flooded), "longest": max(flooded)}


async def _standing(url: str, key: str, pid: int) -> tuple[float, float, float]:
    """MB of the server before bodies that stand still, at most, and `WAIT_SECONDS` after their last bytes."""
    before, most, sent = _memory(pid), 0.0, 0

    async def stand() -> None:
        nonlocal sent
        async with _connected(url) as (_, writer):
            writer.write(_head(url, key, BODY_BYTES + 1) + b" " * BODY_BYTES)
            with suppress(ConnectionError):  # refused meanwhile
                await writer.drain()
            sent += 1
            await asyncio.sleep(ANSWER_SECONDS)

    bodies = [asyncio.create_task(stand()) for _ in range(BODIES)]
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        most = max(most, _memory(pid))
        await asyncio.sleep(0.1)
        if sent < BODIES:
            end = time.monotonic() + WAIT_SECONDS
    after = _memory(pid)
    for task in bodies:
        task.cancel()
    await asyncio.gather(*bodies, return_exceptions=True)
    return before, most, after


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
