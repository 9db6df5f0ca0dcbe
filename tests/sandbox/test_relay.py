"""A wire between two machines: every byte arrives once and in order, little is held, and both ends are seen."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from etude.sandbox.backends.relay import HostRelay
from etude.sandbox.connection import Reply
from etude.sandbox.guest.relay import WINDOW, GuestRelay

SECONDS = 20.0


class Wire:
    """The socket of a process in a machine, the one of the owner, and the relays between them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.process, ours = socket.socketpair()
        self.owner, theirs = socket.socketpair()
        self.held = 0  # the most bytes that one relay held

        def out(head: dict[str, Any], body: bytes) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed, after the test
                loop.call_soon_threadsafe(self._arrive, msgspec.convert(head, Reply), body)

        def put(head: Mapping[str, Any], body: bytes) -> None:
            self.guest.take(dict(head), body)
            self.held = max(self.held, len(self.guest._left))

        self.host = HostRelay(theirs.fileno(), put)
        theirs.close()
        self.guest = GuestRelay(ours, out)

    def _arrive(self, frame: Reply, body: bytes) -> None:
        self.host.take(frame, body)
        self.held = max(self.held, len(self.host._left))

    def close(self) -> None:
        for each in (self.process, self.owner, self.host):
            each.close()


def receive(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or all up to the end."""
    data = bytearray()
    while len(data) < size and (part := sock.recv(1 << 16)):
        data += part
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_pass_both_ways_at_once(seed: int) -> None:
    draw = random.Random(seed)
    parts = [draw.randbytes(draw.choice([1, 7, 1000, 70_000, 3 << 20])) for _ in range(12)]
    whole = b"".join(parts)

    async def play() -> None:
        wire = Wire()
        async with asyncio.timeout(SECONDS):
            writes = [asyncio.to_thread(sock.sendall, whole) for sock in (wire.process, wire.owner)]
            reads = [asyncio.to_thread(receive, sock, len(whole)) for sock in (wire.process, wire.owner)]
            *_, one, other = await asyncio.gather(*writes, *reads)
        assert one == other == whole
        assert wire.held <= WINDOW
        wire.close()

    asyncio.run(play())


@pytest.mark.parametrize("inside", [True, False])
def test_an_end_comes_after_all_that_was_sent(inside: bool) -> None:
    """Also where the other side is about to send more than the wire holds, and then finds it closed."""
    data = random.Random(1).randbytes(2 * WINDOW)

    async def play() -> None:
        wire = Wire()
        first, other = (wire.process, wire.owner) if inside else (wire.owner, wire.process)
        sending = asyncio.create_task(asyncio.to_thread(_send, other, data))
        await asyncio.to_thread(_send, first, data[: WINDOW // 2])
        first.close()
        async with asyncio.timeout(SECONDS):
            await sending
            assert await asyncio.to_thread(receive, other, len(data)) == data[: WINDOW // 2]
        wire.close()

    asyncio.run(play())


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


def test_nobody_takes_what_a_flood_brings() -> None:
    """The sender waits; neither relay holds more than a window, nor stops reading frames."""

    async def play() -> None:
        for flooded in ("process", "owner"):
            wire = Wire()
            source = wire.owner if flooded == "process" else wire.process
            flood = asyncio.create_task(asyncio.to_thread(_send, source, bytes(8 * WINDOW)))
            await asyncio.sleep(0.5)
            assert not flood.done()
            assert 0 < wire.held <= WINDOW
            getattr(wire, flooded).close()
            async with asyncio.timeout(SECONDS):
                await flood
            wire.close()

    asyncio.run(play())


def test_a_machine_that_ignores_the_rules_is_refused() -> None:
    async def play() -> None:
        wire = Wire()
        for _ in range(WINDOW >> 16):
            wire.host.take(Reply(wire="data"), bytes(1 << 16))
        for frame, body in ((Reply(wire="data"), b"more" * (1 << 16)), (Reply(wire="taken", taken=1), b"")):
            with pytest.raises(ValueError, match="than"):
                wire.host.take(frame, body)
        wire.close()

    asyncio.run(play())
