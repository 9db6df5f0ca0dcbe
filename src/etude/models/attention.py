"""The attention function of trainer and engine, registered with transformers as "etude".

A `layout=` keyword of the model's forward reaches every attention layer through transformers' keyword arguments. It
says which tokens see which; transformers builds no mask for an implementation that it does not know, so nothing here is
quadratic in the length of a packed row.

    layout=None            plain rows [B, T], padded on the right: causal attention
    layout=PackedGroups    one row [1, T]: per group a prompt, then its completions, each seeing the prompt and itself
    any other `Layout`     e.g. the engine's paged KV cache (`etude.inference.cache`)

Shapes inside: query_BHTD, key_BKTD, value_BKTD with H query heads and K key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "etude"


class Layout(Protocol):
    """Decides which tokens of a forward pass see which."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [B, H, T, D]."""
        ...


@dataclass(frozen=True)
class SharedPrompt:
    """One prompt followed by G completions, none of which sees another."""

    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(self.completion_lengths)


class PackedGroups:
    """Several `SharedPrompt` groups, one after the other, in a single row [1, T].

    Build it once per micro-batch: the index tensors are reused by every layer and by the backward pass.
    """

    def __init__(self, groups: Sequence[SharedPrompt], device: torch.device | str = "cpu") -> None:
        self.groups = tuple(groups)
        self.device = torch.device(device)
        self.length = sum(group.length for group in self.groups)
        self._pads = [_Padding(group, self.device) for group in self.groups]

    @cached_property
    def position_ids(self) -> Tensor:
        """int64 [1, T]: every completion goes on where its prompt ended."""
        pieces = []
        for group in self.groups:
            pieces.append(torch.arange(group.prompt_length))
            pieces += [torch.arange(group.prompt_length, group.prompt_length + n) for n in group.completion_lengths]
        return torch.cat(pieces).unsqueeze(0).to(self.device)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        if query_BHTD.shape[0] != 1 or query_BHTD.shape[2] != self.length:
            raise ValueError(f"packed groups describe a row [1, {self.length}], got {tuple(query_BHTD.shape)}")
        sizes = [group.length for group in self.groups]
        rows = zip(*(x.split(sizes, dim=2) for x in (query_BHTD, key_BKTD, value_BKTD)), strict=True)
        outputs = []
        for group, pad, (query, key, value) in zip(self.groups, self._pads, rows, strict=True):
            outputs += _attend_group(group, pad, query, key, value, scale)
        return torch.cat(outputs, dim=2)


_SHORTEST = 0.75  # of a bucket's longest completion: attention over padding is work for nothing


class _Bucket:
    """Index tensors that turn completions of similar length into a padded batch [G, C] and back."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], prompt_length: int, device: torch.device) -> None:
        width = max(lengths)
        columns = torch.arange(width)
        starts_G1, lengths_G1 = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
        valid_GC = columns < lengths_G1
        # Padding repeats the completion's first token: finite values that no real token looks at.
        gather_GC = torch.where(valid_GC, starts_G1 + columns, starts_G1)
        self.tokens = gather_GC[valid_GC]  # where the real tokens stand among the group's completions
        self.gather_GC = gather_GC.to(device)
        self.valid = valid_GC.reshape(-1).nonzero().squeeze(1).to(device)
        own_CC = torch.ones(width, width, dtype=torch.bool).tril()
        prompt_CP = torch.ones(width, prompt_length, dtype=torch.bool)
        # Additive, because a boolean mask is turned into this form again in every call.
        self.mask = torch.zeros(width, prompt_length + width)
        self.mask.masked_fill_(~torch.cat([prompt_CP, own_CC], dim=1), float("-inf"))
        self.mask = self.mask.to(device)


class _Padding:
    """The completions of a group in buckets, and the way back to packed order."""

    def __init__(self, group: SharedPrompt, device: torch.device) -> None:
        lengths = group.completion_lengths
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        buckets: list[list[int]] = []
        for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
            if not buckets or lengths[i] < _SHORTEST * lengths[buckets[-1][0]]:
                buckets.append([])
            buckets[-1].append(i)
        self.buckets = [
            _Bucket([starts[i] for i in members], [lengths[i] for i in members], group.prompt_length, device)
            for members in buckets
        ]
        order = torch.cat([bucket.tokens for bucket in self.buckets]) if buckets else torch.empty(0, dtype=torch.int64)
        self.back = order.argsort().to(device)


def _attend_group(
    group: SharedPrompt, pad: _Padding, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> list[Tensor]:
    """Outputs [1, H, *, D] of the prompt and of the completions, in packed order."""
    P = group.prompt_length
    prompt = causal(query[:, :, :P], key[:, :, :P], value[:, :, :P], scale)
    if not pad.buckets:
        return [prompt]
    parts = []
    for bucket in pad.buckets:
        G, C = bucket.gather_GC.shape
        query_GHCD, key_GKCD, value_GKCD = (
            x[0, :, P:][:, bucket.gather_GC].transpose(0, 1) for x in (query, key, value)
        )
        key_GKLD = torch.cat([key[:, :, :P].expand(G, -1, -1, -1), key_GKCD], dim=2)
        value_GKLD = torch.cat([value[:, :, :P].expand(G, -1, -1, -1), value_GKCD], dim=2)
        out_GHCD = _sdpa(query_GHCD, key_GKLD, value_GKLD, scale, mask=bucket.mask)
        parts.append(out_GHCD.transpose(0, 1).reshape(query.shape[1], G * C, -1)[:, bucket.valid])
    return [prompt, torch.cat(parts, dim=1)[:, pad.back].unsqueeze(0)]


def causal(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
    """Causal attention of whole rows; padding on the right needs no mask, for no real token sees it."""
    return _sdpa(query_BHTD, key_BKTD, value_BKTD, scale, is_causal=query_BHTD.shape[2] > 1)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    # The engine's CPU kernel computes attention in float32 whatever the weights' type; so does this one, to agree.
    dtype = torch.float32 if query.device.type == "cpu" else query.dtype
    mask = None if mask is None else mask.to(dtype)
    out = F.scaled_dot_product_attention(
        query.to(dtype), key.to(dtype), value.to(dtype), attn_mask=mask, is_causal=is_causal, scale=scale
    )
    return out.to(query.dtype)


def etude_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer.

    Raises ValueError for what it does not compute: dropout, soft-capping, attention sinks, a sliding window shorter
    than the row.
    """
    if attention_mask is not None:
        raise ValueError("pass a layout instead of an attention mask; rows are padded on the right")
    if dropout:
        raise ValueError("attention dropout is not supported: set attention_dropout to 0 in config.json")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"attention with `{name}` is not supported")
    if sliding_window is not None and (layout is not None or query.shape[2] > sliding_window):
        raise ValueError("sliding-window attention is not supported on rows longer than the window")
    if layout is None:
        out = causal(query, key, value, scaling)
    else:
        out = layout.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, etude_attention)
