"""A dataset comes back as it was saved; anything else is refused with one sentence."""

import shutil
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks import dataset

TINY = Path(__file__).parent / "data/tiny"


def test_load() -> None:
    tiny = dataset.load_dataset(TINY)
    assert len(tiny.tasks) == tiny.manifest.counts["tasks"]
    assert {task.split for task in tiny.tasks} == {"train", "heldout"}
    assert dataset.load_changed(TINY) == (tiny, [])


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("hidden/tests/test_lists.py", "==", "!="),
        ("repository/src/tiny/lists.py", "return", "raise"),
        ("tasks/lists.chunk.op_const/instruction.md", "Fix", "Mix"),
        ("tasks/lists.chunk.op_const/task.toml", "split = ", "split  ="),
        ("dataset.json", '"seed": 1', '"seed": 2'),
        ("dataset.json", '"licence": "MIT"', '"licence": "MIX"'),
    ],
)
def test_an_altered_dataset_is_refused_in_one_sentence(tmp_path: Path, path: str, before: str, after: str) -> None:
    """A hidden test that asks for the opposite would make honest work fail."""
    copy = tmp_path / "copy"
    shutil.copytree(TINY, copy)
    text = (copy / path).read_text()
    assert before in text
    (copy / path).write_text(text.replace(before, after, 1))
    with pytest.raises(UserError, match=r"has changed since the dataset was built"):
        dataset.load_dataset(copy)


@pytest.mark.parametrize("name", ["hidden/tests/test_lists.py", "tasks", "repository"])
def test_a_dataset_that_lacks_something_is_refused(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(TINY, copy)
    shutil.rmtree(copy / name) if (copy / name).is_dir() else (copy / name).unlink()
    with pytest.raises(UserError):
        dataset.load_dataset(copy)


def test_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a task dataset"):
        dataset.load_dataset(tmp_path)
