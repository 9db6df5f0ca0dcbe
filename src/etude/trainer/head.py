"""Log-probabilities of a model's head, some positions at a time: logits of all positions are never in memory together.

For 8,192 positions and a vocabulary of 151,936, float32 logits are 5 GB, and a plain backward pass holds four such
tensors. Here a chunk of positions is computed, used and freed; the backward pass computes it again.

Suffixes: S positions, M tokens predicted at them, C positions of a chunk, V vocabulary, D hidden, E every 16th of S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.models import batch_invariant
from etude.models.head import Head, product, row_blocks

CHUNK = 1024  # positions
ENTROPY_STRIDE = 16  # exact enough for a mean over some thousand tokens; entropies of all take a tenth of the step


def token_logprobs(
    head: Head,
    hidden_SD: Tensor,
    of_M: np.ndarray,
    target_M: np.ndarray,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    before: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probability [M] of token `target_M[m]` in the distribution of position `of_M[m]`, and the entropies [E] of
    every 16th position, without gradient; `before` positions that are not here are counted, too. Logits and softmax are
    float32, after the division by the temperature, as in the engine. In batch-invariant mode all positions are one
    chunk, and autograd computes the gradients: the bits are the engine's, and the gradients' bits do not depend on
    `chunk`. Raises ValueError for a chunk that is not a multiple of 16."""
    if chunk < 1 or chunk % ENTROPY_STRIDE:
        raise ValueError(f"a chunk is a multiple of {ENTROPY_STRIDE} positions, not {chunk}")
    order = of_M.argsort(kind="stable")
    there = torch.from_numpy(np.stack([of_M[order], target_M[order], order]).astype(np.int64)).to(hidden_SD.device)
    some = slice(-before % ENTROPY_STRIDE, None, ENTROPY_STRIDE)
    if batch_invariant.is_on():
        logprobs_M, entropy_E = _plain(head, hidden_SD, there[0], there[1], temperature, some)
    else:
        cuts = np.searchsorted(of_M[order], np.arange(0, len(hidden_SD) + chunk, chunk)).tolist()
        plan = _Plan(head, tuple(cuts), chunk, temperature, some)
        logprobs_M, entropy_E = _Chunks.apply(hidden_SD, head.weight_VD, head.bias_V, there[0], there[1], plan)
    if (order[1:] < order[:-1]).any():
        logprobs_M = torch.empty_like(logprobs_M).index_copy(0, there[2], logprobs_M)
    return logprobs_M, entropy_E


def _plain(
    head: Head, hidden_SD: Tensor, of_M: Tensor, target_M: Tensor, temperature: float, some: slice
) -> tuple[Tensor, Tensor]:
    logits_SV = head.logits(hidden_SD)
    logprobs_SV = batch_invariant.log_probs(logits_SV / temperature if temperature != 1.0 else logits_SV)
    chosen_M = logprobs_SV.flatten().index_select(0, of_M * logits_SV.shape[1] + target_M)
    return chosen_M, _entropies(logprobs_SV.detach()[some])


def _entropies(logprobs_EV: Tensor) -> Tensor:
    return -(logprobs_EV.exp() * logprobs_EV).sum(-1)


@dataclass(frozen=True)
class _Plan:
    """`cuts[i]` is the first of the M tokens, sorted by position, that chunk i or a later chunk predicts; `entropies`
    are the positions of each chunk that have one."""

    head: Head
    cuts: tuple[int, ...]
    chunk: int
    temperature: float
    entropies: slice

    def scaled(self, product_CV: Tensor) -> Tensor:
        """Logits divided by the temperature; in the product's memory if the head is plain and nothing is kept."""
        logits_CV = self.head.finish(product_CV)
        if self.temperature == 1.0:
            return logits_CV
        return logits_CV / self.temperature if torch.is_grad_enabled() else logits_CV.div_(self.temperature)

    def each(self) -> Iterator[tuple[slice, slice, int]]:
        """Positions and tokens of every chunk, and its first position."""
        for i in range(len(self.cuts) - 1):
            yield slice(i * self.chunk, (i + 1) * self.chunk), slice(self.cuts[i], self.cuts[i + 1]), i * self.chunk


