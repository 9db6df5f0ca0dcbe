"""Pid 1 of a live box: a persistent bash on a pseudo-terminal, file operations and single programs for the owner.

The shell takes lines from one pipe and answers on another; programs it starts have neither, so nothing they print can
be taken for an exit status. Requests come and go as in `runs.py`, one at a time. The first describes the box.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import box, files, linux, program, root

SIZE = 40, 120  # rows and columns of a terminal by default
KEEP = 16_000  # bytes of output kept at each end
WATCH_SECONDS = 0.2  # between looks at the memory of the box
GRACE_SECONDS = 0.5  # between TERM, KILL and the end of the shell

# The status of a line is written by the reserved word `time`, for which no function can stand in. Then the loop takes
# the token that follows the line, and writes a dot. More than one status means that the line wrote one itself.
_LOOP = b"""
set -m; shopt -s expand_aliases; trap : INT
{ exec 7<>/dev/tty; } 2>/dev/null || exec 7<&1  # an old gVisor cannot open it
while IFS= read -r -d '' __n <&8 && IFS= read -r -d '' __line <&8; do
  exec 0<&7 1>&7 2>&7
  eval "$__line" 7>&- 8<&- 9>&-
  __line=$? __time=${TIMEFORMAT+=$TIMEFORMAT} TIMEFORMAT="$__n $?"
  { time [[ $__n ]]; } 2>&9
  IFS= read -r -d '' __n <&8
  TIMEFORMAT=.
  { time [[ $__n ]]; } 2>&9
  if [[ $__time ]]; then TIMEFORMAT=${__time#=}; else unset TIMEFORMAT; fi
done
"""


class Lost(Exception):
    """The shell has ended: with its exit status, or None after a signal."""

    def __init__(self, code: int | None, late: bool) -> None:
        super().__init__()
        self.code, self.late = code, late


Message = tuple[dict[str, Any], Sequence[bytes]]  # its head, and the parts of its body
Settings = tuple[dict[str, Any], dict[str, str]]  # limits, and variables of the environment


class BashSession:
    """One bash and its terminal."""

    def __init__(
        self, size: tuple[int, int], user: int | None, groups: Sequence[int], settings: Callable[[], Settings]
    ) -> None:
        """`settings` is called in the process that becomes the shell.

        The shell runs as `user`; None: as this user, in a user namespace of its own.
        """
        self.master, slave = os.openpty()
        if user is not None:
            os.fchown(slave, user, -1)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        command, self.command = os.pipe()
        self.status, status = os.pipe()
        script, writer = os.pipe()  # as bash's input: an argument could be read by everybody
        os.write(writer, _LOOP)
        os.close(writer)
        self.pid = os.fork()
        if self.pid == 0:
            _exec((script, slave, slave, command, status), settings, groups, user)
        os.close(script)
        os.close(command)
        os.close(status)
        self.slave = slave
        self.modes = termios.tcgetattr(slave)
        self.modes[1] &= ~termios.OPOST
        self.modes[3] &= ~(termios.ECHO | termios.ICANON)
        self.pidfd = linux.end_of(self.pid)
        self.count = 0
        self.code: int | None = None  # the last status that was written for the present line
        os.set_blocking(self.master, False)

    def start(self, line: str) -> None:
        """Begin a line."""
        termios.tcsetattr(self.slave, termios.TCSANOW, self.modes)
        with contextlib.suppress(termios.error):  # gVisor's terminals cannot be stopped either
            termios.tcflow(self.slave, termios.TCOON)
        self.count += 1
        data = f"{self.count}\0{line}\0.\0".encode("utf-8", "surrogateescape")
        self.code = None
        while data:  # the shell is reading
            data = data[os.write(self.command, data) :]

    def answer(self) -> int | None:
        """The status of the present line, once the shell has gone on to the next; before that None. Raises Lost."""
        gone_on = False
        for record in os.read(self.status, 4096).split(b"\n"):
            number, _, code = record.partition(b" ")
            gone_on |= record == b"."
            if number == b"%d" % self.count and code.isdigit() and len(code) <= 3:
                if self.code is not None:
                    raise Lost(None, False)
                self.code = int(code)
        left = struct.unpack("i", fcntl.ioctl(self.command, termios.FIONREAD, b"\0" * 4))[0]
        return self.code if gone_on and not left else None

    def foreground(self) -> int:
        """Process group that holds the terminal."""
        with contextlib.suppress(OSError):
            return struct.unpack("i", fcntl.ioctl(self.master, termios.TIOCGPGRP, b"\0" * 4))[0]
        return 0

    def close(self) -> None:
        """End the shell."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for fd in (self.master, self.slave, self.command, self.status, self.pidfd):
            os.close(fd)


def _exec(ends: Sequence[int], settings: Callable[[], Settings], groups: Sequence[int], user: int | None) -> NoReturn:
    """Become bash, in the fork; `ends` are the script, the terminal twice, and the pipes of commands and statuses."""
    try:
        limits, environment = settings()
        linux.join(groups)
        linux.hide(False)
        if user is None:
            linux.become(None, root.BOX_ID, linux.NEWCGROUP, 0 if limits.get("roots") else None)
        linux.own_session()
        fcntl.ioctl(ends[1], termios.TIOCSCTTY, 0)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in ends]
        for source, target in zip(high, (0, 1, 2, 8, 9), strict=True):
            os.dup2(source, target, inheritable=True)
        os.closerange(3, 8)
        os.closerange(10, 65536)
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        box.confine(limits | {"seconds": 0}, linux.filter_program(os.uname().machine), user)
        os.execve("/bin/bash", ["bash"], environment)
    finally:
        os._exit(127)


