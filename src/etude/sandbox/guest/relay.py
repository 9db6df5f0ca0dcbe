"""A wire between processes of two machines: the end in this one.

A process here has one socket of a pair, the relay the other. What the process sends goes to the owner in frames of the
machine's stream, and what the owner sends goes to the process. Frames: {"wire": "data"} with a body, {"wire": "taken",
"taken": bytes}, and {"wire": "end"}. Each side sends at most WINDOW bytes that the other has not taken, so neither ever
waits in the middle of the stream. `backends/relay.py` is the owner's side.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

WINDOW = 1 << 20  # bytes on their way in one direction
PART = 1 << 16  # bytes of one frame
NOTICE = WINDOW // 2  # bytes that are taken before the other side is told


class GuestRelay:
    """Moves bytes between the socket of a process and the owner; closes the socket once both sides have ended."""

    def __init__(self, sock: socket.socket, send: Callable[[dict[str, Any], bytes], None]) -> None:
        """`send` writes a frame to the owner; it may wait, since no thread that reads frames calls it."""
        self._sock = sock
        self._send = send
        self._room = WINDOW  # bytes that the owner can still take
        self._left = bytearray()  # arrived, for the process
        self._taken = 0  # bytes that the process took since the last notice
        self._deaf = False  # the process reads no more
        self._over = False  # the other end has closed: nothing more arrives, nothing is wanted
        self._closed = False  # the process has closed its socket
        self._changed = threading.Condition()
        for work in (self._outward, self._inward):
            threading.Thread(target=work, daemon=True).start()

    def take(self, frame: dict[str, Any], body: bytes) -> None:
        """Handle a frame of the owner, without waiting for the process."""
        with self._changed:
            if frame["wire"] == "data":
                if not self._left and not self._deaf:
                    with contextlib.suppress(OSError):
                        sent = self._sock.send(body, socket.MSG_DONTWAIT)
                        self._taken += sent
                        body = body[sent:]
                self._left += body
            elif frame["wire"] == "taken":
                self._room += frame["taken"]
            elif frame["wire"] == "end":
                self._over = True
            self._changed.notify_all()

    def _outward(self) -> None:
        data = b"."
        while data:
            with self._changed:
                self._changed.wait_for(lambda: self._room or self._over)
                size = PART if self._over else min(self._room, PART)
            try:
                data = self._sock.recv(size)
            except OSError:
                data = b""
            with self._changed:
                wanted = data and not self._over
                self._room -= len(data) if wanted else 0
            if wanted:
                self._send({"wire": "data"}, data)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sock.close()
        self._send({"wire": "end"}, b"")

    def _inward(self) -> None:
        def due() -> bool:
            return bool(self._left) or self._taken >= NOTICE or self._over or self._closed

        while True:
            with self._changed:
                self._changed.wait_for(due)
                part, taken = bytes(self._left[:PART]), self._taken
                if self._closed or (self._over and not part):
                    break
                if taken >= NOTICE:
                    self._taken = 0
            if taken >= NOTICE:
                self._send({"wire": "taken", "taken": taken}, b"")
            try:
                if not self._deaf:
                    self._sock.sendall(part)
            except OSError:
                self._deaf = True
            with self._changed:
                del self._left[: len(part)]
                self._taken += len(part)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the other thread, which a mere close would not
