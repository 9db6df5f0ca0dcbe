"""A statement has a request and a symptom, and what hidden tests want can be known from it and from the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.code import functions
from etude.config import BuildConfig
from etude.sandbox.base import TestReport
from etude.tasks import commits, javascript
from etude.tasks.build import build_dataset
from etude.tasks.examples import example
from etude.tasks.gates import Rejected
from etude.tasks.statements import Determined, wish, with_symptom
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


PARAMETRIZED = """import pytest
from lib import part
from lib.other import Box as Case, unused

SIZES = [1, 2]


@pytest.mark.parametrize("n, wanted", [(1, [[1]]), (2, [[1, 2]]), (3, "a b")])
def test_rows(n, wanted):
    result = part(SIZES, n)
    assert result == wanted


@pytest.mark.parametrize("n", list(range(3)))
def test_unread_rows(n):
    assert part([n], n)


class TestCase:
    def test_steps(self, tmp_path, shelf):
        items = []
        items.append(Case(1))
        other = 3
        assert other == 3
        with open(tmp_path / "a") as file:
            assert part(items, shelf) == file.read()

    def test_helper(self):
        assert helper(1) == 2
"""
SCRIPT = """const { part } = require('..')
const { equal } = require('assert')
describe('part', () => {
  it('cuts', () => {
    const items = [1, 2]
    const other = []
    items.push(3)
    other.push(1)
    equal(part(items, 1).length, 3)
    equal(part(items, 2).length, 2)
  })
  it('is strict', () => {
    equal(part([], 1, { strictly: true }), 'a text that nothing else says')
  })
})
"""


def test_an_example_is_what_a_failing_line_needs() -> None:
    """And a name that the agent cannot see, or a row that cannot be read, makes none."""

    def cut(name: str, line: str, *known: str) -> str:
        lines = PARAMETRIZED.split("\n")
        return example(f"t.py::{name}", PARAMETRIZED, lines.index(line) + 1, known.__contains__)

    assert cut("test_rows[3-a b]", "    assert result == wanted") == (
        "from lib import part\nSIZES = [1, 2]\nn = 3\nwanted = 'a b'\nresult = part(SIZES, n)\nassert result == wanted"
    )
    assert cut("test_rows[2-wanted1]", "    assert result == wanted").split("\n")[2:4] == ["n = 2", "wanted = [[1, 2]]"]
    assert cut("test_rows[9]", "    assert result == wanted") == ""
    assert cut("test_unread_rows[1]", "    assert part([n], n)", "n") == ""
    steps = "            assert part(items, shelf) == file.read()"
    assert cut("TestCase::test_steps", steps, "shelf").split("\n") == [
        "from lib import part",
        "from lib.other import Box as Case",
        "items = []",
        "items.append(Case(1))",
        'with open(tmp_path / "a") as file:',
        "    assert part(items, shelf) == file.read()",
    ]
    assert cut("TestCase::test_steps", steps) == ""  # nobody knows what `shelf` is
    assert cut("TestCase::test_helper", "        assert helper(1) == 2") == ""
    assert cut("TestCase::test_helper", "        assert helper(1) == 2", "helper").endswith("assert helper(1) == 2")


def test_an_example_and_guesses_of_javascript(tmp_path: Path) -> None:
    lines = SCRIPT.split("\n")
    place = lines.index("    equal(part(items, 2).length, 2)") + 1
    known = {"part", "equal"}.__contains__
    assert example("test/a.js::part > cuts", SCRIPT, place, known).split("\n") == [
        "const items = [1, 2]",
        "items.push(3)",
        "equal(part(items, 2).length, 2)",
    ]
    assert example("test/a.js::part > cuts", SCRIPT, place, {"part"}.__contains__) == ""
    gold = "exports.part = (a, n, { strictly }) => strictly ? 'a text that nothing else says' : a.toSorted()\n"
    given = "exports.part = (a, n, {}) => {\n  throw new Error('not implemented')\n}\n"
    write(tmp_path / "hidden", {"test/a.js": SCRIPT})
    determined = Determined(write(tmp_path / "tree", {"index.js": gold}), tmp_path / "hidden")
    tests = ["test/a.js::part > cuts", "test/a.js::part > is strict"]

    def guessed(statement: str) -> set[str]:
        return determined.guesses(tests, {"index.js": given}, {"index.js": gold}, statement)

    assert guessed("Part arrays.") == {tests[1]} == guessed("Part arrays, also strictly.")
    assert guessed("With `strictly`, return 'a text that nothing else says'.") == set()


def test_what_a_body_that_is_gone_did() -> None:
    head, document = "    def f(self, a: int = 3, *, b) -> str:\n", "Say how many items are left.\n\n        More."
    text = f'class A:\n{head}        """{document}"""\n        return "a"\n'
    (unit,) = functions.functions("m.py", text)
    assert wish(unit, text) == "`A.f(self, a: int=3, *, b) -> str`: Say how many items are left."
    script = "/**\n * Say how many items are left.\n * @param {Array} a\n */\nexports.left = (a) => {\n  return 1\n}\n"
    (unit,) = javascript.functions("m.js", script)
    assert wish(unit, script) == "`left = (a) =>`: Say how many items are left."
    bare = script.replace("how many items are left", "it")
    (unit,) = javascript.functions("m.js", bare)
    assert wish(unit, bare) == "`left = (a) =>`"


def test_a_statement_that_says_nothing_makes_no_task(tmp_path: Path) -> None:
    """A body that is gone needs words; a fault needs an example, or words."""
    more = "".join(f"\n\ndef test_{n}():\n    assert twice({n}) == {2 * n}\n" for n in range(3, 6))
    root = clone(tmp_path / "lib-1.0", {"lib.py": LIB, "test_lib.py": TESTS + more})
    options = BuildConfig(max_tasks=4, visible="doctests", min_lines=1, heldout_fraction=0.0)
    data = build_dataset(root, tmp_path / "out", options, quiet)
    assert {task.kind for task in data.tasks} == {"mutation"}
    assert all("For example, this fails" in task.prompt for task in data.tasks)
    assert Rejected.VAGUE in (data.root / "DATACARD.md").read_text()
    documented = LIB.replace("x):\n", 'x):\n    """The value twice, added up to one."""\n')
    other = clone(tmp_path / "lib-2.0", {"lib.py": documented, "test_lib.py": TESTS + more})
    tasks = build_dataset(other, tmp_path / "other", options, quiet).tasks
    (task,) = [task for task in tasks if task.kind == "removal"]
    assert task.prompt.startswith("Implement `twice` in lib.py.\n\n`twice(x)`: The value twice, added up to one.\n\n")


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

def test_none():
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
    write(root, {"lib.py": strict, "test_lib.py": TESTS + MORE + RAISES})
    git(root, "commit", "-qam", "Raise when there is nothing to double\n")
    # Every test hidden: that of the second commit would otherwise be shown, and would say what is wanted. An example of
    # it would be the whole test.
    options = BuildConfig(
        max_tasks=4, kinds=("commit", "mutation"), visible="doctests", operators=("op_const",), min_lines=1
    )
    data = build_dataset(root, tmp_path / "out", options, quiet)
    (task,) = [task for task in data.tasks if task.kind == "commit"]
    assert task.prompt == (
        "Accept small lengths (lib.py)\n\nLengths below 1 count as 1.\n- Parts have at least one item\n\n"
        "No visible test fails. Of 6 other tests, these fail: AssertionError (1), ValueError (1). For example, this "
        "fails (AssertionError: assert [] == [[1]]):\n\n"
        "    from lib import part\n    assert part([1], -2) == [[1]]"
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
