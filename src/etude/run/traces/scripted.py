"""`etude tasks traces`: the gold answers of training tasks as conversations with the run's tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import blake3

from etude import runfolder
from etude.config import SandboxConfig, TracesConfig
from etude.errors import UserError
from etude.grading import open_sandbox
from etude.records import CodeTask
from etude.renderers import named
from etude.rollout import TRACE_TOOLS, gold_edit, record_trace
from etude.run.traces.partial import Progress, partial_rows
from etude.sandbox import BoxError, Sandbox
from etude.sandbox.egress import wheel_project
from etude.tasks import Dataset, load_dataset


def write_traces(
    datasets: Sequence[Path],
    output: Path,
    options: TracesConfig,
    progress: Progress,
    boxes: SandboxConfig | None = None,
) -> tuple[int, int]:
    """Writes a row for each trace into `output`; returns the numbers of rows and of tries. OUTPUT.partial keeps the
    rows so far, so that the same command continues after a stop. Held-out tasks are left out. Raises UserError."""
    named(options.tools)
    if options.tools and (lacking := sorted(TRACE_TOOLS - {*options.tools})):
        raise UserError(f"a trace needs the tool {lacking[0]!r}: name it among the tools, too")
    if output.exists():
        raise UserError(f"{output} exists: name another file, or remove it")
    sources = {dataset.root: dataset for dataset in map(load_dataset, datasets)}.values()
    for dataset in sources:
        dataset.check_boxes(boxes)
    wanted = {
        f"{dataset.name}:{task.id}:{number}": (dataset, task)
        for dataset in sources
        for task in dataset.split("train")
        if gold_edit(task) is not None
        for number in range(options.per_task)
    }
    if not wanted:
        raise UserError(f"no training task of {', '.join(map(str, datasets))} has an answer that can be told")
    header = {"options": options.model_dump(mode="json", exclude={"workers"})}
    header |= {"datasets": [dataset.manifest.digests.get("dataset.json", "") for dataset in sources]}
    with partial_rows(output, header, "options or datasets") as partial:
        try:
            asyncio.run(_write(wanted, partial, options, progress, boxes))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # such as a UserError, which is for the user to read
        rows = [line for line in runfolder.read_jsonl(partial, texts=("name",)) if "messages" in line]
        if not rows:
            raise UserError("no answer passed its visible tests in a box: run `etude tasks check` on the dataset")
        runfolder.write(output, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        partial.unlink()
    return len(rows), len(wanted)


async def _write(
    wanted: Mapping[str, tuple[Dataset, CodeTask]],
    partial: Path,
    options: TracesConfig,
    progress: Progress,
    boxes: SandboxConfig | None,
) -> None:
    """Appends the missing traces to `partial`: a row, or the name alone of a trace that did not work."""
    known = {line["name"] for line in runfolder.read_jsonl(partial, texts=("name",))}
    free, done = asyncio.Semaphore(options.workers), 0

    async def one(sandbox: Sandbox, name: str, dataset: Dataset, task: CodeTask) -> None:
        nonlocal done
        async with free:
            if name not in known:
                seed = int.from_bytes(blake3.blake3(f"{options.seed}/{name}".encode()).digest(8))
                try:
                    box = await sandbox.create(dataset.image(task), dataset.limits(task))
                    try:
                        row = await record_trace(task, box, seed, options.tools) or {}
                    finally:
                        await box.close()
                    runfolder.append_json(partial, {"name": name} | row)
                except BoxError as e:
                    if e.payer != "infra":  # of a lost box nothing is noted: another try may work
                        runfolder.append_json(partial, {"name": name})
        done += 1
        progress("telling answers", done, len(wanted))

    packages = {wheel_project(dataset.name) for dataset, _ in wanted.values()}
    async with open_sandbox(boxes, packages=packages) as sandbox, asyncio.TaskGroup() as group:
        for name, (dataset, task) in wanted.items():
            group.create_task(one(sandbox, name, dataset, task))
