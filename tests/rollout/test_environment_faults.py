"""Whatever users' environments may be instead of what they should be: a sentence before anything starts, or a lost
episode; and boxes that outlast what the agent does to them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import etude
from etude import Environment, EnvironmentEpisode, Task
from etude.config import EvalConfig, RewardConfig, import_object
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.harness.full_tools import FullTools
from etude.harness.loop import EngineModel, Sampling
from etude.records import Budget, Episode, Outcome, ToolCall
from etude.renderers import Renderer
from etude.rollout.environments import environment as environments
from etude.rollout.environments.taskset import Taskset, mix, task_part
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.replay import replay_episode
from etude.rollout.rewards import custom_component, with_reward
from etude.run.evaluate import Measurement, Remote, _open_journal
from tests.helpers.speakers import Scripted, Speaker

BUDGET = Budget(turns=4, tokens=400, context=4000, seconds=60.0)


def made(**own: Any) -> Environment[Any]:
    """An environment of one task, with other attributes."""
    usual = {"tasks": lambda self: [Task(id="a", prompt="?", split="train")], "reward": lambda self, episode: 1.0}
    return type("Mine", (Environment,), usual | own)()


def tasks(*given: Any) -> Any:
    return lambda self: list(given)


async def asynchronous(self: Any, task: Any = None) -> None: ...


class Damaged(Task, frozen=True):
    damage: int = 5  # type: ignore[assignment]


class Clustered(Task, frozen=True):
    @property
    def cluster(self) -> str:
        raise KeyError("x")


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"tasks": [Task(id="a", prompt="?")]}, r"Mine.tasks is \[Task.*, and environments have a method tasks\(\)"),
        ({"tools": [print]}, r"Mine.tools is \[.*, and environments have a method tools\(episode\): rename it"),
        ({"reward": lambda self: 1.0}, r"Mine.reward cannot be called as reward\(episode\)"),
        ({"grade": lambda self, episode: 1.0}, r"Mine.grade cannot be called as grade\(sandbox, task, played\)"),
        ({"limits": etude.Limits()}, r"Mine.limits is Limits\(.*a method limits\(task\)"),
        ({"refusal": "no"}, r"Mine.refusal is 'no', and environments have a method refusal\(compact, sandbox\)"),
        ({"validate": asynchronous}, "Mine.validate is async, and its result is not awaited"),
        ({"name": 5}, "Mine.name is 5, and must be a str"),
        ({"box_tools": "run"}, "Mine.box_tools is 'run', and must be a tuple"),
        ({"pass_mark": float("nan")}, "Mine.pass_mark is nan"),
        ({"repository": 5}, "Mine.repository is 5, and must be a str"),
        ({"tasks": lambda self: sys.exit(3)}, "Mine.tasks raised SystemExit: 3"),
        ({"validate": lambda self, task: sys.exit(3)}, "Mine.validate refuses the task a: SystemExit: 3"),
        ({"tasks": tasks(Task(id=3, prompt="?"))}, "the task 3 cannot be used: ValidationError"),  # type: ignore[arg-type]
        ({"tasks": tasks(Task(id="a", prompt="\ud800"))}, "the task 'a' cannot be used: UnicodeEncodeError"),
        ({"tasks": tasks(Task(id="a", prompt="?", budget=Budget(turns=0)))}, "numbers that are not above 0"),
        ({"tasks": tasks(Task(id="a", prompt="?", budget=5))}, "cannot be used: ValidationError"),  # type: ignore[arg-type]
        ({"tasks": tasks(Damaged(id="a", prompt="?"))}, "damage is 5, and Task has a str of this name"),
        ({"tasks": tasks(Clustered(id="a", prompt="?"))}, "cannot be used: KeyError: 'x'"),
        ({"files": lambda self, task: {"../x": "y"}}, r"files of task a: '\.\./x' is no path of a file, relative to"),
        ({"files": lambda self, task: {"/etc/x": "y"}}, "'/etc/x' is no path of a file"),
        ({"files": lambda self, task: {"a/": "y"}}, "'a/' is no path of a file"),
        ({"files": lambda self, task: {"a": b"y"}}, "files of task a: a is bytes, and files are texts"),
        ({"files": lambda self, task: {"a": "x", "a/b": "y"}}, "files of task a: a is a file and a folder"),
    ],
)
def test_an_environment_of_another_shape_is_one_sentence(own: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        task_part(made(**own))


def test_what_was_no_fault_is_none() -> None:
    part = task_part(made(repository=None, name=None, files=lambda self, task: {"./a//b": "x", "a/c": "y"}))
    assert (part.name, len(part.tasks)) == ("Mine", 1)


def play(environment: Environment[Any], renderer: Renderer, *turns: list[int], sandbox: Any = None) -> Episode:
    async def run() -> Episode:
        taskset = Taskset((task_part(environment),))
        model = EngineModel(Scripted(list(turns)), renderer, Sampling())
        id = EpisodeId(0, 0, 0, 1)
        if sandbox is None:
            async with open_sandbox(workers=1) as boxes:
                return await run_episode(RolloutContext(taskset, boxes, model, BUDGET), taskset.tasks[0], id)
        return await run_episode(RolloutContext(taskset, sandbox, model, BUDGET), taskset.tasks[0], id)

    return asyncio.run(run())


def test_a_cancellation_of_the_users_own_loses_the_episode_alone(hermes: Renderer, hermes_folder: Path) -> None:
    async def reward(self: Any, episode: EnvironmentEpisode) -> float:
        raise asyncio.CancelledError

    episode = play(made(reward=reward), hermes, Speaker(hermes_folder).turn(text="4"), sandbox=object())
    assert episode.outcome is Outcome.INFRA
    assert "CancelledError" in episode.detail


@pytest.mark.parametrize("value", [10**400, 1e300, {"a": 1e308, "b": 1e308}])
def test_rewards_beyond_32_bits_are_refused(hermes: Renderer, hermes_folder: Path, value: Any) -> None:
    say = Speaker(hermes_folder).turn(text="4")
    with pytest.raises(UserError, match="must return a finite number, or a dict of finite numbers by name, of 1e"):
        play(made(reward=lambda self, episode: value), hermes, say, sandbox=object())


@pytest.mark.parametrize("given", [None, print, {"f": print}])
def test_tools_that_are_no_list_are_one_sentence(hermes: Renderer, hermes_folder: Path, given: Any) -> None:
    say = Speaker(hermes_folder).turn(text="4")
    with pytest.raises(UserError, match=r"tools are a list of functions, and .* is none"):
        play(made(tools=lambda self, episode: given), hermes, say, sandbox=object())


def test_a_reward_that_raises_is_a_difference_of_a_replay(hermes: Renderer, hermes_folder: Path) -> None:
    raising: list[bool] = []

    def reward(self: Any, episode: EnvironmentEpisode) -> float:
        return 1 / (not raising)

    environment = made(reward=reward)
    episode = play(environment, hermes, Speaker(hermes_folder).turn(text="4"), sandbox=object())
    taskset, nothing = Taskset((task_part(environment),)), Any
    setting = RolloutContext(taskset, nothing, EngineModel(nothing, hermes, Sampling()), BUDGET)  # type: ignore[arg-type]
    assert asyncio.run(replay_episode(setting, taskset.tasks[0], episode)) == ""
    raising.append(True)
    assert "ZeroDivisionError" in asyncio.run(replay_episode(setting, taskset.tasks[0], episode))


def test_functions_with_names_of_tools_that_only_read_are_called_one_after_the_other() -> None:
    events: list[str] = []

    async def read(name: str) -> str:
        events.append(f"{name} begins")
        await asyncio.sleep(0.05)
        events.append(f"{name} ends")
        return name

    nobody: Any = None
    tools = FullTools(nobody, Task(id="a", prompt="?"), names=("grep", "finish"), functions=(read,))
    calls = [ToolCall(name="read", arguments={"name": name}) for name in "ab"]
    assert asyncio.run(tools.call_all(calls)) == (["a", "b"], False)
    assert events == ["a begins", "a ends", "b begins", "b ends"]


class Checked(Environment[Task]):
    """The agent's program decides how long the check takes."""

    def tasks(self) -> Iterable[Task]:
        return [Task(id="a", prompt="?")]

    def files(self, task: Task) -> dict[str, str]:
        return {"check.sh": "true\n"}

    def tools(self, episode: EnvironmentEpisode) -> list[Any]:
        box = episode.box
        assert box is not None

        async def write(text: str) -> None:
            """Writes the check."""
            await box.write("check.sh", text.encode())

        @etude.tool(seconds=1.0)
        async def check() -> str:
            """Runs the check."""
            return (await box.exec("sh check.sh", 100.0)).output

        async def end() -> None:
            """Ends the box."""
            await box.close()

        return [write, check, end]

    async def reward(self, episode: EnvironmentEpisode) -> float:  # type: ignore[override]
        assert episode.box is not None
        return float((await episode.box.exec("sh check.sh", 100.0)).rc == 0)


