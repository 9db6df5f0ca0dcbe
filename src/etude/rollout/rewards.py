"""What an episode is worth: the grade, less what the agent's conduct costs. Evaluation looks at the grade alone.

A model at the limits of its ability fails most episodes. When a group fails as one, the grade teaches nothing, and what
a lucky success did besides succeeding is reinforced with it; a cost of conduct tells such episodes apart. Composer uses
penalties for bad tool use in the same way (arXiv:2603.24477, section 4.2).
"""

from __future__ import annotations

import msgspec

from etude.config import RewardConfig
from etude.records import Episode, Outcome


def with_reward(episode: Episode, config: RewardConfig) -> Episode:
    """The episode with its reward: grade - wasted_turns * (share of its turns that were wasted).

    A turn is wasted if it made no edit that led to a file as it has not been before; the turn that ends the episode is
    wasted only if the whole episode made none. So neither repeating nor doing nothing is free, and giving up at once is
    not either. Timeouts and tampering pay the whole cost: no outcome is ever better than an honest failure. An episode
    lost to infrastructure is returned as it is: it has no reward.
    """
    if episode.outcome is Outcome.INFRA:
        return episode
    turns = episode.metrics.get("turns", 0.0)
    share = episode.metrics.get("wasted_turns", 0.0) / turns if turns else 1.0
    if episode.outcome is not Outcome.SCORED:
        share = 1.0
    return msgspec.structs.replace(
        episode,
        reward=float(episode.passed) - config.wasted_turns * share,
        metrics=episode.metrics | {"wasted_share": share},
    )
