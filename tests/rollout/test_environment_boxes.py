"""Environments with boxes: a repository and files, built-in tools, functions in the controller and inside of the box,
and mixtures with coding tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import etude
from etude import Box, Environment, EnvironmentEpisode, Task
from etude.config import EvalConfig, RewardConfig
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.harness.loop import EngineModel, Sampling
from etude.records import Budget, Episode, Outcome, StopReason, decode, encode
from etude.renderers import Renderer
from etude.rollout.curriculum import MixedCurriculum
from etude.rollout.environments.code import CodeTasks, ForeignTasks, dataset_part
from etude.rollout.environments.taskset import Taskset, mix, task_part
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.group_audit import audit_group
from etude.run.evaluate import Measurement
from etude.run.sources import curriculum_of
from etude.tasks.dataset import Dataset
from etude.tasks.foreign import build as foreign
from tests.helpers import boxed_functions as boxed
from tests.helpers.foreign import write
from tests.helpers.speakers import PATH, SOURCE, Scripted, Speaker

BUDGET = Budget(turns=9, tokens=2000, context=8000, seconds=60.0)
FIX = f"sed -i 's/- 3/* 3/' {PATH}"
ASK = "cd src && python3 -c 'import shop; print(shop.Shop().price(4))'"


class Price(Task, frozen=True, kw_only=True):
    right: int


class Shop(Environment[Price]):
    """The shop of the harness's tests, whose price is wrong. An episode has functions of every kind."""

    system = "You repair a shop."
    box_tools = ("run", "read", "edit")

    def __init__(self, folder: str | Path) -> None:
        self.repository = folder

    def tasks(self) -> Iterable[Price]:
        return [Price(id=name, prompt=f"Fix `price` in {PATH}", right=12) for name in ("first", "second")]

    def files(self, task: Price) -> dict[str, str]:
        return {"notes.txt": f"the task {task.id}\n"}

    async def setup(self, episode: EnvironmentEpisode[Price]) -> None:
        assert episode.box is not None
        await episode.box.write("setup.txt", b"before the first turn\n")

    def tools(self, episode: EnvironmentEpisode[Price]) -> list[Callable[..., Any]]:
        async def notes(box: Box, task: Price, loud: bool = False) -> str:
            """The notes of the task."""
            text = (await box.read("notes.txt")).decode().strip()
            episode.state["read"] = True
            return f"{text.upper() if loud else text}, {task.right - 3} more than 3"

        return [notes, boxed.lines_with, boxed.price]

    @etude.reward
    async def repaired(self, episode: EnvironmentEpisode[Price]) -> bool:
        assert episode.box is not None
        done = await episode.box.exec(ASK, 20.0)
        return done.output.strip() == str(episode.task.right)

    @etude.reward(weight=0.25)
    def informed(self, episode: EnvironmentEpisode[Price]) -> bool:
        return episode.state.get("read", False)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The folder of the repository; the wrong line is in it."""
    (tmp_path / "shop/src").mkdir(parents=True)
    (tmp_path / "shop" / PATH).write_text(SOURCE)
    return tmp_path / "shop"


def play(taskset: Taskset, renderer: Renderer, *scripts: tuple[str, list[list[int]]]) -> list[Episode]:
    """One episode of each named task, with the turns of its script, in a real sandbox."""

    async def run() -> list[Episode]:
        async with open_sandbox(workers=1) as sandbox:
            episodes: list[Episode] = []
            for id, turns in scripts:
                model = EngineModel(Scripted(turns), renderer, Sampling())
                setting = RolloutContext(taskset, sandbox, model, BUDGET, reward=RewardConfig())
                episodes.append(await run_episode(setting, taskset.by_id[id], EpisodeId(3, 1, 0, 5)))
            return episodes

    return asyncio.run(run())


def test_tools_of_every_kind_work_on_the_repository(shop: Path, hermes: Renderer, hermes_folder: Path) -> None:
    say = Speaker(hermes_folder)
    script = [
        say.turn(("run", {"command": "cat setup.txt notes.txt"}), ("notes", {"loud": True})),
        say.turn(("lines_with", {"word": "amount - 3"}), ("price", {"amount": 4})),
        say.turn(("edit", {"path": PATH, "old": "- 3", "new": "* 3"}), ("price", {"amount": 4})),
        say.turn(("test", {}), ("notes", {"loud": "very"})),
        say.turn(text="Done."),
    ]
    taskset = Taskset((task_part(Shop(shop)),))
    (episode,) = play(taskset, hermes, ("first", script))
    assert (episode.outcome, episode.stop_reason, episode.passed) == (Outcome.SCORED, StopReason.FINISHED, True)
    assert [turn.results for turn in episode.turns] == [
        ("exit code 0\nbefore the first turn\nthe task first", "THE TASK FIRST, 9 more than 3"),
        ("[Line(path='src/shop.py', number=11)]", "1"),
        ("ok", "12"),
        ("error: unknown tool test", "error: malformed call: loud is not of type boolean"),
        (),
    ]
    parts = {name: value for name, value in episode.metrics.items() if name.startswith("environment/")}
    assert parts == {"environment/repaired": 1.0, "environment/informed": 0.25}
    assert episode.grade == episode.reward == episode.metrics["reward/grade"] == 1.25
    assert episode.metrics["malformed"] == 2
    assert (shop / PATH).read_text() == SOURCE, "the folder is never changed"
    assert sorted(path.name for path in shop.rglob("*")) == ["shop.py", "src"]
    assert decode(encode(episode), Episode) == episode


def test_a_model_that_does_nothing_earns_nothing(shop: Path, hermes: Renderer, hermes_folder: Path) -> None:
    silent = [Speaker(hermes_folder).turn(text="I give up.")]
    (episode,) = play(Taskset((task_part(Shop(shop)),)), hermes, ("second", silent))
    assert (episode.outcome, episode.reward, episode.grade, episode.passed) == (Outcome.SCORED, 0.0, 0.0, False)


class Boxless(Shop):
    """Its functions need a box, and there is none."""

    def __init__(self) -> None:
        super().__init__("")

    def files(self, task: Price) -> dict[str, str]:
        return {}

    def setup(self, episode: EnvironmentEpisode[Price]) -> Any: ...

    def tools(self, episode: EnvironmentEpisode[Price]) -> list[Callable[..., Any]]:
        return [boxed.lines_with]


def test_a_function_for_a_box_is_refused_where_there_is_none(hermes: Renderer) -> None:
    with pytest.raises(UserError, match="the tool lines_with needs a box, and episodes without files have none"):
        play(Taskset((task_part(Boxless()),)), hermes, ("first", []))


def test_a_folder_that_is_missing_is_one_sentence(shop: Path) -> None:
    with pytest.raises(UserError, match=r"Shop.repository: .*nowhere is not a folder"):
        task_part(Shop(shop / "nowhere"))
    with_site = Shop(str(shop))
    with_site.site = shop / "site"
    with pytest.raises(UserError, match=r"Shop.site: .*site is not a folder"):
        task_part(with_site)
    wrong = Shop(shop)
    wrong.files = lambda task: {"a.txt": 1 / 0}
    with pytest.raises(UserError, match="Shop gives no box for the task first: ZeroDivisionError: division by zero"):
        task_part(wrong)


def test_an_environment_is_mixed_with_code_tasks(
    shop: Path, dataset: Dataset, hermes: Renderer, hermes_folder: Path
) -> None:
    environment = Shop(shop)
    taskset = mix([task_part(environment, 0.5), dataset_part(dataset)], [1.0, 3.0])
    assert taskset.weights == {"Shop": 0.25, "shop-1.0": 0.75}
    curriculum = curriculum_of(taskset, 4, 0)
    assert isinstance(curriculum, MixedCurriculum)
    assert curriculum.parts.keys() == taskset.weights.keys()
    (train,) = curriculum.parts["Shop"].tasks
    assert curriculum.parts["shop-1.0"].tasks == ["shop-1.0:shop-1"]
    assert [task.repository for task in taskset.split("heldout")] == ["Shop"]
    for task in taskset.tasks:
        played_by, own = taskset.of(task)
        assert played_by is environment if isinstance(own, Price) else isinstance(played_by, CodeTasks)
        assert (own.id, type(own)) == (task.id.partition(":")[2], type(task))
    say = Speaker(hermes_folder)
    repair = [say.turn(("run", {"command": FIX})), say.turn(text="Done.")]
    mine, theirs = play(taskset, hermes, (train, repair), ("shop-1.0:shop-1", repair))
    assert (mine.task_id, mine.repository, mine.grade) == (train, "Shop", 1.0)
    assert (theirs.task_id, theirs.repository, theirs.grade) == ("shop-1.0:shop-1", "shop-1.0", 1.0)
    assert mine.metrics["environment/repaired"] == theirs.metrics["path/added"] == 1.0
    assert "environment/repaired" not in theirs.metrics


def test_sources_of_one_name_cannot_be_told_apart(shop: Path, dataset: Dataset) -> None:
    class Namesake(Shop):
        name = "shop-1.0"

    with pytest.raises(UserError, match=r"two sources of tasks are called shop-1\.0: rename one"):
        mix([task_part(Namesake(shop)), dataset_part(dataset)], [1.0, 1.0])
    with pytest.raises(UserError, match="two sources of tasks are of the project Shop"):
        mix([task_part(Shop(shop)), task_part(Shop(shop))], [1.0, 1.0])


def test_a_measurement_takes_environments_beside_datasets(shop: Path) -> None:
    tiny = Path(__file__).parents[1] / "tasks/data/tiny"
    parts = Measurement([Shop(shop), tiny], EvalConfig(), Budget(), "heldout", 0).parts()
    assert {task.id for task in mix(parts, [1.0, 1.0]).split("heldout")} > {"tiny-1.0:words.shorten.op_swap"}
    assert len(parts[0].split("heldout")) == len(parts[0].split("train")) == 1


HALVES = {
    "instruction.md": "Make the files a and b.\n",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
    "tests/test.sh": "cd /app\n(if [ -s a ]; then if [ -s b ]; then echo 1; else echo 0.5; fi; else echo 0; fi) "
    "> /logs/verifier/reward.txt\n",
    "solution/solve.sh": "echo x > a\necho x > b\n",
}


def test_a_partial_score_of_a_foreign_task_is_its_grade(tmp_path: Path, hermes: Renderer, hermes_folder: Path) -> None:
    write(tmp_path / "in/halves", HALVES)
    built, trials = foreign.build_foreign([tmp_path / "in"], tmp_path / "out", lambda *_: None)
    assert [trial.why for trial in trials.trials] == [""]
    taskset, say = Taskset((dataset_part(built),)), Speaker(hermes_folder)
    assert isinstance(taskset.parts[0].environment, ForeignTasks)
    scripts = [[say.turn(("run", {"command": f"cd /app; {line}"})), say.turn(text="Done.")]
               for line in ("true", "echo x > a", "echo x > a; echo x > b")]  # fmt: skip
    (task,) = taskset.tasks
    nothing, half, whole = play(taskset, hermes, *((task.id, script) for script in scripts))
    assert [(e.outcome, e.passed) for e in (nothing, half, whole)] == [(Outcome.SCORED, e is whole) for e in
                                                                       (nothing, half, whole)]  # fmt: skip
    assert [e.grade for e in (nothing, half, whole)] == [0.0, 0.5, 1.0], half.detail
    assert [e.reward for e in (nothing, half, whole)] == [0.0, 0.5, 1.0], "and what training compares"
    assert half.metrics["reward/grade"] == 0.5
    assert [e.reward for e in audit_group([nothing, half, whole])] == [0.0, 0.5, 1.0]
