"""The library on disk, and one sandbox for all tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from etude.grading.runner import open_sandbox
from etude.sandbox.base import Image
from tests.helpers.boxlibrary import HIDDEN, REPOSITORY, Place, write_tree

collect_ignore = ["data"]  # a product with tests of its own


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    write_tree(root / "repository", REPOSITORY)
    write_tree(root / "hidden", HIDDEN)
    write_tree(root / "site", {"dependency.py": "VALUE = 7\n"})
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return root


@pytest.fixture(scope="session")
def open_place(library: Path) -> Iterator[Callable[..., Place]]:
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    def make(**options: int) -> Place:
        sandbox = loop.run_until_complete(stack.enter_async_context(open_sandbox(**options)))
        return Place(loop, sandbox, library)

    yield make
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.fixture(scope="session")
def place(open_place: Callable[..., Place]) -> Place:
    return open_place(memo=0)


@pytest.fixture(scope="session")
def inside(open_place: Callable[..., Place]) -> Place:
    """A sandbox that runs hidden tests in the process of the tested code."""
    return open_place(memo=0, outside=False)


@pytest.fixture
def library_image(library: Path) -> Image:
    return Image(library / "repository", library / "site", {})
