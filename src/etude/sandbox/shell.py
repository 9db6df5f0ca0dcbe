"""The owner's side of a live box: see `guest/shell.py`."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from etude.sandbox import base
from etude.sandbox.base import BoxError, Busy, Changes, ExecResult, LaunchFailed, TooLarge
from etude.sandbox.connection import Connection, Reply, encode
from etude.sandbox.egress.gate import PORT, Gate
from etude.sandbox.egress.policy import EgressRequest
from etude.sandbox.guest.root import SEARCH, USER
from etude.sandbox.guest.services import command, log
from etude.sandbox.machine_profile import MachineProfile

FILE_SECONDS = 30.0
GRACE_SECONDS = 5.0  # a command that is killed at its deadline still has to end
CHANGES_SECONDS = 60.0  # the box itself gives up long before, and the agent pays
MAX_LINE = 100_000  # bytes

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # operating system commands, such as setting the clipboard
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended, and the bytes that it wrote to descriptor 3 and at the end of its error stream.

    status: exit status as the kernel gives it, negative for a signal. `cut`: the report was longer than allowed.
    """

    status: int
    timed_out: bool
    cut: bool
    seconds: float
    report: bytes
    errors: str


class Shell:
    """A connection to pid 1 of a live box. One operation at a time."""

    def __init__(
        self, connection: Connection, profile: MachineProfile | None, gate: Gate | None, ends: AsyncExitStack
    ) -> None:
        """The box looks like the machine of `profile`, if given; without a way out `gate` is None. `ends` close with
        the box."""
        self._connection = connection
        self._profile = profile
        self._gate = gate
        self._ends = ends
        self._lock = asyncio.Lock()
        self._running = False

    async def start(
        self,
        limits: dict[str, Any],
        layers: Changes,
        path: str,
        variables: Mapping[str, str],
        host_socket: tuple[str, int] | None,
        places: Mapping[str, str] | None = None,
        user: str = USER,
    ) -> None:
        """Make the box. Raises BoxDead or LaunchFailed, and the BoxError of `layers` that an agent has made unusable.

        `path` is the variable PATH where no machine profile says it, `variables` join the environment, and
        `host_socket` is the path of a unix socket in the box and the port that leads there. `places` are further paths
        of folders of the work tree. `user` is the user's name without a machine profile.
        """
        profile = self._profile
        if profile is None:
            environment = {
                "HOME": f"/home/{user}",
                "LANG": "C.UTF-8",
                "LOGNAME": user,
                "PATH": path,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": ":".join(SEARCH),
                "SHELL": "/bin/bash",
                "TERM": "xterm-256color",
                "USER": user,
            }
        else:
            environment = {"HOME": f"/home/{profile.user}", "PATH": ":".join(profile.path)}
            environment |= profile.environment
        head = {
            "limits": limits,
            "environment": environment | dict(variables),
            "port": PORT if self._gate is not None else 0,
            "host_socket": host_socket,
            "places": dict(places or {}),
        }
        await self._ask(head, encode({}, layers))
        if self._gate is not None:
            await self._gate.open(socket.socket(fileno=self._connection.descriptor()))

    async def start_services(self, services: Sequence[dict[str, Any]], environment: Mapping[str, str]) -> None:
        """Start the services of the image one after another. Raises LaunchFailed for one that does not get ready."""
        variables = {"HOME": "/tmp", "LANG": "C.UTF-8", **environment}
        for service in services:
            done = await self.program(command(service), b"", service["seconds"], environment=variables)
            if done.status != 0:
                output = (await self.program(log(service), b"", FILE_SECONDS, environment=variables)).errors
                how = "ended before it was ready"
                if done.timed_out:
                    how = f"was not ready within {service['seconds']:g} s"
                raise LaunchFailed(
                    f"the service {service['name']} {how}; see sandbox.services (its last output: "
                    f"{' '.join(output.split())})"
                )

    def requests(self) -> Sequence[EgressRequest]:
        """Requests of the box to the outside so far."""
        return self._gate.requests if self._gate is not None else []

    async def exec(self, line: str, timeout: float) -> ExecResult:
        """Run `line`. Raises Busy if a command is running; ends the box if it is cancelled."""
        data = line.encode("utf-8", "surrogateescape")
        if b"\0" in data or len(data) > MAX_LINE:
            raise TooLarge(f"a command line has at most {MAX_LINE} bytes and no NUL")
        if self._running:
            raise Busy("a command is still running in this box")
        self._running = True
        try:
            reply, body = await self._ask({"op": "exec", "seconds": timeout}, data, timeout + GRACE_SECONDS)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            self._running = False
        first, rest = bytes(body[: reply.head]), bytes(body[reply.head :])
        text = shown(first + rest) if not reply.cut else f"{shown(first)}\n[{reply.cut} bytes cut]\n{shown(rest)}"
        return ExecResult(reply.rc, text, reply.cut, reply.seconds, reply.timed_out)

    async def program(
        self,
        argv: Sequence[str],
        payload: bytes,
        seconds: float,
        *,
        environment: Mapping[str, str] | None = None,
        channel: int | None = None,
        max_report: int = 1 << 20,
    ) -> ProgramResult:
        """Run one program in the work tree, without a shell: `guest/program.py`.

        `payload` is its standard input, `channel` a socket that it gets as descriptor 4; it is closed here. Raises
        BoxDead, or Busy while a command runs.
        """
        if self._running:
            raise Busy("a command is still running in this box")
        self._running = True
        head = {
            "op": "program",
            "argv": list(argv),
            "environment": dict(environment or {}),
            "seconds": seconds,
            "max": max_report,
        }
        try:
            descriptors = () if channel is None else (channel,)
            reply, body = await self._ask(head, payload, seconds + GRACE_SECONDS, descriptors)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            self._running = False
        report, errors = bytes(body[: reply.head]), body[reply.head :].decode("utf-8", "replace")
        return ProgramResult(reply.status, reply.timed_out, reply.cut > 0, reply.seconds, report, errors)

    async def interrupt(self) -> None:
        """End the running command as its deadline would; its own answer still comes first."""
        if self._running:
            await self._connection.request({"op": "interrupt"}, b"", FILE_SECONDS)

    async def read(self, path: str, max_bytes: int) -> bytes:
        """As `Box.read`."""
        return bytes((await self._ask({"op": "read", "path": path, "max": max_bytes}))[1])

    async def write(self, path: str, data: bytes) -> None:
        """As `Box.write`."""
        await self._ask({"op": "write", "path": path}, data)

    async def list(self, path: str) -> list[str]:
        """As `Box.list`."""
        return _names((await self._ask({"op": "list", "path": path}))[1])

    async def delete(self, path: str) -> None:
        """As `Box.delete`."""
        await self._ask({"op": "delete", "path": path})

    async def changes(self, roots: Sequence[str] = ()) -> dict[str, bytes | None]:
        """Files in the upper layer, as `Box.changes`; None is a deletion."""
        reply, body = await self._ask({"op": "changes", "roots": list(roots)}, seconds=CHANGES_SECONDS)
        names = _names(body[: reply.head])
        if len(names) != len(reply.sizes) or reply.head + sum(size or 0 for size in reply.sizes) != len(body):
            raise self._connection.garbled("the sizes of files do not fit")
        return await asyncio.to_thread(_files, names, reply.sizes, memoryview(body)[reply.head :])

    async def close(self) -> None:
        """End the box: its pid 1 leaves when this connection does."""
        self._connection.close("the box is closed")
        await self._ends.aclose()

    async def _ask(
        self,
        head: dict[str, Any],
        payload: bytes = b"",
        seconds: float = FILE_SECONDS,
        descriptors: Sequence[int] = (),
    ) -> tuple[Reply, bytearray]:
        async with asyncio.timeout(seconds + FILE_SECONDS), self._lock:
            request = asyncio.ensure_future(self._connection.request(head, payload, seconds, descriptors))
            await asyncio.sleep(0)  # now the request is sent
            for fd in descriptors:
                os.close(fd)
            reply, body = await request
        if reply.refused:
            error: type[BoxError] = getattr(base, reply.refused)
            raise error(reply.message)
        return reply, body


def _names(data: bytearray) -> list[str]:
    return list(map(os.fsdecode, bytes(data).split(b"\0"))) if data else []


def _files(names: Sequence[str], sizes: Sequence[int | None], contents: memoryview) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = {}
    offset = 0
    for path, size in zip(names, sizes, strict=True):
        files[path] = None if size is None else bytes(contents[offset : offset + size])
        offset += size or 0
    return files


def shown(data: bytes) -> str:
    """The text that a reader of the terminal sees: no escape sequences, redrawn lines folded, invalid UTF-8
    replaced."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "".join(c for c in text if c >= " " or c in "\n\t")