class _Chunks(torch.autograd.Function):
    """The product in chunks. The backward pass reuses the log-probabilities of a single chunk, and computes several
    again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        of_M: Tensor,
        target_M: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        chosen, entropies = [hidden_SD.new_zeros(0, dtype=torch.float32)], [hidden_SD.new_zeros(0, dtype=torch.float32)]
        kept_CV = None
        for rows, some, first in plan.each():
            logprobs_CV = torch.log_softmax(plan.scaled(product(hidden_SD[rows], weight_VD)), dim=-1)
            at = (of_M[some] - first) * len(weight_VD) + target_M[some]
            chosen.append(logprobs_CV.flatten().index_select(0, at))
            entropies.append(_entropies(logprobs_CV[plan.entropies]))
            if len(plan.cuts) == 2 and plan.head.plain and any(ctx.needs_input_grad):
                kept_CV = logprobs_CV
            del logprobs_CV  # free it before the next chunk's is made
        ctx.plan = plan
        ctx.save_for_backward(hidden_SD, weight_VD, bias_V, of_M, target_M, kept_CV)
        entropy_E = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_E)
        return torch.cat(chosen), entropy_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a position's logits is g(target) - softmax * sum of g. Gradients are summed and returned in
        float32; the weight's `grad_dtype` decides their final type."""
        hidden_SD, weight_VD, bias_V, of_M, target_M, kept_CV = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_SD) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        for rows, some, first in ctx.plan.each():
            tokens = of_M[some] - first, target_M[some], grads[0][some]
            if kept_CV is not None:
                grad_CV = _of_softmax(kept_CV.exp(), *tokens).div_(ctx.plan.temperature)
            else:
                grad_CV = _of_product(ctx.plan, product(hidden_SD[rows], weight_VD), bias_V, grad_bias, *tokens)
            own_CD = hidden_SD[rows].float()
            if grad_hidden is not None:
                grad_hidden[rows] = sum(grad_CV[:, block] @ weight_VD[block].float() for block in row_blocks(weight_VD))
            if grad_weight is not None:
                for block in row_blocks(weight_VD):
                    grad_weight[block].addmm_(grad_CV[:, block].t(), own_CD)
            del grad_CV  # free it before the next chunk's is made
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _of_softmax(softmax_CV: Tensor, of: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits, in the softmax's memory."""
    total_C = softmax_CV.new_zeros(len(softmax_CV)).index_add_(0, of, grad)
    softmax_CV.mul_(-total_C[:, None]).view(-1).index_add_(0, of * softmax_CV.shape[1] + target, grad)
    return softmax_CV


def _of_product(
    plan: _Plan, product_CV: Tensor, bias_V: Tensor | None, grad_bias: Tensor | None, *tokens: Tensor
) -> Tensor:
    """The gradient of h W^T; adds the gradient of the bias to `grad_bias`."""
    if plan.head.plain:
        return _of_softmax(torch.softmax(plan.scaled(product_CV), dim=-1), *tokens).div_(plan.temperature)
    with torch.enable_grad():
        product_CV.requires_grad_()
        leaf_V = None if bias_V is None else bias_V.detach().float().requires_grad_()
        logits_CV = replace(plan, head=replace(plan.head, bias_V=leaf_V)).scaled(product_CV)
    grad_CV = _of_softmax(torch.softmax(logits_CV.detach(), dim=-1), *tokens)
    leaves = [product_CV] if leaf_V is None else [product_CV, leaf_V]
    of_product, *of_bias = torch.autograd.grad(logits_CV, leaves, grad_CV)
    if grad_bias is not None:
        grad_bias += of_bias[0]
    return of_product
