"""The head of a model: from hidden states to logits, with the operations of the model's own class after its last
product.

    granite          logits / logits_scaling
    cohere           logits * logit_scale
    falcon_h1        logits * lm_head_multiplier
    gemma, nanochat  cap * tanh(logits / cap), cap = final_logit_softcapping
    phi              + bias of the output embeddings

These are read from the configuration; the trial of `etude.models.support` refuses a class that does anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.models import batch_invariant

_WIDENED = 2**14  # rows of a narrow head


@dataclass(frozen=True)
class Head:
    """The output embeddings [V, D] of a model, and the operations after their product: capped(scale * (h W^T + b))."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the logits are the product alone."""
        return self.bias_V is None and self.scale == 1.0 and self.cap is None

    def finish(self, product_SV: Tensor) -> Tensor:
        """Logits of the product h W^T, in its type and with gradients; the product itself if the head is plain."""
        out_SV = product_SV
        if self.bias_V is not None:
            out_SV = out_SV + self.bias_V.to(out_SV.dtype)
        if self.scale != 1.0:
            out_SV = out_SV * self.scale
        return out_SV if self.cap is None else self.cap * torch.tanh(out_SV / self.cap)

    def logits(self, hidden_SD: Tensor, product: Callable[[Tensor, Tensor], Tensor] = batch_invariant.head) -> Tensor:
        """Float32 logits [S, V] of hidden states; `product` (hidden, weight) computes the product."""
        return self.finish(product(hidden_SD, self.weight_VD))


def head_of(model: Any) -> Head:
    """The head of a causal language model. Call it again after weights have moved; it is cheap. Raises ValueError for a
    model without output embeddings."""
    embeddings = model.get_output_embeddings()
    if embeddings is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings")
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(embeddings.weight, getattr(embeddings, "bias", None), scale, float(cap) if cap else None)


def product(hidden_SD: Tensor, weight_VD: Tensor) -> Tensor:
    """h W^T, [S, V] in float32, without gradients; a narrow weight is never widened as a whole."""
    if weight_VD.dtype == torch.float32:
        return batch_invariant.head(hidden_SD, weight_VD)
    hidden_SD = hidden_SD.float()
    product_SV = hidden_SD.new_empty(len(hidden_SD), len(weight_VD))
    for rows in row_blocks(weight_VD):
        product_SV[:, rows] = F.linear(hidden_SD, weight_VD[rows].float())
    return product_SV


def row_blocks(weight_VD: Tensor) -> list[slice]:
    """Rows of a head that are computed with at a time: all in float32, else as many as are widened."""
    size = len(weight_VD) if weight_VD.dtype == torch.float32 else _WIDENED
    return [slice(first, min(first + size, len(weight_VD))) for first in range(0, len(weight_VD), size)]
