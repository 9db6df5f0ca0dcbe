"""A small library with hidden tests, and ways to run them in a sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from etude.grading.grade import Grade, grade_changes
from etude.grading.runner import TestRunner
from etude.records import CodeTask, Focus
from etude.sandbox.base import Image, Limits, TestReport

T = TypeVar("T")

CORE = '''"""Lists."""

import math

from .numbers import double


def chunk(items, size=1):
    """
    Cut into pieces.

    >>> chunk([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [items[i * size : (i + 1) * size] for i in range(math.ceil(len(items) / size))]


class Counter:
    def __init__(self):
        self.count = 0

    @classmethod
    def at(cls, count):
        counter = cls()
        counter.count = count
        return counter

    def add(self, n):
        self.count += n
        return self.count


def last(items):
    return items[-1]


FOUR = double(2)
'''
NUMBERS = "def double(n):\n    return 2 * n\n\n\ndef half(n):\n    return n / 2\n"
TEST_CORE = """import pytest

import lib
from lib import core

from . import helpers


@pytest.mark.parametrize("items,size,expected", [([1, 2, 3], 2, [[1, 2], [3]]), ([], 2, []), ([1], 1, [[1]])])
def test_chunk(items, size, expected):
    assert lib.chunk(items, size) == expected


def test_counter():
    counter = core.Counter.at(helpers.THREE)
    assert counter.add(2) == 5


def test_last():
    assert core.last("ab") == "b"


def test_four():
    assert core.FOUR == 4


def test_half():
    assert core.double(3) == 6


def test_fixture(three):
    assert lib.chunk(three, 2) == [[1, 2], [3]]


class TestPlaces:
    def test_files(self, tmp_path):
        (tmp_path / "a").write_text("b")
        with open("note.txt", "w") as file:
            file.write("written into the working folder")
        assert (tmp_path / "a").read_text() == "b"
"""
HIDDEN = {
    "tests/__init__.py": "",
    "tests/helpers.py": "THREE = 3\n",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef three():\n    return [1, 2, 3]\n",
    "tests/test_core.py": TEST_CORE,
    "tests/test_unit.py": (
        "import unittest\n\nfrom lib import last\n\n\nclass LastTest(unittest.TestCase):\n"
        "    def test_last(self):\n        self.assertEqual(last([1, 2]), 2)\n"
    ),
}
REPOSITORY = {
    "README.md": "A small library.\n",
    "src/lib/__init__.py": "from .core import Counter, chunk, last\n",
    "src/lib/core.py": CORE,
    "src/lib/numbers.py": NUMBERS,
}
PATH = "src/lib/core.py"
CHUNKS = tuple(
    f"tests/test_core.py::test_chunk[{name}]"
    for name in ("items0-2-expected0", "items1-2-expected1", "items2-1-expected2")
)
OTHERS = tuple(
    f"tests/test_core.py::{n}" for n in ("test_counter", "test_last", "test_four", "test_fixture", "test_half")
)
DOCTEST = f"{PATH}::doctest:chunk"
BROKEN = CORE.replace("math.ceil(len(items) / size)", "len(items) // size")


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


def as_nobody(program: str, proof: str, first: str = "true") -> subprocess.CompletedProcess[str]:
    """Run a Python program as a user without privileges, after a line of shell as root; skips the test where no Python
    of this version can be read by others. `proof` is what a program that could begin has printed."""
    drop = "exec setpriv --reuid=65534 --regid=65534 --clear-groups"
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    for python in dict.fromkeys((sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")):
        command = ["/bin/sh", "-c", f'{first}; {drop} "$0" -B -c "$1"', python, program]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)
        if proof in done.stdout:
            return done
    pytest.skip("no Python here is readable by other users")


@dataclass
class Place:
    """A sandbox on an event loop of its own, and the folders of the library."""

    loop: asyncio.AbstractEventLoop
    sandbox: TestRunner
    root: Path
    limits: Limits = field(default_factory=Limits)

    @property
    def hidden(self) -> Path:
        return self.root / "hidden"

    def image(self, changes: dict[str, str] | None = None) -> Image:
        return Image(self.root / "repository", self.root / "site", changes or {})

    def run(self, work: Awaitable[T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(limited())

    def test(
        self, changes: dict[str, str | None], tests: tuple[str, ...], hidden: bool = True, limits: Limits | None = None
    ) -> TestReport:
        data = {path: None if text is None else text.encode() for path, text in changes.items()}
        place = self.hidden if hidden else None
        return self.run(self.sandbox.run_tests(self.image(), data, tests, place, limits or self.limits))

    def grade(self, changes: dict[str, str | None], limits: Limits | None = None) -> Grade:
        """Grade a change to the broken library."""
        data = {path: None if text is None else text.encode() for path, text in changes.items()}
        image = self.image({PATH: BROKEN})
        return self.run(grade_changes(self.sandbox, TASK, image, self.hidden, data, limits or self.limits))


TASK = CodeTask(
    id="core.chunk",
    repository="lib-1",
    kind="mutation",
    operator="op_change",
    function=f"{PATH}::chunk",
    split="train",
    prompt="Fix `chunk`",
    focus=Focus(path=PATH, first_line=8, last_line=15),
    source_roots=("src/lib",),
    changes={PATH: BROKEN},
    solution={PATH: CORE},
    visible_tests=(DOCTEST,),
    fail_to_pass=(CHUNKS[0],),
    pass_to_pass=(*CHUNKS[1:], *OTHERS),
    difficulty={},
    licence="MIT",
)
