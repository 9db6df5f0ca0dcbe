"""Child processes of a run: each has a log, is watched, and dies with its parent.

`python -P -m etude.processes PARENT MODULE ARGUMENT...` is how a child begins: it asks for the parent-death signal
before it imports MODULE, whose imports may take seconds.

    Child      a process
    RankGroup  processes that train together; none goes on without the others
    Elsewhere  a process that others start, perhaps on another machine; known by its heartbeats in a common folder
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import UserError, last_line

PR_SET_PDEATHSIG = 1
SERVER = "ETUDE_SERVER_PID"
"""The environment variable with the pid of the child that a process descends from."""
LISTENER = "ETUDE_MASTER_FD"
"""The environment variable of rank 0 with the descriptor of the socket that listens at MASTER_PORT."""
BEAT_SECONDS = 3.0
SILENT_SECONDS = 90.0
"""Time without a heartbeat after which a process counts as ended. NFS shows changes up to a minute late."""
_LOOK_SECONDS, _KILLED_SECONDS = 0.05, 10.0


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


def settle_objects() -> None:
    """Takes the objects that are there now, most of them of modules, out of all later garbage collections: with them
    each full one stops a process of many small objects for a tenth of a second."""
    gc.collect()
    gc.freeze()


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

    @property
    def pids(self) -> dict[str, int]:
        """Its pid, by the name of its log."""
        return {self.log.stem: self.popen.pid}

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


class RankGroup:
    """The ranks of a trainer. As soon as one of them fails, the others are killed: they would wait for it. The group's
    end is that of the rank which failed first; it succeeds when all have."""

    def __init__(self, name: str, children: Sequence[Child]) -> None:
        self.name, self.children = name, children
        self._failed: Child | None = None
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._look, name=f"ranks of {name}", daemon=True)
        self._watch.start()

    def _look(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            ended = [child for child in self.children if child.exit_code is not None]
            if failed := [child for child in ended if child.exit_code]:
                # Of several at once: a death by a signal and a sentence for the user are causes, other errors may be
                # those of a rank whose partner was gone.
                self._failed = min(failed, key=lambda c: (c.popen.returncode > 0, c.popen.returncode != 2))
                for child in self.children:
                    child.popen.kill()
                for child in self.children:
                    child.ends(_KILLED_SECONDS)
            if self._failed is not None or len(ended) == len(self.children):
                return

    @property
    def exit_code(self) -> int | None:
        """None while ranks run; that of the rank which failed first, else 0."""
        if self._watch.is_alive():
            return None
        if self._failed is not None:
            return self._failed.exit_code
        codes = [child.exit_code for child in self.children]
        return None if None in codes else next(filter(None, codes), 0)

    def ends(self, seconds: float) -> bool:
        """Whether the ranks end within so many seconds."""
        self._watch.join(seconds)
        return self.exit_code is not None

    @property
    def log(self) -> Path:
        """The log of rank 0, or of the rank that failed first."""
        return (self._failed or self.children[0]).log

    @property
    def pids(self) -> dict[str, int]:
        """The ranks' pids, by the names of their logs."""
        return {name: pid for child in self.children for name, pid in child.pids.items()}

    def failure(self) -> str | None:
        """One sentence about the rank that failed first, else None."""
        return None if self._failed is None or self._watch.is_alive() else self._failed.end()

    def end(self) -> str:
        """One sentence about ranks that are gone."""
        return (self._failed or self.children[0]).end()

    def stop(self, seconds: float) -> None:
        """SIGTERM to all ranks, then SIGKILL after `seconds`."""
        self._stopping.set()
        self._watch.join()
        for child in self.children:
            child.popen.terminate()
        deadline = time.monotonic() + seconds
        for child in self.children:
            child.stop(max(0.0, deadline - time.monotonic()))


