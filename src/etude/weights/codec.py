"""ULPD/1: lossless deltas of weights, chunk by chunk (docs/weights.md).

An object is a head, records and an index. A record says how one chunk gets from the content with the base digest to the
content with the target digest; a chunk without changes has none. Digests are sums over elements, so a chunk's follows
from its changes, and a model's is the sum of its chunks'.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from etude.weights import kernels as _typed_kernels
from etude.weights import profiles as _typed_profiles
from etude.weights.changes import Changes, Moves, fold, inverse, move_bits, ordered
from etude.weights.profiles import ABS, RAW, A, B
from etude.weights.schema import Bits, Chunk, Format, Schema

kernels, profiles = cast(Any, _typed_kernels), cast(Any, _typed_profiles)  # compiled functions have no signatures
PLANES = 5
MODULUS = 1 << 64
_HEAD = struct.Struct("<4sHHQ")
_RECORD = struct.Struct("<IIIIQQ")
_TAIL = struct.Struct("<QI4s")
_MAGIC, _END, _VERSION = b"ULPD", b"DPLU", 1
_PLANE_LEVEL = 3
CLASSES = 16

KINDS = {"delta": 0, "anchor": 1}
Digests = npt.NDArray[np.uint64]


class Damaged(ValueError):
    """Bytes that are not what their producer wrote."""


@dataclass(frozen=True)
class Record:
    """How one chunk changes. `target` is 2^64-modular like all digests."""

    chunk: int
    code: int
    changes: int
    base: int
    target: int
    payload: bytes


@dataclass(frozen=True)
class Codec:
    """What a producer may choose from. `lowest` is the least exponent class of profile B, per element format."""

    allowed: tuple[int, ...] = (A, B, ABS)
    learning_rate: float = 1e-6

    @property
    def mask(self) -> int:
        return sum(1 << code for code in self.allowed)

    def lowest(self, form: Format) -> int:
        """The exponent at which a typical Adam step is one unit in the last place: below it nearly all bits change."""
        if not form.exponent_mask:
            return 0
        crossing = form.bias + form.mantissa + math.log2(0.18 * self.learning_rate)
        return min(max(math.floor(crossing), 0), max(form.exponent_mask - CLASSES + 1, 0))


def chunk_bits(schema: Schema, tensors: Mapping[str, Bits], chunk: Chunk) -> Bits:
    """The elements of a chunk; shares memory with the tensor's."""
    return tensors[schema.tensors[chunk.tensor].name][chunk.start : chunk.stop]


def digests(schema: Schema, tensors: Mapping[str, Bits], threads: int = 1) -> Digests:
    """The digest of every chunk, from the bytes."""

    def one(chunk: Chunk) -> int:
        spec = schema.tensors[chunk.tensor]
        part = chunk_bits(schema, tensors, chunk)
        return int(kernels.digest(part, np.uint64(spec.seed), chunk.start, spec.format.width))

    return np.array(_map(one, schema.chunks, threads), dtype=np.uint64)


def model_digest(chunk_digests: Digests) -> int:
    """The digest of a model from those of its chunks."""
    return int(chunk_digests.sum(dtype=np.uint64))


def encode(
    schema: Schema,
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    base: Digests,
    codec: Codec,
    threads: int = 1,
) -> list[Record]:
    """Records for the chunks that differ, in order. `base` holds the digests of `old`."""
    return encode_changes(schema, old, new, base, codec, threads)[0]


def encode_changes(
    schema: Schema,
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    base: Digests,
    codec: Codec,
    threads: int = 1,
) -> tuple[list[Record], Changes]:
    """The same records, and the changes that they hold, for folds and for taking them back."""

    def one(index: int) -> tuple[Record, Moves] | None:
        chunk = schema.chunks[index]
        before, after = chunk_bits(schema, old, chunk), chunk_bits(schema, new, chunk)
        return _encode_chunk(schema, index, before, after, int(base[index]), codec)

    found = [pair for pair in _map(one, range(len(schema.chunks)), threads) if pair is not None]
    return [record for record, _ in found], {record.chunk: moves for record, moves in found}


