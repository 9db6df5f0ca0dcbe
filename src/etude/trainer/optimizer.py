"""AdamW on float32 master weights; the model holds their bfloat16 rounding, which is what is published and served."""

from __future__ import annotations

import torch

from etude.config import TrainerConfig
from etude.models.loading import named_tensors


class MasterAdamW:
    """Owns the master copy of every trained tensor.

    After construction and after each step the model's own tensors hold exactly `bfloat16(master)`, upcast to the
    compute dtype, so trainer and engine run on the same numbers.
    """

    def __init__(self, model: torch.nn.Module, config: TrainerConfig):
        self._config = config
        self._live = dict(sorted(model.named_parameters()))
        self._fixed = {name: t for name, t in named_tensors(model).items() if name not in self._live}
        self._master = {name: tensor.detach().float().clone() for name, tensor in self._live.items()}
        self._adam = torch.optim.AdamW(
            [m.requires_grad_() for m in self._master.values()],
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self._round()

    def step(self, number: int, progress: float) -> dict[str, float]:
        """Applies the gradients of the model's tensors. A non-finite gradient is skipped.

        `number` counts from 1; `progress` in [0, 1] is the share of the run that lies behind.
        """
        config = self._config
        lr = config.lr * min(1.0, number / (config.warmup_steps + 1))
        if config.decay:
            lr *= min(1.0, (1 - progress) / config.decay)
        for name, live in self._live.items():
            self._master[name].grad = None if live.grad is None else live.grad.float()
            live.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._master.values(), self._config.grad_clip).item()
        finite = norm == norm and norm != float("inf")
        if finite:
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self._round()
        self._adam.zero_grad(set_to_none=True)
        return {"optim/lr": lr, "optim/grad_norm": norm, "optim/skipped": 0.0 if finite else 1.0}

    @torch.no_grad()
    def _round(self) -> None:
        for name, live in self._live.items():
            live.copy_(self._master[name].to(torch.bfloat16))

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors of the current version, in bfloat16; saved buffers are published with the trained tensors."""
        return {name: t.detach().to(torch.bfloat16) for name, t in (self._master | self._fixed).items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that exact resume needs, as named float32 tensors."""
        tensors = {f"master/{name}": m.detach() for name, m in self._master.items()}
        for name, m in self._master.items():
            for key, value in self._adam.state.get(m, {}).items():
                tensors[f"{key}/{name}"] = value
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
        for name, m in self._master.items():
            m.copy_(tensors[f"master/{name}"])
            state = {
                key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in tensors
            }
            if state:
                self._adam.state[m] = {key: value.clone() for key, value in state.items()}
        self._round()
