"""What a version changed, element by element, apart from how it is written down.

Steps of successive versions add up, so a fold over many versions is a sum, and the inverse of a delta is its negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.schema import Bits, Format, Schema, Spec

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


@dataclass(frozen=True)
class Moves:
    """The changes of one chunk: `positions` (int32, ascending) inside it, and what happens to each element.

    `values` are unsigned integers of the type's width: the step d modulo 2^w between ordered codes or, where `absolute`
    holds, the ordered code that the element gets whatever it was. None: all are steps.
    """

    positions: npt.NDArray[np.int32]
    values: Bits
    absolute: npt.NDArray[np.bool_] | None = None


Changes = Mapping[int, Moves]  # by chunk; a chunk without changes is absent


def ordered(bits: Bits, form: Format) -> Bits:
    """The code of each bit pattern that grows with its value, modulo 2^w; its own inverse."""
    if not form.signed:
        return bits.copy()
    lower = bits.dtype.type((1 << (form.width - 1)) - 1)
    return bits ^ (bits >> bits.dtype.type(form.width - 1)) * lower


def fold(schema: Schema, steps: Sequence[Changes]) -> Changes:
    """One set of changes that does what all of them do in this order. Steps that add up to nothing are left out."""
    touched = sorted({chunk for step in steps for chunk in step})
    folded = {chunk: _fold_chunk(schema, chunk, [step[chunk] for step in steps if chunk in step]) for chunk in touched}
    return {chunk: moves for chunk, moves in folded.items() if moves.positions.size}


def _fold_chunk(schema: Schema, index: int, moves: Sequence[Moves]) -> Moves:
    chunk = schema.chunks[index]
    size = chunk.stop - chunk.start
    total_N = np.zeros(size, schema.tensors[chunk.tensor].format.unsigned)
    absolute_N = np.zeros(size, np.bool_)
    for part in moves:
        at, values = part.positions, part.values
        if part.absolute is not None:
            whole = at[part.absolute]
            total_N[whole], absolute_N[whole] = values[part.absolute], True
            at, values = at[~part.absolute], values[~part.absolute]
        total_N[at] += values  # a position occurs once in a step
    positions = np.flatnonzero((total_N != 0) | absolute_N).astype(np.int32)
    absolute = absolute_N[positions]
    return Moves(positions, total_N[positions], absolute if absolute.any() else None)


def move(schema: Schema, tensors: Mapping[str, Bits], changes: Changes) -> dict[int, int]:
    """Make the changes in place; by chunk, what its digest grows by (modulo 2^64)."""
    return {index: _move_chunk(schema, tensors, index, moves) for index, moves in changes.items()}


def undo(schema: Schema, tensors: Mapping[str, Bits], changes: Changes) -> dict[int, int]:
    """Take changes back in place; by chunk, what its digest grows by. Raises ValueError if they are not all steps."""
    return move(schema, tensors, inverse(changes))


def inverse(changes: Changes) -> Changes:
    """The changes that take these back. Raises ValueError if an absolute one is among them: what was there is lost."""
    if any(moves.absolute is not None for moves in changes.values()):
        raise ValueError("absolute changes cannot be taken back")
    return {index: Moves(moves.positions, -moves.values) for index, moves in changes.items()}


def _move_chunk(schema: Schema, tensors: Mapping[str, Bits], index: int, moves: Moves) -> int:
    chunk = schema.chunks[index]
    spec = schema.tensors[chunk.tensor]
    return move_bits(spec, tensors[spec.name][chunk.start : chunk.stop], chunk.start, moves)


def move_bits(spec: Spec, part: Bits, first: int, moves: Moves) -> int:
    """Make the changes of one chunk, whose first element is number `first` of its tensor; what its digest grows by."""
    form = spec.format
    values = moves.values
    if moves.absolute is not None:  # as the steps that they are on this content
        values = values.copy()
        values[moves.absolute] -= ordered(part[moves.positions[moves.absolute]], form)
    place = (part, moves.positions, values.view(form.integer), np.uint64(spec.seed), first)
    return int(kernels.add(*place, form.width, form.signed))
