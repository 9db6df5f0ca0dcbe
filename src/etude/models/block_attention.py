"""Attention over the blocks of a mask, on the CPU: one call of torch's flash kernel per block, none on padding.

A query's blocks are merged by their log-sum-exp. The backward pass gives the kernel the merged output and log-sum-exp,
from which it recomputes the probabilities of the whole softmax: so every block yields its exact share of the gradients
(FlashAttention-2, arXiv:2307.08691, algorithm 2, whose loop over key blocks this is).

A window cuts a block into tiles, each with the mask of its positions. An attention sink (arXiv:2309.17453, as a learned
logit per head in gpt-oss) is one more key without a value: it takes a share of the softmax and leaves no output.

Shapes: query_BHTD, key_BKCD, value_BKCD; the values may have another size than the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.models.segments import Graph, Node

_TILE = 256  # queries per tile of a block that a window cuts


@dataclass(frozen=True)
class AttentionVariant:
    """The features of a layer's attention besides queries, keys and values. A query at position p sees the keys at
    positions p - `window` + 1 to p. `sinks_H` are the logits of its attention sinks."""

    window: int | None = None
    sinks_H: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the layer has none of these features."""
        return self.window is None and self.sinks_H is None


PLAIN = AttentionVariant()


class Tile(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1) of one call. `first`: the first call of each of its queries. `shift`: the
    position of the first query less that of the first key, if `window` cuts the tile; else `window` is 0."""

    q0: int
    q1: int
    k0: int
    k1: int
    first: bool
    causal: bool
    shift: int = 0
    window: int = 0

    @property
    def bias(self) -> Tensor | None:
        """float32 [queries, keys]: 0 for visible keys, else minus infinity; None if the kernel needs none."""
        return _bias(self.shift, self.q1 - self.q0, self.k1 - self.k0, self.window) if self.window else None


def tiles(graph: Graph, above: int, window: int | None = None) -> tuple[Tile, ...]:
    """The calls for the queries of `graph`: first with the keys of `above` tokens, which all queries see, then with
    those of the graph. With a window, those tokens must have the positions before the graph's, and every node must see
    all tokens before it (a prefix tree, no documents). Raises ValueError."""
    if window is None:
        shifted = [Tile(b.q0, b.q1, b.k0 + above, b.k1 + above, b.causal, b.causal) for b in graph.blocks]
        whole = [Tile(0, graph.length, 0, above, False, False)] if above and graph.length else []
        return (*shifted, *whole)
    cut: list[Tile] = []
    at = graph.offsets.tolist()
    for i, node in enumerate(graph.nodes):
        if node.start != above + sum(len(graph.nodes[j]) for j in node.sees):
            raise ValueError("a sliding window needs a prefix tree: documents cannot be seen through it")
        # Ranges of a node's keys with the position of the first: of the node, of the nodes it sees, and above.
        parts = [(at[i] + above, node.start, len(node))]
        parts += [(at[j] + above, graph.nodes[j].start, len(graph.nodes[j])) for j in node.sees]
        parts += [(0, 0, above)] if above else []
        for t0 in range(0, len(node), _TILE):
            t1 = min(t0 + _TILE, len(node))
            first = node.start + t0  # position of the first query
            for own, (where, position, length) in enumerate(parts):
                # Keys from the first that a query sees; queries up to the last that sees the last key.
                k0 = max(0, first - window + 1 - position)
                k1 = min(length, t1) if own == 0 else length
                last = min(t1 - t0, position + k1 - 1 + window - first)
                if k0 < k1 and last > 0:
                    q0 = at[i] + t0
                    shift = first - position - k0
                    cut.append(Tile(q0, q0 + last, where + k0, where + k1, own == 0, False, shift, window))
    return tuple(cut)


@lru_cache(maxsize=64)  # inner tiles of a row are equal
def _bias(shift: int, queries: int, keys: int, window: int) -> Tensor:
    apart_QK = torch.arange(queries)[:, None] + shift - torch.arange(keys)
    return torch.zeros(queries, keys).masked_fill_((apart_QK < 0) | (apart_QK >= window), -torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Tile],
    scale: float,
    sinks_H: Tensor | None = None,
    whole: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None,
) -> Tensor:
    """Attention output, [B, H, T, size of values], in float32. `whole` computes the same function with the bits that
    the output must have."""
    size, wide = value.shape[3], max(key.shape[3], value.shape[3])
    if key.shape[3] != size:  # the kernel needs equal sizes; zeros change no product
        query, key, value = (F.pad(x, (0, wide - x.shape[3])) for x in (query, key, value))
    return _Attention.apply(query, key, value, sinks_H, parts, scale, whole)[..., :size]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        parts: Sequence[Tile],
        scale: float,
        whole: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None,
    ) -> Tensor:
        if whole is not None and not any(ctx.needs_input_grad):
            return whole(query, key, value, scale)
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3])
        for part in parts:
            q, at = slice(part.q0, part.q1), slice(part.k0, part.k1)
            part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, q], key[:, :, at], value[:, :, at], 0.0, part.causal, attn_mask=part.bias, scale=scale
            )
            if part.first:
                out[:, :, q], lse[:, :, q] = part_out, part_lse
                continue
            both = torch.logaddexp(lse[:, :, q], part_lse)
            out[:, :, q] *= (lse[:, :, q] - both).exp()[..., None]
            out[:, :, q].addcmul_(part_out, (part_lse - both).exp()[..., None])
            lse[:, :, q] = both
        if sinks_H is not None:
            both = torch.logaddexp(lse, sinks_H.to(lse.dtype)[None, :, None])
            out *= (lse - both).exp()[..., None]
            lse = both
        if whole is not None:
            out = whole(query, key, value, scale)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, out, lse = ctx.saved_tensors
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))
        for part in ctx.parts:
            q, at = slice(part.q0, part.q1), slice(part.k0, part.k1)
            of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grads[0][:, :, q],
                query[:, :, q],
                key[:, :, at],
                value[:, :, at],
                out[:, :, q],
                lse[:, :, q],
                0.0,
                part.causal,
                attn_mask=part.bias,
                scale=ctx.scale,
            )
            grad_query[:, :, q] += of_query
            grad_key[:, :, at] += of_key
            grad_value[:, :, at] += of_value
        of_sinks_H = None
        if sinks_H is not None:  # its probability times (0 - the output's share), as of any key with a value of 0
            share_BHT = (sinks_H.to(lse.dtype)[None, :, None] - lse).exp()
            of_sinks_H = -(share_BHT * (grads[0] * out).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        return grad_query, grad_key, grad_value, of_sinks_H, None, None, None


def row(count: int, end: int, window: int | None = None) -> tuple[Tile, ...]:
    """The calls for a plain row of `end` keys, whose last `count` tokens are the queries."""
    return tiles(row_graph(count, end), end - count, window)


def row_graph(count: int, end: int) -> Graph:
    """The graph of the last `count` of the `end` tokens of a plain row."""
    return Graph((Node(np.arange(count), end - count),))
