"""Advantages that episodes come with: no group, no baseline of the trainer's; otherwise a run like any other."""

import msgspec
import numpy as np
import pytest
import torch

from etude import runfolder
from etude.config import RLConfig
from etude.errors import RunFailed
from etude.inference.engine.requests import Request
from etude.records import GivenAdvantage, Hint, StepRecord
from etude.store import open_store
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.process import Trainer
from etude.trainer.rl.step import train_step
from etude.weights.content import load
from etude.weights.manifest import manifests, read_manifest
from tests.helpers.trainer_runs import admit_alone, engine_of, episode, new_run, play, prompt, run_trainer, sampled

GIVEN = {"lr": 1e-2, "warmup_steps": 0, "baseline": "given"}


def given(episode, advantage, weight=1.0, **changes):
    return msgspec.structs.replace(episode, given=GivenAdvantage(advantage=advantage, weight=weight), **changes)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run that has published version 0, and eight episodes of that version, each alone in its group."""
    folder, config = new_run(tmp_path_factory.mktemp("given"), trainer=GIVEN)
    trainer = Trainer(folder)
    trainer.finish()
    trainer.ledger.close()
    _, tensors = load(open_store(str(folder / "weights")), 0)
    engine = engine_of(config, tensors, 0)
    return folder, config, [play(engine, group, 1)[0] for group in range(8)]


def test_an_episode_has_its_own_advantage_times_its_weight(played):
    _, _, episodes = played
    hint = Hint(ids=np.array([9, 9], "<i4").tobytes(), at=3)
    groups = [[given(episodes[0], 0.5, 3.0)], [given(episodes[1], -0.25)], [given(episodes[2], 0.0)],
              [given(episodes[3], 0.0, hint=hint)], play_like(episodes[4], (0.0, 1.0))]  # fmt: skip
    for advantage in ("mean", "zscore"):
        batch = make_batch((), groups, baseline="given", advantage=advantage, taught="hinted")
        found = [(c.advantages_C[c.mask_C == 1].tolist(), c.weight) for row in batch.rows for c in row.completions]
        alone = [([1.5] * 30, 3.0), ([-0.25] * 30, 1.0), ([0.0] * 30, 1.0)]
        assert found[:3] == alone, "a group of one is not left out, one of advantage 0 is unless a teacher judges it"
        compared = 0.5 if advantage == "mean" else 1.0
        assert [a[0] for a, _ in found[3:]] == pytest.approx([-compared, compared], abs=1e-5), "a group as ever"
        assert batch.zero_variance == 1
    assert len(make_batch((), groups, baseline="given").rows) == 3, "nobody judges"


def play_like(one, rewards):
    return [msgspec.structs.replace(one, member=i, reward=r) for i, r in enumerate(rewards)]


def test_advantages_nobody_asked_for_are_refused(played):
    _, _, episodes = played
    with pytest.raises(RunFailed, match="come with advantages"):
        make_batch((), [[given(episodes[0], 1.0)]])
    with pytest.raises(RunFailed, match="not all of them"):
        make_batch((), [[given(episodes[0], 1.0), episodes[1]]], baseline="given")


def test_the_gradient_is_that_of_the_plain_formula(played):
    """-(1/N) sum of w A log p, N = episodes * budget. Tolerance 1e-5 of the norm: float32 sums in another order."""
    folder, config, episodes = played
    some = [given(e, a, w) for e, a, w in zip(episodes[:3], (1.0, -0.5, 0.25), (1.0, 2.0, 0.5), strict=True)]
    trainer = Trainer(folder)
    model = trainer.learner.model
    total = torch.zeros(())
    for e in some:
        ids_T, mask_T, _, _ = e.segments[0].arrays()
        ids = torch.tensor(ids_T.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0][torch.tensor(mask_T[1:] == 1)]
        total = total - e.given.weight * e.given.advantage * chosen.sum() / (3 * config.rollout.tokens)
    total.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt().item()
    model.zero_grad(set_to_none=True)
    batch = make_batch((), [[e] for e in some], baseline="given")
    result = train_step(trainer.learner, batch, config, 0, 0.0)
    trainer.ledger.close()
    assert result.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert result.metrics["mismatch/tokens"] == 90


def test_a_batch_is_one_step_of_the_ordinary_process(tmp_path):
    """All that is ready is trained on by one version, the process ends, and the next batch goes on from there."""
    folder, config = new_run(tmp_path, trainer=GIVEN, rollout={"prompts": 1, "group": 4, "tokens": 40, "context": 128})
    run_trainer(folder)  # version 0; there is nothing to train on
    for window in range(2):
        _, tensors = load(open_store(str(folder / "weights")), window)
        engine = engine_of(config, tensors, window)
        numbers = range(5 * window, 5 * window + 5)
        played = [given(play(engine, group, 1)[0], (-1.0) ** group) for group in numbers]
        admit_alone(folder, config, numbers[0], window, played)
        run_trainer(folder)
        published = manifests(open_store(str(folder / "weights")))
        assert [m.groups for m in published[1:]] == [tuple(range(5 * w, 5 * w + 5)) for w in range(window + 1)]
    trainer = Trainer(folder)
    assert trainer.ledger.conservation(published).ok
    assert trainer.ledger.ready_groups(10, in_order=True) == []
    lines = runfolder.read_jsonl(folder / "metrics.jsonl")
    assert [line["guard/action"] for line in lines] == [0.0, 0.0]
    assert lines[1]["mismatch/k2"] < 1e-6
    assert lines[1]["rollout/groups"] == 5
    assert "drop/episodes/lost" not in lines[1]
    trainer.go_back(0)
    trainer.go_back(0)  # again is fine
    trainer.finish()
    trainer.ledger.close()
    store = open_store(str(folder / "weights"))
    last = read_manifest(store, 3)
    assert last is not None
    assert read_manifest(store, 4) is None
    assert last.digest == published[0].digest
    assert isinstance(last.step, StepRecord)
    assert (last.step.action, last.step.good) == ("rollback", 0)


@pytest.mark.slow
def test_what_was_given_raises_what_was_wanted(tmp_path):
    """Users keep answers that begin with an even token: three batches of 48 raise their probability by 20 points."""
    folder, config = new_run(tmp_path, trainer=GIVEN | {"lr": 2e-2}, guards={"act": False}, deterministic=False,
                             rollout={"prompts": 1, "group": 4, "tokens": 1, "context": 128})  # fmt: skip
    run_trainer(folder)
    ids, shares = prompt(0), []
    for version in range(4):
        _, tensors = load(open_store(str(folder / "weights")), version)
        engine = engine_of(config, tensors, version)
        answers = sampled(engine, [Request(ids=ids, max_tokens=1, seed=100 * version + i) for i in range(48)])
        shares.append(float(np.mean([answer.ids[0] % 2 == 0 for answer in answers])))
        played = [
            given(episode(ids, answer, 48 * version + i, 0, i), float(answer.ids[0] % 2 == 0) - shares[-1])
            for i, answer in enumerate(answers)
        ]
        admit_alone(folder, config, 48 * version, version, played)
        if version < 3:
            run_trainer(folder)
    assert shares[-1] > shares[0] + 0.2, shares


def test_a_batch_that_is_given_has_an_end(tmp_path, capsys):
    for tables, why in (
        ({"trainer": GIVEN | {"minutes": 3.0}}, "ends with its batch"),
        ({"trainer": GIVEN, "loss": {"preset": "ppo"}}, "computes all advantages itself"),
    ):
        with pytest.raises(ValueError, match=why):
            RLConfig.model_validate({"tasks": {"repository": "unused"}, **tables})
    folder, _ = new_run(tmp_path, trainer=GIVEN)
    run_trainer(folder)
    with pytest.raises(SystemExit):
        run_trainer(folder, 7)
    assert "no version 7" in capsys.readouterr().err
