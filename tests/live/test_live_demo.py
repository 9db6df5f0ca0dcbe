"""`etude live demo` as a user would run it, with one window: about five minutes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli import live_learning
from etude.errors import UserError
from etude.live.release.canary import Difference
from etude.live.simulate.demo import HeldoutScore, LiveDemo, ReleaseOutcome, report


@pytest.mark.release
def test_users_teach_a_version_and_a_damaged_one_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", "--windows", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500, env=os.environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["released"], told["planted_stopped"], told["failed"], told["lost"]) == (True, True, 0, 0)
    assert told["house"][-1] > told["house"][0]
    assert "| 3 (planted) | rolled back" in (tmp_path / "outputs/live-demo/report.md").read_text()


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install openai"):
        live_learning.run_demo(argparse.Namespace(windows=1, seed=1, json=False))
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_the_canarys_lift_of_a_release() -> None:
    lift = Difference(mean=0.169, low=0.051, high=0.287, accounts=(138, 150), better=True)
    done = LiveDemo(["f"], scores=[HeldoutScore([0.0], [0.0]), HeldoutScore([1.0], [0.5])])
    done.outcomes = [
        ReleaseOutcome(
            2, False, True, ("138 accounts in 0.6 minutes", "251 accounts in 0.6 minutes"), 0.5, 237.0, lift.sentence
        ),
        ReleaseOutcome(3, True, False, ("invalid calls",), 0.1, 304.0),
    ]
    lines = report(done).splitlines()
    assert (
        "| 2 | released: 251 accounts in 0.6 minutes | 3:57 | 0.500 | "
        "edits kept, of edits and invalid calls: +16.9 points [+5.1, +28.7], better |" in lines
    )
    assert "| 3 (planted) | rolled back: invalid calls | 5:04 | 0.100 | - |" in lines


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", "--windows", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "give a number from 1 to 100" in done.stderr
