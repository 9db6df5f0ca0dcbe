"""ULPD/1: lossless deltas of weights, chunk by chunk (docs/weights.md).

An object is a head, records and an index. A record leads one chunk from the content with the base digest to the content
with the target digest; a chunk without changes has none. Digests are sums over elements, so a chunk's digest follows
from its changes, and a model's is the sum of its chunks'. Changes add up, too: a fold over many versions is a sum of
steps, and the inverse of a delta is its negative.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd import profiles as _typed_profiles
from etude.weights.ulpd.chunk_grid import Bits, Chunk, Format, Schema, Spec, Window
from etude.weights.ulpd.profiles import ABS, RAW, A, B, Form

kernels, profiles = cast(Any, _typed_kernels), cast(Any, _typed_profiles)  # compiled functions have no signatures
PLANES = 5
MODULUS = 1 << 64
_HEAD = struct.Struct("<4sHHQ")
_RECORD = struct.Struct("<IIIIQQ")
_TAIL = struct.Struct("<QI4s")
_MAGIC, _END, _VERSION = b"ULPD", b"DPLU", 1
_PLANE_LEVEL = 3
CLASSES = 16
_SPAN = 16  # chunks per call: a call from Python costs as much as a few thousand elements

KINDS = {"delta": 0, "anchor": 1, "skip": 2}
Digests = npt.NDArray[np.uint64]
Contents = Mapping[str, Bits | Window]
"""The elements of tensors, or a window of each with those of the chunks in question."""


class Damaged(ValueError):
    """Bytes that were altered after their producer wrote them."""


@dataclass(frozen=True)
class ChunkRecord:
    """The changes of one chunk. `target`, like all digests, is modulo 2^64."""

    chunk: int
    code: int
    changes: int
    base: int
    target: int
    payload: bytes


@dataclass(frozen=True)
class Moves:
    """The changes of one chunk: `positions` (int32, ascending) inside the chunk, and the step of each element. `values`
    are unsigned integers of the type's width: the steps d modulo 2^w between ordered codes."""

    positions: npt.NDArray[np.int32]
    values: Bits


Changes = Mapping[int, Moves]  # by chunk; a chunk without changes is absent


@dataclass(frozen=True)
class Codec:
    """The options of a producer. `lowest` is the least exponent class of profile B, per element format."""

    allowed: tuple[int, ...] = (A, B, ABS)
    learning_rate: float = 1e-6

    def form(self, form: Format) -> Form:
        """The parameters of compiled functions for elements of a format."""
        classes = CLASSES if form.exponent_mask else 1
        allowed = sum(1 << code for code in self.allowed)
        return Form(form.width, form.signed, form.mantissa, form.exponent_mask, self.lowest(form), classes, allowed)

    def lowest(self, form: Format) -> int:
        """The exponent at which a typical Adam step is one unit in the last place: below it nearly all bits change."""
        if not form.exponent_mask:
            return 0
        crossing = form.bias + form.mantissa + math.log2(0.18 * self.learning_rate)
        return min(max(math.floor(crossing), 0), max(form.exponent_mask - CLASSES + 1, 0))


def chunk_bits(schema: Schema, tensors: Contents, chunk: Chunk) -> Bits:
    """The elements of a chunk; shares memory with the tensor's."""
    return tensors[schema.tensors[chunk.tensor].name][chunk.start : chunk.stop]


def digests(
    schema: Schema, tensors: Contents, threads: int | None = None, chunks: Sequence[int] | None = None
) -> Digests:
    """The digest of every chunk; with `chunks` only of those, and 0 for the others."""

    def one(index: int) -> int:
        chunk = schema.chunks[index]
        spec = schema.tensors[chunk.tensor]
        part = chunk_bits(schema, tensors, chunk)
        return int(kernels.digest(part, np.uint64(spec.seed), chunk.start, spec.format.width))

    of_all = np.zeros(len(schema.chunks), np.uint64)
    numbers = range(len(schema.chunks)) if chunks is None else chunks
    of_all[numbers] = np.array(_map(one, numbers, threads), np.uint64)
    return of_all


