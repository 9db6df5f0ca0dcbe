"""CPU kernels of the delta codec: scan, digest, classes, and writes into weights. Compiled by numba at first use.

Elements are seen as unsigned integers of w bits. A comparison of 64 of them is one vector instruction and gives one
64-bit mask; everything after that costs time per change, not per element. Of a tensor on a GPU `gpu_kernels` computes
the same bits there, without a copy.
"""

# pyright: basic, reportCallIssue=false

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 64
MAX_CLASSES = 16
AHEAD = 64  # number of changes by which prefetching runs ahead
BLOCK = 1 << 14  # elements per block of a scan, which fit into the first-level cache

_u64 = np.uint64
_K, _M1, _M2 = _u64(0x9E3779B97F4A7C15), _u64(0xBF58476D1CE4E5B9), _u64(0x94D049BB133111EB)
_S27, _S30, _S31 = _u64(27), _u64(30), _u64(31)
_LOW32, _32 = _u64(0xFFFFFFFF), _u64(32)
_ONE, _ZERO = _u64(1), _u64(0)
_NEVER = np.int64(1) << 60
_M1_LOW, _M1_HIGH, _M2_LOW, _M2_HIGH = _M1 & _LOW32, _M1 >> _32, _M2 & _LOW32, _M2 >> _32


def _load64(context, builder, array_type, array, index):  # type: ignore[no-untyped-def]
    """64 elements of an array from `index` on, as a vector; the array need not be aligned."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    width = array_type.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), LANES)
    pointer = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
    return builder.load(pointer, align=1), vector


def _splat(builder, vector, value):  # type: ignore[no-untyped-def]
    """A vector with the integer in every lane."""
    one = builder.trunc(value, vector.element)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, one, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


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
        right = _splat(builder, vector, arguments[2])
        return builder.bitcast(builder.icmp_unsigned("==", left, right), ir.IntType(64))

    return types.uint64(a, types.intp, types.int64), codegen


@intrinsic
def trailing_zeros(typingctx, x):  # type: ignore[no-untyped-def]
    """Number of zero bits below the lowest one bit; 64 for 0."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def _population(typingctx, x):  # type: ignore[no-untyped-def]
    """Number of one bits."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def _prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Prefetches the cache line of array[index] for writing."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0]).data
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(prefetch, [place, i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def _classify64(typingctx, a, index, shift, field, lowest, top, out):  # type: ignore[no-untyped-def]
    """out[index + j] = min(max((a[index + j] >> shift & field) - lowest, 0), top) for 64 elements."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values, vector = _load64(context, builder, signature.args[0], arguments[0], arguments[1])
        shift, field, lowest, top = (_splat(builder, vector, value) for value in arguments[2:6])
        field_64 = builder.and_(builder.lshr(values, shift), field)
        above = builder.select(builder.icmp_unsigned(">", field_64, lowest), field_64, lowest)
        index = builder.sub(above, lowest)
        index = builder.select(builder.icmp_unsigned("<", index, top), index, top)
        bytes_64 = ir.VectorType(ir.IntType(8), LANES)
        narrow = index if vector.element.width == 8 else builder.trunc(index, bytes_64)
        data = cgutils.create_struct_proxy(signature.args[6])(context, builder, arguments[6]).data
        builder.store(narrow, builder.bitcast(builder.gep(data, [arguments[1]]), bytes_64.as_pointer()), align=1)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(a, types.intp, i64, i64, i64, i64, out), codegen


@numba.njit(inline="always")
def _mix(z):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@numba.njit(inline="always")
def _hash(seed, index, value, w):  # type: ignore[no-untyped-def]
    return _mix(seed + _K * ((_u64(index) << _u64(w)) + _u64(value)))


