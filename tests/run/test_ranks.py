"""Whole runs whose trainer is started by others, and whose trainer has two ranks."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.test_run import CONFIG, SECONDS, etude, finished, start, versions


def whole(process):
    code, output = finished(process)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    whole(start(folder, "--trainer.steps", "2"))
    return folder


def lines_until(process, text):
    """The lines of a process up to the first with `text`."""
    deadline, lines = time.monotonic() + SECONDS, []
    while not (lines and text in lines[-1]):
        assert select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], lines
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return lines


@pytest.mark.slow
def test_a_trainer_that_others_start_trains_the_same(undisturbed, tmp_path):
    process = start(tmp_path, "--trainer.steps", "2", "--trainer.launcher", "external")
    line = lines_until(process, "waiting for the trainer: ")[-1]
    words = line.partition("trainer: ")[2].partition(" (docs/ranks.md)")[0].split()
    assert words == ["python", "-m", "etude.trainer.rl.process", str(tmp_path / "outputs/run")]
    trainer = subprocess.Popen([sys.executable, *words[1:]])
    whole(process)
    assert trainer.wait(30) == 0
    assert versions(tmp_path) == versions(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [None, 0, 1])
def test_two_ranks_train_as_one_and_a_killed_one_is_resumed(undisturbed, tmp_path, victim):
    config = CONFIG.replace("[trainer]\n", "[trainer]\nmesh = { shard = 2 }\n")
    process = start(tmp_path, "--trainer.steps", "2", config=config)
    if victim is not None:
        lines_until(process, "train …")
        os.kill(rank_of(process.pid, victim), signal.SIGKILL)
        code, output = finished(process)
        assert code == 1
        assert f"the trainer's rank {victim} was killed by SIGKILL; nothing is lost: continue with" in output
        # The other ranks, or the one that is left alone, go on with the same folder.
        words = ["outputs/run", "--trainer.mesh.shard", "1"] if victim else ["run.toml", "--trainer.steps", "2"]
        process = etude(tmp_path, "train", "--resume", *words)
    whole(process)
    assert [(v, g) for v, _, g in versions(tmp_path)] == [(v, g) for v, _, g in versions(undisturbed)]


def rank_of(parent, rank):
    """The pid of the controller's child with this RANK."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(f"no rank {rank}")
