"""Steps between checkpoints are computed again after a kill: no group is lost or trained on twice, no bit differs."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import UserError
from etude.ledger.ledger import Ledger
from etude.records import StepRecord
from etude.store import open_store
from etude.trainer import checkpoint
from etude.trainer.optimizer import MasterAdamW
from etude.trainer.rl.process import Trainer
from etude.trainer.rl.restore import _as_recorded
from etude.weights.manifest import manifests
from tests.helpers.trainer_runs import admit, edited, engine_of, new_run, play, step

EVERY = 3
STEPS = 12
GUARDS = {"min_tokens": 16, "mismatch_k2": {"stop": 0.01, "action": "rollback"}, "zero_variance": {"stop": 2.0}}


def state(trainer):
    return {name: t.clone() for name, t in trainer.learner.optimizer.state().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def one_step(trainer, folder, config, shift=0.0):
    """Plays a group with the newest version and trains on it; `shift` falsifies what the engine recorded."""
    version = trainer.version
    episodes = play(engine_of(config, trainer.learner.optimizer.published(), version), version)
    if shift:
        arrays = [e.segments[0].arrays() for e in episodes]
        episodes = [edited(e, logprobs=a[2] - np.float32(shift) * a[1]) for e, a in zip(episodes, arrays, strict=True)]
    admit(folder, config, version, version, episodes)
    step(trainer)


def conserved(folder):
    published = manifests(open_store(str(folder / "weights")))
    found = Ledger.open(f"sqlite:///{folder}/ledger.db").conservation(published)
    assert found.ok, found.sentence
    return published


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run at version 5, with checkpoints 0 and 3, and its state."""
    root = tmp_path_factory.mktemp("trained")
    folder, config = new_run(
        root,
        guards=GUARDS,
        trainer={"lr": 3e-3, "warmup_steps": 0, "checkpoint_every": EVERY, "decay": 0.5},
        weights={},  # the chain begins with the model folder
    )
    trainer = Trainer(folder)
    for _ in range(5):
        one_step(trainer, folder, config)
    assert checkpoint.versions(folder / "checkpoints") == [0, 3]
    return folder, config, state(trainer)


@pytest.fixture
def run(trained, tmp_path):
    folder, config, saved = trained
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", config, saved