def test_a_check_that_the_agent_lets_hang_is_a_reward_of_0(
    hermes: Renderer, hermes_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "CALL_SECONDS", 2.0)
    say = Speaker(hermes_folder)
    hang = say.turn(("write", {"text": "sleep 30"}))
    episode = play(Checked(), hermes, hang, say.turn(text="done"))
    assert (episode.outcome, episode.reward) == (Outcome.SCORED, 0.0), episode.detail


def test_a_tools_own_box_outlasts_its_calls(hermes: Renderer, hermes_folder: Path) -> None:
    say = Speaker(hermes_folder)
    turns = [say.turn((name, arguments)) for name, arguments in (
        ("write", {"text": "sleep 30"}), ("check", {}), ("end", {}), ("write", {"text": "true"}),
    )]  # fmt: skip
    episode = play(Checked(), hermes, *turns, say.turn(text="done"))
    shown = [turn.results[0] for turn in episode.turns if turn.results]
    assert shown[1:3] == [
        "error: check took longer than 1 seconds",
        "error: the box is closed when its episode ends",
    ]
    assert (episode.outcome, episode.reward) == (Outcome.SCORED, 1.0), episode.detail


def test_a_setup_that_misses_a_file_is_a_failure_of_the_environment(hermes: Renderer) -> None:
    class Missing(Checked):
        async def setup(self, episode: EnvironmentEpisode) -> None:
            assert episode.box is not None
            await episode.box.read("none.txt")

    episode = play(Missing(), hermes)
    assert episode.outcome is Outcome.INFRA
    assert "Missing.setup of task a: NotFound" in episode.detail


