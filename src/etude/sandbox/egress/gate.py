"""The proxy of one box: plain requests and TLS tunnels to hosts of the list, and the package index.

It runs in the owner of the sandbox, on connections that come from the box's own network namespace, and sees names
alone: it resolves them itself, opens no TLS, and follows no redirect, which is a request like any other.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass

import httpx2

from etude.sandbox.egress import mirror, parsing
from etude.sandbox.egress.mirror import IndexMirror, IndexUnavailable
from etude.sandbox.egress.policy import Egress, EgressRefused, EgressRequest, resolve

PORT = 3128
MAX_SENT = 1 << 20  # bytes that a box may send in all: requests, no uploads
MAX_REQUESTS = 2000
MAX_OPEN = 32  # at a time
MAX_SECONDS = 300.0  # of a request
CONNECT_SECONDS = 20.0
PROXY = f"http://127.0.0.1:{PORT}"
ENVIRONMENT = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
_BROKEN = OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError, IndexUnavailable, httpx2.HTTPError


class Network:
    """The common parts of a sandbox's gates: policy, index and log."""

    def __init__(self, egress: Egress) -> None:
        self.egress = egress
        self.mirror = IndexMirror(egress.index) if egress.index is not None else None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a box's shell."""
        return ENVIRONMENT | (mirror.ENVIRONMENT if self.mirror is not None else {})

    def log(self, box: int, request: EgressRequest) -> None:
        """Append a request of a box to the log, if there is one."""
        if self.egress.log is not None:
            line = {"time": round(time.time(), 3), "box": box, **asdict(request)}
            with open(self.egress.log, "a") as file:
                file.write(json.dumps(line) + "\n")

    async def close(self) -> None:
        """Close the index."""
        if self.mirror is not None:
            await self.mirror.close()


@dataclass
class _Seen:
    """The parts of a request that were read so far."""

    head: parsing.RequestHead | None = None
    refused: bool = False
    answered: bool = False  # it is too late for an error page
    sent: int = 0
    received: int = 0


class Gate:
    """The way out of one box. `requests` are its ended requests."""

    def __init__(self, network: Network, box: int) -> None:
        self.requests: list[EgressRequest] = []
        self._network = network
        self._box = box
        self._sent = 0
        self._count = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket) -> None:
        """Serve a listener of the box's network namespace."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=parsing.MAX_HEAD)

    async def close(self) -> None:
        """End every request; each has its line in the log then."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        if self._count > MAX_REQUESTS or len(self._tasks) >= MAX_OPEN:
            writer.transport.abort()
            if self._count <= MAX_REQUESTS + 1:  # the log ends, too
                self._ended(_Seen(refused=True), "too many requests")
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen, why = _Seen(), ""
        try:
            async with asyncio.timeout(MAX_SECONDS):
                await self._answer(reader, writer, seen)
        except EgressRefused as e:
            seen.refused, why = True, str(e)
            await _say(writer, seen, "403 Forbidden", why)
        except asyncio.CancelledError:
            why = "the box was closed"
            raise
        except _BROKEN as e:
            why = str(e) if isinstance(e, IndexUnavailable) else type(e).__name__
            await _say(writer, seen, "502 Bad Gateway", why)
        finally:
            if seen.head is not None or seen.refused:  # else there was no request
                self._ended(seen, why)
            writer.close()

    def _ended(self, seen: _Seen, why: str) -> None:
        head = seen.head or parsing.RequestHead("", "", 0, None, ())
        place = head.method[:16], head.host[:253], head.port, head.path and head.path[:2000]
        request = EgressRequest(*place, seen.sent, seen.received, not seen.refused, why)
        self.requests.append(request)
        self._network.log(self._box, request)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: _Seen) -> None:
        seen.head = head = parsing.parse(await reader.readuntil(b"\r\n\r\n"))
        packages = self._network.mirror
        if packages is not None and (head.host, head.port) == (mirror.HOST, 80) and head.path is not None:
            parsing.check_plain(head)
            await _packages(packages, head.method, head.path, writer, seen)
            return
        host = self._network.egress.find(head.host, head.port)
        if head.method != "CONNECT":
            parsing.check_plain(head)
        addresses = await resolve(host, head.host, head.port)
        there, onward = await _connect(addresses, head.port)
        try:
            if head.method == "CONNECT":
                await _tell(writer, seen, b"HTTP/1.1 200 Connection established\r\n\r\n")
                first, name = await parsing.read_hello(reader)
                if name != head.host:
                    raise EgressRefused(f"the TLS server name is {(name or 'absent')[:253]}")
            else:
                first = head.onward()
            await self._send(onward, first, seen)
            await self._relay(reader, writer, there, onward, seen)
        finally:
            onward.close()

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        onward: asyncio.StreamWriter,
        seen: _Seen,
    ) -> None:
        """Copies bytes both ways until the server's end. Raises EgressRefused if the box sends too much."""

        async def up() -> None:
            while data := await reader.read(1 << 16):
                await self._send(onward, data, seen)
            onward.write_eof()

        async def down() -> None:
            while data := await there.read(1 << 16):
                seen.received += len(data)
                await _tell(writer, seen, data)

        tunnel = seen.head is not None and seen.head.method == "CONNECT"
        tasks = [asyncio.create_task(work()) for work in ((up, down) if tunnel else (down,))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():  # the box may close its half first
                tasks[0].result()
            await tasks[-1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, onward: asyncio.StreamWriter, data: bytes, seen: _Seen) -> None:
        self._sent += len(data)
        if self._sent > MAX_SENT:
            raise EgressRefused(f"the box has sent more than {MAX_SENT >> 10} KiB")
        seen.sent += len(data)
        onward.write(data)
        await onward.drain()


async def _connect(addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first address that answers. Raises OSError or TimeoutError."""
    async with asyncio.timeout(CONNECT_SECONDS):
        for address in addresses[:-1]:
            with suppress(OSError):
                return await asyncio.open_connection(address, port)
        return await asyncio.open_connection(addresses[-1], port)


async def _packages(packages: IndexMirror, method: str, path: str, writer: asyncio.StreamWriter, seen: _Seen) -> None:
    answer = await packages.answer(path)
    async with aclosing(answer.chunks) as chunks:
        size = "" if answer.size is None else f"content-length: {answer.size}\r\n"
        head = f"HTTP/1.1 {answer.status} OK\r\ncontent-type: {answer.kind}\r\n{size}connection: close\r\n\r\n"
        await _tell(writer, seen, head.encode())
        async for chunk in chunks:
            if method == "HEAD":
                return
            seen.received += len(chunk)
            await _tell(writer, seen, chunk)


async def _tell(writer: asyncio.StreamWriter, seen: _Seen, data: bytes) -> None:
    seen.answered = True
    writer.write(data)
    await writer.drain()


async def _say(writer: asyncio.StreamWriter, seen: _Seen, status: str, why: str) -> None:
    """An error page, unless the answer has begun."""
    if seen.answered:
        return
    with suppress(OSError):
        body = f"{why}\n".encode()
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        await _tell(writer, seen, head.encode() + body)
