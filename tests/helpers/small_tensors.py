"""Small sets of tensors and the versions that follow from them."""

import torch

from etude.weights.ranks import owned
from etude.weights.ulpd.chunk_grid import schema_of

Tensors = dict[str, torch.Tensor]


def tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Random tensors of several shapes, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"b": (40, 25), "a": (11,), "empty": (0, 3), "scalar": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def wide(seed: int) -> Tensors:
    """Six tensors of equal size."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn((30, 20), generator=generator).to(torch.bfloat16) for i in range(6)}


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


def sharded(of: Tensors, rank: int, count: int) -> Tensors:
    """What a rank holds: the tensors of its chunks; of the others only name, type and shape."""
    schema = schema_of(of)
    names = {schema.tensors[schema.chunks[i].tensor].name for i in owned(schema, rank, count)}
    return {name: t if name in names else t.to("meta") for name, t in of.items()}
