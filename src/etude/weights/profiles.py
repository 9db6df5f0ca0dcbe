"""The payloads of a chunk: how the changes of up to 2^18 elements are written, and how they are read back.

| code | name | payload after the record header |
|---|---|---|
| 1 | A | kg, km; gaps between changed positions, signs, sizes |
| 2 | B | lowest class, classes, present classes, a word for each; per class gaps between *ranks*, signs, sizes |
| 3 | ABS | kg; gaps between changed positions, the new bits |
| 4 | RAW | every element |

B counts positions among the elements of the same exponent, because how likely an element changes depends on little
else: a change needs a step of about its unit in the last place. Numbers are in the code L(k, R) of `kernels`; the
format is ULPD/1, docs/weights.md.
"""

# pyright: basic

from __future__ import annotations

import numba
import numpy as np

from etude.weights.kernels import (
    ALL_ONE,
    GAP_BITS,
    GAP_CODES,
    LANES,
    MAX_CLASSES,
    classify,
    end_stream,
    places,
    ranks,
    read_plain,
    read_run,
    run_bits,
    scan,
    whole_stream,
    write_plain,
    write_run,
)

A, B, ABS, RAW = 1, 2, 3, 4
MAX_ELEMENTS = 1 << GAP_BITS
_u32, _u64 = np.uint32, np.uint64
_NEVER = np.int64(1) << 60


@numba.njit(inline="always")
def _size_codes(w):  # type: ignore[no-untyped-def]
    """How many k there are for sizes of changes: 0..w-2, at most 30."""
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
def _sizes(differences, start, end, signs, sizes):  # type: ignore[no-untyped-def]
    """Signs and |d| - 1; whether any |d| is above 1."""
    large = False
    for j in range(start, end):
        d = np.int64(differences[j])
        signs[j] = 1 if d > 0 else 0
        sizes[j] = abs(d) - 1
        large = large or sizes[j] > 0
    return large


