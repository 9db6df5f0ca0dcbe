"""Low-rank adapters (LoRA, arXiv:2106.09685): the weights that have them, and their effect on a frozen weight.

A linear layer with frozen weight W computes with round(W + scale * B A), scale = alpha / rank, rounded to the type that
the layer is published in. Of the weights of all experts in one tensor each expert has a pair of its own. Trainer and
engines compute with the same bits: the sum is taken element by element in an order that every device keeps (`merged`).
The trainer ignores the rounding: the gradient of A and B is that of the sum (`adapted`).

Names and initial values are those of PEFT: A [R, I] is `MODULE.lora_A.weight`, B [O, R] is `MODULE.lora_B.weight`. A
layer's name is that of its module, or of the fused weight [E, O, I], whose A is [E, R, I] and B [E, O, R]. Of a weight
that is stored transposed, [E, I, O], the two change places: B is [E, I, R], A [E, R, O], and the sum is the same.

Suffixes: R rank, I inputs, O outputs of a layer, N rows of a pass, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
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
_PAIRS = "etude_adapters"  # attribute of a module of experts: adapters and scale by the name of a weight
_ALIGNED = 8  # grouped products on a GPU need rows of 16 bytes


def adapted_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Names of the layers that `targets` select: "all-linear" all linear layers but the head, else the linear layers
    and the fused weights of experts whose name equals a target or ends with one ("q_proj", "experts.down_proj"). Raises
    UserError for a target that is neither, or whose weight other layers share."""
    wanted = None if targets == ALL_LINEAR else [targets] if isinstance(targets, str) else list(targets)
    head = model.get_output_embeddings()
    linear = {n: m.weight for n, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head}
    weights = linear | fused_weights(model)
    if wanted is None:
        names = sorted(linear)
    else:
        names = sorted({name for target in wanted for name in weights if _means(target, name)})
        others = [name for name, p in model.named_parameters() if p.ndim == 3 and name not in weights]
        for target in wanted:
            if not any(_means(target, n) for n in weights) or any(_means(target, n) for n in others):
                raise UserError(f"lora.targets: {_why_not(model, target, weights)}")
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    if shared := [name for name in names if owners[id(weights[name])] > 1]:
        raise UserError(f"lora.targets: the weight of {shared[0]} is shared with another layer; leave it out")
    if not names:
        raise UserError(f"{type(model).__name__} has no plain linear layers for adapters")
    return names


def fused_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights of all experts of a layer in one tensor, [E, O, I] or transposed, by name: of the modules whose
    products are those of `etude.models.experts`."""
    weights: dict[str, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated"):
            for own in weight_names(module):
                weight = getattr(module, own, None)
                if isinstance(weight, torch.nn.Parameter) and weight.ndim == 3 and weight.is_floating_point():
                    weights[f"{name}.{own}"] = weight
    return weights


def weight_names(module: Any) -> tuple[str, str]:
    """The names of the two weights of a module of experts, in the order of their products."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def weight_name(layer: str, names: Container[str]) -> str:
    """The name of a layer's weight among the model's tensors."""
    return layer if layer in names else f"{layer}.weight"


def is_transposed(model: torch.nn.Module, layer: str) -> bool:
    """Whether a layer's weight is stored [E, I, O]."""
    module, own = _module_of(model, layer)
    return own != "weight" and module.is_transposed


