"""Causal attention of many queries in the engine, on one thread of a CPU and in float32: FlashAttention's loop
(arXiv:2205.14135) over blocks of keys. oneDNN computes the products, our own kernel the softmax between them.

PyTorch's own flash attention takes its products from MKL, which reaches half of oneDNN's speed on some processors
(docs/decisions/0036-onednn.md). The trainer uses PyTorch's, with gradients and without. Suffixes as in
`etude.models.attention`; N are the rows of a tile, tokens of each query head of one key head.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.models import attention, gemm
from etude.models.kernels import exponential, highest_of

MANY = 16  # from so many queries on, this is faster than reading the keys once for each query
_ROWS, _KEYS = 512, 512  # size of a tile, whose scores fit into the second-level cache
_ROUND = 64  # the number of the last keys is rounded up to a multiple of this
_LOWEST = np.finfo(np.float32).min


def takes(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor) -> bool:
    """Whether `causal` applies: enough queries, keys as wide as values, one thread."""
    alike = query_BHTD.shape[3] == value_BKTD.shape[3]
    return alike and query_BHTD.shape[2] >= MANY and torch.get_num_threads() == 1 and gemm.takes(query_BHTD, key_BKTD)


def causal(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
    """`attention.causal`, [B, H, T, D]: with fewer queries than keys, the queries are those of the last keys."""
    if not takes(query_BHTD, key_BKTD, value_BKTD):
        return attention.causal(query_BHTD, key_BKTD, value_BKTD, scale)
    B, H, T, D = query_BHTD.shape
    K, above = key_BKTD.shape[1], key_BKTD.shape[2] - T
    group = H // K
    tokens = max(gemm.ROUND, _ROWS // group)
    out_BHTD = torch.empty((B, H, T, D))
    for b in range(B):
        for k in range(K):
            heads = slice(k * group, (k + 1) * group)
            for begin in range(0, T, tokens):
                end = min(T, begin + tokens)
                query_ND = query_BHTD[b, heads, begin:end].reshape(-1, D)
                keys_SD, values_SD = (x[b, k, : above + end] for x in (key_BKTD, value_BKTD))
                out_ND = _tile(query_ND, keys_SD, values_SD, end - begin, scale)
                out_BHTD[b, heads, begin:end] = out_ND.view(group, end - begin, D)
    return out_BHTD


def _tile(query_ND: Tensor, key_SD: Tensor, value_SD: Tensor, tokens: int, scale: float) -> Tensor:
    """Attention output, [N, D], of N = heads * tokens queries, those of the last `tokens` of S keys, for each head."""
    N = len(query_ND)
    query_ND = _rounded(query_ND, gemm.ROUND)
    out_ND = torch.zeros(query_ND.shape)
    highest_N, total_N = np.full(N, _LOWEST, np.float32), np.zeros(N, np.float32)
    first = len(key_SD) - tokens
    for start in range(0, len(key_SD), _KEYS):
        keys_MD, values_MD = (_rounded(x[start : start + _KEYS], _ROUND) for x in (key_SD, value_SD))
        scores_NM = gemm.onednn(query_ND, keys_MD)
        fold(scores_NM.numpy(), first - start, tokens, np.float32(scale), highest_N, total_N, out_ND.numpy())
        out_ND += gemm.onednn(scores_NM, values_MD.t())
    return out_ND[:N] / torch.from_numpy(total_N)[:, None]


def _rounded(x_ND: Tensor, size: int) -> Tensor:
    """The rows, with rows of zeros up to a multiple of `size`: oneDNN compiles a kernel for each shape."""
    extra = -len(x_ND) % size
    return F.pad(x_ND, (0, 0, 0, extra)) if extra else x_ND


@numba.njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
def fold(scores_NM, first, tokens, scale, highest_N, total_N, out_ND) -> None:  # type: ignore[no-untyped-def]
    """Turns scores of M keys into exp(scale * (score - highest so far)), 0 for keys that a query does not see; rescales
    `total_N` and `out_ND` to the new highest scores. Query n sees keys up to first + n % tokens."""
    exponents = np.empty(scores_NM.shape[1], np.int32)
    for n in range(len(highest_N)):
        scores_M = scores_NM[n]
        seen = min(max(first + n % tokens + 1, 0), len(scores_M))
        scores_M[seen:] = np.float32(0)
        if seen == 0:
            continue
        highest = max(highest_N[n], highest_of(scores_M, exponents, seen))
        if highest > highest_N[n]:
            factor = np.exp((highest_N[n] - highest) * scale)
            highest_N[n] = highest
            total_N[n] *= factor
            for d in range(out_ND.shape[1]):
                out_ND[n, d] *= factor
        total_N[n] += exponential(scores_M, exponents, seen, highest, scale)
