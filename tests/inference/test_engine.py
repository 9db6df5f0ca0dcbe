"""The engine against plain forward passes of the same model.

Log-probability tolerance 2e-4: fp32 on both sides, but the engine's attention sums in another order and its GEMMs run
at other batch sizes; through four layers of a model with wide weights that moves logits of size 30 by a few 1e-5.
"""

import msgspec
import numpy as np
import pytest
import torch

from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request, RequestFailed
from etude.models import attention, experts
from etude.models.kernels import BLOCK
from tests.helpers.tiny_models import random_model

TOLERANCE = 2e-4


def model_of(kind="moe", seed=0, **sizes):
    model = random_model(kind, seed, **sizes)
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


@pytest.fixture(scope="module")
def model():
    return model_of()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(7, 97, length).tolist()


def run(engine, *requests):
    sequences = [engine.submit(request) for request in requests]
    for _ in range(2000):
        if all(sequence.future.done() for sequence in sequences):
            return [sequence.future.result() for sequence in sequences]
        engine.step()
    raise AssertionError("the requests did not finish")


@torch.no_grad()
def score(model, request, generation):
    """Log-probabilities of the sampled tokens by one plain forward pass."""
    ids = torch.tensor([request.ids + generation.ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(request.ids) - 1 : -1]
    log_probs = torch.log_softmax(logits / (request.temperature or 1.0), dim=-1)
    return log_probs.gather(1, ids[0, len(request.ids) :, None]).squeeze(1).numpy()


def assert_same(a, b):
    assert a.ids == b.ids
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
def test_logprobs_are_those_of_a_plain_forward_pass(kind):
    model = model_of(kind)
    requests = [Request(ids=prompt(n, n), max_tokens=40, seed=n, temperature=t) for n, t in ((5, 1.0), (70, 0.7))]
    for request, generation in zip(requests, run(Engine(model), *requests), strict=True):
        assert len(generation.ids) == 40
        assert generation.finish_reason == "length"
        np.testing.assert_allclose(generation.logprobs, score(model, request, generation), atol=TOLERANCE)


def test_bfloat16_agrees_with_a_plain_forward_pass_and_a_float32_head():
    """Dense, because a rounding may flip an expert. The two sum in other orders, and roundings of 2^-8 in three layers
    of wide weights were seen to cost .004 to .006 on average; twice that is allowed."""
    model = model_of("qwen3").to(torch.bfloat16)
    request = Request(ids=prompt(40), max_tokens=200, seed=1)
    (generation,) = run(Engine(model), request)
    ids = torch.tensor([request.ids + generation.ids])
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, len(request.ids) - 1 : -1]
        logits = hidden.float() @ model.get_output_embeddings().weight.float().T
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(request.ids) :, None]).squeeze(1).numpy()
    assert np.abs(generation.logprobs - expected).mean() < 0.012


def test_batching_and_chunked_prefill_change_nothing(model):
    requests = [Request(ids=prompt(10 + 9 * i, i), max_tokens=5 + 7 * i, seed=i, temperature=i % 2) for i in range(9)]
    batched = run(Engine(model, EngineConfig(prefill_tokens=48, max_batch=5)), *requests)
    for request, generation in zip(requests, batched, strict=True):
        assert_same(generation, run(Engine(model), request)[0])


def test_two_threads_compute_the_same(model):
    """Beside one thread, long runs are PyTorch's where kernels of one thread would be slower."""
    request = Request(ids=prompt(400), max_tokens=4, temperature=0.0)
    alone = run(Engine(model, EngineConfig(speculate=False)), request)[0]
    torch.set_num_threads(2)
    assert_same(run(Engine(model, EngineConfig(speculate=False)), request)[0], alone)


def test_groups_prefill_their_prompt_once(model):
    engine = Engine(model)
    ids = prompt(75)
    requests = [Request(ids=ids, max_tokens=12, seed=i) for i in range(6)]
    generations = run(engine, *requests)
    assert engine.counters.prefilled_tokens == 75 + 5  # the last prompt token of each other member
    assert [g.cached_tokens for g in generations] == [0] + [74] * 5
    assert len({tuple(g.ids) for g in generations}) == 6
    for request, generation in zip(requests, generations, strict=True):
        assert_same(generation, run(Engine(model), request)[0])