def _module_of(model: torch.nn.Module, layer: str) -> tuple[Any, str]:
    """The module of a layer, and its name for the weight."""
    holder, _, own = layer.rpartition(".")
    known = getattr(model.get_submodule(holder), own)
    return (known, "weight") if isinstance(known, torch.nn.Linear) else (model.get_submodule(holder), own)


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _why_not(model: PreTrainedModel, target: str, weights: Mapping[str, Any]) -> str:
    known = sorted({name.rpartition(".")[2] for name in weights})
    instead = f'choose among {", ".join(known)}, or "{ALL_LINEAR}"'
    others = [n for n, p in model.named_parameters() if p.ndim == 3 and _means(target, n) and n not in weights]
    if others:
        kind = type(model.get_submodule(others[0].rpartition(".")[0])).__name__
        what = f"{target} is a weight of {kind} ({others[0]}), whose products are its own"
        alike = [name for name in weights if _means(target, name)]
        return f"{what}; name layers in full, such as {alike[0]}" if alike else f"{what}; {instead}"
    modules = [module for name, module in model.named_modules() if _means(target, name)]
    if model.get_output_embeddings() in modules:
        return f"{target} is the head, which has no adapters; {instead}"
    if modules:
        return f"{target} is not a plain linear layer ({type(modules[0]).__name__}); {instead}"
    return f"{type(model).__name__} has no layer {target}; {instead}"


def first_values(
    weights: Mapping[str, Tensor], rank: int, seed: int, transposed: Container[str] = ()
) -> dict[str, Tensor]:
    """Float32 adapters for weights [O, I] or [E, O, I] by the name of their layer, on the weights' devices: A uniform
    in +-1/sqrt(I), B zero, so that the model is its base until the first step. `transposed`: layers with [E, I, O]."""
    noise = torch.Generator().manual_seed(seed ^ _SEED)
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(weights.items()):
        *E, O, I = weight.shape  # noqa: E741
        shapes = {DOWN: (*E, rank, I), UP: (*E, O, rank)}
        random, zero, inputs = (UP, DOWN, O) if name in transposed else (DOWN, UP, I)
        where = {"dtype": torch.float32, "device": weight.device}
        if weight.is_meta:
            tensors[name + random] = torch.empty(shapes[random], **where)
        else:
            drawn = (2 * torch.rand(shapes[random], generator=noise) - 1) / inputs**0.5
            tensors[name + random] = drawn.to(weight.device)
        tensors[name + zero] = torch.zeros(shapes[zero], **where)
    return tensors


@torch.no_grad()
def merged(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, dtype: torch.dtype, rows: slice = slice(None)
) -> Tensor:
    """W + scale * B A in `dtype`, on W's device; of fused weights, expert by expert. Every device gives the same bits:
    products and sums are rounded to float32 one by one, in the order of the rank, and added to W in float32. Where the
    sum over the rank is zero, the result is W. With `rows`, `weight` holds these rows of the first dimension alone, and
    so does the result."""
    down, up = (t.detach().to(weight.device, torch.float32) for t in (down, up))
    down_ERI = down[rows] if down.ndim == 3 else down[None]
    up_EOR = up[rows] if up.ndim == 3 else up[rows][None]
    weight_EOI = weight if weight.ndim == 3 else weight[None]
    out_EOI = torch.empty(weight_EOI.shape, dtype=dtype, device=weight.device)
    for tile in _tiles(weight_EOI.shape, _TILE if weight.device.type == "cpu" else _TILE_GPU):
        wide = weight_EOI[tile].float()
        total, term = torch.zeros_like(wide), torch.empty_like(wide)
        for r in range(down_ERI.shape[1]):  # two kernels: some devices would contract one to a fused multiply-add
            torch.mul(up_EOR[tile][..., r, None], down_ERI[tile[0], None, r], out=term)
            total.add_(term)
        total.mul_(scale)
        out_EOI[tile] = torch.where(total == 0, wide, wide + total).to(dtype)  # -0 stays -0
    return out_EOI.view(weight.shape)


