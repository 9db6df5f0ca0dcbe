"""The library under attack: a git repository with the answer wherever answers leak, and its hidden tests.

Its task's box has the history that `tasks/histories.py` makes of that repository.
"""

from __future__ import annotations

import py_compile
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from etude.records import Focus, Task
from etude.sandbox.base import Image

SECRET = "quartz-lantern-8841"  # stands in the right code only
EXPECTED = "velvet-anchor-2207"  # stands in the hidden tests only
LATER = "Later work"  # the message of a commit after the task's
NAMED = "Name positions"  # that of the task's own
PATH = "src/lib/core.py"
CORE = f'''"""Lists."""

import math


def chunk(items, size=1):
    """
    Cut into pieces.

    >>> chunk([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    if size < 1:
        raise ValueError("{SECRET}")
    return [items[i * size : (i + 1) * size] for i in range(math.ceil(len(items) / size))]


def label(number):
    return f"{{number}}-th"
'''
FIXED = f"""    if size < 1:
        raise ValueError("{SECRET}")
    return [items[i * size : (i + 1) * size] for i in range(math.ceil(len(items) / size))]
"""
# How the answer stood in an earlier commit, in other words.
EARLIER = """    if not size >= 1:
        raise ValueError("too small")
    pieces = -(-len(items) // size)
    return [items[piece * size : piece * size + size] for piece in range(pieces)]
"""
WRONG = "    return [items[i * size : (i + 1) * size] for i in range(len(items) // size)]\n"
BROKEN = CORE.replace(FIXED, WRONG)
FILES = {
    "README.md": "A small library.\n",
    "src/lib/__init__.py": "from .core import chunk, label\n",
    PATH: CORE,
    "src/lib/numbers.py": "def double(n):\n    return 2 * n\n",
}
HIDDEN = {
    "tests/__init__.py": "",
    "tests/test_core.py": f'''import pytest

import lib
from lib import core


@pytest.mark.parametrize(
    "items,size,expected", [([1, 2, 3], 2, [[1, 2], [3]]), ([1], 1, [[1]]), (["{EXPECTED}"], 4, [["{EXPECTED}"]])]
)
def test_chunk(items, size, expected):
    assert lib.chunk(items, size) == expected


def test_label():
    assert core.label(3) == "3-th"


@pytest.fixture
def five():
    return [1, 2, 3, 4, 5]


def test_rest(five):
    assert lib.chunk(five, 2) == [[1, 2], [3, 4], [5]]
''',
}
_ROWS = ("items0-2-expected0", "items1-1-expected1", "items2-4-expected2")
TESTS = (
    *(f"tests/test_core.py::test_chunk[{row}]" for row in _ROWS),
    "tests/test_core.py::test_label",
    "tests/test_core.py::test_rest",
)
TASK = Task(
    id="core.chunk",
    repository="lib-1",
    kind="mutation",
    operator="remove_cond",
    function=f"{PATH}::chunk",
    split="train",
    instruction=f"Fix `chunk` in {PATH}",
    focus=Focus(path=PATH, first_line=6, last_line=13),
    source_roots=("src/lib",),
    changes={PATH: BROKEN},
    solution={PATH: CORE},
    visible_tests=(f"{PATH}::doctest:chunk",),
    fail_to_pass=(TESTS[0],),
    pass_to_pass=TESTS[1:],
    difficulty={},
    licence="MIT",
)


@dataclass(frozen=True)
class Library:
    """Folders of the prepared task."""

    root: Path

    @property
    def hidden(self) -> Path:
        """The folder of hidden tests."""
        return self.root / "hidden"

    @property
    def image(self) -> Image:
        """The image of the task: the broken function over the repository."""
        return Image(self.root / "repository", self.root / "site", {PATH: BROKEN}, history=self.history)

    @cached_property
    def history(self) -> Mapping[str, bytes]:
        """The git history of the task; empty without git."""
        from etude.tasks import histories

        kept = histories.load(self.root, self.root / "repository")
        return {} if kept is None else kept.of(TASK)


def prepare(root: Path) -> Library:
    """A repository with the answer in its history, caches and builds, and the image that tasks take of it."""
    from etude.code.functions import clean_files
    from etude.tasks import histories

    source = root / "source"
    _write(source, FILES)
    _plant(source)
    for path in clean_files(source):
        target = root / "repository" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target)
    _write(root / "hidden", HIDDEN)
    _write(root / "site", {"dependency.py": "VALUE = 7\n"})
    if (source / ".git").exists():
        past = histories.read(source, "lib-1", clean_files(source))
        histories.build(past, root / "repository", [TASK], root)
    readable(root)
    return Library(root)


def readable(root: Path) -> None:
    """Let everybody read what lies below `root`."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _plant(source: Path) -> None:
    """Later commits, a tag, a note, a stash; bytecode, caches, builds, editor files: all hold the answer."""
    py_compile.compile(str(source / PATH), cfile=str(source / "src/lib/__pycache__/core.cpython-311.pyc"))
    shutil.copy(source / "src/lib/__pycache__/core.cpython-311.pyc", source / "src/lib/old_core.pyc")
    copies = (
        *(".mypy_cache/3.11/core.py", ".pytest_cache/core.py", ".ruff_cache/core.py", ".hypothesis/core.py"),
        *("build/lib/lib/core.py", "dist/lib/core.py", "lib.egg-info/core.py", "node_modules/.cache/core.py"),
        *("src/lib/.core.py.swp", "src/lib/core.py.orig", "src/lib/core.py~", "docs/_build/core.html"),
    )
    _write(source, dict.fromkeys(copies, CORE))
    if shutil.which("git") is None:
        return
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null", "-C", str(source)]

    def do(*command: str) -> None:
        subprocess.run([*git, *command], check=True, capture_output=True, timeout=60)

    def commit(text: str, message: str) -> None:
        (source / PATH).write_text(text)
        do("add", "-A", "-f")
        do("commit", "-qm", message)

    do("init", "-q", "-b", "main")
    commit(CORE.replace(FIXED, EARLIER), "Cut lists")
    commit(CORE.replace("-th", "."), f"Round up with math.ceil ({SECRET})")
    commit(CORE, NAMED)
    do("tag", "later")
    do("notes", "add", "-m", CORE)
    (source / PATH).write_text(CORE + "\n")
    do("stash")
    do("checkout", "-q", "-b", "ahead")
    commit(CORE + "# next\n", LATER)
    do("pack-refs", "--all")
    do("checkout", "-q", "main")
    for name in ("objects/info/alternates", "lfs/objects/core.py", "modules/core/config"):
        (source / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (source / ".git" / name).write_text(f"{source}/../other.git/objects\n")
