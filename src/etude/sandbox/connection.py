"""Requests to a process that makes or serves boxes, and its replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from etude.sandbox.base import BoxDead, BoxError, Changes, LaunchFailed, Limits

START_SECONDS = 60.0


class Connection:
    """A connection to one process: length-prefixed requests, replies by id. Broken for good once the process ends."""

    start_seconds = START_SECONDS

    def __init__(self, sock: socket.socket) -> None:
        self._begin()
        self.sock = sock
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._receive)

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.count = 0
        self.dead: str | None = None
        self.descriptors: list[int] = []  # received with replies; the reader of one closes it
        self._buffer = bytearray()

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 18, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        if not data:
            self.close("the process that makes boxes has died")
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._buffer += data
        while (frame := self._frame()) is not None:
            head, body = frame
            if "ready" in head and not self.ready.done():
                self.ready.set_result(None)
            elif "error" in head:
                self._fail(LaunchFailed(head["error"]))
            elif (future := self.waiting.pop(head.get("id", -1), None)) is not None and not future.done():
                future.set_result((head, body))

    def _frame(self) -> tuple[dict[str, Any], bytes] | None:
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (size,) = struct.unpack_from("<I", buffer)
        if len(buffer) < 4 + size:
            return None
        head = json.loads(buffer[4 : 4 + size])
        end = 4 + size + head["bytes"]
        if len(buffer) < end:
            return None
        body = bytes(buffer[4 + size : end])
        del buffer[:end]
        return head, body

    async def started(self) -> None:
        """Raises LaunchFailed or BoxDead."""
        try:
            async with asyncio.timeout(self.start_seconds):
                await asyncio.shield(self.ready)
        except TimeoutError:
            self.close("a box did not start in time")
            raise LaunchFailed("a box did not start in time") from None

    async def request(
        self, head: dict[str, Any], payload: bytes, seconds: float, descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request whose `payload` travels in memory that only its reader sees. Raises BoxDead."""
        if self.dead is not None:
            raise BoxDead(self.dead)
        self.count = number = self.count + 1
        future = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        self._send(head | {"id": number}, payload, descriptors)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            self.close("the process that makes boxes does not answer")
            raise BoxDead(self.dead) from None
        finally:
            self.waiting.pop(number, None)

    def tell(self, head: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Send a message that has no reply, on a socket that keeps messages apart. Raises BoxDead."""
        if self.dead is None:
            self._write(json.dumps(head).encode(), descriptors)
        if self.dead is not None:
            raise BoxDead(self.dead)

    def _send(self, head: dict[str, Any], payload: bytes, descriptors: Sequence[int]) -> None:
        data = json.dumps(head).encode()
        with memory(payload) as fd:
            # A few small requests are in flight at most, so the socket's buffer always has room.
            self._write(struct.pack("<I", len(data)) + data, [fd, *descriptors])

    def _write(self, data: bytes, descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self.sock, [data], descriptors)
        except OSError as e:
            self.close(f"the process that makes boxes cannot be reached ({e})")

    def _hang_up(self) -> None:
        self._loop.remove_reader(self.sock.fileno())
        self.sock.close()

    def close(self, why: str = "the sandbox is closed") -> None:
        """Break the connection for good; waiting requests raise BoxDead with this reason."""
        if self.dead is not None:
            return
        self.dead = why
        self._hang_up()
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()
        if not self._loop.is_closed():
            self._fail(BoxDead(why))

    def _fail(self, error: BoxError) -> None:
        for future in (self.ready, *self.waiting.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # its waiter may have gone
        self.waiting.clear()


@contextlib.contextmanager
def memory(data: bytes) -> Iterator[int]:
    """A descriptor of memory that holds `data`, to be sent to its reader."""
    fd = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        yield fd
    finally:
        os.close(fd)


def limits_of(limits: Limits) -> dict[str, float]:
    """Limits as a request carries them: sizes in bytes, times in seconds."""
    return {
        "memory": limits.memory_mb << 20,
        "addresses": (limits.addresses_mb or limits.memory_mb) << 20,
        "processes": limits.processes,
        "disk": limits.disk_mb << 20,
        "seconds": limits.seconds,
    }


def encode(request: dict[str, Any], changes: Changes) -> bytes:
    """A request and its change set: a length, JSON with the sizes of files, and the files."""
    sizes = [(path, None if data is None else len(data)) for path, data in changes.items()]
    head = json.dumps(request | {"changes": sizes}).encode()
    return b"".join([struct.pack("<I", len(head)), head, *(data for data in changes.values() if data is not None)])
