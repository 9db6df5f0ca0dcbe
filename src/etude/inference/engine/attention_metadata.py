"""Attention for a flat batch of tokens from several sequences; each token attends to its sequence's pages in the KV
cache."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.inference.engine.cache import PagedCache
from etude.models import batch_invariant
from etude.models.attention_kernel import causal
from etude.models.block_attention import PLAIN, AttentionVariant
from etude.models.kernels import BLOCK, collect, paged_attention, store

_LONG = 16  # from so many tokens of a sequence in a pass, attention over a copy of its pages is faster than our kernel


class PagedBatch:
    """The N tokens of one forward pass [1, N]. Token n stands at `position_N[n]` of the sequence in row `row_N[n]` of
    `table`, int32 [rows, pages of a sequence]. On the CPU a pass may be padded with further tokens; they see nothing,
    and their keys and values are not stored. Tokens of a sequence are neighbours, in order of position. Sequences that
    share pages should be neighbours: the kernel then reads those pages once."""

    takes_variants = True

    def __init__(self, cache: PagedCache, table: np.ndarray, row_N: np.ndarray, position_N: np.ndarray) -> None:
        self.cache = cache
        self.table = table
        self.row_N = row_N
        self.position_N = position_N

    def attend(
        self,
        layer: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        """Attention output, [1, H, T, D]; writes the keys and values to the cache. On the CPU it computes in float32,
        whatever the weights' type; our kernel there supports neither windows nor sinks."""
        dtype = query_BHTD.dtype
        if query_BHTD.device.type == "cpu":
            query_BHTD, key_BKTD, value_BKTD = (x.float() for x in (query_BHTD, key_BKTD, value_BKTD))
        if not (self._kernel and variant.plain):
            return self._gather.attend(layer, query_BHTD, key_BKTD, value_BKTD, scale, variant).to(dtype)
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
        out_THD = self._paged.attend(layer, query, key, value, scale)
        return out_THD.to(dtype).transpose(0, 1).unsqueeze(0)

    def attend_by_token(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float
    ) -> Tensor:
        """`attend` for a pass on the CPU without transpositions: [T, H, D], float32 and contiguous."""
        return self._paged.attend(layer, query_THD, key_TKD, value_TKD, scale)

    @cached_property
    def _kernel(self) -> bool:
        return self.cache.keys.device.type == "cpu" and self.cache.keys.dtype == torch.float32

    @cached_property
    def _paged(self) -> _Paged:
        return _Paged(self)

    @cached_property
    def _gather(self) -> _Gather:
        return _Gather(self, self.cache.keys.device)


