"""Mends a foreign task that falls to changes of its inputs, its tools or the home folder: its tests see those as they
were."""

from __future__ import annotations

from etude.grading import run_solution
from etude.records import CodeTask
from etude.sandbox import Sandbox
from etude.tasks.foreign.build import ORACLE_RUNS, SOLUTION_SECONDS
from etude.tasks.foreign.dataset import ForeignDataset, closed


async def close_task(sandbox: Sandbox, data: ForeignDataset, task: CodeTask) -> ForeignDataset | None:
    """The dataset with the task closed, if it was open and its gates hold. Raises BoxError."""
    record = data.records[task.id]
    if record.closed is not None:
        return None
    folder = data.root / "tasks" / task.id / "solution"
    solved = await run_solution(sandbox, data.image(task), folder, record.workdir, data.limits(task), SOLUTION_SECONDS)
    made = closed(data, task, solved)
    if (await made.grade(sandbox, task, {})).score > 0:
        return None
    for _ in range(ORACLE_RUNS):
        if not (await made.grade(sandbox, task, solved)).passed:
            return None
    return made
