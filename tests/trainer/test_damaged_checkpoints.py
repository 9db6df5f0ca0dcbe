"""A trainer whose newest checkpoint is damaged goes on from the last good one, bit for bit, and says so."""

import json
import shutil

import pytest
import torch

from etude.errors import UserError
from etude.ledger.ledger import Ledger
from etude.store import open_store
from etude.trainer import checkpoint
from etude.trainer.rl.process import Trainer
from etude.weights.manifest import ManifestDamaged, manifests
from etude.weights.ranks import Ranks
from tests.helpers.trainer_runs import admit, engine_of, new_run, play, step


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder at version 2, with checkpoints 1 and 2."""
    folder, config = new_run(tmp_path_factory.mktemp("trained"), rollout={"prompts": 1, "group": 4})
    trainer = Trainer(folder)
    for _ in range(2):
        one_step(trainer, folder, config)
    return folder, config, {name: t.clone() for name, t in trainer.learner.optimizer.state().items()}


def one_step(trainer, folder, config):
    version = trainer.version
    engine = engine_of(config, trainer.learner.optimizer.published(), version)
    admit(folder, config, version, version, play(engine, version))
    step(trainer)


@pytest.fixture
def run(trained, tmp_path):
    folder, config, state = trained
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", config, state


def flipped(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def damage(folder, how):
    path = folder / f"checkpoints/step_2/{'manifest.json' if how == 'manifest' else 'rank_0.safetensors'}"
    if how in ("bit", "manifest"):
        flipped(path, len(path.read_bytes()) * 2 // 3)
    elif how == "header":
        flipped(path, 30)
    elif how == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "missing":
        shutil.rmtree(path.parent)


@pytest.mark.parametrize("how", ["bit", "header", "half", "manifest", "missing"])
def test_a_damaged_checkpoint_is_said_and_its_step_computed_again(run, how, capfd):
    folder, config, state = run
    damage(folder, how)
    trainer = Trainer(folder)
    said = capfd.readouterr().err
    assert ("checkpoint 2 is damaged" in said) == (how != "missing")
    assert "the run goes on from checkpoint 1, and computes version 2 again" in said
    assert "bit for bit" not in said
    assert trainer.version == 2
    before, _ = checkpoint.load(folder / "checkpoints", 1)
    after = trainer.learner.optimizer.state()
    assert any(not torch.equal(before[n], state[n]) for n in state), "checkpoint 1 is like 2: the test is void"
    assert all(torch.equal(after[n], state[n]) for n in state)
    one_step(trainer, folder, config)
    published = manifests(open_store(str(folder / "weights")))
    assert [m.groups for m in published] == [(), (0,), (1,), (2,)]
    found = Ledger.open(f"sqlite:///{folder}/ledger.db").conservation(published)
    assert found.ok, found.sentence
    Trainer(folder)
    assert "damaged" not in capfd.readouterr().err


def test_an_undamaged_one_resumes_exactly(run, capfd):
    folder, _, state = run
    after = Trainer(folder).learner.optimizer.state()
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert "note:" not in capfd.readouterr().err


def test_without_a_whole_checkpoint_the_run_is_refused(run):
    folder, _, _ = run
    for path in folder.glob("checkpoints/*/rank_0.safetensors"):
        flipped(path, -1)
    with pytest.raises(UserError, match=r"checkpoint 2 is damaged .* no older one is whole"):
        Trainer(folder)


def test_where_an_episode_is_gone_the_published_weights_are_taken(run, capfd):
    """And the optimizer as it was before."""
    folder, config, state = run
    damage(folder, "bit")
    for blob in (folder / "rollouts/00000001").iterdir():
        blob.unlink()
    trainer = Trainer(folder)
    said = capfd.readouterr().err
    assert "note: the episode 00000001/0000-0.msgpack is gone" in said
    assert "version 2 did not come out bit for bit; the published weights are taken" in said
    after = trainer.learner.optimizer.state()
    assert all(torch.equal(after[n].bfloat16(), state[n].bfloat16()) for n in state if n.startswith("master/"))
    assert not all(torch.equal(after[n], state[n]) for n in state)
    one_step(trainer, folder, config)


def test_a_checkpoint_of_other_weights_than_were_published_is_not_taken(run, capfd):
    folder, _, state = run
    other = {name: t + (name.startswith("master/")) for name, t in state.items()}
    checkpoint.write(folder / "checkpoints", 2, checkpoint.parts_of(other), Ranks(0, 1, "other"), {})
    after = Trainer(folder).learner.optimizer.state()
    assert "checkpoint 2 does not have the digest that was published; the run goes on from" in capfd.readouterr().err
    assert all(torch.equal(after[n], state[n]) for n in state)


def test_a_digit_of_a_manifests_groups_is_seen(run):
    folder, _, _ = run
    path = folder / "weights/versions/00000001.json"
    text = path.read_text()
    assert text.count('"groups":[0]') == 1
    path.write_text(text.replace('"groups":[0]', '"groups":[1]'))
    with pytest.raises(ManifestDamaged, match=r"manifest of version 1 in .* is damaged"):
        Trainer(folder)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=r"manifest of version 1 in .* is damaged"):
        Trainer(folder)


def test_the_line_of_a_version_whose_trainer_was_killed_is_written_by_the_next_one(run):
    folder, _, _ = run
    path = folder / "metrics.jsonl"
    whole = path.read_text()
    first, second = whole.splitlines()
    assert not (folder / "metrics.next.json").exists()
    path.write_text(f"{first}\n")  # as if it was killed between the manifest and the line
    known = folder / "metrics.digests.jsonl"
    known.write_text(known.read_text().splitlines()[0] + "\n")
    (folder / "metrics.next.json").write_text(second)
    Trainer(folder)
    lines = path.read_text().splitlines()
    assert lines[0] == first
    assert json.loads(lines[1]) == json.loads(second) | {"time/publish_background": 0.0}
    (folder / "metrics.next.json").write_text(second)
    Trainer(folder)
    assert path.read_text().splitlines() == lines, "once is enough"


def test_a_trainer_that_is_killed_after_the_manifest_leaves_a_whole_line(trained, tmp_path, monkeypatch):
    folder, config, _ = trained
    shutil.copytree(folder, tmp_path / "run")
    trainer = Trainer(tmp_path / "run")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.ledger, "consume", killed)  # which follows the manifest
    with pytest.raises(KeyboardInterrupt):
        one_step(trainer, tmp_path / "run", config)
    resumed = Trainer(tmp_path / "run")
    assert resumed.version == 3
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2].keys() == lines[1].keys()
    assert lines[2]["time/spent"] > lines[1]["time/spent"]


def test_altered_figures_are_said(run, capfd):
    folder, _, _ = run
    path = folder / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | {'reward/all/mean': 9.0})}\n")
    capfd.readouterr()
    Trainer(folder)
    assert "note: figures of step 2 in metrics.jsonl have been altered" in capfd.readouterr().err
