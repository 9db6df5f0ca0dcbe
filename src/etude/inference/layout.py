"""A flat batch of tokens from several rows, each attending to its row's pages in the KV cache."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.inference.cache import PagedCache
from etude.models import exact
from etude.models.attention import causal
from etude.models.kernels import BLOCK, collect, paged_attention, store

_LONG = 16  # tokens of one row in a pass from which PyTorch's kernel over a copy of the row's pages is faster than ours


class PagedBatch:
    """N tokens fed in one forward pass [1, N]: token n stands at `position_N[n]` of the row `row_N[n]`.

    On the CPU the pass may hold more tokens than that; those see nothing, and nothing is kept of them.

    `table` holds the pages of every row. Tokens of a row are neighbours, one position after the other. Rows that share
    pages should be neighbours: the kernel then reads those pages once.
    """

    def __init__(self, cache: PagedCache, table: np.ndarray, row_N: np.ndarray, position_N: np.ndarray) -> None:
        self.cache = cache
        self.table = table
        self.row_N = row_N
        self.position_N = position_N
        self._inner: _Paged | _Gather | None = None

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self._inner is None:
            ours = keys.device.type == "cpu" and keys.dtype == torch.float32
            self._inner = _Paged(self) if ours else _Gather(self, keys.device)
        out = self._inner.attend(query, key, value, keys, values, scale)
        return out.transpose(0, 1).unsqueeze(0)


class _Paged:
    """The attention on the CPU: our kernel, and for many tokens of one row PyTorch's, but not in exact mode."""

    def __init__(self, batch: PagedBatch) -> None:
        self.table, self.row_N, self.position_N = batch.table, batch.row_N, batch.position_N
        cuts = np.flatnonzero(np.diff(self.row_N)) + 1
        runs = pairwise([0, *cuts.tolist(), len(self.row_N)])
        self.long = [] if exact.is_on() else [(a, b) for a, b in runs if b - a >= _LONG]
        short_N = np.ones(len(self.row_N), bool)
        for a, b in self.long:
            short_N[a:b] = False
        self.short = np.flatnonzero(short_N) if self.long else slice(None)
        longest = max((int(self.position_N[b - 1]) // BLOCK + 1 for _, b in self.long), default=0)
        cache = batch.cache.keys
        self.copied = torch.empty((2, cache.shape[2], longest * BLOCK, cache.shape[4]))  # one for all layers

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        count = len(self.row_N)
        out = torch.empty(query.shape, dtype=torch.float32)
        out[count:] = 0.0
        pages = keys.numpy(), values.numpy()
        store(_array(key[:count]), _array(value[:count]), *pages, self.table, self.row_N, self.position_N)
        for a, b in self.long:
            end = int(self.position_N[b - 1]) + 1
            collect(self.table[self.row_N[a], : -(-end // BLOCK)], *pages, *self.copied.numpy())
            key_1KTD, value_1KTD = self.copied[:, None, :, :end]
            out[a:b] = causal(query[a:b].float().transpose(0, 1)[None], key_1KTD, value_1KTD, scale)[0].transpose(0, 1)
        query_SHD = query[:count][self.short]
        if len(query_SHD):
            out_SHD = torch.empty(query_SHD.shape)
            row_S, position_S = self.row_N[self.short], self.position_N[self.short]
            attend = paged_attention(query.shape[-1])
            attend(_array(query_SHD), *pages, self.table, row_S, position_S, np.float32(scale), out_SHD.numpy())
            out[:count][self.short] = out_SHD
        return out.to(query.dtype)


def _array(x: Tensor) -> np.ndarray:
    return x.to(torch.float32).contiguous().numpy()


class _Gather:
    """The same in torch operations, for accelerators: rows padded to the longest, pages gathered."""

    def __init__(self, batch: PagedBatch, device: torch.device) -> None:
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
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
        return out_RHTD.transpose(1, 2)[self.local_N, self.slot_N]
