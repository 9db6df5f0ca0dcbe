"""Where the elements of published tensors lie in a process's memory: whole tensors, or the slices of a worker.

Workers of a tensor-parallel server hold rows, columns, experts or heads of a tensor, some of them all of it, stacked
with others. Each such slice is a slab: a regular pattern of elements of the published tensor, and the memory that holds
them. An element that several workers hold counts in the digest of one of them, so that their digests add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.weights.ulpd.chunk_grid import Spec
from etude.weights.ulpd.digest import digest_part, digest_rows, narrow_lossless

Positions = npt.NDArray[np.int64]
Pattern = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The elements first + i_0 steps_0 + i_1 steps_1 + ... of a flattened tensor: first, steps and sizes."""


@dataclass(frozen=True)
class Slab:
    """Elements of a flattened tensor: memory[i_0, i_1, ...] is number first + i_0 steps_0 + i_1 steps_1 + ... The steps
    descend to 1. `counted`: the digests of this process include these elements."""

    first: int
    steps: tuple[int, ...]
    memory: Tensor
    counted: bool = True

    @property
    def pattern(self) -> Pattern:
        """The elements, without their memory."""
        return self.first, self.steps, tuple(self.memory.shape)

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a contiguous tensor of the whole's shape."""
        return elements_of(whole, self.pattern)

    @cached_property
    def flat(self) -> Tensor:
        """The memory from the slab's first element to its last, with what lies between them."""
        extent = 1 + sum((n - 1) * stride for n, stride in zip(self.memory.shape, self.memory.stride(), strict=True))
        return self.memory.as_strided((extent,), (1,))

    def locate(self, positions: Positions) -> tuple[npt.NDArray[np.bool_], Positions]:
        """Which of these elements of the tensor the slab holds, and the places of those in `flat`."""
        rest, places = positions - self.first, np.zeros_like(positions)
        inside = rest >= 0
        for size, step, stride in zip(self.memory.shape, self.steps, self.memory.stride(), strict=True):
            index, rest = np.divmod(rest, step)
            inside &= index < size
            places += index * stride
        return inside, places[inside]

    def digest(self, spec: Spec, held: Tensor | None = None) -> int:
        """The digest of the slab's elements in `memory`, or in `held` of the same shape, modulo 2^64. Raises ValueError
        for bits that no published version can have."""
        part = narrow_lossless(spec.name, self.memory if held is None else held, getattr(torch, spec.dtype))
        if len(self.steps) == 1:
            return digest_part(spec, part, self.first)
        *outer, step, _ = self.steps
        total = 0
        for index in product(*(range(size) for size in part.shape[:-2])):
            first = self.first + sum(i * far for i, far in zip(index, outer, strict=True))
            total += digest_rows(spec, part[index], part.shape[-1], step, first)
        return total


