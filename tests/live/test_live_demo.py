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

from etude.cli import live_demo
from etude.errors import UserError


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
    with pytest.raises(UserError, match=r"pip install 'etude\[train,live\]' openai"):
        live_demo.run(argparse.Namespace(windows=1, seed=1, json=False))
    assert list(tmp_path.iterdir()) == []


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", "--windows", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "give a number from 1 to 100" in done.stderr
