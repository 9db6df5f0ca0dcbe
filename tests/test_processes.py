import os
import signal
import subprocess
import sys

import pytest

from etude import processes
from etude.errors import UserError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that `python -m` finds."""

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return name

    return make


def test_a_child_that_finished_is_no_failure(module, tmp_path):
    child = processes.start("worker", [module("ok", "print('done')")], tmp_path / "log")
    child.popen.wait(20)
    assert child.failure() is None
    assert child.log.read_text() == "done\n"


def test_failures_say_how_and_why(module, tmp_path):
    child = processes.start(
        "worker", [module("bad", "import sys; sys.exit('etude: the port is in use')")], tmp_path / "log"
    )
    child.popen.wait(20)
    assert child.failure() == "the worker exited with code 1: the port is in use"
    killed = processes.start("worker", [module("dies", "import os; os.kill(os.getpid(), 9)")], tmp_path / "other")
    killed.popen.wait(20)
    assert killed.failure() == "the worker was killed by SIGKILL"


def test_waiting_for_a_child_ends_when_it_dies_or_the_deadline_passes(module, tmp_path):
    dead = processes.start("worker", [module("bad", "raise SystemExit(3)")], tmp_path / "log")
    with pytest.raises(UserError, match="exited with code 3"):
        processes.wait_for_file(tmp_path / "never", dead, 20)
    slow = processes.start("worker", [module("slow", "import time; time.sleep(60)")], tmp_path / "log")
    with pytest.raises(UserError, match="not ready after 0 seconds"):
        processes.wait_for_file(tmp_path / "never", slow, 0.1)
    slow.stop(5)
    assert slow.exit_code == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_child_dies_with_its_killed_parent(tmp_path):
    """The grandchild holds a pipe's write end: the pipe's end of file is its death."""
    read, write = os.pipe()
    child = (
        "import time; from etude.processes import die_with_parent\n"
        "die_with_parent(); print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, pass_fds=[{write}])\n"
        "p.stdout.readline(); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, pass_fds=[write])
    os.close(write)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    assert os.read(read, 1) == b""
    process.stdout.close()
    process.wait(10)
