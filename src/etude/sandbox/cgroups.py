"""Control groups of boxes: memory, processes and processor time together, where this process may make groups.

A sandbox has one group per hierarchy, locked while it lives, and below it one per live box and per test run at a time.
The owner makes and removes them: a group is removed with its box whatever died inside. A group whose owner was killed
holds no process any more and no lock; the next sandbox removes it. See docs/sandbox.md and cgroups(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etude.code import lines_of
from etude.sandbox.base import LaunchFailed, Limits

NAME = "etude-boxes-"
REST = "etude-rest"  # takes the processes of a v2 group that is to have groups below it
NEEDED = frozenset({"memory", "pids"})
WANTED = NEEDED | {"cpu"}
PERIOD = 100_000  # microseconds
REMOVE_SECONDS = 10.0
ROUNDS = 20  # of moving processes that fork meanwhile


@dataclass(frozen=True)
class Hierarchy:
    """Controller -> the group below which groups are made; the same group for all controllers under v2."""

    kind: Literal["v2", "v1"]
    folders: Mapping[str, Path]


@dataclass(frozen=True)
class ControlGroup:
    """The group of one box in every hierarchy, and descriptors that move a process into it that writes "0" to them."""

    folders: tuple[Path, ...]
    descriptors: tuple[int, ...]


def detect(proc: Path = Path("/proc/self"), top: Path = Path("/")) -> Hierarchy | None:
    """Where this process may make groups for memory and processes: in v2 if its controllers are there, else in v1."""
    own: dict[str, str] = {}
    for line in lines_of((proc / "cgroup").read_text()):
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)  # the name of v2 is empty
    mounted: dict[str, Path] = {}
    for line in lines_of((proc / "mountinfo").read_text()):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if not kind.startswith("cgroup"):
            continue
        root, place = left.split(" ")[3:5]
        for name in [""] if kind == "cgroup2" else WANTED & set(options.split(",")):
            path = own.get(name, "/..")
            if name not in mounted and "/.." not in path and f"{path}/".startswith(root.rstrip("/") + "/"):
                mounted[name] = top / place.lstrip("/") / path[len(root.rstrip("/")) :].lstrip("/")
    unified = mounted.pop("", None)
    if unified is not None:
        unified = unified.parent if unified.name == REST else unified
        here = WANTED & _words(unified / "cgroup.controllers")
        if here >= NEEDED and os.access(unified, os.W_OK):
            return Hierarchy("v2", dict.fromkeys(sorted(here), unified))
    writable = {name: folder for name, folder in sorted(mounted.items()) if os.access(folder, os.W_OK)}
    return Hierarchy("v1", writable) if writable.keys() >= NEEDED else None


def find(share: float = 1.0) -> Groups | None:
    """Groups for a new sandbox, whose boxes together may hold a share of the memory; None where no groups
    can be made."""
    try:
        hierarchy = detect()
        if hierarchy is None:
            return None
        groups = Groups(hierarchy, int(share * memory_of(hierarchy)))
    except OSError:
        return None
    try:
        with groups.lent(Limits()):
            return groups
    except LaunchFailed:
        groups.close()
        return None


def memory_of(hierarchy: Hierarchy) -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of its own group."""
    bound = _meminfo()["MemTotal"]
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            bound = min(bound, int((hierarchy.folders["memory"] / name).read_text()))
    return bound


def available_memory() -> int:
    """Bytes that processes of this machine could still take without swapping."""
    return _meminfo()["MemAvailable"]


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in lines_of(Path("/proc/meminfo").read_text()))
    return {name.rstrip(":"): int(kilobytes) << 10 for name, kilobytes, *_ in lines}


def hand_down(folder: Path, controllers: frozenset[str]) -> None:
    """Give the groups below a v2 group these controllers. A group that does can't hold processes (cgroups(7)), so
    its own ones move into one below it first. Raises OSError."""
    if controllers <= _words(folder / "cgroup.subtree_control"):
        return
    if (folder / "cgroup.type").exists():  # the root has none, and may hold processes
        for _ in range(ROUNDS):
            if not (pids := _words(folder / "cgroup.procs")):
                break
            (folder / REST).mkdir(exist_ok=True)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (folder / REST / "cgroup.procs").write_text(pid)
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(controllers)))


