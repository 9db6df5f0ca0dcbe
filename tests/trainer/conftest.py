"""Random models are made by tests/models/tiny.py, edits and a model that learns them by apply_edits.py."""

import sys
from pathlib import Path

import pytest
from apply_edits import fill

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh model with a tokenizer, and tables of edits, in one folder."""
    return fill(tmp_path)
