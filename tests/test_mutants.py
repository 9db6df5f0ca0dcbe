"""The tool that tries mutants: what it draws, which tests it takes, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.code.mutate import Mutant
from etude.code.operators import ByteEdit
from tests.helpers.mutants import Place, drawn, nearest, tried

SOURCE = """def held(a, b):
    return a + b


def loose(a, b):
    return a - b


def torn(a, b):
    return a * b


def endless(n):
    while n < 5:
        n += 1
    return n
"""
TEST = """from etude.room.code import endless, held


def test_held():
    assert held(2, 3) == 5


def test_endless():
    assert endless(1) == 5
"""
BROKEN = "from etude.room import code\n\n\ndef test_torn():\n    assert code.torn(2, 3) == 7\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {
        "src/etude/__init__.py": "", "src/etude/room/__init__.py": "", "src/etude/room/code.py": SOURCE,
        "src/etude/other.py": "def f(x):\n    return x + 1\n", "tests/room/test_code.py": TEST,
        "tests/room/test_near.py": "def test_nothing():\n    pass\n", "tests/test_far.py": "import etude.other\n",
        "pytest.ini": "[pytest]\nmarkers =\n    slow\n    gpu\n",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_mutants_are_drawn_from_all_rooms_and_again_for_the_same_seed(root: Path) -> None:
    places = list(drawn(root, 1))
    assert sorted(place.function for place in places) == ["endless", "f", "held", "loose", "torn"]
    assert [p.difference for p in drawn(root, 1)] == [p.difference for p in places]
    assert len({tuple(p.function for p in drawn(root, seed)) for seed in range(9)}) > 1
    for place in places:
        assert place.difference.count("\n-") >= 1
        assert place.mutant.text != place.mutant.source == (root / place.path).read_text()


def test_the_nearest_tests_come_first(root: Path) -> None:
    assert nearest(root, "src/etude/room/code.py") == [["tests/room/test_code.py"], ["tests/room/test_near.py"]]
    assert nearest(root, "src/etude/other.py") == [["tests/test_far.py"]]


@pytest.mark.slow
def test_what_is_said_of_mutants(root: Path) -> None:
    places = {place.function: place for place in drawn(root, 1)}
    assert tried(root, places["held"], [60.0]) == "caught by tests/room/test_code.py::test_held"
    assert tried(root, places["loose"], [60.0]) == "survived"
    (root / "tests/room/test_near.py").write_text(BROKEN)
    said = tried(root, places["torn"], [60.0])
    assert said == "undecided: tests/room/test_near.py::test_torn fails without it, too"
    assert (root / "src/etude/room/code.py").read_text() == SOURCE


@pytest.mark.slow
def test_a_mutant_without_end_is_caught(root: Path) -> None:
    hung = SOURCE.replace("n += 1", "n += 0")
    mutant = Mutant("op_const", SOURCE, (ByteEdit(0, len(SOURCE), hung.encode()),), "", "", 1, 1, 1)
    said = tried(root, Place("src/etude/room/code.py", "endless", mutant), [10.0])
    assert said == "caught by tests/room/test_code.py (it does not end)"
