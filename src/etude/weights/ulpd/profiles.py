"""The payloads of a chunk: writes and reads the changes of up to 2^18 elements.

| code | name | payload after the record header |
|---|---|---|
| 1 | A | kg, km; gaps between changed positions, signs, sizes |
| 2 | B | lowest class, classes, present classes, a word for each; per class gaps between *ranks*, signs, sizes |
| 3 | ABS | kg; gaps between changed positions, the new bits |
| 4 | RAW | every element |

B counts positions among the elements of the same exponent, because the probability of a change depends mainly on the
exponent: a change needs a step of about its unit in the last place. Numbers are in the code L(k, R) of `streams`; the
format is ULPD/1, docs/weights.md.
"""

# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from etude.weights.ulpd.kernels import MAX_CLASSES, classes_of, ordered, places, population, ranks, scan
from etude.weights.ulpd.streams import (
    GAP_BITS,
    GAP_CODES,
    end_stream,
    read_plain,
    read_run,
    read_signs,
    run_bits,
    whole_stream,
    write_plain,
    write_run,
    write_signs,
)

A, B, ABS, RAW = 1, 2, 3, 4
ALL_ONE = 31  # km of a run that is absent because every |d| is 1
MAX_ELEMENTS = 1 << GAP_BITS
_u32, _u64 = np.uint32, np.uint64


class Form(NamedTuple):
    """The format of elements (see `chunk_grid.Format`), and the options of an encoder, for compiled functions."""

    width: int  # bits of an element
    signed: bool
    mantissa: int  # bits below the exponent
    exponent_mask: int
    lowest: int = 0  # least exponent class of profile B
    classes: int = 1  # of profile B
    allowed: int = 0  # mask of 1 << code


@numba.njit(inline="always")
def _size_codes(w):  # type: ignore[no-untyped-def]
    """Number of k for sizes of changes: 0..w-2, at most 30."""
    return min(w - 1, 31)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _gaps(positions, start, end, out):  # type: ignore[no-untyped-def]
    """Distances between neighbours less one, the first one counted from -1."""
    previous = np.int64(-1)
    for j in range(start, end):
        position = positions[j]  # `out` may be `positions`
        out[j] = position - previous - 1
        previous = position


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _all_one(differences):  # type: ignore[no-untyped-def]
    """Whether every |d| is 1."""
    larger = 0
    for j in range(differences.size):
        larger += abs(np.int64(differences[j])) != 1
    return larger == 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sizes(differences):  # type: ignore[no-untyped-def]
    """|d| - 1 of each difference."""
    out = np.empty(differences.size, np.int32)
    for j in range(differences.size):
        out[j] = abs(np.int64(differences[j])) - 1
    return out


