"""A dataset comes back as it was saved; anything else is refused with one sentence."""

from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks import dataset

TINY = Path(__file__).parent / "data/tiny"


def test_load() -> None:
    tiny = dataset.load(TINY)
    assert len(tiny.tasks) == tiny.manifest.counts["tasks"]
    assert {task.split for task in tiny.tasks} == {"train", "heldout"}
    for name in ("repository", "hidden", "tasks"):
        assert dataset.tree_digest(TINY / name) == tiny.manifest.digests[name]


def test_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a task dataset"):
        dataset.load(tmp_path)
