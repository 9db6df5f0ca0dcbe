"""CPU kernels of the delta codec: scan, digest, and the bit streams. Compiled by numba at first use.

Elements are seen as unsigned integers of w bits. A comparison of 64 of them is one vector instruction and gives one
64-bit mask; everything after that costs time per change, not per element.
"""

# pyright: basic, reportCallIssue=false

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 64
ESCAPE = 24  # zero bits that announce a value written in full
GAP_BITS = 18  # a position inside a chunk
GAP_CODES = 19  # k = 0..18
ALL_ONE = 31  # km of a run that is absent because every |d| is 1
MAX_CLASSES = 16

_u8, _u32, _u64 = np.uint8, np.uint32, np.uint64
_K, _M1, _M2 = _u64(0x9E3779B97F4A7C15), _u64(0xBF58476D1CE4E5B9), _u64(0x94D049BB133111EB)
_S27, _S30, _S31 = _u64(27), _u64(30), _u64(31)
_LOW32 = _u64(0xFFFFFFFF)
_ONE, _ZERO, _32 = _u64(1), _u64(0), _u64(32)


def _load64(context, builder, array_type, array, index):  # type: ignore[no-untyped-def]
    """64 elements of an array from `index` on, as a vector; the array need not be aligned."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    width = array_type.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), LANES)
    pointer = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
    return builder.load(pointer, align=1), vector


@intrinsic
def _differ(typingctx, a, b, index):  # type: ignore[no-untyped-def]
    """Bit j of the result: a[index + j] != b[index + j], for 64 elements."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        left, _ = _load64(context, builder, signature.args[0], arguments[0], arguments[2])
        right, _ = _load64(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(a, b, types.intp), codegen


@intrinsic
def _equals(typingctx, a, index, value):  # type: ignore[no-untyped-def]
    """Bit j of the result: a[index + j] == value, for 64 elements."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        left, vector = _load64(context, builder, signature.args[0], arguments[0], arguments[1])
        one = builder.trunc(arguments[2], vector.element)
        splat = builder.shuffle_vector(
            builder.insert_element(ir.Constant(vector, ir.Undefined), one, ir.Constant(ir.IntType(32), 0)),
            ir.Constant(vector, ir.Undefined),
            ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES),
        )
        return builder.bitcast(builder.icmp_unsigned("==", left, splat), ir.IntType(64))

    return types.uint64(a, types.intp, types.int64), codegen


@intrinsic
def _trailing_zeros(typingctx, x):  # type: ignore[no-untyped-def]
    """Zero bits below the lowest one; 64 for 0."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def _population(typingctx, x):  # type: ignore[no-untyped-def]
    """How many bits are one."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), codegen


@numba.njit(inline="always")
def _mix(z):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@numba.njit(inline="always")
def _hash(seed, index, value, w):  # type: ignore[no-untyped-def]
    return _mix(seed + _K * ((_u64(index) << _u64(w)) + _u64(value)))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def digest(bits, seed, first, w):  # type: ignore[no-untyped-def]
    """Sum of the hashes of all elements; `first` is the tensor's index of the first one."""
    total = _ZERO
    for i in range(bits.size):
        total += _hash(seed, first + i, bits[i], w)
    return total


@numba.njit(inline="always")
def ordered(u, w, signed):  # type: ignore[no-untyped-def]
    """The code of a bit pattern that grows with its value, int64 in [-2^(w-1), 2^(w-1)); unsigned ones stay."""
    u = np.int64(u)
    if signed and (u >> (w - 1)) & 1:
        return (u ^ ((np.int64(1) << (w - 1)) - 1)) - (np.int64(1) << w)
    return u


@numba.njit(inline="always")
def unordered(c, w, signed):  # type: ignore[no-untyped-def]
    """The bit pattern of an ordered code, taken modulo 2^w."""
    c &= (np.int64(1) << w) - 1
    if signed and (c >> (w - 1)) & 1:
        c ^= (np.int64(1) << (w - 1)) - 1
    return c


@numba.njit(inline="always")
def _difference(old, new, w, signed):  # type: ignore[no-untyped-def]
    """ordered(new) - ordered(old) modulo 2^w, read as signed."""
    d = (ordered(new, w, signed) - ordered(old, w, signed)) & ((np.int64(1) << w) - 1)
    return d - (np.int64(1) << w) if (d >> (w - 1)) & 1 else d


@numba.njit(nogil=True, cache=True, error_model="numpy")
def scan(old, new, seed, first, w, signed, positions, differences):  # type: ignore[no-untyped-def]
    """Where the bits differ and by how many steps; (changes, what the digest grows by)."""
    n = old.size
    count, grown = 0, _ZERO
    whole = n // LANES * LANES
    for base in range(0, whole, LANES):
        mask = _differ(old, new, base)
        while mask:
            i = base + np.int64(_trailing_zeros(mask))
            mask &= mask - _ONE
            a, b = old[i], new[i]
            positions[count] = i
            differences[count] = _difference(a, b, w, signed)
            grown += _hash(seed, first + i, b, w) - _hash(seed, first + i, a, w)
            count += 1
    for i in range(whole, n):
        a, b = old[i], new[i]
        if a != b:
            positions[count] = i
            differences[count] = _difference(a, b, w, signed)
            grown += _hash(seed, first + i, b, w) - _hash(seed, first + i, a, w)
            count += 1
    return count, grown


# --- runs of values in the code L(k, R) -----------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True, error_model="numpy")
def run_bits(values, count, codes, full):  # type: ignore[no-untyped-def]
    """(k, bits) of the shortest run, the lowest k among equals; k < codes; a value in full takes `full` bits."""
    best_k, best = 0, np.int64(1) << 60
    for k in range(codes):
        bits = np.int64(0)
        for i in range(count):
            q = values[i] >> k
            bits += q + 1 + k if q < ESCAPE else ESCAPE + full
        if bits < best:
            best_k, best = k, bits
    return best_k, best


@numba.njit(inline="always")
def _flush(words, at, held, filled):  # type: ignore[no-untyped-def]
    if filled >= _32:
        words[at] = _u32(held & _LOW32)
        return at + 1, held >> _32, filled - _32
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_run(values, count, k, full, words, at, held, filled):  # type: ignore[no-untyped-def]
    """Append values in L(k, full) to a bit stream in the state (next word, held bits, how many); the new state."""
    low = (_ONE << _u64(k)) - _ONE
    for i in range(count):
        v = _u64(values[i])
        q = v >> _u64(k)
        if q < _u64(ESCAPE):
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
def end_stream(words, at, held, filled):  # type: ignore[no-untyped-def]
    """Pad to a whole word; the number of words."""
    if filled:
        words[at] = _u32(held & _LOW32)
        at += 1
    return at


@numba.njit(inline="always")
def _refill(words, at, held, filled):  # type: ignore[no-untyped-def]
    """At least 32 bits in hand; beyond the end of the stream they are zero and `at` says how far beyond."""
    if filled < _32:
        if at < words.size:
            held |= _u64(words[at]) << filled
        return at + 1, held, filled + _32
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def read_run(words, count, k, full, at, held, filled, values):  # type: ignore[no-untyped-def]
    """The inverse of `write_run`, into `values`; the new state."""
    low = (_ONE << _u64(k)) - _ONE
    for i in range(count):
        at, held, filled = _refill(words, at, held, filled)
        q = _trailing_zeros(held)
        if q < _u64(ESCAPE):
            held >>= q + _ONE
            filled -= q + _ONE
            at, held, filled = _refill(words, at, held, filled)
            values[i] = np.int64((q << _u64(k)) | (held & low))
            held >>= _u64(k)
            filled -= _u64(k)
        else:
            held >>= _u64(ESCAPE)
            filled -= _u64(ESCAPE)
            at, held, filled = _refill(words, at, held, filled)
            values[i] = np.int64(held & ((_ONE << _u64(full)) - _ONE))
            held >>= _u64(full)
            filled -= _u64(full)
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def read_plain(words, count, width, at, held, filled, values):  # type: ignore[no-untyped-def]
    """The inverse of `write_plain`."""
    mask = (_ONE << _u64(width)) - _ONE
    for i in range(count):
        at, held, filled = _refill(words, at, held, filled)
        values[i] = np.int64(held & mask)
        held >>= _u64(width)
        filled -= _u64(width)
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def whole_stream(words, at, held, filled):  # type: ignore[no-untyped-def]
    """Whether the reader has used every word of the stream, and only padding is left."""
    used = at - np.int64(filled // _32)
    return used == words.size and held == _ZERO


# --- classes (profile B) --------------------------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True, error_model="numpy")
def classify(old, shift, field, lowest, classes, out):  # type: ignore[no-untyped-def]
    """Class of every element: its exponent field less `lowest`, clamped to [0, classes)."""
    top = classes - 1
    for i in range(old.size):
        out[i] = _u8(min(max(((np.int64(old[i]) >> shift) & field) - lowest, 0), top))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def ranks(class_N, positions, count, classes, out, populations):  # type: ignore[no-untyped-def]
    """Per change the number of earlier elements of its class; `class_N` is padded to whole vectors with 255."""
    for c in range(classes):
        populations[c] = 0
    done = 0
    for base in range(0, class_N.size, LANES):
        while done < count and positions[done] < base + LANES:
            c = np.int64(class_N[positions[done]])
            before = (_ONE << _u64(positions[done] - base)) - _ONE
            out[done] = populations[c] + np.int64(_population(_equals(class_N, base, c) & before))
            done += 1
        for c in range(classes):
            populations[c] += np.int64(_population(_equals(class_N, base, c)))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def places(class_N, classes, starts, ends, rank_R, out):  # type: ignore[no-untyped-def]
    """Positions of elements given by rank: those of class c are rank_R[starts[c]:ends[c]], ascending.

    False if a class does not have as many elements.
    """
    seen = np.zeros(MAX_CLASSES, np.int64)
    following = starts.copy()
    for base in range(0, class_N.size, LANES):
        for c in range(classes):
            mask = _equals(class_N, base, c)
            inside = np.int64(_population(mask))
            skipped = 0
            while following[c] < ends[c] and rank_R[following[c]] < seen[c] + inside:
                wanted = rank_R[following[c]] - seen[c]
                while skipped < wanted:
                    mask &= mask - _ONE
                    skipped += 1
                out[following[c]] = base + np.int64(_trailing_zeros(mask))
                following[c] += 1
            seen[c] += inside
    complete = True
    for c in range(classes):
        complete = complete and following[c] == ends[c]
    return complete


# --- writing into weights -------------------------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True, error_model="numpy")
def add(bits, positions, differences, count, seed, first, w, signed):  # type: ignore[no-untyped-def]
    """Move elements by so many steps, in place; what the digest grows by. Adding -d takes it back."""
    grown = _ZERO
    for j in range(count):
        i = positions[j]
        before = bits[i]
        after = unordered(ordered(before, w, signed) + differences[j], w, signed)
        bits[i] = after
        grown += _hash(seed, first + i, after, w) - _hash(seed, first + i, before, w)
    return grown


@numba.njit(nogil=True, cache=True, error_model="numpy")
def store(bits, positions, values, count, seed, first, w):  # type: ignore[no-untyped-def]
    """Set elements, in place; what the digest grows by."""
    grown = _ZERO
    for j in range(count):
        i = positions[j]
        grown += _hash(seed, first + i, values[j], w) - _hash(seed, first + i, bits[i], w)
        bits[i] = values[j]
    return grown


@numba.njit(nogil=True, cache=True, error_model="numpy")
def scatter(live, shift, positions, values):  # type: ignore[no-untyped-def]
    """Set elements; the values go into the upper bits of wider elements, zeros below them."""
    for j in range(positions.size):
        live[positions[j]] = np.int64(values[j]) << shift


@numba.njit(nogil=True, cache=True, error_model="numpy")
def holds(live, shift, positions, values):  # type: ignore[no-untyped-def]
    """Whether the elements have, in all their bits, what `scatter` gives them."""
    same = True
    for j in range(positions.size):
        same = same and np.int64(live[positions[j]]) == np.int64(values[j]) << shift
    return same
