"""Several repositories as one set of tasks: each keeps its tasks, images, hidden tests and held-out split."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.harness import UngradedEpisode
from etude.records import CodeTask, StopReason
from etude.rollout import TaskPart, Taskset, dataset_part, mix
from etude.rollout.environments.code import CodeChanges, CodeTasks
from etude.rollout.environments.environment import PlayedEpisode
from tests.helpers.mixtures import TINY, renamed


@pytest.fixture
def mixed(tmp_path: Path) -> Taskset:
    """The tiny dataset twice, under two names."""
    both = mix([dataset_part(TINY), dataset_part(renamed(tmp_path / "other", "other-2.0"))], [3, 1])
    assert both.mixed
    return both


def test_every_source_keeps_its_tasks_and_its_split(mixed: Taskset) -> None:
    tiny = dataset_part(TINY)
    assert mixed.weights == {"tiny-1.0": 0.75, "other-2.0": 0.25}
    for part, name in zip(mixed.parts, mixed.weights, strict=True):
        for split in ("train", "heldout"):
            ids = [task.id for task in mixed.split(split) if task.repository == name]
            assert ids == [f"{name}:{task.id}" for task in tiny.split(split)] != []
        task = next(task for task in mixed.tasks if task.repository == name)
        environment, own = mixed.of(task)
        assert environment is part.environment
        assert own in part.tasks
        assert f"{name}:{own.id}" == task.id
        assert environment.image(own).repository == environment.dataset.repository
    assert len(mixed.by_id) == 2 * len(tiny.tasks), "equal ids of two repositories are two tasks"


def test_tasks_of_both_are_graded_by_their_own_tests(mixed: Taskset) -> None:
    async def scores() -> list[float]:
        async with open_sandbox() as sandbox:
            found = []
            for name in mixed.weights:
                environment, own = mixed.of(next(task for task in mixed.tasks if task.repository == name))
                gold = {path: text.encode() for path, text in own.solution.items()}
                for changes in ({}, gold):
                    ended = UngradedEpisode((), (), StopReason.FINISHED, {}, timed_out=False)
                    played = PlayedEpisode(ended, CodeChanges(changes))
                    found.append((await environment.grade(sandbox, own, played)).grade.score)
            return found

    assert asyncio.run(scores()) == [0.0, 1.0] * 2


def test_impossible_tasks_are_made_of_each(mixed: Taskset, tmp_path: Path) -> None:
    def made(part: TaskPart) -> TaskPart | None:
        environment = part.environment.impossible(tmp_path / part.name)
        return environment and TaskPart(environment, tuple(environment.tasks()))

    impossible = mixed.each(made)
    assert impossible is not None
    environments = {impossible.of(task)[0] for task in impossible.tasks}
    assert {each.dataset.hidden for each in environments} == {tmp_path / name / "hidden" for name in mixed.weights}
    task = impossible.tasks[-1]
    original = mixed.by_id[task.id]
    assert isinstance(task, CodeTask)
    assert isinstance(original, CodeTask)
    assert impossible.of(task)[1].fail_to_pass == task.fail_to_pass != original.fail_to_pass
    assert mixed.each(lambda part: None) is None


def test_two_versions_of_one_project_are_refused(tmp_path: Path) -> None:
    newer = dataset_part(renamed(tmp_path / "newer", "tiny-2.0"))
    with pytest.raises(UserError, match="two sources of tasks are of the project tiny"):
        mix([dataset_part(TINY), newer], [1, 1])


def test_one_source_is_itself() -> None:
    tiny = dataset_part(TINY)
    alone = mix([tiny], [5])
    assert not alone.mixed
    assert isinstance(tiny.environment, CodeTasks)
    assert alone.tasks == tiny.tasks
    assert alone.of(tiny.tasks[0]) == (tiny.environment, tiny.tasks[0])