@numba.njit(nogil=True, cache=True, error_model="numpy")
def encode(old, new, seed, first, form, positions, differences, out):  # type: ignore[no-untyped-def]
    """Writes the smallest payload into `out` (uint32). Returns (code, words, changes, growth of the digest). The
    changes are left in `positions` and `differences`. Code 0: nothing changed. RAW is chosen but not written. Among
    equal sizes the lower code wins, so equal input gives equal bytes everywhere."""
    n, w, classes = old.size, form.width, form.classes
    count, grown = scan(old, new, seed, first, w, form.signed, positions, differences)
    raw_words = (n * w + 31) // 32
    if count == 0:
        return 0, 0, 0, grown
    gaps = np.empty(count, np.int32)
    _gaps(positions, 0, count, gaps)
    kg, gap_bits = run_bits(gaps, count, GAP_CODES, GAP_BITS)
    km, size_bits = ALL_ONE, np.int64(0)
    sizes = gaps[:0]
    if not _all_one(differences[:count]):
        sizes = _sizes(differences[:count])
        km, size_bits = run_bits(sizes, count, _size_codes(w), w)
    code, words = RAW, np.int64(raw_words)
    if form.allowed & (1 << ABS):
        absolute = 1 + (gap_bits + count * w + 31) // 32
        if absolute <= words:
            code, words = ABS, absolute
    rank_N = gaps[:0]
    order_N = rank_N
    plan = np.empty((MAX_CLASSES, 5), np.int64)  # per class: changes, kg, km, inverse, population
    if form.allowed & (1 << B):
        rank_N, order_N = np.empty(count, np.int32), np.empty(count, np.int32)
        bits = _plan_classes(old, positions, differences, count, form, rank_N, order_N, plan)
        by_class = 1 + (plan[:classes, 0] > 0).sum() + (bits + 31) // 32
        if by_class <= words:
            code, words = B, by_class
    if form.allowed & (1 << A):
        plain = 1 + (gap_bits + count + size_bits + 31) // 32
        if plain <= words:
            code, words = A, plain
    if code == A:
        out[0] = _u32(kg | km << 8)
        at, held, filled = write_run(gaps, count, kg, GAP_BITS, out, 1, _u64(0), _u64(0))
        at, held, filled = write_signs(differences, count, out, at, held, filled)
        if km != ALL_ONE:
            at, held, filled = write_run(sizes, count, km, w, out, at, held, filled)
        end_stream(out, at, held, filled)
    elif code == ABS:
        values = np.empty(count, new.dtype)
        for j in range(count):
            values[j] = new[positions[j]]
        out[0] = _u32(kg)
        at, held, filled = write_run(gaps, count, kg, GAP_BITS, out, 1, _u64(0), _u64(0))
        at, held, filled = write_plain(values, count, w, out, at, held, filled)
        end_stream(out, at, held, filled)
    elif code == B:
        _write_classes(differences, rank_N, order_N, plan, form, out)
    return code, words, count, grown


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _plan_classes(old, positions, differences, count, form, rank_N, order_N, plan):  # type: ignore[no-untyped-def]
    """Ranks of the changes (`rank_N`, by class), their indices (`order_N`), and the plan. Returns the bits of the
    stream."""
    w, classes = form.width, form.classes
    class_N = classes_of(old, form.mantissa, form.exponent_mask, form.lowest, classes)
    unsorted_N, populations = np.empty(count, np.int32), np.empty(MAX_CLASSES, np.int64)
    ranks(class_N, positions, count, classes, unsorted_N, populations)
    starts = np.zeros(MAX_CLASSES + 1, np.int64)
    for j in range(count):
        starts[class_N[positions[j]] + 1] += 1
    for c in range(MAX_CLASSES):
        starts[c + 1] += starts[c]
    place = starts[:-1].copy()
    for j in range(count):
        c = class_N[positions[j]]
        rank_N[place[c]], order_N[place[c]] = unsorted_N[j], j
        place[c] += 1
    values = np.empty(count, np.int32)
    total = np.int64(0)
    for c in range(classes):
        start, changed = starts[c], starts[c + 1] - starts[c]
        plan[c, 0], plan[c, 4] = changed, populations[c]
        if changed == 0:
            continue
        _gaps(rank_N, start, start + changed, values)
        plan[c, 1], bits = run_bits(values[start:], changed, GAP_CODES, GAP_BITS)
        plan[c, 3] = 0
        if 2 * changed > populations[c]:  # fewer ranks are unchanged than changed
            rest = _complement(rank_N[start : start + changed], populations[c])
            _gaps(rest, 0, rest.size, rest)
            k, fewer = run_bits(rest, rest.size, GAP_CODES, GAP_BITS)
            if fewer < bits:
                plan[c, 1], plan[c, 3], bits = k, 1, fewer
        larger = 0
        for j in range(changed):
            values[j] = abs(np.int64(differences[order_N[start + j]])) - 1
            larger += values[j] > 0
        plan[c, 2] = ALL_ONE
        if larger:
            plan[c, 2], more = run_bits(values, changed, _size_codes(w), w)
            bits += more
        total += bits + changed
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _complement(ranks_R, total):  # type: ignore[no-untyped-def]
    """The ranks below `total` that are not in the ascending `ranks_R`."""
    out = np.empty(total - ranks_R.size, np.int32)
    at, following = 0, 0
    for rank in range(total):
        if following < ranks_R.size and ranks_R[following] == rank:
            following += 1
        else:
            out[at] = rank
            at += 1
    return out


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _write_classes(differences, rank_N, order_N, plan, form, out):  # type: ignore[no-untyped-def]
    w, classes = form.width, form.classes
    present = np.int64(0)
    at = 1
    for c in range(classes):
        if plan[c, 0]:
            present |= np.int64(1) << c
            out[at] = _u32(plan[c, 0] | plan[c, 1] << 19 | plan[c, 2] << 24 | plan[c, 3] << 29)
            at += 1
    out[0] = _u32(form.lowest | classes << 8 | present << 16)
    held, filled = _u64(0), _u64(0)
    start = 0
    for c in range(classes):
        changed = plan[c, 0]
        if changed == 0:
            continue
        end = start + changed
        ranks_R = rank_N[start:end]
        if plan[c, 3]:
            ranks_R = _complement(ranks_R, plan[c, 4])
        gaps = np.empty(ranks_R.size, np.int32)
        _gaps(ranks_R, 0, ranks_R.size, gaps)
        at, held, filled = write_run(gaps, gaps.size, plan[c, 1], GAP_BITS, out, at, held, filled)
        own = np.empty(changed, differences.dtype)
        for j in range(changed):
            own[j] = differences[order_N[start + j]]
        at, held, filled = write_signs(own, changed, out, at, held, filled)
        if plan[c, 2] != ALL_ONE:
            at, held, filled = write_run(_sizes(own), changed, plan[c, 2], w, out, at, held, filled)
        start = end
    end_stream(out, at, held, filled)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _read_signed(words, count, km, w, at, held, filled, out):  # type: ignore[no-untyped-def]
    """Reads signs and sizes into differences. Returns the new state."""
    if km == ALL_ONE:
        out[:count] = 1
        return read_signs(words, count, at, held, filled, out)
    signs = np.ones(count, np.int8)
    at, held, filled = read_signs(words, count, at, held, filled, signs)
    at, held, filled = read_run(words, count, km, w, at, held, filled, out)
    for j in range(count):
        out[j] = (np.int64(out[j]) + 1) * signs[j]
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _to_positions(gaps, count, limit):  # type: ignore[no-untyped-def]
    """Turns gaps into positions, in place; false if one reaches `limit`."""
    position = np.int64(-1)
    for j in range(count):
        position += gaps[j] + 1
        if position >= limit:
            return False
        gaps[j] = position
    return True


