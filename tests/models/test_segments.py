"""The segment graph against its rule written out by hand, and attention over its blocks against a dense mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models.attention import SegmentLayout
from etude.models.segments import Graph, Node, join, trie


@st.composite
def families(draw):
    """Rows over two letters, so that beginnings are shared at many depths; equal and empty rows, and one of another."""
    rows = draw(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=8))
    return [np.array(row, np.int32) for row in rows]


@st.composite
def graphs(draw):
    """Nodes that see any earlier nodes: trees, documents with a tail, and what is neither."""
    nodes, ends = [], []
    for i in range(draw(st.integers(1, 7))):
        sees = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=i)))) if i else ()
        start = max((ends[j] for j in sees), default=0)
        length = draw(st.integers(0, 4))
        nodes.append(Node(np.arange(length), start, sees))
        ends.append(start + length)
    return Graph(tuple(nodes))


def mask_by_hand(graph):
    """The rule of segments.py, token by token."""
    tokens = [(i, k) for i, node in enumerate(graph.nodes) for k in range(len(node))]
    sees = [[kn in graph.nodes[qn].sees or (qn == kn and ki <= qi) for kn, ki in tokens] for qn, qi in tokens]
    return np.array(sees, bool).reshape(len(tokens), len(tokens))


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_mask_and_blocks_are_the_rule(graph):
    expected = mask_by_hand(graph)
    assert np.array_equal(graph.mask(), expected)
    covered = np.zeros(expected.shape, int)
    for block in graph.blocks:
        part = covered[block.q0 : block.q1, block.k0 : block.k1]
        part += np.tril(np.ones_like(part)) if block.causal else 1
    assert np.array_equal(covered, expected), "every visible pair in one block, no other pair in any"
    assert graph.pairs == expected.sum()


@given(families(), st.sampled_from([1, 2, 5]))
@settings(max_examples=100, deadline=None)
def test_a_trie_gives_every_row_back_and_shares_what_it_can(rows, min_share):
    tree = trie(rows, min_share)
    ids_T, positions_T = tree.graph.ids_T, tree.graph.positions_T
    mask = tree.graph.mask() if tree.graph.nodes else None
    for i, row in enumerate(rows):
        where = tree.where(i)
        assert np.array_equal(ids_T[where], row)
        assert np.array_equal(positions_T[where], np.arange(len(row)))
        for k, token in enumerate(where):  # it sees its row up to itself, and nothing else
            assert np.array_equal(np.flatnonzero(mask[token]), np.sort(where[: k + 1]))
    assert all(len(node) for node in tree.graph.nodes)
    assert len(tree.graph.nodes) <= 2 * len(rows)
    assert tree.weights.sum() == sum(map(len, tree.paths))
    assert (tree.weights > 0).all()
    if min_share == 1:
        distinct = {tuple(row[: k + 1].tolist()) for row in rows for k in range(len(row))}
        assert tree.graph.length == len(distinct), "one token per distinct beginning"
    for node, end in enumerate(tree.ends):
        below = [i for i, other in enumerate(tree.graph.nodes) if node in other.sees]
        assert below == list(range(node + 1, end)), "subtrees are contiguous"


def test_the_example_of_three_rows():
    """`pqrs`, `pqt`, `pq`: the trunk stands for three rows, and the third row has no leaf."""
    p, q, r, s, t = range(5)
    tree = trie([np.array(row) for row in ([p, q, r, s], [p, q, t], [p, q])], min_share=1)
    assert [node.ids_n.tolist() for node in tree.graph.nodes] == [[p, q], [r, s], [t]]
    assert tree.paths == ((0, 1), (0, 2), (0,))
    assert tree.weights.tolist() == [3, 1, 1]


@given(families(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_marked_tokens_are_shared_only_where_the_marks_agree(rows, seed):
    rng = np.random.default_rng(seed)
    marks = [rng.integers(-1, 1, (len(row), 2, 1)).astype(np.int16) * (rng.random() < 0.5) for row in rows]
    tree = trie(rows, 1, marks=marks)
    mark_at = {}
    for i, row in enumerate(rows):
        assert np.array_equal(tree.graph.ids_T[tree.where(i)], row)
        for place, mark in zip(tree.where(i).tolist(), marks[i].tolist(), strict=True):
            assert mark_at.setdefault(place, mark) == mark, "one place, one mark"
    pairs = [
        list(zip(row.tolist(), map(str, mark.tolist()), strict=True)) for row, mark in zip(rows, marks, strict=True)
    ]
    assert tree.graph.length == len({tuple(row[: k + 1]) for row in pairs for k in range(len(row))})


def test_short_common_runs_stay_with_their_branches():
    rows = [np.array([1, 2, 3, 4, 5]), np.array([1, 2, 3, 6, 7]), np.array([1, 8])]
    tree = trie(rows, min_share=3)
    assert [node.ids_n.tolist() for node in tree.graph.nodes] == [[1, 2, 3], [4, 5], [6, 7], [1, 8]]


def test_joined_tries_do_not_see_each_other():
    one, two = trie([np.arange(20), np.arange(25)]), trie([np.arange(18)])
    both = join([one, two])
    assert both.paths == ((0,), (0, 1), (2,))
    assert not both.graph.mask()[25:, :25].any()


def test_impossible_graphs_are_refused():
    a = Node(np.arange(3))
    with pytest.raises(ValueError, match="sees only earlier nodes"):
        Graph((a, Node(np.arange(2), 3, (1,))))
    with pytest.raises(ValueError, match="has ended"):
        Graph((a, Node(np.arange(2), 2, (0,))))
    with pytest.raises(ValueError, match="not a run of tokens"):
        Graph((Node(np.zeros((2, 2))),))


def dense(query, key, value, mask, scale):
    scores = (query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)) * scale
    scores = scores.masked_fill(~torch.from_numpy(mask), float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)


@given(graphs(), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_attention_over_blocks_is_that_of_the_dense_mask(graph, seed):
    """In value and all three gradients. Tolerance 1e-5: float32 sums of at most 28 terms, in another order."""
    if not graph.length:
        return
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, graph.length, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, graph.length, 8, generator=generator)
    seed_out = torch.randn(query.shape, generator=generator)
    results = []
    for attend in (
        lambda q, k, v: SegmentLayout(graph).attend(0, q, k, v, 0.3),
        lambda q, k, v: dense(q, k, v, mask_by_hand(graph), 0.3),
    ):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend(*leaves)
        (out * seed_out).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
