"""Whole runs in which playing or grading an episode raises what nobody expected."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etude.ledger.ledger import Ledger
from etude.store import open_store
from etude.weights.manifest import manifests
from tests.run.test_run import CONFIG, SECONDS

# Grading fails for the episodes that the argument counts, in the controller alone.
PROGRAM = """
import itertools, sys
from etude.cli.main import main
from etude.rollout.environments.code import CodeTasks
grade, count, last = CodeTasks.grade, itertools.count(1), int(sys.argv.pop(1))
async def broken(*arguments):
    if next(count) <= last:
        raise TypeError("unhashable type: 'list'")
    return await grade(*arguments)
CodeTasks.grade = broken
main()
"""


def train(folder: Path, failures: int, groups: int) -> subprocess.CompletedProcess[str]:
    (folder / "run.toml").write_text(CONFIG)
    sizes = [f"--rollout.prompts={groups}", "--trainer.steps=2", "--eval.before=false"]
    command = [sys.executable, "-c", PROGRAM, str(failures), "train", "run.toml", *sizes]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.slow
def test_an_exception_costs_its_episode_and_no_other(tmp_path: Path) -> None:
    done = train(tmp_path, failures=4, groups=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("is quarantined, not trained on: TypeError: unhashable type: 'list' (") == 4
    run = tmp_path / "outputs/run"
    report = json.loads((run / "report.json").read_text())
    assert (report["episodes"]["scored"], report["episodes"]["quarantined"]) == (8, 4)
    assert [name for name, ok in report["checks"].items() if not ok] == ["no_episode_quarantined"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["drop/episodes/lost"] for line in lines] == [4, 0]
    ledger = Ledger.open(f"sqlite:///{run / 'ledger.db'}")
    assert ledger.conservation(manifests(open_store(str(run / "weights")))).ok
    assert sum(ledger.lost().values()) == 4
    assert len(open_store(str(run / "rollouts")).list()) == 8


@pytest.mark.slow
def test_a_mistake_that_costs_every_episode_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, failures=1000, groups=4)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"(\d+) of \1 episodes are quarantined, the last for TypeError: unhashable type: 'list' \(", last)
    assert "--resume outputs/run" in last
