"""The division of a batch over ranks: equal numbers of passes, and about equal work in the passes that run together.

Collectives of FSDP and of expert parallelism join the passes of all ranks one by one, so a step takes the sum, over
passes, of the longest among the ranks. A parcel is a row, or rows of one prefix tree that share tokens and fit into a
pass; parcels are put into equally many passes per rank, the most expensive first, each into the emptiest pass (LPT,
Graham 1969). Smaller parcels balance better and compute shared prefixes more often: of several sizes the cheapest wins.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from etude.models.segments import Trie
from etude.trainer.rl.plan import PASS_TOKENS, Execution, Shape, TokenRows

_HALVINGS = 6  # of the largest parcel


@dataclass(frozen=True)
class BatchDivision:
    """The rows of each pass of each rank, by their numbers; ranks have equal numbers of passes, which may be empty.
    `imbalance` is the cost of the dearest rank over the mean; `work` the sum over passes of the dearest rank's."""

    passes: tuple[tuple[tuple[int, ...], ...], ...]  # by rank
    imbalance: float
    work: float


@dataclass(frozen=True)
class _Parcel:
    rows: tuple[int, ...]
    tokens: int
    work: float


def divided(tokens: TokenRows, execution: Execution, budget: int, shape: Shape, ranks: int) -> BatchDivision:
    """The passes of `ranks` ranks over the rows, at most `budget` tokens each unless a row alone is longer. "rows": one
    row each; "packed": rows that share tokens, and others beside them. The same on every rank; no pass without rows."""
    if not tokens.rows:
        return _dealt([], 0, ranks, budget)
    tree = tokens.tree()
    if execution == "rows":
        every = [_parcel(tokens, tree, shape, [i], alone=True) for i in range(len(tokens.rows))]
        return _dealt(every, -(-len(every) // ranks), ranks, 0)
    longest = max((len(row) for row in tokens.rows), default=1)
    best: BatchDivision | None = None
    limit = budget
    for _ in range(_HALVINGS):
        parcels = list(_parcels(tokens, tree, shape, max(limit, longest)))
        total = sum(parcel.tokens for parcel in parcels)
        count = max(1, -(-total // (budget * ranks)))
        for passes in range(count, 2 * count + 2):
            division = _dealt(parcels, passes, ranks, max(budget, longest))
            if best is None or division.work < best.work:
                best = division
        if limit <= longest:
            break
        limit = min(limit, max(1, total // ranks)) // 2
    assert best is not None
    return best


def _parcels(tokens: TokenRows, tree: Trie, shape: Shape, limit: int) -> Iterator[_Parcel]:
    """Rows in the order of the tree, cut where a parcel would have more than `limit` tokens, and between trees."""
    rows: list[int] = []
    nodes: set[int] = set()
    size = 0
    for row in sorted(range(len(tree.paths)), key=lambda i: tree.paths[i]):
        path = tree.paths[row]
        extra = sum(len(tree.graph.nodes[n]) for n in path if n not in nodes)
        if rows and (size + extra > limit or not nodes.intersection(path)):
            yield _parcel(tokens, tree, shape, rows)
            rows, nodes, size = [], set(), 0
            extra = sum(len(tree.graph.nodes[n]) for n in path)
        rows.append(row)
        nodes.update(path)
        size += extra
    if rows:
        yield _parcel(tokens, tree, shape, rows)


def _parcel(tokens: TokenRows, tree: Trie, shape: Shape, rows: Sequence[int], *, alone: bool = False) -> _Parcel:
    nodes = {n for row in rows for n in tree.paths[row]}
    size = sum(len(tree.graph.nodes[n]) for n in nodes)
    pairs = sum(_pairs(tree, n) for n in nodes)
    sources = sum(len(tokens.sampled[row]) for row in rows)
    return _Parcel(tuple(rows), size, (PASS_TOKENS if alone else 0) + size + shape.pair * pairs + shape.head * sources)


def _pairs(tree: Trie, node: int) -> int:
    length = len(tree.graph.nodes[node])
    return length * (length + 1) // 2 + length * sum(len(tree.graph.nodes[j]) for j in tree.graph.nodes[node].sees)


def _dealt(parcels: Sequence[_Parcel], passes: int, ranks: int, budget: int) -> BatchDivision:
    """The parcels in passes x ranks bins of at most `budget` tokens (0: one parcel each), and the bins on the ranks.
    Parcels that fit nowhere open further passes."""
    bins: list[list[_Parcel]] = [[] for _ in range(passes * ranks)]
    heap = [(0.0, i) for i in range(len(bins))]
    for parcel in sorted(parcels, key=lambda p: -p.work):
        tried: list[tuple[float, int]] = []
        while heap:
            work, at = heapq.heappop(heap)
            if not bins[at] or sum(p.tokens for p in bins[at]) + parcel.tokens <= budget:
                break
            tried.append((work, at))
        else:
            work, at = 0.0, len(bins)
            bins += [[] for _ in range(ranks)]
            tried += [(0.0, at + i) for i in range(1, ranks)]
        bins[at].append(parcel)
        for entry in (*tried, (work + parcel.work, at)):
            heapq.heappush(heap, entry)
    costs = np.array([PASS_TOKENS * bool(some) + sum(p.work for p in some) for some in bins])
    order = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    totals = np.zeros(ranks)
    of_rank: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for together in order:  # passes of about equal cost run together; the dearest goes to the rank with the least yet
        for rank, at in zip(np.argsort(totals, kind="stable"), together, strict=True):
            of_rank[rank].append(tuple(sorted(row for p in bins[at] for row in p.rows)))
            totals[rank] += costs[at]
    mean = totals.mean()
    return BatchDivision(
        tuple(map(tuple, of_rank)),
        float(totals.max() / mean) if mean else 1.0,
        float(costs[order[:, 0]].sum()) if len(order) else 0.0,
    )
