"""One program in a live box, started by pid 1 itself: no shell and no terminal lie between the two.

The program reads its standard input from a pipe, which can be read once, and writes its report to descriptor 3.
A socket of the owner is descriptor 4. The exit status comes from the kernel.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import box, linux, root

WATCH_SECONDS = 0.2  # between looks at the memory of the box
DRAIN_SECONDS = 0.5  # for the rest of the ended program's pipes
ERRORS = 64_000  # bytes kept of the end of the error stream


@dataclass(frozen=True)
class Confined:
    """The confinement of a program: limits, variables, control groups to join, user or None for this one."""

    limits: dict[str, Any]
    environment: dict[str, str]
    groups: Sequence[int]
    user: int | None


class Program:
    """A running program and its pipes."""

    def __init__(self, argv: Sequence[str], payload: bytes, channel: int | None, most: int, confined: Confined) -> None:
        """`payload` is its standard input; at most `most` bytes of its report are kept."""
        self.payload = memoryview(payload)
        self.most = most
        self.report, self.errors = bytearray(), bytearray()
        self.cut = 0
        self.timed_out = False
        self.status: int | None = None
        self.started = time.monotonic()
        source, self.input = os.pipe()
        self.output, report = os.pipe()
        self.printed, errors = os.pipe()
        nothing = os.open("/dev/null", os.O_RDWR)
        ends = [source, nothing, errors, report, nothing if channel is None else channel]
        self.pid = os.fork()
        if self.pid == 0:
            _exec(argv, ends, confined)
        for fd in (source, nothing, errors, report):
            os.close(fd)
        for fd in (self.input, self.output, self.printed):
            os.set_blocking(fd, False)
        self.pidfd = linux.end_of(self.pid)
        self._feed()

    def serve(self, deadline: float, owner: socket.socket) -> bool:
        """Move bytes for a while; False once the program has ended, by itself or at its deadline."""
        now = time.monotonic()
        if now >= deadline:
            self.timed_out = True
            self.kill()
        wait = max(0.0, min(deadline - now, WATCH_SECONDS))
        pipes = [fd for fd in (self.output, self.printed) if fd >= 0]
        ready, _, _ = select.select([self.pidfd, owner, *pipes], [self.input] if self.input >= 0 else [], [], wait)
        self._feed()
        for fd in pipes:
            if fd in ready:
                self._take(fd)
        if owner in ready:
            if not owner.recv(1, socket.MSG_PEEK):
                os._exit(0)
            self.timed_out = True  # the only request during a program is to end it
            self.kill()
        if self.pidfd not in ready and not self.timed_out:
            return True
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        until = time.monotonic() + DRAIN_SECONDS
        while (pipes := [fd for fd in (self.output, self.printed) if fd >= 0]) and time.monotonic() < until:
            ready, _, _ = select.select(pipes, [], [], 0 if self.timed_out else DRAIN_SECONDS)
            if not ready:
                break
            for fd in ready:
                self._take(fd)
        return False

    def result(self) -> tuple[dict[str, Any], list[bytes]]:
        """Head and body of the reply; closes all descriptors."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for fd in (self.input, self.output, self.printed, self.pidfd):
            if fd >= 0:
                os.close(fd)
        head = {
            "status": self.status,
            "timed_out": self.timed_out,
            "cut": self.cut,
            "head": len(self.report),
            "seconds": time.monotonic() - self.started,
        }
        return head, [bytes(self.report), bytes(self.errors)]

    def kill(self) -> None:
        """End the program and all processes that are still in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _feed(self) -> None:
        if self.input < 0:
            return
        try:
            while self.payload:
                self.payload = self.payload[os.write(self.input, self.payload) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        os.close(self.input)
        self.input = -1

    def _take(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            os.close(fd)
            if fd == self.output:
                self.output = -1
            else:
                self.printed = -1
        elif fd == self.output:
            room = self.most - len(self.report)
            self.cut += max(0, len(data) - room)
            self.report += data[: max(0, room)]
        else:
            self.errors += data
            del self.errors[: max(0, len(self.errors) - ERRORS)]


def _exec(argv: Sequence[str], ends: Sequence[int], confined: Confined) -> NoReturn:
    """Become the program, in the fork."""
    try:
        linux.join(confined.groups)
        linux.hide(False)
        if confined.user is None:
            linux.become(None, root.BOX_ID, linux.NEWCGROUP)
        linux.own_session()
        high = [os.dup(fd) for fd in ends]
        while min(high) < len(ends):  # a low one would be covered by another
            high = [os.dup(fd) for fd in high]
        for target, source in enumerate(high):
            os.dup2(source, target, inheritable=True)
        os.closerange(len(ends), 65536)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        box.confine(confined.limits | {"seconds": 0}, linux.filter_program(os.uname().machine), confined.user)
        os.execvpe(argv[0], list(argv), confined.environment)
    finally:
        os._exit(127)
