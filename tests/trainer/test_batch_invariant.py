"""Deterministic mode: the trainer's log-probabilities are those that the engine recorded, in every bit."""

from pathlib import Path

import numpy as np
import pytest

from etude.audit.rescoring import set_weights
from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.batch_invariant import batch_invariant
from etude.models.loading import load_model, named_tensors
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.plan import TokenRows, rows
from etude.trainer.rl.step import Learner, train_step
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import new_run, play, prompt

NANO = Path(__file__).parents[2] / "models" / "nano"


def sampled(model, temperature, groups, tokens):
    """Groups of four that share prompts of many lengths, then a second turn of each, in one busy engine."""
    engine = Engine(model, EngineConfig(max_batch=7, prefill_tokens=48), deterministic=True)
    requests = [
        Request(ids=prompt(g, 11 + 17 * g), max_tokens=tokens + 3 * m, seed=10 * g + m, temperature=temperature)
        for g in range(groups)
        for m in range(4)
    ]
    out = []
    for _ in range(2):
        live = [engine.submit(request) for request in requests]
        for _ in range(4000):
            if all(row.future.done() for row in live):
                break
            engine.step()
        out += [(row.request, row.future.result(0)) for row in live]
        requests = [
            Request(ids=r.ids + g.ids + prompt(99, 7), max_tokens=tokens, seed=r.seed + 5, temperature=temperature)
            for r, g in out
        ]
    assert engine.counters.cached_tokens > 0.4 * engine.counters.prefilled_tokens, "prefix hits are part of the promise"
    return out


@pytest.mark.parametrize(("kind", "temperature"), [("moe", 0.7), ("qwen3", 1.0), ("llama", 1.0)])
def test_no_bit_differs(tmp_path, kind, temperature):
    """About 2000 tokens each; `etude bench mismatch` compares 100,000."""
    model = load_model(save_random_model(tmp_path / "model", kind))
    assert_equal_bits(model, sampled(model, temperature, 6, 40), temperature)


@pytest.mark.slow
def test_no_bit_of_the_bundled_model_differs():
    model = load_model(NANO)
    assert_equal_bits(model, sampled(model, 1.0, 3, 24), 1.0)


def assert_equal_bits(model, found, temperature):
    ids = tuple(np.array(request.ids + generation.ids) for request, generation in found)
    at = tuple(np.arange(len(r.ids), len(row)) for (r, _), row in zip(found, ids, strict=True))
    tokens = TokenRows(ids, at)
    recorded_N = np.concatenate([np.array(g.logprobs, np.float32) for _, g in found])
    plain_N = evaluate(model, rows(tokens), tokens.count, temperature=temperature).logprobs_N.numpy()
    with batch_invariant():
        exact_N = evaluate(model, rows(tokens), tokens.count, temperature=temperature).logprobs_N.numpy()
    assert tokens.count > 500
    assert np.array_equal(exact_N, recorded_N)
    assert not np.array_equal(plain_N, recorded_N), "else there was nothing to do"


def test_a_deterministic_step_measures_no_mismatch(tmp_path):
    """A whole step, gradients on, with replay of the recorded experts: they are the trainer's own."""
    tables = {"trainer": {"router_replay": True, "lr": 1e-3}, "rollout": {"group": 4, "prompts": 2, "staleness": 0}}
    _, config = new_run(tmp_path, "moe", deterministic=True, **tables)
    model = load_model(config.model.path)
    set_weights(model, {name: t.bfloat16() for name, t in named_tensors(model).items()})  # as they are published
    engine = Engine(model, routes=True, deterministic=True)
    groups = [play(engine, 1, routes=True), play(engine, 2, routes=True)]
    trained = load_model(config.model.path)
    batch = make_batch((), groups, routes=(2, 2))
    metrics = train_step(Learner(trained, for_policy(trained, config.trainer)), batch, config, 0, 0.0).metrics
    assert metrics["mismatch/tokens"] == 240
    assert metrics["mismatch/max_abs"] == 0.0
    assert metrics["router/flip_token"] == metrics["router/refused"] == 0.0
    assert metrics["router/replayed"] == 1.0
