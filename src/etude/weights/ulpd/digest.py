"""One digest for a set of tensors, the same for the trainer that published them and the engine that serves them.

The sum over all elements of a hash of (name, type, shape, position, bits), modulo 2^64. A sum does not depend on order,
on how tensors are cut into chunks or spread over ranks, and follows a delta at the price of its changes. It finds
accidents, not adversaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Spec, bits, schema_of, unsigned

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


def weights_digest(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | Mapping[str, torch.dtype] = torch.bfloat16
) -> str:
    """16 hexadecimal digits. Each tensor is digested on its device. Tensors of a wider type are digested as `dtype`,
    one for all or one for each name, after a check that this loses no bit: an engine that computes in float32 has the
    digest of its bfloat16 weights. Raises ValueError, naming the tensor, for other values."""
    types = dict.fromkeys(tensors, dtype) if isinstance(dtype, torch.dtype) else dtype
    narrowed = {name: narrow_lossless(name, tensor, types[name]) for name, tensor in tensors.items()}
    return digest_text(sum(digest_part(spec, narrowed[spec.name]) for spec in schema_of(narrowed).tensors))


def digest_part(spec: Spec, part: torch.Tensor, first: int = 0) -> int:
    """The digest of a tensor, or of a run of its elements from number `first` on, modulo 2^64, computed on its
    device."""
    if kernels.on_gpu(part):
        return int(kernels.gpu_kernels().digest(unsigned(part), spec.seed, first, spec.format.width))
    return int(kernels.digest(bits(part), np.uint64(spec.seed), first, spec.format.width))


def digest_rows(spec: Spec, part: torch.Tensor, run: int, step: int, first: int) -> int:
    """`digest_part` for elements that are not consecutive: rows of `run` elements, one every `step` elements."""
    if kernels.on_gpu(part):
        return int(kernels.gpu_kernels().digest_rows(unsigned(part), run, step, spec.seed, first, spec.format.width))
    return int(kernels.digest_rows(bits(part), run, step, np.uint64(spec.seed), first, spec.format.width))


def digest_text(total: int) -> str:
    """A digest in the format of manifests."""
    return f"{total % (1 << 64):016x}"


def narrow_lossless(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    back, original = (t.reshape(-1).view(torch.uint8) for t in (narrowed.to(tensor.dtype), tensor))
    if not torch.equal(back, original):
        raise _altered(name, dtype)
    return narrowed


def _altered(name: str, dtype: torch.dtype) -> ValueError:
    return ValueError(f"{name} holds values that {str(dtype).removeprefix('torch.')} cannot: its weights were altered")
