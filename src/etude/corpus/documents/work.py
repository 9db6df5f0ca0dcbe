"""The work folder of a build, `OUTPUT.building`, and its workers.

A stage is a list of numbered tasks. A task writes its files and, last and in one step, NNNNN.json; a task with that
file is not done again, so a killed build goes on where it was. Tasks read nothing but the work folder and the sources,
and their order does not matter, so any number of workers gives the same bytes.
"""

from __future__ import annotations

import concurrent.futures
import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from etude.corpus.documents.structs import DocumentPlan
from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.processes import die_with_parent
from etude.store import write_durably

SECONDS = 900.0  # in which at least one of the tasks that run must end
Progress = Callable[[str, int, int], None]
Task = Callable[[Path, int], bytes]


def file(folder: Path, stage: str, number: int, suffix: str) -> Path:
    """The path of a task's file."""
    return folder / stage / f"{number:05}.{suffix}"


def write(path: Path, data: bytes) -> None:
    """Writes a file as a whole. Raises UserError."""
    try:
        write_durably(path, data)
    except OSError as e:
        raise UserError(
            f"{path} cannot be written: {e.strerror}; make room, then give the same command again"
        ) from None


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a numpy array as a whole. Raises UserError."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write(path, buffer.getvalue())


@lru_cache(maxsize=1)
def plan_of(folder: Path) -> DocumentPlan:
    """The plan of a build that has begun."""
    return msgspec.json.decode((folder / "plan.json").read_bytes(), type=DocumentPlan)


def run_tasks(folder: Path, stage: str, task: Task, count: int, workers: int, progress: Progress) -> None:
    """Runs the tasks 0 to `count` of a stage that are not done. Raises RunFailed if a worker dies or hangs."""
    (folder / stage).mkdir(exist_ok=True)
    left = [number for number in range(count) if not file(folder, stage, number, "json").exists()]
    progress(stage, count - len(left), count)
    if workers == 1 or len(left) < 2:
        for done, number in enumerate(left):
            _finish(folder, stage, task, number)
            progress(stage, count - len(left) + done + 1, count)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(left)), spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    )
    try:
        waiting = {pool.submit(_finish, folder, stage, task, number) for number in left}
        while waiting:
            ended, waiting = concurrent.futures.wait(waiting, SECONDS, concurrent.futures.FIRST_COMPLETED)
            if not ended:
                raise RunFailed(
                    f"no worker has ended a task of the stage {stage} in {SECONDS:.0f} s: see the machine's "
                    "load, and give the same command again"
                )
            for future in ended:
                future.result()
            progress(stage, count - len(waiting), count)
    except BrokenProcessPool:
        raise RunFailed(
            f"a worker was killed in the stage {stage}, perhaps for want of memory: give the same command "
            "again, with fewer --workers"
        ) from None
    finally:
        _end(pool)


def _end(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Ends the workers at once: what they do is done anew."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.join(10.0)


def _finish(folder: Path, stage: str, task: Task, number: int) -> None:
    last = task(folder, number)
    write(file(folder, stage, number, "json"), last)
    failpoint(f"corpus.{stage}")
