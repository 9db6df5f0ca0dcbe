"""Requests that are wrong in every way, over raw sockets: a grammar of an API, a fixed seed, what a server must keep.

report = asyncio.run(fuzz(target, seconds, seed))
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

WORKERS = 12
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HALF_REQUESTS = 100
ANSWER_SECONDS = 3.0  # after which an answer is no longer waited for
HONEST_EVERY = 0.25
SETTLE_SECONDS = 60.0

SIMPLE = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**53,
    2**63,
    2**64,
    2**80,
    -(2**80),
    0.0,
    -0.5,
    1e-38,
    5e-324,
    1e308,
    0.1,
    "",
    "x",
    "\x00",
    "\u202e\ufeff\U0001f600",
    "<|im_end|><|im_start|>",
    "../../etc/passwd",
    "a" * 3000,
    [],
    {},
    [[]],
    [None],
    [1, "a", {}],
    {"type": "text"},
    [{"type": "image_url"}],
    [{"type": "document", "text": "d"}],
    {"role": "user"},
]
RAW = [
    b"NaN",
    b"1e400",
    b"-Infinity",
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\xff\xfe"',
    b'"\xc0\x80"',
    b"01",
    b"1" * 400,
    b"1.",
    b'{"a":1,"a":2}',
    b"[" * 300 + b"]" * 300,
    b'{"a":' * 90 + b"1" + b"}" * 90,
    b'"\\u00"',
    b"tru",
    b"'x'",
    b"",
]
MSGPACK = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 5000,
    b"\x81" * 5000,
    b"\xdd\x00\x01\x00\x00" + b"\x90" * 65536,
    b"\xc1",
    b"\xc7\x05\xff12345",
    b"\xcb\x7f\xf8" + b"\0" * 6,
    b"\x82\xa3ids\xdd\x00\x0f\xff\xff" + b"\x90" * 9000,
    b"",
]
HEADERS = [
    b"Host: evil.example",
    b"Host: localhost.evil.example:1",
    b"Host: ",
    b"Origin: http://evil.example",
    b"Origin: null",
    b"Sec-Fetch-Site: cross-site",
    b"Content-Type: text/plain",
    b"Content-Type: application/x-www-form-urlencoded",
    b"Content-Type: application/json; charset=latin-1",
    b"Content-Type: " + b"x" * 3000,
    b"Content-Encoding: gzip",
    b"Authorization: Bearer wrong",
    b"Authorization: Basic eDp5",
    b"X-Api-Key: \xe9",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Transfer-Encoding: gzip, chunked",
    b"Range: bytes=",
    b"Range: bytes=0-0,2-3",
    b"Range: bytes=" + b"9" * 5000 + b"-",
    b"Accept: application/msgpack",
    b"Cookie: " + b"a" * 9000,
    b"X: " + b"y" * 70_000,
    b"Content-Length: 99999999999",
    b"Content-Length: -5",
    b"Content-Length: 3\r\nContent-Length: 4",
    b" folded: x",
    b"No colon",
    b"X\x00: y",
    b"\r\nGET / HTTP/1.1",
]
HEADS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\r\n\r\n",
    b"\r\n" * 500,
    b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"G" * 100_000,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n",
    b"\x00" * 2000,
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
]


@dataclass(frozen=True)
class ApiRoute:
    """A route, and a body that it takes; `headers` are sent with every request to it."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    headers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class FuzzTarget:
    """A server: where it listens, its process, its API, and an honest request with the check of its answer."""

    name: str
    port: int
    pid: int
    routes: tuple[ApiRoute, ...]
    honest: bytes
    right: Callable[[bytes], bool]
    headers: tuple[bytes, ...] = ()
    pooled: int = 0  # descriptors that a bounded pool may open later


