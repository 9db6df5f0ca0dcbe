"""Several repositories as one dataset: each keeps its tasks, images, hidden tests and held-out split."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.grading.grade import grade_changes
from etude.grading.runner import open_sandbox
from etude.tasks import dataset, impossible
from etude.tasks.mixture import MixedDataset, mix
from tests.helpers.mixtures import TINY, renamed


@pytest.fixture
def mixed(tmp_path: Path) -> MixedDataset:
    """The tiny dataset twice, under two names."""
    both = mix([dataset.load_dataset(TINY), dataset.load_dataset(renamed(tmp_path / "other", "other-2.0"))], [3, 1])
    assert isinstance(both, MixedDataset)
    return both


def test_every_source_keeps_its_tasks_and_its_split(mixed: MixedDataset) -> None:
    tiny = dataset.load_dataset(TINY)
    assert mixed.weights == {"tiny-1.0": 0.75, "other-2.0": 0.25}
    for part, name in zip(mixed.parts, mixed.weights, strict=True):
        for split in ("train", "heldout"):
            ids = [task.id for task in mixed.split(split) if task.repository == name]
            assert ids == [f"{name}:{task.id}" for task in tiny.split(split)] != []
        task = next(task for task in mixed.tasks if task.repository == name)
        assert mixed.of(task)[0] is part
        assert mixed.image(task).repository == part.repository
    assert len(mixed.by_id) == 2 * len(tiny.tasks), "equal ids of two repositories are two tasks"


def test_tasks_of_both_are_graded_by_their_own_tests(mixed: MixedDataset) -> None:
    async def rewards() -> list[float]:
        async with open_sandbox() as sandbox:
            found = []
            for name in mixed.weights:
                task = next(task for task in mixed.tasks if task.repository == name)
                gold = {path: text.encode() for path, text in task.solution.items()}
                for changes in ({}, gold):
                    hidden = mixed.of(task)[0].hidden
                    found.append((await grade_changes(sandbox, task, mixed.image(task), hidden, changes)).reward)
            return found

    assert asyncio.run(rewards()) == [0.0, 1.0] * 2


def test_impossible_tasks_are_made_of_each(mixed: MixedDataset, tmp_path: Path) -> None:
    made = impossible.make_impossible(mixed, tmp_path / "impossible")
    assert isinstance(made, MixedDataset)
    hidden = {made.of(task)[0].hidden for task in made.tasks}
    assert hidden == {tmp_path / "impossible" / name / "hidden" for name in mixed.weights}
    task = made.tasks[-1]
    assert made.of(task)[1].fail_to_pass == task.fail_to_pass != mixed.by_id[task.id].fail_to_pass


def test_two_versions_of_one_project_are_refused(tmp_path: Path) -> None:
    newer = dataset.load_dataset(renamed(tmp_path / "newer", "tiny-2.0"))
    with pytest.raises(UserError, match="two sources of tasks are of the project tiny"):
        mix([dataset.load_dataset(TINY), newer], [1, 1])


def test_one_source_is_itself() -> None:
    tiny = dataset.load_dataset(TINY)
    assert mix([tiny], [5]) is tiny
    assert tiny.parts == (tiny,)
    assert tiny.of(tiny.tasks[0]) == (tiny, tiny.tasks[0])
