"""A trainer that others have started: what the run hears of it, and what it hears of the run."""

import os
import subprocess
import sys
import time

import pytest

from etude import processes, runfolder
from etude.config import RLConfig
from etude.errors import UserError
from etude.processes import Elsewhere, Heartbeat
from etude.trainer.rl.external import attended


def new_run(folder, launcher="external"):
    tables = {"tasks": {"repository": "unused"}, "trainer": {"launcher": launcher}}
    runfolder.create(folder, RLConfig.model_validate(tables), None)
    return runfolder.new_attempt(folder)


def test_the_run_hears_how_a_trainer_ends(tmp_path, monkeypatch):
    logs = new_run(tmp_path / "run")
    with pytest.raises(UserError, match="waits for no trainer"), attended(tmp_path / "run"):
        pass
    ours = Heartbeat(logs / runfolder.RUN_BEAT)
    trainer = Elsewhere("trainer", logs / runfolder.TRAINER_BEAT, 20, ours)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    with attended(tmp_path / "run"):
        assert not trainer.log.exists(), "rank 0 speaks for all"
    monkeypatch.setenv("RANK", "0")

    def fail():
        assert trainer.exit_code is None
        raise UserError("the disk is full")

    with pytest.raises(UserError, match="full"), attended(tmp_path / "run"):
        fail()
    assert (trainer.exit_code, trainer.failure()) == (2, "the trainer exited with code 2: the disk is full")
    with pytest.raises(UserError, match="had a trainer since it was started"), attended(tmp_path / "run"):
        pass
    ours.end(0)
    logs = runfolder.new_attempt(tmp_path / "run")
    ours = Heartbeat(logs / runfolder.RUN_BEAT)
    with attended(tmp_path / "run"):
        pass
    assert Elsewhere("trainer", logs / runfolder.TRAINER_BEAT, 20).exit_code == 0
    ours.end(0)


def test_a_trainer_that_the_run_has_started_writes_nothing(tmp_path):
    logs = new_run(tmp_path / "run", "local")
    with attended(tmp_path / "run"):
        assert not [*logs.iterdir()]


def test_a_trainer_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.1)
    logs = new_run(tmp_path / "run")
    run = Elsewhere("trainer", logs / runfolder.TRAINER_BEAT, 60, Heartbeat(logs / runfolder.RUN_BEAT))
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom etude.trainer.rl.external import attended\n"
        "with attended(Path(sys.argv[1])):\n    time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not run.log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert run.exit_code is None
    run.stop(20)
    why = "the run has ended: resume it, then start the trainer again"
    assert run.failure() == f"the trainer exited with code 1: {why}"
    assert trainer.communicate(timeout=20)[1] == f"etude: {why}\n"
    assert trainer.returncode == 1


RANK = """
import os, signal, sys
import torch
from etude.config import MeshConfig
from etude.trainer.world import World
torch.set_num_threads(1)
world = World.join(MeshConfig(shard=2), "cpu", 30.0)
print(sum(world.gathered(world.rank + 1.0)), flush=True)
if not world.first:
    os.kill(os.getpid(), signal.SIGKILL)
world.gathered(1.0)
"""


def test_ranks_that_a_run_starts_meet_and_the_one_that_died_is_named(tmp_path, monkeypatch):
    """The other one fails by the loss of its partner, a moment later."""
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    group = processes.start_ranks("trainer", ["rank"], tmp_path, 2)
    deadline = time.monotonic() + 60
    while group.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert isinstance(group, processes.RankGroup)
    assert [child.log.read_text().splitlines()[0] for child in group.children] == ["3.0", "3.0"]
    assert group.failure() == "the trainer's rank 1 was killed by SIGKILL"
