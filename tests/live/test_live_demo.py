"""`etude live demo` as a user would run it, with one window: about five minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.release
def test_users_teach_a_version_and_a_damaged_one_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", "--windows", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500, env=os.environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["released"], told["planted_stopped"], told["failed"], told["lost"]) == (True, True, 0, 0)
    assert told["house"][-1] > told["house"][0]
    assert "| 3 (planted) | rolled back" in (tmp_path / "outputs/live-demo/report.md").read_text()


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", "--windows", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "give a number from 1 to 100" in done.stderr
