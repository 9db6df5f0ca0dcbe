"""Attention over the segment graph on an accelerator: `flex_attention` with the graph's rule.

The kernel skips tiles of `TILE` x `TILE` pairs without a visible pair, applies no mask in tiles that are visible as a
whole, and evaluates the rule for each pair of the others. The classes of tiles follow from the graph's blocks:
PyTorch's own `create_block_mask` would write out every pair.

Suffixes: Q and S tiles of queries and keys, T queries, C keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from etude.models.segments import Block, Graph

TILE = 128


class Tiles(NamedTuple):
    """Two tables of tiles, bool [Q, S]: those visible in part, and those visible as a whole."""

    part: np.ndarray
    whole: np.ndarray


def visible(graph: Graph, above: int, device: torch.device | str, window: int | None = None) -> Callable[..., Tensor]:
    """The rule of the segment graph as a `mask_mod`. `above` keys that all queries see come first, at positions 0 to
    above - 1 if there is a window. The rule holds only tensors: numbers would be compiled in, and every graph compiled
    for itself."""
    nodes = len(graph.nodes)
    # The keys above belong to an additional node that all see, so there are at least two nodes.
    sees_NN = np.pad(graph.sees_NN, ((0, 1), (0, 1)))
    sees_NN[:, nodes] = True
    key_node = np.concatenate([np.full(above, nodes), graph.node_T])
    order = np.concatenate([np.zeros(above, np.int64), np.arange(graph.length)])
    node_T, node_C, order_C = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (graph.node_T, key_node, order))
    sees = torch.from_numpy(sees_NN).to(device)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (node_T[query] == node_C[key]) & (query >= order_C[key])
        return own | sees[node_T[query], node_C[key]]

    if window is None:
        return seen
    query_T, key_C = (torch.from_numpy(x.astype(np.int32)).to(device) for x in _positions(graph, above))
    oldest_T = query_T - window

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen(batch, head, query, key) & (key_C[key] > oldest_T[query])

    return near


def _positions(graph: Graph, above: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of queries and of keys."""
    return graph.positions_T, np.concatenate([np.arange(above), graph.positions_T])


def tiles(graph: Graph, above: int, window: int | None = None) -> Tiles:
    """The tiles of a graph's queries and keys, after `above` keys that all queries see; at least two in each direction.
    Pairs are counted, not written out. With a window, tiles that may be partly out of reach count as visible in
    part."""
    pairs_QS = np.zeros([max(2, -(-count // TILE)) for count in (graph.length, above + graph.length)], np.int64)
    whole = [Block(0, graph.length, -above, 0, False)] if above else []
    for block in (*graph.blocks, *whole):
        at_q, first, last = _cut(block.q0, block.q1)
        at_k, begin, end = _cut(block.k0 + above, block.k1 + above)
        if block.causal:
            # Pairs with key <= query: the sum over a tile's queries of the number of its keys that are not later.
            own, width = begin - above, end - begin
            pairs_QS[at_q, at_k] += _below(last[:, None] - own, width) - _below(first[:, None] - own, width)
        else:
            pairs_QS[at_q, at_k] += (last - first)[:, None] * (end - begin)
    some_QS, whole_QS = pairs_QS > 0, pairs_QS == TILE**2
    if window is not None:
        (first_Q, last_Q), (first_S, last_S) = (_ends(x) for x in _positions(graph, above))
        shape = np.s_[: len(first_Q), : len(first_S)]  # a short graph has no positions in its second tile
        some_QS[shape] &= first_Q[:, None] - last_S < window
        whole_QS[shape] &= last_Q[:, None] - first_S < window
    return Tiles(some_QS & ~whole_QS, whole_QS)


def _ends(position_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest position in each tile."""
    cuts = np.arange(0, len(position_T), TILE)
    return np.minimum.reduceat(position_T, cuts), np.maximum.reduceat(position_T, cuts)


def _cut(begin: int, end: int) -> tuple[slice, np.ndarray, np.ndarray]:
    """The tiles that overlap [begin, end), and the first and last + 1 of its indices in each."""
    tile = slice(begin // TILE, -(-end // TILE))
    start = np.arange(tile.start, tile.stop) * TILE
    return tile, start.clip(begin, end), (start + TILE).clip(begin, end)


def _below(count: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The sum of clip(t, 0, width) over t = 1 to `count`."""
    inside = count.clip(0, width)
    return inside * (inside + 1) // 2 + (count - width).clip(0) * width


def block_mask(graph: Graph, above: int, device: torch.device | str, window: int | None = None) -> BlockMask:
    """The mask in the kernel's format, for any number of layers and their backward pass."""
    (parts, part), (wholes, whole) = (_ordered(table_QS, device) for table_QS in tiles(graph, above, window))
    mask = BlockMask.from_kv_blocks(
        parts,
        part,
        wholes,
        whole,
        TILE,
        visible(graph, above, device, window),
        (graph.length, above + graph.length),
    )
    # Otherwise the number of tiles of the first graph would be compiled in, and every other number compiled again:
    # after eight compilations PyTorch gives up, and writes the scores out.
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for table in (getattr(mask, name), getattr(mask, f"full_{name}")):
            for dim in range(2, table.ndim):
                maybe_mark_dynamic(table, dim)
    return mask


def _ordered(table_QS: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The number of true tiles in each row, [1, 1, Q], and the indices of all tiles, true ones first, [1, 1, Q, S]."""
    count_Q, index_QS = table_QS.sum(axis=1), np.argsort(~table_QS, axis=1, kind="stable")
    count, index = (torch.from_numpy(x.astype(np.int32)).to(device)[None, None] for x in (count_Q, index_QS))
    return count, index


def attend(
    query_BHTD: Tensor,
    key_BKCD: Tensor,
    value_BKCD: Tensor,
    mask: BlockMask,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention output, [B, H, T, D]. Compiled on an accelerator; on the CPU it is computed plainly, for tests of the
    rule. A sink is one more key of each head, with this logit and a value of 0."""
    repeats = query_BHTD.shape[1] // key_BKCD.shape[1]
    if repeats & (repeats - 1):  # for few queries the kernel supports powers of two only
        key_BKCD, value_BKCD = (x.repeat_interleave(repeats, dim=1) for x in (key_BKCD, value_BKCD))
    run = flex_attention if query_BHTD.device.type == "cpu" else _compiled()
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": True}
    if sinks_H is None:
        return run(query_BHTD, key_BKCD, value_BKCD, **options)
    out, aux = run(query_BHTD, key_BKCD, value_BKCD, **options, return_aux=AuxRequest(lse=True))
    lse_BHT = cast(Tensor, aux.lse)
    share_BHT = (lse_BHT - sinks_H.to(lse_BHT.dtype)[None, :, None]).sigmoid()
    return (out * share_BHT[..., None]).to(out.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """`flex_attention`, compiled at the first use, for any length: uncompiled it would write out the whole matrix of
    scores."""
    return partial(torch.compile(flex_attention, dynamic=True), kernel_options={"BACKEND": "TRITON"})
