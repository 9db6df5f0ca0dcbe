"""Loss presets of one function, and the mismatch between what the engine recorded and what the trainer computes.

Symbols: l log-probability under the trainer's weights (with gradient), mu the one the engine recorded, ref that of the
reference model, A advantage. All tensors are [N]: the sampled tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def composer2(
    logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    reference_N: torch.Tensor | None,
    *,
    kl_beta: float,
    normaliser: float,
) -> torch.Tensor:
    """-(1/normaliser) * sum of A_t * l, with A_t = A - kl_beta * stop_gradient(l - ref).

    Group policy gradient of arXiv:2603.24477, section 4.1: a single epoch, no length or standard-deviation
    normalisation, no overlong mask, no importance weight. k1 = l - ref multiplies the score function: as a plain loss
    term its expected gradient would be zero. `normaliser` is a constant of the run (prompts * group * token budget).
    """
    if reference_N is not None:
        advantages_N = advantages_N - kl_beta * (logprobs_N.detach() - reference_N)
    return -(advantages_N * logprobs_N).sum() / normaliser


@dataclass
class Mismatch:
    """Running sums over tokens of d = l - mu: k1 = -d, k2 = d^2/2, k3 = e^d - 1 - d (Schulman, "Approximating KL")."""

    tokens: int = 0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    max_abs: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0

    def add(self, logprobs_N: torch.Tensor, recorded_N: torch.Tensor) -> None:
        d_N = (logprobs_N - recorded_N).double().clamp(-20, 20)
        if d_N.numel() == 0:
            return
        w_N = d_N.exp()
        self.tokens += d_N.numel()
        self.k1 += -d_N.sum().item()
        self.k2 += (d_N.square() / 2).sum().item()
        self.k3 += (torch.expm1(d_N) - d_N).sum().item()
        self.max_abs = max(self.max_abs, d_N.abs().max().item())
        self.weight += w_N.sum().item()
        self.weight_squared += w_N.square().sum().item()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Means over tokens; empty without tokens, so that a reader never mistakes "not measured" for 0."""
        if self.tokens == 0:
            return {}
        n = self.tokens
        return {
            f"{prefix}/k1": self.k1 / n,
            f"{prefix}/k2": self.k2 / n,
            f"{prefix}/k3": self.k3 / n,
            f"{prefix}/max_abs": self.max_abs,
            f"{prefix}/ess": self.weight**2 / (n * self.weight_squared),
            f"{prefix}/tokens": float(n),
        }
