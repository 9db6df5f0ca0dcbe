"""Releases at small firms, and releases among invented names: the scenarios of `live_statistics` that play a release
from its first stage to its end."""

from __future__ import annotations

import numpy as np

from benchmarks.live_simulation.rollouts import Crowd, Rollout, Version, roll_out
from etude.config.live import CanaryConfig

OPTIONS = CanaryConfig(slot_minutes=30.0)
HARM = 0.15
"""Added to 10 % undone edits."""


def _release(seed: int, harm: float, accounts: int, crowd: Crowd | None = None) -> Rollout:
    version = Version(lambda share: harm)
    return roll_out(np.random.default_rng((seed, accounts)), version, OPTIONS, accounts=accounts, crowd=crowd)


def firm_equal(seed: int, accounts: int = 500) -> float:
    """Whether an equal version reaches all accounts."""
    return float(_release(seed, 0.0, accounts).released)


def firm_harm(seed: int, accounts: int = 500) -> float:
    """Whether a version with 25 instead of 10 % undone edits is stopped."""
    return float(not _release(seed, HARM, accounts).released)


def names_veto(seed: int, keys: int = 1) -> float:
    """Whether an equal version among 12,000 accounts is stopped by 40 names of `keys` keys, 0: by 40 accounts."""
    return float(not _release(seed, 0.0, 12_000, Crowd(40, veto=True, keys=keys)).released)


def names_mask(seed: int, keys: int = 1) -> float:
    """Whether a version with 25 instead of 10 % undone edits among 600 accounts is released, beside 120 names."""
    return float(_release(seed, HARM, 600, Crowd(120, veto=False, keys=keys)).released)
