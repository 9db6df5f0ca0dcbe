"""The types that other rooms use: images, boxes, reports, sandboxes.

A box is a value, an image and a change set, until a command runs in the box. Reading and writing files, and running
tests in a throwaway copy, need no process of the box. Only `Box.exec` makes it live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from etude.sandbox.egress.policy import EgressRequest

Payer = Literal["agent", "infra"]
Changes = Mapping[str, bytes | None]  # path -> content; None: the file is deleted
WORKSPACE = "/workspace"  # the repository root inside a box
TOOLS = "/opt/agent"  # the program of an outside agent
HOST_SOCKET_PORT = 41414


class BoxError(Exception):
    """An operation on a box failed. `payer` is the side whose fault it is; only "infra" is worth a retry."""

    payer: Payer = "agent"


class NotFound(BoxError):
    """No such file or folder."""


class NotRegular(BoxError):
    """Not a regular file: a folder, a link, a FIFO, a device."""


class Escape(BoxError):
    """A path that is absolute, holds `..` or NUL, or leaves the repository through a link."""


class TooLarge(BoxError):
    """A file, or a change set, over its cap."""


class NoSpace(BoxError):
    """The disk of the box is full."""


class Busy(BoxError):
    """A command is still running in the shell of this box."""


class Garbled(BoxError):
    """The box sent a message that no honest box sends."""


class BoxDead(BoxError):
    """The box, or the process that makes boxes, is gone."""

    payer: Payer = "infra"


class LaunchFailed(BoxError):
    """A box could not be made."""

    payer: Payer = "infra"


class ApplyFailed(BoxError):
    """The server that applies edits did not answer."""

    payer: Payer = "infra"


@dataclass(frozen=True)
class Image:
    """The start of a box. Folders are never changed while a sandbox that has seen them is open."""

    repository: Path  # layer L1: the agent's working tree
    site: Path | None  # its dependencies, on sys.path, read-only
    changes: Mapping[str, str]  # layer L2: path -> text over the repository
    decoys: Mapping[str, str] = field(default_factory=dict)  # files of the agent's box that no test run holds
    history: Mapping[str, bytes] = field(default_factory=dict)  # the agent's .git, path -> content; no test run has it
    mounts: Mapping[str, Path] = field(default_factory=dict)  # folders that a live box has elsewhere, read-only
    places: Mapping[str, str] = field(default_factory=dict)  # path in a live box -> folder of the tree that it shows
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of a live box
    host_socket: Path | None = None  # unix socket of the host that a live box has at 127.0.0.1:HOST_SOCKET_PORT


@dataclass(frozen=True)
class Limits:
    """The resource limits of a box."""

    memory_mb: int = 1024
    addresses_mb: int | None = None  # of one process; None: as many as of memory
    processes: int = 64
    disk_mb: int = 64
    seconds: float = 10.0  # wall time of a test run
    cpus: float = 1.0  # processors' worth of time, where there are control groups


@dataclass(frozen=True)
class ExecResult:
    """One line in the shell. `rc` is None if the shell was lost; `cut` bytes were left out of the middle."""

    rc: int | None
    output: str
    cut: int
    seconds: float
    timed_out: bool


@dataclass(frozen=True)
class TestReport:
    """Node id -> "passed" | "failed" | "error" | "missing", decided outside the tested process.

    `messages` holds one line for each test that failed. `tampered` is proof: a sentinel came out wrong, a decoy
    was returned, or a result was forged. `equality` is the share of a test's judged lines at which an operator of the
    library alone decides, and no decoy comparison could show it to be wrong. `lines` are those of a test's own file at
    which it failed, where that is known.
    """

    __test__ = False  # for pytest, which would collect the class

    outcomes: dict[str, str]
    messages: dict[str, str]
    seconds: float
    timed_out: bool = False
    crashed: bool = False
    tampered: bool = False
    outside: frozenset[str] = frozenset()  # tests decided in a process that the tested code does not run in
    controlled: int = 0  # other tests that ran beside a negative control
    equality: Mapping[str, float] = field(default_factory=dict)  # of tests outside
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def decided(self) -> float:
        """Share of the tests whose results the tested code cannot reach; the others ran inside its process."""
        return len(self.outside) / max(1, len(self.outcomes))

    @property
    def covered(self) -> float:
        """Share of the tests that a forged result cannot pass, or cannot pass unnoticed."""
        return (len(self.outside) + self.controlled) / max(1, len(self.outcomes))


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a backend on this machine."""

    isolation: Literal["none", "namespace", "container", "gvisor", "vm"]
    rootless: bool
    egress: bool
    pty: bool
    seccomp: bool
    cgroup: Literal["v2", "v1", "none"]
    limits: tuple[str, ...] = ()  # of `Limits`, those that hold for a box as a whole
    machine_profile: bool = False  # whether a box can look like a given machine
    host_socket: bool = False  # whether a box can reach a socket of the host: an outside agent's endpoint


