"""Rewards: the grade less the cost of wasted turns, and no outcome better than an honest failure."""

from __future__ import annotations

import pytest

from etude.config import RewardConfig
from etude.records import Episode, Outcome, StopReason
from etude.rollout.rewards import with_reward

COST = RewardConfig(wasted_turns=0.2)


def episode(turns: float, wasted: float, *, passed: bool = False, outcome: Outcome = Outcome.SCORED) -> Episode:
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
        metrics={"turns": turns, "wasted_turns": wasted},
    )


@pytest.mark.parametrize(
    ("turns", "wasted", "passed", "reward"),
    [(2, 0, True, 1.0), (4, 1, True, 0.95), (4, 4, False, -0.2), (4, 0, False, 0.0), (0, 0, False, -0.2)],
)
def test_reward_is_the_grade_less_the_cost(turns: int, wasted: int, passed: bool, reward: float) -> None:
    rewarded = with_reward(episode(turns, wasted, passed=passed), COST)
    assert rewarded.reward == pytest.approx(reward)
    assert rewarded.passed == passed


def test_without_a_cost_the_reward_is_the_grade() -> None:
    assert with_reward(episode(4, 4, passed=True), RewardConfig()).reward == 1.0


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.TAMPERED])
def test_no_outcome_is_better_than_failing(outcome: Outcome) -> None:
    assert with_reward(episode(4, 0, outcome=outcome), COST).reward == with_reward(episode(4, 4), COST).reward


def test_an_episode_lost_to_infrastructure_has_no_reward() -> None:
    lost = episode(4, 4, outcome=Outcome.INFRA)
    assert with_reward(lost, COST) is lost
