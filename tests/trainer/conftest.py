"""Models and tables of edits for the tests of the trainer."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from etude.models.loading import load_model
from tests.helpers.apply_edits import fill
from tests.helpers.tiny_models import save_random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh model with a tokenizer, and tables of edits, in one folder."""
    return fill(tmp_path)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A mixture of experts whose logits are of a trained model's size."""
    return load_model(save_random_model(tmp_path_factory.mktemp("model") / "moe", initializer_range=0.05))
