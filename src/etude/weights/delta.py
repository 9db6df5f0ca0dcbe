"""Plain lossless deltas: per tensor, where the bits changed and the new bits.

A payload is zstd over a MessagePack list of changes. Positions are gaps: distances between changed elements, the first
one counted from -1, in the narrowest unsigned type that holds the widest of them. A tensor that changed almost
everywhere, or that is new, is given whole; an anchor is a delta against nothing. Bits are compared, never values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zstandard

from etude.weights.digest import bits, type_name

LEVEL = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Bits = npt.NDArray[np.unsignedinteger]


class Change(msgspec.Struct, array_like=True, frozen=True):
    """The changed elements of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    gap_bytes: Literal[0, 1, 2, 4]  # 0: every element is given and `gaps` is empty
    gaps: bytes
    values: bytes


def encode(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """The payload that turns `old` into `new`, and how many elements differ. `old` may be empty: an anchor.

    Raises ValueError if a tensor is gone, or has another type or shape than before.
    """
    if gone := sorted(old.keys() - new.keys()):
        raise ValueError(f"{gone[0]} was part of the last version and is not part of this one")
    changes: list[Change] = []
    changed = 0
    for name in sorted(new):
        change, count = _change(name, old.get(name), new[name])
        changed += count
        if change is not None:
            changes.append(change)
    return zstandard.ZstdCompressor(level=LEVEL).compress(msgspec.msgpack.encode(changes)), changed


def apply(tensors: Mapping[str, torch.Tensor], payload: bytes) -> dict[str, torch.Tensor]:
    """`tensors` with the payload's changes, as new host tensors; unchanged ones are shared, none is written to.

    Raises ValueError if the payload is damaged or does not fit.
    """
    try:
        changes = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(payload), type=list[Change])
    except (zstandard.ZstdError, msgspec.MsgspecError) as e:
        raise ValueError(f"the payload is damaged: {e}") from None
    return {**tensors, **{change.name: _changed(change, tensors.get(change.name)) for change in changes}}


def _change(name: str, old: torch.Tensor | None, new: torch.Tensor) -> tuple[Change | None, int]:
    kind, shape, after = type_name(new), tuple(new.shape), bits(new)
    if kind not in DTYPES:
        raise ValueError(f"{name} is {kind}; weights are published as {', '.join(DTYPES)}")
    whole = Change(name, kind, shape, 0, b"", after.tobytes())
    if old is None:
        return whole, after.size
    if (type_name(old), tuple(old.shape)) != (kind, shape):
        raise ValueError(f"{name} was {type_name(old)} {tuple(old.shape)} and is {kind} {shape}")
    index = np.flatnonzero(bits(old) != after)
    if index.size == 0:
        return None, 0
    gaps = np.diff(index, prepend=-1)
    gap_bytes = 1 if gaps.max() < 1 << 8 else 2 if gaps.max() < 1 << 16 else 4
    if index.size * (gap_bytes + after.itemsize) >= after.nbytes:
        return whole, index.size
    return Change(
        name, kind, shape, gap_bytes, gaps.astype(f"<u{gap_bytes}").tobytes(), after[index].tobytes()
    ), index.size


def _changed(change: Change, old: torch.Tensor | None) -> torch.Tensor:
    dtype = DTYPES.get(change.dtype)
    if dtype is None:
        raise ValueError(f"{change.name} has the unknown type {change.dtype}")
    values = np.frombuffer(change.values, f"<u{dtype.itemsize}")
    elements = int(np.prod(change.shape))
    if change.gap_bytes == 0:
        if values.size != elements:
            raise ValueError(f"{change.name} {change.shape} is given by {values.size} elements")
        whole = torch.from_numpy(values.copy())  # pyright: ignore[reportUnknownMemberType]
        return whole.view(dtype).view(change.shape)
    if old is None or old.dtype != dtype or tuple(old.shape) != change.shape:
        have = "there is none" if old is None else f"there is {type_name(old)} {tuple(old.shape)}"
        raise ValueError(f"the payload changes {change.name}, {change.dtype} {change.shape}; {have}")
    index = np.cumsum(np.frombuffer(change.gaps, f"<u{change.gap_bytes}"), dtype=np.int64) - 1
    if index.size != values.size or (index.size and not 0 <= index[-1] < elements):
        raise ValueError(f"the changes of {change.name} do not fit into {change.shape}")
    new = old.detach().cpu().contiguous().clone()
    bits(new)[index] = values
    return new