@numba.njit(inline="always")
def _times(z, low, high):  # type: ignore[no-untyped-def]
    """z * (high << 32 | low) modulo 2^64 from products of 32 bits, which vectors of 64-bit lanes do much faster."""
    return (z & _LOW32) * low + (((z & _LOW32) * high + (z >> _32) * low) << _32)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def digest(bits, seed, first, w):  # type: ignore[no-untyped-def]
    """Sum of the hashes of all elements; `first` is the tensor's index of the first one."""
    step = _K << _u64(w)
    start = seed + step * _u64(first)
    total = _ZERO
    for i in range(bits.size):
        z = start + step * _u64(i) + _K * _u64(bits[i])
        z = _times(z ^ (z >> _S30), _M1_LOW, _M1_HIGH)
        z = _times(z ^ (z >> _S27), _M2_LOW, _M2_HIGH)
        total += z ^ (z >> _S31)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def digest_rows(bits, run, step, seed, first, w):  # type: ignore[no-untyped-def]
    """`digest` of elements that lie in the tensor as rows of `run` elements, one every `step`."""
    total = _ZERO
    for row in range(bits.size // run):
        total += digest(bits[row * run : (row + 1) * run], seed, first + row * step, w)
    return total


@numba.njit(inline="always")
def ordered(u, w, signed):  # type: ignore[no-untyped-def]
    """The code of a bit pattern that grows with its value, int64 in [-2^(w-1), 2^(w-1)); unsigned patterns are
    unchanged."""
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
    """ordered(new) - ordered(old) modulo 2^w, as a signed integer."""
    d = (ordered(new, w, signed) - ordered(old, w, signed)) & ((np.int64(1) << w) - 1)
    return d - (np.int64(1) << w) if (d >> (w - 1)) & 1 else d


@numba.njit(nogil=True, cache=True, error_model="numpy")
def scan(old, new, seed, first, w, signed, positions, differences):  # type: ignore[no-untyped-def]
    """Finds the positions of changed elements and their steps. Returns (number of changes, growth of the digest).
    `positions` has room for two more than there are elements."""
    n = old.size
    count, done, grown = 0, 0, _ZERO
    for block in range(0, n, BLOCK):
        end = min(block + BLOCK, n)
        whole = block + (end - block) // LANES * LANES
        for base in range(block, whole, LANES):
            mask = _differ(old, new, base)
            after = count + np.int64(_population(mask))
            positions[count] = base + np.int64(trailing_zeros(mask))  # also without a change: a branch costs more
            mask &= mask - _ONE
            positions[count + 1] = base + np.int64(trailing_zeros(mask))
            mask &= mask - _ONE
            count += 2
            while count < after:
                positions[count] = base + np.int64(trailing_zeros(mask))
                mask &= mask - _ONE
                count += 1
            count = after
        for i in range(whole, end):
            if old[i] != new[i]:
                positions[count] = i
                count += 1
        for j in range(done, count):
            i = np.int64(positions[j])
            a, b = old[i], new[i]
            differences[j] = _difference(a, b, w, signed)
            grown += _hash(seed, first + i, b, w) - _hash(seed, first + i, a, w)
        done = count
    return count, grown


# --- classes (profile B) --------------------------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True, error_model="numpy")
def classes_of(old, shift, field, lowest, classes):  # type: ignore[no-untyped-def]
    """Class of each element: its exponent field less `lowest`, clamped to [0, classes); padded to whole vectors."""
    class_N = np.empty((old.size + LANES - 1) // LANES * LANES, np.uint8)
    whole = old.size // LANES * LANES
    for base in range(0, whole, LANES):
        _classify64(old, base, shift, field, lowest, classes - 1, class_N)
    for i in range(whole, old.size):
        class_N[i] = min(max(((np.int64(old[i]) >> shift) & field) - lowest, 0), classes - 1)
    class_N[old.size :] = 255  # no class
    return class_N


@numba.njit(nogil=True, cache=True, error_model="numpy")
def population(class_N, c):  # type: ignore[no-untyped-def]
    """Number of elements of class c."""
    total = 0
    for base in range(0, class_N.size, LANES):
        total += np.int64(_population(_equals(class_N, base, c)))
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def ranks(class_N, positions, count, classes, out, populations):  # type: ignore[no-untyped-def]
    """For each change, the number of earlier elements of its class; `class_N` is padded to whole vectors with 255."""
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
    """Positions of elements by rank: class c has the ranks rank_R[starts[c]:ends[c]], ascending. False if a class has
    too few elements."""
    seen = np.zeros(MAX_CLASSES, np.int64)
    following = starts.copy()
    wanted = np.empty(MAX_CLASSES, np.int64)  # the next rank of each class
    for c in range(classes):
        wanted[c] = rank_R[starts[c]] if starts[c] < ends[c] else _NEVER
    for base in range(0, class_N.size, LANES):
        for c in range(classes):
            mask = _equals(class_N, base, c)
            before = seen[c]
            seen[c] = before + np.int64(_population(mask))
            while wanted[c] < seen[c]:
                for _ in range(wanted[c] - before):
                    mask &= mask - _ONE
                before = wanted[c]
                out[following[c]] = base + np.int64(trailing_zeros(mask))
                following[c] += 1
                wanted[c] = rank_R[following[c]] if following[c] < ends[c] else _NEVER
    complete = True
    for c in range(classes):
        complete = complete and following[c] == ends[c]
    return complete


# --- writing into weights -------------------------------------------------------------------------------------------


@numba.njit(nogil=True, cache=True, error_model="numpy")
def add(bits, positions, steps, seed, first, w, signed):  # type: ignore[no-untyped-def]
    """Moves elements by so many steps, in place. Returns the growth of the digest. Adding -d undoes it. `first` is the
    tensor's index of bits[0]."""
    count = positions.size
    for j in range(min(count, AHEAD)):
        _prefetch(bits, positions[j])
    grown = _ZERO
    for j in range(count):
        if j + AHEAD < count:
            _prefetch(bits, positions[j + AHEAD])
        i = np.int64(positions[j])
        before = bits[i]
        after = unordered(ordered(before, w, signed) + np.int64(steps[j]), w, signed)
        bits[i] = after
        grown += _hash(seed, first + i, after, w) - _hash(seed, first + i, before, w)
    return grown


@numba.njit(nogil=True, cache=True, error_model="numpy")
def add_chunks(bits, starts_R, bounds, positions, steps, seed, first, w, signed, grown_R):  # type: ignore[no-untyped-def]
    """`add` for chunks that begin at starts_R in `bits`; chunk r has the changes positions[bounds[r]:bounds[r + 1]]."""
    for r in range(starts_R.size):
        own = slice(bounds[r], bounds[r + 1])
        start = starts_R[r]
        grown_R[r] = add(bits[start:], positions[own], steps[own], seed, first + start, w, signed)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def scatter(live, shift, positions, values):  # type: ignore[no-untyped-def]
    """Sets elements; the values go into the upper bits of wider elements, with zeros below."""
    for j in range(positions.size):
        live[positions[j]] = np.int64(values[j]) << shift


@numba.njit(nogil=True, cache=True, error_model="numpy")
def holds(live, shift, positions, values):  # type: ignore[no-untyped-def]
    """Whether the elements have exactly the bits that `scatter` would write."""
    same = True
    for j in range(positions.size):
        same = same and np.int64(live[positions[j]]) == np.int64(values[j]) << shift
    return same


class TritonMissing(RuntimeError):
    """Tensors are on a GPU, and Triton, which processes them there, is not installed."""


def on_gpu(tensor: Any) -> bool:
    """Whether `gpu_kernels` can process the tensor."""
    return tensor.device.type == "cuda"


def gpu_kernels() -> Any:
    """The module `triton_kernels`, imported at the first tensor on a GPU: other machines need no Triton. Raises
    TritonMissing."""
    try:
        from etude.weights.ulpd import triton_kernels
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        raise TritonMissing(
            "weights on a GPU are compared and digested by Triton, which is not installed; pip install triton"
        ) from None
    return triton_kernels
