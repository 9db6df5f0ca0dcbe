"""Advantages of a group's episodes, without torch, since the report shows them, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, without division by the standard deviation (arXiv:2603.24477, section 4.1)."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def turn_advantages(rewards: Sequence[float], turns: Sequence[int]) -> list[np.ndarray]:
    """For each member its advantage in every turn: reward minus the mean of the members that reached the turn. With one
    baseline for all turns, every action after a failed try is punished because the try had failed: those turns occur in
    bad episodes more often than in good ones. A turn is reached before it is sampled, so the expected gradient keeps
    its direction in every turn; a mean that includes the member itself scales it by (n - 1) / n, as in any group. GiGPO
    (arXiv:2505.10978) compares equal states; here turns stand for them."""
    means = [
        sum(r for r, n in zip(rewards, turns, strict=True) if n > turn) / sum(n > turn for n in turns)
        for turn in range(max(turns, default=0))
    ]
    return [np.array([reward - mean for mean in means[:n]]) for reward, n in zip(rewards, turns, strict=True)]
