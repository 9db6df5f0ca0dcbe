"""Rows that begin with documents: every execution against separate rows, those against a dense mask, and against the
engine that sampled them.

Gradients: relative L2 of 2e-6 in float32, the limit of test_execution. Log-probabilities of trainer and engine: 2e-5,
twice what logits of the two may differ by in tests/inference/test_documents.py, for the same reason.
"""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.audit import rescoring
from etude.audit.mismatch import _pieces
from etude.audit.rescoring import set_weights
from etude.config import EngineConfig
from etude.errors import RunFailed
from etude.harness.token_ledger import TokenLedger
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.batch_invariant import batch_invariant
from etude.models.loading import load_model, named_tensors
from etude.models.segments import row_graph, trie
from etude.records import Episode, Outcome, StopReason, decode, encode
from etude.trainer.optimizer import for_policy
from etude.trainer.rl import selfcheck
from etude.trainer.rl.batch import make_batch, token_rows
from etude.trainer.rl.execution import evaluate, run
from etude.trainer.rl.plan import TokenRows, cost, packed, rows, shape_of, streaming
from etude.trainer.rl.step import Learner, train_step
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import flip, new_run, sampled

LIMIT = 2e-6
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=["moe", "llama"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / request.param
    return load_model(save_random_model(folder, request.param, initializer_range=0.05))


def ids(rng, length):
    return rng.integers(0, 97, length)


@st.composite
def libraries(draw):
    """Groups of rows over documents of one pool, in many orders, also none or the same twice; tails that branch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = [ids(rng, n) for n in (1, 9, 20)]
    out, documents = [], []
    for _ in range(draw(st.integers(1, 3))):
        chosen = [pool[i] for i in draw(st.lists(st.integers(0, 2), max_size=3))]
        tails = [ids(rng, draw(st.integers(2, 25)))]
        for _ in range(draw(st.integers(0, 4))):
            parent = tails[draw(st.integers(0, len(tails) - 1))]
            kept = draw(st.sampled_from([1, len(parent) // 2, len(parent) - 1, len(parent)]))
            tails.append(np.concatenate([parent[:kept], ids(rng, draw(st.integers(1, 20)))]))
        out += [np.concatenate([*chosen, tail]) for tail in tails]
        documents += [tuple(map(len, chosen))] * len(tails)
    sampled_ = [
        np.unique(np.append(rng.integers(sum(own) + 1, len(row), 5), len(row) - 1))
        for row, own in zip(out, documents, strict=True)
    ]
    return TokenRows(tuple(out), tuple(sampled_), None, tuple(documents))


def ways(tokens, min_share=2):
    """Packed in one pass and in several; streamed with and without room, kept and computed again."""
    tree = trie(tokens.rows, min_share, documents=tokens.documents, marks=tokens.routes)
    yield packed(tokens, tree, 10_000)
    yield packed(tokens, tree, 40)
    for budget in (10_000, 40):
        yield streaming(tokens, tree, budget)
        yield streaming(tokens, tree, budget, recompute=True)


def a_loss(tokens, seed=0):
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(seed))
    return lambda logprobs_M, item_M: (weight_N[item_M] * logprobs_M).sum() / tokens.count


def gradients(model, parts, tokens, **options):
    model.zero_grad()
    outcome = run(model, parts, tokens.count, a_loss(tokens), **options)
    return outcome, torch.cat([p.grad.flatten().double() for p in model.parameters()])


def apart(ours, truth):
    return float((ours - truth).norm() / truth.norm())


def assert_same(ours, truth, expected, outcome):
    assert apart(ours, truth) <= LIMIT
    assert torch.allclose(outcome.logprobs_N, expected.logprobs_N, atol=1e-5)  # a few units of 2^-23 per layer
    assert torch.equal(outcome.counts_LE, expected.counts_LE), "a shared token counts for every row"


@given(tokens=libraries())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_every_execution_has_the_gradients_of_rows(model, tokens):
    expected, truth = gradients(model, rows(tokens), tokens)
    for parts in ways(tokens):
        outcome, ours = gradients(model, parts, tokens)
        assert_same(ours, truth, expected, outcome)
        assert _stood_for(parts) == sum(map(len, tokens.rows)), "each token of each row is stood for once"


def _stood_for(parts):
    return sum(part.weight_T.sum() + _stood_for(part.children) for part in parts)


@given(tokens=libraries())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_graph_is_the_rule_and_shares_what_is_equal(tokens):
    """A token sees its document, or all documents and its row up to itself; equal documents at one start are one."""
    tree = trie(tokens.rows, 2, documents=tokens.documents)
    ids_T, positions_T, mask = tree.graph.ids_T, tree.graph.positions_T, tree.graph.mask()
    places = set()
    for i, (row, lengths) in enumerate(zip(tokens.rows, tokens.documents, strict=True)):
        where = tree.where(i)
        assert np.array_equal(ids_T[where], row)
        assert np.array_equal(positions_T[where], np.arange(len(row)))
        expected = np.tril(np.ones((len(row), len(row)), bool))
        start = 0
        for length in lengths:
            expected[start : start + length, :start] = False
            places.add((start, tuple(row[start : start + length])))
            start += length
        assert np.array_equal(mask[np.ix_(where, where)], expected)
        assert mask[where].sum() == expected.sum(), "and nothing else"
        assert np.array_equal(row_graph(row, lengths).mask(), expected)
    assert tree.documents == len(places)
    assert tree.weights[: tree.documents].sum() == sum(map(len, tokens.documents))
    for node in range(tree.documents, len(tree.graph.nodes)):
        below = [i for i, other in enumerate(tree.graph.nodes) if node in other.sees]
        assert below == list(range(node + 1, tree.ends[node])), "subtrees are contiguous"


class Dense:
    """Attention under a boolean mask, by the formula."""

    def __init__(self, mask):
        self.mask = torch.from_numpy(mask)

    def attend(self, layer, query, key, value, scale):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return ((query @ key.transpose(2, 3)) * scale).masked_fill(~self.mask, -math.inf).softmax(-1) @ value


def a_group(rng, documents=(17, 30), members=4, prompt=24):
    """Rows of one group: documents, a prompt, completions of uneven lengths; two of them begin alike."""
    shared, first = ids(rng, sum(documents) + prompt), ids(rng, 18)
    tails = [np.concatenate([first if m < 2 else ids(rng, 0), ids(rng, 5 + 4 * m)]) for m in range(members)]
    out = tuple(np.concatenate([shared, tail]) for tail in tails)
    at = tuple(np.arange(len(shared), len(row)) for row in out)
    return TokenRows(out, at, None, (documents,) * members)


def test_rows_are_a_masked_forward_pass(model):
    """Gradients and log-probabilities by autograd through a dense mask, one row at a time."""
    tokens = a_group(np.random.default_rng(0))
    outcome, ours = gradients(model, rows(tokens), tokens)
    loss, start = a_loss(tokens), 0
    model.zero_grad()
    for row, at, lengths in zip(tokens.rows, tokens.sampled, tokens.documents, strict=True):
        ids_T = torch.from_numpy(row)
        layout = Dense(row_graph(row, lengths).mask())
        hidden = model.get_decoder()(
            input_ids=ids_T[None], position_ids=torch.arange(len(row))[None], layout=layout, use_cache=False
        ).last_hidden_state[0]
        logprobs = torch.log_softmax(model.lm_head(hidden[at - 1]), -1).gather(1, ids_T[at][:, None]).squeeze(1)
        item = torch.arange(start, start + len(at))
        assert torch.allclose(outcome.logprobs_N[item], logprobs, atol=1e-5)
        loss(logprobs, item).backward()
        start += len(at)
    truth = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert apart(ours, truth) <= LIMIT
    plain = gradients(model, rows(replace(tokens, documents=None)), tokens)[1]
    assert apart(plain, truth) > 100 * LIMIT, "else documents were nothing special"


def test_the_balance_loss_weighs_documents_by_their_rows(moe):
    """Two groups that share their first document, one of four rows, one of two: it stands for six in one pass, and for
    four and two in two."""
    rng = np.random.default_rng(1)
    one, two = a_group(rng, (17, 30)), a_group(rng, (17, 8), members=2)
    two = replace(two, rows=tuple(np.concatenate([one.rows[0][:17], row[17:]]) for row in two.rows))
    tokens = TokenRows(one.rows + two.rows, one.sampled + two.sampled, None, one.documents + two.documents)
    tree = tokens.tree()
    (whole,) = packed(tokens, tree, 10_000)
    assert whole.weight_T[:17].tolist() == [6.0] * 17
    split = packed(tokens, tree, 150)
    assert [part.weight_T[0] for part in split] == [4.0, 2.0]
    expected, truth = gradients(moe, rows(tokens), tokens, aux=0.1)
    assert apart(gradients(moe, rows(tokens), tokens)[1], truth) > 1e-3, "the balance loss must be felt"
    for parts in ((whole,), split, *ways(tokens)):
        outcome, ours = gradients(moe, parts, tokens, aux=0.1)
        assert_same(ours, truth, expected, outcome)
        assert outcome.aux == pytest.approx(expected.aux, abs=1e-6)


def test_documents_of_a_group_are_computed_once(moe):
    tokens, shape = a_group(np.random.default_rng(2), members=8), shape_of(moe)
    once = 17 + 30 + 24 + 18 + sum(5 + 4 * m for m in range(8))
    assert cost(packed(tokens, tokens.tree(), 10_000), shape).tokens == once
    streamed = streaming(tokens, tokens.tree(), 100)
    assert len(streamed) == 1
    assert len(streamed[0].ids_T) == 17 + 30 + 24, "documents and prompt are the trunk"
    assert cost(streamed, shape).tokens == once
    assert cost(rows(tokens), shape).tokens == sum(map(len, tokens.rows))
    apart_ = replace(tokens, rows=tuple(np.concatenate([r[:47], [m], r[48:]]) for m, r in enumerate(tokens.rows)))
    (trunk,) = streaming(apart_, apart_.tree(), 100)
    assert len(trunk.ids_T) == 47, "prompts that differ hang below a trunk of documents"


@pytest.mark.parametrize("execution", ["packed", "streaming", "recompute"])
def test_the_self_check_knows_documents(moe, execution):
    assert selfcheck.check(moe, a_group(np.random.default_rng(3)), execution) < selfcheck.FLOAT32_LIMIT


def test_documents_without_tokens_or_without_a_prompt_are_refused():
    for lengths in ((0, 2), (4,), (3,)):
        with pytest.raises(ValueError, match="a prompt follows them"):
            TokenRows((np.arange(5),), (np.array([3, 4]),), None, (lengths,))


# --- against the engine --------------------------------------------------------------------------------

DOCUMENTS = [np.random.default_rng(n).integers(7, 97, n).tolist() for n in (40, 1, 33, 64)]


def play(engine, group, documents, members=4, turns=2, routes=False, temperature=1.0):
    """Episodes of `turns` turns by the harness's own ledger; rewards 0, 1, 2, ... in turn."""
    rng = np.random.default_rng(group)
    prompt, result = ids(rng, 21).tolist(), ids(rng, 9).tolist()
    ledgers = [TokenLedger(documents) for _ in range(members)]
    for turn in range(turns):
        for ledger in ledgers:
            ledger.add_environment(result if turn else prompt)
        requests = [
            Request(
                ids=ledger.prompt(), documents=ledger.documents, max_tokens=12 + 3 * m, temperature=temperature,
                seed=100 * group + 10 * turn + m, session=f"{group}-{m}",
                routes_from=ledger.routed if routes else None,
            )
            for m, ledger in enumerate(ledgers)
        ]  # fmt: skip
        for ledger, request, generation in zip(ledgers, requests, sampled(engine, requests), strict=True):
            ledger.add_turn(request.ids, generation)
    return [an_episode(group, m, ledger.segments()) for m, ledger in enumerate(ledgers)]


def an_episode(group, member, segments):
    return Episode(
        id=f"{group}-{member}-0", group_id=group, member=member, attempt=0, task_id="t", seed=1,
        outcome=Outcome.SCORED, stop_reason=StopReason.FINISHED, reward=float(member), passed=member > 0,
        segments=segments, turns=(), metrics={},
    )  # fmt: skip


def test_the_trainer_has_the_log_probabilities_of_the_engine(model):
    """At lag 0, for two groups with documents in other orders, one without, and blobs that were written and read."""
    engine = Engine(model, EngineConfig(prefill_tokens=50))
    groups = [play(engine, 1, DOCUMENTS), play(engine, 2, DOCUMENTS[2:] + DOCUMENTS[:1]), play(engine, 3, [])]
    assert engine.documents.counters.misses == len(DOCUMENTS)
    groups = [[decode(encode(e), Episode) for e in members] for members in groups]
    assert [d.length for d in groups[0][0].segments[0].documents] == [40, 1, 33, 64]
    batch = make_batch((), groups)
    tokens = token_rows(batch.rows)
    recorded_N = torch.from_numpy(
        np.concatenate([s.arrays()[2][s.arrays()[1] == 1] for g in groups for e in g for s in e.segments])
    )
    assert tokens.count == len(recorded_N) > 300
    for parts in (rows(tokens), *ways(tokens, min_share=16)):
        found_N = evaluate(model, parts, tokens.count).logprobs_N
        assert (found_N - recorded_N).abs().max() <= TOLERANCE
    plain_N = evaluate(model, rows(replace(tokens, documents=None)), tokens.count).logprobs_N
    assert (plain_N - recorded_N).abs().max() > 100 * TOLERANCE, "else it would not matter"


def test_the_doctor_scores_documents_as_the_trainer_does(model):
    episodes = play(Engine(model), 1, DOCUMENTS)
    for episode in episodes:
        (piece,) = _pieces(episode)
        assert piece.documents == (40, 1, 33, 64)
        for layout in (None, rescoring.Keys(piece.graph)):
            found_N = rescoring.chosen(rescoring.logits(model, piece, layout=layout), piece)
            assert np.abs(found_N - piece.recorded_N).max() <= TOLERANCE


@pytest.mark.parametrize("execution", ["auto", "rows", "streaming", "recompute"])
def test_a_step_replays_the_experts_of_document_tokens(tmp_path, execution):
    """The engine's routers take other experts; k2 1e-12 is float32 rounding, 1e-4 what other experts make of it."""
    trainer = {"router_replay": True, "lr": 1e-3, "execution": execution, "micro_tokens": 300}
    _, config = new_run(tmp_path, "moe", trainer=trainer)
    model = load_model(config.model.path)
    set_weights(model, {name: t.bfloat16() for name, t in named_tensors(model).items()})  # as they are published
    engine = Engine(model, routes=True)
    flip(engine.model)
    groups = [play(engine, 1, DOCUMENTS, routes=True), play(engine, 2, DOCUMENTS[::-1], routes=True)]
    found = {}
    for routes in ((2, 2), None):
        trained = load_model(config.model.path)
        batch = make_batch((), groups, routes=routes)
        found[routes] = train_step(Learner(trained, for_policy(trained, config.trainer)), batch, config, 0, 0.0).metrics
    with_, without = found[2, 2], found[None]
    assert without["mismatch/k2"] > 1e-4
    assert with_["mismatch/k2"] < 1e-9
    assert (with_["router/replayed"], with_["router/missing"]) == (1.0, 0.0)
    assert with_["router/flip_token"] > 0.1
    if execution != "rows":
        assert with_["share/ratio"] > 2, "routes of documents are those of their one computation, so all rows agree"


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama", "yarn"])
def test_no_bit_differs_in_deterministic_mode(tmp_path, kind):
    """However the engine batched documents, cut them and found them computed."""
    yarn = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    overrides = yarn if kind == "yarn" else {}
    model = load_model(save_random_model(tmp_path / "m", "qwen3" if overrides else kind, **overrides))
    engine = Engine(model, EngineConfig(max_batch=5, prefill_tokens=37), deterministic=True)
    groups = [
        play(engine, 1, DOCUMENTS, temperature=0.7), play(engine, 2, DOCUMENTS[2:] + DOCUMENTS[:1], temperature=0.7)
    ]  # fmt: skip
    assert engine.documents.counters.hits > 0
    tokens = token_rows(make_batch((), groups).rows)
    recorded_N = np.concatenate([s.arrays()[2][s.arrays()[1] == 1] for g in groups for e in g for s in e.segments])
    plain_N = evaluate(model, rows(tokens), tokens.count, temperature=0.7).logprobs_N.numpy()
    with batch_invariant():
        exact_N = evaluate(model, rows(tokens), tokens.count, temperature=0.7).logprobs_N.numpy()
    assert np.array_equal(exact_N, recorded_N)
    assert not np.array_equal(plain_N, recorded_N), "else there was nothing to do"


def test_gradients_of_exact_rows_are_those_of_rows(model):
    tokens = a_group(np.random.default_rng(4))
    expected, truth = gradients(model, rows(tokens), tokens)
    with batch_invariant():
        outcome, ours = gradients(model, rows(tokens), tokens)
    assert apart(ours, truth) <= LIMIT
    assert torch.allclose(outcome.logprobs_N, expected.logprobs_N, atol=1e-5)


def test_a_deterministic_step_measures_no_mismatch(tmp_path):
    tables = {"trainer": {"router_replay": True, "lr": 1e-3}, "rollout": {"group": 4, "prompts": 2, "staleness": 0}}
    _, config = new_run(tmp_path, "moe", deterministic=True, **tables)
    model = load_model(config.model.path)
    set_weights(model, {name: t.bfloat16() for name, t in named_tensors(model).items()})
    engine = Engine(model, routes=True, deterministic=True)
    groups = [play(engine, 1, DOCUMENTS, routes=True), play(engine, 2, DOCUMENTS[1:], routes=True)]
    trained = load_model(config.model.path)
    batch = make_batch((), groups, routes=(2, 2))
    metrics = train_step(Learner(trained, for_policy(trained, config.trainer)), batch, config, 0, 0.0).metrics
    assert metrics["mismatch/tokens"] > 200
    assert metrics["mismatch/max_abs"] == 0.0
    assert metrics["router/flip_token"] == metrics["router/refused"] == 0.0


def test_documents_that_cannot_be_made_again_end_the_run(moe):
    (episode,) = play(Engine(moe), 1, DOCUMENTS, members=1, turns=1)
    (segment,) = episode.segments

    def batch_of(**changes):
        members = [an_episode(1, m, (msgspec.structs.replace(segment, **changes),)) for m in range(2)]
        return make_batch((), [members])

    assert batch_of().rows[0].documents == (40, 1, 33, 64)
    with pytest.raises(RunFailed, match="by the recipe 'shared sink', not 'own sink, no repair'"):
        batch_of(recipe="shared sink")
    with pytest.raises(RunFailed, match="other tokens in document 0"):
        batch_of(documents=segment.documents[::-1])
    with pytest.raises(RunFailed, match="other tokens in document 3"):
        batch_of(prompt_length=138)
