"""A wire between processes of two machines: the owner's end of one machine's part; see `guest/relay.py`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from etude.sandbox.connection import Reply
from etude.sandbox.guest.relay import NOTICE, PART, WINDOW


class HostRelay:
    """Moves bytes between a socket of this process and a machine, without reading them."""

    def __init__(self, fd: int, put: Callable[[Mapping[str, Any], bytes], None]) -> None:
        """`fd` is a socket, which the caller may close; `put` sends a frame to the machine."""
        self._loop = asyncio.get_running_loop()
        self._sock = socket.socket(fileno=os.dup(fd))
        self._sock.setblocking(False)
        self._put = put
        self._room = WINDOW  # bytes that the machine can still take
        self._left = bytearray()  # arrived, for the socket
        self._taken = 0  # bytes that the socket took since the last notice
        self._over = False  # the process in the machine has closed its end
        self._closed = False
        self._loop.add_reader(self._sock.fileno(), self._read)

    def take(self, frame: Reply, body: bytes | bytearray) -> None:
        """Handle a frame of the machine. Raises ValueError for one that no guest sends."""
        if self._closed:
            return
        if frame.wire == "data":
            if len(self._left) + self._taken + len(body) > WINDOW or self._over:
                raise ValueError("more bytes on a wire than it holds")
            self._left += body
        elif frame.wire == "taken":
            self._room += frame.taken
            if self._room > WINDOW:
                raise ValueError("more bytes taken from a wire than were sent")
            self._loop.add_reader(self._sock.fileno(), self._read)
        else:
            self._over = True
            self._loop.add_reader(self._sock.fileno(), self._read)
        self._write()

    def _read(self) -> None:
        try:
            data = self._sock.recv(PART if self._over else min(self._room, PART))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._put({"wire": "end"}, b"")
            self.close()
        elif not self._over:
            self._room -= len(data)
            self._put({"wire": "data"}, data)
            if not self._room:
                self._loop.remove_reader(self._sock.fileno())

    def _write(self) -> None:
        try:
            while self._left:
                sent = self._sock.send(self._left[:PART])
                del self._left[:sent]
                self._taken += sent
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._write)
        except OSError:  # nobody reads any more; the end comes by the reader
            self._taken += len(self._left)
            self._left.clear()
        else:
            self._loop.remove_writer(self._sock.fileno())
            if self._over:
                self.close()
        if self._taken >= NOTICE and not self._closed:
            self._put({"wire": "taken", "taken": self._taken}, b"")
            self._taken = 0

    def close(self) -> None:
        """Close this end. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
