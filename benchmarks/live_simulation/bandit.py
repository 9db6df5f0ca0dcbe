"""A policy the size of a bandit: a softmax over ways to answer, for each kind of request. It stands for the model where
statistics need thousands of windows; everything between its answers and its update is the live loop's own code."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.live_simulation.traffic import CELLS, Turns
from etude.live.simulate.users import ACTIONS, VARIANT_SHARES, Action

START = (0.12, 0.3, 0.2, 0.1, 0.15, 0.08, 0.05)
"""Probabilities of ACTIONS before anything is learned."""


def first_policy(cells: int = CELLS, actions: tuple[Action, ...] = ACTIONS) -> np.ndarray:
    """Logits by cell, variant and action: float64 [C, V, A]."""
    return np.tile(np.log(START[: len(actions)]), (cells, len(VARIANT_SHARES), 1))


def probabilities(logits_CVA: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    powers = np.exp(logits_CVA - logits_CVA.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def mean_of(logits_CVA: np.ndarray, figure_VA: np.ndarray) -> float:
    """Mean of a figure of the answers over all requests, e.g. of their hidden utility."""
    return float(np.einsum("cva,v,va->", probabilities(logits_CVA), VARIANT_SHARES, figure_VA) / len(logits_CVA))


def share_of(logits_CVA: np.ndarray, name: str, variants: Iterable[int] = (0, 1, 2)) -> float:
    """Share of the requests of some variants that are answered with an action."""
    chosen = list(variants)
    weight_V = VARIANT_SHARES[chosen] / VARIANT_SHARES[chosen].sum()
    at = [a.name for a in ACTIONS].index(name)
    return float((probabilities(logits_CVA)[:, chosen, at] @ weight_V).mean())


def learn(logits_CVA: np.ndarray, turns: Turns, gain_N: np.ndarray, rate: float = 4.0) -> np.ndarray:
    """One step of the policy gradient: `gain_N` is weight times advantage, 0 for a turn that is not trained on. Steps
    are by cell and variant, so that a rare request learns as fast as a common one."""
    policy = probabilities(logits_CVA)
    mine = np.flatnonzero((turns.action_N >= 0) & (gain_N != 0))
    out = logits_CVA.copy()
    at = (turns.cell_N[mine], turns.variant_N[mine])
    count_CV = np.zeros(policy.shape[:2])
    np.add.at(count_CV, at, 1.0)
    step = np.zeros_like(out)
    gain = gain_N[mine] / np.maximum(count_CV[at], 20.0)
    np.add.at(step, (*at, turns.action_N[mine]), gain)
    total_CV = np.zeros(policy.shape[:2])
    np.add.at(total_CV, at, gain)
    return out + rate * (step - total_CV[..., None] * policy)
