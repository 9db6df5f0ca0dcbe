"""Speculative edits: whatever is drafted, a sequence says what it would have said without."""

from pathlib import Path

import httpx2
import msgspec
import numpy as np
import pytest
import torch

from etude.config import EngineConfig
from etude.inference.engine.costs import CostCurve
from etude.inference.engine.drafts import DraftSource
from etude.inference.engine.engine import Engine
from etude.inference.engine.loading import load_engine
from etude.inference.engine.requests import Request
from etude.inference.engine.sampling import MARGIN, sample
from etude.inference.engine.speculation import accepted_length
from etude.models import attention, experts
from tests.helpers.engines import serving
from tests.helpers.tiny_models import random_model

NANO = Path(__file__).parents[2] / "models" / "nano"
TOLERANCE = 2e-4  # as in test_engine.py
PLAIN = EngineConfig(speculate=False)
FLAT = CostCurve([1, 512], [1.0, 1.5])  # drafts pay
STEEP = CostCurve([1, 512], [1.0, 512.0])  # they never do


def model_of(kind="moe", **overrides):
    model = random_model(kind, **overrides)
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


@pytest.fixture(scope="module")
def model():
    return model_of()


def engine_of(model, curve=FLAT, routes=False, **options):
    engine = Engine(model, EngineConfig(**options), routes=routes)
    assert engine.runner.speculation is not None
    engine.runner.speculation.curve = curve
    return engine


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(7, 97, length).tolist()


def run(engine, *requests, between=lambda step: None):
    sequences = [engine.submit(request) for request in requests]
    for step in range(3000):
        if all(sequence.future.done() for sequence in sequences):
            return [sequence.future.result() for sequence in sequences]
        engine.step()
        between(step)
    raise AssertionError("the requests did not finish")


def drafted(request, ids, name="prediction"):
    return msgspec.structs.replace(request, sources=(DraftSource(name, np.array(ids, np.int32)),))


