"""Steps of the default loss on rows that share tokens, whichever way they are computed."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from etude.config import RLConfig
from etude.models import batch_invariant
from etude.models.loading import load_model
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import Batch, Completion, PromptRow, collate, token_rows
from etude.trainer.rl.execution import run
from etude.trainer.rl.plan import rows as separate
from etude.trainer.rl.step import Learner, train_step
from tests.helpers.tiny_models import save_random_model


def a_batch():
    """Two groups of four; tool output between sampled tokens; two members that begin alike beyond the prompt."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(2):
        prompt, first = rng.integers(0, 97, 40).astype("i4"), rng.integers(0, 97, 20).astype("i4")
        completions = []
        for member in range(4):
            ids = rng.integers(0, 97, int(rng.integers(20, 40))).astype("i4")
            ids = np.concatenate([first, ids]) if member < 2 else ids
            mask = rng.integers(0, 2, len(ids)).astype("u1")
            mask[-1] = 1
            floats = np.full(len(ids), member - 1.5, "f4")
            completions.append(Completion(ids, mask, floats, np.zeros(len(ids), "i4"), floats))
        rows.append(PromptRow(prompt, tuple(completions)))
    return Batch((), (), tuple(rows), 0)


def config(**trainer):
    deterministic = trainer.pop("deterministic", False)
    rollout = {"staleness": 0, "prompts": 2, "group": 4, "tokens": 40}
    tables = {"tasks": {"repository": "x"}, "rollout": rollout, "trainer": trainer, "deterministic": deterministic}
    return RLConfig.model_validate(tables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("model") / "moe", initializer_range=0.05)


def step(folder, **trainer):
    """Metrics of one step, and how far it moved the master weights."""
    options = config(lr=1e-3, **trainer)
    model = load_model(folder)
    optimizer = for_policy(model, options.trainer)
    before = {name: t.clone() for name, t in optimizer.state().items() if name.startswith("master/")}
    checked = set() if options.trainer.self_check else None
    result = train_step(Learner(model, optimizer), a_batch(), options, 0, 0.0, checked=checked)
    assert result.verdict.trains
    after = optimizer.state()
    return result.metrics, torch.cat([(after[name] - t).flatten() for name, t in before.items()])


def test_a_step_moves_the_weights_as_separate_rows_do(folder):
    """Gradients agree to 2e-6; Adam's first step divides each by its own size, and so blows up those that are rounding.

    Hence 1e-2 for the update as a whole, and 1e-5 for what is a sum over tokens.
    """
    expected, truth = step(folder, execution="rows")
    assert expected["share/rows"] == 1.0
    for name, options in {"auto": {}, "streaming": {"micro_tokens": 90}, "recompute": {"micro_tokens": 90}}.items():
        metrics, moved = step(folder, execution=name, self_check=True, **options)
        assert (moved - truth).norm() <= 1e-2 * truth.norm()
        for key in ("loss/policy", "optim/grad_norm", "mismatch/k1", "mismatch/k2", "router/load_max"):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-5), key
        assert metrics["share/ratio"] > 1.5
        assert metrics["mismatch/self_check"] < 1e-5
        assert metrics["memory/peak_bytes"] > 0
    assert truth.norm() > 0


def test_deterministic_mode_is_a_plain_loop_over_rows_to_the_bit(folder):
    """What a resumed run repeats: one causal row after another, through nothing of the segment graph."""
    metrics, moved = step(folder, deterministic=True)
    assert metrics["share/rows"] == 1.0
    batch, model = a_batch(), load_model(folder)
    tokens, samples = token_rows(batch.rows), collate(batch.rows)

    def loss(logprobs_M, item_M):
        return -(samples.advantages_N[item_M] * logprobs_M).sum() / 320

    with batch_invariant.batch_invariant():
        run(model, separate(tokens), tokens.count, loss)
    ours = [p.grad for p in model.parameters()]
    plain = load_model(folder)
    start = 0
    for row in batch.rows:
        for c in row.completions:
            ids = torch.from_numpy(np.concatenate([row.prompt_P, c.ids_C])).long()
            sampled = torch.from_numpy(np.flatnonzero(c.mask_C)) + len(row.prompt_P)
            padded, positions = torch.zeros(
                2, -(-len(ids) // batch_invariant.TILE) * batch_invariant.TILE, dtype=torch.long
            )
            padded[: len(ids)], positions[: len(ids)] = ids, torch.arange(len(ids))
            with batch_invariant.batch_invariant():
                hidden = plain.model(input_ids=padded[None], position_ids=positions[None], use_cache=False)
                hidden_ND = hidden.last_hidden_state[0].index_select(0, sampled - 1)
                logits = batch_invariant.head(hidden_ND, plain.lm_head.weight)
            chosen = torch.log_softmax(logits, -1).gather(1, ids[sampled, None]).squeeze(1)
            loss(chosen, torch.arange(start, start + len(sampled))).backward()
            start += len(sampled)
    for a, b in zip(ours, (p.grad for p in plain.parameters()), strict=True):
        assert torch.equal(a, b)
    again, moved_again = step(folder, deterministic=True)
    assert torch.equal(moved, moved_again)
    assert again["loss/policy"] == metrics["loss/policy"]


def test_the_balance_loss_is_trained_and_reported(folder):
    metrics, moved = step(folder, router_aux=0.1)
    _, without = step(folder)
    assert metrics["loss/aux"] > 0.9  # 1 is balanced
    assert not torch.equal(moved, without)


def test_a_batch_without_rows_changes_nothing(folder):
    options, model = config(self_check=True), load_model(folder)
    optimizer, batch = for_policy(model, options.trainer), Batch((), (), (), 2)
    metrics = train_step(Learner(model, optimizer), batch, options, 0, 0.0, checked=set()).metrics
    assert metrics["loss/policy"] == 0.0
    assert "optim/grad_norm" not in metrics


def test_deterministic_mode_refuses_another_execution():
    with pytest.raises(ValidationError, match=r"drop trainer\.execution"):
        config(deterministic=True, execution="packed")
