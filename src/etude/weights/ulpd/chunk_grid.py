"""The schema of a set of tensors: names, types, shapes, and the grid of chunks for deltas.

A chunk is a run of whole rows of one tensor (or a piece of one long row) of at most 2^18 elements, so it is contiguous.
Chunks are counted over all tensors in name order. The grid follows from names, types and shapes alone and is the same
for every version of a chain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import blake3
import numpy as np
import numpy.typing as npt
import torch

Bits = npt.NDArray[np.unsignedinteger]

MAX_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Format:
    """The format of an element: its bits, whether the highest is a sign, and the place of its exponent."""

    name: str
    width: int
    signed: bool
    mantissa: int
    exponent_mask: int
    bias: int

    @property
    def unsigned(self) -> type[np.unsignedinteger]:
        """The unsigned integer of the same width."""
        return {8: np.uint8, 16: np.uint16, 32: np.uint32}[self.width]

    @property
    def integer(self) -> type[np.signedinteger]:
        """The integer type for a step between two ordered codes, modulo 2^w."""
        return {8: np.int8, 16: np.int16, 32: np.int32}[self.width]


FORMATS = {
    f.name: f
    for f in (
        Format("bfloat16", 16, True, 7, 0xFF, 127),
        Format("float16", 16, True, 10, 0x1F, 15),
        Format("float32", 32, True, 23, 0xFF, 127),
        Format("float8_e4m3fn", 8, True, 3, 0xF, 7),
        Format("float8_e5m2", 8, True, 2, 0x1F, 15),
        Format("uint8", 8, False, 0, 0, 0),  # scales and packed 4-bit weights
    )
}


@dataclass(frozen=True)
class Spec:
    """Name, type and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def format(self) -> Format:
        """The format of its elements."""
        return FORMATS[self.dtype]

    @cached_property
    def seed(self) -> int:
        """The seed for the hashes of this tensor's elements, so that equal values in other tensors hash differently."""
        shape = ",".join(map(str, self.shape))
        return int.from_bytes(blake3.blake3(f"ulpd1\0{self.name}\0{self.dtype}\0{shape}".encode()).digest(8), "little")


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a tensor, in row-major order."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Window:
    """Consecutive elements of a tensor, from number `first` on. Indexed as the array of the whole tensor is."""

    bits: Bits
    first: int = 0

    def __getitem__(self, part: slice) -> Bits:
        start, stop = part.start - self.first, part.stop - self.first
        if start < 0 or stop > self.bits.size:
            raise IndexError(f"elements {part.start} to {part.stop} are not in the window")
        return self.bits[start:stop]


@dataclass(frozen=True)
class Schema:
    """The tensors of a model in name order. Raises ValueError for an unsupported type."""

    tensors: tuple[Spec, ...]

    def __post_init__(self) -> None:
        for spec in self.tensors:
            if spec.dtype not in FORMATS:
                raise ValueError(f"{spec.name} is {spec.dtype}; weights are published as {', '.join(FORMATS)}")

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The grid, in the order of tensors and elements."""
        return tuple(Chunk(i, *piece) for i, spec in enumerate(self.tensors) for piece in _pieces(spec))

    @cached_property
    def id(self) -> str:
        """An id that is equal for equal names, types and shapes."""
        return blake3.blake3(self.encode()).hexdigest()[:32]

    @cached_property
    def types(self) -> dict[str, torch.dtype]:
        """The type of each tensor."""
        return {spec.name: getattr(torch, spec.dtype) for spec in self.tensors}

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(spec.elements * spec.format.width // 8 for spec in self.tensors)

    def encode(self) -> bytes:
        """The schema as JSON; see `decode`."""
        return json.dumps([[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]).encode()


def decode(data: bytes) -> Schema:
    """The inverse of `Schema.encode`. Raises ValueError."""
    try:
        specs = tuple(Spec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in json.loads(data))
    except (ValueError, TypeError) as e:
        raise ValueError(f"the schema is damaged: {e}") from None
    return Schema(specs)


def schema_of(tensors: Mapping[str, torch.Tensor]) -> Schema:
    """The schema of named tensors. Raises ValueError for an unsupported type."""
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    specs = tuple(Spec(name, types[name], tuple(tensors[name].shape)) for name in sorted(tensors))
    return Schema(specs)


def unsigned(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an unsigned integer, flat, on its device; shares a contiguous tensor's memory."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()])


def bits(tensor: torch.Tensor) -> Bits:
    """The bits of each element as an unsigned integer, flat, on the host."""
    return unsigned(tensor).cpu().numpy()


def as_tensor(array: Bits, spec: Spec) -> torch.Tensor:
    """The inverse of `bits`, flat: a tensor of the type of `spec` on the same memory."""
    whole = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return whole.view(getattr(torch, spec.dtype))


def _pieces(spec: Spec) -> Iterator[tuple[int, int]]:
    if spec.elements == 0:
        return
    row = spec.shape[-1] if len(spec.shape) > 1 else spec.elements
    if row > MAX_ELEMENTS:
        for start in range(0, spec.elements, row):
            for piece in range(start, start + row, MAX_ELEMENTS):
                yield piece, min(piece + MAX_ELEMENTS, start + row)
        return
    step = MAX_ELEMENTS // row * row
    for start in range(0, spec.elements, step):
        yield start, min(start + step, spec.elements)
