"""One digest for a set of tensors, the same for the trainer that published them and the engine that serves them."""

from __future__ import annotations

from collections.abc import Mapping

import blake3
import numpy as np
import numpy.typing as npt
import torch

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""The integer type that shows the bits of an element of so many bytes."""


def digest(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> str:
    """blake3 over (name, dtype, shape, bits) in name order.

    Tensors of a wider type are digested as `dtype`, after proving that they hold exactly such values: an engine that
    computes in float32 has the digest of the bfloat16 weights it was given. Raises ValueError, naming the tensor, if
    one does not.
    """
    hasher = blake3.blake3()
    for name in sorted(tensors):
        tensor = narrow(name, tensors[name], dtype)
        hasher.update(f"{name}\0{type_name(tensor)}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(bits(tensor).view(np.uint8).data)
    return hasher.hexdigest()


def narrow(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype` if that is narrower, without losing a bit. Raises ValueError if that is impossible."""
    tensor = tensor.detach()
    if not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize:
        return tensor
    if tensor.dtype == torch.float32 and dtype == torch.bfloat16:
        # A bfloat16 is the upper half of a float32. Cutting it off keeps the payload of a NaN, which a cast may not.
        halves_N2 = tensor.contiguous().view(-1).view(torch.int16).view(-1, 2)
        if halves_N2[:, 0].any():
            raise _altered(name, dtype)
        return halves_N2[:, 1].contiguous().view(dtype).view(tensor.shape)
    narrowed = tensor.to(dtype)
    if not np.array_equal(bits(narrowed.to(tensor.dtype)), bits(tensor)):
        raise _altered(name, dtype)
    return narrowed


def bits(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """The bits of each element as an unsigned integer, on the host; shares memory with a contiguous host tensor."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    return flat.view(UNSIGNED[tensor.element_size()]).numpy()


def type_name(tensor: torch.Tensor) -> str:
    """E.g. "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def _altered(name: str, dtype: torch.dtype) -> ValueError:
    return ValueError(f"{name} holds values that {str(dtype).removeprefix('torch.')} cannot: its weights were altered")
