"""A statement has a request and a symptom, and what hidden tests want can be known from it and from the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config import BuildConfig
from etude.sandbox.base import TestReport
from etude.tasks import commits
from etude.tasks.build import build_dataset
from etude.tasks.statements import Determined, with_symptom
from tests.tasks.test_build import quiet
from tests.tasks.test_inventory import clone, git, write

HIDDEN = """import pytest
from lib import part

LIMIT = 3


def test_length():
    with pytest.raises(LookupError):
        part([1], 0)


def test_text():
    with pytest.raises(ValueError, match="the length must be positive"):
        part([1], -1)


def test_keyword():
    assert part([1, 2], 1, strictly=True) == [[1], [2]]


def test_known():
    with pytest.raises(ValueError):
        assert part([1, 2], LIMIT) == sorted([[1, 2]], key=len)
"""
GOLD = '''def part(items, n, strictly=False):
    """Parts of n items."""
    if n == 0:
        raise LookupError(n)
    if n < 0:
        raise ValueError("the length must be positive")
    return [items[i : i + n] for i in range(0, len(items), n)]
'''
GIVEN = 'def part(items, n):\n    """Parts of n items."""\n    raise NotImplementedError(items, n)\n'


@pytest.fixture
def determined(tmp_path: Path) -> Determined:
    write(tmp_path / "hidden", {"tests/test_lib.py": HIDDEN})
    other = "def check(n):\n    if n is None:\n        raise ValueError(n)\n"
    return Determined(write(tmp_path / "tree", {"lib.py": GOLD, "other.py": other}), tmp_path / "hidden")


def test_what_can_only_be_guessed(determined: Determined, tmp_path: Path) -> None:
    tests = [f"tests/test_lib.py::{name}" for name in ("test_length", "test_text", "test_keyword", "test_known")]

    def guessed(statement: str, changes: str = GIVEN) -> list[str]:
        found = determined.guesses(tests, {"lib.py": changes}, {"lib.py": GOLD}, statement)
        return sorted(test.rpartition("_")[2] for test in found)

    assert guessed("Part lists.") == ["keyword", "length", "text"]
    assert guessed("Part lists; raise LookupError for 0.") == ["keyword", "text"]
    assert guessed("With `strictly`: LookupError, and 'the length must be positive' as a ValueError.") == []
    assert guessed("Fix it.", GOLD.replace("n == 0", "n == 1")) == []
    # A file that the agent sees says it, too.
    write(tmp_path / "tree", {"doc.md": "strictly: LookupError"})
    again = Determined(tmp_path / "tree", tmp_path / "hidden")
    assert {t.rpartition("_")[2] for t in again.guesses(tests, {"lib.py": GIVEN}, {"lib.py": GOLD}, "")} == {"text"}


def test_an_import_that_nothing_names(determined: Determined) -> None:
    """All tests of the file fail for a name that was chosen later."""
    gold = "def part():\n    return 1\n"
    assert determined.guesses(["tests/test_lib.py::test_known"], {"lib.py": "x = 1\n"}, {"lib.py": gold}, "Add it.")
    assert not determined.guesses(
        ["tests/test_lib.py::test_known"], {"lib.py": "x = 1\n"}, {"lib.py": gold}, "Add part."
    )


def test_symptoms() -> None:
    outcomes = {
        "v::a": "failed",
        "v::b": "failed",
        "v::c": "passed",
        "h::a": "failed",
        "h::b": "error",
        "h::c": "passed",
    }
    messages = {"v::a": "AssertionError: assert 3  == 2", "h::a": "TypeError: secret 1", "h::b": "assert 'secret'"}
    report = TestReport(outcomes=outcomes, messages=messages, seconds=0.0)
    hidden = ["h::a", "h::b", "h::c"]
    assert with_symptom("Fix `f` in m.py", report, ["v::c", "v::a", "v::b"], hidden) == (
        "Fix `f` in m.py.\n\nThe tests fail: `v::a`, `v::b`. The first says: AssertionError: assert 3 == 2"
    )
    unseen = with_symptom("Labels are cut.", report, ["v::c"], hidden)
    assert unseen == (
        "Labels are cut.\n\nNo visible test fails. Of 3 other tests, these fail: AssertionError (1), TypeError (1)."
    )


LIB = """def part(items, n):
    return [items[i : i + n] for i in range(0, len(items), n)]


def twice(x):
    y = x
    return y + x
"""
TESTS = """from lib import part, twice


def test_part():
    assert part([1, 2], 1) == [[1], [2]]


def test_twice():
    assert twice(2) == 4


def test_twice_text():
    assert twice('a') == 'aa'
"""
MORE = """

def test_small():
    assert part([1, 2], 0) == [[1], [2]]


def test_smaller():
    assert part([1], -2) == [[1]]
"""
RAISES = """

def test_none{0}():
    import pytest

    with pytest.raises(LookupError):
        twice(None)
"""


def test_a_commit_says_what_its_message_and_its_list_of_changes_say(tmp_path: Path) -> None:
    """And one whose tests want an error that nothing names is no task."""
    head = "# Changes\n\n"
    root = clone(tmp_path / "lib-1.0", {"lib.py": LIB, "test_lib.py": TESTS, "CHANGES.md": f"{head}- The first one\n"})
    better = LIB.replace("    return [", "    if n < 1:\n        n = 1\n    return [")
    changes = f"{head}- Parts have at least one item (#3)\n- The first one\n"
    write(root, {"lib.py": better, "test_lib.py": TESTS + MORE, "CHANGES.md": changes})
    body = "Lengths below 1 count as 1.\n\nSigned-off-by: A <a@b>\n"
    git(root, "commit", "-qam", f"Accept small lengths (#3)\n\n{body}")
    strict = better.replace("    y = x\n", "    if x is None:\n        raise LookupError(x)\n    y = x\n")
    write(root, {"lib.py": strict, "test_lib.py": TESTS + MORE + RAISES.format(1) + RAISES.format(2)})
    git(root, "commit", "-qam", "Raise when there is nothing to double\n")
    # Every test hidden: of the second commit one would otherwise be shown, and would say what is wanted.
    options = BuildConfig(
        max_tasks=4, kinds=("commit", "mutation"), visible="doctests", operators=("op_const",), min_lines=1
    )
    data = build_dataset(root, tmp_path / "out", options, quiet)
    (task,) = [task for task in data.tasks if task.kind == "commit"]
    assert task.prompt == (
        "Accept small lengths (lib.py)\n\nLengths below 1 count as 1.\n- Parts have at least one item\n\n"
        "No visible test fails. Of 7 other tests, these fail: AssertionError (1), ValueError (1)."
    )
    assert "| the tests need a name or text that is stated nowhere | 1 |" in (data.root / "DATACARD.md").read_text()


@pytest.mark.parametrize(
    ("message", "wish"),
    [
        ("Merge branch 'main'\n\nAdd bounds to parts", "Add bounds to parts"),
        ("Merge pull request #3 from a/b\n\nfix(core): Cut long labels (#12)", "Cut long labels"),
        ("Issue 1214: Update the hash of ranges", "Update the hash of ranges"),
        ("Fix issue 658 for split_after", "Fix for split_after"),
        ("Fixes\n\n#12\n", ""),
    ],
)
def test_the_first_line_that_says_something(message: str, wish: str) -> None:
    assert commits._request(message) == wish
