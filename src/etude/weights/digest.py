"""One digest for a set of tensors, the same for the trainer that published them and the engine that serves them."""

from __future__ import annotations

from collections.abc import Mapping

import blake3
import numpy as np
import torch


def digest(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> str:
    """blake3 over (name, dtype, shape, bits) in name order.

    Tensors of a wider type are digested as `dtype`, after proving that they hold exactly such values: an engine that
    computes in float32 has the digest of the bfloat16 weights it was given. Raises ValueError, naming the tensor, if
    one does not.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for name in sorted(tensors):
        tensor = narrow(name, tensors[name], dtype)
        hasher.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(bits(tensor).tobytes())
    return hasher.hexdigest()


def narrow(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype` without changing a value. Raises ValueError if that is impossible."""
    if not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize:
        return tensor.detach()
    narrowed = tensor.detach().to(dtype)
    if not torch.equal(narrowed.to(tensor.dtype).nan_to_num(), tensor.detach().nan_to_num()):
        raise ValueError(
            f"{name} holds values that {str(dtype).removeprefix('torch.')} cannot: its weights were altered"
        )
    return narrowed


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits as unsigned integers [elements] on the host."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    return tensor.detach().contiguous().cpu().view(unsigned).numpy().reshape(-1)