def test_a_group_costs_one_prompt_and_its_completions_under_every_version():
    """Tokens fed, counted in the passes themselves: one prompt and all completions, less 1. Each member but one feeds
    the prompt's last token again, and none its own last."""
    model, fed = model_of(), []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, options: fed.append(len(getattr(options["layout"], "row_N", ()))), with_kwargs=True
    )
    try:
        engine = Engine(model, EngineConfig(prefill_tokens=40, speculate=False))
        fed.clear()
        for version in (0, 1):
            if version:
                engine.swap(1, scale(model, 0.9))
            group = run(engine, *(Request(ids=prompt(75), max_tokens=5 + 3 * i, seed=i) for i in range(6)))
            completions = sum(len(g.ids) for g in group)
            assert sum(fed) == 75 + completions - 1
            assert [g.cached_tokens for g in group] == [0] + [74] * 5, "keys of older weights serve no new group"
            fed.clear()
    finally:
        handle.remove()


def test_the_next_turn_finds_the_last_one(model):
    engine = Engine(model, routes=True)
    first = Request(ids=prompt(40), max_tokens=30, seed=1)
    turn = run(engine, first)[0]
    second = Request(ids=first.ids + turn.ids + prompt(11, 3), max_tokens=8, seed=2, routes_from=0)
    warm, cold = run(engine, second)[0], run(Engine(model, routes=True), second)[0]
    assert warm.cached_tokens == 40 + 30 - 1  # the last sampled token was never fed
    assert_same(warm, cold)
    assert warm.routes == cold.routes
    assert warm.routes.end == len(second.ids) + 8 - 1
    changed = Request(ids=[*first.ids[:20], 50, *first.ids[21:]], max_tokens=4)
    assert run(engine, changed)[0].cached_tokens == 20


def test_a_full_cache_evicts_and_goes_on(model):
    engine = Engine(model, EngineConfig(cache_mb=8 * BLOCK * 4 * 2 * 2 * 64 * 4 / 2**20), max_length=128)
    assert engine.cache.num_pages == 8
    for i in range(12):
        request = Request(ids=prompt(50, i), max_tokens=20, seed=i)
        assert_same(run(engine, request, request)[1], run(Engine(model), request)[0])
    cache = engine.cache
    assert len(cache.free) + len(cache.nodes) == cache.num_pages
    assert cache.idle == len(cache.nodes)
    cache.clear()
    assert sorted(cache.free) == list(range(8))


