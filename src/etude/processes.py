"""Child processes of a run: each has a log, is watched, and dies with its parent.

`python -P -m etude.processes PARENT MODULE ARGUMENT...` is how a child begins: it asks for the parent-death signal
before it imports MODULE, whose imports may take seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import UserError, last_line

PR_SET_PDEATHSIG = 1
SERVER = "ETUDE_SERVER_PID"
"""The environment variable with the pid of the child that a process descends from."""


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies; ends it at once if the process with pid `parent` is no
    longer the parent. Then no child outlives a parent that was killed, whenever that was."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def return_memory() -> None:
    """Returns freed memory to the system. Many small pieces, or large ones of several threads, glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # a function of glibc
        trim(0)


def end_with_server() -> None:
    """Ends this process, and its parent between the two, as soon as the child of etude has ended that they descend
    from: an engine of vLLM outlives a server that was killed for a minute, and keeps its memory. Does nothing in
    processes that descend from none."""
    server = int(os.environ.get(SERVER, "0"))
    if not server:
        return

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(server)], [], [])
        if (parent := os.getppid()) not in (server, 1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None if it is gone, or where the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()  # proc(5): the second is in pages
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Child:
    """A running process of the run."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    reason: Callable[[str], str] = last_line  # of its end, from its log

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative: the signal that killed it."""
        return self.popen.poll()

    def failure(self) -> str | None:
        """One sentence if the process is gone for another reason than having finished, else None."""
        return self.end() if self.exit_code else None

    def end(self) -> str:
        """One sentence about a process that is gone: how it ended, and the reason in its log if there is one."""
        code = self.exit_code
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if -code in (signal.SIGKILL, signal.SIGTERM):  # of which a process says nothing
            return f"the {self.name} {how}"
        reason = self.reason(self.log.read_text(errors="replace")) if self.log.exists() else ""
        return f"the {self.name} {how}" + (f": {reason[:300].removeprefix('etude: ')}" if reason else "")

    def ends(self, seconds: float) -> bool:
        """Whether the process ends within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)
        return self.exit_code is not None

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL after `seconds`."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(10)


def start(
    name: str,
    argv: list[str],
    log: Path,
    env: dict[str, str] | None = None,
    *,
    holds: Sequence[int] = (),
    python: str = sys.executable,
    reason: Callable[[str], str] = last_line,
) -> Child:
    """Starts `python -m argv...` with both outputs in `log`. The child dies with the thread that called this. It keeps
    the descriptors `holds` open, and with them their locks. Another `python` must find this module, too. The working
    folder may be a repository that tasks are made of, so modules are not looked for in it."""
    with log.open("ab") as file:
        popen = subprocess.Popen(
            [python, "-P", "-m", "etude.processes", str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            pass_fds=holds,
        )
    return Child(name, popen, log, reason)


def wait_for_file(path: Path, child: Child, seconds: float) -> str:
    """The contents of `path` once `child` has written it. Raises UserError if it dies or takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text()
        if child.exit_code is not None:
            raise UserError(f"{child.end()}; see {child.log}")
        time.sleep(0.05)
    raise UserError(f"the {child.name} was not ready after {seconds:.0f} seconds; see {child.log}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ[SERVER] = str(os.getpid())
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