class Box(Protocol):
    """Paths are relative to the repository root. Every error is a BoxError."""

    async def read(self, path: str, max_bytes: int = 65536) -> bytes:
        """Content of a regular file. Raises NotFound, NotRegular, Escape, or TooLarge above `max_bytes`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace or create a file and its folders. Raises Escape, NotRegular, TooLarge, NoSpace."""

    async def list(self, path: str) -> list[str]:
        """Sorted names in a folder ("" is the root), folders with a trailing slash. Raises NotFound, NotRegular."""
        ...

    async def delete(self, path: str) -> None:
        """Remove a file. Raises NotFound, NotRegular, Escape."""

    async def exec(self, line: str, timeout: float) -> ExecResult:
        """Run a line in the box's shell, which keeps its folder and variables. A non-zero exit is a result."""
        ...

    async def interrupt(self) -> None:
        """End the command that `exec` runs, as its deadline would."""

    async def run_tests(self, tests: Sequence[str], timeout: float) -> TestReport:
        """Run visible tests on a throwaway copy of the box."""
        ...

    async def changes(self, roots: Sequence[str] = ()) -> dict[str, bytes | None]:
        """Files that differ from the image; None is a deletion. Raises TooLarge, payer agent.

        With `roots`, all that differs below these paths; of the rest only as much as can be read at once.
        """
        ...

    def requests(self) -> Sequence[EgressRequest] | None:
        """Requests of the box to the outside, complete once the box is closed; None without a way out."""
        ...

    async def close(self) -> None:
        """End every process of the box. Idempotent."""


@dataclass
class RunCounts:
    """Test runs of a sandbox: answered from memory, and made."""

    hits: int = 0
    misses: int = 0
    cold: int = 0  # runs that could not use the imported library
    cpu_seconds: float = 0.0  # of the runs, their boxes included


class Sandbox(Protocol):
    """Boxes, and test runs with reliable reports. `grading.runner.open_sandbox` opens one."""

    stats: RunCounts

    @property
    def alive(self) -> bool:
        """Whether boxes can still be made; if not, every call raises BoxDead."""
        ...

    @property
    def zygote_pid(self) -> int | None:
        """Pid of the process that makes boxes; None without such a process."""
        ...

    @property
    def python(self) -> str:
        """The version of Python in boxes, such as "3.13"."""
        ...

    @property
    def image_name(self) -> str:
        """The name of the image that boxes are made of, with its digest where that is known."""
        ...

    def capabilities(self) -> Capabilities:
        """The abilities of boxes on this machine."""
        ...

    def system_folders(self) -> Mapping[str, Path]:
        """Path in a box -> folder or file of this machine, of all that boxes have besides their task."""
        ...

    async def create(self, image: Image, limits: Limits, *, bare: bool = False) -> Box:
        """A box on `image`; nothing is started yet. A `bare` box has no machine profile, no decoys and no way out."""
        ...

    async def run_tests(
        self, image: Image, changes: Changes, tests: Sequence[str], hidden: Path | None, limits: Limits
    ) -> TestReport:
        """Run tests on `image` with `changes`, in a fresh box without network.

        `hidden` is a folder of test files that only this run sees; sentinels are mixed in then. Raises BoxDead or
        LaunchFailed; whatever the tested code does is a result.
        """
        ...
