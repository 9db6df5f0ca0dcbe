"""The routers of a sparse model during training: their logits in a pass, and the balance of tokens over experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from etude.models import context_parallel
from etude.models.context_parallel import RowSlice


@dataclass
class Routers:
    """The routers' logits [T, E] of the last pass, one tensor per sparse layer. `clear` them before each pass."""

    top_k: int
    logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers:
        """The routers of a model, which record their logits in every pass from now on. They record nothing for a dense
        model, and for one whose routers are balanced by a bias instead of a loss (DeepSeek-V3, GLM, MiniMax)."""
        config = model.config.get_text_config()
        routers = cls(getattr(config, "num_experts_per_tok", None) or 1)
        by_loss = hasattr(config, "router_aux_loss_coef")
        if not by_loss or any("e_score_correction" in name for name in model.state_dict()):
            return routers
        recorded = {id(one): one for m in model.modules() if (one := _recorded(m)) is not None}.values()
        kinds = {(getattr(one, "target_class", one), getattr(one, "index", 0)) for one in recorded}
        for kind, index in kinds:
            for module in model.modules():
                if isinstance(module, kind):
                    module.register_forward_hook(partial(routers._keep, index))
        return routers

    def _keep(self, index: int, _module: object, _args: object, output: Any) -> None:
        self.logits.append(output[index] if isinstance(output, tuple) else output)

    def clear(self) -> None:
        """Drops the logits of the last pass."""
        self.logits.clear()

    def balance(self, like: Tensor, row: RowSlice | None = None) -> tuple[Tensor, Tensor]:
        """(balance loss, expert load [L, E]); 0 and empty for a dense model. The loss is Switch Transformers' (Fedus et
        al. 2021): E times the dot product of the share of tokens an expert gets and its mean router probability,
        averaged over sparse layers. After a pass over a slice of a `row`, it is the share of the slice's tokens in the
        loss of the row, and the load is the row's."""
        if not self.logits:
            return like.new_zeros(()), like.new_zeros((0, 0))
        routers = [logits.flatten(0, -2) for logits in self.logits]
        tokens = len(routers[0])
        if row is not None:
            own = row.here.stop - row.here.start
            routers, tokens = [router_TE[:own] for router_TE in routers], row.tokens
        chosen = [router_TE.detach().topk(self.top_k, dim=-1).indices for router_TE in routers]
        counts = [F.one_hot(chosen_TK, routers[0].shape[-1]).sum((0, 1)) for chosen_TK in chosen]
        load_LE = context_parallel.total(torch.stack(counts)).float() / (tokens * self.top_k)
        means = [router_TE.float().softmax(-1).sum(0) / tokens for router_TE in routers]
        balances = [len(load_E) * (load_E * mean_E).sum() for load_E, mean_E in zip(load_LE, means, strict=True)]
        return torch.stack(balances).mean(), load_LE


def _recorded(module: nn.Module) -> Any:
    """transformers' own description of where a model's routers leave their logits."""
    return (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
