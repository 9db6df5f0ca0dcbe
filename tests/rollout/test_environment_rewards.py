"""Rewards of users: methods marked as parts of an environment's reward, and components by import path."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
from etude import Environment, EnvironmentEpisode, Task
from etude.config import RewardConfig, RLConfig, validate
from etude.errors import UserError
from etude.harness.loop import EngineModel, Sampling
from etude.records import Budget, Episode, Outcome
from etude.renderers import Renderer
from etude.rollout.environments.taskset import Taskset, task_part
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.rewards import with_reward
from tests.helpers.speakers import Scripted, Speaker

BUDGET = Budget(turns=6, tokens=400, context=2000, seconds=60.0)


class Asked(Environment[Task]):
    def tasks(self) -> Iterable[Task]:
        return [Task(id="a", prompt="Say yes.", split="train")]


class Parts(Asked):
    """Parts of every kind: with and without a weight, awaited, a bool and a number of numpy."""

    pass_mark = 1.5

    @etude.reward
    def right(self, episode: EnvironmentEpisode[Task]) -> bool:
        return episode.answer == "yes"

    @etude.reward(weight=0.5)
    async def short(self, episode: EnvironmentEpisode[Task]) -> float:
        await asyncio.sleep(0)
        return 2.0 * (len(episode.answer) < 10)

    @etude.reward(weight=-0.25)
    def loud(self, episode: EnvironmentEpisode[Task]) -> Any:
        return np.float32(episode.answer.isupper())

    def unmarked(self, episode: EnvironmentEpisode[Task]) -> float:
        raise AssertionError(episode)


class Fewer(Parts):
    """One part is replaced, and one is none any more."""

    @etude.reward(weight=3.0)
    def right(self, episode: EnvironmentEpisode[Task]) -> bool:
        return bool(episode.answer)

    def loud(self, episode: EnvironmentEpisode[Task]) -> float:
        raise AssertionError(episode)


class Whole(Parts):
    """Its own method takes the place of the parts, and may use them."""

    async def reward(self, episode: EnvironmentEpisode[Task]) -> dict[str, float]:
        parts: Any = await super().reward(episode)  # type: ignore[misc]
        return {"most": max(parts.values())}


def play(environment: Environment[Any], renderer: Renderer, folder: Path, said: str) -> Episode:
    policy, nobody = Scripted([Speaker(folder).turn(text=said)]), None
    taskset = Taskset((task_part(environment),))
    model = EngineModel(policy, renderer, Sampling())
    setting = RolloutContext(taskset, nobody, model, BUDGET, reward=RewardConfig())  # type: ignore[arg-type]
    return asyncio.run(run_episode(setting, taskset.tasks[0], EpisodeId(0, 0, 0, 1)))


@pytest.mark.parametrize(
    ("environment", "said", "parts"),
    [
        (Parts(), "yes", {"right": 1.0, "short": 1.0, "loud": 0.0}),
        (Parts(), "YES", {"right": 0.0, "short": 1.0, "loud": -0.25}),
        (Parts(), "no, " * 10, {"right": 0.0, "short": 0.0, "loud": 0.0}),
        (Fewer(), "NO", {"right": 3.0, "short": 1.0}),
        (Whole(), "NO", {"most": 1.0}),
    ],
)
def test_the_reward_is_the_sum_of_the_marked_methods(
    compact: Renderer, compact_folder: Path, environment: Environment[Task], said: str, parts: dict[str, float]
) -> None:
    episode = play(environment, compact, compact_folder, said)
    assert episode.outcome is Outcome.SCORED, episode.detail
    found = {name: value for name, value in episode.metrics.items() if name.startswith("environment/")}
    assert found == {f"environment/{name}": value for name, value in parts.items()}
    assert episode.reward == episode.grade == episode.metrics["reward/grade"] == sum(parts.values())
    assert episode.passed is (sum(parts.values()) >= 1.5)


@pytest.mark.parametrize("value", [None, "1.0", {"right": 1.0}, float("nan"), [1.0]])
def test_a_part_that_is_no_number_is_one_sentence(compact: Renderer, compact_folder: Path, value: Any) -> None:
    class Wrong(Parts):
        @etude.reward(weight=2.0)
        def right(self, episode: EnvironmentEpisode[Task]) -> Any:
            return value

    with pytest.raises(UserError, match=r"Wrong.reward returned .*'right': .* for task a; it must return a finite"):
        play(Wrong(), compact, compact_folder, "yes")


def test_a_class_without_a_reward_is_refused() -> None:
    with pytest.raises(UserError, match="Asked has no reward: write the method `reward`, or mark methods as @reward"):
        task_part(Asked())

    class Unmarked(Parts):
        right = short = loud = Parts.unmarked

    with pytest.raises(UserError, match="Unmarked has no reward"):
        task_part(Unmarked())


@pytest.mark.parametrize("taken", ["reward", "grade", "files", "name"])
def test_a_part_does_not_take_the_place_of_another_method(taken: str) -> None:
    kind = type("Mine", (Asked,), {taken: etude.reward(weight=2.0)(lambda self, episode: 1.0)})
    with pytest.raises(UserError, match=rf"Mine\.{taken} is marked as @reward, and environments have another: rename"):
        task_part(kind())


def brevity(episode: Episode) -> float:
    return -0.01 * episode.sampled_tokens


def politeness(episode: Episode) -> int:
    return 2 * ("please" in episode.turns[-1].text)


def test_several_components_are_recorded_each_by_its_name(compact: Renderer, compact_folder: Path) -> None:
    episode = play(Parts(), compact, compact_folder, "yes please")
    both = RewardConfig(custom=(f"{__name__}:brevity", f"{__name__}:politeness"))
    rewarded = with_reward(episode, both, BUDGET)
    cost = -0.01 * episode.sampled_tokens
    custom = {name: value for name, value in rewarded.metrics.items() if name.startswith("reward/custom")}
    assert custom == {"reward/custom/brevity": pytest.approx(cost), "reward/custom/politeness": 2.0}
    assert rewarded.grade == episode.grade == rewarded.metrics["reward/grade"]
    assert rewarded.reward == pytest.approx(episode.reward + cost + 2.0)


def test_components_are_configured_as_one_or_a_list() -> None:
    def configured(custom: Any) -> tuple[str, ...]:
        return validate(RLConfig, {"tasks": {"environment": "m:E"}, "reward": {"custom": custom}}, "x").reward.custom

    assert configured("m:f") == ("m:f",)
    assert configured(["m:f", "m:g"]) == ("m:f", "m:g")
    assert RewardConfig().custom == ()
    with pytest.raises(UserError, match=r"reward.custom.* two functions called f, .* metrics: rename one"):
        configured(["m:f", "n:f"])