class _Paged:
    """Attention on the CPU: our kernel, or `causal` for many tokens of one sequence unless batch-invariant."""

    def __init__(self, batch: PagedBatch) -> None:
        self.table, self.row_N, self.position_N = batch.table, batch.row_N, batch.position_N
        self.keys_L, self.values_L = batch.cache.keys.numpy(), batch.cache.values.numpy()
        self.long = [] if batch_invariant.is_on() else _long_runs(self.row_N)
        if self.long:
            short_N = np.ones(len(self.row_N), bool)
            for a, b in self.long:
                short_N[a:b] = False
            self.short = np.flatnonzero(short_N)
            longest = max(int(self.position_N[b - 1]) // BLOCK + 1 for _, b in self.long)
            kept = batch.cache.kept
            # One buffer for all layers.
            self.copied = [torch.empty((kept.heads, longest * BLOCK, size)) for size in (kept.key, kept.value)]

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        """Attention output [T, H, D], with D of the values; all tensors float32 and contiguous."""
        T, H, key_size = query_THD.shape
        D = value_TKD.shape[2]
        count = len(self.row_N)
        pages = self.keys_L[layer], self.values_L[layer]
        query_NHD, key_NKD, value_NKD = (x.numpy()[:count] for x in (query_THD, key_TKD, value_TKD))
        out_THD = torch.empty(T, H, D)
        out = out_THD.numpy()
        out[count:] = 0.0
        store(key_NKD, value_NKD, *pages, self.table, self.row_N, self.position_N)
        attend, factor = paged_attention(key_size, D), np.float32(scale)
        if not self.long:
            attend(query_NHD, *pages, self.table, self.row_N, self.position_N, factor, out[:count])
        elif len(self.short):
            short = np.empty((len(self.short), H, D), np.float32)
            row_S, position_S = self.row_N[self.short], self.position_N[self.short]
            attend(query_NHD[self.short], *pages, self.table, row_S, position_S, factor, short)
            out[self.short] = short
        for a, b in self.long:
            end = int(self.position_N[b - 1]) + 1
            collect(self.table[self.row_N[a], : -(-end // BLOCK)], *pages, *(x.numpy() for x in self.copied))
            key_1KTD, value_1KTD = (x[None, :, :end] for x in self.copied)
            query_1HTD = query_THD[a:b].transpose(0, 1).unsqueeze(0)
            out_THD[a:b] = causal(query_1HTD, key_1KTD, value_1KTD, scale)[0].transpose(0, 1)
        return out_THD


def _long_runs(row_N: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of each run of at least `_LONG` tokens of one sequence."""
    if len(row_N) < _LONG:
        return []
    cuts = np.flatnonzero(np.diff(row_N)) + 1
    return [(a, b) for a, b in pairwise([0, *cuts.tolist(), len(row_N)]) if b - a >= _LONG]


class _Gather:
    """Attention in torch operations, for accelerators, windows and sinks: sequences are padded to the longest, and
    their pages gathered, for a window only the pages within its reach."""

    def __init__(self, batch: PagedBatch, device: torch.device) -> None:
        self.cache, self.device = batch.cache, device
        self.rows, local_N = np.unique(batch.row_N, return_inverse=True)
        counts = np.bincount(local_N)
        first = np.zeros(len(self.rows), dtype=np.int64)
        first[local_N[::-1]] = np.arange(len(local_N))[::-1]
        self.table = batch.table
        self.num_pages = int(batch.position_N.max()) // BLOCK + 1
        self.position_RT = np.full((len(self.rows), counts.max()), -1, dtype=np.int64)
        slot_N = np.arange(len(local_N)) - first[local_N]
        self.position_RT[local_N, slot_N] = batch.position_N
        self.page_N = self._tensor(batch.table[batch.row_N, batch.position_N // BLOCK])
        self.offset_N = self._tensor(batch.position_N % BLOCK)
        self.local_N, self.slot_N = self._tensor(local_N), self._tensor(slot_N)
        self._seen: dict[int | None, tuple[Tensor, Tensor]] = {}

    def _tensor(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device, torch.int64)

    def _pages(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Pages [R, P] of every row, and a mask of the tokens in them that a query sees, [R, 1, T, P * BLOCK]."""
        if window not in self._seen:
            begin_R, count = np.zeros(len(self.rows), np.int64), self.num_pages
            if window is not None:
                begin_R = np.maximum(self.position_RT[:, 0] - window + 1, 0) // BLOCK
                count = int((self.position_RT.max(axis=1) // BLOCK - begin_R).max()) + 1
            number_RP = begin_R[:, None] + np.arange(count)
            key_RL = (number_RP[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(len(self.rows), -1)
            # A padded query sees the first key, so that its softmax is defined.
            query_RT = np.where(self.position_RT < 0, key_RL[:, :1], self.position_RT)
            visible = self._tensor(key_RL)[:, None] <= self._tensor(query_RT)[..., None]
            if window is not None:
                visible &= self._tensor(key_RL)[:, None] > self._tensor(query_RT)[..., None] - window
            held_RP = np.minimum(number_RP, self.num_pages - 1)  # later pages are not visible
            self._seen[window] = self._tensor(self.table[self.rows[:, None], held_RP]), visible.unsqueeze(1)
        return self._seen[window]

    def attend(
        self,
        layer: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        count, padding = len(self.page_N), query_BHTD.shape[2] - len(self.page_N)
        query, key, value = (x[0, :, :count].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.page_N, :, self.offset_N] = key.to(keys.dtype)
        values[self.page_N, :, self.offset_N] = value.to(values.dtype)
        (R, T), (H, K) = self.position_RT.shape, (query.shape[1], keys.shape[1])
        query_RTHD = query.new_zeros(R, T, H, query.shape[2])
        query_RTHD[self.local_N, self.slot_N] = query
        table_RP, mask_R1TL = self._pages(variant.window)
        row_keys, row_values = (
            x[table_RP].transpose(1, 2).flatten(2, 3).repeat_interleave(H // K, dim=1).to(query.dtype)
            for x in (keys, values)
        )
        query_RHTD = query_RTHD.transpose(1, 2)
        if variant.sinks_H is None:
            out_RHTD = F.scaled_dot_product_attention(
                query_RHTD, row_keys, row_values, attn_mask=mask_R1TL, scale=scale
            )
        else:
            out_RHTD = _with_sinks(query_RHTD, row_keys, row_values, mask_R1TL, scale, variant.sinks_H)
        out_NHD = out_RHTD.transpose(1, 2)[self.local_N, self.slot_N]
        return F.pad(out_NHD, (0, 0, 0, 0, 0, padding)).transpose(0, 1).unsqueeze(0)


def _with_sinks(
    query_RHTD: Tensor, key_RHLD: Tensor, value_RHLD: Tensor, mask_R1TL: Tensor, scale: float, sinks_H: Tensor
) -> Tensor:
    """Attention whose softmax has one more logit for each head, without a value."""
    score_RHTL = (query_RHTD.float() @ key_RHLD.float().transpose(2, 3)) * scale
    score_RHTL = score_RHTL.masked_fill(~mask_R1TL, -torch.inf)
    sinks_RHT1 = sinks_H.float()[None, :, None, None].expand(*score_RHTL.shape[:3], 1)
    share_RHTL = torch.cat([score_RHTL, sinks_RHT1], dim=3).softmax(dim=3)[..., :-1]
    return (share_RHTL @ value_RHLD.float()).to(query_RHTD.dtype)
