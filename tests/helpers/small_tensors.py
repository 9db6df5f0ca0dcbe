"""Small sets of tensors and the versions that follow from them."""

import torch

from etude.weights.slabs import Sliced, slab_of

Tensors = dict[str, torch.Tensor]


def tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Random tensors of several shapes, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"b": (40, 25), "a": (11,), "empty": (0, 3), "scalar": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def nudged(of: Tensors, seed: int) -> Tensors:
    """About a tenth of the elements move."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < 0.1, t * 1.1 + 0.01, t).to(t.dtype)
        for name, t in of.items()
    }


def widened(of: Tensors) -> Tensors:
    """An engine's own copies, in float32."""
    return {name: t.float() for name, t in of.items()}


def copies(of: Tensors) -> Tensors:
    return {name: t.clone() for name, t in of.items()}


def sliced(tensor: torch.Tensor, dim: int, part: int, parts: int) -> Sliced:
    """A tensor of which this process holds one part, in memory of its own."""
    slab = slab_of(torch.empty_like(tensor).chunk(parts, dim)[part], tensor.chunk(parts, dim)[part].clone())
    return Sliced(tuple(tensor.shape), (slab,), tensor.dtype, tensor.device)