def test_seeds_decide(model):
    a, b, c = (run(Engine(model), Request(ids=prompt(9), max_tokens=20, seed=s))[0] for s in (1, 1, 2))
    assert a == b
    assert a.ids != c.ids


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
def test_deterministic_mode_is_bitwise_however_it_is_batched(kind):
    """Groups that share a prompt, sequences of many lengths, prompts cut into chunks, a next turn from the cache."""
    model = model_of(kind)
    requests = [
        Request(ids=prompt(9 + 13 * (i // 3), i // 3), max_tokens=3 + 9 * i, seed=i, temperature=(0.0, 0.7, 1.0)[i % 3])
        for i in range(12)
    ]
    engine = Engine(model, EngineConfig(prefill_tokens=37, max_batch=7), deterministic=True)
    together = run(engine, *requests)
    assert sum(g.cached_tokens for g in together) > 100
    turn = Request(ids=requests[9].ids + together[9].ids + prompt(5), max_tokens=9)
    together += run(engine, turn)
    assert together[-1].cached_tokens > 100
    for request, generation in zip([*requests, turn], together, strict=True):
        (alone,) = run(Engine(model, deterministic=True), request)
        assert alone.ids == generation.ids
        assert alone.logprobs == generation.logprobs, "every bit"


def test_deterministic_mode_in_bfloat16_runs_alone():
    model = model_of("qwen3").to(torch.bfloat16)
    requests = [Request(ids=prompt(33), max_tokens=12, seed=i) for i in range(3)]
    together = run(Engine(model, deterministic=True), *requests)
    assert together == [run(Engine(model, deterministic=True), request)[0] for request in requests]
    assert [g.cached_tokens for g in together] == [0, 0, 0]


def test_stop_ids(model):
    free = run(Engine(model), Request(ids=prompt(9), max_tokens=30, seed=5))[0]
    stop = free.ids[7]
    stopped = run(Engine(model), Request(ids=prompt(9), max_tokens=30, seed=5, stop=(3, stop)))[0]
    cut = free.ids.index(stop) + 1
    assert stopped.ids == free.ids[:cut]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.versions) == cut


def scale(model, factor):
    """A weight update: every tensor scaled."""

    @torch.no_grad()
    def apply():
        for p in model.parameters():
            p.mul_(factor)

    return apply


def test_a_swap_in_the_middle_tags_tokens_and_loses_nothing():
    model = model_of()
    engine = Engine(model)
    sequences = [
        engine.submit(Request(ids=prompt(20 + i, i), max_tokens=20, seed=i, session=f"s{i}")) for i in range(3)
    ]
    for _ in range(8):
        engine.step()
    pause = engine.swap(1, scale(model, 0.9))
    while not all(sequence.future.done() for sequence in sequences):
        engine.step()
    assert pause.result() >= 0.0
    assert engine.version == 1
    for sequence in sequences:
        generation = sequence.future.result()
        assert len(generation.ids) == 20
        assert generation.versions == sorted(generation.versions)
        assert set(generation.versions) == {0, 1}


def test_old_keys_serve_only_their_own_session():
    model = model_of()
    engine = Engine(model)
    ids = prompt(70)
    run(engine, Request(ids=ids, max_tokens=4, session="a"))
    engine.swap(1, scale(model, 0.95))
    own = run(engine, Request(ids=[*ids, 9], max_tokens=4, session="a"))[0]
    assert own.cached_tokens == 70
    other = Request(ids=[*ids, 9], max_tokens=4, session="b")
    cold = run(engine, other)[0]
    assert cold.cached_tokens == 0
    assert_same(cold, run(Engine(model), other)[0])
    assert run(engine, Request(ids=[*ids, 8], max_tokens=4, session="c"))[0].cached_tokens == 70


def test_abort_returns_what_there_is(model):
    engine = Engine(model)
    sequences = [engine.submit(Request(ids=prompt(20, i), max_tokens=50, seed=i)) for i in range(2)]
    for _ in range(5):
        engine.step()
    sequences[0].abort()
    while not sequences[1].future.done():
        engine.step()
    aborted = sequences[0].future.result()
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.ids) < 50
    assert len(sequences[1].future.result().ids) == 50


def test_pause_modes(model):
    engine = Engine(model)
    sequence = engine.submit(Request(ids=prompt(20), max_tokens=10))
    engine.step()
    engine.pause("keep")
    for _ in range(30):
        engine.step()
    assert not sequence.future.done()
    engine.resume()
    engine.step()
    engine.pause("wait")
    waiting = engine.submit(Request(ids=prompt(20), max_tokens=3))
    for _ in range(30):
        engine.step()
    assert len(sequence.future.result().ids) == 10
    assert not waiting.future.done()
    assert not engine.cache.nodes  # forgotten once nothing ran
    engine.pause("abort")
    engine.step()
    assert waiting.future.result().finish_reason == "abort"
    with pytest.raises(ValueError, match="not one of"):
        engine.pause("later")


def test_experts_are_the_routers_choice(model):
    request = Request(ids=prompt(45), max_tokens=10, seed=3, routes_from=0)
    engine = Engine(model, routes=True)
    generation = run(engine, request)[0]
    recorded = generation.routes.array()
    assert recorded.shape == (45 + 10 - 1, 2, 2)
    assert len(generation.routes.ids) == recorded.size, "a byte each"
    ids = torch.tensor([request.ids + generation.ids[:-1]])
    with torch.no_grad():
        logits = model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    for layer, logits_TE in enumerate(logits):
        assert np.array_equal(recorded[:, layer], logits_TE.softmax(-1).topk(2).indices.numpy())
    for first in (1, 31, 32, 44):
        later = run(engine, msgspec.structs.replace(request, routes_from=first))[0].routes
        assert (later.first, later.end) == (first, 54)
        assert np.array_equal(later.array(), recorded[first:])
    assert run(engine, msgspec.structs.replace(request, routes_from=None))[0].routes is None


def test_routes_of_a_cached_prompt_are_those_it_was_computed_with(model):
    """A prompt computed in one batch may have other experts than in another: returned are those stored beside its keys.

    So the ids in the cache are made recognisable, and come back through whole blocks and through the copied tail."""
    engine = Engine(model, routes=True)
    ids = prompt(75)
    run(engine, Request(ids=ids, max_tokens=1))
    with torch.inference_mode():
        engine.cache.experts += 100
    hit = run(engine, Request(ids=ids, max_tokens=4, seed=2, routes_from=0))[0]
    assert hit.cached_tokens == 74
    assert (hit.routes.array()[:74] >= 100).all()
    assert (hit.routes.array()[74:] < 8).all()


def test_routes_of_more_than_256_experts_and_of_none(model):
    wide = model_of(num_experts=257)
    dense = model_of("qwen3")
    for other, layers in ((wide, 2), (dense, 0)):
        request = Request(ids=prompt(40), max_tokens=3, routes_from=2)
        routes = run(Engine(other, routes=True), request)[0].routes
        if not layers:
            assert routes is None
            continue
        assert routes.wide
        with torch.no_grad():
            logits = other(input_ids=torch.tensor([request.ids]), output_router_logits=True).router_logits
        expected = torch.stack([x.softmax(-1).topk(2).indices for x in logits], 1).numpy()
        assert np.array_equal(routes.array()[:38], expected[2:])
    assert Engine(model).cache.experts is None
    with pytest.raises(ValueError, match="start it with --routes"):
        Engine(model).submit(Request(ids=prompt(5), max_tokens=1, routes_from=0))


def test_bad_requests(model):
    engine = Engine(model, max_length=64)
    for request, message in (
        (Request(ids=[], max_tokens=1), "empty"),
        (Request(ids=prompt(64), max_tokens=1), "context length is 64 tokens"),
        (Request(ids=[97], max_tokens=1), "outside the vocabulary"),
        (Request(ids=[1], max_tokens=0), "max_tokens"),
        (Request(ids=[1], max_tokens=1, temperature=-1.0), "temperature"),
        (Request(ids=[1], max_tokens=1, top_p=0.0), "top_p"),
        (Request(ids=[1], max_tokens=1, seed=-1), "seed"),
        (Request(ids=[1], max_tokens=1, routes_from=1), "routes_from must be a position of the prompt of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    clipped = run(engine, Request(ids=prompt(60), max_tokens=100))[0]
    assert len(clipped.ids) == 4
    assert clipped.finish_reason == "length"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the traceback, for an operator
def test_broken_weights_end_the_engine_with_a_reason():
    model = model_of()
    engine = Engine(model)
    engine.start()
    sequence = engine.submit(Request(ids=prompt(9), max_tokens=400))
    engine.swap(3, scale(model, float("nan"))).result(30)
    with pytest.raises(FloatingPointError, match="version 3"):
        sequence.future.result(30)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Request(ids=prompt(9), max_tokens=1))
    engine.close()


# A request that cannot be computed fails alone ------------------------------------------------------------------------


def outcome(engine, *requests, on_token=None):
    """Generations and errors, once all have ended."""
    sequences = [engine.submit(request, on_token if i == 0 else None) for i, request in enumerate(requests)]
    for _ in range(2000):
        if all(sequence.future.done() for sequence in sequences):
            return [sequence.future.exception() or sequence.future.result() for sequence in sequences]
        engine.step()
    raise AssertionError("the requests did not finish")


def assert_nothing_is_held(engine):
    scheduler = engine.scheduler
    scheduler.forget()
    assert (scheduler.running, len(scheduler.waiting)) == (0, 0)
    assert len(engine.cache.free) == engine.cache.num_pages
    assert len(scheduler.states.free) == engine.config.max_batch
    assert engine.documents.used == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-37, 9.9e-5])