def test_kept_episodes_are_of_the_same_tasks(tmp_path: Path) -> None:
    model: Any = Remote(etude.run.evaluate.ChatModel("http://x/v1", "m"), None)  # type: ignore[attr-defined]

    def journal(environment: Environment[Any]) -> None:
        measurement = Measurement([environment], EvalConfig(), BUDGET, "train", 0, output=tmp_path)
        _open_journal(measurement, model, mix(measurement.parts(), [1.0]), 0)

    journal(made())
    journal(made())
    for other in (
        made(tasks=tasks(Task(id="a", prompt="another", split="train"))),
        made(files=lambda self, task: {"a": "x"}),
    ):
        with pytest.raises(UserError, match="is of another measurement"):
            journal(other)


def leave(episode: Episode) -> float:
    sys.exit(3)


def test_a_component_or_a_module_that_exits_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hermes: Renderer, hermes_folder: Path
) -> None:
    episode = play(made(), hermes, Speaker(hermes_folder).turn(text="4"), sandbox=object())
    path = f"{__name__}:leave"
    assert custom_component(path)
    with pytest.raises(UserError, match="leave raised SystemExit: 3"):
        with_reward(episode, RewardConfig(custom=(path,)), BUDGET)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "misspelt.py").write_text("import etude\netude.Taskk\nclass Mine: ...\n")
    with pytest.raises(UserError, match="importing leaves raised SystemExit: 3"):
        import_object("leaves:Mine", "tasks.environment")
    with pytest.raises(UserError, match="importing misspelt raised AttributeError: etude has no Taskk"):
        import_object("misspelt:Mine", "tasks.environment")
