"""The interface of a remote host for boxes: a machine, a program in it, and a stream of bytes to and from the program.

The rest is the same everywhere: `guest/guest.py` comes through the stream, followed by the files of the image, and
serves the requests that processes of the namespace backend serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import re
import struct
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from etude.sandbox.backends.relay import HostRelay
from etude.sandbox.base import BoxDead, BoxError, Capabilities, LaunchFailed, Limits
from etude.sandbox.connection import Connection, Reply
from etude.sandbox.guest.relay import PART
from etude.sandbox.guest.root import RUNNER

SERVER_MB = 160  # memory of the server of a box, besides the box's own
SERVER_PROCESSES = 16
# Of root in a machine: to become the box's user, own its files and end its processes.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")

_BOOT = f"""
import io, site, sys, tarfile
f = sys.stdin.buffer
t = tarfile.open(fileobj=io.BytesIO(f.read(int(f.readline()))))
if hasattr(tarfile, "fully_trusted_filter"): t.extraction_filter = tarfile.fully_trusted_filter
t.extractall("{RUNNER}")
sys.path[:] = [p for p in sys.path if p] + ["{RUNNER}", *site.getsitepackages()]
from guest.sandbox.guest.guest import main
main(f)
"""
# Runs in the image: needs sh, env, python3 (3.11 or later) and bash. The environment is that of a test run.
COMMAND = ("sh", "-c", 'exec env -i PATH="$PATH" HOME=/tmp LANG=C.UTF-8 PYTHONHASHSEED=0 python3 -sSPB -c "$0"', _BOOT)


@dataclass(frozen=True)
class Need:
    """The requirements of a machine: the limits of its box, the size of the files that are shipped into it, and the id
    of the box's user, which programs may look up."""

    limits: Limits
    files_mb: int
    user: int

    @property
    def memory_mb(self) -> int:
        """Memory of the machine: the box, its server, and its files."""
        return self.limits.memory_mb + SERVER_MB + self.files_mb


class ProgramStream(ABC):
    """Standard input and output of a program in a machine of its own."""

    _closed: asyncio.Task[None] | None = None

    @abstractmethod
    async def read(self) -> bytes:
        """Some bytes; none once the program has ended. Raises OSError."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Raises OSError if the program is gone."""

    async def close(self) -> None:
        """End the machine. Idempotent; raises nothing."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._close())
        await asyncio.shield(self._closed)

    @abstractmethod
    async def _close(self) -> None: ...


class RemoteHost(Protocol):
    """Makes machines, as a container engine does."""

    name: str
    image_name: str  # of its machines
    python: str  # their version of Python, once the host is open

    async def reach(self) -> None:
        """Raises UserError if the host is not installed or does not answer."""

    async def open(self) -> Capabilities:
        """Prepare the host; returns the abilities of its boxes. Raises UserError if it lacks a requirement of boxes."""
        ...

    async def start(self, command: Sequence[str], need: Need) -> ProgramStream:
        """Run `command` as root in a new machine without network. Raises LaunchFailed."""
        ...

    def system(self) -> Mapping[str, Path]:
        """Path in a machine -> folder or file of this computer with the same content, of an opened host. Raises
        UserError."""
        ...

    def close(self) -> None:
        """Remove what `open` has prepared."""


class StreamConnection(Connection):
    """Requests and replies as in `Connection`, over a stream: the payload of a request follows it.

    One request of a machine may bring a socket: the machine gets one of its own, and bytes move between the two.
    """

    start_seconds = 180.0  # files travel
    _relay: HostRelay | None = None

    def __init__(self, stream: ProgramStream, fault: type[BoxError] = BoxDead) -> None:
        self._begin(fault)
        self._stream = stream
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def put(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message and its body."""
        data = json.dumps({**head, "bytes": len(body)}).encode()
        first, rest = (body, b"") if len(body) <= PART else (b"", body)
        self._outgoing.put_nowait(struct.pack("<I", len(data)) + data + first)
        if rest:
            self._outgoing.put_nowait(rest)

    def boot(self, runner: bytes) -> None:
        """Send the guest's modules, which the first program in the machine unpacks."""
        self._outgoing.put_nowait(b"%d\n" % len(runner) + runner)

    async def _read(self) -> None:
        try:
            while data := await self._stream.read():
                self._feed(data)
        except OSError as e:
            self._lost(f": {e}")
        self._lost("")

    def _lost(self, why: str) -> None:
        if not self.ready.done():
            text = f"the machine of a box ended at once{why}; its image needs sh, bash and python3 (3.11 or later)"
            self.ready.set_exception(LaunchFailed(text))
        self.close(f"the machine of a box has ended{why}")

    async def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader reports the reason
            while True:
                await self._stream.write(await self._outgoing.get())

    def _send(self, head: dict[str, Any], payload: bytes, descriptors: Sequence[int]) -> None:
        if descriptors:
            (fd,) = descriptors
            assert self._relay is None
            self._relay = HostRelay(fd, self.put)
            head["socket"] = True
        self.put(head, payload)

    def _take(self, reply: Reply, body: bytearray) -> None:
        if not reply.wire:
            super()._take(reply, body)
        elif self._relay is None:
            raise ValueError("a frame of no wire")
        else:
            self._relay.take(reply, body)

    def _hang_up(self) -> None:
        if self._relay is not None:
            self._relay.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()


@dataclass(frozen=True)
class Packed:
    """A folder as a compressed archive."""

    data: bytes
    size: int  # bytes, unpacked


# pytest needs two of these
_LEXERS = re.compile(r"pygments/lexers/(__pycache__/)?(?!__init__|_mapping|diff|python|__pycache__)")


def pack(places: Mapping[str, Path], without: frozenset[str] = frozenset()) -> Packed:
    """Files and folders by their name in the archive; "" is the folder itself. Links stay links. The files `without`
    are empty there: their modes and times alone are kept."""

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = member.name.removeprefix("./")
        if name in without:
            member.size = 0
        linked = name in without and not member.isreg()
        return None if linked or ("pygments" in places and _LEXERS.match(name)) else member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, path in places.items():
            archive.add(path, name or ".", filter=wanted)
    return Packed(gzip.compress(buffer.getvalue(), 1), buffer.tell())
