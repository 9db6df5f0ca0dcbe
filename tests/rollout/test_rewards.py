"""Rewards: the grade less the cost of refused edits, and no outcome better than an honest failure."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from etude.config import LengthCost, RewardConfig
from etude.records import Budget, Episode, Outcome, Segment, StopReason, ToolCall, Turn
from etude.rollout.rewards import effort, length_cost, refused_share, with_reward

COST = RewardConfig(refused_edits=0.2)
BUDGET = Budget(turns=4, tokens=100)


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
        grade=float(passed),
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
    assert with_reward(episode(passed=True, edits=1.0), COST, BUDGET).reward == 1.0
    assert with_reward(episode(passed=True, edits=1.0, edit_errors=1.0), COST, BUDGET).reward == pytest.approx(0.9)
    assert with_reward(episode(edits=1.0), COST, BUDGET).reward == 0.0
    marked = with_reward(episode(edits=1.0, edit_errors=3.0), COST, BUDGET)
    assert marked.reward == pytest.approx(-0.15)
    assert marked.metrics["refused_edits"] == 0.75
    assert not marked.passed


@pytest.mark.parametrize("grade", [0.5, -0.25, 1.75])
def test_a_grade_between_pass_and_failure_is_kept(grade: float) -> None:
    """Passed or not: foreign tasks, applied edits and environments have finer grades."""
    for passed in (True, False):
        graded = msgspec.structs.replace(episode(passed=passed, edits=1.0, edit_errors=1.0), grade=grade)
        rewarded = with_reward(graded, COST, BUDGET)
        assert rewarded.grade == rewarded.metrics["reward/grade"] == grade
        assert rewarded.reward == pytest.approx(grade - 0.1)
        assert rewarded.passed is passed
        tampered = with_reward(msgspec.structs.replace(graded, outcome=Outcome.TAMPERED), COST, BUDGET)
        assert (tampered.grade, tampered.reward) == (0.0, -0.2)


def test_without_a_cost_the_reward_is_the_grade() -> None:
    assert with_reward(episode(passed=True, edits=1.0, edit_errors=5.0), RewardConfig(), BUDGET).reward == 1.0


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.TAMPERED])
def test_no_outcome_is_better_than_failing(outcome: Outcome) -> None:
    worst = with_reward(episode(edit_errors=9.0), COST, BUDGET)
    assert with_reward(episode(edits=4.0, outcome=outcome), COST, BUDGET).reward == worst.reward


def test_an_episode_lost_to_infrastructure_has_no_reward() -> None:
    lost = episode(outcome=Outcome.INFRA)
    assert with_reward(lost, COST, BUDGET) is lost


def played(*sizes: int, texts: tuple[str, ...], output: int = 5, passed: bool = False) -> Episode:
    """An episode of turns with so many sampled tokens each; every turn but the last calls a tool."""
    mask: list[int] = [0] * 10
    starts: list[int] = []
    for i, size in enumerate(sizes):
        starts.append(len(mask))
        mask += [1] * size + [0] * (output if i < len(sizes) - 1 else 0)
    n = len(mask)
    segment = Segment(
        ids=np.zeros(n, "<i4").tobytes(),
        mask=np.array(mask, "u1").tobytes(),
        logprobs=np.zeros(n, "<f4").tobytes(),
        versions=np.zeros(n, "<i4").tobytes(),
        prompt_length=10,
        turn_starts=tuple(starts),
    )
    call = ToolCall(name="test", arguments={})
    turns = tuple(
        Turn(text=text, calls=(call,) if i < len(sizes) - 1 else (), results=(), seconds_model=0.0, seconds_tools=0.0)
        for i, text in enumerate(texts)
    )
    return msgspec.structs.replace(episode(passed=passed, edits=1.0), segments=(segment,), turns=turns)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_length_cost_is_concave_increasing_and_starts_with_slope_one(q: float) -> None:
    costs = [length_cost(float(x), LengthCost(k=0.05, q=q)) for x in range(0, 400, 10)]
    steps = [b - a for a, b in pairwise(costs)]
    assert costs[0] == 0.0
    assert all(step > 0 for step in steps)
    assert all(b <= a + 1e-12 for a, b in pairwise(steps))
    assert length_cost(1e-6, LengthCost(k=0.05, q=q)) == pytest.approx(1e-6)


def test_length_cost_is_the_papers_formula_and_has_its_limit() -> None:
    k, x = 0.05, 130.0
    assert length_cost(x, LengthCost(k=k, q=0.5)) == pytest.approx((math.sqrt(1 + k * x) - 1) / (k * 0.5))
    assert length_cost(x, LengthCost(k=k, q=2.0)) == pytest.approx((1 / (1 + k * x) - 1) / (-k))
    assert length_cost(x, LengthCost(k=k, q=1.0)) == pytest.approx(math.log(1 + k * x) / k)
    near = length_cost(x, LengthCost(k=k, q=1 + 1e-7))
    assert near == pytest.approx(length_cost(x, LengthCost(k=k, q=1.0)), rel=1e-5)


def test_effort_weighs_tokens_by_kind_calls_and_turns() -> None:
    """Two turns of 20 and 8 tokens; three quarters of the first one's text are thought."""
    one = played(20, 8, texts=("<think>ab</think>12345", "done"))
    share = len("<think>ab</think>") / len(one.turns[0].text)
    weights = LengthCost(thinking=1, calling=10, final=100, output=1000, calls=1e5, turns=1e6)
    expected = 20 * (share + 10 * (1 - share)) + 800 + 5000 + 1e5 + 2e6
    assert effort(one, weights) == pytest.approx(expected)


