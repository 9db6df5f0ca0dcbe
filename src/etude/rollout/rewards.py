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
    """The episode with its reward: grade - refused_edits * (share of its edit calls that were refused).

    An episode without an edit pays the whole cost, as do timeouts and tampering: no outcome is ever better than an
    honest failure. One that was lost to infrastructure is returned as it is: it has no reward.
    """
    if episode.outcome is Outcome.INFRA:
        return episode
    share = refused_share(episode.metrics) if episode.outcome is Outcome.SCORED else 1.0
    return msgspec.structs.replace(
        episode,
        reward=float(episode.passed) - config.refused_edits * share,
        metrics=episode.metrics | {"refused_edits": share},
    )


def refused_share(metrics: dict[str, float]) -> float:
    """Share of edit calls that changed nothing: text not found or put in its own place. Any malformed call counts."""
    refused = metrics.get("edit_errors", 0.0) + metrics.get("malformed", 0.0)
    calls = metrics.get("edits", 0.0) + refused
    return refused / calls if calls else 1.0
