"""The delta codec against a slow oracle: equal bytes, every bit restored, and damage always noticed."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.weights.ulpd import chunk_grid, codec
from etude.weights.ulpd.chunk_grid import FORMATS, Bits, Schema, Spec, bits, schema_of
from etude.weights.ulpd.codec import ABS, RAW, A, B, Codec, Damaged
from etude.weights.ulpd.digest import weights_digest
from tests.helpers import oracle
from tests.helpers.small_tensors import copies, nudged, tensors, widened

# Both zeros, denormals, infinities, quiet and signalling NaN with payloads.
NASTY = {
    8: [0x00, 0x80, 0x01, 0x81, 0x7F, 0xFF, 0x7C, 0xFC, 0x7E],
    16: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x7C00, 0x7C01, 0x7E00, 0x03FF],
    32: [0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x007FFFFF],
}


def one(dtype: str, *shape: int) -> Schema:
    return Schema((Spec("x", dtype, shape),))


def encoded(grid: Schema, old: Bits, new: Bits, allowed: tuple[int, ...] = (A, B, ABS)) -> list[codec.ChunkRecord]:
    base = codec.digests(grid, {"x": old})
    return codec.encode_changes(grid, {"x": old}, {"x": new}, base, Codec(allowed))[0]


def applied(grid: Schema, old: Bits, records: list[codec.ChunkRecord]) -> Bits:
    held = {"x": old.copy()}
    after = codec.apply(grid, held, codec.digests(grid, held), records)
    assert np.array_equal(after, codec.digests(grid, held)), "the digest followed the changes"
    return held["x"]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, Bits, Bits]:
    """Bits before and after, of any type: small steps, wild ones, and every special pattern crossed."""
    dtype = draw(st.sampled_from(list(FORMATS)))
    width = FORMATS[dtype].width
    size = draw(st.integers(1, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> (32 - width)
    old = old.astype(FORMATS[dtype].unsigned)
    new = old.copy()
    touched = rng.random(size) < draw(st.sampled_from([0.02, 0.3, 0.9]))
    new[touched] += rng.integers(-2, 3, int(touched.sum())).astype(new.dtype)
    for place, value in draw(
        st.dictionaries(st.integers(0, size - 1), st.sampled_from(NASTY[width]), max_size=9)
    ).items():
        (old if draw(st.booleans()) else new)[place] = value
    return dtype, old, new


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_bytes_are_those_of_the_oracle_and_every_bit_is_restored(pair: tuple[str, Bits, Bits]) -> None:
    dtype, old, new = pair
    grid, kind = one(dtype, len(old)), oracle.KINDS[dtype]
    lowest, classes = Codec().lowest(FORMATS[dtype]), 16 if FORMATS[dtype].exponent_mask else 1
    records = encoded(grid, old, new)
    seed = grid.tensors[0].seed
    if np.array_equal(old, new):
        assert records == []
        return
    (record,) = records
    assert (record.code, record.payload) == oracle.smallest(kind, old.tolist(), new.tolist(), lowest, classes)
    assert record.base == oracle.digest(seed, old.tolist(), kind.w)
    assert record.target == oracle.digest(seed, new.tolist(), kind.w)
    assert record.changes == int((old != new).sum())
    raw = len(new) * kind.w // 8
    assert 32 + len(record.payload) + 8 <= raw + 32 + 8 + 3
    assert np.array_equal(applied(grid, old, records), new)
    for allowed in ((A,), (B,), (ABS,), ()):
        assert np.array_equal(applied(grid, old, encoded(grid, old, new, allowed)), new)


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_an_anchor_needs_no_base(pair: tuple[str, Bits, Bits]) -> None:
    dtype, old, new = pair
    grid = one(dtype, len(new))
    records = codec.encode_anchor(grid, {"x": new}, codec.digests(grid, {"x": new}))
    assert np.array_equal(applied(grid, old, records), new)
    assert np.array_equal(applied(grid, np.zeros_like(new), records), new)


def bf16(elements: int, seed: int = 0) -> Bits:
    generator = torch.Generator().manual_seed(seed)
    return bits((torch.randn(elements, generator=generator) * 0.02).bfloat16())


def ulps(old: Bits, share: float, seed: int = 1) -> Bits:
    """A share of the elements moves by one unit in the last place, up or down."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    touched = rng.random(len(old)) < share
    new[touched] += rng.choice(np.array([1, 65535], np.uint16), int(touched.sum()))
    return new


@pytest.mark.parametrize("threads", [1, 3, None])
def test_many_chunks_and_threads(threads: int | None) -> None:
    grid = Schema(
        (Spec("a", "bfloat16", (700, 1000)), Spec("b", "bfloat16", (300_001,)), Spec("c", "bfloat16", (0, 4)))
    )
    old = {"a": bf16(700_000), "b": bf16(300_001, 3), "c": bf16(0)}
    new = {name: ulps(part, 0.01) for name, part in old.items()}
    base = codec.digests(grid, old, threads)
    records = codec.encode_changes(grid, old, new, base, Codec(), threads)[0]
    assert records == codec.encode_changes(grid, old, new, base, Codec(), 1)[0]
    after = codec.apply(grid, old, base, records, threads)
    assert all(np.array_equal(old[name], new[name]) for name in new)
    assert codec.model_digest(after) == codec.model_digest(codec.digests(grid, new))


