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
    """The episode with its reward: grade - wasted_edits * (share of its edit calls that tried nothing new).

    Timeouts and tampering pay the whole cost, so no outcome is ever better than an honest failure. An episode lost to
    infrastructure is returned as it is: it has no reward.
    """
    if episode.outcome is Outcome.INFRA:
        return episode
    share = wasted_share(episode.metrics) if episode.outcome is Outcome.SCORED else 1.0
    return msgspec.structs.replace(
        episode,
        reward=float(episode.passed) - config.wasted_edits * share,
        metrics=episode.metrics | {"wasted_edits": share},
    )


def wasted_share(metrics: dict[str, float]) -> float:
    """Share of edit calls that were refused (malformed, text not found, nothing changed) or led to a file as before.

    1 if there was no edit.
    """
    refused = metrics.get("edit_errors", 0.0) + metrics.get("malformed", 0.0)
    calls = metrics.get("edits", 0.0) + refused
    return (refused + metrics.get("repeats", 0.0)) / calls if calls else 1.0
