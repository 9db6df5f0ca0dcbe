"""The contract of a backend: live boxes, and throwaway forks of a pristine image in which tests run.

A backend runs the tests that a request names and returns their output. `grading/runner.py` chooses the tests and
judges the output.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.sandbox.base import Capabilities, Changes, Image, LaunchFailed, Limits
from etude.sandbox.egress.policy import Egress
from etude.sandbox.machine_profile import ProfileSource
from etude.sandbox.shell import Shell

LEARN_SECONDS = 180.0  # to import the modules that a recording needed
GRACE_SECONDS = 20.0  # beyond a run's own deadline, before the process that forks the runs is taken for dead
VERIFIER_SECONDS = 5.0  # that a verifier has after the tested process has run out of time


@dataclass(frozen=True)
class RunServer:
    """The modules that serve test runs in boxes; they come from `grading`, since this room knows nothing about tests.

    folder: holds `runs.py` with a class RunTemplate, for forks of a process that holds an image, and `remote_runs.py`
        with a class RemoteRuns, for a machine per run.
    package: the name of the folder below the guest's package, as in "grading.guest".
    """

    folder: Path
    package: str


@dataclass(frozen=True)
class BackendOptions:
    """The look and reach of live boxes, and the modules that run tests; every backend takes the same options.

    runs: the modules that serve test runs.
    machine_profiles: probes of production machines, or a description of some, that boxes imitate
        (`machine_profile.py`). Empty: the reference description. "image": boxes look like containers of their image,
        to the bounding set and limits of their processes (`guest/box.py`, `confine`). None: boxes stay as they are.
    egress: the hosts and index that boxes may reach. None: nothing.
    repeatable: fix the hash seed of Python in boxes. The variable is no part of a user's machine, so by default only
        boxes without a machine profile have it.
    services: `ServiceConfig`s as dictionaries, which run in the boxes of agents and of tested code.
    """

    runs: RunServer
    machine_profiles: ProfileSource | None = ()
    egress: Egress | None = None
    repeatable: bool = False
    services: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class HiddenControls:
    """The controls beside the hidden tests of an image, by which the owner recognises forged results.

    token: part of the names of negative-control tests (`grading/guest/negative_controls.py`).
    modules: path -> text of further test modules.
    """

    token: str
    modules: Mapping[str, str]


@dataclass(frozen=True)
class RunImage:
    """The image that test runs are forked from: the tree of a task, its dependencies, and a folder of hidden tests or
    None.

    changes: sorted (path, content) of the task's own files over the repository. A process that an agent's code runs in
    descends from one that has read this tree, never the repository without the changes.
    """

    repository: Path
    site: Path | None
    hidden: Path | None
    changes: tuple[tuple[str, bytes], ...] = ()
    controls: HiddenControls | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ForkRequest:
    """One run of `tests` in a new box that holds `image` with an agent's `changes` over it.

    files: modules to import first: test files, `PATH::doctest:` for source files.
    """

    image: RunImage
    files: Sequence[str]
    tests: Sequence[str]
    changes: Changes
    limits: Limits


@dataclass(frozen=True)
class ForkResult:
    """How a run ended, and the bytes that it reported. Nothing in `output` is trustworthy.

    status: exit status; negative for a signal.
    cpu_seconds: of all processes of the run.
    cold: whether the run could not use the imported library.
    """

    status: int
    timed_out: bool
    seconds: float
    output: bytes
    cpu_seconds: float
    cold: bool = False


@dataclass(frozen=True)
class VerifyRequest:
    """One run of hidden tests in a process of their own, on a library in another (`grading/guest/verifier.py`).

    image: the tree of the library, without hidden tests; `changes` are an agent's.
    hidden: the folder of hidden tests.
    names: top-level modules of the library.
    allowed: test -> its recording: {"places": decisions and operations of the library, "decoys": its answers on decoy
        comparisons, "origins": calls that are made for these}. None: the run is a recording of the right library.
    modules: modules of the library that a process imports ahead.
    exports: module -> names that `from module import *` may bring.
    secret: of the decoy comparisons; empty: a recording without them.
    origins: in a recording, test -> the calls that earlier ones have found.
    """

    image: RunImage
    hidden: Path
    names: Sequence[str]
    tests: Sequence[str]
    changes: Changes
    limits: Limits
    allowed: Mapping[str, Mapping[str, Any]] | None
    modules: Sequence[str] = ()
    exports: Mapping[str, Sequence[str]] = field(default_factory=dict)
    secret: str = ""
    origins: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The part that the verifier gets."""
        return {
            "role": "verifier",
            "recording": self.allowed is None,
            "names": self.names,
            "tests": self.tests,
            "allowed": self.allowed or {},
            "exports": self.exports,
            "secret": self.secret,
            "origins": self.origins,
        }


@dataclass(frozen=True)
class VerifyResult:
    """How both processes of a run ended. Only the tested one runs an agent's code; its output proves nothing."""

    verifier: ForkResult
    tested: ForkResult


class Backend(ABC):
    """Makes boxes. Every method raises BoxDead once the backend has died, LaunchFailed for a box that cannot start."""

    gated = False  # whether live boxes have a way out
    python: str  # the version of Python in boxes, such as "3.13.5"
    recordings = 4  # runs that record tests at a time: while a test sleeps, others can run
    zygote_pid: int | None = None  # of the process that makes boxes, where there is one
    image_name: str  # with a digest: equal names are equal files

    services: Sequence[dict[str, Any]] = ()

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether boxes can still be made."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The abilities of this backend's boxes on this machine."""

    @abstractmethod
    def system_folders(self) -> Mapping[str, Path]:
        """Path in a box -> folder or file of this machine, of all that boxes have besides their task. Raises
        UserError."""
        ...

    @abstractmethod
    async def shell(self, image: Image, layers: Changes, limits: Limits, *, bare: bool = False) -> Shell:
        """A live box on `image` with the files of `layers` over it. A `bare` box has no decoys, no machine profile and
        no way out."""

    async def check_services(self) -> None:
        """Start all services in a box without a task. Raises UserError for one that does not get ready."""
        if not self.services:
            return
        with tempfile.TemporaryDirectory(prefix="etude-services-") as folder:
            os.chmod(folder, 0o755)
            try:
                shell = await self.shell(Image(Path(folder), None, {}), {}, Limits(), bare=True)
            except LaunchFailed as e:
                raise UserError(f"{e}.") from None
            await shell.close()

    @abstractmethod
    async def fork(self, request: ForkRequest) -> ForkResult:
        """Run tests in a new box without network."""

    @abstractmethod
    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Run hidden tests outside of the process of the tested code."""

    @abstractmethod
    async def remember(self, image: RunImage, learned: bytes) -> None:
        """Compile and import the modules that a recording needed, for later runs on an image."""