def test_a_temperature_that_leaves_float32_is_taken_for_0(model, temperature):
    cold, zero = run(
        Engine(model), Request(ids=prompt(9), max_tokens=5, temperature=temperature),
        Request(ids=prompt(9), max_tokens=5, temperature=0.0),
    )  # fmt: skip
    assert_same(cold, zero)


@pytest.mark.parametrize("temperature", [1e-4, 1e-3, 1e6])
@pytest.mark.parametrize("top_p", [5e-324, 1.0])
def test_extreme_options_are_sampled_from_a_distribution(model, temperature, top_p):
    got = run(Engine(model), Request(ids=prompt(9), max_tokens=5, temperature=temperature, top_p=top_p))[0]
    assert len(got.ids) == 5
    assert np.isfinite(got.logprobs).all()


@pytest.mark.parametrize("wrong", [
    {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 1e7}, {"top_p": float("nan")},
    {"stop": (-1,)}, {"stop": (2**31,)}, {"stop": (2**70,)}, {"seed": 2**70}, {"ids": [2**70]},
    {"max_tokens": -(2**70)},
])  # fmt: skip
def test_numbers_beyond_their_range_are_refused_before_they_are_queued(model, wrong):
    with pytest.raises(ValueError, match=r"must lie|at least 1|outside the vocabulary"):
        Engine(model).submit(msgspec.structs.replace(Request(ids=prompt(5), max_tokens=1), **wrong))


POISON = 13


