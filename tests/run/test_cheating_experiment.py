"""The control experiment: what fools its open grader does not fool etude's, and both arms run and are counted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.experiments.cheating import open_boxes

from etude.grading.grade import grade
from etude.grading.runner import open_sandbox
from etude.records import Task
from etude.sandbox.base import Sandbox
from etude.tasks import dataset as datasets
from etude.tasks.dataset import Dataset

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/tasks/data/tiny"


async def grades(sandbox: Sandbox, dataset: Dataset, task: Task) -> list[bool]:
    """Whether it passes: the broken program, the right answer, and one that does not compile."""
    path = task.focus.path
    broken = task.changes[path]
    trees = ({}, {path: task.solution[path].encode()}, {path: f"{broken}\n)\n".encode()})
    return [(await grade(sandbox, task, dataset.image(task), dataset.hidden, tree)).passed for tree in trees]


def test_code_that_does_not_compile_fools_the_open_grader_and_not_etudes() -> None:
    tiny = datasets.load(TINY)
    task = next(task for task in tiny.tasks if task.difficulty["visible_fails"])

    async def scenario() -> tuple[list[bool], list[bool]]:
        async with open_boxes(tiny) as opened, open_sandbox() as closed:
            return await grades(opened, tiny, task), await grades(closed, tiny, task)

    opened, closed = asyncio.run(scenario())
    assert opened == [False, True, True]
    assert closed == [False, True, False]


@pytest.mark.release
@pytest.mark.slow
def test_both_arms_run_and_are_counted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.experiments.cheating",
        "--dataset",
        str(TINY),
        "--output",
        str(tmp_path / "out"),
    ]
    sizes = ["--steps", "2", "--prompts", "2", "--group", "3", "--samples", "1"]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "out/cheating.json").read_text())
    assert set(result["arms"]) == {"open", "etude"}
    for arm in result["arms"].values():
        assert [(line["step"], line["episodes"]) for line in arm["curves"]] == [(1, 6), (2, 6)]
        assert {"held out, before", "held out, after"} <= set(arm["shares"])
    # Its edits made again and graded again, every episode comes to what was recorded.
    assert all(line["rewarded"] == line["right"] for line in result["arms"]["etude"]["curves"])
    assert "<svg" in (tmp_path / "out/cheating.svg").read_text()
    again = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert again.stderr.startswith("cheating: ")
    counted = subprocess.run([*command, "--count"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert json.loads(counted.stdout.splitlines()[-1]) == result
