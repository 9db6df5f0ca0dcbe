"""Environments written in Python: their episodes, whatever is wrong with them, and the worked example."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude import Environment, EnvironmentEpisode, Task
from etude.config import RewardConfig, RLConfig, validate
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.harness.loop import EngineModel, Sampling
from etude.records import Budget, Episode, Outcome, StopReason, decode, encode
from etude.renderers import Renderer
from etude.rollout.environments import environment as environments
from etude.rollout.environments.taskset import Taskset
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.replay import replay_episode
from etude.rollout.rewards import custom_component, with_reward
from etude.run import inputs, parts
from tests.helpers.speakers import Scripted, Speaker

REVERSE = "recipes.environments.reverse_text:ReverseText"
BUDGET = Budget(turns=6, tokens=400, context=2000, seconds=60.0)


class Sum(Task, frozen=True, kw_only=True):
    answer: str = ""


class Sums(Environment[Sum]):
    """Adds numbers, with a tool that does; everything about it can be made wrong."""

    def __init__(self, reward: Callable[[EnvironmentEpisode[Sum]], Any] | None = None, tasks: Any = None) -> None:
        self.rewarded = reward or (lambda episode: float(episode.answer == episode.task.answer))
        self.given = tasks

    def tasks(self) -> list[Sum]:
        if self.given is not None:
            return self.given
        return [Sum(id=f"sum-{n}", prompt=f"{n} + {n}?", answer=str(2 * n)) for n in range(4)]

    def setup(self, episode: EnvironmentEpisode) -> None:
        episode.state["calls"] = 0

    def tools(self, episode: EnvironmentEpisode) -> list[Callable[..., Any]]:
        def add(first: int, second: int) -> int:
            """The sum of two numbers."""
            episode.state["calls"] += 1
            return first + second

        async def fail(reason: str) -> None:
            raise KeyError(reason)

        return [add, fail]

    def reward(self, episode: EnvironmentEpisode) -> Any:
        return self.rewarded(episode)


class Filed(Environment):
    """A task with a file in a box, and a built-in tool."""

    box_tools = ("run",)

    def tasks(self) -> list[Task]:
        return [Task(id=name, prompt="Append a line.") for name in ("x", "y")]

    def files(self, task: Task) -> dict[str, str]:
        return {"a.txt": "one\n"}

    async def reward(self, episode: EnvironmentEpisode) -> float:  # type: ignore[override]
        assert episode.box is not None
        return (await episode.box.read("a.txt")).count(b"\n") / 2


def config(environment: str = f"{__name__}:Sums", **tables: Any) -> RLConfig:
    tasks = {"environment": environment, "arguments": tables.pop("arguments", {})}
    return RLConfig.model_validate({"tasks": tasks} | tables)


def tasks_of(config: RLConfig, renderer: Renderer) -> Taskset:
    """The tasks of a run, after the checks before it."""
    part = parts.part_of(config.tasks, renderer, config.rollout.budget())
    inputs._check_splits(part, config)
    return Taskset((part,))


def context(
    renderer: Renderer,
    policy: Any,
    sandbox: Any = None,
    environment: str = f"{__name__}:Sums",
    **given: Any,
) -> RolloutContext:
    taskset = tasks_of(config(environment, arguments=given), renderer)
    return RolloutContext(taskset, sandbox, EngineModel(policy, renderer, Sampling()), BUDGET, reward=RewardConfig())


def play(context: RolloutContext, number: int = 0) -> Episode:
    task = context.taskset.tasks[number]
    return asyncio.run(run_episode(context, task, EpisodeId(group_id=3, member=1, attempt=0, seed=5)))


@pytest.fixture(params=["compact", "hermes"])
def dialect(request: pytest.FixtureRequest) -> tuple[Renderer, Speaker]:
    return request.getfixturevalue(request.param), Speaker(request.getfixturevalue(f"{request.param}_folder"))


def turns(speaker: Speaker, *calls: dict[str, Any], answer: str) -> list[list[int]]:
    """A turn with each call, in the tokens of a dialect, and an answer."""
    return [*(speaker.turn((call.pop("tool"), call)) for call in calls), speaker.turn(text=answer)]


def test_an_episode_calls_tools_and_earns_its_reward(dialect: tuple[Renderer, Speaker]) -> None:
    renderer, speaker = dialect
    policy = Scripted(
        turns(speaker, {"tool": "add", "first": 2, "second": 2}, {"tool": "fail", "reason": "x"}, answer="4")
    )
    rewarded: list[EnvironmentEpisode] = []

    def reward(episode: EnvironmentEpisode) -> dict[str, float]:
        rewarded.append(episode)
        return {"right": float(episode.answer == episode.task.answer), "polite": 0.25}

    episode = play(context(renderer, policy, reward=reward), 2)
    assert (episode.outcome, episode.stop_reason, episode.passed) == (Outcome.SCORED, StopReason.FINISHED, True)
    assert [turn.results for turn in episode.turns] == [("4",), ("error: KeyError: 'x'",), ()]
    assert episode.reward == episode.metrics["reward/grade"] == episode.grade == 1.25
    assert (episode.metrics["environment/right"], episode.metrics["environment/polite"]) == (1.0, 0.25)
    assert episode.metrics["calls/add"] == 1
    assert (rewarded[0].answer, rewarded[0].state, rewarded[0].seed) == ("4", {"calls": 1}, 5)
    assert rewarded[0].turns == episode.turns
    assert decode(encode(episode), Episode) == episode
    assert "The sum of two numbers." in speaker.tokenizer.decode(policy.prompts[0])
    again = context(renderer, None)
    assert asyncio.run(replay_episode(again, again.taskset.tasks[2], episode)) == ""


def test_calls_that_do_not_fit_a_tool_are_malformed(dialect: tuple[Renderer, Speaker]) -> None:
    renderer, speaker = dialect
    calls = [
        {"tool": "add", "first": 2},
        {"tool": "add", "first": "two", "second": 2},
        {"tool": "subtract", "first": 2},
    ]
    episode = play(context(renderer, Scripted(turns(speaker, *calls, answer="0"))))
    results = [turn.results[0] for turn in episode.turns[:3]]
    assert all(result.startswith("error: ") for result in results)
    assert episode.metrics["malformed"] == 3
    assert episode.reward == 1.0, "0 + 0"


class Edited(Sums):
    """Its own `edit` has the name and the parameters of the compact dialect's."""

    def tools(self, episode: EnvironmentEpisode) -> list[Callable[..., Any]]:
        def edit(old: str, new: str) -> str:
            """Replaces a text."""
            episode.state["edit"] = (old, new)
            return "ok"

        def undo(steps: int) -> str:
            """Takes edits back."""
            return ""

        return [edit, *([undo] if self.given is not None else [])]