def test_the_grid_covers_every_element_once_and_rows_stay_whole() -> None:
    grid = Schema(
        (
            Spec("flat", "bfloat16", (600_000,)),
            Spec("long rows", "bfloat16", (2, 300_000)),
            Spec("rows", "bfloat16", (5, 70_000)),
            Spec("scalar", "bfloat16", ()),
        )
    )
    for index, spec in enumerate(grid.tensors):
        pieces = [chunk for chunk in grid.chunks if chunk.tensor == index]
        assert [i for chunk in pieces for i in (chunk.start, chunk.stop)][::2] == [0, *[c.stop for c in pieces[:-1]]]
        assert pieces[-1].stop == spec.elements
        assert max(chunk.stop - chunk.start for chunk in pieces) <= chunk_grid.MAX_ELEMENTS
    assert [c.stop for c in grid.chunks if c.tensor == 2] == [210_000, 350_000]
    assert [c.stop for c in grid.chunks if c.tensor == 1] == [262_144, 300_000, 562_144, 600_000]


def test_sizes_are_near_the_entropy_bound() -> None:
    """One in a hundred moved by one step, at random places: .092 bits per element, 174x (profile A's own bound)."""
    old = bf16(1 << 20)
    grid = one("bfloat16", 1 << 20)
    records = encoded(grid, old, ulps(old, 0.01))
    size = len(codec.pack("delta", 1, records))
    assert 2 * len(old) / size > 0.95 * 174


def test_replays_are_skipped_and_another_base_is_refused() -> None:
    old = bf16(5000)
    grid, new = one("bfloat16", 5000), ulps(old, 0.05)
    records = encoded(grid, old, new)
    assert np.array_equal(applied(grid, new, records), new), "a replay changes nothing"
    other = old.copy()
    other[7] ^= 1
    before = other.copy()
    with pytest.raises(Damaged, match="does not hold the content"):
        applied(grid, other, records)
    assert np.array_equal(other, before)
    assert np.array_equal(applied(grid, other, encoded(grid, old, new, ())), new), "RAW needs no base"


def test_a_whole_object_and_its_damage() -> None:
    grid = Schema((Spec("a", "bfloat16", (600_000,)),))
    old = {"a": bf16(600_000)}
    new = {"a": ulps(old["a"], 0.001)}
    records = codec.encode_changes(grid, old, new, codec.digests(grid, old), Codec())[0]
    data = codec.pack("delta", 7, records)
    assert codec.unpack(data, len(grid.chunks)) == ("delta", 7, records)
    assert codec.unpack(codec.pack("anchor", 0, []), 0) == ("anchor", 0, [])
    rng = np.random.default_rng(0)
    for place in [*range(16), *rng.integers(16, len(data), 300).tolist(), *range(len(data) - 40, len(data))]:
        spoiled = bytearray(data)
        spoiled[place] ^= 1 << int(rng.integers(8))
        try:
            kind, version, _ = codec.unpack(bytes(spoiled), len(grid.chunks))
        except Damaged:
            continue
        assert 6 <= place < 16, "only kind and version may change unseen: the manifest names them too"
        assert (kind, version) != ("delta", 7)
    for cut in (0, 15, 31, len(data) // 2, len(data) - 1):
        with pytest.raises(Damaged):
            codec.unpack(data[:cut], len(grid.chunks))
    with pytest.raises(Damaged, match="index is wrong"):
        codec.unpack(data, 1)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([A, B, ABS, RAW, codec.PLANES, 9]), st.binary(max_size=80), st.integers(0, 70))
def test_a_payload_that_makes_no_sense_never_writes(code: int, noise: bytes, changes: int) -> None:
    """Random bytes are refused, or decode into changes that stay inside the chunk; then the digest gives them away."""
    grid, held = one("bfloat16", 64), {"x": bf16(64)}
    base = codec.digests(grid, held)
    payload = noise + bytes(-len(noise) % 4)
    record = codec.ChunkRecord(0, code, changes, int(base[0]), 1, payload)
    with pytest.raises(Damaged):
        codec.apply(grid, held, base, [record])


def test_escapes() -> None:
    """A gap and a step so large beside the others that they are written in full."""
    old = bf16(1 << 18)
    new = old.copy()
    new[:2000] ^= 1
    new[[200_000, 262_143]] = 0xFF80, 0x7F80
    grid = one("bfloat16", 1 << 18)
    for allowed in ((A,), (B,)):
        (record,) = encoded(grid, old, new, allowed)
        assert record.code == allowed[0]
        assert np.array_equal(applied(grid, old, [record]), new)


