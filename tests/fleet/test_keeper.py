"""Keepers: one child a folder, found by its socket, ended when nobody asks for it any more."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from etude.fleet import keeper
from tests.fleet.test_place import WORKER, wait_until


@pytest.fixture
def job(tmp_path, monkeypatch):
    (tmp_path / "fleet_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    argv, files = ["fleet_worker", "{folder}/a", "stay"], {"a": "text"}
    return {"name": "eu-0", "argv": argv, "env": {"WORD": "w"}, "files": files, "python": None, "gpus": 0, "cpus": 1}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def opened(job, run, grace=30.0, restarts=-1):
    return keeper.open_keeper(job, run, grace=grace, restarts=restarts)


def ask(line, call="status", **rest):
    return line.ask(call=call, **{"offset": 0, "limit": 1000, **rest})


def running(line):
    wait_until(lambda: "text" in ask(line)["log"])
    return ask(line)


def test_a_child_is_found_again_and_ends_when_nobody_is_there(job, tmp_path):
    run = str(tmp_path)
    line = opened(job, run, grace=1.0)
    first = running(line)
    assert b"RAY_AUTH_TOKEN" not in Path(f"/proc/{first['pid']}/environ").read_bytes()
    assert keeper.job_folder(run, "eu-0").stat().st_mode & 0o777 == 0o700
    line.close()
    again = opened(job, run)
    assert (ask(again)["pid"], ask(again)["keeper"]) == (first["pid"], first["keeper"])
    again.close()
    wait_until(lambda: not lives(first["pid"]) and not lives(first["keeper"]))
    assert not (keeper.job_folder(run, "eu-0") / "files").exists()


def test_a_child_dies_with_its_keeper_and_a_killed_child_starts_again(job, tmp_path):
    run = str(tmp_path)
    line = opened(job, run)
    first = running(line)
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: ask(line)["pid"] not in (None, first["pid"]))
    wait_until(lambda: ask(line)["log"].count("text") == 2)
    second = ask(line)
    assert second["starts"] == 2
    os.kill(second["keeper"], signal.SIGKILL)
    wait_until(lambda: not lives(second["pid"]))
    with pytest.raises(OSError, match=r"keeper is gone|[Bb]roken pipe|reset"):
        ask(line)
    line.close()
    line = opened(job, run)
    wait_until(lambda: ask(line)["log"].count("text") > second["log"].count("text"))
    assert (
        ask(line, "end", seconds=10)["end"]
        == "the eu-0 exited with code 0: w ['" + str(keeper.job_folder(run, "eu-0") / "files" / "a") + "', 'stay'] text"
    )
    line.close()


@pytest.mark.parametrize("notice", ["signal", "host"])
def test_a_machine_that_goes_lets_the_child_leave(job, tmp_path, notice, monkeypatch):
    monkeypatch.setattr(keeper, "_root", lambda: tmp_path / "root")  # of this test's jobs alone
    line = opened(job, str(tmp_path))
    first = running(line)
    if notice == "signal":
        os.kill(first["keeper"], signal.SIGTERM)
    else:
        keeper.drain_host()
    wait_until(lambda: ask(line)["exit_code"] is not None)
    assert ask(line)["exit_code"] == 0
    assert (ask(line)["starts"], ask(line)["leaving"]) == (1, True)
    ask(line, "end", seconds=0)
    line.close()


def test_another_job_of_the_name_takes_its_place(job, tmp_path):
    run = str(tmp_path)
    line = opened(job, run)
    first = running(line)
    other = opened({**job, "env": {"WORD": "other"}}, run)
    assert not lives(first["pid"])
    wait_until(lambda: "other" in ask(other)["log"])
    assert ask(other, "stop", seconds=10)["exit_code"] == 0
    ask(other, "end", seconds=0)
    line.close()
    other.close()


@pytest.mark.slow
def test_unwatched_keepers_leave_their_gpus(job, tmp_path, monkeypatch):
    run = str(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    watched = opened({**job, "gpus": 2}, run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    left = opened({**job, "gpus": 1, "name": "eu-1"}, run)
    pids = running(watched)["pid"], running(left)["pid"]
    left.close()
    time.sleep(0.3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    new = opened({**job, "gpus": 2, "name": "eu-2"}, run)
    assert [lives(pid) for pid in pids] == [True, False]
    for line in (watched, new):
        ask(line, "end", seconds=10)
        line.close()


def test_a_folder_that_others_can_read_is_not_taken(tmp_path):
    folder = keeper.job_folder(str(tmp_path), "eu-0")
    folder.chmod(0o755)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        keeper.job_folder(str(tmp_path), "eu-0")
