"""Requests to a process that makes or serves boxes, and its replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from etude.sandbox.base import BoxDead, BoxError, Changes, LaunchFailed, Limits

START_SECONDS = 60.0
DIED = "the process that makes boxes has died"
MAX_HEAD = 4 << 20  # bytes of the head of a message
MAX_BODY = 256 << 20
MAX_DESCRIPTORS = 8  # that wait for their reader

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BODY)]
Code = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Refusal = Literal["", "NotFound", "NotRegular", "Escape", "TooLarge", "NoSpace", "Busy"]  # classes of `base`


class Reply(msgspec.Struct, frozen=True):
    """The head of a message from a process that makes or serves boxes; every message sets some of the fields.

    A process that serves a box may be in the hands of an agent, so only the types of the fields are certain.
    """

    id: int = -1  # of the request
    bytes: Size = 0  # of the body
    ready: bool = False
    error: str = ""  # why it cannot serve at all
    refused: Refusal = ""  # why the request was refused
    message: str = ""
    head: Size = 0  # bytes of the first part of the body
    sizes: list[Size | None] = []  # of the files in the second
    rc: Code | None = None
    cut: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    seconds: float = 0.0
    timed_out: bool = False
    status: Code = 0
    cpu: float = 0.0
    held: list[str] = []
    bash: bool = False
    wire: Literal["", "data", "taken", "end"] = ""  # a frame of `guest/relay.py`
    taken: Size = 0


class Connection:
    """A connection to one process: length-prefixed requests, replies by id. Broken for good once the process ends.

    `fault` is the error for a message of the wrong form: Garbled, if the process serves one agent's box.
    """

    start_seconds = START_SECONDS

    def __init__(self, sock: socket.socket, fault: type[BoxError] = BoxDead) -> None:
        self._begin(fault)
        self.sock = sock
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._receive)

    def _begin(self, fault: type[BoxError]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fault = fault
        self._garbled = False
        self.waiting: dict[int, asyncio.Future[tuple[Reply, bytearray]]] = {}
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.count = 0
        self.dead: str | None = None
        self.descriptors: list[int] = []  # received with replies; the reader of one closes it
        self._buffer = bytearray()
        self._reply: Reply | None = None  # whose body is still coming

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 18, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        if not data:
            self.close(DIED)
        elif len(self.descriptors) > MAX_DESCRIPTORS:
            self.garbled("too many descriptors")
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := self._message()) is not None:
                self._take(*message)
        except ValueError as e:  # msgspec's errors are ValueErrors
            self.garbled(str(e))

    def _message(self) -> tuple[Reply, bytearray] | None:
        """The next whole message. Its head is parsed once, however slowly its body comes. Raises ValueError."""
        buffer = self._buffer
        if self._reply is None:
            if len(buffer) < 4:
                return None
            (size,) = struct.unpack_from("<I", buffer)
            if size > MAX_HEAD:
                raise ValueError(f"a head of {size} bytes")
            if len(buffer) < 4 + size:
                return None
            self._reply = msgspec.json.decode(buffer[4 : 4 + size], type=Reply)
            del buffer[: 4 + size]
        reply = self._reply
        if len(buffer) < reply.bytes:
            return None
        self._reply = None
        if len(buffer) == reply.bytes:  # a large body is not copied
            self._buffer = bytearray()
            return reply, buffer
        body = buffer[: reply.bytes]
        del buffer[: reply.bytes]
        return reply, body

    def _take(self, reply: Reply, body: bytearray) -> None:
        if reply.ready and not self.ready.done():
            self.ready.set_result(None)
        elif reply.error:
            self._fail(LaunchFailed(reply.error))
        elif (future := self.waiting.pop(reply.id, None)) is not None and not future.done():
            future.set_result((reply, body))

    def garbled(self, why: str) -> BoxError:
        """Break the connection for good, since a message has the wrong form; returns the error to raise."""
        self._garbled = True
        self.close(f"a message of the wrong form came out of the box: {why[:200]}")
        return self.failure()

    def failure(self) -> BoxError:
        """The error that broke the connection."""
        assert self.dead is not None
        return (self._fault if self._garbled else BoxDead)(self.dead)

    def descriptor(self) -> int:
        """The oldest descriptor that came with a reply; the caller closes it. Raises the fault if there is none."""
        if not self.descriptors:
            raise self.garbled("a descriptor lacks")
        return self.descriptors.pop(0)

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
    ) -> tuple[Reply, bytearray]:
        """Send a request whose `payload` travels in memory that only its reader sees. Raises BoxDead."""
        if self.dead is not None:
            raise self.failure()
        self.count = number = self.count + 1
        future = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        self._send(head | {"id": number}, payload, descriptors)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            self.close("the process that makes boxes does not answer")
            raise self.failure() from None
        finally:
            self.waiting.pop(number, None)

    def tell(self, descriptors: Sequence[int]) -> None:
        """Send a message of descriptors alone that has no reply, on a socket that keeps messages apart. Raises
        BoxDead."""
        if self.dead is None:
            self._write(b"\0", descriptors)
        if self.dead is not None:
            raise self.failure()

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
            self._fail(self.failure())

    def _fail(self, error: BoxError) -> None:
        for future in (self.ready, *self.waiting.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # its waiter may have gone
        self.waiting.clear()


def new_process(
    zygote: socket.socket, hello: dict[str, Any], descriptors: Sequence[int] = (), kind: int = socket.SOCK_STREAM
) -> Connection:
    """A connection to a new process, which the zygote behind this socket makes and configures by `hello`. Raises
    BoxDead."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    try:
        socket.send_fds(zygote, [json.dumps(hello).encode()], [theirs.fileno(), *descriptors])
    except OSError:
        ours.close()
        raise BoxDead(DIED) from None
    finally:
        theirs.close()
    return Connection(ours)


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
