"""A model's products on the CPU in float32, without gradients; in bfloat16 only the head, whose logits are float32.

Decoding has few rows: the weights are read once, in order, and reading takes all the time. The library's products are
made for many rows; for a few they take two to four times as long as a plain walk through the weights
(docs/decisions/0034-products-of-few-rows.md).

More rows go to oneDNN. PyTorch takes MKL, which on AMD's processors uses vectors of half their width
(docs/decisions/0036-onednn.md).

The order of sums differs from the library's, so batch-invariant mode (`etude.models.batch_invariant`) uses nothing from
here.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from etude.models import batch_invariant
from etude.models.head import product as head_product

FEW = 16  # up to so many rows a walk through the weights is faster,
_FEWER = 6  # for more than `_SERIAL` weights
ROUND = 8  # numbers of rows are rounded up: oneDNN compiles for each shape, which takes as long as a product;
ROUND_NARROW = 16  # in bfloat16, where compiling takes longer, to this
_PART = 2048  # rows of bfloat16 weights that are widened at a time, which fit into the second-level cache
_SERIAL = 2**18  # products of up to so many weights take one thread
_SILU = (nn.SiLU, SiLUActivation)
# Any order of sums, but NaN must stay NaN: it reveals broken weights.
_FAST = {"reassoc", "contract", "nsz"}


def few(x_TD: Tensor, weight_ND: Tensor) -> bool:
    """Whether `product` walks through the weights for these rows."""
    return x_TD.shape[0] <= _most(weight_ND) and _serial(weight_ND) and takes(x_TD, weight_ND)


def _most(weight_ND: Tensor) -> int:
    return FEW if weight_ND.numel() <= _SERIAL else _FEWER


def _serial(weight_ND: Tensor) -> bool:
    return weight_ND.numel() <= _SERIAL or torch.get_num_threads() == 1


def takes(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether this module computes products of these factors in this type."""
    return (
        x.dtype == weight.dtype == dtype
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not batch_invariant.is_on()
    )


