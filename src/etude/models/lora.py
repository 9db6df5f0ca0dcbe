"""Low-rank adapters (LoRA, arXiv:2106.09685): the layers that have them, and their effect on a frozen weight.

A linear layer with frozen weight W computes with round(W + scale * B A), scale = alpha / rank, rounded to the type that
the layer is published in. Trainer and engines compute with the same bits: the sum is taken element by element in an
order that every device keeps (`merged`). The trainer ignores the rounding: the gradient of A and B is that of the sum
(`adapted`).

Names and initial values are those of PEFT: A [R, I] is `MODULE.lora_A.weight`, B [O, R] is `MODULE.lora_B.weight`.

Suffixes: R rank, I inputs, O outputs of a layer, N rows of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import UserError

ALL_LINEAR = "all-linear"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_TILE, _TILE_GPU = (
    2**18,
    2**22,
)  # elements summed at a time: they fit into a cache, and launches are few
_SEED = 0x10AA


def adapted_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Names of the linear layers that `targets` select: "all-linear" all but the head, else those whose name equals a
    target or ends with one ("q_proj"). Raises UserError for a target that is not a plain linear layer, or whose weight
    other layers share."""
    wanted = None if targets == ALL_LINEAR else [targets] if isinstance(targets, str) else list(targets)
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head}
    if wanted is None:
        names = sorted(linear)
    else:
        names = sorted({name for target in wanted for name in linear if _means(target, name)})
        fused = [name for name, p in model.named_parameters() if p.ndim == 3]
        for target in wanted:
            if not any(_means(target, n) for n in linear) or any(_means(target, n) for n in fused):
                raise UserError(f"lora.targets: {_why_not(model, target, linear)}")
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    if shared := [name for name in names if owners[id(linear[name].weight)] > 1]:
        raise UserError(f"lora.targets: the weight of {shared[0]} is shared with another layer; leave it out")
    if not names:
        raise UserError(f"{type(model).__name__} has no plain linear layers for adapters")
    return names


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _why_not(model: PreTrainedModel, target: str, linear: Mapping[str, Any]) -> str:
    known = sorted({name.rpartition(".")[2] for name in linear})
    instead = f'choose among {", ".join(known)}, or "{ALL_LINEAR}"'
    parameters = [name for name, p in model.named_parameters() if p.ndim == 3 and _means(target, name)]
    if parameters:
        return f"{target} is the fused weight of all experts ({parameters[0]}), which adapters are not for; {instead}"
    modules = [module for name, module in model.named_modules() if _means(target, name)]
    if model.get_output_embeddings() in modules:
        return f"{target} is the head, which has no adapters; {instead}"
    if modules:
        return f"{target} is not a plain linear layer ({type(modules[0]).__name__}); {instead}"
    return f"{type(model).__name__} has no layer {target}; {instead}"


def first_values(names: Mapping[str, Tensor], rank: int, seed: int) -> dict[str, Tensor]:
    """Float32 adapters for weights [O, I] by the name of their layer, on the weights' devices: A uniform in
    +-1/sqrt(I), B zero, so that the model is its base until the first step."""
    noise = torch.Generator().manual_seed(seed ^ _SEED)
    tensors: dict[str, Tensor] = {}
    for name, weight_OI in sorted(names.items()):
        O, I = weight_OI.shape  # noqa: E741
        where = {"dtype": torch.float32, "device": weight_OI.device}
        if weight_OI.is_meta:
            tensors[name + DOWN] = torch.empty(rank, I, **where)
        else:
            tensors[name + DOWN] = ((2 * torch.rand(rank, I, generator=noise) - 1) / I**0.5).to(weight_OI.device)
        tensors[name + UP] = torch.zeros(O, rank, **where)
    return tensors


@torch.no_grad()
def merged(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """W + scale * B A in `dtype`, on W's device. Every device gives the same bits: products and sums are rounded to
    float32 one by one, in the order of the rank, and added to W in float32. Where the sum over the rank is zero, the
    result is W."""
    O, I = weight_OI.shape  # noqa: E741
    down_RI, up_OR = (t.detach().to(weight_OI.device, torch.float32) for t in (down_RI, up_OR))
    out_OI = torch.empty(O, I, dtype=dtype, device=weight_OI.device)
    step = max(1, (_TILE if weight_OI.device.type == "cpu" else _TILE_GPU) // I)
    for first in range(0, O, step):
        rows = slice(first, min(first + step, O))
        total = torch.zeros(rows.stop - first, I, dtype=torch.float32, device=weight_OI.device)
        term = torch.empty_like(total)
        for r in range(len(down_RI)):  # two kernels: one would contract them to a fused multiply-add on some devices
            torch.mul(up_OR[rows, r, None], down_RI[r], out=term)
            total.add_(term)
        wide = weight_OI[rows].float()
        total.mul_(scale)
        out_OI[rows] = torch.where(total == 0, wide, wide + total).to(dtype)  # -0 stays -0
    return out_OI


def adapted(module: torch.nn.Linear, down_RI: Tensor, up_OR: Tensor, scale: float, input: Tensor) -> Tensor:
    """The forward of a linear layer with a `merged` weight: gradients go to the input and the adapters."""
    return _Adapted.apply(input, module.weight, module.bias, down_RI, up_OR, scale)


class _Adapted(torch.autograd.Function):
    """The product without the weight's own gradient, [O, I]: dB = scale * G' (X A'), dA = scale * (G B)' X."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        down_RI: Tensor,
        up_OR: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(input_, weight_OI, down_RI, up_OR)
        return F.linear(input_, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight_OI, down_RI, up_OR = ctx.saved_tensors
        (grad,) = grads
        grad_input = grad @ weight_OI if ctx.needs_input_grad[0] else None
        input_NI, grad_NO = input_.flatten(0, -2), grad.flatten(0, -2)
        inner_NR = F.linear(input_NI, down_RI.to(input_.dtype))
        outer_NR = grad_NO @ up_OR.to(grad.dtype)
        grad_down = (outer_NR.t() @ input_NI).float().mul_(ctx.scale)
        grad_up = (grad_NO.t() @ inner_NR).float().mul_(ctx.scale)
        return grad_input, None, None, grad_down, grad_up, None