class Heartbeat:
    """A file that is written again and again while this process lives, for `Elsewhere` in another one. `first`: raises
    FileExistsError if the file is there."""

    def __init__(self, path: Path, *, first: bool = False) -> None:
        self.path, self._count = path, 0
        if first:
            path.touch(exist_ok=False)
        self._write(None, "")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk: the next may succeed
                self._write(None, "")

    def end(self, code: int, why: str = "") -> None:
        """Writes how the process ends, once."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                self._write(code, why)

    def _write(self, code: int | None, why: str) -> None:
        self._count += 1
        whole = self.path.with_name(f".{self.path.name}.next")
        whole.write_text(json.dumps({"count": self._count, "code": code, "why": why}))
        whole.replace(self.path)


class Elsewhere:
    """A process that others start, by the heartbeats that it writes to `path`. It must begin within `seconds`. `ours`
    are the heartbeats of this process, whose end the other one follows."""

    def __init__(self, name: str, path: Path, seconds: float, ours: Heartbeat | None = None) -> None:
        self.name, self.log = name, path
        self._seconds, self._ours = seconds, ours
        self._last, self._since = "", time.monotonic()
        self._end: tuple[int, str] | None = None  # its exit code, and why
        self.pids: dict[str, int] = {}

    @property
    def exit_code(self) -> int | None:
        """None while heartbeats come, then the exit code of the process; 1 after `SILENT_SECONDS` without any."""
        if self._end is not None:
            return self._end[0]
        text, now = "", time.monotonic()
        with contextlib.suppress(OSError):
            text = self.log.read_text()
        if text != self._last:
            self._last, self._since = text, now
        limit = SILENT_SECONDS if self._last else self._seconds
        try:
            last: Any = json.loads(text)
        except ValueError:  # not there yet
            last = {}
        if last.get("code") is not None:
            how = f"the {self.name} exited with code {last['code']}"
            self._end = last["code"], f"{how}: {last['why']}" if last["why"] else how
        elif now - self._since > limit:
            what = "has not been heard of for" if self._last else "was not started within"
            self._end = 1, f"the {self.name} {what} {limit:.0f} seconds"
        return None if self._end is None else self._end[0]

    def failure(self) -> str | None:
        """One sentence if the process is gone for another reason than having finished, else None."""
        return self.end() if self.exit_code else None

    def end(self) -> str:
        """One sentence about a process that is gone."""
        assert self._end is not None
        return self._end[1]

    def stop(self, seconds: float) -> None:
        """Ends our own heartbeats, and waits until the process has followed."""
        if self._ours is not None:
            self._ours.end(0)
        deadline = time.monotonic() + seconds
        while self._last and self.exit_code is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


Process = Child | RankGroup | Elsewhere


def start(
    name: str,
    argv: list[str],
    log: Path | None,
    env: dict[str, str] | None = None,
    *,
    holds: Sequence[int] = (),
    python: str = sys.executable,
    reason: Callable[[str], str] = last_line,
    apart: bool = False,
) -> Child:
    """Starts `python -m argv...` with both outputs in `log`. The child dies with the thread that called this. It keeps
    the descriptors `holds` open, and with them their locks. Another `python` must find this module, too. The working
    folder may be a repository that tasks are made of, so modules are not looked for in it. Without a log the outputs
    are those of this process. `apart`: Ctrl-C in the terminal does not reach the child."""
    with (log or Path(os.devnull)).open("ab") as file:
        popen = subprocess.Popen(
            [python, "-P", "-m", "etude.processes", str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=file if log else None,
            stderr=subprocess.STDOUT if log else None,
            env={**os.environ, **(env or {})},
            pass_fds=holds,
            process_group=0 if apart else None,
        )
    return Child(name, popen, log or Path(os.devnull), reason)


def start_ranks(
    name: str,
    argv: list[str],
    logs: Path,
    count: int,
    env: dict[str, str] | None = None,
    *,
    holds: Sequence[int] = (),
    shown: bool = False,
) -> Child | RankGroup:
    """Starts `count` ranks of one program on this machine, in the environment of torchrun. Their logs are NAME-R.log;
    one process alone is a plain child with NAME.log. `shown`: rank 0 has the outputs of this process instead, and
    Ctrl-C reaches none."""
    if count == 1:
        return start(name, argv, logs / f"{name}.log", env, holds=holds)
    children = list[Child]()
    # Rank 0 inherits the socket: between a free port and its use another process could take it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        try:
            for rank in range(count):
                own = {**(env or {}), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                kept = [*holds, listener.fileno()] if rank == 0 else holds
                own |= {LISTENER: str(listener.fileno())} if rank == 0 else {}
                log = None if shown and rank == 0 else logs / f"{name}-{rank}.log"
                children.append(start(f"{name}'s rank {rank}", argv, log, own, holds=kept, apart=shown))
        except BaseException:
            for child in children:
                child.stop(1)
            raise
    return RankGroup(name, children)


def own_rank() -> int | None:
    """The number of this process among ranks that train together; None for a process that is none of several. Raises
    UserError for half of torchrun's environment."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    values = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")}
    wrong = [name for name, value in values.items() if not (value if name == "MASTER_ADDR" else value.isdecimal())]
    if wrong:
        raise UserError(
            f"WORLD_SIZE = {values['WORLD_SIZE']!r} names ranks, but {wrong[0]} is {values[wrong[0]] or 'not set'}: "
            "start ranks by torchrun, or unset WORLD_SIZE"
        )
    return int(values["RANK"])


def place_number(name: str, default: str = "") -> int:
    """A number of torchrun's environment, such as RANK. Raises UserError if it is missing."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r} in the environment: ranks need the numbers that torchrun sets")
    return int(text)


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


def end_at_once() -> None:
    """Lets this process end without a last search for garbage, which takes seconds among the modules of torch."""
    atexit.register(gc.freeze)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    end_at_once()
    os.environ[SERVER] = str(os.getpid())
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