def test_a_tool_may_take_the_place_of_one_that_the_model_knows(dialect: tuple[Renderer, Speaker]) -> None:
    renderer, speaker = dialect
    edited: list[Any] = []
    setting = context(
        renderer, Scripted(turns(speaker, {"tool": "edit", "old": "a", "new": "b"}, answer="")),
        environment=f"{__name__}:Edited", reward=lambda episode: edited.append(episode.state["edit"]) or 1.0,
    )  # fmt: skip
    episode = play(setting)
    assert episode.turns[0].results == ("ok",)
    assert (edited, episode.metrics.get("malformed", 0)) == ([("a", "b")], 0)


def test_such_a_tool_with_other_parameters_is_refused(compact: Renderer, compact_folder: Path) -> None:
    given = [Sum(id="a", prompt="a"), Sum(id="b", prompt="b")]
    policy = Scripted([Speaker(compact_folder).turn(text="")])
    setting = context(compact, policy, environment=f"{__name__}:Edited", tasks=given)
    with pytest.raises(UserError, match="the tool undo of the environment must take the parameters"):
        play(setting)


def test_a_task_with_files_has_a_box(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    policy = Scripted(turns(speaker, {"tool": "run", "command": "echo two >> a.txt; cat a.txt"}, answer="Done."))

    async def attempt() -> Episode:
        async with open_sandbox(workers=1) as sandbox:
            setting = context(hermes, policy, sandbox, f"{__name__}:Filed")
            return await run_episode(setting, setting.taskset.tasks[0], EpisodeId(0, 0, 0, 1))

    episode = asyncio.run(attempt())
    assert episode.turns[0].results == ("exit code 0\none\ntwo",)
    assert (episode.outcome, episode.reward) == (Outcome.SCORED, 1.0)


def test_an_exception_in_the_reward_loses_the_episode_and_many_end_the_run(
    compact: Renderer, compact_folder: Path
) -> None:
    def reward(episode: EnvironmentEpisode) -> float:
        return 1 / episode.state["calls"]

    say = Speaker(compact_folder)
    setting = context(compact, Scripted(lambda _: say.turn(text="4")), reward=reward)
    episode = play(setting)
    assert (episode.outcome, episode.stop_reason, episode.segments) == (Outcome.INFRA, StopReason.ERROR, ())
    assert "Sums.reward of task sum-0: ZeroDivisionError: division by zero" in episode.detail
    assert "test_environment.py:" in episode.detail
    for _ in range(environments.MAX_FAILURES - 2):
        assert play(setting).outcome is Outcome.INFRA
    with pytest.raises(UserError, match=r"10 failures in a row, the last of Sums.reward of task sum-0: ZeroDivision"):
        play(setting)


def test_a_reward_that_does_not_end_is_given_up(
    compact: Renderer, compact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "CALL_SECONDS", 0.2)
    say = Speaker(compact_folder)
    setting = context(compact, Scripted([say.turn(text="4")]), reward=lambda _: time.sleep(30))
    episode = play(setting)
    assert episode.outcome is Outcome.INFRA
    assert "no end in" in episode.detail


@pytest.mark.parametrize("value", [None, "1.0", {"right": "much"}, float("nan"), [1.0]])
def test_a_reward_of_the_wrong_type_is_a_sentence(compact: Renderer, compact_folder: Path, value: Any) -> None:
    policy = Scripted([Speaker(compact_folder).turn(text="4")])
    with pytest.raises(
        UserError, match=r"Sums.reward returned .* for task sum-0; it must return a finite number, or a dict"
    ):
        play(context(compact, policy, reward=lambda _: value))


def a_task(id: str = "a", **fields: Any) -> Sum:
    return Sum(id=id, **({"prompt": "?"} | fields))


@pytest.mark.parametrize(
    ("environment", "arguments", "why"),
    [
        ("nowhere:Sums", {}, "tasks.environment: nowhere:Sums: No module named 'nowhere'; run etude in the folder"),
        ("Sums", {}, "tasks.environment: 'Sums' is not an import path; write \"module:name\""),
        (f"{__name__}:Products", {}, "test_environment has no Products"),
        (f"{__name__}:a_task", {}, "is no subclass of etude.Environment"),
        (
            f"{__name__}:Sums",
            {"size": 3},
            "cannot be made of tasks.arguments: TypeError: .*unexpected keyword argument",
        ),
        (f"{__name__}:Sums", {"tasks": []}, "Sums.tasks gives no tasks"),
        (f"{__name__}:Sums", {"tasks": ["a"]}, "Sums.tasks gives 'a', which is no etude.Task"),
        (f"{__name__}:Sums", {"tasks": 3}, "Sums.tasks raised TypeError"),
        (f"{__name__}:Sums", {"tasks": [a_task(), a_task()]}, "two tasks have the id 'a'"),
        (f"{__name__}:Sums", {"tasks": [a_task("a/b")]}, "the id 'a/b' is not 1 to 100 letters"),
        (f"{__name__}:Sums", {"tasks": [a_task(split="test")]}, "the split of a is 'test', neither train nor heldout"),
        (f"{__name__}:Sums", {"tasks": [a_task(split="train")]}, "no held-out task"),
        (f"{__name__}:Sums", {"tasks": [a_task(split="heldout")]}, "no task for training"),
        (
            f"{__name__}:Sums",
            {"tasks": [a_task(prompt="long " * 2000), a_task("b")]},
            "task a has .* tokens, and rollout.context is",
        ),
        (REVERSE, {"count": 3, "length": 0}, "ReverseText.validate refuses the task reverse-0: ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_an_environment_is_one_sentence(
    compact: Renderer, environment: str, arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why) as raised:
        tasks_of(config(environment, arguments=arguments), compact)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "table",
    [
        {"rollout": {"documents": True}},
        {"reward": {"refused_edits": 0.1}},
    ],
)
def test_options_that_need_a_repository_are_refused(table: dict[str, Any]) -> None:
    data = {"tasks": {"environment": REVERSE}} | table
    with pytest.raises(UserError, match=r"episodes of tasks.environment have no (rollout|reward)\.\w+: drop one"):
        validate(RLConfig, data, "run.toml")


def test_an_outside_agent_needs_a_box(compact: Renderer) -> None:
    table = {"rollout": {"agent": {"command": "x"}}}
    without, filed = config(REVERSE, **table), config(f"{__name__}:Filed", **table)
    with pytest.raises(UserError, match=r"rollout.agent plays in boxes, and tasks of ReverseText have none: give them"):
        inputs._check_agent(tasks_of(without, compact).parts[0], without)
    inputs._check_agent(tasks_of(filed, compact).parts[0], filed)


def test_tasks_without_a_split_are_divided_by_their_ids(compact: Renderer) -> None:
    taskset = tasks_of(config(REVERSE, arguments={"count": 40}), compact)
    assert (len(taskset.split("train")), len(taskset.split("heldout"))) == (30, 10)
    more = tasks_of(config(REVERSE, arguments={"count": 40, "seed": 3}), compact)
    assert {task.id for task in more.split("heldout")} == {task.id for task in taskset.split("heldout")}
    task = taskset.tasks[0]
    assert task.answer not in task.prompt
    assert taskset.by_id[task.id] is task
    with pytest.raises(UserError, match="has no task reverse-40 any more"):
        taskset.by_id["reverse-40"]


def test_the_worked_example_spells_words(hermes: Renderer, hermes_folder: Path) -> None:
    setting = context(hermes, None, environment=REVERSE)
    task = setting.taskset.tasks[0]
    word, right = task.prompt.removeprefix("Reverse: "), task.answer
    say = Speaker(hermes_folder)
    for answer, reward in ((right, 1.0), ("", 0.0), ("xxxx", 0.0), (right + right, 0.2 + 0.4)):
        policy = Scripted(turns(say, {"tool": "spell", "word": word}, answer=answer))
        episode = play(context(hermes, policy, environment=REVERSE))
        assert episode.turns[0].results == (" ".join(word),)
        assert episode.reward == pytest.approx(reward)
        assert episode.passed is (answer == right)


def brevity(episode: Episode) -> float:
    return -0.01 * episode.sampled_tokens


def test_a_reward_component_is_named_by_its_import_path(compact: Renderer, compact_folder: Path) -> None:
    say = Speaker(compact_folder).turn(text="0")
    episode = play(context(compact, Scripted([say])))
    shorter = with_reward(episode, RewardConfig(custom=f"{__name__}:brevity"), BUDGET)
    assert shorter.metrics["reward/custom/brevity"] == pytest.approx(-0.01 * len(say))
    assert shorter.reward == pytest.approx(1.0 - 0.01 * len(say))
    with pytest.raises(UserError, match=r"reward.custom: .*:BUDGET is no function"):
        custom_component(f"{__name__}:BUDGET")
    with pytest.raises(UserError, match=r"reward.custom: .*:a_task raised"):
        with_reward(episode, RewardConfig(custom=f"{__name__}:a_task"), BUDGET)


def test_a_file_that_the_agent_removed_is_no_reward(hermes: Renderer, hermes_folder: Path) -> None:
    policy = Scripted(turns(Speaker(hermes_folder), {"tool": "run", "command": "rm a.txt"}, answer="Done."))

    async def attempt() -> Episode:
        async with open_sandbox(workers=1) as sandbox:
            setting = context(hermes, policy, sandbox, f"{__name__}:Filed")
            return await run_episode(setting, setting.taskset.tasks[0], EpisodeId(0, 0, 0, 1))

    episode = asyncio.run(attempt())
    assert (episode.outcome, episode.reward) == (Outcome.SCORED, 0.0)
    assert "no such file" in episode.detail.lower() or "unreadable" in episode.detail
