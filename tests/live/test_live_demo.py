"""`etude live demo`: as a user would run it, with one window and three kills (about eight minutes); its refusals."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from etude import runfolder
from etude.cli import live_learning
from etude.errors import UserError
from etude.live.release.canary import Difference
from etude.live.release.releases import ReleaseLog
from etude.live.simulate import figures
from etude.live.simulate.clients import UsedTurn, UserModel, Users, mean_utility
from etude.live.simulate.demo import check_log
from etude.live.simulate.figures import HeldoutScore, LiveDemo, ReleaseOutcome, SuiteChange, UsedWindow, report
from etude.live.simulate.users import draw_population


def demo(folder: Path, *words: str, failpoint: str | None = None) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key != "ETUDE_FAILPOINT"}
    env |= {} if failpoint is None else {"ETUDE_FAILPOINT": failpoint}
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.mark.release
def test_users_teach_a_version_a_damaged_one_is_stopped_and_a_killed_demo_goes_on(tmp_path: Path) -> None:
    turns = tmp_path / "outputs/live-demo/turns.jsonl"
    first, deadline = demo(tmp_path, "--windows", "1", "--seed", "4"), time.monotonic() + 900
    while not turns.exists() or turns.read_bytes().count(b"\n") < 100:  # users ask
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.kill()
    first.communicate()
    early = [json.loads(line) for line in turns.read_text().splitlines()[:100]]
    for failpoint in ("loop.train:1", "loop.watch:20"):  # before its version is looked at; in the canary
        killed = demo(tmp_path, "--resume", failpoint=failpoint)
        output, _ = killed.communicate(timeout=1500)
        assert killed.returncode == -signal.SIGKILL, output[-3000:]
    last = demo(tmp_path, "--resume", "--json")
    output, _ = last.communicate(timeout=1500)
    assert last.returncode == 0, output[-3000:]
    result = json.loads(output.splitlines()[-1])
    assert (result["released"], result["planted_stopped"], result["lost"]) == (True, True, 0)
    assert [(each["release"], each["planted"]) for each in result["outcomes"]] == [(2, False), (3, True)]
    assert (len(result["house"]), len(result["utility"])) == (2, 1)
    assert result["house"][1] > result["house"][0]
    rows = [json.loads(line) for line in turns.read_text().splitlines()]
    ids = [row["turn"] for row in rows if row["turn"]]
    assert (rows[:100], len(rows), len(ids)) == (early, result["turns"], len(set(ids)))
    assert len(ids) >= 700
    assert "| 3 (planted) | rolled back" in (tmp_path / "outputs/live-demo/report.md").read_text()


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install openai"):
        live_learning.run_demo(argparse.Namespace(windows=1, seed=1, resume=False, json=False))
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_the_canarys_lift_of_a_release() -> None:
    lift = Difference(mean=0.169, low=0.051, high=0.287, accounts=(138, 150), better=True)
    done = LiveDemo("nano", 1, 1, ["f"])
    done.scores = {1: HeldoutScore([0.0], [0.0]), 2: HeldoutScore([1.0], [0.5])}
    reasons = ("138 accounts in 0.6 minutes", "251 accounts in 0.6 minutes")
    done.outcomes = {
        3: ReleaseOutcome(3, True, False, ("invalid calls",), 0.1, 304.0),
        2: ReleaseOutcome(2, False, True, reasons, 0.5, 237.0, lift.sentence),
    }
    done.suite = SuiteChange(tasks=31, functions=31, difference=-0.048, margin=0.165)
    lines = report(done).splitlines()
    assert (
        "| 2 | released: 251 accounts in 0.6 minutes | 3:57 | 0.500 | "
        "edits kept, of edits and invalid calls: +16.9 points [+5.1, +28.7], better |" in lines
    )
    assert "| 3 (planted) | rolled back: invalid calls | 5:04 | 0.100 | - |" in lines
    assert "against the first: -4.8 points; it defends a margin of 16.5 points." in report(done)


def begun(tmp_path: Path) -> LiveDemo:
    done = LiveDemo("nano", 3, 2, ["f", "g"], {1: UsedWindow(700, 0.25)})
    done.scores[1] = HeldoutScore([0.5, 1.0], [0.0, 1.0])
    done.outcomes[2] = ReleaseOutcome(2, False, True, ("why",), 0.5, 237.0)
    figures.keep(tmp_path, done)
    return done


def test_figures_are_read_as_they_were_kept(tmp_path: Path) -> None:
    assert begun(tmp_path) == figures.load(tmp_path)
    assert (tmp_path / "demo.json").stat().st_mode & 0o777 == 0o600


def test_a_window_and_a_release_without_answers_can_be_read_again(tmp_path: Path) -> None:
    done = begun(tmp_path)
    nothing = mean_utility([UsedTurn(2, "", 0.0, "APIError: away")])
    done.windows[2] = UsedWindow(701, nothing)
    done.outcomes[3] = ReleaseOutcome(3, True, False, (), nothing, 300.0)
    figures.keep(tmp_path, done)
    assert figures.load(tmp_path) == done
    assert "before each window: 0.250, -." in report(done)
    assert "| 3 (planted) | rolled back:  | 5:00 | - | - |" in report(done)


@pytest.mark.parametrize("damage", [
    b"", b"{}", b"[", b'{"model": "nano", "seed": "x", "wanted": 1}',
    b'{"model": "nano", "seed": -1, "wanted": 1}', b'{"model": "nano", "seed": 1, "wanted": 0}',
    b'{"model": "nano", "seed": 1, "wanted": 1, "functions": ["f"], "scores": {"1": {"house": [], "right": [1]}}}',
])  # fmt: skip
def test_damaged_figures_are_refused_by_name(tmp_path: Path, damage: bytes) -> None:
    begun(tmp_path)
    (tmp_path / "demo.json").write_bytes(damage)
    with pytest.raises(UserError, match=r"demo\.json is damaged"):
        figures.load(tmp_path)
    assert (tmp_path / "demo.json").read_bytes() == damage


def test_what_cannot_go_on_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    resume = argparse.Namespace(windows=None, seed=None, resume=True, json=False)
    with pytest.raises(UserError, match="holds no demo yet: start one without --resume"):
        live_learning.run_demo(resume)
    folder = tmp_path / "outputs/live-demo"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no demo that can go on \(no demo\.json\)"):
        live_learning.run_demo(resume)
    done = begun(folder)
    with pytest.raises(UserError, match="keeps its seed and windows"):
        live_learning.run_demo(argparse.Namespace(windows=5, seed=None, resume=True, json=False))
    figures.keep(folder, dataclasses.replace(done, model="huge"))
    with pytest.raises(UserError, match="'huge', which is not known"):
        live_learning.run_demo(resume)
    figures.keep(folder, done)
    with runfolder.lock(folder), pytest.raises(UserError, match="is being run by another process"):
        live_learning.run_demo(argparse.Namespace(windows=1, seed=1, resume=False, json=False))
    assert sorted(path.name for path in folder.iterdir()) == ["demo.json", "lock"]


def test_figures_of_releases_that_the_log_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no release 1, whose figures are there"):
        check_log(ReleaseLog(()), begun(tmp_path))
    check_log(ReleaseLog(()), LiveDemo("nano", 1, 1))


def test_users_go_on_from_the_turns_on_the_disk(tmp_path: Path) -> None:
    kept = tmp_path / "turns.jsonl"
    rows = [UsedTurn(1, "A", 0.5), UsedTurn(2, "", 0.0, "APIError: away")]
    kept.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows) + '{"account": 3, "tu')
    model = UserModel("nano", tokens=16, at_once=1)
    population = draw_population(np.random.default_rng(1), 10)
    users = Users("http://127.0.0.1:9", "k", "s", model, population, [], 1.0, 1, kept)
    assert users.turns == rows


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "live", "demo", "--windows", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "give a number from 1 to 100" in done.stderr
