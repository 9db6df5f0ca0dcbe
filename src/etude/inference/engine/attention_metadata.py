"""A flat batch of tokens from several sequences, each attending to its sequence's pages in the KV cache."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.inference.engine.cache import PagedCache
from etude.models import batch_invariant
from etude.models.attention_kernel import causal
from etude.models.kernels import BLOCK, collect, paged_attention, store

_LONG = 16  # tokens of a sequence in a pass from which attention over a copy of its pages is faster than our kernel


class PagedBatch:
    """N tokens fed in one forward pass [1, N]: token n stands at `position_N[n]` of the sequence in row `row_N[n]` of
    `table`, int32 [rows, pages of a sequence]. On the CPU the pass may hold more tokens than that; those see nothing,
    and nothing is kept of them. Tokens of a sequence are neighbours, one position after the other. Sequences that share
    pages should be neighbours: the kernel then reads those pages once."""

    def __init__(self, cache: PagedCache, table: np.ndarray, row_N: np.ndarray, position_N: np.ndarray) -> None:
        self.cache = cache
        self.table = table
        self.row_N = row_N
        self.position_N = position_N
        self._inner: _Paged | _Gather | None = None

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [1, H, T, D]; the keys and values go to the cache."""
        if isinstance(self._made, _Gather):
            return self._made.attend(layer, query_BHTD, key_BKTD, value_BKTD, scale)
        query, key, value = (x[0].transpose(0, 1).float().contiguous() for x in (query_BHTD, key_BKTD, value_BKTD))
        out_THD = self._made.attend(layer, query, key, value, scale)
        return out_THD.to(query_BHTD.dtype).transpose(0, 1).unsqueeze(0)

    def attend_by_token(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float
    ) -> Tensor:
        """`attend` for a pass on the CPU in float32, contiguous, without transpositions: [T, H, D]."""
        assert isinstance(self._made, _Paged)
        return self._made.attend(layer, query_THD, key_TKD, value_TKD, scale)

    @property
    def _made(self) -> _Paged | _Gather:
        if self._inner is None:
            keys = self.cache.keys
            plain = keys.device.type == "cpu" and keys.dtype == torch.float32
            self._inner = _Paged(self) if plain else _Gather(self, keys.device)
        return self._inner


class _Paged:
    """The attention on the CPU: our kernel, and for many tokens of one sequence `causal` unless batch-invariant."""

    def __init__(self, batch: PagedBatch) -> None:
        self.table, self.row_N, self.position_N = batch.table, batch.row_N, batch.position_N
        cache = batch.cache.keys
        self.keys_L, self.values_L = cache.numpy(), batch.cache.values.numpy()
        self.long = [] if batch_invariant.is_on() else _long_runs(self.row_N)
        if self.long:
            short_N = np.ones(len(self.row_N), bool)
            for a, b in self.long:
                short_N[a:b] = False
            self.short = np.flatnonzero(short_N)
            longest = max(int(self.position_N[b - 1]) // BLOCK + 1 for _, b in self.long)
            self.copied = torch.empty((2, cache.shape[2], longest * BLOCK, cache.shape[4]))  # one for all layers

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        """[T, H, D]; all float32 and contiguous."""
        T, H, D = query_THD.shape
        count = len(self.row_N)
        pages = self.keys_L[layer], self.values_L[layer]
        query_NHD, key_NKD, value_NKD = (x.numpy()[:count] for x in (query_THD, key_TKD, value_TKD))
        out_THD = torch.empty(T, H, D)
        out = out_THD.numpy()
        out[count:] = 0.0
        store(key_NKD, value_NKD, *pages, self.table, self.row_N, self.position_N)
        attend, factor = paged_attention(D), np.float32(scale)
        if not self.long:
            attend(query_NHD, *pages, self.table, self.row_N, self.position_N, factor, out[:count])
        elif len(self.short):
            short = np.empty((len(self.short), H, D), np.float32)
            row_S, position_S = self.row_N[self.short], self.position_N[self.short]
            attend(query_NHD[self.short], *pages, self.table, row_S, position_S, factor, short)
            out[self.short] = short
        for a, b in self.long:
            end = int(self.position_N[b - 1]) + 1
            collect(self.table[self.row_N[a], : -(-end // BLOCK)], *pages, *self.copied.numpy())
            key_1KTD, value_1KTD = self.copied[:, None, :, :end]
            query_1HTD = query_THD[a:b].transpose(0, 1).unsqueeze(0)
            out_THD[a:b] = causal(query_1HTD, key_1KTD, value_1KTD, scale)[0].transpose(0, 1)
        return out_THD


def _long_runs(row_N: np.ndarray) -> list[tuple[int, int]]:
    """Where tokens of one sequence begin and end, if there are many of them."""
    if len(row_N) < _LONG:
        return []
    cuts = np.flatnonzero(np.diff(row_N)) + 1
    return [(a, b) for a, b in pairwise([0, *cuts.tolist(), len(row_N)]) if b - a >= _LONG]


class _Gather:
    """The attention in torch operations, for accelerators: sequences padded to the longest, pages gathered."""

    def __init__(self, batch: PagedBatch, device: torch.device) -> None:
        self.cache = batch.cache
        rows, local_N = np.unique(batch.row_N, return_inverse=True)
        counts = np.bincount(local_N)
        first = np.zeros(len(rows), dtype=np.int64)
        first[local_N[::-1]] = np.arange(len(local_N))[::-1]
        num_pages = int(batch.position_N.max()) // BLOCK + 1
        position_RT = np.full((len(rows), counts.max()), -1, dtype=np.int64)
        slot_N = np.arange(len(local_N)) - first[local_N]
        position_RT[local_N, slot_N] = batch.position_N

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, torch.int64)

        self.page_N = tensor(batch.table[batch.row_N, batch.position_N // BLOCK])
        self.offset_N = tensor(batch.position_N % BLOCK)
        self.table_RP = tensor(batch.table[rows, :num_pages])
        self.local_N, self.slot_N = tensor(local_N), tensor(slot_N)
        self.shape = position_RT.shape
        # A padded query looks at the first key, so that its softmax is defined.
        visible = torch.arange(num_pages * BLOCK, device=device) <= tensor(position_RT).clamp(min=0)[..., None]
        self.mask_R1TL = visible.unsqueeze(1)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.page_N, :, self.offset_N] = key.to(keys.dtype)
        values[self.page_N, :, self.offset_N] = value.to(values.dtype)
        R, T = self.shape
        H, K, D = query.shape[1], keys.shape[1], query.shape[2]
        query_RTHD = query.new_zeros(R, T, H, D)
        query_RTHD[self.local_N, self.slot_N] = query
        row_keys, row_values = (
            x[self.table_RP].transpose(1, 2).reshape(R, K, -1, D).repeat_interleave(H // K, dim=1).to(query.dtype)
            for x in (keys, values)
        )
        out_RHTD = F.scaled_dot_product_attention(
            query_RTHD.transpose(1, 2), row_keys, row_values, attn_mask=self.mask_R1TL, scale=scale
        )
        return out_RHTD.transpose(1, 2)[self.local_N, self.slot_N].transpose(0, 1).unsqueeze(0)
