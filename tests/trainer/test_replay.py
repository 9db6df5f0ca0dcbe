"""Replay through whole steps: what the engine recorded is what the trainer runs, whichever way rows are computed.

`runs.flip` makes the engine's routers take other experts than the trainer's would, so that without replay the two
compute different functions, and with it the same one up to float32 rounding.
"""

import msgspec
import numpy as np
import pytest
import torch

from etude.errors import RunFailed
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models import attention, experts
from etude.models.loading import load_model, named_tensors
from etude.models.router_replay import MISSING, UNFED
from etude.models.segments import trie
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import make_batch, recorded_routes, token_rows
from etude.trainer.rl.execution import evaluate, run
from etude.trainer.rl.mismatch import Mismatch
from etude.trainer.rl.plan import TokenRows, packed, plan, rows, shape_of, streaming
from etude.trainer.rl.step import Learner, train_step
from tests.helpers.tiny_models import random_model, save_random_model
from tests.helpers.trainer_runs import engine_of, flip, new_run, play

SHAPE = (2, 2)  # MoE layers and experts per token of the tiny model


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A configuration with replay, and two groups sampled by an engine whose routers flip."""
    trainer = {"router_replay": True, "lr": 1e-3, "warmup_steps": 0}
    _, config = new_run(tmp_path_factory.mktemp("replay"), "moe", trainer=trainer)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"prompts": 2})})
    engine = engine_of(config, published(config), 0)
    flip(engine.model)
    return config, [play(engine, 1, routes=True), play(engine, 2, routes=True)]


def published(config):
    """The base model as version 0 has it: the trainer computes with these, too."""
    return {name: t.bfloat16() for name, t in named_tensors(load_model(config.model.path)).items()}


def stepped(config, groups, **trainer):
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})
    model = load_model(config.model.path)
    optimizer = for_policy(model, config.trainer)
    routes = SHAPE if config.trainer.router_replay else None
    batch = make_batch((), groups, routes=routes)
    return train_step(Learner(model, optimizer), batch, config, 0, 0.0).metrics


@pytest.mark.parametrize("execution", ["auto", "rows", "streaming", "recompute"])
def test_replay_takes_the_mismatch_away(played, execution):
    """k2 1e-12 is float32 rounding in a model with wide weights; without replay it is what other experts make of it."""
    cut = {} if execution == "auto" else {"execution": execution, "micro_tokens": 100}
    with_, without = stepped(*played, **cut), stepped(*played, router_replay=False, **cut)
    assert without["mismatch/k2"] > 1e-4
    assert with_["mismatch/k2"] < 1e-9
    assert with_["router/flip_token"] > 0.1
    assert with_["router/flip_token"] >= with_["router/flip_layer"] > 0
    assert (with_["router/replayed"], with_["router/refused"], with_["router/missing"]) == (1.0, 0.0, 0.0)
    assert not any(name.startswith("router/") and name != "router/load_max" for name in without)


def test_no_flip_is_left(played):
    """The counts per expert are those of the record, plus the rows' last tokens, which take their own."""
    batch = make_batch((), played[1], routes=SHAPE)
    tokens = token_rows(batch.rows)
    model = load_model(played[0].model.path)
    recorded_LE = torch.zeros(2, 8)
    for routes in tokens.routes:
        for layer in range(2):
            recorded_LE[layer] += torch.bincount(torch.from_numpy(routes[:-1, layer].ravel()).long(), minlength=8)
    own = evaluate(model, rows(tokens), tokens.count, replays=False)
    bare = TokenRows(tokens.rows, tokens.sampled)
    assert torch.equal(own.logprobs_N, evaluate(model, rows(bare), bare.count).logprobs_N), "the reference model's way"
    assert float((own.counts_LE - recorded_LE).abs().sum()) > 50
    for parts in (rows(tokens), packed(tokens, tokens.tree(), 10_000), streaming(tokens, tokens.tree(), 100)):
        found = evaluate(model, parts, tokens.count)
        left_LE = found.counts_LE - recorded_LE
        assert (left_LE >= 0).all()
        assert left_LE.sum(1).tolist() == [2 * len(tokens.rows)] * 2