@dataclass(frozen=True)
class Sliced:
    """The elements of a tensor that this process holds, on one device and in one type."""

    shape: tuple[int, ...]
    slabs: tuple[Slab, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        """The number of elements of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_whole(self) -> bool:
        """Whether one slab has all elements, in their order."""
        return not self.elements or [slab.pattern for slab in self.slabs] == [(0, (1,), (self.elements,))]


Slices = Mapping[str, Sliced]


def whole(tensor: Tensor) -> Sliced:
    """A contiguous tensor that this process holds."""
    assert tensor.is_contiguous()
    slabs = (Slab(0, (1,), tensor.view(-1)),) if tensor.numel() else ()
    return Sliced(tuple(tensor.shape), slabs, tensor.dtype, tensor.device)


def elements_of(tensor: Tensor, pattern: Pattern) -> Tensor:
    """The elements of a pattern in a contiguous tensor."""
    first, steps, sizes = pattern
    return tensor.as_strided(sizes, steps, int(tensor.storage_offset()) + first)


def slab_of(source: Tensor, memory: Tensor) -> Slab | None:
    """The slab that a copy from `source`, a view of a contiguous tensor that begins its storage, to `memory` fills;
    None if the copy writes one element to several places."""
    dims = zip(source.stride(), source.shape, memory.stride(), strict=True)
    several = sorted((dim for dim in dims if dim[1] != 1), reverse=True)
    if any(outer[0] < step * size for outer, (step, size, _) in pairwise([*several, (1, 1, 0)])):
        return None
    return _slab(int(source.storage_offset()), several, memory.detach(), int(memory.storage_offset()))


def joined(slabs: Sequence[Slab]) -> tuple[Slab, ...]:
    """The same elements in fewer slabs. Those that follow each other in tensor and memory become one, and equal ones at
    equal distances one with a further dimension."""
    rest: list[Slab] = []
    for slab in sorted(slabs, key=lambda slab: slab.first):
        rest.append(slab)
        if len(rest) > 1 and _follows(rest[-2], slab):
            last, memory = rest[-2], rest[-2].memory
            dims = list(zip(last.steps, memory.shape, memory.stride(), strict=True))
            dims[0] = dims[0][0], memory.shape[0] + slab.memory.shape[0], dims[0][2]
            rest[-2:] = [_slab(last.first, dims, memory, int(memory.storage_offset()))]
    groups: list[list[Slab]] = []
    for slab in rest:
        if groups and _continues(groups[-1], slab):
            groups[-1].append(slab)
        else:
            groups.append([slab])
    return tuple(_stacked(group) for group in groups)


def _slab(first: int, dims: Sequence[tuple[int, int, int]], memory: Tensor, offset: int) -> Slab:
    """The slab of these dimensions (step, size, stride), of which those that could be one become one."""
    merged: list[tuple[int, int, int]] = []
    for step, size, stride in dims:
        if merged and merged[-1][0] == step * size and merged[-1][2] == stride * size:
            size *= merged.pop()[1]
        merged.append((step, size, stride))
    if not merged or merged[-1][0] != 1:
        merged.append((1, 1, 1))
    steps, sizes, strides = zip(*merged, strict=True)
    return Slab(first, steps, memory.as_strided(sizes, strides, offset))


def _follows(last: Slab, slab: Slab) -> bool:
    """Whether two slabs are one that is longer in its first dimension."""
    (length, *inner), strides = last.memory.shape, last.memory.stride()
    same = last.steps == slab.steps and inner == list(slab.memory.shape[1:]) and strides == slab.memory.stride()
    return same and _distance(last, slab) == (length * last.steps[0], length * strides[0])


def _continues(group: Sequence[Slab], slab: Slab) -> bool:
    """Whether a slab is the next in a group of equal ones at equal distances."""
    last = group[-1]
    if last.pattern[1:] != slab.pattern[1:] or last.memory.stride() != slab.memory.stride():
        return False
    far, further = distance = _distance(last, slab)
    if further <= 0 or far < last.steps[0] * last.memory.shape[0]:
        return False
    return len(group) == 1 or distance == _distance(*group[:2])


def _distance(one: Slab, other: Slab) -> tuple[int, int]:
    """The distance of two slabs in the tensor and in memory; (0, 0) in different memory."""
    if one.memory.untyped_storage().data_ptr() != other.memory.untyped_storage().data_ptr():
        return 0, 0
    return other.first - one.first, int(other.memory.storage_offset()) - int(one.memory.storage_offset())


def _stacked(group: Sequence[Slab]) -> Slab:
    one, memory = group[0], group[0].memory
    if len(group) == 1:
        return one
    far, further = _distance(*group[:2])
    dims = [(far, len(group), further), *zip(one.steps, memory.shape, memory.stride(), strict=True)]
    return _slab(one.first, dims, memory, int(memory.storage_offset()))


# --- several workers --------------------------------------------------------------------------------------------------


def patterns(slices: Slices) -> bytes:
    """The elements that this process holds, for the others."""
    return msgspec.json.encode({name: [slab.pattern for slab in part.slabs] for name, part in slices.items()})


def counted(slices: Slices, of_all: Sequence[bytes], rank: int) -> dict[str, Sliced]:
    """The slices of worker `rank` of several whose `patterns` are given: it counts what no earlier one holds. Raises
    ValueError for elements that no worker holds, or that two of them share only in part."""
    if len(of_all) == 1 and all(part.is_whole for part in slices.values()):
        return dict(slices)
    held = [msgspec.json.decode(one, type=dict[str, list[Pattern]]) for one in of_all]
    return {name: _counted(name, part, [one[name] for one in held], rank) for name, part in slices.items()}


def _counted(name: str, part: Sliced, held: Sequence[Sequence[Pattern]], rank: int) -> Sliced:
    owner = torch.full((part.elements,), len(held), dtype=torch.int16)
    for worker in reversed(range(len(held))):
        for pattern in held[worker]:
            elements_of(owner, pattern).fill_(worker)
    if missing := int((owner == len(held)).sum()):
        raise ValueError(f"has {part.elements - missing} of {part.elements} elements of {name}")
    own = int((owner == rank).sum())
    slabs = [replace(slab, counted=bool((slab.of(owner) == rank).any())) for slab in part.slabs]
    if sum(slab.memory.numel() for slab in slabs if slab.counted) != own:
        raise ValueError(f"has some elements of {name} in several places")
    return replace(part, slabs=tuple(slabs))


def counted_elements(part: Sliced) -> Tensor:
    """A whole tensor on the host with the elements that this process counts, and zeros for the others: the sum over all
    workers is the tensor."""
    tensor = torch.zeros(part.shape, dtype=part.dtype)
    for slab in part.slabs:
        if slab.counted:
            slab.of(tensor).copy_(slab.memory)
    return tensor
