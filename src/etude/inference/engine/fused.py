"""One kernel for each run of small operations in transformers' modelling code, with the same bits.

Decoding a few tokens takes more time between operations than in them: an RMS norm is eight of them, the rotation of
queries and keys fourteen. Here both are kernels compiled by numba, and the forwards of attention and decoder layers go
from one product to the next without modules between. They are used on the CPU in float32 without gradients. `install`
puts them in place of a model's own forwards only where they give the same bits on this machine, so transformers'
definition of the model remains the only one.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from etude.models import batch_invariant
from etude.models.attention import AttentionLayout, CausalLayout
from etude.models.gemm import gated, product, three

_LANES, _SUMS = 8, 4  # PyTorch sums squares in four vectors of eight, and begins new ones
_ROUND = 16 * _LANES * _SUMS  # after this many squares
_SERIAL = 32768  # number of elements up to which PyTorch, too, uses one thread
_SIZES = (1, 5, 64)  # numbers of rows for the comparison of bits


@torch.no_grad()
def install(model: PreTrainedModel) -> None:
    """Use the kernels in those layers of `model` whose bits they reproduce. May be repeated."""
    with batch_invariant.batch_invariant():  # otherwise products of few rows differ in bits
        for forward, same in ((_norm, _same_norm), (_attention, _same_attention), (_layer, _same_layer)):
            for module in model.modules():
                if not _replaced(module) and same(module):
                    module.forward = MethodType(forward, module)


def _applies(x: Tensor) -> bool:
    """Whether the kernels support this tensor in the present mode."""
    few = x.numel() <= _SERIAL or torch.get_num_threads() == 1
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and few
    # Under autocast PyTorch narrows products, but the kernels do not.
    wide = not torch.is_autocast_enabled("cpu")
    return plain and wide and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


# --- norms ----------------------------------------------------------------------------------------------------------


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    """The forward of an RMS norm; `install` has checked that the module has the attributes that are read here."""
    if not _applies(hidden_states) or not hidden_states.is_contiguous():
        return type(module).forward(module, hidden_states)
    out = torch.empty_like(hidden_states)
    norm(hidden_states.numpy(), module.weight.numpy(), np.float32(module.variance_epsilon), out.numpy())
    return out


def _same_norm(module: Any) -> bool:
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float) or weight.shape[-1] % (_LANES * _SUMS):
        return False
    samples = [_sample(rows, weight.shape[-1]) for rows in _SIZES]
    return _applies(weight) and all(torch.equal(_norm(module, x), type(module).forward(module, x)) for x in samples)


def _sample(*shape: int) -> Tensor:
    """Numbers of different magnitudes, the same at every call."""
    noise = torch.Generator().manual_seed(0)
    magnitude = torch.randint(-4, 4, (shape[0], *[1] * (len(shape) - 1)), generator=noise)
    return torch.randn(shape, generator=noise) * 10.0**magnitude


# Not fastmath, here and below: every sum and product is rounded in PyTorch's order.
@numba.njit(nogil=True, error_model="numpy", cache=True)
def norm(x, weight_D, eps, out) -> None:  # type: ignore[no-untyped-def]
    """x / sqrt(mean(x^2) + eps) * weight for every row of the arrays [..., D]; D is a multiple of 32."""
    size = len(weight_D)
    rows = x.size // size
    x_ND, out_ND = x.reshape((rows, size)), out.reshape((rows, size))
    wide = _LANES * _SUMS
    sums, total = np.empty(wide, np.float32), np.empty(wide, np.float32)
    for n in range(rows):
        x_D, out_D = x_ND[n], out_ND[n]
        total[:] = np.float32(0)
        for start in range(0, size, _ROUND):
            sums[:] = np.float32(0)
            for i in range(start, min(start + _ROUND, size), wide):
                for j in range(wide):
                    sums[j] += x_D[i + j] * x_D[i + j]
            for j in range(wide):
                total[j] += sums[j]
        for k in range(_LANES, wide, _LANES):
            for j in range(_LANES):
                total[j] += total[k + j]
        square = np.float32(0)
        for j in range(_LANES):
            square += total[j]
        factor = np.float32(1) / np.sqrt(square / np.float32(size) + eps)
        for i in range(size):
            out_D[i] = weight_D[i] * (x_D[i] * factor)


# --- attention ------------------------------------------------------------------------------------------------------


def _attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: object = None,
    layout: AttentionLayout | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """The forward of an attention layer with rotations in halves, with norms on queries and keys or without."""
    if layout is None or not _simple(module, hidden_states, position_embeddings, attention_mask, past_key_values):
        return type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, past_key_values, layout=layout, **options
        )
    return _attended(module, hidden_states[0], position_embeddings, layout).unsqueeze(0), None


def _simple(module: Any, hidden_BTD: Tensor, where: tuple[Tensor, Tensor], mask: object, past: object) -> bool:
    """Whether the input is a single row without features that the kernels lack."""
    rows = hidden_BTD.shape[:2]
    return (
        mask is None
        and past is None
        and rows[0] == 1
        and where[0].shape == (*rows, module.head_dim)
        and _applies(hidden_BTD)
    )


def _attended(module: Any, hidden_TD: Tensor, where: tuple[Tensor, Tensor], layout: AttentionLayout) -> Tensor:
    """The output of an attention layer, [T, D]."""
    parts, size = module._modules, module.head_dim
    weights = (parts[name]._parameters["weight"] for name in ("q_proj", "k_proj", "v_proj"))
    query, key, value = (out_TN.view(len(hidden_TD), -1, size) for out_TN in three(hidden_TD, *weights))
    q_THD, k_TKD = query.numpy(), key.numpy()
    query, key = torch.empty_like(query), torch.empty_like(key)
    q_norm = parts.get("q_norm")
    if q_norm is None:
        turn(q_THD, k_TKD, where[0].numpy()[0], where[1].numpy()[0], query.numpy(), key.numpy())
    else:
        k_norm = parts["k_norm"]
        normed_turn(
            q_THD,
            k_TKD,
            q_norm._parameters["weight"].numpy(),
            np.float32(q_norm.variance_epsilon),
            k_norm._parameters["weight"].numpy(),
            np.float32(k_norm.variance_epsilon),
            where[0].numpy()[0],
            where[1].numpy()[0],
            query.numpy(),
            key.numpy(),
        )
    by_token = getattr(layout, "attend_by_token", None)
    if by_token is None:
        query, key, value = (x.unsqueeze(0).transpose(1, 2) for x in (query, key, value))
        out_BHTD = layout.attend(module.layer_idx, query, key, value, module.scaling)
        out_TD = out_BHTD.transpose(1, 2).reshape(len(hidden_TD), -1)
    else:
        out_TD = by_token(module.layer_idx, query, key, value, module.scaling).view(len(hidden_TD), -1)
    return product(out_TD, parts["o_proj"]._parameters["weight"])


def _same_attention(module: Any) -> bool:
    """Whether the kernels reproduce the bits of this attention layer. Layers with other attributes than `_attention`
    reads are excluded."""
    parts: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    q, k, v, o = parts
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if not all(type(part) is nn.Linear and part.bias is None for part in parts) or not _applies(q.weight[:1]):
        return False
    if q.out_features != o.in_features or k.out_features != v.out_features:
        return False
    if norms != [None, None] and not all(norm is not None and _same_norm(norm) for norm in norms):
        return False
    if not all(hasattr(module, name) for name in ("head_dim", "layer_idx", "scaling")):
        return False
    parameters = list(signature(type(module).forward).parameters)[1:5]
    more = any(getattr(module, name, None) for name in ("sliding_window", "attention_dropout"))
    more |= getattr(module, "sinks", None) is not None
    more |= getattr(getattr(module, "config", None), "sliding_window", None) is not None  # for some classes only there
    if parameters != ["hidden_states", "position_embeddings", "attention_mask", "past_key_values"] or more:
        return False
    both = _attention, type(module).forward
    for rows in _SIZES:
        x, angles = _sample(1, rows, q.in_features), _sample(1, rows, module.head_dim // 2)
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        (one, _), (other, _) = (f(module, x, (cos, sin), None, layout=CausalLayout()) for f in both)
        if not torch.equal(one, other):
            return False
    return True


@numba.njit(nogil=True, error_model="numpy", cache=True)
def turn(q_THD, k_TKD, cos_TD, sin_TD, out_q, out_k) -> None:  # type: ignore[no-untyped-def]
    """x * cos + rotate_half(x) * sin, where a pair is (i, i + D/2), for queries and keys."""
    length, size = cos_TD.shape
    half = size // 2
    for x_THD, out_THD in ((q_THD, out_q), (k_TKD, out_k)):
        for t in range(length):
            cos, sin = cos_TD[t], sin_TD[t]
            for h in range(x_THD.shape[1]):
                x, out = x_THD[t, h], out_THD[t, h]
                for i in range(half):
                    out[i] = x[i] * cos[i] - x[i + half] * sin[i]
                    out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]


@numba.njit(nogil=True, error_model="numpy", cache=True)
def normed_turn(  # type: ignore[no-untyped-def]
    q_THD, k_TKD, q_weight_D, q_eps, k_weight_D, k_eps, cos_TD, sin_TD, out_q, out_k
) -> None:
    """`norm` over every head of queries and keys, then `turn`."""
    normed_q, normed_k = np.empty_like(q_THD), np.empty_like(k_TKD)
    norm(q_THD, q_weight_D, q_eps, normed_q)
    norm(k_TKD, k_weight_D, k_eps, normed_k)
    turn(normed_q, normed_k, cos_TD, sin_TD, out_q, out_k)


# --- decoder layers -------------------------------------------------------------------------------------------------


def _layer(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: object = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    layout: AttentionLayout | None = None,
    **options: object,
) -> Tensor:
    """The forward of a decoder layer: norm, attention, norm, experts or gated product, each added to its input."""
    parts = module._modules
    attention, where = parts["self_attn"], position_embeddings
    if (
        layout is None
        or where is None
        or not hidden_states.is_contiguous()
        or any(part._forward_hooks or part._forward_pre_hooks for part in parts.values())
        or not _simple(attention, hidden_states, where, attention_mask, past_key_values)
    ):
        return type(module).forward(
            module,
            hidden_states,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            where,
            layout=layout,
            **options,
        )
    hidden_TD = hidden_states[0]
    hidden_TD = hidden_TD + _attended(attention, _normed(parts["input_layernorm"], hidden_TD), where, layout)
    normed_TD, mlp = _normed(parts["post_attention_layernorm"], hidden_TD), parts["mlp"]
    inner = mlp._modules
    if "down_proj" not in inner:
        return (hidden_TD + mlp(normed_TD.unsqueeze(0))[0]).unsqueeze(0)
    gate, up, down = (inner[name]._parameters["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    return (hidden_TD + gated(mlp.act_fn, normed_TD, gate, up, down)).unsqueeze(0)


def _normed(module: Any, x_TD: Tensor) -> Tensor:
    out_TD = torch.empty_like(x_TD)
    norm(x_TD.numpy(), module._parameters["weight"].numpy(), np.float32(module.variance_epsilon), out_TD.numpy())
    return out_TD


def _same_layer(module: Any) -> bool:
    """Whether the kernels reproduce the bits of this decoder layer. Layers with other attributes than `_layer` reads
    are excluded."""
    parts = module._modules
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = parts["self_attn"], parts["mlp"]
    norms: list[Any] = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    if not all(_replaced(part) for part in (attention, *norms)) or list(signature(module.forward).parameters)[:6] != [
        "hidden_states",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "use_cache",
        "position_embeddings",
    ]:
        return False
    inner = {name: part for name, part in mlp._modules.items() if name != "act_fn"}
    linear = all(type(part) is nn.Linear and part.bias is None for part in inner.values())
    if "down_proj" in inner and (set(inner) != {"gate_proj", "up_proj", "down_proj"} or not linear):
        return False
    both = _layer, type(module).forward
    for rows in _SIZES:
        x, angles = _sample(1, rows, attention.q_proj.in_features), _sample(1, rows, attention.head_dim // 2)
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        one, other = (f(module, x, position_embeddings=(cos, sin), layout=CausalLayout()) for f in both)
        if not isinstance(other, Tensor) or not torch.equal(one, other):
            return False
    return True


def _replaced(module: nn.Module) -> bool:
    return "forward" in vars(module)
