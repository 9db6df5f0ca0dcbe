"""The loss: one function whose presets are rows of a table, and what it did to the tokens.

Three policies meet here: the one that sampled (`rollout`, mu), the one at the start of the step (`proximal`, o), and
the one with a gradient (`current`, l); besides them the reference of the KL term. All tensors are [N]: the sampled
tokens of a forward pass. r = exp(l - o) is what the step has done, q = exp(o - mu) what staleness and mismatch have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.trainer.rl.presets import LossPreset

CLAMP = 20.0  # of log ratios: exp stays finite, and beyond it the ratio carries no information


@dataclass(frozen=True)
class Tokens:
    """What the loss needs of the sampled tokens of a forward pass, [N] each; only `current` carries a gradient."""

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
        self.tokens += tokens
        for name, value_N in values_N.items():
            self.sums[name] = self.sums.get(name, 0.0) + value_N.double().sum().item()

    def metrics(self) -> dict[str, float]:
        """Means over tokens, and the effective share of tokens under the weights W; empty without tokens."""
        if self.tokens == 0:
            return {}
        means = {f"loss/{name}": value / self.tokens for name, value in self.sums.items() if name != "W_squared"}
        squared = self.sums.get("W_squared", 0.0)
        if squared:
            means["loss/W_ess"] = self.sums["W_mean"] ** 2 / (self.tokens * squared)
        return means


def policy_loss(t: Tokens, recipe: LossPreset, divisor: float, stats: LossStats | None = None) -> Tensor:
    """-(1/divisor) * sum of keep * W * S, plus the KL term, for the tokens of a forward pass. A scalar.

    k1 enters the advantage, A - beta * sg(l - ref): as a term of its own its expected gradient would be zero. k2 and k3
    (Schulman, "Approximating KL divergence") are terms of the loss, under the same divisor and mask but without W.
    """
    advantage = t.advantage
    if recipe.kl == "k1" and t.reference is not None:
        advantage = advantage - recipe.kl_beta * (t.current.detach() - t.reference)
    terms = _surrogate(t, recipe, advantage, stats)
    weight = _weight(t, recipe)
    if weight is not None:
        terms = terms * weight
    penalty = _penalty(t, recipe)
    if penalty is not None:
        terms = terms - recipe.kl_beta * penalty
    if recipe.divisor == "episodes":
        terms = terms / t.length
    if t.keep is not None:
        # Not a product: what is masked may be infinite, and must be exactly absent.
        terms = terms[t.keep]
    if stats is not None:
        _count(t, weight, stats)
    return -terms.sum() / divisor


def _log_ratio(above: Tensor, below: Tensor) -> Tensor:
    return (above - below).clamp(-CLAMP, CLAMP)


def _surrogate(t: Tokens, recipe: LossPreset, advantage: Tensor, stats: LossStats | None) -> Tensor:
    """S of every token."""
    if recipe.surrogate == "score":
        return advantage * t.current
    low, high = recipe.clip
    if recipe.surrogate == "sequence":
        # GSPO-token (arXiv:2507.18071, equation 14): value and gradient of the episode's ratio, token by token.
        drift = torch.zeros_like(t.current) if t.drift is None else t.drift
        ratio = (drift.clamp(-CLAMP, CLAMP) + (t.current - t.current.detach())).exp()
    else:
        ratio = _log_ratio(t.current, t.rollout if recipe.anchor == "rollout" else t.proximal).exp()
    clipped = ratio.clamp(low, high)
    if stats is not None:
        value, sign = ratio.detach(), advantage.detach()
        cut = (value < low) | (value > high)
        if recipe.surrogate != "stopped":
            cut = ((value < low) & (sign < 0)) | ((value > high) & (sign > 0))
        stats.add({"r_mean": _kept(value, t), "clip_frac": _kept(cut, t)}, 0)
    if recipe.surrogate == "stopped":
        return clipped.detach() * advantage * t.current
    return torch.minimum(ratio * advantage, clipped * advantage)


def _weight(t: Tokens, recipe: LossPreset) -> Tensor | None:
    """W of every token; None where it is 1: without a correction, or when the ratio is against the rollout policy."""
    if recipe.correction == "none" or recipe.anchor == "rollout":
        return None
    q = _log_ratio(t.proximal, t.rollout).exp()
    low, high = recipe.cap
    if recipe.correction == "truncate":
        return q.clamp(low, high)
    return torch.where((q >= low) & (q <= high), q, torch.zeros_like(q))


def _penalty(t: Tokens, recipe: LossPreset) -> Tensor | None:
    if t.reference is None or recipe.kl not in ("k2", "k3"):
        return None
    if recipe.kl == "k2":
        return _log_ratio(t.current, t.reference).square() / 2
    back = _log_ratio(t.reference, t.current)
    return torch.expm1(back) - back


def _kept(values: Tensor, t: Tokens) -> Tensor:
    return values if t.keep is None else values[t.keep]


def _count(t: Tokens, weight: Tensor | None, stats: LossStats) -> None:
    """Adds the tokens and what was done to them; means are over the tokens that were kept."""
    kept = t.current.numel() if t.keep is None else int(t.keep.sum())
    values: dict[str, Tensor] = {}
    if weight is not None:
        w, q = _kept(weight, t), _log_ratio(_kept(t.proximal, t), _kept(t.rollout, t)).exp()
        values |= {"W_mean": w, "W_squared": w.square(), "W_cut": (w - q).abs() > 1e-6 * q}
    if t.reference is not None:
        back = _log_ratio(t.reference, t.current.detach())
        values["kl_ref"] = _kept(torch.expm1(back) - back, t)
    stats.add(values, kept)


@dataclass
class Mismatch:
    """Running sums over tokens of d = l - mu: k1 = -d, k2 = d^2/2, k3 = e^d - 1 - d (Schulman, "Approximating KL").

    The tails and the correlation are of probabilities: P(|d| > ln 2), P(|e^l - e^mu| > .1), Pearson of e^l and e^mu.
    """

    tokens: int = 0
    max_abs: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, logprobs_N: Tensor, recorded_N: Tensor) -> None:
        d_N = (logprobs_N - recorded_N).double().clamp(-CLAMP, CLAMP)
        if d_N.numel() == 0:
            return
        w_N, p_N, e_N = d_N.exp(), logprobs_N.double().exp(), recorded_N.double().exp()
        clipped_N = d_N.clamp(-1, 1)
        low_N = e_N < 0.1
        values = {
            "k1": -d_N,
            "k2": d_N.square() / 2,
            "k3": torch.expm1(d_N) - d_N,
            "k3_clip": torch.expm1(clipped_N) - clipped_N,
            "p_ln2": (d_N.abs() > 0.6931471805599453).double(),
            "p_dp": ((p_N - e_N).abs() > 0.1).double(),
            "w": w_N,
            "ww": w_N.square(),
            "p": p_N,
            "e": e_N,
            "pp": p_N.square(),
            "ee": e_N.square(),
            "pe": p_N * e_N,
            "low": low_N.double(),
            "k2_low": d_N[low_N].square() / 2,
        }
        self.tokens += d_N.numel()
        self.max_abs = max(self.max_abs, d_N.abs().max().item())
        for name, value_N in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value_N.sum().item()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Means over tokens; empty without tokens, so that a reader never mistakes "not measured" for 0."""
        if self.tokens == 0:
            return {}
        n, s = self.tokens, self.sums
        found = {name: s[name] / n for name in ("k1", "k2", "k3", "k3_clip", "p_ln2", "p_dp")}
        found |= {"max_abs": self.max_abs, "ess": s["w"] ** 2 / (n * s["ww"]), "chi2": s["ww"] / n - 1}
        if s["low"]:
            found["k2_lowp"] = s["k2_low"] / s["low"]
        spread = (n * s["pp"] - s["p"] ** 2) * (n * s["ee"] - s["e"] ** 2)
        if spread > (1e-9 * n * n) ** 2:  # constant probabilities have no correlation
            found["corr"] = (n * s["pe"] - s["p"] * s["e"]) / spread**0.5
        return {f"{prefix}/{name}": value for name, value in found.items()} | {f"{prefix}/tokens": float(n)}