def test_a_turn_whose_thought_was_closed_is_one_turn_of_effort() -> None:
    """Its two parts count as a turn, and as the tokens of the call behind; the thought may open in the prompt."""
    weights = LengthCost(thinking=1, calling=10, final=100, output=0, calls=0, turns=1e6)
    one = played(20, 8, 5, texts=("so so\n</think>\n\n", "call", "done"))
    first, *rest = one.turns
    one = msgspec.structs.replace(one, turns=(msgspec.structs.replace(first, continued=True, calls=()), *rest))
    share = len("so so\n</think>") / len(first.text)
    expected = 20 * (share + 10 * (1 - share)) + 80 + 500 + 2e6
    assert effort(one, weights) == pytest.approx(expected)


def test_components_are_recorded_and_add_up() -> None:
    config = RewardConfig(
        refused_edits=0.2,
        length=LengthCost(weight=1e-3),
        overlong=20,
        behaviour={"untested": 0.1, "malformed": 0.05, "unfinished": 0.3},
    )
    one = with_reward(played(60, 30, texts=("x", "y"), passed=True), config, BUDGET)
    parts = {name.removeprefix("reward/"): v for name, v in one.metrics.items() if name.startswith("reward/")}
    assert parts == {
        "grade": 1.0,
        "refused_edits": 0.0,
        "length": pytest.approx(-1e-3 * math.log(1.9) / 0.01),
        "overlong": pytest.approx(-0.5),
        "behaviour": pytest.approx(-0.1),
    }
    assert one.reward == pytest.approx(sum(parts.values()))


def test_habits_are_capped_and_no_outcome_is_better_than_the_worst_failure() -> None:
    config = RewardConfig(behaviour={"edit_errors": 0.2}, overlong=20, length=LengthCost(weight=1e-3, turns=1.0))
    worst = played(50, 30, 20, texts=("a", "b", "c"))
    worst = msgspec.structs.replace(worst, metrics={"edit_errors": 9.0})
    failed = with_reward(worst, config, BUDGET)
    assert failed.metrics["reward/behaviour"] == -0.5
    for outcome in (Outcome.TIMEOUT, Outcome.TAMPERED):
        other = msgspec.structs.replace(played(1, texts=("a",)), outcome=outcome)
        assert with_reward(other, config, BUDGET).reward <= failed.reward