def poisoned(model, how):
    """An engine in whose passes the token `POISON` goes wrong, as `how` says."""
    engine = Engine(model, EngineConfig(prefill_tokens=64))
    decoder = model.get_decoder()

    def before(_, args, kwargs):
        if how == "raise" and (kwargs["input_ids"] == POISON).any():
            raise IndexError("no such row")

    def after(_, args, kwargs, output):
        if how == "nan":
            output.last_hidden_state[kwargs["input_ids"] == POISON] = float("nan")

    hooks = [decoder.register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [decoder.register_forward_hook(after, with_kwargs=True)]
    return engine, hooks


def without_poison(length, seed=0):
    return [token if token != POISON else POISON + 1 for token in prompt(length, seed)]


@pytest.mark.parametrize("how", ["nan", "raise"])
@pytest.mark.parametrize("place", ["short", "in an earlier chunk"])
def test_a_row_that_cannot_be_computed_fails_alone(how, place):
    model = model_of(seed=3)
    good = [Request(ids=without_poison(9, seed), max_tokens=6, temperature=0.0) for seed in range(3)]
    expected = run(Engine(model), *good)
    bad = [*without_poison(8), POISON] if how == "nan" or place == "short" else [POISON, *without_poison(150)]
    engine, hooks = poisoned(model, how)
    try:
        first, failure, *others = outcome(engine, good[0], Request(ids=bad, max_tokens=6), *good[1:])
        assert isinstance(failure, RequestFailed)
        assert ("not finite" if how == "nan" else "no such row") in str(failure)
        for got, want in zip((first, *others), expected, strict=True):
            if POISON not in got.ids[:-1]:
                assert_same(got, want)
        assert engine.counters.failed == 1
        assert_nothing_is_held(engine)
        # The same words again, after those that failed: nothing of them was kept.
        assert isinstance(outcome(engine, Request(ids=bad, max_tokens=6))[0], RequestFailed)
        assert_same(run(engine, good[0])[0], first)
    finally:
        for hook in hooks:
            hook.remove()


def test_a_score_that_cannot_be_computed_fails_alone():
    engine, hooks = poisoned(model_of(seed=3), "raise")
    futures = [engine.score([1, *ids, 2]) for ids in ([3], [POISON], [3])]
    for _ in futures:
        engine.step()
    assert futures[0].result(0) == futures[2].result(0)
    with pytest.raises(RequestFailed, match="no such row"):
        futures[1].result(0)
    for hook in hooks:
        hook.remove()


def test_a_listener_that_raises_loses_its_own_request(model):
    def gone(token, logprob):
        raise RuntimeError("Event loop is closed")

    request = Request(ids=prompt(9), max_tokens=6)
    engine = Engine(model)
    lost, kept = outcome(engine, request, request, on_token=gone)
    assert "Event loop is closed" in str(lost)
    assert len(kept.ids) == 6
    assert_nothing_is_held(engine)


def test_a_request_that_cannot_be_admitted_fails_alone(model, monkeypatch):
    engine, request = Engine(model), Request(ids=prompt(9), max_tokens=6, seed=1)
    opened = engine.scheduler.states.open

    def open_(sequence):
        opened(sequence)
        if sequence.request.seed == 2:
            raise OverflowError("too large")

    monkeypatch.setattr(engine.scheduler.states, "open", open_)
    lost, kept = outcome(engine, msgspec.structs.replace(request, seed=2), request)
    assert isinstance(lost, RequestFailed)
    assert len(kept.ids) == 6
    assert_nothing_is_held(engine)


def test_a_document_that_cannot_be_computed_fails_its_requests_alone():
    model = model_of(seed=3)
    engine, hooks = poisoned(model, "none")
    documents = without_poison(40, 1), [*without_poison(40, 2), POISON]
    compute = engine.documents._compute

    def raising(parts):
        if any(len(document) == 41 for document, _ in parts):
            raise IndexError("no such row")
        compute(parts)

    engine.documents._compute = raising
    requests = [Request(ids=without_poison(5), documents=(document,), max_tokens=3) for document in documents]
    kept, lost = outcome(engine, *requests)
    assert len(kept.ids) == 3
    assert isinstance(lost, RequestFailed)
    assert_nothing_is_held(engine)
    for hook in hooks:
        hook.remove()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_every_request_meets_ends_the_engine(monkeypatch):
    engine = Engine(model_of())

    def broken(*_, **__):
        raise OSError("the device is gone")

    engine.model.get_decoder().register_forward_pre_hook(broken)
    engine.start()
    with pytest.raises(OSError, match="the device is gone"):
        engine.submit(Request(ids=prompt(9), max_tokens=4)).future.result(30)
    engine.close()
    assert isinstance(engine.failure, OSError)
