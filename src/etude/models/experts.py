"""The experts function of trainer and engine, registered with transformers as "etude".

Tokens are sorted by expert and each expert's rows go through one grouped GEMM, forward and backward. Within `record()`
the router's choices are kept, so that a sampled token carries the experts it went through; within `observe()` they are
kept for the trainer, which counts the tokens per expert (a token of a shared prompt once for every row it stands for).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

NAME = "etude"
ROUND = 16
_MOST_PADDING = 4  # times the tokens


class Recorder:
    """The experts chosen in one forward pass, one uint8 tensor [tokens, K] per MoE layer, in layer order."""

    def __init__(self, few_shapes: bool) -> None:
        self.layers: list[Tensor] = []
        self.few_shapes = few_shapes

    def stacked(self) -> Tensor | None:
        """uint8 [tokens, MoE layers, K], or None for a dense model."""
        return torch.stack(self.layers, dim=1) if self.layers else None


_recorder: ContextVar[Recorder | None] = ContextVar("etude_expert_recorder", default=None)


@contextmanager
def record(few_shapes: bool = False) -> Iterator[Recorder]:
    """Keep the expert ids of the forward passes inside; they are uint8, so at most 256 experts.

    With `few_shapes` experts are padded to one number of tokens, a multiple of `ROUND`: oneDNN compiles its bfloat16
    kernels for each shape, which takes milliseconds, and the counts of the experts are ever new ones.
    """
    recorder = Recorder(few_shapes)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


class Routes:
    """The experts chosen in one forward pass: per MoE layer, in order, int64 [tokens, K]; and how many there are."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.experts = 0

    def counts(self, weight_T: Tensor) -> Tensor:
        """float64 [MoE layers, experts]: tokens per expert, each as often as its weight says."""
        weights = [weight_T.double().repeat_interleave(layer.shape[1]) for layer in self.layers]
        counts = [
            torch.bincount(layer.flatten(), w, self.experts) for layer, w in zip(self.layers, weights, strict=True)
        ]
        return torch.stack(counts) if counts else weight_T.new_zeros((0, 0), dtype=torch.float64)


_routes: ContextVar[Routes | None] = ContextVar("etude_expert_routes", default=None)


@contextmanager
def observe() -> Iterator[Routes]:
    """Keep the router's choices in the forward pass inside; no layer, then, for a dense model."""
    routes = Routes()
    token = _routes.set(routes)
    try:
        yield routes
    finally:
        _routes.reset(token)


def etude_experts(module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, D]. Gradients flow to tokens, experts and router weights."""
    recorder = _recorder.get()
    if recorder is not None:
        if module.num_experts > 256:
            raise ValueError(f"cannot record {module.num_experts} experts in one byte")
        recorder.layers.append(index_TK.to(torch.uint8))
    routes = _routes.get()
    if routes is not None:
        routes.layers.append(index_TK)
        routes.experts = module.num_experts
    if not _is_plain(module):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_TD, index_TK, weight_TK)
    T, K = index_TK.shape
    flat = index_TK.reshape(-1)
    order = flat.argsort(stable=True)
    count_E = flat.bincount(minlength=module.num_experts)
    up_EDI, down_EID = module.gate_up_proj.transpose(1, 2), module.down_proj.transpose(1, 2)
    place = torch.arange(T * K, device=order.device)
    width = -(-int(count_E.max()) // ROUND) * ROUND if recorder is not None and recorder.few_shapes else 0
    if width and width * module.num_experts <= _MOST_PADDING * max(T * K, ROUND * module.num_experts):
        start_E = count_E.cumsum(0) - count_E
        expert = flat[order]
        place = expert * width + place - start_E[expert]
        padded = hidden_TD.new_zeros(module.num_experts * width, hidden_TD.shape[1])
        padded[place] = hidden_TD[order // K]
        gate, up = torch.bmm(padded.view(module.num_experts, width, -1), up_EDI).chunk(2, dim=-1)
        out = torch.bmm(module.act_fn(gate) * up, down_EID).flatten(0, 1)
    else:
        ends = count_E.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(hidden_TD[order // K], up_EDI, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(module.act_fn(gate) * up, down_EID, offs=ends)
    back = torch.empty_like(order)
    back[order] = place
    # Combined in the router's order, so a token's sum does not depend on the other tokens of the batch.
    return (out[back].view(T, K, -1) * weight_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)


def _is_plain(module: nn.Module) -> bool:
    """Gated experts without bias, stored [experts, out, in], gate before up."""
    special = module.is_transposed or module.has_bias or module.has_post_expert_norm or module._is_expert_parallel
    return module.has_gate and module.is_concatenated and not special


ExpertsInterface.register(NAME, etude_experts)
