"""Plain lossless deltas: per tensor, where the bits changed and the new bits.

A payload is zstd over a MessagePack list of (name, dtype, shape, gaps, values): `gaps` are uint32 distances between
changed elements, the first counted from -1; `values` are the new bits. An anchor is the same list with every element.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
import zstandard

from etude.weights.digest import bits

LEVEL = 1


class Change(msgspec.Struct, frozen=True, array_like=True):
    """The changed elements of one tensor; `gaps` is empty and `whole` set when all of them are given."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: bool
    gaps: bytes  # uint32 [changed]
    values: bytes  # unsigned [changed], as wide as the dtype


def encode(old: Mapping[str, torch.Tensor] | None, new: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """The payload that turns `old` into `new`, and how many elements differ; without `old`, all of `new`.

    Bits are compared, so -0.0 and NaN payloads are kept. Raises ValueError if the two differ in names, types or shapes.
    """
    if old is not None and old.keys() != new.keys():
        raise ValueError(f"versions differ in tensors: {sorted(old.keys() ^ new.keys())[0]} is in one of them only")
    changes: list[Change] = []
    changed = 0
    for name in sorted(new):
        change, count = _change(name, None if old is None else old[name], new[name])
        changed += count
        if count or old is None:
            changes.append(change)
    return zstandard.ZstdCompressor(level=LEVEL).compress(msgspec.msgpack.encode(changes)), changed


def _change(name: str, old: torch.Tensor | None, new: torch.Tensor) -> tuple[Change, int]:
    after = bits(new)
    kind = str(new.dtype).removeprefix("torch.")
    shape = tuple(new.shape)
    if old is None:
        return Change(name, kind, shape, True, b"", after.tobytes()), after.size
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"{name} changed from {old.dtype} {tuple(old.shape)} to {new.dtype} {shape}")
    index = np.flatnonzero(bits(old) != after)
    gaps = np.diff(index, prepend=-1).astype("<u4")
    return Change(name, kind, shape, False, gaps.tobytes(), after[index].tobytes()), index.size


def decode(payload: bytes) -> list[Change]:
    """The changes in a payload. Raises ValueError if it is damaged."""
    try:
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(payload), type=list[Change])
    except (zstandard.ZstdError, msgspec.MsgspecError) as e:
        raise ValueError(f"damaged weight payload: {e}") from None


def apply(changes: list[Change], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the changes into contiguous host `tensors`. Raises ValueError, before writing, if they do not fit."""
    for change in changes:
        tensor = tensors.get(change.name)
        if tensor is None or str(tensor.dtype) != f"torch.{change.dtype}" or tuple(tensor.shape) != change.shape:
            have = "no such tensor" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"the payload holds {change.name} as {change.dtype} {change.shape}, here is {have}")
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{change.name} is not a contiguous tensor on the host")
    for change in changes:
        target = bits(tensors[change.name])
        values = np.frombuffer(change.values, target.dtype)
        if change.whole:
            target[:] = values
        else:
            target[np.cumsum(np.frombuffer(change.gaps, "<u4").astype(np.int64)) - 1] = values
