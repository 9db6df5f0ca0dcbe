"""Host copies of tensors, taken again and again.

For a tensor on a GPU a copy stays there, too. The next call compares on the GPU, and only the changes, six bytes each
for two-byte elements, come to the host, where they are applied to the previous copy. Of a shard, rows of a tensor, the
copy goes on with a tail: elements that another rank holds, which are on the host already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from etude.errors import UserError
from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Bits, Spec, Window, unsigned

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


@dataclass(frozen=True)
class HeldPart:
    """The elements of a tensor that a copy is taken of: `rows`, which begin at element number `first` of the whole,
    and the bits of those after them, if any."""

    spec: Spec
    rows: torch.Tensor
    first: int = 0
    tail: Bits | None = None

    @property
    def tail_size(self) -> int:
        """Number of elements in the tail."""
        return 0 if self.tail is None else self.tail.size


@dataclass(frozen=True)
class _TensorMirror:
    """The last copy of a part's bits, on its device without the tail and on the host with it; `here` is never written
    to."""

    spec: Spec
    first: int
    there: torch.Tensor
    here: Bits

    def fits(self, part: HeldPart) -> bool:
        """Whether it is a copy of the same elements."""
        place, size = (self.spec, self.first, self.there.device), self.there.numel()
        own = (part.spec, part.first, part.rows.device)
        return place == own and size == part.rows.numel() and self.here.size == size + part.tail_size


@dataclass(frozen=True)
class _PartMoves:
    """The changes in a stretch of a part: positions from its element number `first` on."""

    first: int
    positions: npt.NDArray[np.int32]
    steps: npt.NDArray[np.signedinteger]
    grown: int


class Snapshots:
    """Takes copies of the same parts of tensors again and again. Not thread-safe. Device memory: the last copies of
    those on it, whose array is shared if they have not changed; returned arrays are never written to."""

    def __init__(self):
        self._mirrors: dict[str, _TensorMirror] = {}

    def take(self, parts: Sequence[HeldPart]) -> Callable[[], dict[str, Window]]:
        """Takes the present values; the caller may write to the tensors as soon as this returns. The result, called
        once and on any thread, returns their bits. If it is never called, all is copied as a whole the next time.
        Raises UserError for tensors on a GPU without Triton."""
        known, self._mirrors = self._mirrors, {}
        whole: dict[str, Window] = {}
        moved: list[tuple[_TensorMirror, HeldPart, list[_PartMoves]]] = []
        for part in parts:
            name, flat = part.spec.name, unsigned(part.rows)
            mirror = known.get(name)
            if not kernels.on_gpu(flat):
                whole[name] = Window(_here(flat, part.tail), part.first)
            elif mirror is not None and mirror.fits(part):
                try:
                    moved.append((mirror, part, _follow(mirror, flat)))
                except kernels.TritonMissing as e:
                    raise UserError(str(e)) from None
            else:
                there = flat.clone()
                self._mirrors[name] = _TensorMirror(part.spec, part.first, there, _here(there, part.tail))

        def finish() -> dict[str, Window]:
            for mirror, part, moves in moved:
                self._mirrors[mirror.spec.name] = _followed(mirror, part, moves)
            return whole | {name: Window(mirror.here, mirror.first) for name, mirror in self._mirrors.items()}

        return finish


def _here(flat: torch.Tensor, tail: Bits | None) -> Bits:
    if tail is None:
        return flat.to("cpu", copy=True).numpy()
    here = np.empty(flat.numel() + tail.size, tail.dtype)
    torch.from_numpy(here[: flat.numel()]).copy_(flat)  # pyright: ignore[reportUnknownMemberType]
    here[flat.numel() :] = tail
    return here


def _follow(mirror: _TensorMirror, flat: torch.Tensor) -> list[_PartMoves]:
    """Brings the device's copy to `flat`."""
    gpu, spec, form = kernels.gpu_kernels(), mirror.spec, mirror.spec.format
    parts: list[_PartMoves] = []
    for first in range(0, flat.numel(), gpu.LARGEST):
        stretch = slice(first, first + gpu.LARGEST)
        there, now = mirror.there[stretch], flat[stretch]
        positions, steps, grown = gpu.scan(there, now, spec.seed, mirror.first + first, form.width, form.signed)
        parts.append(_PartMoves(first, positions.cpu().numpy(), steps.cpu().numpy(), grown))
    return parts


def _followed(mirror: _TensorMirror, part: HeldPart, moves: Sequence[_PartMoves]) -> _TensorMirror:
    """Brings the host's copy to the device's, and to the new tail. Raises RuntimeError if its digest changes otherwise
    than on the device."""
    spec, own = mirror.spec, mirror.there.numel()
    same_tail = part.tail is None or np.array_equal(mirror.here[own:], part.tail)
    if same_tail and not any(some.positions.size for some in moves):
        return mirror
    here = mirror.here.copy()
    if part.tail is not None:
        here[own:] = part.tail
    for some in moves:
        place = (here[some.first :], some.positions, some.steps, np.uint64(spec.seed), mirror.first + some.first)
        if int(kernels.add(*place, spec.format.width, spec.format.signed)) != some.grown:
            raise RuntimeError(f"the changes of {spec.name} did not arrive from {mirror.there.device}; it is broken")
    return _TensorMirror(spec, mirror.first, mirror.there, here)
