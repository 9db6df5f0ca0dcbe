"""Folds of changes against the changes one after another, and their inverses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import FORMATS, Bits, Schema, Spec
from etude.weights.ulpd.codec import ABS, A, B, Codec

ALL = (A, B, ABS)


def grid_of(dtype: str) -> Schema:
    return Schema((Spec("x", dtype, (3, 90_000)), Spec("y", dtype, (50,))))  # three chunks


def move(grid: Schema, live: dict[str, Bits], moved: codec.Changes) -> dict[int, int]:
    """Makes the changes in place; by chunk, what its digest grows by."""
    grown = {}
    for number, moves in moved.items():
        chunk = grid.chunks[number]
        spec = grid.tensors[chunk.tensor]
        grown[number] = codec.move_bits(spec, live[spec.name][chunk.start : chunk.stop], chunk.start, moves)
    return grown


def start(grid: Schema, rng: np.random.Generator) -> dict[str, Bits]:
    top = 1 << grid.tensors[0].format.width
    return {
        spec.name: rng.integers(0, top, spec.elements, dtype=np.uint64).astype(spec.format.unsigned)
        for spec in grid.tensors
    }


def step(rng: np.random.Generator, old: dict[str, Bits], reach: int) -> dict[str, Bits]:
    """Touches few elements, always from the same small set, so that steps meet and cancel."""
    new = {name: part.copy() for name, part in old.items()}
    for part in new.values():
        at = rng.integers(0, min(part.size, 40), rng.integers(0, 12))
        part[at] += rng.integers(-reach, reach + 1, at.size).astype(part.dtype)
    return new


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(0, 2**32),
    st.lists(st.sampled_from([(A,), (B,), (ABS,), (), ALL]), min_size=1, max_size=64),
    st.sampled_from([1, 2, 255]),
)
def test_a_fold_does_what_its_steps_do(dtype: str, seed: int, allowed: list[tuple[int, ...]], reach: int) -> None:
    rng = np.random.default_rng(seed)
    grid = grid_of(dtype)
    first = now = start(grid, rng)
    base = held = codec.digests(grid, first)
    known: list[codec.Changes] = []
    for choice in allowed:
        new = step(rng, now, reach)
        known.append(codec.encode_changes(grid, now, new, held, Codec(choice))[1])
        held = codec.digests(grid, new)
        now = new
    folded = codec.fold(grid, known)
    copy = {name: part.copy() for name, part in first.items()}
    move(grid, copy, folded)
    assert all(np.array_equal(copy[name], now[name]) for name in now)
    assert all((moves.values != 0).all() for moves in folded.values())
    direct = codec.encode_changes(grid, first, now, base, Codec())[0]
    assert codec.encode_fold(grid, now, held, known, Codec()) == direct, "equal bytes, without the old content"


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_changes_are_taken_back(dtype: str) -> None:
    rng = np.random.default_rng(5)
    grid = grid_of(dtype)
    old = start(grid, rng)
    new = step(rng, old, 200)
    base, target = codec.digests(grid, old), codec.digests(grid, new)
    for choice in ((A,), (B,), (ABS,), ()):
        made = codec.encode_changes(grid, old, new, base, Codec(choice))[1]
        live = {name: part.copy() for name, part in old.items()}
        for chunk, grown in move(grid, live, made).items():
            assert (int(base[chunk]) + grown) % codec.MODULUS == int(target[chunk])
        assert all(np.array_equal(live[name], new[name]) for name in new)
        for chunk, grown in move(grid, live, codec.inverse(made)).items():
            assert (int(target[chunk]) + grown) % codec.MODULUS == int(base[chunk])
        assert all(np.array_equal(live[name], old[name]) for name in old)