def encode_fold(
    schema: Schema,
    now: Mapping[str, Bits],
    target: Digests,
    steps: Sequence[Changes],
    codec: Codec,
    threads: int = 1,
) -> list[Record]:
    """Records of one delta over several versions: from what `now` was before `steps`, the last of which led to `now`.

    `target` holds the digests of `now`. The bytes are those of `encode` between the two contents. Raises ValueError if
    a step is absolute, so that what was there before cannot be known.
    """

    def one(pair: tuple[int, Moves]) -> tuple[Record, Moves] | None:
        index, moves = pair
        chunk = schema.chunks[index]
        spec = schema.tensors[chunk.tensor]
        after = chunk_bits(schema, now, chunk)
        before = after.copy()
        grown = move_bits(spec, before, chunk.start, moves)
        return _encode_chunk(schema, index, before, after, (int(target[index]) + grown) % MODULUS, codec)

    found = _map(one, inverse(fold(schema, steps)).items(), threads)
    return [pair[0] for pair in found if pair is not None]


def read_changes(schema: Schema, records: Iterable[Record], tensors: Mapping[str, Bits] | None = None) -> Changes:
    """The changes in records. Raises Damaged, also for profile B without the `tensors` that it builds on.

    With `tensors` all changes are steps on them, and can be taken back; without, ABS and RAW are absolute.
    """
    return {record.chunk: _moves(schema, record, tensors) for record in records}


def _moves(schema: Schema, record: Record, tensors: Mapping[str, Bits] | None) -> Moves:
    chunk = schema.chunks[record.chunk]
    form = schema.tensors[chunk.tensor].format
    size = chunk.stop - chunk.start
    if tensors is None and record.code == B:
        raise Damaged(f"the record of chunk {record.chunk} cannot be read without the content that it builds on")
    part = np.zeros(size, form.unsigned) if tensors is None else chunk_bits(schema, tensors, chunk)
    if record.code in (RAW, PLANES):
        positions, values = np.arange(size, dtype=np.uint32), _whole(record, size, form)
    else:
        places, numbers = _decode_chunk(record, part, form)
        order = np.argsort(places)
        positions, values = places[order].astype(np.uint32), numbers[order].astype(form.unsigned)
    if record.code in (A, B):
        return Moves(positions, values)
    codes = ordered(values, form)
    if tensors is None:
        return Moves(positions, codes, np.ones(positions.size, np.bool_))
    steps = codes - ordered(part[positions], form)
    return Moves(positions[steps != 0], steps[steps != 0])