@numba.njit(nogil=True, cache=True, error_model="numpy")
def decode(code, words, count, old, form, positions, steps):  # type: ignore[no-untyped-def]
    """Reads positions and steps of a payload; false for an invalid payload. Writes nothing else. `old` is the base of
    the payload; A does not use it. Positions of B are not ascending."""
    if count < 1 or count > old.size or words.size < 1:
        return False
    w = form.width
    head = np.int64(words[0])
    if code == B:
        return _decode_classes(words, head, count, old, form, positions, steps)
    kg, km = head & 255, (head >> 8) & 255
    if kg >= GAP_CODES or (code == A and km != ALL_ONE and km >= _size_codes(w)) or head >> 16:
        return False
    at, held, filled = read_run(words, count, kg, GAP_BITS, 1, _u64(0), _u64(0), positions)
    if not _to_positions(positions, count, old.size):
        return False
    if code == A:
        at, held, filled = _read_signed(words, count, km, w, at, held, filled, steps)
    else:
        values = np.empty(count, old.dtype)
        at, held, filled = read_plain(words, count, w, at, held, filled, values)
        for j in range(count):
            steps[j] = ordered(values[j], w, form.signed) - ordered(old[positions[j]], w, form.signed)
    return whole_stream(words, at, held, filled)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _decode_classes(words, head, count, old, form, positions, steps):  # type: ignore[no-untyped-def]
    w = form.width
    lowest, classes, present = head & 255, (head >> 8) & 255, head >> 16
    if classes < 1 or classes > MAX_CLASSES or present >> classes:
        return False
    class_N = classes_of(old, form.mantissa, form.exponent_mask, lowest, classes)
    rank_N = np.empty(count, np.int32)
    starts, ends = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64)
    plan = np.zeros((MAX_CLASSES, 4), np.int64)
    at, total = 1, np.int64(0)
    for c in range(classes):
        starts[c] = ends[c] = total
        if not (present >> c) & 1:
            continue
        if at >= words.size:
            return False
        word = np.int64(words[at])
        at += 1
        changed, kg, km, inverse = word & 0x7FFFF, (word >> 19) & 31, (word >> 24) & 31, word >> 29
        if changed == 0 or kg >= GAP_CODES or (km != ALL_ONE and km >= _size_codes(w)) or inverse > 1:
            return False
        plan[c, 0], plan[c, 1], plan[c, 2], plan[c, 3] = changed, kg, km, inverse
        total += changed
        ends[c] = total
        if total > count:
            return False
    if total != count:
        return False
    held, filled = _u64(0), _u64(0)
    for c in range(classes):
        changed = plan[c, 0]
        if changed == 0:
            continue
        ranks_R = rank_N[starts[c] : ends[c]]
        if plan[c, 3]:
            members = population(class_N, c)
            if changed > members:
                return False
            rest = np.empty(members - changed, np.int32)
            at, held, filled = read_run(words, rest.size, plan[c, 1], GAP_BITS, at, held, filled, rest)
            if not _to_positions(rest, rest.size, members):
                return False
            ranks_R[:] = _complement(rest, members)
        else:
            at, held, filled = read_run(words, changed, plan[c, 1], GAP_BITS, at, held, filled, ranks_R)
            if not _to_positions(ranks_R, changed, old.size):
                return False
        at, held, filled = _read_signed(words, changed, plan[c, 2], w, at, held, filled, steps[starts[c] : ends[c]])
    if not whole_stream(words, at, held, filled):
        return False
    return places(class_N, classes, starts, ends, rank_N, positions)


