"""What transformers' modelling code computes in many small operations, in one kernel each, to the bit the same.

A model that decodes a few tokens spends more time between operations than in them: an RMS norm is eight of them, the
rotation of queries and keys fourteen. Here both are kernels compiled by numba, and the forward of an attention layer
goes from one product to the next without modules between. They are taken on the CPU in float32 where no gradients are
kept. `install` puts them in place of a model's own only where they give the same bits on this machine: so there still
is one definition of the model, transformers' own.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from etude.models.attention import Layout, causal

_LANES, _SUMS = 8, 4  # PyTorch adds squares up in four vectors of eight, and begins new ones
_ROUND = 16 * _LANES * _SUMS  # after so many
_SERIAL = 32768  # elements that PyTorch, too, leaves to one thread
_SIZES = (1, 5, 64)  # rows that the bits are compared on


@torch.no_grad()
def install(model: PreTrainedModel) -> None:
    """Take the kernels for those layers of `model` whose bits they give; the others stay. Harmless twice."""
    for module in model.modules():
        for forward, same in ((_norm, _same_norm), (_attention, _same_attention)):
            if "forward" not in vars(module) and same(module):
                module.forward = MethodType(forward, module)


def _ours(x: Tensor) -> bool:
    """Whether the kernels are for this tensor, here and now."""
    few = x.numel() <= _SERIAL or torch.get_num_threads() == 1
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and few
    return plain and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


# --- norms ----------------------------------------------------------------------------------------------------------


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    """The forward of an RMS norm; `install` has seen that the module has what is read here."""
    if not _ours(hidden_states) or not hidden_states.is_contiguous():
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
    return _ours(weight) and all(torch.equal(_norm(module, x), type(module).forward(module, x)) for x in samples)


def _sample(*shape: int) -> Tensor:
    """Numbers of all sizes, the same at every call."""
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
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None,
    past_key_values: object = None, layout: Layout | None = None, **options: object,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The forward of an attention layer with rotations in halves, with norms on queries and keys or without."""
    cos, sin = position_embeddings
    rows = hidden_states.shape[:2]
    plain = (
        attention_mask is None and past_key_values is None and rows[0] == 1 and cos.shape == (*rows, module.head_dim)
    )
    if layout is None or not plain or not _ours(hidden_states):
        return type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, past_key_values, layout=layout, **options
        )
    hidden_TD = hidden_states[0]
    query, key, value = (
        F.linear(hidden_TD, projection.weight).view(len(hidden_TD), -1, module.head_dim)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    q_THD, k_TKD = query.numpy(), key.numpy()
    if getattr(module, "q_norm", None) is not None:
        q_THD, k_TKD = _normed(module.q_norm, q_THD), _normed(module.k_norm, k_TKD)
    query, key = torch.empty_like(query), torch.empty_like(key)
    turn(q_THD, k_TKD, cos.numpy()[0], sin.numpy()[0], query.numpy(), key.numpy())
    query, key, value = (x.unsqueeze(0).transpose(1, 2) for x in (query, key, value))
    out_1HTD = layout.attend(module.layer_idx, query, key, value, module.scaling)
    return F.linear(out_1HTD.transpose(1, 2).reshape(*rows, -1), module.o_proj.weight), None


def _normed(module: Any, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    norm(x, module.weight.numpy(), np.float32(module.variance_epsilon), out)
    return out


class _Causal:
    """What the two ways are compared with: plain attention."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        return causal(query_BHTD, key_BKTD, value_BKTD, scale)


def _same_attention(module: Any) -> bool:
    """Whether the layer has what `_attention` reads, and nothing that changes what it says."""
    parts: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    q, k, v, o = parts
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if not all(type(part) is nn.Linear and part.bias is None for part in parts) or not _ours(q.weight[:1]):
        return False
    if q.out_features != o.in_features or k.out_features != v.out_features:
        return False
    if norms != [None, None] and not all(norm is not None and _same_norm(norm) for norm in norms):
        return False
    if not all(hasattr(module, name) for name in ("head_dim", "layer_idx", "scaling")):
        return False
    given = list(signature(type(module).forward).parameters)[1:5]
    more = any(getattr(module, name, None) for name in ("sliding_window", "attention_dropout"))
    if given != ["hidden_states", "position_embeddings", "attention_mask", "past_key_values"] or more:
        return False
    for rows in _SIZES:
        x, angles = _sample(1, rows, q.in_features), _sample(1, rows, module.head_dim // 2)
        where = tuple(torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        (one, _), (other, _) = (f(module, x, where, None, layout=_Causal()) for f in (_attention, type(module).forward))
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
