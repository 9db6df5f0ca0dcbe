"""The segment graph: runs of tokens, and which of them see which. It describes both shared prompts and documents.

A node's tokens see themselves causally and the nodes in `sees` as a whole. In a prefix tree a node sees all its
ancestors, so every path from a root is a plain causal row, and a pass over the tree gives each row the values of its
own pass.

Suffixes: T tokens of the whole graph in layout order (the nodes one after the other), n tokens of one node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np

MIN_SHARE = 16  # tokens; sharing a shorter run costs more than it saves


@dataclass(frozen=True)
class Node:
    """A run of tokens. `start` is the rotary position of its first token; `sees` are indices of earlier nodes."""

    ids_n: np.ndarray
    start: int = 0
    sees: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids_n)


class Block(NamedTuple):
    """Queries [q0, q1) see keys [k0, k1): all of them, or on the diagonal (q0 = k0) those that are not later."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


@dataclass(frozen=True)
class Graph:
    """Nodes in layout order. Raises ValueError if a node sees a later node, itself, or a node that ends after its
    start."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        for i, node in enumerate(self.nodes):
            if node.ids_n.ndim != 1:
                raise ValueError(f"node {i} holds an array of shape {node.ids_n.shape}, not a run of tokens")
            for j in node.sees:
                if not 0 <= j < i:
                    raise ValueError(f"node {i} sees node {j}: a node sees only earlier nodes")
                if self.nodes[j].start + len(self.nodes[j]) > node.start:
                    raise ValueError(f"node {i} starts at {node.start}, before node {j}, which it sees, has ended")

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [nodes + 1]: the start of every node in the layout, and the number of tokens."""
        return np.concatenate([[0], np.cumsum([len(node) for node in self.nodes], dtype=np.int64)]).astype(np.int64)

    @property
    def length(self) -> int:
        """T, the number of tokens."""
        return int(self.offsets[-1])

    @property
    def ids_T(self) -> np.ndarray:
        """int64 [T]: the token ids."""
        return _concatenate([node.ids_n for node in self.nodes])

    @property
    def positions_T(self) -> np.ndarray:
        """int64 [T]: the rotary position of every token."""
        return _concatenate([np.arange(node.start, node.start + len(node)) for node in self.nodes])

    @property
    def node_T(self) -> np.ndarray:
        """int64 [T]: the node of every token."""
        return np.repeat(np.arange(len(self.nodes)), np.diff(self.offsets))

    @property
    def sees_NN(self) -> np.ndarray:
        """bool [nodes, nodes]: whether the row's node sees the column's."""
        table = np.zeros((len(self.nodes), len(self.nodes)), bool)
        for i, node in enumerate(self.nodes):
            table[i, list(node.sees)] = True
        return table

    def mask(self) -> np.ndarray:
        """bool [T, T], query by key: all pairs of this module's rule. Quadratic; for tests and small graphs."""
        node_T, index_T = self.node_T, np.arange(self.length)
        own_TT = (node_T[:, None] == node_T) & (index_T[:, None] >= index_T)
        return own_TT | self.sees_NN[np.ix_(node_T, node_T)]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The mask as blocks of visible pairs only: one causal per node, and rectangles, merged if they touch."""
        at = self.offsets.tolist()
        diagonal = [
            Block(at[i], at[i + 1], at[i], at[i + 1], True) for i in range(len(self.nodes)) if len(self.nodes[i])
        ]
        seen_by: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in node.sees:
                seen_by[j].append(i)
        open_blocks: dict[tuple[int, int], Block] = {}  # blocks that end where the next key begins, by query range
        rectangles: list[Block] = []
        for j, viewers in enumerate(seen_by):
            if not len(self.nodes[j]):
                continue
            touching: dict[tuple[int, int], Block] = {}
            for first, last in _runs(viewers):
                queries = at[first], at[last + 1]
                if queries[0] == queries[1]:
                    continue
                before = open_blocks.pop(queries, None)
                begin = at[j] if before is None else before.k0
                touching[queries] = Block(*queries, begin, at[j + 1], False)
            rectangles += open_blocks.values()
            open_blocks = touching
        rectangles += open_blocks.values()
        return tuple(diagonal + rectangles)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        count = 0
        for q0, q1, k0, k1, causal in self.blocks:
            count += (q1 - q0) * (q1 - q0 + 1) // 2 if causal else (q1 - q0) * (k1 - k0)
        return count

    def part(self, chosen: Sequence[int]) -> Graph:
        """The subgraph of the chosen nodes, in increasing order, without edges to other nodes."""
        new = {old: i for i, old in enumerate(chosen)}
        nodes = [self.nodes[old] for old in chosen]
        sees = [tuple(new[j] for j in node.sees if j in new) for node in nodes]
        return Graph(tuple(Node(node.ids_n, node.start, seen) for node, seen in zip(nodes, sees, strict=True)))


def row_graph(row: np.ndarray, documents: Sequence[int]) -> Graph:
    """The graph of one row that begins with documents of these lengths, which see only themselves; the rest sees
    them."""
    ends = list(accumulate(documents))
    nodes = [Node(row[end - length : end], end - length) for end, length in zip(ends, documents, strict=True)]
    end = ends[-1] if ends else 0
    return Graph((*nodes, Node(row[end:], end, tuple(range(len(nodes))))))


@dataclass(frozen=True)
class Trie:
    """A prefix tree in depth-first order: `graph`, and for each row (in the original order) the nodes from root to its
    end. The first `documents` nodes are documents, which see no other node: a row's path begins with its own, and a
    root of the tree sees those of its rows."""

    graph: Graph
    paths: tuple[tuple[int, ...], ...]
    documents: int = 0

    @cached_property
    def weights(self) -> np.ndarray:
        """int64 [nodes]: the number of rows through each node."""
        through = np.array([n for path in self.paths for n in path], np.int64)
        return np.bincount(through, minlength=len(self.graph.nodes))

    @cached_property
    def ends(self) -> list[int]:
        """For each node, the index after the last node of its subtree."""
        ends = list(range(1, len(self.graph.nodes) + 1))
        for i in range(len(ends) - 1, self.documents - 1, -1):
            parent = max(self.graph.nodes[i].sees, default=-1)
            if parent >= self.documents:
                ends[parent] = max(ends[parent], ends[i])
        return ends

    def where(self, row: int) -> np.ndarray:
        """int64 [tokens of the row]: the place of each token in the layout."""
        at = self.graph.offsets
        return _concatenate([np.arange(at[n], at[n + 1]) for n in self.paths[row]])


def trie(
    rows: Sequence[np.ndarray],
    min_share: int = MIN_SHARE,
    *,
    marks: Sequence[np.ndarray] | None = None,
    documents: Sequence[tuple[int, ...]] | None = None,
) -> Trie:
    """The prefix tree of rows of token ids: common prefixes of at least `min_share` tokens become one node.

    Shorter common prefixes stay with each branch. Rows may be equal, empty, or prefixes of each other: a row ends with
    the last node of its path. Every node is on the path of some row, and no node is empty. With `marks`, an array
    [tokens, ...] per row, tokens are equal only if their marks are. `documents` are the lengths of the documents that
    each row begins with: equal documents at the same position are one node, whatever precedes them, and rows with the
    same documents share the tokens after these.
    """
    keys = [row.astype(">u4") for row in rows]
    if marks is not None:
        keys = [_marked(key, mark) for key, mark in zip(keys, marks, strict=True)]
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = [()] * len(rows)
    above: list[tuple[int, ...]] = [()] * len(rows)  # the documents of each row
    known: dict[tuple[int, bytes], int] = {}
    for i, lengths in enumerate(documents or ()):
        for start, end in pairwise(accumulate(lengths, initial=0)):
            at = known.setdefault((start, keys[i][start:end].tobytes()), len(nodes))
            if at == len(nodes):
                nodes.append(Node(rows[i][start:end], start))
            above[i] += (at,)
    count = len(nodes)
    siblings: dict[tuple[int, ...], list[int]] = {}
    for i, seen in enumerate(above):
        siblings.setdefault(seen, []).append(i)
    for seen, members in siblings.items():
        _grow(nodes, paths, rows, keys, members, seen, min_share)
    return Trie(Graph(tuple(nodes)), tuple(paths), count)


def _grow(
    nodes: list[Node],
    paths: list[tuple[int, ...]],
    rows: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    members: Sequence[int],
    documents: tuple[int, ...],
    min_share: int,
) -> None:
    """Adds the tree of the rows `members`, which all see `documents`, to `nodes`, and their paths to `paths`."""
    order = sorted(members, key=lambda i: keys[i].tobytes())
    ordered = [rows[i] for i in order]
    common = [0] + [_common(keys[a], keys[b]) for a, b in pairwise(order)]

    def grow(row: np.ndarray, begin: int, end: int, above: tuple[int, ...]) -> tuple[int, ...]:
        if begin == end:
            return above
        nodes.append(Node(row[begin:end], begin, above))
        return (*above, len(nodes) - 1)

    stack = [(0, len(order), sum(len(nodes[j]) for j in documents), documents)] if order else []
    while stack:
        lo, hi, begin, above = stack.pop()
        end = min(common[lo + 1 : hi], default=len(ordered[lo]))
        if end - begin >= min_share:
            above, begin = grow(ordered[lo], begin, end, above), end
        ended = lo
        while ended < hi and len(ordered[ended]) == end:
            ended += 1
        if ended > lo:
            path = grow(ordered[lo], begin, end, above)
            for i in range(lo, ended):
                paths[order[i]] = path
        cuts = [ended, *(i for i in range(ended + 1, hi) if common[i] == end), hi]
        branches = [(a, b, begin, above) for a, b in pairwise(cuts) if a < b]
        stack += reversed(branches)


def join(tries: Sequence[Trie]) -> Trie:
    """Several tries without documents in one layout, side by side; their rows in the original order."""
    if any(one.documents for one in tries):
        raise ValueError("tries with documents are not joined: make one of all their rows")
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = []
    for one in tries:
        base = len(nodes)
        nodes += [Node(n.ids_n, n.start, tuple(base + j for j in n.sees)) for n in one.graph.nodes]
        paths += [tuple(base + n for n in path) for path in one.paths]
    return Trie(Graph(tuple(nodes)), tuple(paths))


def _marked(key_T: np.ndarray, marks_T: np.ndarray) -> np.ndarray:
    """uint8 [T, bytes]: a token's id, then its marks."""
    marks = np.ascontiguousarray(marks_T).reshape(len(key_T), math.prod(marks_T.shape[1:])).view(np.uint8)
    return np.concatenate([key_T[:, None].view(np.uint8), marks], axis=1)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    differ = np.flatnonzero(differs if differs.ndim == 1 else differs.any(axis=1))
    return int(differ[0]) if differ.size else n


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of every run of consecutive indices."""
    for _, run in groupby(enumerate(indices), lambda place: place[1] - place[0]):
        members = [index for _, index in run]
        yield members[0], members[-1]


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