@dataclass
class FuzzReport:
    """What was seen. `wrong` holds the statuses that must not be, with the beginnings of their requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)  # seconds of honest requests before
    beside: list[float] = field(default_factory=list)  # and beside the others
    honest_wrong: int = 0
    halves_open: int = 0
    memory: list[int] = field(default_factory=list)  # bytes, at a third of the time and later
    descriptors: tuple[int, int] = (0, 0)

    def row(self, name: str) -> str:
        """A row of the published table."""
        counts = ", ".join(f"{status} {count}" for status, count in sorted(self.statuses.items()))
        p50 = [1e3 * statistics.median(times) if times else float("nan") for times in (self.quiet, self.beside)]
        first, most = self.memory[0] / 2**20, max(self.memory) / 2**20
        return (
            f"| {name} | {sum(self.statuses.values())} | {counts} | {first:.0f} -> {most:.0f} "
            f"({100 * (most / first - 1):+.1f} %) | {self.descriptors[0]} -> {self.descriptors[1]} | "
            f"{p50[0]:.0f} -> {p50[1]:.0f} | {self.honest_wrong} of {len(self.beside) + self.honest_wrong} |"
        )


_COLUMNS = ("server", "requests", "statuses", "MiB", "descriptors", "honest p50, ms", "honest, wrong")
HEADING = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


class Grammar:
    """Requests to an API, drawn with a seed."""

    def __init__(self, target: FuzzTarget, seed: int) -> None:
        self._target, self._random = target, random.Random(seed)

    def case(self) -> bytes:
        """One connection's bytes: mostly one request, sometimes several, sometimes none."""
        pick = self._random
        if pick.random() < 0.06:
            return pick.choice(HEADS)
        count = pick.choice([1] * 12 + [2, 5])
        data = b"".join(self._request() for _ in range(count))
        if pick.random() < 0.05:
            at = pick.randrange(len(data))
            data = data[:at] + bytes(pick.randrange(256) for _ in range(pick.randrange(1, 9))) + data[at + 1 :]
        return data

    def _request(self) -> bytes:
        pick = self._random
        route = pick.choice(self._target.routes)
        method = route.method if pick.random() < 0.95 else pick.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "BREW"])
        path = (
            route.path
            if pick.random() < 0.95
            else pick.choice(["/", "/no", "/%00", "/../..", "/v1/%ff", "//", "/?" * 99])
        )
        packed = route.body is not None and pick.random() < 0.15
        body = b"" if route.body is None else self._packed(route.body) if packed else self._json(route.body)
        headers = [b"Host: localhost:8000", *self._target.headers, *route.headers]
        if body or pick.random() < 0.3:
            headers.append(b"Content-Type: application/msgpack" if packed else b"Content-Type: application/json")
        if pick.random() < 0.3:
            wrong = pick.choice(HEADERS)
            name = wrong.partition(b":")[0]
            headers = [header for header in headers if header.partition(b":")[0] != name or header in route.headers]
            headers.insert(pick.randrange(len(headers) + 1), wrong)
        if pick.random() < 0.15:
            headers.append(b"Transfer-Encoding: chunked")
            body = self._chunked(body)
        elif body or method == "POST":
            length = len(body) if pick.random() < 0.97 else pick.choice([0, 1, len(body) + 9, 17 << 20])
            headers.append(b"Content-Length: %d" % length)
        first = f"{method} {path} HTTP/1.{1 if pick.random() < 0.97 else 0}".encode()
        return b"\r\n".join([first, *headers]) + b"\r\n\r\n" + body

    def _chunked(self, body: bytes) -> bytes:
        pick, parts = self._random, []
        while body:
            size = pick.randrange(1, max(2, len(body)))
            parts.append(b"%x\r\n%b\r\n" % (size, body[:size]))
            body = body[size:]
        end = pick.choice([b"0\r\n\r\n"] * 9 + [b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n"])
        return b"".join(parts) + end

    def _json(self, template: dict[str, Any]) -> bytes:
        pick = self._random
        roll = pick.random()
        if roll < 0.1:
            return pick.choice([*RAW, b"[" * 100_000, b'{"a":' * 20_000, b"[" + b"[]," * 60_000 + b"[]]", b"\x00" * 99])
        body = self._mutated(template)
        raw: list[bytes] = []

        def hold(value: object) -> str:
            assert isinstance(value, bytes)
            raw.append(value)
            return f"@@{len(raw) - 1}@@"

        data = json.dumps(body, default=hold, ensure_ascii=pick.random() < 0.5).encode("utf-8", "surrogatepass")
        for i, value in enumerate(raw):
            data = data.replace(b'"@@%d@@"' % i, value)
        if roll < 0.16:
            data = data[: pick.randrange(len(data))]
        return data

    def _packed(self, template: dict[str, Any]) -> bytes:
        pick = self._random
        if pick.random() < 0.4:
            return pick.choice(MSGPACK)
        try:
            return msgspec.msgpack.encode(self._mutated(template))
        except OverflowError:
            return pick.choice(MSGPACK)

    def _mutated(self, template: dict[str, Any]) -> dict[str, Any]:
        """The body with up to three values replaced, left out, repeated or added, at any depth."""
        pick = self._random
        body = copy.deepcopy(template)
        for _ in range(pick.choice([0, 1, 1, 1, 2, 3])):
            at: Any = body
            while True:
                keys = list(at) if isinstance(at, dict) else list(range(len(at)))
                if not keys:
                    break
                key = pick.choice(keys)
                if isinstance(at[key], dict | list) and at[key] and pick.random() < 0.6:
                    at = at[key]
                    continue
                self._spoil(at, key)
                break
        return body

    def _spoil(self, at: Any, key: Any) -> None:
        pick = self._random
        roll = pick.random()
        if roll < 0.1:
            del at[key]
        elif roll < 0.2 and isinstance(at, dict):
            at[pick.choice(["extra", "stream", "n", "stop", "temperature", "", "\x00", "logit_bias"])] = self._value()
        elif roll < 0.3:
            simple = not isinstance(at[key], dict | list | str)  # a repeated list of repeated lists would have no end
            at[key] = [at[key]] * pick.choice([2, 20, 300, 5000] if simple else [2, 20])
        else:
            at[key] = self._value()

    def _value(self) -> Any:
        pick = self._random
        roll = pick.random()
        if roll < 0.2:
            return pick.choice(RAW)
        if roll < 0.24:
            return pick.choice(["x" * 100_000, "\u4e2d " * 20_000, [1] * 100_000, ["s"] * 20_000, "a " * 400_000])
        return copy.deepcopy(pick.choice(SIMPLE))

    def pieces(self, data: bytes) -> tuple[list[bytes], bool]:
        """The bytes in the pieces that they are sent in, with waits between them, and whether the client hangs up after
        the last without reading."""
        pick = self._random
        roll = pick.random()
        if roll < 0.08:
            return [data[: pick.randrange(len(data) + 1)]], True
        if roll < 0.12:
            size = max(1, len(data) // 8)
            return [data[i : i + size] for i in range(0, len(data), size)], False
        return [data], False


async def fuzz(target: FuzzTarget, seconds: float, seed: int) -> FuzzReport:
    """Fuzzes for so long; honest requests run beside."""
    report = FuzzReport()
    for _ in range(8):
        await _ask_honestly(target, report, report.quiet)
    before = _descriptors(target.pid)
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(_send_cases(target, Grammar(target, seed * 1000 + worker), end, report))
        group.create_task(_be_honest(target, report, end))
        group.create_task(_watch_memory(target, report, seconds, end))
        halves = [group.create_task(_half(target)) for _ in range(HALF_REQUESTS)]
    report.halves_open = sum(task.result() for task in halves)
    deadline = time.monotonic() + SETTLE_SECONDS
    while _descriptors(target.pid) > before and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    report.descriptors = before, _descriptors(target.pid)
    report.memory.append(_memory(target.pid))
    return report


async def _send_cases(target: FuzzTarget, grammar: Grammar, end: float, report: FuzzReport) -> None:
    while time.monotonic() < end:
        data = grammar.case()
        pieces, leaves = grammar.pieces(data)
        try:
            head = await _exchange(target.port, pieces, leaves)
        except (OSError, TimeoutError) as e:
            report.statuses[type(e).__name__] += 1
            continue
        status = head.split(b" ", 2)[1].decode() if head.startswith(b"HTTP/1.1 ") else "none"
        report.statuses[status] += 1
        busy = status in ("503", "529") and b"\r\nretry-after:" in head.lower()
        if status.startswith("5") and not busy:
            report.wrong.append((status, data[:2000], head[:1000]))


async def _exchange(port: int, pieces: Sequence[bytes], leaves: bool) -> bytes:
    """The beginning of the last answer's head, and of its body; nothing if there was none in time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if len(pieces) > 1:
                    await asyncio.sleep(0.02)
            head = b"" if leaves else await reader.read(4096)
            while head.startswith(CONTINUE):
                head = head.removeprefix(CONTINUE) or await reader.read(4096)
            return head
    except TimeoutError:
        return b""
    finally:
        writer.transport.abort()


async def _ask_honestly(target: FuzzTarget, report: FuzzReport, times: list[float]) -> None:
    start = time.monotonic()
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(target.honest)
            answer = await reader.read()  # it asks for the connection's end
            writer.close()
    except (OSError, TimeoutError) as e:
        report.honest_wrong += 1
        report.wrong.append((type(e).__name__, target.honest, b""))
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 200 ") and target.right(body):
        times.append(time.monotonic() - start)
    elif head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after:" in head:
        report.statuses["honest 503"] += 1
    else:
        report.honest_wrong += 1
        report.wrong.append(("honest", target.honest, answer[:2000]))


async def _be_honest(target: FuzzTarget, report: FuzzReport, end: float) -> None:
    while time.monotonic() < end:
        await _ask_honestly(target, report, report.beside)
        await asyncio.sleep(HONEST_EVERY)


async def _half(target: FuzzTarget) -> bool:
    """Whether a connection with half a request is still open after a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Ty")
        async with asyncio.timeout(SETTLE_SECONDS):
            while await reader.read(4096):
                pass
        return False
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        writer.transport.abort()


async def _watch_memory(target: FuzzTarget, report: FuzzReport, seconds: float, end: float) -> None:
    await asyncio.sleep(seconds / 3)
    while time.monotonic() < end:
        report.memory.append(_memory(target.pid))
        await asyncio.sleep(1.0)


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