def model_digest(chunk_digests: Digests) -> int:
    """The digest of a model from the digests of its chunks."""
    return int(chunk_digests.sum(dtype=np.uint64))


def encode_changes(
    schema: Schema,
    old: Contents,
    new: Contents,
    base: Digests,
    codec: Codec,
    threads: int | None = None,
    chunks: Sequence[int] | None = None,
) -> tuple[list[ChunkRecord], Changes]:
    """Records for the chunks that differ, of `chunks` or of all, in order, and their changes, for folds and undo.
    `base` holds the digests of `old`."""

    def one(span: range) -> list[tuple[ChunkRecord, Moves]]:
        name, part = _extent(schema, span)
        return _encode_span(schema, span, old[name][part], new[name][part], base, codec)

    made = [pair for pairs in _map(one, _spans(schema, chunks), threads) for pair in pairs]
    return [record for record, _ in made], {record.chunk: moves for record, moves in made}


def encode_fold(
    schema: Schema,
    now: Contents,
    target: Digests,
    steps: Sequence[Changes],
    codec: Codec,
    threads: int | None = None,
    chunks: Sequence[int] | None = None,
) -> list[ChunkRecord]:
    """Records of one delta over several versions, of `chunks` or of all: from the content before `steps`, the last of
    which led to `now`. `target` holds the digests of `now`. The bytes are those of `encode_changes` between the two
    contents."""
    back = inverse(fold(schema, steps))

    def one(span: range) -> list[tuple[ChunkRecord, Moves]]:
        touched = [index for index in span if index in back]
        if not touched:
            return []
        name, extent = _extent(schema, span)
        before, base = now[name][extent].copy(), target.copy()
        for index in touched:
            chunk = schema.chunks[index]
            part = before[chunk.start - extent.start : chunk.stop - extent.start]
            grown = move_bits(schema.tensors[chunk.tensor], part, chunk.start, back[index])
            base[index] = (int(target[index]) + grown) % MODULUS
        return _encode_span(schema, span, before, now[name][extent], base, codec)

    return [pair[0] for pairs in _map(one, _spans(schema, chunks), threads) for pair in pairs]


