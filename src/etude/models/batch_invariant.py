"""Batch-invariant mode: the results of a token have the same bits with any other tokens in its pass.

Engine and trainer then agree in every bit, however the engine batched, cut and cached. It holds on the CPU in float32.
In a plain pass the bits depend on the other tokens for these reasons, each with its remedy:

    matrix products    the library takes other kernels for fewer than 16 rows (seen with MKL 2024.2), elementwise
                       functions others for the last elements: passes, and the rows of each expert, have a multiple of
                       `TILE` rows
    experts            each expert's rows are a product of their own, and a token's experts are summed in slot order
    attention          the engine's kernel on both sides: the order of a query's sums depends on its position alone
    documents          the trainer, too, computes their keys before rotation and rotates them where they are placed
    head               padded like the rest; logits, softmax and log-probability in float32, row by row

Suffixes as in `etude.models.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import moe

from etude.models import lora
from etude.models.dtypes import computing_dtype
from etude.models.kernels import BLOCK, paged_attention
from etude.models.key_values import configured

TILE = 16
_SOME = 512  # number of head rows in the measurement of its precision

T = TypeVar("T")
_on: ContextVar[bool] = ContextVar("etude_batch_invariant", default=False)


@contextmanager
def within(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """A context in which the variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def batch_invariant(on: bool = True) -> AbstractContextManager[bool]:
    """A context in which attention and experts are batch-invariant if `on`; passes must be padded by `padding`."""
    return within(_on, on)


def is_on() -> bool:
    """Whether the mode is on."""
    return _on.get()


def possible(model: Any) -> bool:
    """Whether the mode supports the model: on the CPU, in float32, full attention without sinks, plain experts, keys as
    wide as values."""
    one, config, shape = next(model.parameters()), model.config.get_text_config(), configured(model.config)
    kinds, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    if set(kinds) - {"full_attention"} or (window and not kinds) or sinks:
        return False
    plain = all(is_plain(module) for module in model.modules() if hasattr(module, "is_concatenated"))
    wide = computing_dtype(model) == torch.float32
    return one.device.type == "cpu" and wide and plain and shape.key == shape.value


def is_plain(module: Any) -> bool:
    """Whether the module has gated experts without bias, stored [experts, out, in], gate before up, multiplied."""
    special = module.is_transposed or module.has_bias or module.has_post_expert_norm or module._is_expert_parallel
    product = type(module)._apply_gate.__module__ == moe.__name__  # else the class has a formula of its own
    return module.has_gate and module.is_concatenated and product and not special


def padding(rows: int) -> int:
    """Rows to add, so that their number is a multiple of `TILE`; 0 while the mode is off."""
    return -rows % TILE if is_on() else 0


def padded(rows_ND: Tensor) -> Tensor:
    """The rows, with rows of zeros up to a multiple of `TILE`; the same tensor while the mode is off."""
    extra = padding(len(rows_ND))
    return F.pad(rows_ND, (0, 0, 0, extra)) if extra else rows_ND


def head(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits [S, V] in float32, for trainer and engine; batch-invariant while the mode is on."""
    logits_SV = F.linear(padded(hidden_SD.float()), weight_VD.float())
    return logits_SV[: len(hidden_SD)] if len(logits_SV) > len(hidden_SD) else logits_SV


def log_probs(logits_SV: Tensor) -> Tensor:
    """Log-softmax in float32 for logits of any type, [S, V]."""
    return torch.log_softmax(logits_SV.float(), dim=-1)


@torch.no_grad()
def float32_head(model: Any, taken: Callable[[Tensor, Tensor], Tensor] | None = None) -> bool:
    """Whether `taken`, or else `head`, computes this model's logits in float32: measured against float64. The error of
    bfloat16 is some 4e-3 of the largest logit, that of TF32 5e-4, that of float32 less than 1e-5."""
    weight_VD = model.get_output_embeddings().weight[:_SOME]
    noise = torch.Generator().manual_seed(0)
    for rows in (TILE, 4 * TILE):  # few and many rows may use different kernels
        hidden_SD = torch.randn(rows, weight_VD.shape[1], generator=noise).to(weight_VD.device, weight_VD.dtype)
        true_SV = F.linear(hidden_SD.double(), weight_VD.double())
        error_SV = (taken or head)(hidden_SD, weight_VD).double() - true_SV
        if not bool(error_SV.abs().max() <= 1e-4 * true_SV.abs().max()):
            return False
    return True


def experts(module: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, D], of plain experts."""
    flat = index_TK.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=module.num_experts).tolist()
    pieces = []
    first, second = (lora.one_expert(module, name) for name in lora.weight_names(module))
    for expert, rows_ND in enumerate(hidden_TD[order // index_TK.shape[1]].split(counts)):
        if not len(rows_ND):
            continue
        gate, up = first(expert, padded(rows_ND)).chunk(2, dim=-1)
        pieces.append(second(expert, module.act_fn(gate) * up)[: len(rows_ND)])
    out = torch.cat(pieces)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    out_TKD = out[back].view(*index_TK.shape, -1)
    total_TD = out_TKD[:, 0] * weight_TK[:, :1]
    for slot in range(1, index_TK.shape[1]):
        total_TD = total_TD + out_TKD[:, slot] * weight_TK[:, slot, None]
    return total_TD


@torch.no_grad()
def attention(query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
    """Causal attention in the bits of the engine's kernel, [B, H, T, D]; the queries are those of the last keys."""
    B, H, T, D = query_BHTD.shape
    above, blocks = key_BKTD.shape[2] - T, -(-key_BKTD.shape[2] // BLOCK)
    keys, values = (_pages(x, blocks) for x in (key_BKTD, value_BKTD))
    out_NHD = np.empty((B * T, H, D), np.float32)
    query_NHD = query_BHTD.transpose(1, 2).reshape(B * T, H, D).contiguous().numpy()
    table = np.arange(B * blocks, dtype=np.int32).reshape(B, blocks)
    row_N, position_N = (x.ravel().astype(np.int32) for x in np.indices((B, T)))
    attend = paged_attention(D, D)
    attend(query_NHD, keys, values, table, row_N, position_N + np.int32(above), np.float32(scale), out_NHD)
    return torch.from_numpy(out_NHD).view(B, T, H, D).transpose(1, 2)


def _pages(x_BKTD: Tensor, blocks: int) -> np.ndarray:
    """The tensor in the format of the engine's cache: [B * blocks, K, BLOCK, D], zeros after the last token."""
    B, K, T, D = x_BKTD.shape
    out = np.zeros((B, blocks, K, BLOCK, D), np.float32)
    whole = F.pad(x_BKTD, (0, 0, 0, blocks * BLOCK - T)).reshape(B, K, blocks, BLOCK, D)
    out[:] = whole.transpose(1, 2).numpy()
    return out.reshape(B * blocks, K, BLOCK, D)
