"""Models' folders and renderers for the tests of the harness."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.make_nano.tokenizer import train

from etude.renderers import Renderer, renderer_for
from etude.tasks.dataset import DATASET_FORMAT, Dataset, Manifest
from tests.helpers.speakers import PATH, SOURCE, TEMPLATE, TEXT, a_task, hermes_tokenizer, write_model

HIDDEN = "from shop import Shop\n\n\ndef test_price():\n    assert Shop().price(4) == 12\n"


@pytest.fixture(scope="session")
def compact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compact")
    train(TEXT, 1024).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def compact(compact_folder: Path) -> Renderer:
    return renderer_for(compact_folder)


@pytest.fixture(scope="session")
def hermes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hermes"), hermes_tokenizer(), TEMPLATE)


@pytest.fixture(scope="session")
def hermes(hermes_folder: Path) -> Renderer:
    return renderer_for(hermes_folder)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("dataset")
    texts = {f"repository/{PATH}": SOURCE.replace("- 3", "* 3"), "hidden/tests/test_shop.py": HIDDEN, "site/.keep": ""}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    manifest = Manifest(
        format=DATASET_FORMAT,
        name="shop-1.0",
        licence="MIT",
        licence_source="pyproject.toml",
        seed=0,
        python_path=("src",),
        source_roots=("src",),
        visible="doctests",
        options={},
        counts={},
        digests={},
    )
    return Dataset(root, "shop-1.0", root / "repository", root / "site", root / "hidden", (a_task(),), manifest)
