"""Impossible tasks: what they ask for contradicts itself, and the dataset they come from is left alone."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etude.tasks import dataset as datasets
from etude.tasks import impossible

TINY = Path(__file__).parent / "data" / "tiny"


@pytest.fixture
def made(tmp_path: Path) -> datasets.Dataset:
    return impossible.make_impossible(datasets.load_dataset(TINY), tmp_path / "impossible")


def test_only_what_decides_is_another(made: datasets.Dataset) -> None:
    tiny = datasets.load_dataset(TINY)
    assert 0 < len(made.tasks) <= len(tiny.split("train"))
    assert made.repository == tiny.repository
    for variant in made.tasks:
        task = tiny.by_id[variant.id]
        assert (variant.prompt, variant.changes, variant.focus, variant.visible_tests, variant.split) == (
            task.prompt, task.changes, task.focus, task.visible_tests, "train")  # fmt: skip
        assert variant.fail_to_pass[0] in task.fail_to_pass
        assert variant.fail_to_pass[1] not in task.fail_to_pass
    assert datasets.tree_digest(tiny.hidden) == tiny.manifest.digests["hidden"], "the dataset itself was written to"


def test_the_two_tests_contradict_each_other(
    made: datasets.Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run as plain functions on the solved library, exactly one of each pair holds."""
    monkeypatch.syspath_prepend(str(made.repository / "src"))
    for name in [name for name in sys.modules if name.split(".")[0] == "tiny"]:
        monkeypatch.delitem(sys.modules, name)
    pairs = 0
    for variant in made.tasks:
        path, _, name = variant.fail_to_pass[0].partition("::")
        contrary = variant.fail_to_pass[1].partition("::")[2]
        spec = importlib.util.spec_from_file_location("impossible_tests", made.hidden / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        right, wrong = (getattr(module, each.partition("[")[0]) for each in (name, contrary))
        rows = [mark.args[1] for mark in getattr(right, "pytestmark", ())] or [[()]]
        for row in rows[0]:
            right(*row)
            with pytest.raises(AssertionError):
                wrong(*row)
            pairs += 1
    assert pairs >= len(made.tasks)


def test_a_former_folder_is_replaced_and_tasks_without_a_fit_test_have_no_impossible_version(tmp_path: Path) -> None:
    tiny = datasets.load_dataset(TINY)
    folder = tmp_path / "impossible"
    first = impossible.make_impossible(tiny, folder)
    assert impossible.make_impossible(tiny, folder).tasks == first.tasks
    none = impossible.make_impossible(replace(tiny, tasks=tuple(t for t in tiny.tasks if "count_if" in t.id)), folder)
    assert all(t.fail_to_pass[1].startswith(t.fail_to_pass[0].partition("::")[0]) for t in none.tasks)