def damaged(ids, seed):
    """What a source may look like: the answer with tokens replaced, left out, put in and moved, or nothing like it."""
    rng = np.random.default_rng(seed)
    ids = list(ids)
    kind = seed % 6
    if kind == 0:
        return rng.integers(0, 97, len(ids)).tolist()
    if kind == 1:
        return []
    for _ in range(kind):
        at = int(rng.integers(0, len(ids)))
        ids[at : at + int(rng.integers(0, 4))] = rng.integers(7, 97, int(rng.integers(0, 4))).tolist()
    return ids[len(ids) // 2 :] + ids[: len(ids) // 2] if kind == 5 else ids


def assert_same(a, b):
    assert a.ids == b.ids
    assert a.finish_reason == b.finish_reason
    assert a.versions == b.versions
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_draft_in_a_ragged_batch_gives_the_plain_answer(model, temperature):
    plain = [
        Request(ids=prompt(8 + 5 * i, i), max_tokens=30 + 3 * i, seed=i, temperature=temperature) for i in range(18)
    ]
    expected = run(Engine(model, PLAIN), *plain)
    requests = [drafted(r, damaged(g.ids, i)) for i, (r, g) in enumerate(zip(plain, expected, strict=True))]
    engine = engine_of(model, max_batch=7, prefill_tokens=48)
    for one, other in zip(expected, run(engine, *requests), strict=True):
        assert_same(other, one)
    assert 0 < engine.counters.accepted_tokens < engine.counters.drafted_tokens


def test_a_right_draft_takes_few_passes_and_experts_are_the_same(model):
    request = Request(ids=prompt(20), max_tokens=200, temperature=0.0, routes_from=0)
    (plain,) = run(Engine(model, PLAIN, routes=True), request)
    engine = engine_of(model, routes=True)
    (fast,) = run(engine, drafted(request, plain.ids))
    assert_same(fast, plain)
    assert fast.routes == plain.routes
    assert fast.routes is not None
    assert engine.counters.steps < 20
    # One token per pass is the model's own, and the last one always is.
    assert 200 - engine.counters.steps <= fast.accepted_draft_tokens < 200
    assert fast.rejected_draft_tokens == 0


def test_usage_counts_every_place_once(model):
    request = Request(ids=prompt(20), max_tokens=100, temperature=0.0)
    (plain,) = run(Engine(model, PLAIN), request)
    wrong = [*plain.ids[:40], *((np.array(plain.ids[40:50]) + 1) % 90), *plain.ids[50:]]
    (fast,) = run(engine_of(model), drafted(request, wrong))
    assert fast.ids == plain.ids
    assert 50 < fast.accepted_draft_tokens <= 90
    assert 1 <= fast.rejected_draft_tokens <= 60
    assert fast.accepted_draft_tokens + fast.rejected_draft_tokens <= 100


def test_stop_and_length_inside_an_accepted_run(model):
    request = Request(ids=prompt(20), max_tokens=60, temperature=0.0)
    (plain,) = run(Engine(model, PLAIN), request)
    stop = plain.ids[25]
    cut = plain.ids.index(stop) + 1
    (stopped,) = run(engine_of(model), drafted(msgspec.structs.replace(request, stop=(stop,)), plain.ids))
    assert (stopped.ids, stopped.finish_reason) == (plain.ids[:cut], "stop")
    assert len(stopped.logprobs) == len(stopped.versions) == cut
    for limit in (1, 2, 7):
        (short,) = run(engine_of(model), drafted(msgspec.structs.replace(request, max_tokens=limit), plain.ids))
        assert (short.ids, short.finish_reason) == (plain.ids[:limit], "length")


def test_the_own_text_is_a_source(model):
    """A model with little but its last token to go by falls into a loop, and the loop is drafted."""
    model = model_of("llama", num_hidden_layers=1, initializer_range=0.02)
    request = Request(ids=prompt(20), max_tokens=150, temperature=0.0)
    (plain,) = run(Engine(model, PLAIN), request)
    engine = engine_of(model)
    assert_same(run(engine, request)[0], plain)
    assert engine.counters.steps < 100
    assert engine.counters.accepted_tokens > 50


def test_a_swap_between_passes_leaves_drafts_valid():
    """Swapped after the first token, both engines go on with new weights over the old keys of the prompt."""
    request = Request(ids=prompt(20), max_tokens=120, temperature=0.0)
    (before,) = run(Engine(model_of(), PLAIN), request)
    generations = []
    for kind, drafting in ((PLAIN, request), (EngineConfig(), drafted(request, before.ids))):
        model = model_of()
        engine = Engine(model, kind)
        if engine.runner.speculation is not None:
            engine.runner.speculation.curve = FLAT

        @torch.no_grad()
        def scale(model=model):
            for p in model.parameters():
                p.mul_(0.99)

        def swap(step, engine=engine, scale=scale):
            if step == 0:
                engine.swap(1, scale)

        generations += run(engine, drafting, between=swap)
    plain, fast = generations
    assert_same(fast, plain)
    assert fast.versions == [0] + [1] * 119
    assert fast.accepted_draft_tokens > 0


def test_sampling_keeps_its_distribution():
    """Chi-square on a vocabulary of 12: second tokens of 3,000 drafted requests against exact probabilities."""
    model = model_of("llama", vocab_size=12, num_hidden_layers=1, eos_token_id=None)
    ids = [3, 5, 7]
    with torch.no_grad():
        first_V = torch.softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
        rows = torch.tensor([[*ids, a] for a in range(12)])
        second_VV = torch.softmax(model(input_ids=rows).logits[:, -1], -1)
    expected = (first_V[:, None] * second_VV).double().numpy().ravel()
    engine = engine_of(model, max_batch=128)
    draft = [int(first_V.argmax()), int(second_VV[first_V.argmax()].argmax()), 1]
    requests = [drafted(Request(ids=ids, max_tokens=3, seed=i), draft) for i in range(3000)]
    observed = np.zeros(144)
    for generation in run(engine, *requests):
        observed[generation.ids[0] * 12 + generation.ids[1]] += 1
    assert engine.counters.accepted_tokens > 50
    # Cells with fewer than five expected are counted as one; 99.99 % quantile by Wilson and Hilferty (1931).
    large = expected * 3000 >= 5
    o = np.append(observed[large], observed[~large].sum())
    e = np.append(expected[large], expected[~large].sum()) * 3000
    dof = len(o) - 1
    limit = dof * (1 - 2 / (9 * dof) + 3.72 * np.sqrt(2 / (9 * dof))) ** 3
    assert ((o - e) ** 2 / e).sum() < limit


def test_verification_keeps_what_was_drawn():
    draft, safe = np.array([5, 6, 7]), np.ones(4, bool)
    assert accepted_length(draft, np.array([5, 6, 7, 8]), safe, ()) == 4
    assert accepted_length(draft, np.array([5, 9, 7, 8]), safe, ()) == 2
    assert accepted_length(draft, np.array([4, 6, 7, 8]), safe, ()) == 1
    assert accepted_length(draft, np.array([5, 6, 7, 8]), safe, (6,)) == 2
    assert accepted_length(draft, np.array([5, 6, 7, 8]), np.array([True, False, True, True]), ()) == 1
    assert accepted_length(draft, np.array([5, 6, 7, 8]), np.array([False, True, True, True]), ()) == 0


def test_a_tie_is_decided_alone(model):
    """Two tokens with one embedding tie at every step: no such draw is taken from a pass with drafts."""
    model = model_of()
    with torch.no_grad():
        model.get_input_embeddings().weight[8::2] = model.get_input_embeddings().weight[7:-1:2]
    request = Request(ids=prompt(12), max_tokens=40, temperature=0.0)
    (plain,) = run(Engine(model, PLAIN), request)
    engine = engine_of(model)
    assert_same(run(engine, drafted(request, plain.ids))[0], plain)
    assert engine.counters.steps >= 40  # every draw of a twin is a tie


def test_margins_say_how_far_a_draw_was_from_another_token():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(2, 1)
    zeros = np.zeros(2, np.int64)
    ids, _, margin, _ = sample(logits, np.array([0.0, 1.0]), np.ones(2), zeros, zeros)
    assert ids[0] == 0
    assert margin[0] == pytest.approx(np.log(0.5 / 0.3), abs=1e-6)
    assert 0 <= margin[1] <= 0.25
    tied = torch.zeros(1, 3)
    assert sample(tied, np.zeros(1), np.ones(1), zeros[:1], zeros[:1])[2][0] < MARGIN


def test_where_drafts_do_not_pay_nothing_is_drafted(model):
    request = Request(ids=prompt(20), max_tokens=30, temperature=0.0)
    (plain,) = run(Engine(model, PLAIN), request)
    engine = engine_of(model, STEEP)
    assert run(engine, drafted(request, plain.ids))[0].ids == plain.ids
    assert engine.counters.drafted_tokens == 0
    alone = Engine(model, deterministic=True)
    assert run(alone, drafted(request, plain.ids))[0] == run(Engine(model, deterministic=True), request)[0]
    assert alone.counters.drafted_tokens == 0


def test_the_curve_is_measured_once_per_model(model):
    engine, other = Engine(model), Engine(model)
    assert engine.runner.speculation.curve is other.runner.speculation.curve
    points = engine.runner.speculation.curve.points
    assert [n for n, _ in points][:4] == [1, 2, 4, 8]
    assert [s for _, s in points] == sorted(s for _, s in points)


@pytest.mark.parametrize("length", [2, 8, 33])
def test_a_short_context_is_measured_too(model, length):
    request = Request(ids=[50], max_tokens=40, temperature=0.0)
    (plain,) = run(Engine(model, EngineConfig(speculate=False), max_length=length), request)
    assert len(plain.ids) == length - 1
    engine = Engine(model, max_length=length)
    assert_same(run(engine, drafted(request, plain.ids))[0], plain)
    assert len(engine.runner.speculation.curve.points) >= 2


def test_bad_sources_are_refused(model):
    with pytest.raises(ValueError, match="token of the prediction is outside the vocabulary"):
        Engine(model).submit(drafted(Request(ids=[1], max_tokens=1), [5, 97]))


def test_a_right_prediction_over_http_is_accepted():
    engine = load_engine(NANO, EngineConfig(cache_mb=64))
    engine.runner.speculation.curve = FLAT
    asked = {"prompt": "def chunk(array, size):\n", "temperature": 0.0, "max_tokens": 60}
    with serving(engine, NANO) as url, httpx2.Client(base_url=url, timeout=120) as http:
        text = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        prediction = {"prediction": {"type": "content", "content": text}}
        same = http.post("/v1/completions", json=asked | prediction).json()
    assert same["choices"][0]["text"] == text
    assert same["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.mark.release
@pytest.mark.slow
def test_450_edits_in_float32_without_a_mismatch():
    """Plain greedy answers of the bundled model, edited in several places, are the drafts of the same requests."""
    from etude.models.loading import load_model

    model = load_model(NANO)
    rng = np.random.default_rng(0)
    requests = [Request(ids=rng.integers(32, 4096, 40).tolist(), max_tokens=60, temperature=0.0) for _ in range(450)]
    plain = run(Engine(model, EngineConfig(max_batch=32, speculate=False)), *requests)
    drafts = [drafted(r, damaged(g.ids, i)) for i, (r, g) in enumerate(zip(requests, plain, strict=True))]
    fast = run(engine_of(model, max_batch=32), *drafts)
    assert [g.ids for g in fast] == [g.ids for g in plain]
