"""Jobs, and the surface of the placers: a placer starts a job somewhere, and gives a handle with which it is watched
and stopped."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.runfolder import PRIVATE

FOLDER = "{folder}"
"""It stands for the folder of a job's files in its arguments."""


@dataclass(frozen=True)
class FleetJob:
    """A process to start: `python -m argv...`. Secrets are in `env` alone. `files`, by name, are written into a private
    folder where the job runs, which replaces "{folder}" in `argv`. `python`: another one than this process's."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    files: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cpus: float = 1.0
    gpus: int = 0
    python: str | None = None


class Placed(Protocol):
    """A job that was started, or ranks of one: the surface of `processes.Child`. `log` is on this machine."""

    name: str

    @property
    def exit_code(self) -> int | None:
        """None while the job runs or is to be started again."""
        ...

    @property
    def log(self) -> Path:
        """Its output."""
        ...

    @property
    def pids(self) -> dict[str, int]:
        """Its processes on this machine, by the names of their logs."""
        ...

    def failure(self) -> str | None:
        """One sentence if the job is gone for another reason than having finished, else None."""
        ...

    def end(self) -> str:
        """One sentence about a job that is gone."""
        ...

    def ends(self, seconds: float) -> bool:
        """Whether the job ends within so many seconds."""
        ...

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL after `seconds`; it is not started again."""
        ...


class PlacedJob(Placed, Protocol):
    """A job that is started again when it ends by itself. `waits`: why it has not begun for a while, else ""."""

    waits: str

    @property
    def begun(self) -> bool:
        """Whether it ran once."""
        ...


class Placer(Protocol):
    """Starts jobs in one place."""

    def start(self, job: FleetJob) -> PlacedJob:
        """Starts a job, and again when it ends by itself. A placer whose jobs outlive it takes a running job of the
        same name, if it is the same job."""
        ...

    def start_group(self, job: FleetJob, count: int) -> Placed:
        """Starts `count` ranks of one program in the environment of torchrun, together or not at all. One that fails
        ends all, and none is started again."""
        ...

    def close(self) -> None:
        """Ends what the placer itself holds; jobs that it stops with itself must be stopped before."""
        ...


class Stoppable(Protocol):
    """A job or a process."""

    def stop(self, seconds: float) -> None:
        """See `Placed.stop`."""
        ...


def stop_all(placed: Sequence[Stoppable], seconds: float) -> None:
    """Stops jobs and processes at the same time."""
    threads = [threading.Thread(target=one.stop, args=[seconds]) for one in placed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Makes the private folder of a job, with its files alone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    for name, text in files.items():
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is not the name of a job's file")
        path = folder / name
        path.touch(PRIVATE)
        path.write_text(text)


def with_folder(argv: Sequence[str], folder: Path) -> list[str]:
    """The arguments of a job whose files are in `folder`."""
    return [word.replace(FOLDER, str(folder)) for word in argv]


def namespace(folder: Path) -> str:
    """The name of a run among those of a cluster: its own, and a digest of its place."""
    place = folder.absolute()
    return f"etude-{place.name[:60]}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
