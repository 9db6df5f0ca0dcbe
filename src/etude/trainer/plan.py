"""Which forward passes a batch is computed in: four ways to the same gradient, and the cost model that picks one.

    rows         one pass per row, every prompt again: the reference, and what deterministic mode runs
    packed       the prefix trees of the rows, several in one pass up to a budget of tokens
    streaming    a tree's trunk once, kept; then what hangs below it, in passes up to the budget; the trunk's backward
                 last
    recompute    the same, but of the trunk only keys and values are kept: its forward is run again for its backward

Suffixes: T tokens of a pass, N sampled tokens of the batch (row by row), M those predicted in a pass, S their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from etude.models.segments import Graph, Trie, trie

Execution = Literal["rows", "packed", "streaming", "recompute"]
PASS_TOKENS = 48  # what a pass costs besides its tokens, in tokens: launching kernels, small products


@dataclass(frozen=True)
class TokenRows:
    """The rows of a batch, and in each the offsets (>= 1) of its sampled tokens, increasing; the last token is one.

    `routes` are experts to replay, int16 [tokens, MoE layers, K] per row (`etude.models.replay`). Raises ValueError for
    rows of another kind: what follows the last sampled token would be computed for nothing.
    """

    rows: tuple[np.ndarray, ...]
    sampled: tuple[np.ndarray, ...]
    routes: tuple[np.ndarray, ...] | None = None

    def __post_init__(self) -> None:
        for ids, sampled in zip(self.rows, self.sampled, strict=True):
            if not len(sampled) or sampled[0] < 1 or sampled[-1] != len(ids) - 1 or (np.diff(sampled) < 1).any():
                raise ValueError("a row needs a prompt, and ends with a sampled token")

    @property
    def count(self) -> int:
        """N: sampled tokens of all rows."""
        return sum(map(len, self.sampled))

    def tree(self) -> Trie:
        """What the rows share. A token that two rows route to other experts is two tokens: the tree splits there."""
        return trie(self.rows, marks=self.routes)


@dataclass(frozen=True)
class Part:
    """One forward pass, the passes that need its keys and values, and what is predicted from its hidden states.

    `graph` is None for a plain causal row. Sampled token `item_M[m]` is predicted from `source_S[of_M[m]]`.
    `routes_TLK` are experts to replay, or None.
    """

    graph: Graph | None
    ids_T: np.ndarray
    positions_T: np.ndarray
    weight_T: np.ndarray  # rows that a token stands for
    item_M: np.ndarray
    source_S: np.ndarray
    of_M: np.ndarray
    target_M: np.ndarray
    children: tuple[Part, ...] = ()
    recompute: bool = False
    routes_TLK: np.ndarray | None = None


@dataclass(frozen=True)
class Shape:
    """What the cost model knows of a model, both relative to the linear work of one token in all layers."""

    pair: float  # of one query and one key
    head: float  # of the logits of one position


@dataclass(frozen=True)
class Cost:
    """`work` in tokens' worth of linear layers, both ways; `held`: most tokens whose activations are kept at a time."""

    work: float
    held: int
    tokens: int


def shape_of(model: torch.nn.Module) -> Shape:
    """From the sizes of the model's parameters; of a layer's experts only those that a token goes through count."""
    config = model.config
    active = 0.0
    for name, p in model.get_decoder().layers.named_parameters():
        expert = p.ndim == 3 and "experts" in name
        active += p.numel() * (config.num_experts_per_tok / p.shape[0] if expert else 1.0)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Shape(2 * width * config.num_hidden_layers / active, config.vocab_size * config.hidden_size / active)


@dataclass(frozen=True)
class Plan:
    """An execution, its passes, what they are expected to cost, and how many tokens only other routes keep apart."""

    execution: Execution
    parts: tuple[Part, ...]
    cost: Cost
    split: int = 0


def plan(tokens: TokenRows, execution: Execution | Literal["auto"], budget: int, shape: Shape) -> Plan:
    """The passes of a batch. `auto` takes the cheapest execution that holds at most `budget` tokens at a time.

    Where none does, the one that holds the fewest. Any other execution is obeyed whatever it holds.
    """
    tree = tokens.tree()
    build: dict[Execution, Callable[[], tuple[Part, ...]]] = {
        "packed": lambda: packed(tokens, tree, budget),
        "streaming": lambda: streaming(tokens, tree, budget),
        "recompute": lambda: streaming(tokens, tree, budget, recompute=True),
        "rows": lambda: rows(tokens),
    }
    names = list(build) if execution == "auto" else [execution]
    split = 0 if tokens.routes is None else tree.graph.length - trie(tokens.rows).graph.length
    candidates = [Plan(name, parts, cost(parts, shape), split) for name, parts in ((n, build[n]()) for n in names)]
    fitting = [c for c in candidates if c.cost.held <= budget]
    if fitting:
        return min(fitting, key=lambda c: c.cost.work)
    return min(candidates, key=lambda c: c.cost.held)


def cost(parts: Sequence[Part], shape: Shape) -> Cost:
    """The cost of passes run one after another."""
    work, held, tokens = 0.0, 0, 0

    def add(part: Part, above: int, kept: int) -> None:
        nonlocal work, held, tokens
        size = len(part.ids_T)
        pairs = size * (size + 1) // 2 if part.graph is None else part.graph.pairs + above * size
        once = PASS_TOKENS + size + shape.pair * pairs + shape.head * len(part.source_S)
        work += once * (4 / 3 if part.recompute else 1.0)
        tokens += size
        held = max(held, kept + size)
        for child in part.children:
            add(child, above + size, kept + (0 if part.recompute else size))

    for part in parts:
        add(part, 0, 0)
    return Cost(work, held, tokens)


