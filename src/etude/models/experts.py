"""The experts function of trainer and engine, registered with transformers as "etude".

Tokens are sorted by expert and each expert's rows go through one grouped GEMM, forward and backward. Within `observe()`
the chosen experts of tokens are recorded: the engine stores them for its sampled tokens, and the trainer counts the
tokens per expert (a token of a shared prompt once for every row it stands for).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

from etude.models import batch_invariant, gemm, lora

NAME = "etude"
_MAX_PADDING = 4  # largest number of padded rows, relative to the tokens
_few_shapes: ContextVar[bool] = ContextVar("etude_few_shapes", default=False)


def few_shapes() -> AbstractContextManager[bool]:
    """A context in which experts are padded to one number of tokens, a multiple of `gemm.ROUND_NARROW`. oneDNN compiles
    its bfloat16 kernels for each shape, which takes milliseconds, and the experts' counts change in every pass."""
    return batch_invariant.within(_few_shapes, True)


_grouped: ContextVar[bool] = ContextVar("etude_grouped_products", default=False)


def grouped_products() -> AbstractContextManager[bool]:
    """A context in which passes without gradients use the products of those with gradients. The kernels of the CPU make
    arrays of the weights, and PyTorch does not free the memory of such a tensor while it lives, as FSDP does."""
    return batch_invariant.within(_grouped, True)


class Choices:
    """The experts of one forward pass: per MoE layer, in order, int64 [tokens, K]; and the number of experts of a
    layer."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.experts = 0

    def stacked(self) -> Tensor:
        """[tokens, MoE layers, K] in the narrowest type for the ids: uint8, or int16 beyond 256 experts."""
        return torch.stack(self.layers, dim=1).to(torch.uint8 if self.experts <= 256 else torch.int16)

    def counts(self, weight_T: Tensor) -> Tensor:
        """float64 [MoE layers, experts]: tokens per expert, each with its weight."""
        weights = [weight_T.double().repeat_interleave(layer.shape[1]) for layer in self.layers]
        # Not bincount: on a GPU its sum of weights is not deterministic.
        counts_LE = weight_T.new_zeros((len(self.layers), self.experts), dtype=torch.float64)
        for counts_E, layer, w in zip(counts_LE, self.layers, weights, strict=True):
            counts_E.index_add_(0, layer.flatten(), w)
        return counts_LE


_choices: ContextVar[Choices | None] = ContextVar("etude_expert_choices", default=None)


def observe() -> AbstractContextManager[Choices]:
    """A context that records the experts of the forward pass inside; a dense model has no layers to record."""
    return batch_invariant.within(_choices, Choices())


def unobserved() -> AbstractContextManager[None]:
    """A context in which no experts are recorded, for a second pass over the same tokens."""
    return batch_invariant.within(_choices, None)


def record_before_dispatch(module: Any, experts: int) -> None:
    """Makes the experts of a layer, some of which are on other ranks, record the choices of this rank's tokens among
    all `experts`, before the tokens travel."""
    inner = module.forward

    def forward(hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        _record(index_TK, experts)
        with unobserved():
            return inner(hidden_TD, index_TK, weight_TK)

    module.forward = forward


def _record(index_TK: Tensor, experts: int) -> None:
    choices = _choices.get()
    if choices is not None:
        choices.layers.append(index_TK)
        choices.experts = experts


def etude_experts(module: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, D]. Gradients flow to tokens, experts or their adapters, and
    router weights."""
    _record(index_TK, module.num_experts)
    if batch_invariant.is_on():
        return batch_invariant.experts(module, hidden_TD, index_TK, weight_TK)
    T, K = index_TK.shape
    plain = hidden_TD.device.type == "cpu" and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    plain = plain and batch_invariant.is_plain(module) and not _grouped.get()
    if plain and gemm.takes_experts(module, hidden_TD, index_TK):
        return gemm.experts(module, hidden_TD, index_TK, weight_TK)
    if plain and T == 1:
        return _one_token(module, hidden_TD, index_TK[0].tolist(), weight_TK)
    flat = index_TK.reshape(-1)
    order = flat.argsort(stable=True)
    expert = flat[order]
    # Not bincount: on a GPU the host would wait for the greatest id.
    every_E = torch.arange(module.num_experts, dtype=flat.dtype, device=flat.device)
    end_E = torch.searchsorted(expert, every_E, right=True, out_int32=True)
    start_E = F.pad(end_E[:-1], (1, 0))
    place = torch.arange(T * K, device=order.device)
    width = _rounded(int((end_E - start_E).max()), gemm.ROUND_NARROW) if _few_shapes.get() else 0
    if width and width * module.num_experts <= _MAX_PADDING * max(T * K, gemm.ROUND_NARROW * module.num_experts):
        place = expert * width + place - start_E[expert]
        padded = hidden_TD.new_zeros(module.num_experts * width, hidden_TD.shape[1])
        padded[place] = hidden_TD[order // K]
        out = _outputs(module, padded.view(module.num_experts, width, -1), every_E[:, None], None).flatten(0, 1)
    elif plain and gemm.takes(hidden_TD, module.gate_up_proj):
        out = _each(module, hidden_TD[order // K], (end_E - start_E).tolist())
    else:
        out = _outputs(module, hidden_TD[order // K], expert, end_E)
    back = torch.empty_like(order)
    back[order] = place
    # Summed in the router's order, so that a token's sum does not depend on the other tokens of the batch.
    return (out[back].view(T, K, -1) * weight_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)


def _outputs(module: Any, rows: Tensor, expert: Tensor, end_E: Tensor | None) -> Tensor:
    """The experts' outputs for rows as in `lora.experts_product`; `expert` is that of each row."""
    for name in lora.weight_names(module):
        rows = lora.experts_product(module, name, rows, end_E)
        if module.has_bias:
            rows = rows + getattr(module, f"{name}_bias")[expert]
        if name != "down_proj":
            rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    return module.post_expert_norm(rows) if module.has_post_expert_norm else rows


def _rounded(rows: int, size: int) -> int:
    return rows + -rows % size


def _each(module: Any, sorted_ND: Tensor, counts: list[int]) -> Tensor:
    """The outputs of the experts one by one, each one's rows filled up with following rows to a multiple of
    `gemm.ROUND`."""
    out_ND = torch.empty_like(sorted_ND)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            wide = _rounded(count, gemm.ROUND)
            begin = max(0, min(start, len(sorted_ND) - wide))
            both = gemm.product(sorted_ND[begin : begin + wide], module.gate_up_proj[expert])
            gate, up = both.chunk(2, dim=-1)
            made_ND = gemm.product(module.act_fn(gate) * up, module.down_proj[expert])
            out_ND[start : start + count] = made_ND[start - begin : start - begin + count]
        start += count
    return out_ND


def _one_token(module: Any, hidden_1D: Tensor, experts: list[int], weight_1K: Tensor) -> Tensor:
    """The experts' output for a single decoded row: sorting it for a grouped GEMM would take longer than the
    products."""
    outs = []
    for expert in experts:
        gate, up = F.linear(hidden_1D, module.gate_up_proj[expert]).chunk(2, dim=-1)
        outs.append(F.linear(module.act_fn(gate) * up, module.down_proj[expert]))
    return (torch.stack(outs, dim=1) * weight_1K.unsqueeze(-1)).sum(dim=1).to(hidden_1D.dtype)


ExpertsInterface.register(NAME, etude_experts)
