"""Statistics of the mismatch between the trainer's log-probabilities of sampled tokens and the engine's recorded
ones."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this: exp stays finite, and a larger ratio carries no information."""


@dataclass(frozen=True)
class MismatchMeans:
    """Means over `tokens` tokens of d = l - mu, with l from the trainer and mu from the engine. k1 = -d, k2 = d^2 / 2
    and k3 = e^d - 1 - d are Schulman's estimators ("Approximating KL divergence"); `k3_clip` clips d to [-1, 1].
    `p_ln2` is the share with |d| > ln 2, `p_dp` the share with |e^l - e^mu| > 0.1, `corr` Pearson's correlation of e^l
    and e^mu. `ess` is the effective share of tokens under the weights e^d, `chi2` the variance of these weights,
    `k2_lowp` is k2 over tokens with e^mu < 0.1. None: too few tokens."""

    tokens: float
    k1: float
    k2: float
    k3: float
    k3_clip: float
    p_ln2: float
    p_dp: float
    max_abs: float
    ess: float
    chi2: float
    k2_lowp: float | None
    corr: float | None

    def filled(self, tokens: int) -> MismatchMeans:
        """The means with exactly agreeing tokens added, up to `tokens` in all; those of low probability and the
        correlation become unknown."""
        n, added = self.tokens, tokens - self.tokens
        squares = n * (self.chi2 + 1)
        weights = math.sqrt(self.ess * n * squares) + added
        means = {name: getattr(self, name) * n / tokens for name in ("k1", "k2", "k3", "k3_clip", "p_ln2", "p_dp")}
        ess, chi2 = weights**2 / (tokens * (squares + added)), (squares + added) / tokens - 1
        return replace(self, tokens=float(tokens), ess=ess, chi2=chi2, k2_lowp=None, corr=None, **means)

    def metrics(self, prefix: str) -> dict[str, float]:
        """`PREFIX/NAME` of every known figure."""
        return {f"{prefix}/{name}": value for name, value in asdict(self).items() if value is not None}


@dataclass
class Mismatch:
    """Running sums from which `MismatchMeans` are computed."""

    tokens: int = 0
    max_abs: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, logprobs_N: Tensor, recorded_N: Tensor) -> None:
        """Adds N tokens: the trainer's log-probabilities, and the engine's."""
        d_N = (logprobs_N - recorded_N).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
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
            "p_ln2": (d_N.abs() > math.log(2)).double(),
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

    def means(self) -> MismatchMeans | None:
        """The statistics of all tokens so far; None without tokens, so that "unknown" is never taken for 0."""
        if self.tokens == 0:
            return None
        n, s = self.tokens, self.sums
        spread = (n * s["pp"] - s["p"] ** 2) * (n * s["ee"] - s["e"] ** 2)
        correlated = spread > (1e-9 * n * n) ** 2  # constant probabilities have no correlation
        return MismatchMeans(
            tokens=float(n),
            **{name: s[name] / n for name in ("k1", "k2", "k3", "k3_clip", "p_ln2", "p_dp")},
            max_abs=self.max_abs,
            ess=s["w"] ** 2 / (n * s["ww"]),
            chi2=s["ww"] / n - 1,
            k2_lowp=s["k2_low"] / s["low"] if s["low"] else None,
            corr=(n * s["pe"] - s["p"] * s["e"]) / spread**0.5 if correlated else None,
        )

    def metrics(self, prefix: str) -> dict[str, float]:
        """`MismatchMeans.metrics`; empty without tokens."""
        means = self.means()
        return {} if means is None else means.metrics(prefix)