def _encode_chunk(
    schema: Schema, index: int, before: Bits, after: Bits, base: int, codec: Codec
) -> tuple[Record, Moves] | None:
    chunk = schema.chunks[index]
    spec = schema.tensors[chunk.tensor]
    form = spec.format
    out = np.empty((before.size * form.width + 31) // 32 + 2, np.uint32)
    positions, differences = np.empty(before.size, np.int64), np.empty(before.size, np.int64)
    code, words, changes, grown = profiles.encode(
        before, after, np.uint64(spec.seed), chunk.start, form.width, form.signed, form.mantissa, form.exponent_mask,
        codec.lowest(form), CLASSES if form.exponent_mask else 1, codec.mask, positions,
        differences, out,
    )  # fmt: skip
    if code == 0:
        return None
    payload = _padded(after.tobytes()) if code == RAW else out[:words].tobytes()
    moves = Moves(positions[:changes].astype(np.uint32), differences[:changes].astype(form.unsigned))
    return Record(index, int(code), int(changes), base, (base + int(grown)) % MODULUS, payload), moves


def encode_anchor(schema: Schema, new: Mapping[str, Bits], target: Digests, threads: int = 1) -> list[Record]:
    """Records that hold every element of every chunk; `target` are the digests."""

    def one(index: int) -> Record:
        chunk = schema.chunks[index]
        form = schema.tensors[chunk.tensor].format
        part = chunk_bits(schema, new, chunk)
        planes = _planes(part, form) if form.width >= 16 else None
        raw = _padded(part.tobytes())
        code, payload = (PLANES, planes) if planes is not None and len(planes) < len(raw) else (RAW, raw)
        return Record(index, code, part.size, 0, int(target[index]), payload)

    return _map(one, range(len(schema.chunks)), threads)


def apply(
    schema: Schema, tensors: Mapping[str, Bits], held: Digests, records: Sequence[Record], threads: int = 1
) -> Digests:
    """Bring `tensors` forward in place; the digests they have then. Raises Damaged if a record does not fit.

    `held` are the digests of `tensors`. A record whose target is held already is skipped, so a replay is harmless; one
    that builds on another content is refused. Every record is read before the first element is written.
    """
    after = held.copy()
    fresh = [record for record in records if int(held[record.chunk]) != record.target]
    for record in fresh:
        if record.code in (A, B) and int(held[record.chunk]) != record.base:
            raise Damaged(f"chunk {record.chunk} does not hold the content that the delta builds on")
    changes = _map(lambda record: read(schema, tensors, record), fresh, threads)

    def write(pair: tuple[Record, Callable[[int], int]]) -> None:
        record, change = pair
        after[record.chunk] = found = change(int(held[record.chunk]))
        if found != record.target:
            raise Damaged(f"chunk {record.chunk} did not become what the delta says")

    _map(write, list(zip(fresh, changes, strict=True)), threads)
    return after


def read(schema: Schema, tensors: Mapping[str, Bits], record: Record) -> Callable[[int], int]:
    """A function that makes the record's change, given the chunk's digest, and returns the new one. Raises Damaged."""
    chunk = schema.chunks[record.chunk]
    spec = schema.tensors[chunk.tensor]
    form, seed = spec.format, np.uint64(spec.seed)
    part = chunk_bits(schema, tensors, chunk)
    if record.code in (RAW, PLANES):
        values = _whole(record, part.size, form)

        def replace(_: int) -> int:
            part[:] = values
            return int(kernels.digest(part, seed, chunk.start, form.width))

        return replace
    positions, values = _decode_chunk(record, part, form)

    def change(held: int) -> int:
        place = (part, positions, values, record.changes, seed, chunk.start, form.width)
        grown = kernels.store(*place) if record.code == ABS else kernels.add(*place, form.signed)
        return (held + int(grown)) % MODULUS

    return change


def _decode_chunk(record: Record, part: Bits, form: Format) -> tuple[Any, Any]:
    """Positions and steps, or new bits, of a record in A, B or ABS. Raises Damaged."""
    words = np.frombuffer(record.payload, "<u4")
    positions, values = np.empty(record.changes, np.int64), np.empty(record.changes, np.int64)
    if record.code not in (A, B, ABS) or not profiles.decode(
        record.code, words, record.changes, part, form.width, form.mantissa, form.exponent_mask, positions, values
    ):
        raise Damaged(f"the record of chunk {record.chunk} cannot be read")
    return positions, values


def _whole(record: Record, elements: int, form: Format) -> Bits:
    nbytes = elements * form.width // 8
    if record.code == RAW:
        if len(record.payload) != -(-nbytes // 4) * 4:
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
    """The exponents, compressed, then sign and mantissa of every element: exponents alone are far from random."""
    fields = np.empty(part.size, np.uint8)
    rest = np.empty((part.size * (form.mantissa + 1) + 31) // 32, np.uint32)
    profiles.split_planes(part, form.width, form.mantissa, form.exponent_mask, fields, rest)
    plane = zstandard.ZstdCompressor(level=_PLANE_LEVEL).compress(fields.tobytes())
    plane += bytes(-len(plane) % 4)
    return struct.pack("<I", len(plane)) + plane + rest.tobytes()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


# --- objects --------------------------------------------------------------------------------------------------------


def pack(kind: str, version: int, records: Iterable[Record]) -> bytes:
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


def _record_head(record: Record, check: int) -> bytes:
    return _RECORD.pack(
        record.chunk, len(record.payload), record.changes | record.code << 24, check, record.base, record.target
    )


def unpack(data: bytes, chunks: int) -> tuple[str, int, list[Record]]:
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
    records: list[Record] = []
    at, previous = _HEAD.size, -1
    for chunk, size in struct.iter_unpack("<II", data[offset : offset + 8 * count]):
        if at + size > offset or size < _RECORD.size or not previous < chunk < chunks:
            raise Damaged(f"the object's index is wrong at chunk {chunk}")
        records.append(_record(data[at : at + size], chunk))
        at, previous = at + size, chunk
    if at != offset:
        raise Damaged("the object holds bytes that its index does not name")
    return names[kind], version, records


def _record(data: bytes, chunk: int) -> Record:
    number, size, packed, check, base, target = _RECORD.unpack_from(data)
    payload = data[_RECORD.size :]
    record = Record(number, packed >> 24, packed & 0xFFFFFF, base, target, payload)
    if number != chunk or size != len(payload) or size % 4:
        raise Damaged(f"the record of chunk {chunk} is not what its index says")
    if xxhash.xxh3_64_intdigest(_record_head(record, 0) + payload) & 0xFFFFFFFF != check:
        raise Damaged(f"the record of chunk {chunk} was altered")
    return record


def _map(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
