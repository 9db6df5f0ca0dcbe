"""Random models are made by tests/models/tiny.py, edits and a model that learns them by apply_edits.py."""

import sys
from pathlib import Path

import pytest
from apply_edits import fill
from transformers import PreTrainedModel

from etude.models.loading import load_model

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh model with a tokenizer, and tables of edits, in one folder."""
    return fill(tmp_path)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A mixture of experts whose logits are of a trained model's size."""
    from tiny import save_random_model

    return load_model(save_random_model(tmp_path_factory.mktemp("model") / "moe", initializer_range=0.05))
