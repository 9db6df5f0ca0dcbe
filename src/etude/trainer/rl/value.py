"""The value head of the ppo preset: one linear layer on the policy's last hidden state, which shares its layers.

PPO with shared parameters (arXiv:1707.06347, equation 9) and generalised advantage estimation (arXiv:1506.02438,
equation 16). A state is the policy's context before it samples a token; a tool's answer belongs to the transition
between two states. The head is never published, since engines do not use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.trainer.rl.batch import Samples
from etude.trainer.world import World

PREFIX = "value/"
WEIGHT = 0.5  # weight of the value error in the loss
LEARNING_RATE = 1e-3


def gae(values_T: Sequence[float], reward: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and value targets of an episode whose reward comes with its last token; float64 [T] both. The discount
    is 1: delta_t = r_t + V_(t+1) - V_t with V = 0 after the end; A_t = delta_t + lam * A_(t+1); the target is
    A_t + V_t."""
    values = np.asarray(values_T, dtype=np.float64)
    advantages = np.zeros_like(values)
    ahead, following = 0.0, 0.0
    for t in range(len(values) - 1, -1, -1):
        delta = (reward if t == len(values) - 1 else 0.0) + following - values[t]
        ahead = delta + lam * ahead
        advantages[t] = ahead
        following = values[t]
    return advantages, advantages + values


class Critic:
    """The head and its optimizer."""

    def __init__(self, model: PreTrainedModel):
        weight = model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
        self.head = torch.nn.Linear(weight.shape[1], 1).to(weight.device)
        torch.nn.init.zeros_(self.head.weight)  # a value of 0 everywhere: the first advantages are the returns
        torch.nn.init.zeros_(self.head.bias)
        self._adam = torch.optim.Adam(self.head.parameters(), lr=LEARNING_RATE)

    def values(self, hidden_SD: Tensor) -> Tensor:
        """The values [S] of states with these last hidden states."""
        return self.head(hidden_SD.float()).squeeze(-1)

    def loss(self, values_M: Tensor, targets_M: Tensor, divisor: float) -> Tensor:
        """Half the mean squared error over `divisor` tokens."""
        return (values_M - targets_M).square().sum() / (2 * divisor)

    def apply(self, world: World | None = None) -> None:
        """Updates the head from the collected gradients, summed over the ranks."""
        if world is not None:
            world.total(p.grad for p in self.head.parameters() if p.grad is not None)
        self._adam.step()
        self.drop()

    def drop(self) -> None:
        """Frees the collected gradients."""
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The complete state for exact resume, for the checkpoint of the step."""
        tensors = {f"{PREFIX}{name}": p.detach() for name, p in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            for key, value in self._adam.state.get(parameter, {}).items():
                tensors[f"{PREFIX}{key}/{name}"] = value
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self._adam.state.clear()
        for name, parameter in self.head.named_parameters():
            parameter.copy_(tensors[f"{PREFIX}{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{PREFIX}{key}/{name}" in tensors]
            if keys:
                self._adam.state[parameter] = {key: tensors[f"{PREFIX}{key}/{name}"].clone() for key in keys}


def estimate(
    samples: Sequence[Samples], values: Sequence[Tensor], rewards_E: Sequence[float], lam: float
) -> list[tuple[Tensor, Tensor]]:
    """For each part of a batch the advantages and value targets of its tokens, [N] each, by GAE over whole episodes."""
    of_episode: dict[int, np.ndarray] = {}
    for some, value_N in zip(samples, values, strict=True):
        for e, at, length, value in zip(
            some.episode_N.tolist(), some.order_N.tolist(), some.length_N.tolist(), value_N.tolist(), strict=True
        ):
            of_episode.setdefault(e, np.zeros(int(length)))[at] = value
    by_episode = {e: gae(v.tolist(), rewards_E[e], lam) for e, v in of_episode.items()}
    out = []
    for some in samples:
        at = list(zip(some.episode_N.tolist(), some.order_N.tolist(), strict=True))
        pair = [
            torch.tensor([by_episode[e][part][i] for e, i in at], dtype=torch.float32, device=some.episode_N.device)
            for part in (0, 1)
        ]
        out.append((pair[0], pair[1]))
    return out