class Groups:
    """The groups of one sandbox, whose boxes hold at most `memory` bytes together. Raises OSError if none can be
    made."""

    def __init__(self, hierarchy: Hierarchy, memory: int | None = None) -> None:
        self.hierarchy = hierarchy
        self.tops: dict[Path, Path] = {}  # by the folder that it lies in
        self._locks: list[int] = []
        self._free: dict[Limits, list[ControlGroup]] = {}  # of test runs
        self._count = 0
        name = NAME + secrets.token_hex(6)
        try:
            for folder in dict.fromkeys(hierarchy.folders.values()):
                if hierarchy.kind == "v2":
                    hand_down(folder, frozenset(hierarchy.folders))
                sweep(folder)
                self.tops[folder] = folder / name
                self._locks.append(_locked(folder / name))
                if hierarchy.kind == "v2":
                    hand_down(folder / name, frozenset(hierarchy.folders))
            if memory is not None:
                top = hierarchy.folders["memory"] / name
                with contextlib.suppress(OSError):  # v1: count groups below, too; on most machines they count anyway
                    (top / "memory.use_hierarchy").write_text("1")
                _write(top, _memory_settings(hierarchy.kind, memory))
            if "cpu" in hierarchy.folders:
                _weigh(hierarchy.folders["cpu"] / name, hierarchy.kind)
        except OSError:
            self.close()
            raise

    def make(self, limits: Limits) -> ControlGroup:
        """A new group that holds a box to `limits`. Raises LaunchFailed."""
        self._count += 1
        folders: dict[str, Path] = {}
        descriptors: list[int] = []
        try:
            for controller, folder in self.hierarchy.folders.items():
                place = folders[controller] = self.tops[folder] / f"box-{self._count}"
                place.mkdir(exist_ok=True)  # one folder may have several controllers
                _write(place, _settings(self.hierarchy.kind, controller, limits))
            unique = tuple(dict.fromkeys(folders.values()))
            descriptors += [os.open(place / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for place in unique]
        except OSError as e:
            for fd in descriptors:
                os.close(fd)
            raise LaunchFailed(f"a control group could not be made: {e}") from None
        return ControlGroup(unique, tuple(descriptors))

    @contextlib.contextmanager
    def lent(self, limits: Limits) -> Iterator[ControlGroup]:
        """A group for one test run, which ends with all its processes. It is used again, unless the run was lost."""
        key = Limits(limits.memory_mb, limits.processes, cpus=limits.cpus)
        free = self._free.setdefault(key, [])
        group = free.pop() if free else self.make(key)
        try:
            yield group
        except BaseException:
            _released(group)
            raise
        free.append(group)

    async def remove(self, group: ControlGroup) -> None:
        """End the processes of a group and remove it. A group that does not end in time is left to the next sandbox."""
        _released(group)
        deadline = time.monotonic() + REMOVE_SECONDS
        wait = 0.001
        for folder in group.folders:
            while not _removed(folder) and time.monotonic() < deadline:
                await asyncio.sleep(wait)
                wait = min(0.05, 2 * wait)  # many boxes may be ending

    def close(self) -> None:
        """Remove all groups; their boxes have been ended."""
        for group in [group for free in self._free.values() for group in free]:
            _released(group)
        self._free.clear()
        deadline = time.monotonic() + REMOVE_SECONDS
        for top in self.tops.values():
            while not _emptied(top) and time.monotonic() < deadline:
                for folder in _below(top):
                    _kill(folder)
                time.sleep(0.005)
        for fd in self._locks:
            os.close(fd)
        self.tops.clear()
        self._locks.clear()


def sweep(folder: Path) -> None:
    """Remove groups of sandboxes whose owner has died."""
    for top in folder.glob(f"{NAME}*"):
        with contextlib.suppress(OSError):
            fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _emptied(top)
            finally:
                os.close(fd)


def _locked(top: Path) -> int:
    """Descriptor of a new group, with a lock that marks the group as used."""
    while True:
        top.mkdir(exist_ok=True)
        fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if top.exists():  # no other sandbox has swept it away in between
            return fd
        os.close(fd)


def _weigh(top: Path, kind: str) -> None:
    """All boxes together weigh as much as one thread per processor of this process's niceness: the kernel counts a
    group as one thread, whatever its own are (sched(7); a step of niceness is a factor of 1.25)."""
    threads = (os.cpu_count() or 1) * 1.25 ** -os.getpriority(os.PRIO_PROCESS, 0)
    if kind == "v2":
        (top / "cpu.weight").write_text(str(min(10_000, max(1, round(100 * threads)))))
    else:
        (top / "cpu.shares").write_text(str(min(262_144, max(2, round(1024 * threads)))))


_Settings = list[tuple[str, int | str, bool]]  # (file, value, whether the file may be missing)


def _write(folder: Path, settings: _Settings) -> None:
    for file, value, optional in settings:
        with contextlib.suppress(FileNotFoundError) if optional else contextlib.nullcontext():
            (folder / file).write_text(str(value))


def _memory_settings(kind: str, memory: int) -> _Settings:
    if kind == "v2":
        return [("memory.max", memory, False), ("memory.swap.max", 0, True)]  # not every kernel accounts swap
    return [("memory.limit_in_bytes", memory, False), ("memory.memsw.limit_in_bytes", memory, True)]


def _settings(kind: str, controller: str, limits: Limits) -> _Settings:
    quota = int(limits.cpus * PERIOD)
    match kind, controller:
        case _, "memory":
            return _memory_settings(kind, limits.memory_mb << 20)
        case "v2", "cpu":
            return [("cpu.max", f"{quota} {PERIOD}", False)]
        case _, "cpu":
            return [("cpu.cfs_period_us", PERIOD, False), ("cpu.cfs_quota_us", quota, False)]
        case _:
            return [("pids.max", limits.processes, False)]


def _released(group: ControlGroup) -> None:
    """Close a group to new processes, and end those in it."""
    for fd in group.descriptors:
        os.close(fd)
    for folder in group.folders:
        _kill(folder)


def _kill(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (folder / "cgroup.kill").exists():
            (folder / "cgroup.kill").write_text("1")
            return
        for pid in _words(folder / "cgroup.procs"):
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(int(pid))
                try:
                    if pid in _words(folder / "cgroup.procs"):  # still the process that the descriptor holds
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)


def _removed(folder: Path) -> bool:
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
    except OSError:  # a process is ending in it
        return False
    return True


def _emptied(top: Path) -> bool:
    return all(_removed(folder) for folder in _below(top)) and _removed(top)


def _below(top: Path) -> list[Path]:
    return [path for path in top.glob("*") if path.is_dir()]


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except FileNotFoundError:
        return set()
