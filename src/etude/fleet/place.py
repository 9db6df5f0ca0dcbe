"""The placers by the tables of a fleet, and that of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from etude import processes
from etude.code import need
from etude.config import EnginesTable, PlayersTable, RanksTable
from etude.errors import UserError
from etude.fleet.jobs import FleetJob, Placed, PlacedJob, Placer, namespace, with_folder, write_files
from etude.fleet.ray_jobs import RayPlacer
from etude.fleet.supervise import Supervised


class LocalPlacer:
    """Starts processes of this machine, which die with this one. They keep the descriptors `holds` open. Their GPUs are
    those that this process sees, from number `gpu` on."""

    def __init__(self, logs: Path, restarts: int, holds: Sequence[int] = (), gpu: int = 0) -> None:
        self._logs, self._restarts, self._holds, self._gpu = logs, restarts, holds, gpu

    def start(self, job: FleetJob) -> PlacedJob:
        """Starts a job, and again when it ends by itself. Raises UserError without a GPU for it."""
        log, python = self._logs / f"{job.name}.log", job.python or sys.executable
        words, env = self._words(job), dict(job.env)
        if job.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(self._gpu, job))
            self._gpu += job.gpus
        begins = partial(processes.start, job.name, words, log, env, holds=self._holds, python=python, apart=True)
        return Supervised(job.name, log, begins, self._restarts)

    def start_group(self, job: FleetJob, count: int) -> Placed:
        """Starts ranks, of which none goes on without the others."""
        return processes.start_ranks(job.name, self._words(job), self._logs, count, dict(job.env), holds=self._holds)

    def close(self) -> None:
        """Does nothing: children die with this process."""

    def _words(self, job: FleetJob) -> list[str]:
        folder = self._logs.absolute() / f"{job.name}.files"
        write_files(folder, job.files)
        return with_folder(job.argv, folder)


def _visible(first: int, job: FleetJob) -> list[str]:
    """The GPUs of a job by their names in CUDA_VISIBLE_DEVICES."""
    seen, numbers = os.environ.get("CUDA_VISIBLE_DEVICES"), range(first, first + job.gpus)
    names = [str(number) for number in numbers] if seen is None else seen.split(",")[first : first + job.gpus]
    if len(names) < job.gpus:
        raise UserError(
            f"{job.name} needs the GPUs {first} to {first + job.gpus - 1} of this machine, and CUDA_VISIBLE_DEVICES = "
            f"{seen} has fewer: lower count or gpus"
        )
    return names


def open_placer(
    table: EnginesTable | PlayersTable | RanksTable, folder: Path, logs: Path, holds: Sequence[int] = (), gpu: int = 0
) -> Placer:
    """The placer of a table for the run in `folder`; logs of its jobs are kept in `logs`. Processes of this machine
    keep the descriptors `holds` open, and have the GPUs from number `gpu` on. Raises UserError, and ValueError for
    servers that nobody starts."""
    restarts = 0 if isinstance(table, RanksTable) else table.restarts
    match table.placer:
        case "local":
            return LocalPlacer(logs, restarts, holds, gpu)
        case "ray":
            need('placer = "ray"', "ray")
            return RayPlacer(table.address, namespace(folder), logs, restarts)
        case "attach":
            raise ValueError("servers that others start have no placer")
