"""Models' folders and renderers for the tests of the harness."""

from __future__ import annotations

from pathlib import Path

import pytest
from speakers import TEMPLATE, TEXT, hermes_tokenizer, write_model

from etude.corpus.tokenizer import train
from etude.harness.renderers import Renderer, renderer_for


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
