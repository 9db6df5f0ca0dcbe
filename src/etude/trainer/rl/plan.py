"""The forward passes of a batch: four executions with the same gradient, and the cost model that picks one.

    rows         one pass per row, every prompt again: the reference, and the execution of deterministic mode
    packed       the prefix trees of the rows, several in one pass up to a budget of tokens
    streaming    a tree's shared prefix once, kept; then the branches below it, in passes up to the budget; the
                 prefix's backward last
    recompute    the same, but of the prefix only keys and values are kept: its forward is run again for its backward

Suffixes: T tokens of a pass, N sampled tokens of the batch (row by row), M those predicted in a pass, S their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel

from etude.models.context_parallel import RowSlice
from etude.models.router_replay import UNFED
from etude.models.segments import Graph, Trie, row_graph, trie

Execution = Literal["rows", "packed", "streaming", "recompute"]
PASS_TOKENS = 48  # fixed cost of a pass, in tokens: launching kernels, small products


@dataclass(frozen=True)
class TokenRows:
    """The rows of a batch, and for each the offsets (>= 1) of its sampled tokens, increasing; the last token must be
    sampled, since later tokens would be computed for nothing. `routes` are experts to replay, int16 [tokens, MoE
    layers, K] per row (`etude.models.router_replay`), `documents` the lengths of those at the beginning of each row.
    Raises ValueError for invalid rows."""

    rows: tuple[np.ndarray, ...]
    sampled: tuple[np.ndarray, ...]
    routes: tuple[np.ndarray, ...] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        every = self.documents or ((),) * len(self.rows)
        for ids, sampled, lengths in zip(self.rows, self.sampled, every, strict=True):
            if not len(sampled) or sampled[0] < 1 or sampled[-1] != len(ids) - 1 or (np.diff(sampled) < 1).any():
                raise ValueError("a row needs a prompt, and ends with a sampled token")
            if lengths and (min(lengths) < 1 or sampled[0] <= sum(lengths)):
                raise ValueError("documents have tokens, and a prompt follows them")

    @property
    def count(self) -> int:
        """N: number of sampled tokens of all rows."""
        return sum(map(len, self.sampled))

    def tree(self) -> Trie:
        """The prefix tree of the rows. It splits at a token that two rows route to different experts."""
        return trie(self.rows, marks=self.routes, documents=self.documents)

    def some(self, chosen: Sequence[int]) -> TokenRows:
        """The chosen rows, in this order."""
        routes = None if self.routes is None else tuple(self.routes[i] for i in chosen)
        documents = None if self.documents is None else tuple(self.documents[i] for i in chosen)
        sampled = tuple(self.sampled[i] for i in chosen)
        return TokenRows(tuple(self.rows[i] for i in chosen), sampled, routes, documents)


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass, the passes that need its keys and values, and the tokens predicted from its hidden states.
    `graph` is None for a plain causal row. Sampled token `item_M[m]` is predicted from `source_S[of_M[m]]`, whose
    sources increase. `routes_TLK` are experts to replay, or None. A slice of a pass has the graph of the whole, and
    `before` sources in earlier slices."""

    graph: Graph | None
    ids_T: np.ndarray
    positions_T: np.ndarray
    weight_T: np.ndarray  # number of rows that contain a token; 0 in an idle pass
    item_M: np.ndarray
    source_S: np.ndarray
    of_M: np.ndarray
    target_M: np.ndarray
    children: tuple[ForwardPass, ...] = ()
    recompute: bool = False
    routes_TLK: np.ndarray | None = None
    before: int = 0

    def slice_of(self, row: RowSlice) -> ForwardPass:
        """The tokens of a slice, padded, and the sampled tokens that are predicted from them; the same object if the
        slice is the whole pass."""
        if row.ranks == 1 and row.length == len(self.ids_T):
            return self
        first, last = np.searchsorted(self.source_S, [row.here.start, row.here.stop]).tolist()
        mine_M = (self.of_M >= first) & (self.of_M < last)
        return replace(
            self,
            ids_T=row.cut(self.ids_T),
            positions_T=row.cut(self.positions_T),
            weight_T=row.cut(self.weight_T),
            item_M=self.item_M[mine_M],
            source_S=self.source_S[first:last] - row.here.start,
            of_M=self.of_M[mine_M] - first,
            target_M=self.target_M[mine_M],
            routes_TLK=None if self.routes_TLK is None else row.cut(self.routes_TLK, UNFED),
            before=first,
        )


