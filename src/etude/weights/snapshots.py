"""Host copies of tensors, taken again and again.

For a tensor on a GPU a copy stays there, too. The next call compares on the GPU, and only the changes, six bytes each
for two-byte elements, come to the host, where they are applied to the previous copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from etude.errors import UserError
from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Bits, Spec, unsigned

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


@dataclass(frozen=True)
class _TensorMirror:
    """The last copy of a tensor's bits, on its device and on the host; `here` is never written to."""

    spec: Spec
    there: torch.Tensor
    here: Bits


@dataclass(frozen=True)
class _PartMoves:
    """The changes in a part of a tensor: positions from its element number `first` on."""

    first: int
    positions: npt.NDArray[np.int32]
    steps: npt.NDArray[np.signedinteger]
    grown: int


class Snapshots:
    """Takes copies of the same tensors again and again. Not thread-safe. Device memory: the last copies of the tensors
    on it. Unchanged tensors share the array of their last copy; returned arrays are never written to."""

    def __init__(self):
        self._mirrors: dict[str, _TensorMirror] = {}

    def take(self, specs: Sequence[Spec], tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Bits]]:
        """Takes the present values of the tensors; the caller may write to them as soon as this returns. The result,
        called once and on any thread, returns their bits. If it is never called, the tensors are copied as a whole the
        next time. Raises UserError for tensors on a GPU without Triton."""
        known, self._mirrors = self._mirrors, {}
        whole: dict[str, Bits] = {}
        moved: list[tuple[_TensorMirror, list[_PartMoves]]] = []
        for spec in specs:
            tensor = tensors[spec.name]
            mirror = known.get(spec.name)
            if not kernels.on_gpu(tensor):
                whole[spec.name] = _here(unsigned(tensor))
            elif mirror is not None and mirror.spec == spec and mirror.there.device == tensor.device:
                try:
                    moved.append((mirror, _follow(mirror, unsigned(tensor))))
                except kernels.TritonMissing as e:
                    raise UserError(str(e)) from None
            else:
                there = unsigned(tensor).clone()
                self._mirrors[spec.name] = _TensorMirror(spec, there, _here(there))

        def finish() -> dict[str, Bits]:
            for mirror, parts in moved:
                self._mirrors[mirror.spec.name] = _followed(mirror, parts)
            return whole | {name: mirror.here for name, mirror in self._mirrors.items()}

        return finish


def _here(flat: torch.Tensor) -> Bits:
    return flat.to("cpu", copy=True).numpy()


def _follow(mirror: _TensorMirror, flat: torch.Tensor) -> list[_PartMoves]:
    """Brings the device's copy to `flat`."""
    gpu, spec, form = kernels.gpu_kernels(), mirror.spec, mirror.spec.format
    parts: list[_PartMoves] = []
    for first in range(0, flat.numel(), gpu.LARGEST):
        part = slice(first, first + gpu.LARGEST)
        there, now = mirror.there[part], flat[part]
        positions, steps, grown = gpu.scan(there, now, spec.seed, first, form.width, form.signed)
        parts.append(_PartMoves(first, positions.cpu().numpy(), steps.cpu().numpy(), grown))
    return parts


def _followed(mirror: _TensorMirror, parts: Sequence[_PartMoves]) -> _TensorMirror:
    """Brings the host's copy to the device's. Raises RuntimeError if its digest changes otherwise than on the
    device."""
    spec = mirror.spec
    if not any(part.positions.size for part in parts):
        return mirror
    here = mirror.here.copy()
    for part in parts:
        place = (here[part.first :], part.positions, part.steps, np.uint64(spec.seed), part.first)
        if int(kernels.add(*place, spec.format.width, spec.format.signed)) != part.grown:
            raise RuntimeError(f"the changes of {spec.name} did not arrive from {mirror.there.device}; it is broken")
    return _TensorMirror(spec, mirror.there, here)
