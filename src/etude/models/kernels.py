"""The engine's CPU kernels, compiled by numba at first use: attention over the paged KV cache, and writing keys and
values to it.

Attention is bound by memory for single rows and by arithmetic for rows that share a prompt. Queries are taken in runs
of `RUN` with the blocks in the outer loop, so a block that several queries of a run see is read from memory once; the
order of a query's own sums depends on its position alone, not on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numba
import numpy as np

RUN = 8
BLOCK = 32  # tokens per block of the KV cache; a multiple of 4

_f4 = np.float32
_LOG2E, _LOWEST, _BIAS, _MANTISSA = _f4(1.4426950408889634), _f4(-126), _f4(127), _f4(8388608)
# Chebyshev interpolation of 2^f on [0, 1), relative error 1e-7: it vectorises, unlike calls of libm's exp.
_C0, _C1, _C2, _C3 = _f4(1.0), _f4(0.693146944), _f4(0.240230456), _f4(0.0554806292)
_C4, _C5, _C6 = _f4(0.00968418643), _f4(0.00123913318), _f4(0.00021865785)


# Inlined: a function of its own would exist twice, and a process that compiles the kernel would call another copy, with
# sums in another order, than one that loads the kernel from numba's cache.
@numba.njit(nogil=True, error_model="numpy", inline="always")
def _ordered(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 as an integer with the same order; also the inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@numba.njit(nogil=True, error_model="numpy", inline="always")
def highest_of(scores, exponents, length):  # type: ignore[no-untyped-def]
    """The highest of the first `length` scores. LLVM compares integers in vectors, but floats one by one."""
    bits = scores.view(np.int32)
    highest = _ordered(bits[0])
    for t in range(length):
        highest = max(highest, _ordered(bits[t]))
    exponents[0] = _ordered(highest)
    return exponents.view(np.float32)[0]


@numba.njit(nogil=True, fastmath=True, error_model="numpy", inline="always")
def exponential(scores, exponents, length, highest, scale):  # type: ignore[no-untyped-def]
    """Turns the first `length` scores into exp(scale * (score - highest)), and returns their sum."""
    factors = exponents.view(np.float32)
    for t in range(length):
        x = max((scores[t] - highest) * (scale * _LOG2E), _LOWEST)
        whole = np.floor(x)
        f = x - whole
        exponents[t] = np.int32((whole + _BIAS) * _MANTISSA)
        scores[t] = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    total = _f4(0)
    for t in range(length):
        p = scores[t] * factors[t]
        scores[t] = p
        total += p
    return total


@numba.njit(nogil=True, fastmath=True, error_model="numpy", inline="always")
def _softmax(scores, exponents, length, scale) -> None:  # type: ignore[no-untyped-def]
    """Softmax of the first `length` scores in place; the rest of the last block becomes 0."""
    highest = highest_of(scores, exponents, length)
    inverse = _f4(1) / exponential(scores, exponents, length, highest, scale)
    for t in range(length):
        scores[t] *= inverse
    for t in range(length, (length + BLOCK - 1) // BLOCK * BLOCK):
        scores[t] = _f4(0)


@cache
def paged_attention(key_size: int, value_size: int) -> Callable[..., None]:
    """The attention kernel for one size of heads: constant trip counts make the inner loops twice as fast."""
    D, E = key_size, value_size

    @numba.njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
    def attend(  # type: ignore[no-untyped-def]
        query_NHD, keys, values, table, row_N, position_N, scale, out_NHD
    ) -> None:
        """Attention of N tokens, each to its row up to itself. keys: [blocks, K, BLOCK, D], values: [blocks, K, BLOCK,
        E]; table: int32 [rows, blocks of a row]; all else float32 and contiguous."""
        N, H, _ = query_NHD.shape
        K = keys.shape[1]
        group = H // K
        longest = 0
        for n in range(N):
            longest = max(longest, position_N[n] + 1)
        width = (longest + BLOCK - 1) // BLOCK * BLOCK
        scores = np.empty((RUN, group + 1, width), np.float32)
        exponents = np.empty(width, np.int32)
        spare = np.empty(E, np.float32)
        for start in range(0, N, RUN):
            stop = min(N, start + RUN)
            num_blocks = 0
            for n in range(start, stop):
                num_blocks = max(num_blocks, position_N[n] // BLOCK + 1)
            for h in range(K):
                # Heads go in pairs; an odd last one is paired with itself and the second result is dropped.
                for b in range(num_blocks):
                    base = b * BLOCK
                    for n in range(start, stop):
                        if base > position_N[n]:
                            continue
                        block = keys[table[row_N[n], b], h]
                        for g in range(0, group, 2):
                            q0 = query_NHD[n, h * group + g]
                            q1 = query_NHD[n, h * group + min(g + 1, group - 1)]
                            s0, s1 = scores[n - start, g, base:], scores[n - start, g + 1, base:]
                            # Two heads by two keys: four sums stay in registers, and every load serves two of them.
                            for t in range(0, BLOCK, 2):
                                s00, s10, s01, s11 = _f4(0), _f4(0), _f4(0), _f4(0)
                                for i in range(D):
                                    k0, k1 = block[t, i], block[t + 1, i]
                                    s00 += k0 * q0[i]
                                    s10 += k0 * q1[i]
                                    s01 += k1 * q0[i]
                                    s11 += k1 * q1[i]
                                s0[t], s0[t + 1] = s00, s01
                                s1[t], s1[t + 1] = s10, s11
                for n in range(start, stop):
                    for g in range(group):
                        _softmax(scores[n - start, g], exponents, position_N[n] + 1, scale)
                        out_NHD[n, h * group + g] = _f4(0)
                for b in range(num_blocks):
                    base = b * BLOCK
                    for n in range(start, stop):
                        if base > position_N[n]:
                            continue
                        block = values[table[row_N[n], b], h]
                        for g in range(0, group, 2):
                            o0 = out_NHD[n, h * group + g]
                            o1 = out_NHD[n, h * group + g + 1] if g + 1 < group else spare
                            w0, w1 = scores[n - start, g, base:], scores[n - start, g + 1, base:]
                            for t in range(0, BLOCK, 4):
                                a0, a1, a2, a3 = w0[t], w0[t + 1], w0[t + 2], w0[t + 3]
                                b0, b1, b2, b3 = w1[t], w1[t + 1], w1[t + 2], w1[t + 3]
                                for i in range(E):
                                    x, y, z, w = block[t, i], block[t + 1, i], block[t + 2, i], block[t + 3, i]
                                    o0[i] += a0 * x + a1 * y + a2 * z + a3 * w
                                    o1[i] += b0 * x + b1 * y + b2 * z + b3 * w

    return attend


@numba.njit(nogil=True, cache=True)
def store(key_NKD, value_NKD, keys, values, table, row_N, position_N) -> None:  # type: ignore[no-untyped-def]
    """Writes the keys and values of N tokens to their pages; shapes as in `paged_attention`."""
    for n in range(len(row_N)):
        page, offset = table[row_N[n], position_N[n] // BLOCK], position_N[n] % BLOCK
        keys[page, :, offset] = key_NKD[n]
        values[page, :, offset] = value_NKD[n]


@numba.njit(nogil=True, cache=True)
def collect(pages_P, keys, values, keys_KTD, values_KTD) -> None:  # type: ignore[no-untyped-def]
    """Copies the keys and values of P pages into contiguous arrays; T is at least P * BLOCK."""
    for h in range(keys.shape[1]):
        for b in range(len(pages_P)):
            keys_KTD[h, b * BLOCK : (b + 1) * BLOCK] = keys[pages_P[b], h]
            values_KTD[h, b * BLOCK : (b + 1) * BLOCK] = values[pages_P[b], h]


# Not fastmath: the products and their sum are rounded as PyTorch rounds them.
@numba.njit(nogil=True, error_model="numpy", cache=True)
def place(  # type: ignore[no-untyped-def]
    keys_LKnD, values_LKnD, cos_TD, sin_TD, first, start, pages_P, keys, values
) -> None:
    """Writes tokens from `first` on of a run that begins at position `start` of a row to the row's pages, keys rotated.
    Token n is rotated by the angles of position start + n, in halves: a pair is (i, i + D/2). keys, values: of all
    layers, [L, blocks, K, BLOCK, D]."""
    layers, heads, length, size = keys_LKnD.shape
    half = size // 2
    for layer in range(layers):
        for h in range(heads):
            for n in range(first, length):
                p = start + n
                cos, sin, key = cos_TD[p], sin_TD[p], keys_LKnD[layer, h, n]
                page, offset = pages_P[p // BLOCK], p % BLOCK
                to = keys[layer, page, h, offset]
                for i in range(half):
                    to[i] = key[i] * cos[i] - key[i + half] * sin[i]
                    to[i + half] = key[i + half] * cos[i + half] + key[i] * sin[i + half]
                values[layer, page, h, offset] = values_LKnD[layer, h, n]