def rows(tokens: TokenRows) -> tuple[Part, ...]:
    """One pass per row."""
    parts = []
    before = 0
    all_routes = tokens.routes or [None] * len(tokens.rows)
    for ids, sampled, routes in zip(tokens.rows, tokens.sampled, all_routes, strict=True):
        row = ids.astype(np.int64)
        items = np.arange(before, before + len(sampled))
        every, once = np.arange(len(sampled)), np.ones(len(row))
        parts.append(
            Part(None, row, np.arange(len(row)), once, items, sampled - 1, every, row[sampled], routes_TLK=routes)
        )
        before += len(sampled)
    return tuple(parts)


def packed(tokens: TokenRows, tree: Trie, budget: int) -> tuple[Part, ...]:
    """Whole trees, several in one pass while they hold at most `budget` tokens; a larger one gets a pass of its own."""
    make = _Maker(tokens, tree)
    return tuple(make.part(chosen) for chosen in make.packs(make.roots, budget))


def streaming(tokens: TokenRows, tree: Trie, budget: int, *, recompute: bool = False) -> tuple[Part, ...]:
    """Trees that branch: the trunk, then the passes below it. A branch that fits no pass is streamed in turn."""
    make = _Maker(tokens, tree)
    branching = [root for root in make.roots if tree.ends[root] > root + 1]
    single = [root for root in make.roots if tree.ends[root] == root + 1]
    trunks = [make.trunk(root, budget, recompute) for root in branching]
    return (*trunks, *(make.part(chosen) for chosen in make.packs(single, budget)))


class _Maker:
    """Parts of one trie; knows for every sampled token where its source stands."""

    def __init__(self, tokens: TokenRows, tree: Trie) -> None:
        self.tree = tree
        self.roots = self.children(range(len(tree.graph.nodes)), ())
        where = [tree.where(i) for i in range(len(tokens.rows))]
        self.routes_TLK = None if tokens.routes is None else _laid_out(tree.graph.length, where, tokens.routes)
        pairs = list(zip(where, tokens.sampled, strict=True))
        self.source_N = _join([at[sampled - 1] for at, sampled in pairs])
        self.target_N = _join([ids[s] for ids, s in zip(tokens.rows, tokens.sampled, strict=True)])
        node_N = tree.graph.node_T[self.source_N]
        self.order_N = node_N.argsort(kind="stable")  # sampled tokens by the node that predicts them
        self.cuts = np.searchsorted(node_N[self.order_N], np.arange(len(tree.graph.nodes) + 1))

    def children(self, among: range, above: tuple[int, ...]) -> list[int]:
        return [i for i in among if self.tree.graph.nodes[i].sees == above]

    def size(self, node: int) -> int:
        """Tokens of the node's subtree."""
        at = self.tree.graph.offsets
        return int(at[self.tree.ends[node]] - at[node])

    def packs(self, heads: Sequence[int], budget: int) -> list[list[int]]:
        """Nodes of whole subtrees, put together in order up to the budget."""
        packs: list[list[int]] = []
        held = 0
        for head in heads:
            if not packs or held + self.size(head) > budget:
                packs.append([])
                held = 0
            packs[-1] += range(head, self.tree.ends[head])
            held += self.size(head)
        return packs

    def trunk(self, node: int, budget: int, recompute: bool) -> Part:
        graph = self.tree.graph
        inside = range(node + 1, self.tree.ends[node])
        below = self.children(inside, (*graph.nodes[node].sees, node))
        room = max(1, budget - (0 if recompute else len(graph.nodes[node])))
        large = [head for head in below if self.size(head) > room and self.tree.ends[head] > head + 1]
        small = [head for head in below if head not in large]
        parts = [self.trunk(head, room, recompute) for head in large]
        parts += [self.part(chosen) for chosen in self.packs(small, room)]
        return self.part([node], tuple(parts), recompute)

    def part(self, chosen: Sequence[int], children: tuple[Part, ...] = (), recompute: bool = False) -> Part:
        tree = self.tree
        graph = tree.graph.part(chosen)
        items = _join([self.order_N[self.cuts[n] : self.cuts[n + 1]] for n in chosen])
        items.sort()
        shift = tree.graph.offsets[list(chosen)] - graph.offsets[:-1]
        local = self.source_N[items] - shift[np.searchsorted(list(chosen), tree.graph.node_T[self.source_N[items]])]
        source, of = np.unique(local, return_inverse=True)
        weight = np.repeat(tree.weights[list(chosen)], np.diff(graph.offsets)).astype(float)
        routes = self.routes_TLK
        if routes is not None:
            routes = routes[_join([np.arange(tree.graph.offsets[n], tree.graph.offsets[n + 1]) for n in chosen])]
        return Part(
            graph, graph.ids_T, graph.positions_T, weight, items, source, of, self.target_N[items], children, recompute,
            routes,
        )  # fmt: skip


def _laid_out(length: int, where: Sequence[np.ndarray], routes: Sequence[np.ndarray]) -> np.ndarray:
    """[length, L, K]: the rows' routes by place in the layout; rows that share a place agree there."""
    out = np.zeros((length, *routes[0].shape[1:]) if routes else (0, 0, 0), np.int16)
    for at, row in zip(where, routes, strict=True):
        out[at] = row
    return out


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)
