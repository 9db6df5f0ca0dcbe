"""The attention function of trainer and engine, registered with transformers as "etude".

A `layout=` keyword of the model's forward reaches every attention layer through transformers' keyword arguments. It
decides which tokens see which; transformers builds no mask for an implementation that it does not know, so nothing here
is quadratic in the length of a packed row.

    layout=None             plain rows [B, T], padded on the right: causal attention
    layout=SegmentLayout    one row [1, T]: the nodes of a segment graph, below nodes computed before (`prefix`) or not
    any other `AttentionLayout`      e.g. the engine's paged KV cache (`etude.inference.engine.attention_metadata`)

Where several ranks compute a row together (`context_parallel`), a layout sees the whole row, and some of the heads.

Shapes inside: query_BHTD, key_BKTD, value_BKTD with H query heads and K key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from etude.models import batch_invariant, block_attention, context_parallel, flex
from etude.models.block_attention import PLAIN, AttentionVariant
from etude.models.segments import Graph

NAME = "etude"
KeyValues = dict[int, tuple[Tensor, Tensor]]  # by layer: keys after rotation and values, [1, K, T, D]


class AttentionLayout(Protocol):
    """Decides which tokens of a forward pass see which. A layout with `takes_variants` gets windows and sinks, as an
    `AttentionVariant` at the end of the arguments."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [B, H, T, D]."""
        ...


class CausalLayout:
    """Plain causal attention of rows; it keeps the keys of each layer, after rotation."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [B, H, T, D]."""
        self.keys[layer] = key_BKTD
        return causal(query_BHTD, key_BKTD, value_BKTD, scale)


class SegmentLayout:
    """The nodes of `graph` in one row [1, T]. Each of them also sees all tokens of `prefix`: the keys and values of
    earlier forward passes, in layout order. With `keep`, `kept` holds those of this pass, for passes below it. Build
    the layout once per pass: its blocks serve every layer and the backward pass."""

    takes_variants = True

    def __init__(self, graph: Graph, prefix: Sequence[KeyValues] = (), *, keep: bool = False) -> None:
        self.graph, self.prefix = graph, tuple(prefix)
        self.kept: KeyValues | None = {} if keep else None
        self.above = sum(next(iter(part.values()))[0].shape[2] for part in self.prefix)
        # Keyed by window: most models have none, or one.
        self._tiles: dict[int | None, tuple[block_attention.Tile, ...]] = {}
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self,
        layer: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        """Attention output, [1, H, T, D]. Raises ValueError for a row whose length differs from the graph's, and for a
        window over documents."""
        if query_BHTD.shape[0] != 1 or query_BHTD.shape[2] != self.graph.length:
            raise ValueError(
                f"the segment graph describes a row [1, {self.graph.length}], got {tuple(query_BHTD.shape)}"
            )
        if self.kept is not None:
            # Only at the first time: activation checkpointing computes a layer again, in the backward pass.
            self.kept.setdefault(layer, (key_BKTD, value_BKTD))
        # On the CPU in float32 for weights of any type, see `causal`; so is the prefix, to sum its gradients unrounded.
        dtype = torch.float32 if query_BHTD.device.type == "cpu" else query_BHTD.dtype
        key, value = (
            torch.cat([*(part[layer][i].to(dtype) for part in self.prefix), own.to(dtype)], dim=2)
            for i, own in enumerate((key_BKTD, value_BKTD))
        )
        window, sinks_H = variant.window, variant.sinks_H
        if query_BHTD.device.type == "cpu":
            if window not in self._tiles:
                self._tiles[window] = block_attention.tiles(self.graph, self.above, window)
            parts = self._tiles[window]
            out = block_attention.attend(query_BHTD.to(dtype), key, value, parts, scale, sinks_H)
            return out.to(query_BHTD.dtype)
        if self.graph.length == 1 and variant.plain:  # it sees every key, so the kernel need not be compiled for it
            return causal(query_BHTD, key, value, scale)
        if window not in self._masks:
            self._masks[window] = flex.block_mask(self.graph, self.above, query_BHTD.device, window)
        return flex.attend(query_BHTD, key, value, self._masks[window], scale, sinks_H)


def causal(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float, variant: AttentionVariant = PLAIN
) -> Tensor:
    """Causal attention of whole rows; padding on the right needs no mask, for no real token sees it. With fewer queries
    than keys, the queries are those of the last keys. In batch-invariant mode, the result has the engine's bits."""
    count, end = query_BHTD.shape[2], key_BKTD.shape[2]
    if batch_invariant.is_on():
        if not variant.plain:
            raise ValueError("windows and sinks of attention have no batch-invariant mode")
        return block_attention.attend(
            query_BHTD, key_BKTD, value_BKTD, block_attention.row(count, end), scale, whole=batch_invariant.attention
        )
    # The engine's CPU kernel computes attention in float32 for weights of any type; this function must agree.
    on_cpu = query_BHTD.device.type == "cpu"
    dtype = torch.float32 if on_cpu else query_BHTD.dtype
    query, key, value = (x.to(dtype) for x in (query_BHTD, key_BKTD, value_BKTD))
    if on_cpu and (1 < count < end or not variant.plain):
        parts = block_attention.row(count, end, variant.window)
        return block_attention.attend(query, key, value, parts, scale, variant.sinks_H).to(query_BHTD.dtype)
    if not variant.plain:
        return flex.attend(
            query, key, value, _row_mask(count, end, query.device, variant.window), scale, variant.sinks_H
        )
    repeats = query_BHTD.shape[1] // key_BKTD.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if 1 < count < end:
        mask_TT = torch.ones(count, end, dtype=torch.bool, device=query.device).tril(end - count)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_TT, scale=scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=count > 1, scale=scale)
    return out.to(query_BHTD.dtype)


@lru_cache(maxsize=8)  # every layer of a row needs the same
def _row_mask(count: int, end: int, device: torch.device, window: int | None) -> BlockMask:
    return flex.block_mask(block_attention.row_graph(count, end), end - count, device, window)


def etude_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: AttentionLayout | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer: `sliding_window` in tokens, `s_aux` the logits of
    attention sinks, [H]. Raises ValueError for unsupported features: dropout, soft-capping, a bias by position, and
    windows and sinks in a layout that does not take them."""
    if attention_mask is not None:
        raise ValueError("pass a layout instead of an attention mask; rows are padded on the right")
    if dropout:
        raise ValueError("attention dropout is not supported: set attention_dropout to 0 in config.json")
    for name in ("softcap", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"attention with `{name}` is not supported")
    row = context_parallel.current()
    if row is not None:
        query, key, value, s_aux = row.gathered(context_parallel.Heads(query, key, value, s_aux))
    variant = AttentionVariant(sliding_window, s_aux)
    if layout is None:
        short = sliding_window is None or query.shape[2] <= sliding_window
        out = causal(query, key, value, scaling, AttentionVariant(None, s_aux) if short else variant)
    elif variant.plain:
        out = layout.attend(module.layer_idx, query, key, value, scaling)
    elif getattr(layout, "takes_variants", False):
        out = cast(Any, layout).attend(module.layer_idx, query, key, value, scaling, variant)
    else:
        raise ValueError("documents know no sliding windows and no attention sinks")
    if row is not None:
        out = row.scattered(out)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, etude_attention)
