"""The loss: one function whose presets are rows of a table, and statistics of its effect on the tokens.

Three policies meet here: the one that sampled (`rollout`, mu), the one at the start of the step (`proximal`, o), and
the one with a gradient (`current`, l); besides them the reference of the KL term. All tensors are [N]: the sampled
tokens of a forward pass. r = exp(l - o) is the change by the step, q = exp(o - mu) that by staleness and mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from etude.errors import UserError
from etude.trainer.rl.mismatch import LOG_RATIO_LIMIT
from etude.trainer.rl.presets import LossPreset


@dataclass(frozen=True)
class LossTokens:
    """The inputs of the loss for the sampled tokens of a forward pass, [N] each; only `current` has a gradient.
    `current`, `proximal`, `rollout` and `reference` are log-probabilities of the tokens under the four policies."""

    current: Tensor
    proximal: Tensor
    rollout: Tensor
    advantage: Tensor
    reference: Tensor | None  # None: no KL term
    length: Tensor  # sampled tokens of the token's episode
    keep: Tensor | None = None  # bool; None: all
    drift: Tensor | None = None  # mean of l - o over the token's episode; None: 0, as in a batch's first update


@dataclass
class LossStats:
    """Running sums over tokens."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, values_N: dict[str, Tensor], tokens: int) -> None:
        """Adds the sums of the tensors [N], and `tokens` to the count for means."""
        self.tokens += tokens
        for name, value_N in values_N.items():
            self.sums[name] = self.sums.get(name, 0.0) + value_N.double().sum().item()

    @property
    def weight_cut(self) -> float | None:
        """Share of the importance weights W that were cut; None if the loss has no such weights."""
        return self.sums["W_cut"] / self.tokens if self.tokens and "W_cut" in self.sums else None

    @property
    def weight_ess(self) -> float | None:
        """Effective share of tokens under the weights W; None if the loss has no such weights or all are 0."""
        squared = self.sums.get("W_squared", 0.0)
        return self.sums["W_mean"] ** 2 / (self.tokens * squared) if self.tokens and squared else None

    def metrics(self) -> dict[str, float]:
        """Means over tokens, and `weight_ess`; empty without tokens."""
        if self.tokens == 0:
            return {}
        means = {f"loss/{name}": value / self.tokens for name, value in self.sums.items() if name != "W_squared"}
        return means if self.weight_ess is None else means | {"loss/W_ess": self.weight_ess}


def policy_loss(t: LossTokens, preset: LossPreset, divisor: float, stats: LossStats | None = None) -> Tensor:
    """-(1/divisor) * sum of keep * W * S, plus the KL term, for the tokens of a forward pass. A scalar.

    k1 enters the advantage, A - beta * sg(l - ref): as a separate term its expected gradient would be zero. k2 and k3
    (Schulman, "Approximating KL divergence") are terms of the loss, under the same divisor and mask but without W. A
    loss of the user's replaces W * S. Raises UserError if its result is not one number per token.
    """
    if preset.kl == "k1" and t.reference is not None:
        t = replace(t, advantage=t.advantage - preset.kl_beta * (t.current.detach() - t.reference))
    weight = None
    if preset.custom is not None:
        terms = -_custom(t, preset)
    else:
        terms = _surrogate(t, preset, stats)
        weight = _weight(t, preset)
    if weight is not None:
        terms = terms * weight
    if t.reference is not None and preset.kl == "k2":
        terms = terms - preset.kl_beta * (_log_ratio(t.current, t.reference).square() / 2)
    elif t.reference is not None and preset.kl == "k3":
        back = _log_ratio(t.reference, t.current)
        terms = terms - preset.kl_beta * (torch.expm1(back) - back)
    if preset.divisor == "episodes":
        terms = terms / t.length
    if t.keep is not None:
        # Not a product: masked values may be infinite, and must be exactly absent.
        terms = terms[t.keep]
    if stats is not None:
        _count(t, weight, stats)
    return -terms.sum() / divisor


def _log_ratio(above: Tensor, below: Tensor) -> Tensor:
    return (above - below).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _custom(t: LossTokens, preset: LossPreset) -> Tensor:
    """The user's loss of every token."""
    assert preset.custom is not None
    loss_N = preset.custom(t)
    if not isinstance(loss_N, Tensor) or loss_N.shape != t.current.shape:
        got = f"a tensor of shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise UserError(
            f"loss.custom must return a tensor of shape {tuple(t.current.shape)}, one loss per token, not {got}"
        )
    return loss_N


def _surrogate(t: LossTokens, preset: LossPreset, stats: LossStats | None) -> Tensor:
    """S of every token."""
    advantage = t.advantage
    if preset.surrogate == "score":
        return advantage * t.current
    low, high = preset.clip
    if preset.surrogate == "sequence":
        # GSPO-token (arXiv:2507.18071, equation 14): value and gradient of the episode's ratio, token by token.
        drift = torch.zeros_like(t.current) if t.drift is None else t.drift
        ratio = (drift.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + (t.current - t.current.detach())).exp()
    else:
        ratio = _log_ratio(t.current, t.rollout if preset.anchor == "rollout" else t.proximal).exp()
    clipped = ratio.clamp(low, high)
    if stats is not None:
        value, sign = ratio.detach(), advantage.detach()
        cut = (value < low) | (value > high)
        if preset.surrogate != "stopped":
            cut = ((value < low) & (sign < 0)) | ((value > high) & (sign > 0))
        stats.add({"r_mean": _kept(value, t), "clip_frac": _kept(cut, t)}, 0)
    if preset.surrogate == "stopped":
        return clipped.detach() * advantage * t.current
    return torch.minimum(ratio * advantage, clipped * advantage)


def _weight(t: LossTokens, preset: LossPreset) -> Tensor | None:
    """W of every token; None if it is 1: without a correction, or if the ratio is relative to the rollout policy."""
    if preset.correction == "none" or preset.anchor == "rollout":
        return None
    q = _log_ratio(t.proximal, t.rollout).exp()
    low, high = preset.cap
    if preset.correction == "truncate":
        return q.clamp(low, high)
    return torch.where((q >= low) & (q <= high), q, torch.zeros_like(q))


def _kept(values: Tensor, t: LossTokens) -> Tensor:
    return values if t.keep is None else values[t.keep]


def _count(t: LossTokens, weight: Tensor | None, stats: LossStats) -> None:
    """Adds the tokens and the effects on them to the statistics; means are over the tokens that were kept."""
    kept = t.current.numel() if t.keep is None else int(t.keep.sum())
    values: dict[str, Tensor] = {}
    if weight is not None:
        w, q = _kept(weight, t), _log_ratio(_kept(t.proximal, t), _kept(t.rollout, t)).exp()
        values |= {"W_mean": w, "W_squared": w.square(), "W_cut": (w - q).abs() > 1e-6 * q}
    if t.reference is not None:
        back = _log_ratio(t.reference, t.current.detach())
        values["kl_ref"] = _kept(torch.expm1(back) - back, t)
    stats.add(values, kept)
