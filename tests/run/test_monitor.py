"""What a run says of its time, without a run."""

import time

import msgspec
import pytest

from etude import runfolder
from etude.config import RLConfig
from etude.run import monitor
from etude.run.run_report import _earlier_attempts


class View:
    """Keeps what the monitor reports."""

    def __init__(self):
        self.figures = {}

    def process(self, name, text):
        pass

    def update(self, **figures):
        self.figures |= figures


class Now:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Progress(msgspec.Struct):
    engine: dict = {}
    ended: int = 0
    live: int = 0
    limit: int = 1
    tests_run: int = 0
    tests_remembered: int = 0
    served: int = 0


def step(folder, number, spent):
    line = {"step": number, "time/spent": spent, "time/step": 1.0, "reward/all/mean": 0.5, "rollout/pass_rate": 0.5}
    runfolder.append_json(folder / "metrics.jsonl", line | {"off_policy/mean": 0.0})


def test_what_is_left_is_told_before_the_first_step(tmp_path, monkeypatch):
    clock, view = Now(), View()
    monkeypatch.setattr(runfolder, "now", clock)
    config = RLConfig.model_validate({"tasks": {"repository": "here"}, "trainer": {"steps": 10}})
    shown = monitor.Monitor(tmp_path, config, view, {}, tmp_path / "trainer.log", expected=9.0)
    for seconds, left in ((20, 70), (100, 0)):
        clock.now += seconds
        shown.tick(Progress())
        assert view.figures["seconds_left"] == left
    step(tmp_path, 1, 5.0)
    clock.now += 30
    shown.tick(Progress())
    assert view.figures["seconds_left"] == 150 * 9, "steps that were seen go before what was thought"


@pytest.mark.parametrize("minutes", [1.0, None])
def test_what_is_left_follows_the_clock_of_training(minutes, tmp_path, monkeypatch):
    clock, view = Now(), View()
    monkeypatch.setattr(runfolder, "now", clock)
    data = {"tasks": {"repository": "here"}, "trainer": {"steps": 10, "minutes": minutes}}
    shown = monitor.Monitor(tmp_path, RLConfig.model_validate(data), view, {}, tmp_path / "trainer.log")

    def left(seconds):
        clock.now += seconds
        shown.tick(Progress())
        return view.figures["seconds_left"]

    assert left(20) == (40 if minutes else None), "no step yet: the clock alone knows"
    step(tmp_path, 1, 5.0)
    assert left(20) == (55 if minutes else 360), "the wait for the first groups is no training"
    step(tmp_path, 2, 59.0)
    left(1)
    assert left(2) == (0 if minutes else 43 / 2 * 8), "the clock is over: the step that has begun is the last"
    if minutes is None:  # a resumed run
        shown = monitor.Monitor(tmp_path, RLConfig.model_validate(data), view, {}, tmp_path / "trainer.log")
        assert left(5) is None, "the steps of the attempt before tell nothing about this one's"
        step(tmp_path, 3, 70.0)
        assert left(5) == 10 * 7


def test_the_rate_is_of_all_who_play_in_this_attempt(tmp_path, monkeypatch):
    clock, view = Now(), View()
    monkeypatch.setattr(runfolder, "now", clock)
    config = RLConfig.model_validate({"tasks": {"repository": "here"}})
    shown = monitor.Monitor(tmp_path, config, view, {}, tmp_path / "trainer.log")
    for ended, rate in ((400, 0.0), (410, 1.0), (410, 0.0), (430, 2.0)):
        clock.now += 10
        shown.tick(Progress(ended=ended))
        assert view.figures["episodes_per_s"] == rate


def test_a_report_counts_the_time_of_earlier_attempts():
    now = time.time()
    spans = [
        {"process": "controller", "state": "train", "start": now - 100, "end": now - 70},
        {"process": "trainer", "state": "step", "start": now - 100, "end": now - 70},
        {"process": "controller", "state": "train", "start": now - 20, "end": now - 5},
    ]
    assert _earlier_attempts(spans, started=now - 30) == 30


def test_what_the_trainer_wants_to_be_known_is_shown_once(tmp_path, capsys):
    config = RLConfig.model_validate({"tasks": {"repository": "here"}})
    log = tmp_path / "trainer.log"
    shown = monitor.Monitor(tmp_path, config, View(), {}, log)
    log.write_text("Traceback\nnote: checkpoint 2 is damaged\nnote: half a li")
    shown._notes()
    shown._notes()
    assert capsys.readouterr().err == "etude: checkpoint 2 is damaged\n"
    with log.open("a") as file:
        file.write("ne\n")
    shown._notes()
    assert capsys.readouterr().err == "etude: half a line\n"