# --- many chunks of one tensor in one call: a call from Python costs as much as a few thousand elements ---------------


@numba.njit(nogil=True, cache=True, error_model="numpy")
def encode_chunks(  # type: ignore[no-untyped-def]
    old, new, seed, first, starts, form, positions, differences, out, result_C4
):
    """`encode` for the chunks old[starts[c]:starts[c + 1]], with consecutive outputs. `result_C4` (uint64): code,
    words, changes, growth of the digest."""
    at, done = 0, 0
    for c in range(starts.size - 1):
        start, end = starts[c], starts[c + 1]
        code, words, count, grown = encode(
            old[start:end], new[start:end], seed, first + start, form, positions[done:], differences[done:], out[at:]
        )
        result_C4[c, 0], result_C4[c, 1], result_C4[c, 2], result_C4[c, 3] = code, words, count, grown
        at += words
        done += count


@numba.njit(nogil=True, cache=True, error_model="numpy")
def decode_chunks(  # type: ignore[no-untyped-def]
    codes_R, words, ends_R, old, starts_R, stops_R, form, bounds, positions, steps
):
    """`decode` for records of one tensor. Returns the number of the first invalid payload, or -1. Record r has the
    words words[ends_R[r - 1]:ends_R[r]] and the base old[starts_R[r]:stops_R[r]]; its changes go to bounds[r]:bounds[r
    + 1]."""
    begin = np.int64(0)
    for r in range(codes_R.size):
        own = slice(bounds[r], bounds[r + 1])
        part = old[starts_R[r] : stops_R[r]]
        count = bounds[r + 1] - bounds[r]
        if not decode(codes_R[r], words[begin : ends_R[r]], count, part, form, positions[own], steps[own]):
            return r
        begin = ends_R[r]
    return -1


@numba.njit(nogil=True, cache=True, error_model="numpy")
def split_planes(bits, w, mantissa, field, fields, rest):  # type: ignore[no-untyped-def]
    """Exponent fields (uint8), and a stream of (sign << mantissa) + mantissa of every element."""
    low = (_u64(1) << _u64(mantissa)) - _u64(1)
    held, filled, at = _u64(0), _u64(0), 0
    for i in range(bits.size):
        u = _u64(bits[i])
        fields[i] = np.uint8((u >> _u64(mantissa)) & _u64(field))
        held |= ((u & low) | (u >> _u64(w - 1)) << _u64(mantissa)) << filled
        filled += _u64(mantissa + 1)
        if filled >= _u64(32):
            rest[at] = _u32(held & _u64(0xFFFFFFFF))
            at, held, filled = at + 1, held >> _u64(32), filled - _u64(32)
    end_stream(rest, at, held, filled)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def join_planes(fields, rest, w, mantissa, out):  # type: ignore[no-untyped-def]
    """The inverse of `split_planes`; false if the stream is too short or too long."""
    if rest.size != (fields.size * (mantissa + 1) + 31) // 32:
        return False
    low, mask = (_u64(1) << _u64(mantissa)) - _u64(1), (_u64(1) << _u64(mantissa + 1)) - _u64(1)
    held, filled, at = _u64(0), _u64(0), 0
    for i in range(fields.size):
        if filled < _u64(mantissa + 1):
            held |= _u64(rest[at]) << filled
            at, filled = at + 1, filled + _u64(32)
        both = held & mask
        held, filled = held >> _u64(mantissa + 1), filled - _u64(mantissa + 1)
        out[i] = (both & low) | _u64(fields[i]) << _u64(mantissa) | (both >> _u64(mantissa)) << _u64(w - 1)
    return True
