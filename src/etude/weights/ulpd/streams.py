"""Streams of bits: runs of values in the code L(k, R), signs, and plain numbers. Compiled by numba at first use.

A stream is 32-bit words filled from bit 0 upward. A writer or reader is (next word, held bits, number of held bits).
Words are written and read without a branch: a processor cannot predict whether one is full.
"""

# pyright: basic, reportCallIssue=false

from __future__ import annotations

import numba
import numpy as np

from etude.weights.ulpd.kernels import trailing_zeros

ESCAPE = 24  # number of zero bits before a value written in full
GAP_BITS = 18  # bits of a position inside a chunk
GAP_CODES = 19  # k = 0..18
_u32, _u64 = np.uint32, np.uint64
_LOW32 = _u64(0xFFFFFFFF)
_ONE, _ZERO, _32, _31, _5 = _u64(1), _u64(0), _u64(32), _u64(31), _u64(5)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def run_bits(values, count, codes, full):  # type: ignore[no-untyped-def]
    """(k, bits) of the shortest run, the lowest k among equals; k < codes; a value in full takes `full` bits."""
    best_k, best = 0, np.int64(1) << 60
    for k in range(codes):
        if count * (1 + k) >= best:  # every value takes at least so many bits
            break
        bits = np.int64(0)
        for i in range(count):
            q = np.int64(values[i]) >> k
            bits += q + 1 + k if q < ESCAPE else ESCAPE + full
        if bits < best:
            best_k, best = k, bits
    return best_k, best


@numba.njit(inline="always")
def _flush(words, at, held, filled):  # type: ignore[no-untyped-def]
    """Writes a full word: of at most 63 held bits, at most 31 remain."""
    words[at] = _u32(held & _LOW32)
    full = filled >> _5
    return at + np.int64(full), held >> (full << _5), filled & _31


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_run(values, count, k, full, words, at, held, filled):  # type: ignore[no-untyped-def]
    """Append values in L(k, full)."""
    low = (_ONE << _u64(k)) - _ONE
    for i in range(count):
        v = _u64(values[i])
        q = v >> _u64(k)
        if q + _u64(k) < _32 and q < _u64(ESCAPE):
            held |= ((_ONE << q) | (v & low) << (q + _ONE)) << filled
            at, held, filled = _flush(words, at, held, filled + q + _ONE + _u64(k))
        elif q < _u64(ESCAPE):
            held |= _ONE << (filled + q)
            at, held, filled = _flush(words, at, held, filled + q + _ONE)
            held |= (v & low) << filled
            at, held, filled = _flush(words, at, held, filled + _u64(k))
        else:
            at, held, filled = _flush(words, at, held, filled + _u64(ESCAPE))
            held |= v << filled
            at, held, filled = _flush(words, at, held, filled + _u64(full))
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_plain(values, count, width, words, at, held, filled):  # type: ignore[no-untyped-def]
    """Append values of `width` bits (1 to 32)."""
    for i in range(count):
        held |= _u64(values[i]) << filled
        at, held, filled = _flush(words, at, held, filled + _u64(width))
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_signs(steps, count, words, at, held, filled):  # type: ignore[no-untyped-def]
    """Append a bit per step: whether it is positive."""
    for base in range(0, count, 32):
        size = min(32, count - base)
        signs = _ZERO
        for j in range(size):
            signs |= _u64(steps[base + j] > 0) << _u64(j)
        held |= signs << filled
        at, held, filled = _flush(words, at, held, filled + _u64(size))
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def end_stream(words, at, held, filled):  # type: ignore[no-untyped-def]
    """Pads to a whole word. Returns the number of words."""
    if filled:
        words[at] = _u32(held & _LOW32)
        at += 1
    return at


@numba.njit(inline="always")
def _refill(words, at, held, filled):  # type: ignore[no-untyped-def]
    """Reads up to at least 32 held bits, at most 63. Beyond the end the last word is repeated; `whole_stream` detects
    it."""
    lacking = (filled >> _5) ^ _ONE
    held |= (_u64(words[min(at, words.size - 1)]) * lacking) << filled
    return at + np.int64(lacking), held, filled + (lacking << _5)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def read_run(words, count, k, full, at, held, filled, values):  # type: ignore[no-untyped-def]
    """The inverse of `write_run`: reads into `values`. Returns the new state."""
    low = (_ONE << _u64(k)) - _ONE
    for i in range(count):
        at, held, filled = _refill(words, at, held, filled)
        q = trailing_zeros(held)
        if q + _u64(k) < _32 and q < _u64(ESCAPE):
            values[i] = (q << _u64(k)) | ((held >> (q + _ONE)) & low)
            held >>= q + _ONE + _u64(k)
            filled -= q + _ONE + _u64(k)
        elif q < _u64(ESCAPE):
            held >>= q + _ONE
            at, held, filled = _refill(words, at, held, filled - (q + _ONE))
            values[i] = (q << _u64(k)) | (held & low)
            held >>= _u64(k)
            filled -= _u64(k)
        else:
            held >>= _u64(ESCAPE)
            at, held, filled = _refill(words, at, held, filled - _u64(ESCAPE))
            values[i] = held & ((_ONE << _u64(full)) - _ONE)
            held >>= _u64(full)
            filled -= _u64(full)
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def read_plain(words, count, width, at, held, filled, values):  # type: ignore[no-untyped-def]
    """The inverse of `write_plain`."""
    mask = (_ONE << _u64(width)) - _ONE
    for i in range(count):
        at, held, filled = _refill(words, at, held, filled)
        values[i] = held & mask
        held >>= _u64(width)
        filled -= _u64(width)
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def read_signs(words, count, at, held, filled, steps):  # type: ignore[no-untyped-def]
    """Gives each step, which is positive, the sign in the stream."""
    for base in range(0, count, 32):
        size = min(32, count - base)
        at, held, filled = _refill(words, at, held, filled)
        signs = held & _LOW32
        for j in range(size):
            positive = np.int64((signs >> _u64(j)) & _ONE)
            steps[base + j] = np.int64(steps[base + j]) * (2 * positive - 1)
        held >>= _u64(size)
        filled -= _u64(size)
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def whole_stream(words, at, held, filled):  # type: ignore[no-untyped-def]
    """Whether the reader has used every word of the stream, and only padding is left."""
    used = at - np.int64(filled >> _5)
    return used == words.size and held & ((_ONE << (filled & _31)) - _ONE) == _ZERO
