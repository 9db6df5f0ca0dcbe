"""Rewards: the grade less the cost of refused edits, and no outcome better than an honest failure."""

from __future__ import annotations

import pytest

from etude.config import RewardConfig
from etude.records import Episode, Outcome, StopReason
from etude.rollout.rewards import refused_share, with_reward

COST = RewardConfig(refused_edits=0.2)


def episode(passed: bool = False, outcome: Outcome = Outcome.SCORED, **metrics: float) -> Episode:
    return Episode(
        id="1-0-0",
        group_id=1,
        member=0,
        attempt=0,
        task_id="t",
        seed=0,
        outcome=outcome,
        stop_reason=StopReason.FINISHED,
        reward=float(passed),
        passed=passed,
        segments=(),
        turns=(),
        metrics=metrics,
    )


@pytest.mark.parametrize(
    ("metrics", "share"),
    [
        ({"edits": 2.0}, 0.0),
        ({"edits": 1.0, "edit_errors": 2.0, "malformed": 1.0}, 0.75),
        ({"edit_errors": 3.0}, 1.0),
        ({}, 1.0),  # doing nothing is no way to save the cost
    ],
)
def test_share_of_refused_edits(metrics: dict[str, float], share: float) -> None:
    assert refused_share(metrics) == share


def test_reward_is_the_grade_less_the_cost() -> None:
    assert with_reward(episode(passed=True, edits=1.0), COST).reward == 1.0
    assert with_reward(episode(passed=True, edits=1.0, edit_errors=1.0), COST).reward == pytest.approx(0.9)
    assert with_reward(episode(edits=1.0), COST).reward == 0.0
    marked = with_reward(episode(edits=1.0, edit_errors=3.0), COST)
    assert marked.reward == pytest.approx(-0.15)
    assert marked.metrics["refused_edits"] == 0.75
    assert not marked.passed


def test_without_a_cost_the_reward_is_the_grade() -> None:
    assert with_reward(episode(passed=True, edits=1.0, edit_errors=5.0), RewardConfig()).reward == 1.0


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.TAMPERED])
def test_no_outcome_is_better_than_failing(outcome: Outcome) -> None:
    worst = with_reward(episode(edit_errors=9.0), COST)
    assert with_reward(episode(edits=4.0, outcome=outcome), COST).reward == worst.reward


def test_an_episode_lost_to_infrastructure_has_no_reward() -> None:
    lost = episode(outcome=Outcome.INFRA)
    assert with_reward(lost, COST) is lost
