"""The changes of a version, element by element, independent of their encoding.

Steps of successive versions add up, so a fold over many versions is a sum, and the inverse of a delta is its negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Bits, Schema, Spec

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


@dataclass(frozen=True)
class Moves:
    """The changes of one chunk: `positions` (int32, ascending) inside the chunk, and the step of each element. `values`
    are unsigned integers of the type's width: the steps d modulo 2^w between ordered codes."""

    positions: npt.NDArray[np.int32]
    values: Bits


Changes = Mapping[int, Moves]  # by chunk; a chunk without changes is absent


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