def _tiles(shape: torch.Size, size: int) -> Iterator[tuple[slice, slice]]:
    """Experts and rows of parts of [E, O, I] with some `size` elements: several experts, or rows of one."""
    E, O, I = shape  # noqa: E741
    experts = max(1, size // max(1, O * I))
    rows = max(1, O if experts > 1 else size // max(1, I))
    for first in range(0, E, experts):
        for row in range(0, O, rows):
            yield slice(first, first + experts), slice(row, row + rows)


def attach(model: torch.nn.Module, layer: str, down: Tensor, up: Tensor, scale: float) -> None:
    """Makes a layer, whose weight is `merged`, give its gradient to these adapters."""
    module, own = _module_of(model, layer)
    if own == "weight":
        module.forward = partial(_linear, module, down, up, scale)
    else:
        vars(module).setdefault(_PAIRS, {})[own] = down, up, scale


def _linear(module: torch.nn.Linear, down_RI: Tensor, up_OR: Tensor, scale: float, input: Tensor) -> Tensor:
    return _Adapted.apply(input, module.weight, module.bias, down_RI, up_OR, scale, None)


def experts_product(module: Any, name: str, rows: Tensor, end_E: Tensor | None) -> Tensor:
    """x W' of each expert for rows [N, I] sorted by expert, of which expert e has those before `end_E[e]`; or, without
    `end_E`, for as many rows of each, [E, N, I]. Gradients go to the weight, or to its adapters."""
    weight_EOI, pair = _expert_weight(module, name)
    if pair is None:
        return _products(rows, weight_EOI.mT, end_E)
    return _Adapted.apply(rows, weight_EOI, None, *pair, end_E)


def one_expert(module: Any, name: str) -> Callable[[int, Tensor], Tensor]:
    """x W' of an expert by its number, for rows [N, I]: the products of a pass that computes expert by expert."""
    weight_EOI, pair = _expert_weight(module, name)
    if pair is None:
        return lambda expert, rows: F.linear(rows, weight_EOI[expert])
    downs, ups, scale = pair[0].unbind(), pair[1].unbind(), pair[2]
    return lambda e, rows: _Adapted.apply(rows, weight_EOI[e], None, downs[e], ups[e], scale, None)


def _expert_weight(module: Any, name: str) -> tuple[Tensor, tuple[Tensor, Tensor, float] | None]:
    """A weight [E, O, I] with its adapters [E, R, I] and [E, O, R], and their scale."""
    weight, pair = getattr(module, name), vars(module).get(_PAIRS, {}).get(name)
    if not module.is_transposed:
        return weight, pair
    return weight.mT, None if pair is None else (pair[1].mT, pair[0].mT, pair[2])


def _products(rows: Tensor, weight_EIO: Tensor, end_E: Tensor | None) -> Tensor:
    return rows @ weight_EIO if end_E is None else F.grouped_mm(rows, weight_EIO, offs=end_E)


def _sums(left: Tensor, right: Tensor, end_E: Tensor | None) -> Tensor:
    """left' right, summed over the rows of each expert."""
    return left.mT @ right if end_E is None else F.grouped_mm(left.t(), right, offs=end_E)


class _Adapted(torch.autograd.Function):
    """The product without the weight's own gradient, [O, I]: dB = scale * G' (X A'), dA = scale * (G B)' X. Of fused
    weights the same for each expert, in grouped products."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias_O: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        end_E: Tensor | None,
    ) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(input_, weight, down, up, end_E)
        return F.linear(input_, weight, bias_O) if weight.ndim == 2 else _products(input_, weight.mT, end_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight, down, up, end_E = ctx.saved_tensors
        (grad,) = grads
        grad_input = _products(grad, weight, end_E) if ctx.needs_input_grad[0] else None
        if weight.ndim == 2:
            input_, grad = input_.flatten(0, -2), grad.flatten(0, -2)
        down, up, rank = down.to(input_.dtype), up.to(grad.dtype), down.shape[-2]
        if end_E is not None:
            more = -rank % _ALIGNED  # rows of zeros
            down, up = F.pad(down, (0, 0, 0, more)), F.pad(up, (0, more))
        inner, outer = _products(input_, down.mT, end_E), _products(grad, up, end_E)
        grad_down = _sums(outer, input_, end_E)[..., :rank, :].float().mul_(ctx.scale)
        grad_up = _sums(grad, inner, end_E)[..., :rank].float().mul_(ctx.scale)
        return grad_input, None, None, grad_down, grad_up, None, None
