"""The ranks of a stage, started by the command, with a small program in place of the stage."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STAGE = """
import os, sys, time
from etude.cli import main, train
from etude.errors import RunFailed, UserError
from etude.processes import own_rank

def stage(config, kind, folder, *, resume):
    rank, what = own_rank(), os.environ["WHAT"]
    print(f"note of rank {rank}", file=sys.stderr, flush=True)
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} writes {folder}", flush=True)
    if what == "finish":
        return
    if what == f"fail {rank}":
        raise RunFailed("the disk is full")
    if what == f"refuse {rank}":
        raise UserError("the rows are too long")
    if what == f"crash {rank}":
        raise RuntimeError("shapes differ")
    if what == f"kill {rank}":
        os.kill(os.getpid(), 9)
    time.sleep(60)

train._run_stage, train._check_models = stage, lambda config: None
if __name__ == "__main__":
    main.main()
"""
RESUME = "`etude train --resume outputs/tuned`"
CONFIG = """
stage = "sft"
name = "tuned"
model = { path = "nano" }
data = { files = ["chats.jsonl"] }
trainer = { mesh = { shard = 2 } }
"""


@pytest.fixture
def etude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts `etude train` with the small program: in the command itself, and, as its module, in the ranks."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "own = runpy.run_module\n"
        "runpy.run_module = lambda name, **o: own('small' if name == 'etude.cli.main' else name, **o)\n"
    )
    (package / "small.py").write_text(STAGE)
    (tmp_path / "sft.toml").write_text(CONFIG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *sys.path]))
    monkeypatch.setenv("TERM", "dumb")

    def start(what: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "small", "train", "sft.toml"],
            cwd=tmp_path,
            env={**os.environ, "WHAT": what, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # the foreground of a terminal
        )

    return start


def test_rank_0_alone_prints(etude):
    out, err = etude("finish").communicate(timeout=60)
    assert out == "rank 0 of 2 writes outputs/tuned\n"
    assert err == "note of rank 0\n"


@pytest.mark.parametrize(("what", "code", "sentences"), [
    ("fail 0", 1, ["etude: the disk is full"]),
    ("refuse 1", 2, ["etude: the sft's rank 1 exited with code 2: the rows are too long"]),
    ("kill 1", 1, [f"etude: the sft's rank 1 was killed by SIGKILL; continue with {RESUME}"]),
])  # fmt: skip
def test_a_rank_that_fails_ends_the_command_with_its_reason(etude, what, code, sentences):
    process = etude(what)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert [line for line in err.splitlines() if line != "note of rank 0"] == sentences


def test_a_rank_that_crashes_leaves_its_traceback(etude):
    process = etude("crash 1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback (most recent call last):" in err
    reason = "the sft's rank 1 exited with code 1: RuntimeError: shapes differ"
    assert err.splitlines()[-1] == f"etude: {reason}; continue with {RESUME}"


def test_ctrl_c_ends_all_ranks_with_one_sentence(etude):
    process = etude("wait")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "rank 0 of 2 writes outputs/tuned\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    _, err = process.communicate()
    assert err.split("\n")[1:] == [
        "", f"etude: interrupted; {RESUME} continues the run", "",
    ]  # fmt: skip
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_of_torchrun_is_one_of_the_ranks(etude):
    for rank, lines in ((0, ["rank 0 of 2 writes outputs/tuned"]), (1, [])):
        torchrun = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        process = etude("fail 1" if rank else "finish", **torchrun)
        out, err = process.communicate(timeout=60)
        assert out.splitlines() == lines
        assert ("the disk is full" in err) == bool(rank)
        assert ("note" in err) == (not rank)


def test_half_of_torchruns_environment_is_refused(etude):
    out, err = etude("finish", WORLD_SIZE="2").communicate(timeout=60)
    assert (out, "names ranks, but RANK is not set: start ranks by torchrun" in err) == ("", True)