def test_a_model_folder_that_was_altered_is_refused(tmp_path):
    """Engines begin with the folder, so none would ever hold a version of the run again."""
    folder, config = new_run(tmp_path, weights={})
    Trainer(folder)
    file = Path(config.model.path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.125
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model are not those that the run began with: restore the folder"):
        Trainer(folder)


def test_a_resumed_trainer_has_every_bit_of_the_one_before(run, capfd):
    folder, config, saved = run
    assert not same(checkpoint.load(folder / "checkpoints", 3)[0], saved), "nothing is to be computed: the test is void"
    trainer = Trainer(folder)
    said = capfd.readouterr().err
    assert "note: the run goes on from checkpoint 3, and computes versions 4 to 5 again" in said
    assert "bit for bit" not in said
    assert same(state(trainer), saved)
    assert trainer.version == 5
    one_step(trainer, folder, config)
    assert checkpoint.versions(folder / "checkpoints") == [3, 6]
    assert [m.groups for m in conserved(folder)] == [(), (0,), (1,), (2,), (3,), (4,), (5,)]
    assert [m.parent for m in conserved(folder)] == [None, 0, 1, 2, 3, 4, 5], "the chain that engines follow goes on"


def test_a_run_that_ends_between_two_checkpoints_saves_its_last_version(run):
    folder, _, saved = run
    trainer = Trainer(folder)
    trainer.finish()
    assert checkpoint.versions(folder / "checkpoints") == [3, 5]
    assert same(checkpoint.load(folder / "checkpoints", 5)[0], saved)


def test_a_changed_learning_rate_counts_from_the_next_step_on(run, capfd):
    """The steps before were made with the old one, which is on record."""
    folder, _, saved = run
    text = (folder / "config.json").read_text()
    assert text.count("0.003") == 1
    (folder / "config.json").write_text(text.replace("0.003", "0.001"))
    trainer = Trainer(folder)
    assert trainer.config.trainer.lr == 0.001
    assert "bit for bit" not in capfd.readouterr().err
    assert same(state(trainer), saved)


def test_a_checkpoint_of_a_version_that_was_never_published_is_dropped(run):
    folder, _, saved = run
    shutil.copytree(folder / "checkpoints/step_3", folder / "checkpoints/step_6")
    (folder / "checkpoints/step_6.killed.incomplete").mkdir()
    assert same(state(Trainer(folder)), saved)
    assert checkpoint.versions(folder / "checkpoints") == [0, 3]
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_where_no_step_comes_out_bit_for_bit_each_version_is_the_published_one(run, capfd, monkeypatch):
    """As on a GPU that adds in another order: noise in the gradients of every repeated step."""
    folder, _, saved = run
    collect = MasterAdamW.collect

    def noisy(self):
        for tensor in self._live.values():
            tensor.grad *= 1 + 1e-3 * torch.randn_like(tensor)
        return collect(self)

    followed, follow = [], MasterAdamW.follow
    monkeypatch.setattr(MasterAdamW, "collect", noisy)
    monkeypatch.setattr(MasterAdamW, "follow", lambda self, tensors: followed.append(0) or follow(self, tensors))
    after = state(Trainer(folder))
    assert "versions 4 to 5 did not come out bit for bit; the published weights are taken" in capfd.readouterr().err
    assert len(followed) == 2
    assert not same(after, saved)
    for name, tensor in saved.items():
        if name.startswith("master/"):
            assert torch.equal(after[name].bfloat16(), tensor.bfloat16())
        else:  # a thousandth of noise in two of five steps; a step more or less would be a tenth at least
            assert (after[name] - tensor).norm() <= 5e-3 * tensor.norm()


def test_a_rollback_between_two_checkpoints_and_a_resume_after_it(run):
    """The last good version is 4, which has no checkpoint: it is computed from 3."""
    folder, config, saved = run
    trainer = Trainer(folder)
    one_step(trainer, folder, config, shift=1.0)
    published = conserved(folder)
    assert published[6].step.action == "rollback"
    good = published[6].step.good
    assert published[6].digest == published[good].digest != published[5].digest
    assert good == 4
    assert not same(state(trainer), saved)
    checkpoint.drop(folder / "checkpoints", [6])
    resumed = Trainer(folder)
    assert same(state(resumed), state(trainer))
    one_step(trainer, folder, config)
    resumed = Trainer(folder)
    assert same(state(resumed), state(trainer))
    conserved(folder)


@pytest.mark.parametrize(("loss", "updates"), [({"preset": "ppo"}, 1), ({"updates": 2}, 2)])
def test_a_value_head_and_several_updates_of_a_step_are_computed_again_too(tmp_path, loss, updates):
    rollout = {"prompts": 2, "group": 4, "staleness": 2, "context": 128, "tokens": 40}
    options = {"lr": 3e-3, "warmup_steps": 0, "checkpoint_every": EVERY}
    folder, config = new_run(tmp_path, loss=loss, rollout=rollout, trainer=options)
    trainer = Trainer(folder)
    engine = engine_of(config, trainer.learner.optimizer.published(), 0)
    for group in range(4):
        admit(folder, config, group, 0, play(engine, group))
    for _ in range(2):
        step(trainer, prompts=2)
    published = conserved(folder)
    assert [m.step.updates for m in published[1:]] == [updates] * 2
    assert checkpoint.versions(folder / "checkpoints") == [0]
    resumed = Trainer(folder)
    assert same(state(resumed), state(trainer))
    if trainer.learner.critic is not None:
        assert same(resumed.learner.critic.state(), trainer.learner.critic.state())
        assert any(t.any() for t in trainer.learner.critic.state().values()), "the head learned nothing"


def test_an_update_that_the_guards_stopped_is_stopped_again():
    judge = _as_recorded(StepRecord(action="skip", good=0, lr=0.1, updates=2))
    assert [judge(None).action for _ in range(3)] == ["go", "go", "skip"]


SCRIPT = """
import os, sys
from pathlib import Path
from etude.ledger.ledger import Ledger
from etude.store import open_store
from etude.trainer.rl import process
from etude.weights.manifest import manifests

folder = Path(sys.argv[1])
for place in sys.argv[2:]:
    if (pid := os.fork()) == 0:
        ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
        ledger.recover(manifests(open_store(str(folder / "weights"))))  # as the controller does
        ledger.close()
        os.environ["ETUDE_FAILPOINT"] = place
        sys.argv = sys.argv[:2]
        process.main()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(place, "killed" if os.WIFSIGNALED(status) else f"ended {os.WEXITSTATUS(status)}", flush=True)
"""
KILLS = [
    "trainer.consumed:2",  # version 2, two after checkpoint 0
    "trainer.repeated:1",  # while version 1 is computed again
    "publisher.manifest:1",  # version 3 exists, the ledger does not know, its checkpoint is on its way
    "checkpoint.manifest:1",  # on the thread, while the next steps train, up to version 8
    "publisher.payload:1",
    "trainer.published:1",
    "checkpoint.complete:1",
]


@pytest.mark.slow
def test_a_trainer_that_is_killed_again_and_again_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    """kill -9 between checkpoints, in the middle of one, and while steps are computed again."""
    folder, config = new_run(
        tmp_path,
        rollout={"prompts": 1, "group": 4, "staleness": STEPS, "context": 128, "tokens": 40},
        trainer={"lr": 3e-3, "warmup_steps": 0, "steps": STEPS, "checkpoint_every": EVERY, "execution": "rows"},
    )
    trainer = Trainer(folder)
    engine = engine_of(config, trainer.learner.optimizer.published(), 0)
    for group in range(STEPS):
        admit(folder, config, group, 0, play(engine, group))
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(folder, undisturbed)
    run_all = partial(subprocess.run, capture_output=True, text=True, timeout=900, env=os.environ)
    assert "none:1 ended 0" in run_all([sys.executable, "-c", SCRIPT, str(undisturbed), "none:1"]).stdout
    found = run_all([sys.executable, "-c", SCRIPT, str(folder), *KILLS, "none:1"])
    assert found.stdout.splitlines() == [*(f"{place} killed" for place in KILLS), "none:1 ended 0"], found.stderr
    assert "bit for bit" not in found.stderr
    one, two = conserved(undisturbed), conserved(folder)
    assert [(m.version, m.digest, m.groups) for m in one] == [(m.version, m.digest, m.groups) for m in two]
    assert [m.groups for m in two] == [(), *((group,) for group in range(STEPS))]
    assert len({m.digest for m in two}) > 5, "the steps changed nothing: the comparison is void"
    assert same(*(checkpoint.load(run / "checkpoints", STEPS)[0] for run in (undisturbed, folder)))
