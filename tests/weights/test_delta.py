import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tensors import copies, nudged, tensors, widened

from etude.weights import delta
from etude.weights.digest import bits, digest

UNSIGNED = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}
NASTY = {
    16: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x7C00, 0x7C01, 0x7E00, 0x03FF],
    32: [0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x007FFFFF],
}
"""Both zeros, denormals, infinities, quiet and signalling NaN with payloads, of bfloat16, float16 and float32."""


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_delta_restores_every_bit(data):
    dtype = data.draw(st.sampled_from(list(UNSIGNED)))
    unsigned = np.dtype(UNSIGNED[dtype])
    width = 8 * unsigned.itemsize
    shape = data.draw(st.sampled_from([(), (0,), (1,), (3, 5), (2, 1, 7), (0, 4), (300,)]))
    size = int(np.prod(shape))
    word = st.sampled_from(NASTY[width]) | st.integers(0, 2**width - 1)
    base = np.full(size, data.draw(word), unsigned)
    target = base.copy()
    for position, value in data.draw(st.dictionaries(st.integers(0, max(size - 1, 0)), word, max_size=size)).items():
        target[position] = value
    old, new = ({"x": torch.from_numpy(b.copy()).view(dtype).view(shape)} for b in (base, target))
    payload, changed = delta.encode(old, new)
    assert changed == int((base != target).sum())
    made = delta.apply(old, payload)["x"]
    assert np.array_equal(bits(made), target)
    assert (made.dtype, tuple(made.shape)) == (dtype, shape)
    assert np.array_equal(bits(old["x"]), base), "the base is not written to"


@pytest.mark.parametrize("distance", [1, 255, 256, 65_535, 65_536])
def test_gaps_of_every_width_are_restored(distance):
    old = {"x": torch.zeros(140_000, dtype=torch.bfloat16)}
    new = copies(old)
    new["x"][[3, 3 + distance, 3 + 2 * distance]] = 1.5
    payload, changed = delta.encode(old, new)
    assert changed == 3
    assert digest(delta.apply(old, payload)) == digest(new)


def test_a_delta_is_as_small_as_its_changes():
    old = {"x": torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = copies(old)
    new["x"][::100] += 1
    anchor, delta_bytes = (len(delta.encode(base, new)[0]) for base in ({}, old))
    assert delta_bytes < anchor / 30
    assert len(delta.encode(new, new)[0]) < 50


def test_an_anchor_needs_no_base():
    new = tensors(1)
    payload, changed = delta.encode({}, new)
    assert digest(delta.apply({}, payload)) == digest(new)
    assert digest(delta.apply(tensors(2), payload)) == digest(new)
    assert changed == sum(t.numel() for t in new.values())


def test_tensors_need_not_be_contiguous():
    new = {"x": tensors(1)["b"].t()}
    payload, _ = delta.encode({"x": tensors(2)["b"].t()}, new)
    assert digest(delta.apply({"x": tensors(2)["b"].t()}, payload)) == digest(new)


def test_versions_that_do_not_fit_are_refused():
    old, new = tensors(1), nudged(tensors(1), 2)
    with pytest.raises(ValueError, match="a was part of the last version and is not part of this one"):
        delta.encode(old, {name: t for name, t in new.items() if name != "a"})
    with pytest.raises(ValueError, match=r"b was bfloat16 \(40, 25\) and is bfloat16 \(25, 40\)"):
        delta.encode(old, new | {"b": new["b"].reshape(25, 40)})
    with pytest.raises(ValueError, match="a is int64; weights are published as bfloat16, float16, float32"):
        delta.encode({}, {"a": torch.zeros(3, dtype=torch.int64)})
    payload, _ = delta.encode(old, new)
    with pytest.raises(ValueError, match=r"changes b, bfloat16 \(40, 25\); there is bfloat16 \(25, 40\)"):
        delta.apply(old | {"b": old["b"].reshape(25, 40)}, payload)
    with pytest.raises(ValueError, match="there is none"):
        delta.apply({}, payload)


def packed(**fields) -> bytes:
    change = {"name": "x", "dtype": "bfloat16", "shape": (4,), "gap_bytes": 1, "gaps": b"\x01", "values": b"\0\0"}
    return zstandard.compress(msgspec.msgpack.encode([delta.Change(**change | fields)]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"nonsense",
        zstandard.compress(b"\xff"),
        packed(dtype="int4"),
        packed(gaps=b"\x05"),  # beyond the end
        packed(gaps=b"\x00"),  # before the beginning
        packed(gaps=b"\x01\x01"),
        packed(gap_bytes=2),
        packed(gap_bytes=3),
        packed(values=b"\0"),
        packed(gap_bytes=0, gaps=b""),
        packed(shape=(-1,)),
    ],
)
def test_a_payload_that_makes_no_sense_is_refused(payload):
    with pytest.raises(ValueError):
        delta.apply({"x": torch.zeros(4, dtype=torch.bfloat16)}, payload)


# The digest


def test_the_digest_does_not_depend_on_order_or_on_an_exact_wider_type():
    original = tensors(3)
    assert digest(dict(reversed(original.items()))) == digest(original)
    assert digest(widened(original)) == digest(original)
    assert digest({name: t.double() for name, t in original.items()}) == digest(original)
    half = tensors(3, torch.float16)
    assert digest(widened(half), torch.float16) == digest(half, torch.float16) != digest(original)


def test_the_digest_of_wider_tensors_keeps_the_payload_of_a_nan():
    words = torch.tensor(NASTY[16], dtype=torch.int32)
    narrow = {"x": words.to(torch.uint16).view(torch.bfloat16)}
    wide = {"x": (words << 16).view(torch.float32)}
    assert digest(wide) == digest(narrow)


def test_the_digest_sees_one_bit_one_name_one_shape_and_one_type():
    original = tensors(3)
    flipped = copies(original)
    bits(flipped["a"])[4] ^= 1
    renamed = {("c" if name == "b" else name): t for name, t in original.items()}
    reshaped = original | {"b": original["b"].reshape(25, 40)}
    retyped = original | {"a": original["a"].view(torch.float16)}
    assert len({digest(t) for t in (original, flipped, renamed, reshaped, retyped)}) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_live_weight_that_left_the_grid_is_named(dtype):
    live = widened(tensors(3, dtype))
    live["b"][2, 2] *= 1 + 2**-20
    with pytest.raises(ValueError, match=r"^b holds values that b?float16 cannot: its weights were altered$"):
        digest(live, dtype)