@dataclass(frozen=True)
class Shape:
    """Costs of a model, both relative to the linear work of one token in all layers."""

    pair: float  # of one query and one key
    head: float  # of the logits of one position


@dataclass(frozen=True)
class Cost:
    """`work` in tokens' worth of linear layers, forward and backward; `held`: largest number of tokens with kept
    activations."""

    work: float
    held: int
    tokens: int


def shape_of(model: PreTrainedModel) -> Shape:
    """The costs by the sizes of the model's parameters; of a layer's experts only those of one token count."""
    config = model.config.get_text_config()
    decoder = model.get_decoder()
    active, slots = 0.0, getattr(config, "num_experts_per_tok", None) or 1
    for name, p in getattr(decoder, "layers", decoder).named_parameters():
        expert = p.ndim == 3 and "experts" in name
        active += p.numel() * (slots / p.shape[0] if expert else 1.0)
    heads = getattr(config, "num_attention_heads", None) or 0  # none: no layer attends
    width = heads * (_head_size(config) or config.hidden_size // max(1, heads))
    return Shape(2 * width * config.num_hidden_layers / active, config.vocab_size * config.hidden_size / active)


def _head_size(config: PretrainedConfig) -> int | None:
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:  # transformers' error for a value that differs from layer to layer
        return None


@dataclass(frozen=True)
class ExecutionPlan:
    """An execution, its passes, their expected cost, and the number of tokens that are separate only by their
    routes."""

    execution: Execution
    parts: tuple[ForwardPass, ...]
    cost: Cost
    split: int = 0


def plan(tokens: TokenRows, execution: Execution | Literal["auto"], budget: int, shape: Shape) -> ExecutionPlan:
    """The passes of a batch. `auto` takes the cheapest execution that holds at most `budget` tokens at a time, or if
    there is none, the one that holds the fewest. Any other execution is used regardless of the budget."""
    tree = tokens.tree()
    build: dict[Execution, Callable[[], tuple[ForwardPass, ...]]] = {
        "packed": lambda: packed(tokens, tree, budget),
        "streaming": lambda: streaming(tokens, tree, budget),
        "recompute": lambda: streaming(tokens, tree, budget, recompute=True),
        "rows": lambda: rows(tokens),
    }
    names: list[Execution] = list(build) if execution == "auto" else [execution]
    split = 0
    if tokens.routes is not None:
        split = tree.graph.length - trie(tokens.rows, documents=tokens.documents).graph.length
    built: list[tuple[Execution, tuple[ForwardPass, ...]]] = [(name, build[name]()) for name in names]
    candidates = [ExecutionPlan(name, parts, cost(parts, shape), split) for name, parts in built]
    return min(candidates, key=lambda c: (max(c.cost.held, budget), c.cost.work))


def passes_of(
    tokens: TokenRows, execution: Execution, rows_of_passes: Sequence[Sequence[int]], shape: Shape
) -> ExecutionPlan:
    """One pass for each of the given sets of rows, whose items are numbered as in all of `tokens`. A pass without rows
    computes a token of weight zero, so that this rank takes part in what the others compute."""
    cuts = np.concatenate([[0], np.cumsum([len(sampled) for sampled in tokens.sampled])])
    parts: list[ForwardPass] = []
    for chosen in rows_of_passes:
        if not chosen:
            parts.append(_idle(tokens))
            continue
        some = tokens.some(chosen)
        (part,) = rows(some) if execution == "rows" else packed(some, some.tree(), 2**62)
        items = np.concatenate([np.arange(cuts[row], cuts[row + 1]) for row in chosen])
        parts.append(replace(part, item_M=items[part.item_M]))
    return ExecutionPlan(execution, tuple(parts), cost(parts, shape))


def _idle(tokens: TokenRows) -> ForwardPass:
    """A pass over one token, which predicts none."""
    none = np.zeros(0, np.int64)
    routes = None
    if tokens.routes is not None:
        routes = np.full((1, *tokens.routes[0].shape[1:]), UNFED, np.int16)
    one = np.zeros(1, np.int64)
    return ForwardPass(None, one, one, np.zeros(1), none, none, none, none, routes_TLK=routes)


def cost(parts: Sequence[ForwardPass], shape: Shape) -> Cost:
    """The cost of passes run one after another."""
    work, held, tokens = 0.0, 0, 0

    def add(part: ForwardPass, above: int, kept: int) -> None:
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


def rows(tokens: TokenRows) -> tuple[ForwardPass, ...]:
    """One pass per row."""
    parts: list[ForwardPass] = []
    before = 0
    none = [None] * len(tokens.rows)
    every = zip(tokens.rows, tokens.sampled, tokens.routes or none, tokens.documents or none, strict=True)
    for ids, sampled, routes, lengths in every:
        row, n = ids.astype(np.int64), len(sampled)
        graph = row_graph(row, lengths) if lengths else None
        of_row = graph, row, np.arange(len(row)), np.ones(len(row))
        items = np.arange(before, before + n)
        parts.append(ForwardPass(*of_row, items, sampled - 1, np.arange(n), row[sampled], routes_TLK=routes))
        before += n
    return tuple(parts)


def packed(tokens: TokenRows, tree: Trie, budget: int) -> tuple[ForwardPass, ...]:
    """Whole trees, several in one pass while they have at most `budget` tokens; a larger one gets a pass of its own."""
    make = _PassBuilder(tokens, tree)
    return tuple(make.pass_of(heads) for heads in make.packs(make.roots, budget))


def streaming(tokens: TokenRows, tree: Trie, budget: int, *, recompute: bool = False) -> tuple[ForwardPass, ...]:
    """Trees that branch: the shared prefix, then the passes below it. A branch that is too large for a pass is streamed
    in turn. Documents are part of the prefix of the one tree that sees them, or a prefix of their own over several
    trees."""
    make = _PassBuilder(tokens, tree)
    siblings: dict[tuple[int, ...], list[int]] = {}
    for root in make.roots:
        siblings.setdefault(tree.graph.nodes[root].sees, []).append(root)
    passes: list[ForwardPass] = []
    single: list[int] = []
    for documents, roots in siblings.items():
        if documents and len(roots) > 1:
            passes.append(make.prefix(documents, roots, budget, recompute))
            continue
        for root in roots:
            if tree.ends[root] > root + 1:
                passes.append(make.prefix((*documents, root), make.below(root), budget, recompute))
            else:
                single.append(root)
    return (*passes, *(make.pass_of(heads) for heads in make.packs(single, budget)))


class _PassBuilder:
    """Builds the passes of one prefix tree; knows the place of every sampled token's source."""

    def __init__(self, tokens: TokenRows, tree: Trie) -> None:
        self.tree = tree
        self.roots = [i for i, n in enumerate(tree.graph.nodes) if i >= tree.documents > max(n.sees, default=-1)]
        where = [tree.where(i) for i in range(len(tokens.rows))]
        self.routes_TLK = None
        if tokens.routes is not None:  # by place in the layout; rows that share a place have equal routes there
            of_token = tokens.routes[0].shape[1:] if tokens.routes else (0, 0)
            self.routes_TLK = np.zeros((tree.graph.length, *of_token), np.int16)
            for at, row in zip(where, tokens.routes, strict=True):
                self.routes_TLK[at] = row
        pairs = list(zip(where, tokens.sampled, strict=True))
        self.source_N = _join([at[sampled - 1] for at, sampled in pairs])
        self.target_N = _join([ids[s] for ids, s in zip(tokens.rows, tokens.sampled, strict=True)])
        node_N = tree.graph.node_T[self.source_N]
        self.order_N = node_N.argsort(kind="stable")  # sampled tokens by the node that predicts them
        self.cuts = np.searchsorted(node_N[self.order_N], np.arange(len(tree.graph.nodes) + 1))

    def below(self, node: int) -> list[int]:
        """The children of a node of the tree."""
        nodes = self.tree.graph.nodes
        return [i for i in range(node + 1, self.tree.ends[node]) if nodes[i].sees == (*nodes[node].sees, node)]

    def documents(self, head: int) -> set[int]:
        """The documents that a node sees."""
        return {j for j in self.tree.graph.nodes[head].sees if j < self.tree.documents}

    def size(self, nodes: Iterable[int]) -> int:
        """Number of tokens of the nodes."""
        return sum(len(self.tree.graph.nodes[n]) for n in nodes)

    def subtree(self, node: int) -> range:
        """A node and all nodes below it."""
        return range(node, self.tree.ends[node])

    def packs(self, heads: Sequence[int], budget: int, *, alone: bool = True) -> list[list[int]]:
        """Heads grouped by passes for their subtrees, in order up to the budget. `alone`: including the documents that
        they see, each once per pass; otherwise the documents are in a pass above."""
        packs: list[list[int]] = []
        held, inside = 0, set[int]()
        for head in heads:
            seen = self.documents(head) if alone else set[int]()
            size = self.size(self.subtree(head))
            if not packs or held + size + self.size(seen - inside) > budget:
                packs.append([])
                held, inside = 0, set()
            held += size + self.size(seen - inside)
            inside |= seen
            packs[-1].append(head)
        return packs

    def prefix(self, nodes: Sequence[int], below: Sequence[int], budget: int, recompute: bool) -> ForwardPass:
        """The pass of `nodes`, which all of `below` see, and the passes of the nodes in `below`."""
        room = max(1, budget - (0 if recompute else self.size(nodes)))
        large = [h for h in below if self.size(self.subtree(h)) > room and self.tree.ends[h] > h + 1]
        small = [h for h in below if h not in large]
        parts = [self.prefix([h], self.below(h), room, recompute) for h in large]
        parts += [self.pass_of(heads, alone=False) for heads in self.packs(small, room, alone=False)]
        heads = [n for n in nodes if n >= self.tree.documents] or below
        return self.part(sorted(nodes), heads, tuple(parts), recompute)

    def pass_of(self, heads: Sequence[int], *, alone: bool = True) -> ForwardPass:
        """The pass of whole subtrees, with the documents that they see if it stands alone."""
        chosen = {n for head in heads for n in self.subtree(head)}
        if alone:
            chosen |= {j for head in heads for j in self.documents(head)}
        return self.part(sorted(chosen), heads)

    def part(
        self, chosen: Sequence[int], heads: Sequence[int], below: tuple[ForwardPass, ...] = (), recompute: bool = False
    ) -> ForwardPass:
        """The pass of the `chosen` nodes; a document among them has the weight of the rows of those `heads` that see
        it."""
        tree = self.tree
        graph = tree.graph.part(chosen)
        items = _join([self.order_N[self.cuts[n] : self.cuts[n + 1]] for n in chosen])
        items.sort()
        shift = tree.graph.offsets[list(chosen)] - graph.offsets[:-1]
        local = self.source_N[items] - shift[np.searchsorted(list(chosen), tree.graph.node_T[self.source_N[items]])]
        source, of = np.unique(local, return_inverse=True)
        weights = tree.weights.copy()
        for j in range(tree.documents):
            weights[j] = sum(tree.weights[head] for head in heads if j in tree.graph.nodes[head].sees)
        weight = np.repeat(weights[list(chosen)], np.diff(graph.offsets)).astype(float)
        routes = self.routes_TLK
        if routes is not None:
            routes = routes[_join([np.arange(tree.graph.offsets[n], tree.graph.offsets[n + 1]) for n in chosen])]
        return ForwardPass(
            graph,
            graph.ids_T,
            graph.positions_T,
            weight,
            items,
            source,
            of,
            self.target_N[items],
            below,
            recompute,
            routes,
        )


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, np.int64)