@numba.njit(nogil=True, cache=True, error_model="numpy")
def encode(  # type: ignore[no-untyped-def]
    old, new, seed, first, w, signed, shift, field, lowest, classes, allowed, positions, differences, out
):
    """Write the smallest payload into `out` (uint32); (code, words, changes, what the digest grows by).

    The changes themselves are left in `positions` and `differences`.

    Code 0: nothing changed. RAW is chosen but not written. `allowed` is a mask of 1 << code. Among equal sizes the
    lower code wins, so equal input gives equal bytes everywhere.
    """
    n = old.size
    count, grown = scan(old, new, seed, first, w, signed, positions, differences)
    raw_words = (n * w + 31) // 32
    if count == 0:
        return 0, 0, 0, grown
    gaps, signs, sizes = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    _gaps(positions, 0, count, gaps)
    large = _sizes(differences, 0, count, signs, sizes)
    kg, gap_bits = run_bits(gaps, count, GAP_CODES, GAP_BITS)
    km, size_bits = ALL_ONE, np.int64(0)
    if large:
        km, size_bits = run_bits(sizes, count, _size_codes(w), w)
    code, words = RAW, np.int64(raw_words)
    if allowed & (1 << ABS):
        absolute = 1 + (gap_bits + count * w + 31) // 32
        if absolute <= words:
            code, words = ABS, absolute
    rank_N = np.empty(0, np.int64)
    order_N = rank_N
    plan = np.empty((MAX_CLASSES, 5), np.int64)  # per class: changes, kg, km, inverse, population
    if allowed & (1 << B):
        rank_N, order_N = np.empty(count, np.int64), np.empty(count, np.int64)
        bits = _plan_classes(
            old, positions, differences, count, w, shift, field, lowest, classes, rank_N, order_N, plan
        )
        by_class = 1 + (plan[:classes, 0] > 0).sum() + (bits + 31) // 32
        if by_class <= words:
            code, words = B, by_class
    if allowed & (1 << A):
        plain = 1 + (gap_bits + count + size_bits + 31) // 32
        if plain <= words:
            code, words = A, plain
    if code == A:
        out[0] = _u32(kg | km << 8)
        at, held, filled = write_run(gaps, count, kg, GAP_BITS, out, 1, _u64(0), _u64(0))
        at, held, filled = write_plain(signs, count, 1, out, at, held, filled)
        if km != ALL_ONE:
            at, held, filled = write_run(sizes, count, km, w, out, at, held, filled)
        end_stream(out, at, held, filled)
    elif code == ABS:
        for j in range(count):
            sizes[j] = new[positions[j]]
        out[0] = _u32(kg)
        at, held, filled = write_run(gaps, count, kg, GAP_BITS, out, 1, _u64(0), _u64(0))
        at, held, filled = write_plain(sizes, count, w, out, at, held, filled)
        end_stream(out, at, held, filled)
    elif code == B:
        _write_classes(differences, rank_N, order_N, plan, lowest, classes, w, out)
    return code, words, count, grown


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _classes_of(old, shift, field, lowest, classes):  # type: ignore[no-untyped-def]
    """Class per element, padded to whole vectors with a class that does not exist."""
    class_N = np.full((old.size + LANES - 1) // LANES * LANES, 255, np.uint8)
    classify(old, shift, field, lowest, classes, class_N)
    return class_N


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _plan_classes(  # type: ignore[no-untyped-def]
    old, positions, differences, count, w, shift, field, lowest, classes, rank_N, order_N, plan
):
    """Ranks of the changes (in `rank_N`, by class), which change they are (`order_N`), the plan; bits of the stream."""
    class_N = _classes_of(old, shift, field, lowest, classes)
    unsorted_N, populations = np.empty(count, np.int64), np.empty(MAX_CLASSES, np.int64)
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
    values = np.empty(max(count, 1), np.int64)
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
        large = False
        for j in range(changed):
            values[j] = abs(differences[order_N[start + j]]) - 1
            large = large or values[j] > 0
        plan[c, 2] = ALL_ONE
        if large:
            plan[c, 2], more = run_bits(values, changed, _size_codes(w), w)
            bits += more
        total += bits + changed
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _complement(ranks_R, population):  # type: ignore[no-untyped-def]
    """The ranks below `population` that are not in the ascending `ranks_R`."""
    out = np.empty(population - ranks_R.size, np.int64)
    at, following = 0, 0
    for rank in range(population):
        if following < ranks_R.size and ranks_R[following] == rank:
            following += 1
        else:
            out[at] = rank
            at += 1
    return out


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _write_classes(differences, rank_N, order_N, plan, lowest, classes, w, out):  # type: ignore[no-untyped-def]
    present = np.int64(0)
    at = 1
    for c in range(classes):
        if plan[c, 0]:
            present |= np.int64(1) << c
            out[at] = _u32(plan[c, 0] | plan[c, 1] << 19 | plan[c, 2] << 24 | plan[c, 3] << 29)
            at += 1
    out[0] = _u32(lowest | classes << 8 | present << 16)
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
        gaps = np.empty(ranks_R.size, np.int64)
        _gaps(ranks_R, 0, ranks_R.size, gaps)
        at, held, filled = write_run(gaps, gaps.size, plan[c, 1], GAP_BITS, out, at, held, filled)
        signs, sizes = np.empty(changed, np.int64), np.empty(changed, np.int64)
        for j in range(changed):
            d = differences[order_N[start + j]]
            signs[j], sizes[j] = 1 if d > 0 else 0, abs(d) - 1
        at, held, filled = write_plain(signs, changed, 1, out, at, held, filled)
        if plan[c, 2] != ALL_ONE:
            at, held, filled = write_run(sizes, changed, plan[c, 2], w, out, at, held, filled)
        start = end
    end_stream(out, at, held, filled)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _read_signed(words, count, km, w, at, held, filled, out):  # type: ignore[no-untyped-def]
    """Signs and sizes into differences; the new state."""
    signs = np.empty(count, np.int64)
    at, held, filled = read_plain(words, count, 1, at, held, filled, signs)
    if km == ALL_ONE:
        out[:count] = 0
    else:
        at, held, filled = read_run(words, count, km, w, at, held, filled, out)
    for j in range(count):
        out[j] = out[j] + 1 if signs[j] else -(out[j] + 1)
    return at, held, filled


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _to_positions(gaps, count, limit):  # type: ignore[no-untyped-def]
    """Gaps into positions, in place; false if one reaches `limit`."""
    position = np.int64(-1)
    for j in range(count):
        position += gaps[j] + 1
        if position >= limit:
            return False
        gaps[j] = position
    return True


@numba.njit(nogil=True, cache=True, error_model="numpy")
def decode(code, words, count, old, w, shift, field, positions, values):  # type: ignore[no-untyped-def]
    """Positions and differences (A, B) or new bits (ABS) of a payload; false if it is not one. Writes nothing else.

    `old` is what the payload builds on; only B looks at it. Positions of B are not ascending.
    """
    if count < 1 or count > old.size or words.size < 1:
        return False
    head = np.int64(words[0])
    if code == B:
        return _decode_classes(words, head, count, old, w, shift, field, positions, values)
    kg, km = head & 255, (head >> 8) & 255
    if kg >= GAP_CODES or (code == A and km != ALL_ONE and km >= _size_codes(w)) or head >> 16:
        return False
    at, held, filled = read_run(words, count, kg, GAP_BITS, 1, _u64(0), _u64(0), positions)
    if not _to_positions(positions, count, old.size):
        return False
    if code == A:
        at, held, filled = _read_signed(words, count, km, w, at, held, filled, values)
    else:
        at, held, filled = read_plain(words, count, w, at, held, filled, values)
    return whole_stream(words, at, held, filled)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _decode_classes(words, head, count, old, w, shift, field, positions, values):  # type: ignore[no-untyped-def]
    lowest, classes, present = head & 255, (head >> 8) & 255, head >> 16
    if classes < 1 or classes > MAX_CLASSES or present >> classes:
        return False
    class_N = _classes_of(old, shift, field, lowest, classes)
    rank_N = np.empty(count, np.int64)
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
        population = np.int64(0)
        for i in range(old.size):
            population += class_N[i] == c
        if changed > population:
            return False
        ranks_R = rank_N[starts[c] : ends[c]]
        if plan[c, 3]:
            rest = np.empty(population - changed, np.int64)
            at, held, filled = read_run(words, rest.size, plan[c, 1], GAP_BITS, at, held, filled, rest)
            if not _to_positions(rest, rest.size, population):
                return False
            ranks_R[:] = _complement(rest, population)
        else:
            at, held, filled = read_run(words, changed, plan[c, 1], GAP_BITS, at, held, filled, ranks_R)
            if not _to_positions(ranks_R, changed, population):
                return False
        at, held, filled = _read_signed(words, changed, plan[c, 2], w, at, held, filled, values[starts[c] : ends[c]])
    if not whole_stream(words, at, held, filled):
        return False
    return places(class_N, classes, starts, ends, rank_N, positions)


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
