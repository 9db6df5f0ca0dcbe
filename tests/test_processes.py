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


RANK = """
import os, socket, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
if rank == "0":
    listener = socket.socket(fileno=int(os.environ["ETUDE_MASTER_FD"]))
    assert listener.getsockname() == (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
print(rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], flush=True)
if what == "finish":
    sys.exit(0)
if what == f"sentence {rank}":
    sys.exit("etude: the disk is full")
time.sleep(60)
"""


def ranks_of(module, tmp_path, what):
    group = processes.start_ranks("trainer", [module("ranks", RANK), what], tmp_path, 3, {"MORE": "1"})
    assert isinstance(group, processes.RankGroup)
    deadline = time.monotonic() + 20
    while any(child.exit_code is None and not child.log.read_text() for child in group.children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return group


def wait_for_end(process):
    deadline = time.monotonic() + 20
    while process.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.exit_code


def test_ranks_have_an_environment_and_a_log_each_and_end_together(module, tmp_path):
    group = ranks_of(module, tmp_path, "finish")
    assert wait_for_end(group) == 0
    assert group.failure() is None
    assert [(tmp_path / f"trainer-{rank}.log").read_text() for rank in range(3)] == [f"{r} {r} 3\n" for r in range(3)]
    assert [*group.pids] == ["trainer-0", "trainer-1", "trainer-2"]
    alone = processes.start_ranks("trainer", [module("ok", "print('done')")], tmp_path, 1)
    assert isinstance(alone, processes.Child)
    assert wait_for_end(alone) == 0
    assert (tmp_path / "trainer.log").read_text() == "done\n"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_takes_the_others_with_it_and_is_named(module, tmp_path, victim):
    group = ranks_of(module, tmp_path, "sleep")
    assert group.exit_code is None
    os.kill(group.children[victim].popen.pid, signal.SIGKILL)
    assert wait_for_end(group) == -signal.SIGKILL
    assert group.failure() == f"the trainer's rank {victim} was killed by SIGKILL"
    assert all(child.ends(5) for child in group.children)


def test_a_rank_that_ends_with_a_sentence_is_the_cause(module, tmp_path):
    group = ranks_of(module, tmp_path, "sentence 2")
    assert wait_for_end(group) == 1
    assert group.failure() == "the trainer's rank 2 exited with code 1: the disk is full"
    assert group.log == tmp_path / "trainer-2.log"


def test_ranks_are_stopped_together(module, tmp_path):
    group = ranks_of(module, tmp_path, "sleep")
    group.stop(5)
    assert [child.exit_code for child in group.children] == [-signal.SIGTERM] * 3
    assert group.exit_code == -signal.SIGTERM


def test_a_process_elsewhere_is_known_by_its_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(processes, "SILENT_SECONDS", 0.5)
    path = tmp_path / "beat"
    late = processes.Elsewhere("trainer", path, 0.05)
    assert late.exit_code is None
    assert wait_for_end(late) == 1
    assert late.failure() == "the trainer was not started within 0 seconds"
    beat, there = processes.Heartbeat(path, first=True), processes.Elsewhere("trainer", path, 20)
    with pytest.raises(FileExistsError):
        processes.Heartbeat(path, first=True)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert there.exit_code is None
        time.sleep(0.05)
    beat.end(2, "the disk is full")
    beat.end(0)
    assert wait_for_end(there) == 2
    assert there.failure() == "the trainer exited with code 2: the disk is full"
    silent = processes.Elsewhere("trainer", path, 20)
    path.write_text('{"count": 9, "code": null, "why": ""}')
    assert wait_for_end(silent) == 1
    assert silent.end() == "the trainer has not been heard of for 0 seconds"


def test_a_process_ends_without_a_search_for_garbage(tmp_path, monkeypatch):
    """Among torch's modules it takes seconds. What was registered before the end is still called."""
    (tmp_path / "garbage.py").write_text(
        "import atexit, gc\n"
        "class Cycle:\n"
        "    def __del__(self):\n"
        "        print('searched', flush=True)\n"
        "gc.disable()\n"
        "cycle = Cycle()\n"
        "cycle.itself = cycle\n"
        "del cycle\n"
        "atexit.register(print, 'ended', flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    child = processes.start("child", ["garbage"], tmp_path / "log")
    assert child.ends(60)
    assert (tmp_path / "log").read_text() == "ended\n"
