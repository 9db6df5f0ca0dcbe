"""Sources of tasks that are built during a run: `python -m etude.run.sources RUN` builds one after the other, and the
controller adds each to the run when its folder is complete."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from etude import runfolder
from etude.config import RLConfig
from etude.errors import UserError
from etude.rollout import Curriculum, MixedCurriculum, Taskset, mix
from etude.run.inputs import build_numbered, trainable
from etude.run.parts import built_beside, source_part

BUILDER = "task builder"  # the name of the process
NICE = 10  # below training


@dataclass
class TaskPool:
    """The tasks of a run, and the numbers of the sources that are still being built."""

    taskset: Taskset
    waiting: tuple[int, ...] = ()


def trained_tasks(config: RLConfig, folder: Path, taskset: Taskset) -> Taskset:
    """The tasks without those that are not trained on (`inputs.trainable`). Raises UserError if none is left."""
    sources, later = config.tasks.sources or (config.tasks,), missing(config, folder)
    shares = (source.min_decided for n, source in enumerate(sources) if n not in later)
    parts = [trainable(part, share) for part, share in zip(taskset.parts, shares, strict=True)]
    return replace(taskset, parts=tuple(parts))


def missing(config: RLConfig, folder: Path) -> tuple[int, ...]:
    """The numbers of the sources still to be built beside the run in `folder`."""
    return tuple(number for number in built_beside(config) if not _place(folder, number).exists())


def arrived(folder: Path, pool: TaskPool) -> list[int]:
    """The numbers of the sources that have been built since the last call of `join`."""
    return [number for number in pool.waiting if _place(folder, number).exists()]


def join(config: RLConfig, folder: Path, pool: TaskPool, number: int) -> None:
    """Adds a built source to the pool. Raises UserError for a source without training tasks."""
    sources = config.tasks.sources
    part = source_part(sources[number], _place(folder, number))
    assert part is not None
    part = trainable(part, sources[number].min_decided)
    known = sum(source.weight for n, source in enumerate(sources) if n not in pool.waiting)
    weights = [pool.taskset.weights[of.name] * known for of in pool.taskset.parts]
    pool.taskset = mix([*pool.taskset.parts, part], [*weights, sources[number].weight])
    pool.waiting = tuple(n for n in pool.waiting if n != number)
    count = len(part.split("train"))
    print(f"etude: {count} training tasks of {part.name} join the run", file=sys.stderr)


def curriculum_of(taskset: Taskset, group: int, seed: int) -> Curriculum | MixedCurriculum:
    """The curriculum that draws the training tasks of `taskset`, for groups of `group` episodes."""
    if not taskset.mixed:
        return Curriculum([task.id for task in taskset.split("train")], group, seed)
    ids: dict[str, list[str]] = {name: [] for name in taskset.weights}
    for task in taskset.split("train"):
        ids[task.repository].append(task.id)
    return MixedCurriculum({name: Curriculum(own, group, seed) for name, own in ids.items()}, taskset.weights)


def extend(curriculum: Curriculum | MixedCurriculum, taskset: Taskset, group: int, seed: int) -> None:
    """Adds the new parts of a mixture to a curriculum."""
    whole = curriculum_of(taskset, group, seed)
    assert isinstance(curriculum, MixedCurriculum)
    assert isinstance(whole, MixedCurriculum)
    new = {name: part for name, part in whole.parts.items() if name not in curriculum.parts}
    curriculum.join(new, taskset.weights)


def _place(folder: Path, number: int) -> Path:
    return folder / "tasks" / str(number)


def main() -> None:
    """Builds the missing sources of a run folder. Exits with 2 and one sentence if a source yields no tasks."""
    folder = Path(sys.argv[1])
    config = runfolder.load_config(folder)
    os.nice(NICE)
    for number in missing(config, folder):
        try:
            build_numbered(config, number, folder, lambda stage, done, total: print(stage, done, total, flush=True))
        except UserError as e:
            print(f"etude: {e}", flush=True)
            sys.exit(2)


if __name__ == "__main__":
    main()
