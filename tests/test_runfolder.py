import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude import runfolder
from etude.config import RLConfig
from etude.config.tasks import TasksConfig
from etude.errors import UserError

CONFIG = RLConfig(tasks=TasksConfig(repository="repo"))


def test_a_run_folder_is_never_silently_reused(tmp_path):
    runfolder.create(tmp_path / "run", CONFIG, None)
    assert runfolder.load_config(tmp_path / "run") == CONFIG
    with pytest.raises(UserError, match="already holds a run"):
        runfolder.create(tmp_path / "run", CONFIG, None)


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        runfolder.create(tmp_path / "file" / "run", CONFIG, None)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        runfolder.load_config(tmp_path)


def test_attempts_are_numbered_and_latest_points_to_the_last(tmp_path):
    assert [runfolder.new_attempt(tmp_path).name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]
    assert (tmp_path / "logs" / "latest").resolve().name == "attempt_3"


def test_only_one_process_runs_a_folder(tmp_path):
    refused = pytest.raises(UserError, match="being run by another process")
    with runfolder.lock(tmp_path), refused, runfolder.lock(tmp_path):
        pass
    with runfolder.lock(tmp_path):
        pass


def test_the_lock_of_a_killed_controller_is_held_by_its_children(tmp_path, monkeypatch):
    """A trainer that still ends may still publish: nobody else may take the folder before it is gone."""
    controller = (
        "import os, subprocess, sys; from pathlib import Path; from etude import runfolder\n"
        "with runfolder.lock(Path(sys.argv[1])) as held:\n"
        "    child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, pass_fds=[held])\n"
        "    print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", controller, str(tmp_path)]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, timeout=30).stdout)
    monkeypatch.setattr(runfolder, "ENDING_SECONDS", 0.3)
    with pytest.raises(UserError, match="processes of an earlier run still use"), runfolder.lock(tmp_path):
        pass
    monkeypatch.setattr(runfolder, "ENDING_SECONDS", 30.0)
    end = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    end.start()
    with runfolder.lock(tmp_path):
        assert end.finished.is_set()
    end.join()


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    runfolder.append_json(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2')
    assert runfolder.read_jsonl(path) == [{"step": 1}]


def test_a_line_takes_the_place_of_one_that_was_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for cut in ("", '{"step": 2', '{"step": 2, "name": "' + "x" * 10_000):
        path.write_text('{"step": 1}\n' + cut)
        runfolder.append_json(path, {"step": 3})
        assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    path.write_text('{"step": 2')
    runfolder.append_json(path, {"step": 3})
    assert path.read_text() == '{"step": 3}\n'


def test_a_full_disk_leaves_whole_lines():
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device; make room"):
        runfolder.append_json(Path("/dev/full"), {"step": 3})


GOOD = b'{"step": 1, "time/spent": 2.0, "state": "x"}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (GOOD[:20] + b"\n", "not JSON"),
        (b"\xff" + GOOD, "not JSON"),
        (b"\0\0\0\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"[1]\n", "not an object"),
        (b"1\n", "not an object"),
        (GOOD.replace(b'"step"', b'"stop"'), "not a number at step"),
        (GOOD.replace(b"1", b"true"), "not a number at step"),
        (GOOD.replace(b"1", b"[]"), "not a number at step"),
        (GOOD.replace(b'"x"', b"7"), "not a text at state"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_a_damaged_line_is_named(tmp_path, line, problem):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + line + GOOD)
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line 2: {problem}; the file is damaged, delete that line"):
        runfolder.read_jsonl(path, ("step", "time/spent"), ("state",))
    path.write_bytes(GOOD + GOOD)
    assert len(runfolder.read_jsonl(path, ("step", "time/spent"), ("state",))) == 2


@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: b"\xff" + d, lambda d: b"", lambda d: b"[" * 99_999]
)
def test_a_damaged_configuration_is_named(tmp_path, damage):
    runfolder.create(tmp_path / "run", CONFIG, None)
    path = tmp_path / "run/config.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"config\.json is damaged \(.*\); restore the file, or start a new run"):
        runfolder.load_config(tmp_path / "run")


def test_the_timeline_records_a_block_even_if_it_fails(tmp_path):
    path = tmp_path / "timeline.jsonl"
    with pytest.raises(RuntimeError), runfolder.timed(path, "trainer", "train"):
        raise RuntimeError
    (record,) = runfolder.read_jsonl(path)
    assert (record["process"], record["state"]) == ("trainer", "train")
    assert record["end"] >= record["start"]
