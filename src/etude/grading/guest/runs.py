"""The template: one process per task image that forks a throwaway box for every test run.

It has pytest configured, and the sources of the task's tree compiled: the tree that agents get, never the right answer,
so that no process with an agent's code can find that answer. It never runs or reads code of an agent: a request is a
descriptor that only the forked child reads. The report of the child goes through a pipe to the owner, who judges it.
The template watches deadlines and the pipe.

Wire format in both directions: a 4-byte little-endian length and JSON. A run's request carries one descriptor.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import gc
import importlib
import json
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...sandbox.guest import box, linux, root, services
from . import code, suite, swap, tested, verifier

MODULE = "module:"  # before the name of a module to import ahead
MAX_REPORT = 1 << 20  # bytes that a run may report
WATCH_SECONDS = 0.25  # between checks of the memory of a run
LEARNING = {"memory": 4 << 30, "addresses": 4 << 30, "processes": 64, "disk": 64 << 20, "seconds": 60}  # limits
_LIBRARY_SKIP = frozenset({"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "__main__"})


@dataclass
class ForkedRun:
    """A forked child, as the template tracks it."""

    id: int
    pid: int
    pidfd: int
    pipe: int
    deadline: float
    started: float
    memory: float  # limit of the bytes that its processes hold together; infinite where a control group has the limit
    timed_out: bool = False


class RunTemplate:
    """The template process. `connection` leads to the owner; `hidden` is the folder of hidden tests inside, if this
    image is for grading.

    A hot template has imported the task's library and tests, a cold one holds only their compiled code; see `swap.py`.
    """

    def __init__(
        self,
        connection: socket.socket,
        hot: bool,
        hidden: str | None,
        controls: dict[str, Any] | None,
        lowers: Sequence[str] = (root.WORKSPACE,),
    ) -> None:
        """`controls` is a `sandbox.backend.HiddenControls` as a dictionary, or None; `lowers` are the layers of
        boxes."""
        self.connection = connection
        self.lowers = lowers
        self.hidden = hidden
        self.cache = code.Cache()
        workspace = root.WORKSPACE
        inner = f"{workspace}/src" if os.path.isdir(f"{workspace}/src") else workspace
        roots = list(dict.fromkeys([*suite.search_path(), inner, workspace]))
        self.roots = [*([hidden] if hidden else []), *roots, root.SITE]
        code.install(self.cache, self.roots)
        self.config, self.reporter = suite.prepare(hidden or workspace)
        self.cache.rewrite = suite.rewriter(self.config, None if controls is None else controls["token"])
        self.suite = suite.Suite(self.config, self.reporter, self.cache, hidden, workspace)
        self.suite.virtual = {} if controls is None else controls["modules"]
        self.hot = hot
        self.ran: swap.Ran = set()
        self.modules: dict[str, ModuleType] = {}  # imported, by file
        self.runs: dict[int, ForkedRun] = {}  # by pidfd
        self.filters = {alone: linux.filter_program(os.uname().machine, alone) for alone in (False, True)}
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.buffer = bytearray()
        self.descriptors: list[int] = []

    def serve(self) -> None:
        """Serve requests until the owner closes the connection."""
        poll = select.poll()
        self.poll = poll
        poll.register(self.connection, select.POLLIN)
        gc.collect()
        gc.freeze()
        while True:
            now = time.monotonic()
            wait = min((run.deadline - now for run in self.runs.values()), default=60.0)
            if self.runs:
                wait = min(wait, WATCH_SECONDS)
            for fd, _ in poll.poll(max(0.0, wait) * 1000 + 1):
                if fd != self.connection.fileno():
                    self._finish(self.runs[fd])
                elif not self._requests():
                    return
            now = time.monotonic()
            self._watch(now)
            for run in self.runs.values():
                if now >= run.deadline:
                    run.timed_out = True
                    os.kill(run.pid, signal.SIGKILL)  # the pid cannot be reused until it is waited for
                    run.deadline = now + 60

    def _watch(self, now: float) -> None:
        """End runs whose processes together hold more memory than a run may; the kernel limits each process alone."""
        watched = (run for run in self.runs.values() if run.memory < math.inf)
        old = {run.pid: run for run in watched if now - run.started >= WATCH_SECONDS}
        if not old:
            return
        parents, held = memory_of_processes()
        sums = dict.fromkeys(old, 0)
        inherited = held.get(os.getpid(), 0)  # forks share pages that they don't write to
        for pid, size in held.items():
            while pid not in sums and pid in parents:  # orphans belong to the first process of their run
                pid = parents[pid]
            if pid in sums:
                sums[pid] += max(0, size - inherited)
        for pid, size in sums.items():
            if size > old[pid].memory:
                os.kill(pid, signal.SIGKILL)

    def _requests(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 16)
        if not data:
            return False
        self.buffer += data
        self.descriptors += descriptors
        while len(self.buffer) >= 4:
            (size,) = struct.unpack_from("<I", self.buffer)
            if len(self.buffer) < 4 + size:
                break
            request = json.loads(self.buffer[4 : 4 + size])
            del self.buffer[: 4 + size]
            count = 1 + bool(request.get("socket")) + request.get("groups", 0)
            payload, *groups = self.descriptors[:count]
            del self.descriptors[:count]
            self._start(request, payload, groups)
        return True

    def _start(self, request: dict[str, Any], payload: int, groups: list[int]) -> None:
        if "learn" in request:
            self._teach(request, payload)
            return
        if "warm" in request:
            self._warm_up(request, payload)
            return
        sock = groups.pop(0) if request.get("socket") else -1
        started = time.monotonic()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        # Read once, after the end: every wake-up in between would cost as much as a test.
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, MAX_REPORT)
        pid = self._fork()
        if pid == 0:
            os.close(reader)
            self._child(payload, writer, request["limits"], None, groups, sock)
        os.close(writer)
        for fd in (payload, *groups, *((sock,) if sock >= 0 else ())):
            os.close(fd)
        deadline = started + request["limits"]["seconds"]
        memory = math.inf if groups else request["limits"]["memory"]
        run = ForkedRun(request["id"], pid, linux.end_of(pid), reader, deadline, started, memory)
        self.runs[run.pidfd] = run
        self.poll.register(run.pidfd, select.POLLIN)

    def _teach(self, request: dict[str, Any], payload: int) -> None:
        """Keep the modules and code that a recording of hidden tests needed."""
        self._remember(json.loads(box.read_all(payload)))
        os.close(payload)
        box.send(self.connection, {"id": request["id"]})

    def _import(self, entry: str) -> None:
        if entry.startswith(MODULE):
            importlib.import_module(entry.removeprefix(MODULE))
        else:
            self.suite.warm(entry)

    def _fork(self) -> int:
        """Fork pid 1 of a new pid namespace."""
        return linux.fork_first(self.own_pids)

    def _finish(self, run: ForkedRun) -> None:
        """Handle the end of pid 1 of a box, and with it of all its processes."""
        _, status, usage = os.wait4(run.pid, 0)
        self.poll.unregister(run.pidfd)
        del self.runs[run.pidfd]
        os.close(run.pidfd)
        with open(run.pipe, "rb") as pipe:
            data = pipe.read(MAX_REPORT)
        head = {
            "id": run.id,
            "status": os.waitstatus_to_exitcode(status),
            "timed_out": run.timed_out,
            "seconds": time.monotonic() - run.started,
            "cpu": usage.ru_utime + usage.ru_stime,
        }
        box.send(self.connection, head, [data])

    def _warm_up(self, request: dict[str, Any], payload: int) -> None:
        """Compile and, in a hot template, import the modules that tests of some files need. Reports the modules and the
        code."""
        task, packed = box.decode(box.read_all(payload))
        os.close(payload)
        self.cache.packed = {path: code for path, code in packed.items() if code}
        learned = task["learned"] or [self._try_out(task["files"])]
        for record in learned:
            self._remember(record)
        if self.hot:
            with swap.record(self.ran, root.WORKSPACE):
                for path in task["files"]:
                    if any(path in record.get("loaded", ()) for record in learned):
                        with contextlib.suppress(BaseException):
                            self._import(path)
            imported = ((getattr(module, "__file__", None), module) for module in list(sys.modules.values()))
            self.modules = {path: module for path, module in imported if path and path in self.cache.sources}
            if threading.active_count() > 1:  # a fork would lack the other threads
                self.modules = {}
        gc.collect()
        gc.freeze()
        made = {path: base64.b64encode(code).decode() for path, code in self.cache.made.items()}
        self.cache.made.clear()
        news = {"learned": {} if task["learned"] else learned[0], "code": made}
        box.send(self.connection, {"id": request["id"]}, [json.dumps(news).encode()])

    def _try_out(self, files: list[str]) -> dict[str, Any]:
        """Import test modules in a box of their own, on the task's image, to learn which modules to keep compiled."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pid = self._fork()
        if pid == 0:
            os.close(reader)
            self._child(-1, writer, LEARNING, files)
        os.close(writer)
        with open(reader, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], LEARNING["seconds"])
            data = pipe.read() if ready else b""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return json.loads(data or b"{}")

    def _remember(self, learned: dict[str, Any]) -> None:
        """Keep compiled and imported the modules that a trusted run needed."""
        self.cache.tests.update(learned.get("tests", ()))
        for path in learned.get("sources", ()):
            with contextlib.suppress(SyntaxError, ValueError, OSError):
                self.cache.learn(path)
        for name in learned.get("modules", ()):
            # Only the standard library and the dependencies; both are read-only.
            with contextlib.suppress(Exception):
                __import__(name)
        for pattern, flags in learned.get("patterns", ()):
            with contextlib.suppress(re.error):
                re.compile(pattern, flags)
        gc.collect()
        gc.freeze()

    def _child(
        self,
        payload: int,
        writer: int,
        limits: dict[str, Any],
        warm: list[str] | None,
        groups: Sequence[int] = (),
        sock: int = -1,
    ) -> None:
        """Run tests in the fork. Never returns."""
        try:
            linux.join(groups)
            request, changes = ({}, {}) if payload < 0 else box.decode(box.read_all(payload))
            first, last = sorted((writer, sock if sock >= 0 else writer))
            os.closerange(3, first)
            os.closerange(first + 1, last)
            os.closerange(last + 1, 65536)
            self.cache.changed = {f"{root.WORKSPACE}/{path}": data for path, data in changes.items()}
            self._enter(limits, changes, request.get("role") == "verifier")
            if warm is not None:
                self._learn(warm, writer)
            elif request.get("role") == "verifier":
                self._verify(request, sock, writer)
            else:
                self._run(request, writer, sock)
        except MemoryError:
            os._exit(3)
        except BaseException as e:  # the tested code may raise anything, SystemExit too
            with contextlib.suppress(BaseException):
                _write(writer, {"lost": suite.describe(e)})
            os._exit(2)
        os._exit(0)

    def _enter(self, limits: dict[str, Any], changes: dict[str, bytes | None], alone: bool) -> None:
        """Make this fork a box; `alone`: that of a verifier, which starts no process and opens no connection."""
        box.enter()
        box.terminals()
        box.furnish(limits, changes, self.lowers)
        if root.REPOSITORY in self.lowers:
            linux.unmount(root.SHARED)  # the repository without the task's files
        linux.become(None, root.BOX_ID, linux.NEWCGROUP)  # processes are counted for this box alone
        linux.own_session()
        if alone:
            box.close_files()
        box.confine(limits, self.filters[alone])
        if alone:
            linux.hide()

    def _verify(self, request: dict[str, Any], sock: int, writer: int) -> None:
        """Run hidden tests against a library at the other end of the socket."""
        before = set(sys.modules)
        wire = verifier.Verifier(socket.socket(fileno=sock), request, lambda: _write(writer, {"met": True}))
        tests = verifier.VerifiedSuite(self.config, self.reporter, self.cache, wire)
        verifier.verify(request, tests, lambda record: _write(writer, record))
        if wire.recording:
            _write(writer, {"learned": {**self._learned(before), "library": wire.finder.imported}})
        _write(writer, {"end": len(request["tests"])})

    def _run(self, request: dict[str, Any], writer: int, sock: int) -> None:
        def report(test: str, outcome: str, message: str, line: int) -> None:
            _write(writer, {"test": test, "outcome": outcome, "message": message, "line": line})

        if self.hot and not self._swap():
            _write(writer, {"cold": True})
            return
        if "random" in sys.modules:
            sys.modules["random"].seed(0)  # forks reseed it
        services.start(request.get("services", ()))
        if sock >= 0:
            tested.serve(socket.socket(fileno=sock))
            return
        self.suite.run(request["tests"], report)
        _write(writer, {"end": len(request["tests"])})

    def _swap(self) -> bool:
        """Bring the imported library to the state of this run; False if it must be imported again."""
        for path, data in self.cache.changed.items():
            source = self.cache.sources.get(path)
            if source is None or data is None or path not in self.modules:
                return False
            try:
                text = code.decode(data)
            except SyntaxError:
                return False
            if not swap.swap(source, text, self.modules[path], self.ran):
                return False
        return True

    def _learn(self, files: list[str], writer: int) -> None:
        before = set(sys.modules)
        loaded = []
        for path in files:
            with contextlib.suppress(BaseException):
                self._import(path)
                loaded.append(path)
        learned = self._learned(before) | {"loaded": loaded if threading.active_count() == 1 else []}
        data = json.dumps(learned).encode() + b"\n"
        while data:
            data = data[os.write(writer, data) :]

    def _learned(self, before: set[str]) -> dict[str, Any]:
        """The modules that this process has compiled and imported since `before`."""
        stable = (sys.base_prefix + "/", root.SITE + "/", root.RUNNER + "/", "/usr/lib/")
        names = []
        for name, module in list(sys.modules.items()):
            origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
            known = origin in ("built-in", "frozen") or origin.startswith(stable)
            if known and name not in before and name.split(".")[0] not in _LIBRARY_SKIP:
                names.append(name)
        sources = list(dict.fromkeys(self.cache.loaded))
        return {
            "sources": sources,
            "tests": sorted(self.cache.tests),
            "modules": names,
            "patterns": [key[1:] for key in getattr(re, "_cache", {}) if key[0] is str],
        }


def memory_of_processes() -> tuple[dict[int, int], dict[int, int]]:
    """(parent, private bytes) by process, as far as /proc shows them."""
    parents: dict[int, int] = {}
    held: dict[int, int] = {}
    page = resource.getpagesize()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{name}/statm") as file:
                    _, resident, shared, *_ = file.read().split()
                held[int(name)] = (int(resident) - int(shared)) * page
    return parents, held


def _write(fd: int, record: dict[str, Any]) -> None:
    os.write(fd, json.dumps(record).encode() + b"\n")
