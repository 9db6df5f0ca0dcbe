"""The routers of a sparse model during training: their logits in a pass, and how evenly they spread the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Routers:
    """The routers' logits [T, E] of the last pass, one tensor per sparse layer. `clear` them before each pass."""

    experts: int
    top_k: int
    logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers:
        """The routers of a model; from now on every pass leaves their logits here."""
        routers = cls(getattr(model.config, "num_experts", 0), getattr(model.config, "num_experts_per_tok", 0))
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda _module, _args, output: routers.logits.append(output[0]))
        return routers

    def clear(self) -> None:
        """Forgets the last pass."""
        self.logits.clear()

    def balance(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(balance loss, expert load [L, E]); 0 and empty for a dense model. The loss is Switch Transformers' (Fedus et
        al. 2021): E times the dot product of the share of tokens an expert gets and its mean router probability,
        averaged over sparse layers."""
        if not self.logits:
            return like.new_zeros(()), like.new_zeros((0, 0))
        balances, loads = [], []
        for router_TE in self.logits:
            chosen_TK = router_TE.detach().topk(self.top_k, dim=-1).indices
            load_E = F.one_hot(chosen_TK, self.experts).float().mean(dim=(0, 1))
            balances.append(self.experts * (load_E * router_TE.float().softmax(-1).mean(0)).sum())
            loads.append(load_E)
        return torch.stack(balances).mean(), torch.stack(loads)