@pytest.mark.parametrize("allowed", [(A,), (B,), (ABS,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_of_more_than_a_word(dtype: str, allowed: tuple[int, ...]) -> None:
    """Steps across the whole range, far apart: numbers whose code does not fit what a reader holds at once."""
    rng = np.random.default_rng(2)
    old = rng.integers(0, 1 << FORMATS[dtype].width, 1 << 18, dtype=np.uint64).astype(FORMATS[dtype].unsigned)
    new = old.copy()
    touched = np.sort(rng.choice(1 << 18, 40, replace=False))
    new[touched] = rng.integers(0, 1 << FORMATS[dtype].width, 40, dtype=np.uint64).astype(old.dtype)
    grid = one(dtype, 1 << 18)
    (record,) = encoded(grid, old, new, allowed)
    kind, pair = oracle.KINDS[dtype], (old.tolist(), new.tolist())
    expected = {
        A: lambda: oracle.profile_a(kind, *pair),
        B: lambda: oracle.profile_b(kind, *pair, Codec().lowest(FORMATS[dtype]), 16),
        ABS: lambda: oracle.profile_abs(kind, *pair),
    }
    assert record.payload == expected[allowed[0]]()
    assert np.array_equal(applied(grid, old, [record]), new)


def test_schemas() -> None:
    made = schema_of(tensors(1))
    assert chunk_grid.decode(made.encode()) == made
    assert made.id == schema_of(nudged(tensors(1), 2)).id != schema_of(tensors(1, torch.float16)).id
    for data in (b"{", b"[1]", b'[["x", "int4", [2]]]'):
        with pytest.raises(ValueError):
            chunk_grid.decode(data)
    with pytest.raises(ValueError, match="a is int64; weights are published as bfloat16, float16, float32"):
        schema_of({"a": torch.zeros(3, dtype=torch.int64)})


# The digest


def test_the_digest_is_a_sum_over_chunks_and_that_of_the_oracle() -> None:
    original = tensors(3)
    grid = schema_of(original)
    parts = {name: bits(t) for name, t in original.items()}
    total = sum(oracle.digest(spec.seed, parts[spec.name].tolist(), 16) for spec in grid.tensors) % (1 << 64)
    assert codec.model_digest(codec.digests(grid, parts)) == total
    assert weights_digest(original) == f"{total:016x}"


def test_the_digest_does_not_depend_on_order_or_on_an_exact_wider_type() -> None:
    original = tensors(3)
    assert weights_digest(dict(reversed(original.items()))) == weights_digest(original)
    assert weights_digest(widened(original)) == weights_digest(original)
    assert weights_digest({name: t.double() for name, t in original.items()}) == weights_digest(original)
    half = tensors(3, torch.float16)
    assert (
        weights_digest(widened(half), torch.float16) == weights_digest(half, torch.float16) != weights_digest(original)
    )


def test_the_digest_of_wider_tensors_keeps_the_payload_of_a_nan() -> None:
    patterns = torch.tensor(NASTY[16], dtype=torch.int32)
    narrow = {"x": patterns.to(torch.uint16).view(torch.bfloat16)}
    wide = {"x": (patterns << 16).view(torch.float32)}
    assert weights_digest(wide) == weights_digest(narrow)


def test_the_digest_sees_one_bit_one_swap_one_name_one_shape_and_one_type() -> None:
    original = tensors(3)
    flipped, swapped = copies(original), copies(original)
    bits(flipped["a"])[4] ^= 1
    bits(swapped["a"])[[1, 2]] = bits(swapped["a"])[[2, 1]]
    renamed = {("c" if name == "b" else name): t for name, t in original.items()}
    reshaped = original | {"b": original["b"].reshape(25, 40)}
    retyped = original | {"a": original["a"].view(torch.float16)}
    assert len({weights_digest(t) for t in (original, flipped, swapped, renamed, reshaped, retyped)}) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_live_weight_that_left_the_grid_is_named(dtype: torch.dtype) -> None:
    live = widened(tensors(3, dtype))
    live["b"][2, 2] *= 1 + 2**-20
    with pytest.raises(ValueError, match=r"^b holds values that b?float16 cannot: its weights were altered$"):
        weights_digest(live, dtype)


def test_format_constants() -> None:
    """Sizes that other implementations rely on."""
    data = codec.pack("delta", 3, [codec.ChunkRecord(5, A, 2, 11, 12, b"\0" * 8)])
    assert data[:16] == struct.pack("<4sHHQ", b"ULPD", 1, 0, 3)
    assert struct.unpack_from("<III", data, 16) == (5, 8, 2 | 1 << 24)
    assert struct.unpack_from("<QQ", data, 32) == (11, 12)
    assert data[-16:] == struct.pack("<QI4s", 56, 1, b"DPLU")
    assert len(data) == 16 + 32 + 8 + 8 + 16
