import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude import processes
from etude.errors import UserError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that `python -m` finds."""

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
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
    assert child.ends(20)
    assert child.failure() == "the worker exited with code 1: the port is in use"
    aborted = processes.start(
        "worker", [module("aborts", "import os; print('out of memory', flush=True); os.abort()")], tmp_path / "third"
    )
    aborted.popen.wait(20)
    assert aborted.failure() == "the worker was killed by SIGABRT: out of memory"
    killed = processes.start("worker", [module("dies", "import os; os.kill(os.getpid(), 9)")], tmp_path / "other")
    killed.popen.wait(20)
    assert killed.failure() == "the worker was killed by SIGKILL"


def test_waiting_for_a_child_ends_when_it_dies_or_the_deadline_passes(module, tmp_path):
    dead = processes.start("worker", [module("bad", "raise SystemExit(3)")], tmp_path / "log")
    with pytest.raises(UserError, match="exited with code 3"):
        processes.wait_for_file(tmp_path / "never", dead, 20)
    slow = processes.start("worker", [module("slow", "import time; time.sleep(60)")], tmp_path / "log")
    assert not slow.ends(0.01)
    with pytest.raises(UserError, match="not ready after 0 seconds"):
        processes.wait_for_file(tmp_path / "never", slow, 0.1)
    slow.stop(5)
    assert slow.exit_code == -signal.SIGTERM


SLEEPER = "import time; time.sleep(120)"  # as imports of torch do


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_child_dies_with_its_killed_parent_however_early_that_is(module, tmp_path):
    """Children hold a pipe's write end: its end of file is their death. They never come to their own first line."""
    name = module("sleeper", SLEEPER)
    parent = (
        "import sys, time; from pathlib import Path; from etude import processes\n"
        f"processes.start('worker', [{name!r}], Path(sys.argv[1]), holds=[int(sys.argv[2])])\n"
        "print('started', flush=True); time.sleep(120)"
    )
    pipes = []
    for i, delay in enumerate((0.0, 0.0, 0.01, 0.03, 0.1, 0.3)):
        read, write = os.pipe()
        command = [sys.executable, "-c", parent, str(tmp_path / f"log{i}"), str(write)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[write]) as process:
            os.close(write)
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            time.sleep(delay)
            process.kill()
        pipes.append(read)
    for read in pipes:
        assert select.select([read], [], [], 30)[0], "a child outlived its parent"
        assert os.read(read, 1) == b""
        os.close(read)


def test_a_child_whose_parent_is_gone_already_imports_nothing(module, tmp_path):
    name = module("late", f"open({str(tmp_path / 'came')!r}, 'w')")
    command = [sys.executable, "-m", "etude.processes", "1", name]  # pid 1 is not the parent
    assert subprocess.run(command, timeout=30).returncode == 1
    assert not (tmp_path / "came").exists()


def test_a_child_sees_its_own_arguments(module, tmp_path):
    text = "import sys; print(sys.argv[1:], __name__, sys.modules['__main__'].__file__ == __file__)"
    child = processes.start("worker", [module("says", text), "a", "--b"], tmp_path / "log")
    child.popen.wait(20)
    assert child.log.read_text() == "['a', '--b'] __main__ True\n"


DESCENDANTS = """
import os, time
from etude.processes import end_with_server
if os.fork() == 0:  # an engine
    if os.fork() == 0:  # its worker
        end_with_server()
        open("worker.new", "w").write(f"{os.getppid()} {os.getpid()}")
        os.rename("worker.new", "worker")
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_descendants_end_with_a_server_that_is_killed(module, tmp_path, monkeypatch):
    """Also while nobody has waited for the server: then it still has its pid."""
    monkeypatch.chdir(tmp_path)
    child = processes.start("server", [module("serves", DESCENDANTS)], tmp_path / "log")
    try:
        engine, worker = map(int, processes.wait_for_file(tmp_path / "worker", child, 60).split())
        assert lives(engine)
        assert lives(worker)
        os.kill(child.popen.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while lives(engine) or lives(worker):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        child.stop(1)


def test_a_process_that_descends_from_no_child_goes_on(monkeypatch):
    monkeypatch.delenv(processes.SERVER, raising=False)
    processes.end_with_server()


def test_modules_are_not_looked_for_in_the_working_folder(module, monkeypatch, tmp_path):
    """A run may begin in a repository that tasks are made of."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("msgspec", "json", "etude"):
        (clone / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    name = module("reader", "import json, msgspec; print(json.dumps(1))")
    monkeypatch.chdir(clone)
    child = processes.start("worker", [name], tmp_path / "log")
    assert child.popen.wait(60) == 0, (tmp_path / "log").read_text()
    assert not (tmp_path / "marker").exists()
