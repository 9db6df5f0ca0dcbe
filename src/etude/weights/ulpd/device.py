"""Chooses the implementation of passes over whole tensors: compiled loops on the host, Triton kernels on a CUDA device.

The tensor's device decides, and both give the same bits. Triton is imported only here, at the first tensor on a GPU, so
a machine without a GPU does not need it.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Spec, bits, unsigned

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


class TritonMissing(RuntimeError):
    """Tensors are on a GPU, and Triton, which processes them there, is not installed."""


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels can process the tensor."""
    return tensor.device.type == "cuda"


def gpu_kernels() -> Any:
    """The module `triton_kernels`. Raises TritonMissing."""
    try:
        from etude.weights.ulpd import triton_kernels
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        raise TritonMissing(
            "weights on a GPU are compared and digested by Triton, which is not installed; pip install triton"
        ) from None
    return triton_kernels


def digest(spec: Spec, part: torch.Tensor, first: int = 0) -> int:
    """The digest of a tensor, or of a run of its elements from number `first` on, modulo 2^64, computed on its
    device."""
    if on_gpu(part):
        return int(gpu_kernels().digest(unsigned(part), spec.seed, first, spec.format.width))
    return int(kernels.digest(bits(part), np.uint64(spec.seed), first, spec.format.width))