def _encode_span(
    schema: Schema, span: range, before: Bits, after: Bits, base: Digests, codec: Codec
) -> list[tuple[ChunkRecord, Moves]]:
    """The chunks of a span that differ, between contents of the span alone."""
    chunks = schema.chunks[span[0] : span[-1] + 1]
    spec = schema.tensors[chunks[0].tensor]
    form = spec.format
    first = chunks[0].start
    starts = np.array([chunk.start - first for chunk in chunks] + [after.size], np.int64)
    words = sum(((chunk.stop - chunk.start) * form.width + 31) // 32 for chunk in chunks)
    stream = np.empty(words + 2, np.uint32)
    positions, steps = np.empty(after.size + 2, np.int32), np.empty(after.size, form.integer)
    results = np.empty((len(chunks), 4), np.uint64)
    profiles.encode_chunks(
        before, after, np.uint64(spec.seed), first, starts, codec.form(form), positions, steps, stream, results
    )
    pairs: list[tuple[ChunkRecord, Moves]] = []
    total = int(results[:, 2].sum())
    positions, values = positions[:total].copy(), steps[:total].view(form.unsigned).copy()
    at = done = 0
    for c, (code, size, changes, grown) in enumerate(results.tolist()):
        if code:
            payload = _padded(after[starts[c] : starts[c + 1]].tobytes()) if code == RAW else stream[at : at + size]
            held = int(base[span[c]])
            record = ChunkRecord(span[c], code, changes, held, (held + grown) % MODULUS, bytes(payload))
            pairs.append((record, Moves(positions[done : done + changes], values[done : done + changes])))
        at += size
        done += changes
    return pairs


def encode_anchor(
    schema: Schema, new: Contents, target: Digests, threads: int | None = None, chunks: Sequence[int] | None = None
) -> list[ChunkRecord]:
    """Records that hold every element of `chunks`, or of all; `target` are the digests."""

    def one(index: int) -> ChunkRecord:
        chunk = schema.chunks[index]
        form = schema.tensors[chunk.tensor].format
        part = chunk_bits(schema, new, chunk)
        planes = _planes(part, form) if form.width >= 16 else None
        raw = _padded(part.tobytes())
        code, payload = (PLANES, planes) if planes is not None and len(planes) < len(raw) else (RAW, raw)
        return ChunkRecord(index, code, part.size, 0, int(target[index]), payload)

    return _map(one, range(len(schema.chunks)) if chunks is None else chunks, threads)


def apply(
    schema: Schema,
    tensors: Mapping[str, Bits],
    held: Digests,
    records: Sequence[ChunkRecord],
    threads: int | None = None,
) -> Digests:
    """Applies records to `tensors` in place. Returns the new digests. `held` are the digests of `tensors`. A record
    whose target is held already is skipped, so a replay is harmless; a record with another base is refused. Every
    record is read before the first element is written. Raises Damaged if a record does not fit."""
    after = held.copy()
    fresh = [record for record in records if int(held[record.chunk]) != record.target]
    for record in fresh:
        if record.code in (A, B) and int(held[record.chunk]) != record.base:
            raise Damaged(f"chunk {record.chunk} does not hold the content that the delta builds on")
    whole = [record for record in fresh if record.code in (RAW, PLANES)]
    contents = _map(partial(_content, schema), whole, threads)
    sparse = [record for record in fresh if record.code not in (RAW, PLANES)]
    spans = _map(partial(_read_records, schema, tensors), _by_tensor(schema, sparse), threads)

    def replace(pair: tuple[ChunkRecord, Bits]) -> None:
        record, content = pair
        chunk = schema.chunks[record.chunk]
        spec = schema.tensors[chunk.tensor]
        part = chunk_bits(schema, tensors, chunk)
        part[:] = content
        after[record.chunk] = kernels.digest(part, np.uint64(spec.seed), chunk.start, spec.format.width)

    def move(span: _TensorRecords) -> None:
        spec = span.spec
        grown = np.empty(len(span.records), np.uint64)
        place = (tensors[spec.name], span.starts, span.bounds, span.positions, span.steps)
        kernels.add_chunks(*place, np.uint64(spec.seed), 0, spec.format.width, spec.format.signed, grown)
        after[[record.chunk for record in span.records]] += grown

    _map(replace, list(zip(whole, contents, strict=True)), threads)
    _map(move, spans, threads)
    for record in fresh:
        if int(after[record.chunk]) != record.target:
            raise Damaged(f"chunk {record.chunk} did not become the content that the delta leads to")
    return after


@dataclass(frozen=True)
class _TensorRecords:
    """Decoded records of one tensor: record r moves elements of its chunk, which begins at starts[r], by these
    steps."""

    spec: Spec
    records: Sequence[ChunkRecord]
    starts: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    steps: npt.NDArray[np.signedinteger]


def _read_records(schema: Schema, tensors: Mapping[str, Bits], records: Sequence[ChunkRecord]) -> _TensorRecords:
    """The decoded records in A, B or ABS of one tensor. Raises Damaged."""
    chunks = [schema.chunks[record.chunk] for record in records]
    spec = schema.tensors[chunks[0].tensor]
    form, content = spec.format, tensors[spec.name]
    for record, chunk in zip(records, chunks, strict=True):
        odd = len(record.payload) < 4 or len(record.payload) % 4
        if record.code not in (A, B, ABS) or odd or not 1 <= record.changes <= chunk.stop - chunk.start:
            raise Damaged(f"the record of chunk {record.chunk} cannot be read")
    codes = np.array([record.code for record in records], np.int64)
    words = np.frombuffer(b"".join(record.payload for record in records), np.uint32)
    ends = np.cumsum([len(record.payload) // 4 for record in records])
    starts, stops = np.array([[chunk.start, chunk.stop] for chunk in chunks], np.int64).T.copy()
    bounds = np.cumsum([0] + [record.changes for record in records])
    positions, steps = np.empty(bounds[-1], np.int32), np.empty(bounds[-1], form.integer)
    stored = Form(form.width, form.signed, form.mantissa, form.exponent_mask)
    bad = profiles.decode_chunks(codes, words, ends, content, starts, stops, stored, bounds, positions, steps)
    if bad >= 0:
        raise Damaged(f"the record of chunk {records[int(bad)].chunk} cannot be read")
    return _TensorRecords(spec, records, starts, bounds, positions, steps)


def _content(schema: Schema, record: ChunkRecord) -> Bits:
    chunk = schema.chunks[record.chunk]
    elements, form = chunk.stop - chunk.start, schema.tensors[chunk.tensor].format
    if record.code == RAW:
        if len(record.payload) != -(-(elements * form.width // 8) // 4) * 4:
            raise Damaged(f"the record of chunk {record.chunk} has {len(record.payload)} bytes")
        return np.frombuffer(record.payload, form.unsigned, elements)
    try:
        (size,) = struct.unpack_from("<I", record.payload)
        plane = zstandard.ZstdDecompressor().decompress(record.payload[4 : 4 + size], max_output_size=elements)
        rest = np.frombuffer(record.payload[4 + size :], "<u4")
    except (struct.error, zstandard.ZstdError, ValueError) as e:
        raise Damaged(f"the record of chunk {record.chunk} cannot be read: {e}") from None
    out = np.empty(elements, form.unsigned)
    fields = np.frombuffer(plane, np.uint8)
    if fields.size != elements or not profiles.join_planes(fields, rest, form.width, form.mantissa, out):
        raise Damaged(f"the record of chunk {record.chunk} cannot be read")
    return out


def _planes(part: Bits, form: Format) -> bytes:
    """The compressed exponents, then sign and mantissa of every element; only exponents are far from random."""
    fields = np.empty(part.size, np.uint8)
    rest = np.empty((part.size * (form.mantissa + 1) + 31) // 32, np.uint32)
    profiles.split_planes(part, form.width, form.mantissa, form.exponent_mask, fields, rest)
    plane = zstandard.ZstdCompressor(level=_PLANE_LEVEL).compress(fields.tobytes())
    plane += bytes(-len(plane) % 4)
    return struct.pack("<I", len(plane)) + plane + rest.tobytes()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


# --- changes --------------------------------------------------------------------------------------------------------


def fold(schema: Schema, steps: Sequence[Changes]) -> Changes:
    """A single set of changes with the effect of all `steps` in this order. Steps that add up to zero are left out."""
    touched = sorted({chunk for step in steps for chunk in step})
    folded = {chunk: _fold_chunk(schema, chunk, [step[chunk] for step in steps if chunk in step]) for chunk in touched}
    return {chunk: moves for chunk, moves in folded.items() if moves.positions.size}


def _fold_chunk(schema: Schema, index: int, moves: Sequence[Moves]) -> Moves:
    chunk = schema.chunks[index]
    total_N = np.zeros(chunk.stop - chunk.start, schema.tensors[chunk.tensor].format.unsigned)
    for part in moves:
        total_N[part.positions] += part.values  # a position occurs once in a step
    positions = np.flatnonzero(total_N).astype(np.int32)
    return Moves(positions, total_N[positions])


def inverse(changes: Changes) -> Changes:
    """The changes that undo these."""
    return {index: Moves(moves.positions, -moves.values) for index, moves in changes.items()}


def move_bits(spec: Spec, part: Bits, first: int, moves: Moves) -> int:
    """Applies the changes of one chunk, whose first element is number `first` of its tensor. Returns the growth of its
    digest."""
    form = spec.format
    place = (part, moves.positions, moves.values.view(form.integer), np.uint64(spec.seed), first)
    return int(kernels.add(*place, form.width, form.signed))


# --- objects --------------------------------------------------------------------------------------------------------


def pack(kind: str, version: int, records: Iterable[ChunkRecord]) -> bytes:
    """The bytes of an object."""
    parts = [_HEAD.pack(_MAGIC, _VERSION, KINDS[kind], version)]
    index: list[tuple[int, int]] = []
    offset = _HEAD.size
    for record in records:
        head = _record_head(record, 0)
        check = xxhash.xxh3_64_intdigest(head + record.payload) & 0xFFFFFFFF
        parts += [_record_head(record, check), record.payload]
        size = _RECORD.size + len(record.payload)
        index.append((record.chunk, size))
        offset += size
    parts += [struct.pack("<II", *entry) for entry in index]
    parts.append(_TAIL.pack(offset, len(index), _END))
    return b"".join(parts)


def _record_head(record: ChunkRecord, check: int) -> bytes:
    packed = record.changes | record.code << 24
    return _RECORD.pack(record.chunk, len(record.payload), packed, check, record.base, record.target)


def unpack(data: bytes, chunks: int) -> tuple[str, int, list[ChunkRecord]]:
    """(kind, version, records) of an object on a grid of so many chunks. Raises Damaged."""
    try:
        magic, form, kind, version = _HEAD.unpack_from(data)
        offset, count, end = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    except struct.error:
        raise Damaged("the object is too short to be one") from None
    names = {number: name for name, number in KINDS.items()}
    if magic != _MAGIC or end != _END or form != _VERSION or kind not in names:
        raise Damaged("the object is not a ULPD/1 delta")
    if offset + 8 * count + _TAIL.size != len(data):
        raise Damaged("the object's index is not where it should be")
    records: list[ChunkRecord] = []
    at, previous = _HEAD.size, -1
    for chunk, size in struct.iter_unpack("<II", data[offset : offset + 8 * count]):
        if at + size > offset or size < _RECORD.size or not previous < chunk < chunks:
            raise Damaged(f"the object's index is wrong at chunk {chunk}")
        records.append(_record(data[at : at + size], chunk))
        at, previous = at + size, chunk
    if at != offset:
        raise Damaged("the object holds bytes that its index does not name")
    return names[kind], version, records


def _record(data: bytes, chunk: int) -> ChunkRecord:
    number, size, packed, check, base, target = _RECORD.unpack_from(data)
    payload = data[_RECORD.size :]
    record = ChunkRecord(number, packed >> 24, packed & 0xFFFFFF, base, target, payload)
    if number != chunk or size != len(payload) or size % 4:
        raise Damaged(f"the record of chunk {chunk} does not match its index")
    if xxhash.xxh3_64_intdigest(_record_head(record, 0) + payload) & 0xFFFFFFFF != check:
        raise Damaged(f"the record of chunk {chunk} was altered")
    return record


# --- cores ----------------------------------------------------------------------------------------------------------


def _spans(schema: Schema, chunks: Sequence[int] | None = None) -> list[range]:
    """Chunks, or all, in runs of one tensor without a gap: the units of work for a thread."""
    spans: list[range] = []
    for index in range(len(schema.chunks)) if chunks is None else chunks:
        last = spans[-1] if spans else range(0)
        same = len(last) and last.stop == index and schema.chunks[last[0]].tensor == schema.chunks[index].tensor
        if same and len(last) < _SPAN:
            spans[-1] = range(last[0], index + 1)
        else:
            spans.append(range(index, index + 1))
    return spans


def _by_tensor(schema: Schema, records: Sequence[ChunkRecord]) -> list[list[ChunkRecord]]:
    """Records in runs of one tensor."""
    runs: list[list[ChunkRecord]] = []
    for record in records:
        tensor = schema.chunks[record.chunk].tensor
        if runs and len(runs[-1]) < _SPAN and schema.chunks[runs[-1][0].chunk].tensor == tensor:
            runs[-1].append(record)
        else:
            runs.append([record])
    return runs


def _extent(schema: Schema, span: range) -> tuple[str, slice]:
    """The tensor of a span, and the span's elements in it."""
    first, last = schema.chunks[span[0]], schema.chunks[span[-1]]
    return schema.tensors[first.tensor].name, slice(first.start, last.stop)


def _map(work: Callable[[Any], Any], items: Sequence[Any], threads: int | None) -> list[Any]:
    """`work` on every item, in order, on so many threads, or one per core: kernels and compressors release the lock."""
    workers = min(threads or len(os.sched_getaffinity(0)), len(items))
    if workers < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))