class Output:
    """The beginning and the end of an output."""

    def __init__(self) -> None:
        self.head, self.tail, self.size = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Append output; the middle is dropped."""
        self.size += len(data)
        room = KEEP - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        del self.tail[: max(0, len(self.tail) - KEEP)]

    @property
    def cut(self) -> int:
        """Bytes that were dropped."""
        return self.size - len(self.head) - len(self.tail)


class ShellServer(ABC):
    """Serves one live box until the owner hangs up. Its shells join `groups`; it stays out, and so outlives them."""

    tree: int  # descriptor of the work tree

    def __init__(
        self, connection: socket.socket, groups: Sequence[int], size: tuple[int, int] = SIZE, user: int | None = None
    ) -> None:
        """`user` is the user of shells; None: that of this process."""
        self.connection = connection
        self.groups = groups
        self.size = size
        self.user = user
        self.shell: BashSession | None = None
        self.descriptors: list[int] = []  # descriptors that came with the request, besides its payload
        self.spared = {"1"}  # processes that are not the box's

    @abstractmethod
    def settings(self) -> Settings:
        """Limits and environment of shells."""

    @abstractmethod
    def _changed(self, roots: Sequence[str]) -> Iterator[tuple[str, bytes | None]]: ...

    def serve_one(self) -> None:
        """Wait for a request and reply."""
        request, payload = self._request()
        body: Sequence[bytes] = ()
        try:
            with files.refusing(request.get("path", "box")):
                head, body = self._answer(request, payload)
        except files.FileRefused as e:
            head = {"refused": e.kind, "message": str(e)}
        box.send(self.connection, head | {"id": request["id"]}, body)
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()

    def _request(self) -> tuple[dict[str, Any], bytes]:
        """The next request and its payload; reaps orphans and watches memory while it waits."""
        while not select.select([self.connection], [], [], 1.0)[0]:
            self._reap()
            if self.shell is not None:
                self._watch()
        data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 2)
        if not data:
            os._exit(0)
        while len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]:
            data += self.connection.recv(65536)
        payload = box.read_all(descriptors[0])
        os.close(descriptors[0])
        self.descriptors += descriptors[1:]
        return json.loads(data[4:]), payload

    def _answer(self, request: dict[str, Any], payload: bytes) -> Message:
        """Head and body of the reply."""
        path = request.get("path", "")
        match request["op"]:
            case "exec":
                return self._exec(payload.decode("utf-8", "surrogateescape"), request["seconds"])
            case "program":
                return self._program(request, payload)
            case "read":
                return {}, [files.read(self.tree, path, request["max"])]
            case "write":
                files.write(self.tree, path, payload)
            case "list":
                return {}, [b"\0".join(map(os.fsencode, files.names(self.tree, path)))]
            case "delete":
                files.delete(self.tree, path)
            case "changes":
                return self._changes(request["roots"])
        return {}, ()

    def _changes(self, roots: Sequence[str]) -> Message:
        """The change set, read while every other process is stopped."""
        self._signal(signal.SIGSTOP)
        try:
            changes = dict(self._changed(roots))
        finally:
            self._signal(signal.SIGCONT)
        names = b"\0".join(map(os.fsencode, changes))
        sizes = [None if data is None else len(data) for data in changes.values()]
        return {"head": len(names), "sizes": sizes}, [names, *(data for data in changes.values() if data)]

    def _signal(self, number: int) -> None:
        """Send a signal to every process of the box but this one, which is pid 1 of the box's namespace. Anywhere else
        it would be every process of the machine."""
        assert os.getpid() == 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)

    def _exec(self, line: str, seconds: float) -> Message:
        if self.shell is None:
            self.shell = BashSession(self.size, self.user, self.groups, self.settings)
        started = time.monotonic()
        output = Output()
        code: int | None = None
        timed_out = False
        try:
            self.shell.start(line)
            code, timed_out = self._wait(output, started + seconds)
        except (Lost, BrokenPipeError) as e:
            if isinstance(e, Lost):
                code, timed_out = e.code, e.late
            self._drain(output)
            self.shell.close()
            self.shell = None
        self._reap()
        head = {
            "rc": code,
            "timed_out": timed_out,
            "cut": output.cut,
            "head": len(output.head),
            "seconds": time.monotonic() - started,
        }
        return head, [bytes(output.head + output.tail)]

    def _program(self, request: dict[str, Any], payload: bytes) -> Message:
        """Run a program beside the shell; its exit status comes from the kernel."""
        limits, environment = self.settings()
        channel = self.descriptors[0] if self.descriptors else None
        confined = program.Confined(limits, environment | request["environment"], self.groups, self.user)
        running = program.Program(request["argv"], payload, channel, request["max"], confined)
        deadline = time.monotonic() + request["seconds"]
        while running.serve(deadline, self.connection):
            self._watch()
        self._reap()
        return running.result()

    def _wait(self, output: Output, deadline: float) -> tuple[int | None, bool]:
        """(exit status, timed out). Raises Lost."""
        shell = self.shell
        assert shell is not None
        signals = [signal.SIGTERM, signal.SIGKILL]  # INT would end bash, too
        watch = time.monotonic() + WATCH_SECONDS
        late = ending = False
        while True:
            now = time.monotonic()
            if now >= watch:
                self._watch()
                watch = now + WATCH_SECONDS
            if now >= deadline:
                late = True
                deadline = now + GRACE_SECONDS
                self._interrupt(shell, signals.pop(0) if signals else None)
            wait = max(0.0, min(deadline, watch) - now)
            owner = [] if ending else [self.connection]
            ready, _, _ = select.select([shell.status, shell.master, shell.pidfd, *owner], [], [], wait)
            if self.connection in ready:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    os._exit(0)
                ending, deadline = True, now  # the only request during a command is to end it; it is answered after
            if shell.status in ready and (code := shell.answer()) is not None:
                self._drain(output)
                return code, late
            if shell.master in ready:
                self._drain(output, once=True)
            if shell.pidfd in ready:
                _, status = os.waitpid(shell.pid, 0)
                raise Lost(os.WEXITSTATUS(status) if os.WIFEXITED(status) and not late else None, late)

    def _interrupt(self, shell: BashSession, number: int | None) -> None:
        """Signal the foreground processes; without a number, end the shell, which may be in a loop of its own."""
        group = shell.foreground()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number is None:
                os.kill(shell.pid, signal.SIGKILL)
            elif group > 1 and group != shell.pid:
                os.killpg(group, number)

    def _drain(self, output: Output, once: bool = False) -> None:
        assert self.shell is not None
        with contextlib.suppress(OSError):
            for _ in range(1 if once else 64):
                data = os.read(self.shell.master, 65536)
                if not data:
                    return
                output.add(data)

    def _reap(self) -> None:
        """Reap orphans, which pid 1 inherits; the shell is waited for elsewhere."""
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if self.shell is not None and child.si_pid == self.shell.pid:
                    break
                os.waitpid(child.si_pid, 0)

    def _watch(self) -> None:
        """End everything in the box when its processes together hold too much memory, unless control groups do."""
        if self.groups:
            return
        pages = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name not in self.spared:
                with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/statm") as file:
                    _, resident, shared, *_ = file.read().split()
                    pages += int(resident) - int(shared)
        if pages * 4096 > self.settings()[0]["memory"]:
            self._signal(signal.SIGKILL)
