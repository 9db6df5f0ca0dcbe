"""Documents against one masked forward pass of the same model over the segment graph that training uses.

Tolerance of logits 1e-5: float32 on both sides, logits of size 2 in this model; what differs is the order of sums in
attention and the size of passes. Plain prompts differ from plain forward passes by as much. Log-probabilities of two
engines may differ by twice that.
"""

from itertools import accumulate, permutations

import numpy as np
import pytest
import torch
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from etude.config import EngineConfig
from etude.inference.engine.cache import PagedCache
from etude.inference.engine.documents import Documents
from etude.inference.engine.engine import Engine
from etude.inference.engine.forward import logits_of
from etude.inference.engine.requests import Request, RunningSequence
from etude.models import attention, experts
from etude.models.attention import SegmentLayout
from etude.models.document_spans import refusal
from etude.models.kernels import BLOCK
from etude.models.key_values import configured
from etude.models.segments import Graph, Node
from tests.helpers.tiny_models import random_model
from tests.inference.test_engine import run, scale

TOLERANCE = 1e-5
TOKEN_BYTES = 2 * 4 * 2 * 64 * 4  # keys and values, layers, heads, size, float32


def ours(model):
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model.eval()


def model_of(kind="moe", seed=0, **overrides):
    return ours(random_model(kind, seed, initializer_range=0.1, **overrides))


@pytest.fixture(scope="module")
def model():
    return model_of()


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(7, 97, length).tolist()


DOCUMENTS = [tokens(n, n) for n in (40, 1, 33, 64)]  # within, across and at the ends of blocks
TAIL = tokens(21, 99)


def graph_of(documents, tail):
    starts = list(accumulate(map(len, documents), initial=0))
    nodes = [Node(np.array(ids), start) for ids, start in zip(documents, starts, strict=False)]
    return Graph((*nodes, Node(np.array(tail), starts[-1], tuple(range(len(documents))))))


@torch.no_grad()
def masked(model, documents, tail, **options):
    """The model's output for every token of the tail, by one masked forward pass."""
    graph = graph_of(documents, tail)
    ids, positions = (torch.from_numpy(x)[None] for x in (graph.ids_T, graph.positions_T))
    out = model(input_ids=ids, position_ids=positions, layout=SegmentLayout(graph), use_cache=False, **options)
    return out, out.logits[0, -len(tail) :]


