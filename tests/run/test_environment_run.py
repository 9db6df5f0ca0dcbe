"""A run on an environment in Python, by `etude train`: every process is real, the model is tiny and random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from etude.ledger.ledger import Ledger
from etude.records import Episode, decode
from etude.store import open_store
from etude.weights.manifest import manifests
from tests.helpers.tiny_environment import save_model, tables

ROOT = Path(__file__).parents[2]
STEPS = 24


def etude(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a folder from which the recipes can be imported."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "etude.cli.main", *arguments], cwd=folder, text=True, capture_output=True, timeout=600,
        env=os.environ | {"TERM": "dumb", "PYTHONPATH": path},
    )  # fmt: skip


def write_toml(folder: Path, steps: int) -> None:
    """The configuration as TOML: JSON's values are TOML's, one key a line."""
    lines = []
    for table, values in tables(folder / "model", steps).items():
        if isinstance(values, dict):
            for key, value in values.items():
                if isinstance(value, dict):
                    lines += [f"{table}.{key}.{name} = {json.dumps(each)}" for name, each in value.items()]
                else:
                    lines.append(f"{table}.{key} = {json.dumps(value)}")
        else:
            lines.append(f"{table} = {json.dumps(values)}")
    (folder / "run.toml").write_text("\n".join(['stage = "rl"', *lines]))


@pytest.mark.slow
@pytest.mark.smoke
def test_a_run_learns_an_environment(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    write_toml(tmp_path, STEPS)
    done = etude(tmp_path, "train", "run.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/all/mean"] for line in lines]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1, rewards
    assert all(line["off_policy/max"] <= 1 for line in lines)
    assert all(line["rollout/environment/letters"] >= 0 for line in lines)
    store = open_store(str(run / "rollouts"))
    episodes = [decode(store.get(key), Episode) for key in store.list() if not key.startswith("eval-")]
    assert len(episodes) == STEPS * 4 * 8
    assert all(e.grade is not None and abs(e.reward - e.grade) < 1e-9 for e in episodes)
    assert all(e.task_id.startswith("reverse-") for e in episodes)
    versions = manifests(open_store(str(run / "weights")))
    ledger = Ledger.open(f"sqlite:///{run}/ledger.db")
    assert ledger.conservation(versions).ok, "every group is trained on once, and every episode has ended once"
    assert ledger.counts()["scored"] == len(episodes)
    ledger.close()
    report = json.loads((run / "report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    assert msgspec.json.decode((run / "eval-after.json").read_bytes())["tasks"]


def test_what_a_user_may_get_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    write_toml(tmp_path, 1)
    (tmp_path / "model").symlink_to(ROOT / "models/nano")
    done = etude(tmp_path, "train", "run.toml", "--tasks.environment", "reverse_words:Reverse")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "tasks.environment: reverse_words:Reverse: No module named 'reverse_words'" in done.stderr
    (tmp_path / "mine.py").write_text("class Words: pass")
    done = etude(tmp_path, "train", "run.toml", "--tasks.environment", "mine:Words", "--tasks.arguments.count", "3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "mine:Words cannot be made of tasks.arguments" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_reward_that_always_raises_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    write_toml(tmp_path, 2)
    (tmp_path / "mine.py").write_text(
        "from recipes.environments.reverse_text import ReverseText\n\n\n"
        "class Broken(ReverseText):\n    def validate(self, task): pass\n    def reward(self, episode): return 1 / 0\n"
    )
    done = etude(tmp_path, "train", "run.toml", "--tasks.environment", "mine:Broken")
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "10 failures in a row, the last of Broken.reward of task reverse-" in last
    assert "ZeroDivisionError: division by zero" in last
    assert "Traceback" not in done.stderr
