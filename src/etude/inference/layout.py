"""A flat batch of tokens from several rows, each attending to its row's pages in the KV cache."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.inference.cache import PagedCache
from etude.models.kernels import BLOCK, paged_attention


class PagedBatch:
    """N tokens fed in one forward pass [1, N]: token n stands at `position_N[n]` of the row `row_N[n]`.

    On the CPU the pass may hold more tokens than that; those see nothing, and nothing is kept of them.

    `table` holds the pages of every row. Tokens of a row are in order. Rows that share pages should be neighbours: the
    kernel then reads those pages once.
    """

    def __init__(self, cache: PagedCache, table: np.ndarray, row_N: np.ndarray, position_N: np.ndarray) -> None:
        self.cache = cache
        self.table = table
        self.row_N = row_N
        self.position_N = position_N
        self._gather: _Gather | None = None

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if keys.device.type == "cpu" and keys.dtype == torch.float32:
            n = len(self.row_N)
            out = torch.empty(query.shape, dtype=torch.float32)
            out[n:] = 0.0
            paged_attention(query.shape[-1])(
                _array(query[:n]), _array(key[:n]), _array(value[:n]), keys.numpy(), values.numpy(),
                self.table, self.row_N, self.position_N, np.float32(scale), out[:n].numpy(),
            )  # fmt: skip
            out = out.to(query.dtype)
        else:
            if self._gather is None:
                self._gather = _Gather(self, keys.device)
            out = self._gather.attend(query, key, value, keys, values, scale)
        return out.transpose(0, 1).unsqueeze(0)


def _array(x: Tensor) -> np.ndarray:
    return x.to(torch.float32).contiguous().numpy()


class _Gather:
    """The same attention in torch operations, for accelerators: rows padded to the longest, pages gathered."""

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