class Bench:
    """The document cache and the pages of one sequence at a time, without an engine around them."""

    def __init__(self, model, num_bytes=2**26):
        self.model = model
        self.cache = PagedCache(
            configured(model.config), num_bytes=2**22, max_length=512, dtype=torch.float32, device=torch.device("cpu")
        )
        self.documents = Documents(model, self.cache, num_bytes, routes=False)

    @torch.inference_mode()
    def logits(self, documents, tail):
        """Of every token of the tail, and how many document tokens were there before."""
        sequence = RunningSequence(Request(ids=tail, max_tokens=1, documents=tuple(documents)), None, None)
        while not self.documents.gather(sequence, 0, 0):
            assert self.documents.compute(50, 0, serial=False)
        sequence.pages = list(range(-(-len(sequence.request.prompt) // BLOCK)))
        cached = self.documents.assemble(sequence, 0)
        table = np.array([sequence.pages], dtype=np.int32)
        position_N = np.arange(sequence.request.document_tokens, len(sequence.request.prompt))
        every_N = np.arange(len(tail))
        return logits_of(self.model, self.cache, table, np.array(tail), 0 * every_N, position_N, every_N), cached


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("moe", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_every_order_gives_the_logits_of_one_masked_pass(kind, overrides):
    model, cached = model_of(kind, **overrides), []
    bench = Bench(model)
    for order in permutations(DOCUMENTS):
        logits, before = bench.logits(order, TAIL)
        cached.append(before)
        assert (logits - masked(model, order, TAIL)[1]).abs().max() <= TOLERANCE
    assert cached == [0] + [sum(map(len, DOCUMENTS))] * 23, "computed once for all 24 orders"
    # The test can fail: the plain prompt of the same tokens is another function, and so is another order.
    plain = [token for document in DOCUMENTS for token in document]
    expected = masked(model, DOCUMENTS, TAIL)[1]
    assert (masked(model, [plain], TAIL)[1] - expected).abs().max() > 100 * TOLERANCE
    assert (masked(model, DOCUMENTS[::-1], TAIL)[1] - expected).abs().max() > 100 * TOLERANCE


def test_keys_are_rotated_once_and_as_the_model_does():
    """First-layer keys depend on token and position alone: they are equal in every bit, in bfloat16 as well."""
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of("qwen3").to(dtype)
        bench = Bench(model)
        bench.logits(DOCUMENTS[::-1], TAIL)
        bench.logits(DOCUMENTS, TAIL)
        graph = graph_of(DOCUMENTS, TAIL)
        layout = SegmentLayout(graph, keep=True)
        with torch.no_grad():
            model.get_decoder()(
                input_ids=torch.from_numpy(graph.ids_T)[None], position_ids=torch.from_numpy(graph.positions_T)[None],
                layout=layout, use_cache=False,
            )  # fmt: skip
        count = sum(map(len, DOCUMENTS))
        pages = bench.cache.keys[0, : -(-count // BLOCK)].transpose(1, 2).flatten(0, 1)[:count]
        assert torch.equal(pages, layout.kept[0][0][0].transpose(0, 1)[:count].float())


@pytest.mark.parametrize("kind", ["moe", "llama"])
def test_one_kernel_places_documents_in_the_bits_of_the_models_function(kind):
    """Also where the prefix cache has come to hold the first two of them and a part of the third."""
    model = model_of(kind)
    pages = []
    for placeable in (True, False):
        bench = Bench(model)
        assert bench.documents._placeable
        bench.documents._placeable = placeable
        bench.logits(DOCUMENTS, TAIL)
        bench.cache.keys[:] = bench.cache.values[:] = 0.0
        sequence = RunningSequence(Request(ids=TAIL, max_tokens=1, documents=tuple(DOCUMENTS)), None, None)
        assert bench.documents.gather(sequence, 0, 0)
        sequence.pages = list(range(9, 0, -1))
        bench.documents.assemble(sequence, 50)
        pages.append((bench.cache.keys.clone(), bench.cache.values.clone()))
    for ours, theirs in zip(*pages, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.abs().sum() > 0


def test_other_rotations_and_types_are_placed_by_the_models_function():
    """GLM rotates half of a key, in neighbouring pairs; the kernel rotates in halves, in float32."""
    glm = ours(
        GlmForCausalLM(
            GlmConfig(
                vocab_size=97, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=64, max_position_embeddings=512, pad_token_id=0, eos_token_id=6,
            )
        )
    )  # fmt: skip
    narrow = Bench(model_of("qwen3").bfloat16())
    assert not narrow.documents.refusal
    assert not narrow.documents._placeable
    bench = Bench(glm)
    assert not bench.documents.refusal
    assert not bench.documents._placeable
    for order in (DOCUMENTS, DOCUMENTS[::-1]):
        assert (bench.logits(order, TAIL)[0] - masked(glm, order, TAIL)[1]).abs().max() <= TOLERANCE


def assert_greedy(model, documents, tail, generation):
    """Each token is the masked pass's own choice after those before it."""
    _, logits = masked(model, documents, tail + generation.ids[:-1])
    expected = logits[len(tail) - 1 :].argmax(-1).tolist()
    assert generation.ids == expected


def ask(documents=DOCUMENTS, tail=TAIL, **options):
    return Request(ids=list(tail), documents=tuple(documents), **({"max_tokens": 6, "temperature": 0.0} | options))


def test_greedy_tokens_are_those_of_masked_passes_and_reordering_recomputes_nothing(model):
    engine = Engine(model)
    orders = list(permutations(DOCUMENTS))
    generations = run(engine, *map(ask, orders))
    total = sum(map(len, DOCUMENTS))
    for order, generation in zip(orders, generations, strict=True):
        assert_greedy(model, order, TAIL, generation)
    assert [g.cached_document_tokens for g in generations] == [0] + [total] * 23
    counters = engine.documents.counters
    assert (counters.misses, counters.missed_tokens) == (4, total)
    assert counters.hits == 4 * 23
    again = run(engine, ask(orders[0], tokens(9)))[0]
    assert again.cached_tokens == again.cached_document_tokens == total


def assert_same(a, b):
    assert a.ids == b.ids
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2 * TOLERANCE)


def test_with_plain_requests_chunks_and_speculation_beside_them(model):
    """Batches, prompts in chunks, drafts from the documents: nothing changes what comes out."""
    requests = [
        ask(DOCUMENTS[i % 3 :], tokens(5 + i, i), seed=i, temperature=i % 2, max_tokens=20) if i % 3
        else Request(ids=tokens(50, i), max_tokens=20, seed=i)
        for i in range(10)
    ]  # fmt: skip
    engine = Engine(model, EngineConfig(prefill_tokens=24, max_batch=4))
    for request, generation in zip(requests, run(engine, *requests), strict=True):
        assert_same(generation, run(Engine(model, EngineConfig(speculate=False)), request)[0])


def test_equal_tokens_in_other_documents_are_another_prompt(model):
    """The prefix cache never takes one for the other, whichever comes first."""
    flat = [token for document in DOCUMENTS for token in document]
    cuts = [flat[:50], flat[50:]]
    requests = [
        Request(ids=flat + TAIL, max_tokens=6, temperature=0.0),
        ask(),
        ask([flat]),
        ask(cuts),
        ask(DOCUMENTS[:2], [token for document in DOCUMENTS[2:] for token in document] + TAIL),
    ]
    alone = [run(Engine(model), request)[0] for request in requests]
    assert len({tuple(g.logprobs) for g in alone}) == 5
    for order in (range(5), range(4, -1, -1)):
        engine = Engine(model)
        for i in order:
            assert_same(run(engine, requests[i])[0], alone[i])


def test_the_next_turn_and_a_group_find_their_prefix(model):
    engine = Engine(model)
    total = sum(map(len, DOCUMENTS))
    group = run(engine, *(ask(tail=tokens(30, 5), temperature=1.0, seed=i) for i in range(4)))
    assert [g.cached_tokens for g in group] == [0] + [total + 29] * 3
    following = ask(tail=tokens(30, 5) + group[2].ids + tokens(7, 6))
    warm = run(engine, following)[0]
    assert warm.cached_tokens == total + 30 + len(group[2].ids) - 1
    assert warm.cached_document_tokens == total
    assert_same(warm, run(Engine(model), following)[0])
    counters = engine.documents.counters
    assert (counters.misses, counters.hits) == (4, 12), "what the prefix cache holds is not looked up"


def test_eviction_under_load_keeps_results(model):
    pool = [tokens(30, 100 + i) for i in range(8)]
    engine = Engine(model, EngineConfig(documents_mb=100 * TOKEN_BYTES / 2**20, max_batch=3, prefill_tokens=32))
    rng = np.random.default_rng(0)
    requests = [
        ask([pool[j] for j in rng.permutation(8)[: 1 + i % 3]], tokens(8, i), max_tokens=1 + i % 7) for i in range(30)
    ]
    generations = run(engine, *requests)
    for request, generation in zip(requests, generations, strict=True):
        assert_greedy(model, request.documents, request.ids, generation)
    documents = engine.documents
    assert documents.counters.evictions > 0
    assert documents.used <= documents.budget
    assert all(entry.users == 0 and entry.ready for entry in documents._entries.values())
    engine.pause("wait", clear_cache=True)
    engine.step()
    assert (documents.used, documents._entries) == (0, {})


def test_a_new_version_misses():
    model = model_of()
    engine = Engine(model)
    before = run(engine, ask())[0]
    engine.swap(1, scale(model, 0.9))
    after = run(engine, ask())[0]
    assert (after.cached_document_tokens, set(after.versions)) == (0, {1})
    assert engine.documents.counters.misses == 8
    assert_greedy(model, DOCUMENTS, TAIL, after)
    assert after.logprobs != before.logprobs


def test_a_swap_before_assembly_begins_again():
    """Half of the documents are computed by the old weights: none of that is used."""
    model = model_of()
    engine = Engine(model, EngineConfig(prefill_tokens=16))
    sequence = engine.submit(ask())
    for _ in range(4):
        engine.step()
    assert 0 < sum(entry.document.computed for entry in engine.documents._entries.values()) < 138
    engine.swap(1, scale(model, 0.9))
    while not sequence.future.done():
        engine.step()
    generation = sequence.future.result()
    assert set(generation.versions) == {1}
    assert_greedy(model, DOCUMENTS, TAIL, generation)
    assert {key.version for key in engine.documents._entries} == {1}


def test_a_swap_after_assembly_keeps_what_the_request_has():
    model = model_of()
    engine = Engine(model)
    sequence = engine.submit(ask(max_tokens=12, session="s"))
    while not sequence.fed:
        engine.step()
    for _ in range(3):
        engine.step()
    engine.swap(1, scale(model, 0.9))
    while not sequence.future.done():
        engine.step()
    generation = sequence.future.result()
    assert sorted(generation.versions) == generation.versions
    assert set(generation.versions) == {0, 1}
    old = model_of()
    count = generation.versions.count(0)
    _, logits = masked(old, DOCUMENTS, TAIL + generation.ids[: count - 1])
    assert generation.ids[:count] == logits[len(TAIL) - 1 :].argmax(-1).tolist()
    # The request's own prefix goes on; another one's documents are new.
    same, other = run(engine, ask(session="s")), run(engine, ask(session="t"))
    assert (same[0].cached_document_tokens, other[0].cached_document_tokens) == (138, 0)
    assert_greedy(model, DOCUMENTS, TAIL, other[0])


def test_deterministic_bits_do_not_depend_on_what_is_cached(model):
    cold = run(Engine(model, deterministic=True), ask(temperature=1.0))[0]
    engine = Engine(model, deterministic=True)
    run(engine, ask(DOCUMENTS[2:] + DOCUMENTS[:1], tokens(12)), ask(DOCUMENTS[1:2], tokens(3)))
    warm = run(engine, ask(temperature=1.0))[0]
    assert (warm.ids, warm.logprobs) == (cold.ids, cold.logprobs)
    assert (cold.cached_document_tokens, warm.cached_document_tokens) == (0, 138)


def test_experts_are_those_of_the_masked_pass(model):
    engine = Engine(model, routes=True)
    run(engine, ask(DOCUMENTS[::-1]))
    generation = run(engine, ask(routes_from=0))[0]
    assert generation.cached_document_tokens == 138
    recorded = generation.routes.array()
    out, _ = masked(model, DOCUMENTS, TAIL + generation.ids[:-1], output_router_logits=True)
    assert recorded.shape[0] == out.router_logits[0].shape[0]
    for layer, logits_TE in enumerate(out.router_logits):
        assert np.array_equal(recorded[:, layer], logits_TE.softmax(-1).topk(2).indices.numpy())


def test_aborted_requests_let_go(model):
    engine = Engine(model, EngineConfig(prefill_tokens=8, documents_mb=140 * TOKEN_BYTES / 2**20))
    sequences = [engine.submit(ask()), engine.submit(ask([tokens(80, 1)]))]  # the second waits for room
    for _ in range(3):
        engine.step()
    for sequence in sequences:
        sequence.abort()
    engine.step()
    assert [sequence.future.result().finish_reason for sequence in sequences] == ["abort", "abort"]
    assert (engine.documents.used, list(engine.documents._todo)) == (0, [])
    assert_greedy(model, DOCUMENTS[:1], TAIL, run(engine, ask(DOCUMENTS[:1]))[0])


def test_a_request_that_needs_all_the_room_gets_it_though_small_ones_keep_coming(model):
    engine = Engine(model, EngineConfig(prefill_tokens=16, max_batch=4, documents_mb=140 * TOKEN_BYTES / 2**20))
    small = [engine.submit(ask([tokens(40, 200)]))]
    engine.step()
    large = engine.submit(ask())
    for i in range(200):
        if large.future.done():
            break
        small.append(engine.submit(ask([tokens(40, 201 + i)])))
        engine.step()
    assert_greedy(model, DOCUMENTS, TAIL, large.future.result(0))
    while not all(sequence.future.done() for sequence in small):
        engine.step()


def test_a_document_given_twice_is_computed_once(model):
    engine = Engine(model)
    twice = [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[0]]
    generation = run(engine, ask(twice))[0]
    assert_greedy(model, twice, TAIL, generation)
    assert generation.cached_document_tokens == 40
    assert (engine.documents.counters.misses, engine.documents.counters.hits) == (2, 1)


def test_what_cannot_be_served_is_one_sentence(model):
    engine = Engine(model, EngineConfig(documents_mb=100 * TOKEN_BYTES / 2**20), max_length=160)
    for request, message in (
        (ask([[8], []]), "document 1 is empty: leave it out"),
        (ask(tail=[]), "nothing follows the documents: add a prompt"),
        (ask([tokens(90), tokens(49)]), "length is 160 tokens, .* 160 tokens, 139 of them documents"),
        (ask([tokens(101)]), "the documents have 101 tokens and the document cache holds 100: send fewer"),
        (ask([tokens(51, 1), tokens(50, 2)]), "the document cache holds"),
        (ask([[97]]), "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    run(engine, ask([tokens(60, 1), tokens(60, 1)]))  # counts once


def test_models_for_which_assembly_is_not_exact_are_refused():
    def rope(kind, **more):
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | more}

    half = [1.0] * 32
    longrope = rope("longrope", short_factor=half, long_factor=half, original_max_position_embeddings=256)
    small = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
    small |= {"num_key_value_heads": 2, "num_hidden_layers": 4}
    recurrent = Qwen3NextConfig(
        **small, num_experts=4, num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4
    )
    some_unrotated = SmolLM3Config(**small, no_rope_layers=[1, 1, 1, 0], pad_token_id=0)
    sliding = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    for model, message in (
        (model_of("qwen3", **rope("dynamic")), "length of the whole prompt"),
        (model_of("qwen3", **longrope), "length of the whole prompt"),
        (model_of("qwen3", **sliding), "sliding_attention"),
        (ours(Qwen3NextForCausalLM(recurrent)), "linear_attention"),
        (ours(SmolLM3ForCausalLM(some_unrotated)), "does not rotate the keys of all layers"),
    ):
        assert message in refusal(model)
    assert refusal(model_of()) == ""
    engine = Engine(model_of("qwen3", **rope("dynamic")))
    with pytest.raises(ValueError, match="send the documents as plain text"):
        engine.submit(ask())
    assert len(run(engine, Request(ids=TAIL, max_tokens=3))[0].ids) == 3
