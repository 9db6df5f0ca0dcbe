"""`etude tasks traces`: the gold answers of training tasks, told as conversations with the run's tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import blake3

from etude import runfolder
from etude.config import TracesConfig
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.records import Task
from etude.renderers.schemas import named
from etude.rollout.traces import NEEDED, gold_edit, trace
from etude.sandbox.base import BoxError, Sandbox
from etude.tasks.dataset import Dataset, load

Progress = Callable[[str, int, int], None]


def write_traces(datasets: Sequence[Path], output: Path, options: TracesConfig, progress: Progress) -> tuple[int, int]:
    """Writes a row for each trace into `output`; returns how many there are, and how many were tried. What was told
    stays in OUTPUT.partial, so that the same command goes on after it was stopped. Held-out tasks are left out. Raises
    UserError."""
    named(options.tools)
    if options.tools and (lacking := sorted(NEEDED - {*options.tools})):
        raise UserError(f"a trace needs the tool {lacking[0]!r}: name it among the tools, too")
    if output.exists():
        raise UserError(f"{output} exists: name another file, or remove it")
    wanted = [
        (dataset, task, number)
        for dataset in map(load, datasets) for task in dataset.split("train") if gold_edit(task) is not None
        for number in range(options.per_task)
    ]  # fmt: skip
    if not wanted:
        raise UserError(f"no training task of {', '.join(map(str, datasets))} has an answer that can be told")
    runfolder.make(output.parent)
    partial = output.with_name(f"{output.name}.partial")
    asyncio.run(_write(wanted, partial, options, progress))
    rows = [line for line in runfolder.read_jsonl(partial, texts=("name",)) if "messages" in line]
    if not rows:
        raise UserError("no answer passed its visible tests in a box: run `etude tasks check` on the dataset")
    runfolder.write(output, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    partial.unlink()
    return len(rows), len(wanted)


async def _write(
    wanted: Sequence[tuple[Dataset, Task, int]], partial: Path, options: TracesConfig, progress: Progress
) -> None:
    """Appends to `partial` what is missing there: a row, or the name alone of a trace that could not be told."""
    known = {line["name"] for line in runfolder.read_jsonl(partial, texts=("name",))}
    free, done = asyncio.Semaphore(options.workers), 0

    async def one(sandbox: Sandbox, dataset: Dataset, task: Task, number: int) -> None:
        nonlocal done
        name = f"{dataset.name}:{task.id}:{number}"
        async with free:
            if name not in known:
                runfolder.append_json(
                    partial, {"name": name} | (await _told(sandbox, dataset, task, name, options) or {})
                )
        done += 1
        progress("telling answers", done, len(wanted))

    async with open_sandbox() as sandbox, asyncio.TaskGroup() as group:
        for dataset, task, number in wanted:
            group.create_task(one(sandbox, dataset, task, number))


async def _told(sandbox: Sandbox, dataset: Dataset, task: Task, name: str, options: TracesConfig) -> dict | None:
    seed = int.from_bytes(blake3.blake3(f"{options.seed}/{name}".encode()).digest(8))
    try:
        box = await sandbox.create(dataset.image(task), dataset.limits(task))
        try:
            return await trace(task, box, seed, options.tools)
        finally:
            await box.close()
    except BoxError:
        return None  # the machine was too busy, or the tests broke their box