def test_rows_that_disagree_are_computed_apart_and_exactly(played):
    """One member's third prompt token went elsewhere; another member has no routes at all. Limits of test_execution."""
    tokens = token_rows(make_batch((), played[1], routes=SHAPE).rows)
    routes = [r.copy() for r in tokens.routes]
    routes[1][2] = (routes[1][2] + 1) % 8
    routes[2][:] = MISSING
    mixed = TokenRows(tokens.rows, tokens.sampled, tuple(routes))
    folder = save_random_model(played[0].model.path + "-narrow", "moe", initializer_range=0.05)
    model = load_model(folder)
    agreed, tree = tokens.tree(), mixed.tree()
    assert tree.graph.length >= agreed.graph.length + 2 * 22
    assert plan(mixed, "packed", 1000, shape_of(model)).split == tree.graph.length - trie(tokens.rows).graph.length
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(0))
    gradients = []
    outcomes = []
    for parts in (rows(mixed), packed(mixed, tree, 10_000), streaming(mixed, tree, 60)):
        model.zero_grad()
        outcomes.append(run(model, parts, mixed.count, lambda l_M, item_M: (weight_N[item_M] * l_M).sum()))
        gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    for outcome, gradient in zip(outcomes[1:], gradients[1:], strict=True):
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) <= 2e-6
        assert torch.allclose(outcome.logprobs_N, outcomes[0].logprobs_N, atol=1e-5)
        assert torch.equal(outcome.counts_LE, outcomes[0].counts_LE)
        assert outcome.replayed.metrics() == pytest.approx(outcomes[0].replayed.metrics(), abs=1e-12)
    assert outcomes[0].replayed.missing == len(routes[2])


def test_episodes_without_routes_are_missing_not_invented(played):
    config, (one, two) = played
    bare = [
        msgspec.structs.replace(e, segments=tuple(msgspec.structs.replace(s, routes=None) for s in e.segments))
        for e in two
    ]
    metrics = stepped(config, [one, bare])
    assert metrics["router/missing"] == pytest.approx(0.5), "of two groups of equal length"
    assert metrics["router/refused"] == 0.0
    assert stepped(config, [bare, bare])["router/missing"] == 1.0


def test_routes_of_a_segment(played):
    segment = played[1][0][0].segments[0]
    length = len(segment.arrays()[0])
    found = recorded_routes(segment, length, SHAPE)
    assert np.array_equal(found[:-1], segment.routes.array())
    assert (found[-1] == UNFED).all()
    assert np.array_equal(recorded_routes(segment, 30, SHAPE), segment.routes.array()[:30])
    cut = msgspec.structs.replace(segment, routes=msgspec.structs.replace(segment.routes, ids=segment.routes.ids[:40]))
    assert (recorded_routes(cut, length, SHAPE)[10:-1] == MISSING).all()
    with pytest.raises(RunFailed, match="recorded 2 experts in 2 layers, but the model has 2 in 3"):
        recorded_routes(segment, length, (3, 2))


@pytest.mark.slow
@torch.no_grad()
def test_replay_at_least_halves_the_mismatch_of_bfloat16():
    """Engine and trainer both in bfloat16, passes of other sizes on each side: sixteen MoE layers, real flips.

    Measured: 9.6 times smaller, a quarter of the tokens flipping; 1.4 to 40 times in other random models."""
    model = random_model(
        "moe", num_hidden_layers=16, decoder_sparse_step=1, num_experts=32, num_experts_per_tok=4,
        moe_intermediate_size=64, initializer_range=0.2,
    )  # fmt: skip
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    model.to(torch.bfloat16)
    engine = Engine(model, routes=True)
    prompts = np.random.default_rng(0).integers(7, 97, (4, 24)).tolist()
    rows_ = [engine.submit(Request(ids=p, max_tokens=40, seed=i, routes_from=0)) for i, p in enumerate(prompts * 4)]
    for _ in range(500):
        engine.step()
        if all(row.future.done() for row in rows_):
            break
    found = [row.future.result(0) for row in rows_]
    ids = tuple(np.array(row.request.ids + g.ids) for row, g in zip(rows_, found, strict=True))
    routes = tuple(np.pad(g.routes.array(), ((0, 1), (0, 0), (0, 0)), constant_values=UNFED) for g in found)
    tokens = TokenRows(ids, tuple(np.arange(24, len(row)) for row in ids), routes)
    recorded_N = torch.tensor(np.concatenate([g.logprobs for g in found]))
    parts = plan(tokens, "packed", 8192, shape_of(model)).parts
    k2 = {}
    for replays in (True, False):
        outcome, mismatch = evaluate(model, parts, tokens.count, replays=replays), Mismatch()
        mismatch.add(outcome.logprobs_N, recorded_N)
        k2[replays] = mismatch.metrics("m")["m/k2"]
        if replays:
            assert outcome.replayed.metrics()["router/flip_token"] > 0.05
            assert outcome.replayed.metrics()["router/refused"] == 0.0
    assert k2[True] < 0.5 * k2[False]
