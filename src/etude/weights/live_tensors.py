"""The tensors that an engine computes with, read and written as the published bits.

The live tensors may be wider (float32 for bfloat16) and on any device. A change names single elements, so writing it
costs time per change and copies no tensor. On the host a compiled loop does it; another device gets positions and
values when the change is staged, so that writing is one indexed operation per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from etude.weights.ulpd import device
from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Bits, Spec, bits
from etude.weights.ulpd.digest import narrow_lossless

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures
Tensors = Mapping[str, torch.Tensor]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ElementChange:
    """New bits for single elements of a tensor; `positions` index the flattened tensor and are distinct."""

    spec: Spec
    positions: Positions
    values: Bits
    staged: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)  # on devices but the host


class LiveTensors:
    """Reads and writes named contiguous tensors; the engine sees the written values at once."""

    def __init__(self, tensors: Tensors):
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        self.tensors = tensors

    def stage(self, spec: Spec, positions: Positions, values: Bits) -> ElementChange:
        """A change that is ready to be written; its lists are on the device already."""
        if (host := self._host(spec)) is not None:
            for kernel in (kernels.scatter, kernels.holds):
                kernel(*host, positions[:0], values[:0])  # compiled here, not while the engine is paused
            return ElementChange(spec, positions, values)
        tensor = self.tensors[spec.name]
        there = torch.from_numpy(positions).to(tensor.device)  # pyright: ignore[reportUnknownMemberType]
        return ElementChange(spec, positions, values, (there, as_tensor(values, spec).to(tensor.device, tensor.dtype)))

    def write(self, change: ElementChange) -> None:
        """Writes the values of the change."""
        if change.staged is None:
            kernels.scatter(*self._on_host(change.spec), change.positions, change.values)
        else:
            self._flat(change.spec).index_copy_(0, *change.staged)

    def holds(self, change: ElementChange) -> bool:
        """Whether the elements have the change's values, bit for bit."""
        if change.staged is None:
            return bool(kernels.holds(*self._on_host(change.spec), change.positions, change.values))
        positions, values = change.staged
        actual = self._flat(change.spec).index_select(0, positions)
        return torch.equal(actual.view(torch.uint8), values.view(torch.uint8))  # as bits: NaN equals itself

    def digest_run(self, spec: Spec, start: int, stop: int) -> int:
        """The digest of consecutive elements. Raises ValueError for bits that no published version can have."""
        return device.digest(
            spec, narrow_lossless(spec.name, self._flat(spec)[start:stop], getattr(torch, spec.dtype)), start
        )

    def write_run(self, spec: Spec, start: int, values: Bits) -> None:
        """Writes consecutive elements."""
        self._flat(spec)[start : start + values.size].copy_(as_tensor(values, spec))

    def _flat(self, spec: Spec) -> torch.Tensor:
        return self.tensors[spec.name].view(-1)

    def _host(self, spec: Spec) -> tuple[Bits, int] | None:
        """The tensor as unsigned integers, and the shift of the published bits in them, for a type that a shift
        widens."""
        tensor = self.tensors[spec.name]
        same = str(tensor.dtype) == f"torch.{spec.dtype}"
        if tensor.device.type != "cpu" or not (same or (spec.dtype == "bfloat16" and tensor.dtype == torch.float32)):
            return None
        return bits(tensor), 0 if same else 16

    def _on_host(self, spec: Spec) -> tuple[Bits, int]:
        host = self._host(spec)
        assert host is not None, "the change was staged for another device"
        return host


def as_tensor(array: Bits, spec: Spec) -> torch.Tensor:
    """A flat tensor of the published type on the same memory."""
    whole = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return whole.view(getattr(torch, spec.dtype))