def padding(rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """Rows to add to a pass, so that few shapes are compiled; in batch-invariant mode those of `padding` there."""
    if batch_invariant.is_on() or device.type != "cpu" or rows <= FEW:
        return batch_invariant.padding(rows)
    return -rows % (ROUND if dtype == torch.float32 else ROUND_NARROW)


def onednn(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """x weight^T, [T, N], for any strides; the operator that torch.compile uses for a linear layer on the CPU."""
    if not torch.backends.mkldnn.is_available():  # not in every build of PyTorch
        return F.linear(x_TD, weight_ND)
    return torch.ops.mkldnn._linear_pointwise(x_TD, weight_ND, None, "none", [], "")


def product(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """x weight^T, [T, N]."""
    if few(x_TD, weight_ND):
        out_TN = torch.empty(len(x_TD), len(weight_ND))
        rows(x_TD.contiguous().numpy(), weight_ND.numpy(), out_TN.numpy())
        return out_TN
    return onednn(x_TD, weight_ND) if takes(x_TD, weight_ND) else F.linear(x_TD, weight_ND)


def three(x_TD: Tensor, *weights_ND: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values: `product` with each of three weights, the first the largest."""
    if not few(x_TD, weights_ND[0]):
        return tuple(product(x_TD, weight_ND) for weight_ND in weights_ND)
    outs = tuple(torch.empty(len(x_TD), len(weight_ND)) for weight_ND in weights_ND)
    each_of_three(x_TD.contiguous().numpy(), *(x.numpy() for x in (*weights_ND, *outs)))
    return outs


def gated(act: nn.Module, x_TD: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor) -> Tensor:
    """(act(x gate^T) * x up^T) down^T, [T, D]."""
    if not few(x_TD, gate_ID) or type(act) not in _SILU:
        return product(act(product(x_TD, gate_ID)) * product(x_TD, up_ID), down_DI)
    out_TD = torch.empty(len(x_TD), len(down_DI))
    gated_rows(x_TD.contiguous().numpy(), *(x.numpy() for x in (gate_ID, up_ID, down_DI, out_TD)))
    return out_TD


def head(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits [S, V] in float32: those of `batch_invariant.head`, except for the order of sums. A device has the
    trainer's product, so a narrow head needs no copy in float32 there."""
    if hidden_SD.device.type != "cpu":
        return head_product(hidden_SD, weight_VD)
    if takes(hidden_SD, weight_VD, torch.bfloat16):
        return widened(hidden_SD, weight_VD)
    return product(hidden_SD, weight_VD) if takes(hidden_SD, weight_VD) else batch_invariant.head(hidden_SD, weight_VD)


def widened(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """x weight^T in float32, [T, N], of bfloat16 factors, without a copy of all weights in float32: writing one takes
    ten times as long as a product of few rows."""
    x_TD, out_TN = x_TD.float().contiguous(), torch.empty(len(x_TD), len(weight_ND))
    if len(x_TD) <= FEW:
        narrow_rows(x_TD.numpy(), weight_ND.view(torch.uint16).numpy(), out_TN.numpy())
        return out_TN
    wide_MD = torch.empty(min(_PART, len(weight_ND)), weight_ND.shape[1])
    for start in range(0, len(weight_ND), _PART):
        part_MD = weight_ND[start : start + _PART]
        out_TN[:, start : start + _PART] = onednn(x_TD, wide_MD[: len(part_MD)].copy_(part_MD))
    return out_TN


def takes_experts(module: Any, hidden_TD: Tensor, index_TK: Tensor) -> bool:
    """Whether `experts` supports these tokens; `module` is plain (`batch_invariant.is_plain`)."""
    weight_ND = module.gate_up_proj[0]
    # The average number of rows of an expert.
    fit = len(hidden_TD) <= FEW or index_TK.numel() <= _most(weight_ND) * module.num_experts
    return fit and _serial(weight_ND) and type(module.act_fn) in _SILU and takes(hidden_TD, weight_ND)


def experts(module: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, D]."""
    out_TD = torch.empty_like(hidden_TD)
    arrays = (x.numpy() for x in (module.gate_up_proj, module.down_proj, index_TK, weight_TK, out_TD))
    chosen(hidden_TD.contiguous().numpy(), *arrays)
    return out_TD


@numba.njit(nogil=True, fastmath=_FAST, error_model="numpy", inline="always", cache=True)
def _row(x_TD, w, out_TN, n) -> None:  # type: ignore[no-untyped-def]
    count, size = x_TD.shape
    t = 0
    while t + 4 <= count:
        x0, x1, x2, x3 = x_TD[t], x_TD[t + 1], x_TD[t + 2], x_TD[t + 3]
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for d in range(size):
            s0 += w[d] * x0[d]
            s1 += w[d] * x1[d]
            s2 += w[d] * x2[d]
            s3 += w[d] * x3[d]
        out_TN[t, n], out_TN[t + 1, n], out_TN[t + 2, n], out_TN[t + 3, n] = s0, s1, s2, s3
        t += 4
    while t < count:
        x0, s0 = x_TD[t], np.float32(0)
        for d in range(size):
            s0 += w[d] * x0[d]
        out_TN[t, n] = s0
        t += 1


@numba.njit(nogil=True, fastmath=_FAST, error_model="numpy", cache=True)
def rows(x_TD, weight_ND, out_TN) -> None:  # type: ignore[no-untyped-def]
    """out = x weight^T. One row of weights at a time: reading two at once halves the speed of memory."""
    for n in range(len(weight_ND)):
        _row(x_TD, weight_ND[n], out_TN, n)


@numba.njit(nogil=True, fastmath=_FAST, error_model="numpy", cache=True)
def narrow_rows(x_TD, bits_ND, out_TN) -> None:  # type: ignore[no-untyped-def]
    """`rows` with weights in bfloat16, given as bits: the first half of a float32."""
    wide_D = np.empty(bits_ND.shape[1], np.uint32)
    weight_D = wide_D.view(np.float32)
    for n in range(len(bits_ND)):
        bits_D = bits_ND[n]
        for d in range(len(bits_D)):
            wide_D[d] = np.uint32(bits_D[d]) << np.uint32(16)
        _row(x_TD, weight_D, out_TN, n)


@numba.njit(nogil=True, error_model="numpy", cache=True)
def each_of_three(x_TD, q_ND, k_ND, v_ND, q_TN, k_TN, v_TN) -> None:  # type: ignore[no-untyped-def]
    """`rows` with each of the weights."""
    rows(x_TD, q_ND, q_TN)
    rows(x_TD, k_ND, k_TN)
    rows(x_TD, v_ND, v_TN)


@numba.njit(nogil=True, error_model="numpy", cache=True)
def gated_rows(x_TD, gate_ID, up_ID, down_DI, out_TD) -> None:  # type: ignore[no-untyped-def]
    """`gated` with SiLU."""
    shape = (len(x_TD), len(gate_ID))
    gate_TI, up_TI = np.empty(shape, np.float32), np.empty(shape, np.float32)
    rows(x_TD, gate_ID, gate_TI)
    rows(x_TD, up_ID, up_TI)
    for t in range(shape[0]):
        for i in range(shape[1]):
            gate = gate_TI[t, i]
            up_TI[t, i] *= gate / (np.float32(1) + np.exp(-gate))
    rows(up_TI, down_DI, out_TD)


@numba.njit(nogil=True, error_model="numpy", cache=True)
def chosen(x_TD, up_EID, down_EDI, index_TK, weight_TK, out_TD) -> None:  # type: ignore[no-untyped-def]
    """Gated experts, gates first in `up_EID`; a token's experts are added in the router's order."""
    count, slots = index_TK.shape
    size, half = x_TD.shape[1], up_EID.shape[1] // 2
    place = np.empty(count * slots, np.int64)
    inputs, back = np.empty((count * slots, size), np.float32), np.empty((count * slots, size), np.float32)
    both, inner = np.empty((count * slots, 2 * half), np.float32), np.empty((count * slots, half), np.float32)
    outs = np.empty((count, slots, size), np.float32)
    for e in range(len(up_EID)):
        n = 0
        for t in range(count):
            for k in range(slots):
                if index_TK[t, k] == e:
                    place[n], inputs[n] = t * slots + k, x_TD[t]
                    n += 1
        if n == 0:
            continue
        rows(inputs[:n], up_EID[e], both[:n])
        for r in range(n):
            for i in range(half):
                gate = both[r, i]
                inner[r, i] = gate / (np.float32(1) + np.exp(-gate)) * both[r, half + i]
        rows(inner[:n], down_EDI[e], back[:n])
        for r in range(n):
            outs[place[r] // slots, place[r] % slots] = back[r]
    for t in range(count):
        for d in range(size):
            total = np.float32(0)
            for k in range(slots):
                total += weight_TK[t, k] * outs[t, k, d]
            out_TD[t, d] = total
