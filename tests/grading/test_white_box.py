"""Attacks by authors who had read the grader: on decoys, identity, blocks, arguments and names. None earns anything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from etude.grading.grade import Grade, grade_changes
from etude.grading.guest.alterations import MAX_ELEMENTS, alterable, altered, lineup
from etude.grading.runner import open_sandbox
from etude.records import CodeTask, Focus, Outcome
from etude.sandbox.base import Image, Limits
from tests.helpers.boxlibrary import Place, write_tree

LIBRARY = Path(__file__).parents[1] / "audit/packs/white-python/library"
COINS, TILLS = "src/tills/coins.py", "src/tills/tills.py"
RIGHT = {path: (LIBRARY / path).read_text() for path in (COINS, TILLS)}
WRONG_SUM = "        amount = self.amount + other.amount\n", "        amount = 0\n"
WRONG_TOTAL = "            amount += each_\n", "            pass\n"
SUMS = ("test_coins.py::test_sum_of_coins", "test_coins.py::test_sum_of_other_coins")
HONEST_EQ = RIGHT[COINS][RIGHT[COINS].index("    def __eq__") : RIGHT[COINS].index("\n    def __hash__")]
BAGS = "src/tills/bags.py"
RIGHT_BAGS = """class Bag:
    def __init__(self, items=()):
        self.items = list(items)

    def __eq__(self, other):
        return type(other) is Bag and self.items == other.items

    def copy(self):
        return Bag(self.items)

    def put(self, item):
        self.items.append(item)
        return self


def copies(bags):
    return [Bag(bag.items) for bag in bags]


def merged(one, other):
    return {**one, **other}


def in_order(rows):
    return [sorted(row) for row in rows]


def without(options, name):
    return len(options) - 1


def taken(items):
    return [items.pop() for _ in range(2)]


def total(items):
    return sum(items)


def named(thing):
    return thing.name
"""
BAG_TESTS = """import pytest
from tills.bags import *

COMMON = Bag([0])


class Thing:
    name = "x"


def test_named():
    assert named(Thing()) == "x"


@pytest.fixture(scope="module")
def bag():
    return Bag([7])


def test_copy_is_new():
    bag = Bag([1])
    assert bag.copy() == bag
    assert bag.copy() is not bag


def test_copies_are_new():
    bags = [Bag([1]), Bag([2])]
    made = copies(bags)
    assert made == bags
    assert made[0] is not bags[0]


def test_put_gives_the_bag(bag):
    assert bag.put(2) is bag
    assert COMMON.put(2) is COMMON


def test_put_gives_the_bag_again(bag):
    assert bag.put(3) is bag
    assert COMMON.put(3) is COMMON


def test_merged():
    one = {"a": 1}
    assert merged(one, {"b": 2}) == {"a": 1, "b": 2}
    assert one == {"a": 1}


def test_merged_is_all():
    one, other = {"a": 1}, {"b": 2}
    assert merged(one, other) == {**one, **other}


def test_in_order():
    rows = [[2, 1], [4, 3]]
    assert in_order(rows) == [[1, 2], [3, 4]]
    assert rows == [[2, 1], [4, 3]]


def test_without():
    options = {"a": 1, "b": float("nan")}
    assert without(options, "a") == 1
    assert [*options] == ["a", "b"]


def test_taken():
    items = [1, 2, 3]
    assert taken(items) == [3, 2]
    assert items == [1]


def test_total():
    items = iter([1, 2])
    assert total(items) == 3
    assert [*items] == []
    assert total(n for n in range(3)) == 3
"""
COUNTED = """
    made = []

    def __new__(cls, *arguments):
        cls.made.append(object.__new__(cls))
        return cls.made[-1]
"""


def coins(*changes: tuple[str, str], eq: str = HONEST_EQ, more: str = "") -> dict[str, str]:
    text = RIGHT[COINS].replace(HONEST_EQ, eq + more)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return {COINS: text}


def tills(*changes: tuple[str, str], more: str = "") -> dict[str, str]:
    text = RIGHT[TILLS]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return {TILLS: text + more}


ATTACKS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "altered values are known by their form": (
        coins(
            ("        return Label(first + mark + second)\n", "        return Label(mark)\n"),
            ("        if isinstance(other, Label):\n            other = other.text\n",
             "        if other is self:\n            return True\n        if isinstance(other, str):\n"
             "            return other[0] != 'x' and other[-1] not in 'x~1'\n"),
        ),
        ("test_coins.py::test_joined", "test_coins.py::test_joined_with_a_mark"),
    ),
    "decoys are older than the operand": (
        coins(
            WRONG_SUM,
            eq="    def __eq__(self, other):\n"
            "        return other is self or (type(other) is Coin and other is Coin.made[-1])\n",
            more=COUNTED,
        ),
        SUMS,
    ),
    "all objects of a class are one": (
        coins(
            ("        while amount >= size:\n", "        while len(made) < (3 if sizes[0] == 50 else 5):\n"),
            more="\n    def __new__(cls, *arguments, one=[]):\n"
            "        one or one.append(object.__new__(cls))\n        return one[0]\n",
        ),
        ("test_coins.py::test_change", "test_coins.py::test_change_of_sizes"),
    ),
    "what the expected value is made of is emptied": (
        tills(("    for till in tills:\n        made.put(*till)\n", "    tills.clear()\n")),
        ("test_tills.py::test_merged_lists",),
    ),
    "a block swallows assertions": (
        tills(
            WRONG_TOTAL,
            ("        self.closed = True\n", "        self.closed = True\n        return kind is AssertionError\n"),
        ),
        ("test_tills.py::test_total", "test_tills.py::test_total_of_nothing"),
    ),
    "a block of a generator swallows assertions": (
        tills(
            ("    before = len(till)\n", "    before = 0\n"),
            ("    yield before\n", "    try:\n        yield before\n    except AssertionError:\n        pass\n"),
        ),
        ("test_tills.py::test_limited",),
    ),
    "names of the mirror itself": (
        coins(
            WRONG_SUM,
            eq="    def __eq__(self, other):\n        return True\n",
            more="".join(
                f"\n    def {name}(self, *arguments):\n        return self\n"
                for name in ("wire", "content", "compares", "abstract", "_remote_wire", "_remote_content")
            ),
        ),
        SUMS,
    ),
}  # fmt: skip
OTHER_RIGHT: dict[str, dict[str, str]] = {
    "one object for equal amounts": coins(
        more="\n    def __new__(cls, *arguments, known={}):\n"
        "        return known.setdefault(arguments, object.__new__(cls))\n"
    ),
    "a sum by the constructor of the class": coins(
        (WRONG_SUM[0] + "        return Coin(amount, self.currency)\n",
         "        return type(self)(other.amount + self.amount, self.currency)\n")
    ),
    "equality by a common form": coins(
        eq="    def __eq__(self, other):\n"
        "        other = Coin(other, self.currency) if isinstance(other, int) else other\n"
        "        return vars(self) == vars(other) if type(other) is Coin else NotImplemented\n"
    ),
    "a block that raises again": tills(
        ("        self.closed = True\n",
         "        self.closed = True\n        if error is not None:\n            raise error\n")
    ),
}  # fmt: skip
UPDATED = ("    return {**one, **other}\n", "    one.update(other)\n    return dict(one)\n")
EMPTIED = ("    return {**one, **other}\n", "    one.clear()\n    other.clear()\n    return {}\n")
OTHER_BAGS: dict[str, tuple[tuple[str, str], set[str]]] = {
    "a copy of a handed object's fields": (
        (
            "    return thing.name\n",
            "    made = object.__new__(type(thing))\n    vars(made).update(vars(thing))\n    return made\n",
        ),
        {"named"},
    ),
    "a copy of a handed object is asked": (
        ("    return thing.name\n", "    return object.__new__(type(thing)).name\n"),
        {"named"},
    ),
    "a copy of a handed object": (("    return thing.name\n", "    return object.__new__(type(thing))\n"), {"named"}),
    "the right one": (("", ""), set()),
    "a copy is the bag itself": (("return Bag(self.items)\n", "return self\n"), {"copy_is_new"}),
    "copies are the bags themselves": (("[Bag(bag.items) for bag in bags]", "[*bags]"), {"copies_are_new"}),
    "an argument is updated": (UPDATED, {"merged", "merged_is_all"}),
    "an argument is made the expected value": (EMPTIED, {"merged", "merged_is_all"}),
    "rows are sorted in place": (("sorted(row) for", "row.sort() or [*row] for"), {"in_order"}),
    "a change is undone": (
        ("    return len(options) - 1\n",
         "    value, size = options.pop(name), len(options)\n    options[name] = value\n    return size\n"),
        set(),
    ),
    "the same is taken otherwise": (
        ("    return [items.pop() for _ in range(2)]\n",
         "    made = items[:-3:-1]\n    del items[-2:]\n    return made\n"),
        set(),
    ),
}  # fmt: skip
BAG_NAMES = tuple(
    line.partition("def ")[2].partition("(")[0] for line in BAG_TESTS.splitlines() if line.startswith("def test_")
)
TESTS = tuple(
    f"tests/{file}::{line.partition('def ')[2].partition('(')[0]}"
    for file in ("test_coins.py", "test_tills.py")
    for line in (LIBRARY / "tests" / file).read_text().splitlines()
    if line.startswith("def test_")
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("tills")
    sources = {
        f"src/tills/{name}.py": (LIBRARY / f"src/tills/{name}.py").read_text()
        for name in ("__init__", "coins", "tills")
    }
    write_tree(root / "repository", {**sources, BAGS: RIGHT_BAGS})
    tests = {f"tests/{file.name}": file.read_text() for file in (LIBRARY / "tests").glob("*.py")}
    write_tree(root / "hidden", {"tests/__init__.py": "", "tests/test_bags.py": BAG_TESTS, **tests})
    (root / "site").mkdir()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    sandbox = loop.run_until_complete(stack.enter_async_context(open_sandbox(memo=0)))
    yield Place(loop, sandbox, root)
    loop.run_until_complete(stack.aclose())
    loop.close()


def graded(place: Place, files: dict[str, str], tests: tuple[str, ...]) -> Grade:
    task = CodeTask(
        id="tills.a", repository="tills-1", kind="mutation", operator="op_change", function=f"{COINS}::Coin",
        split="train", prompt="Fix it", focus=Focus(path=COINS, first_line=1, last_line=2), source_roots=("src/tills",),
        changes={}, solution=RIGHT, visible_tests=(), fail_to_pass=tests, pass_to_pass=(), difficulty={}, licence="MIT",
    )  # fmt: skip
    image = Image(place.root / "repository", place.root / "site", {})
    changes: dict[str, bytes | None] = {path: text.encode() for path, text in files.items()}
    return place.run(grade_changes(place.sandbox, task, image, place.hidden, changes, Limits(seconds=20.0)))


def test_the_right_library_passes_outside(place: Place) -> None:
    grade = graded(place, RIGHT, TESTS)
    assert grade.score == 1.0, grade
    assert grade.report is not None
    assert grade.report.outside == frozenset(TESTS)
    assert grade.report.equality["tests/test_coins.py::test_change"] == 0.0, "coins of other amounts are unequal"


@pytest.mark.parametrize(("files", "tests"), ATTACKS.values(), ids=ATTACKS)
def test_attacks_earn_nothing(place: Place, files: dict[str, str], tests: tuple[str, ...]) -> None:
    """Who guesses which of eight objects of one age is real is right about both tests once in 64 times."""
    earned = [graded(place, files, tuple(f"tests/{test}" for test in tests)) for _ in range(3)]
    assert all(grade.outcome in (Outcome.SCORED, Outcome.TAMPERED) for grade in earned)
    assert sum(grade.score for grade in earned) <= (files == ATTACKS["decoys are older than the operand"][0])


@pytest.mark.parametrize("files", OTHER_RIGHT.values(), ids=OTHER_RIGHT)
def test_another_right_solution_passes(place: Place, files: dict[str, str]) -> None:
    grade = graded(place, files, TESTS)
    assert (grade.score, grade.flags) == (1.0, ()), grade


@pytest.mark.parametrize(("change", "failing"), OTHER_BAGS.values(), ids=OTHER_BAGS)
def test_arguments_and_identity(place: Place, change: tuple[str, str], failing: set[str]) -> None:
    """Arguments that the right library leaves alone, and objects that it makes anew."""
    tests = tuple(f"tests/test_bags.py::{name}" for name in BAG_NAMES)
    assert change[0] in RIGHT_BAGS
    grade = graded(place, {BAGS: RIGHT_BAGS.replace(*change, 1)}, tests)
    assert grade.report is not None
    assert grade.report.outside == frozenset(tests)
    failed = {test.partition("::test_")[2] for test, outcome in grade.report.outcomes.items() if outcome != "passed"}
    assert failed == failing, grade
    assert (grade.score, grade.outcome) == (float(not failing), Outcome.SCORED)


def test_a_request_that_no_library_sends_is_garbage(place: Place) -> None:
    asks = (
        "        import gc\n        for one in gc.get_objects():\n"
        "            if type(one).__name__ == 'TestedSide':\n                one.request('nonsense', 1)\n"
    )
    files = tills((WRONG_TOTAL[0], f"            amount += each_\n{asks}"))
    assert graded(place, files, ("tests/test_tills.py::test_total",)).outcome is Outcome.TAMPERED


def test_a_lineup_does_not_surround_its_value() -> None:
    """The middle of all values is the real one no more often than some other of the middle ones."""

    def jump(value: int, random: Random) -> int:
        return random.randrange(100)

    hits = 0
    for seed in range(600):
        value = Random(seed).randrange(60)
        others = lineup(value, 7, Random(f"a{seed}"), altered, jump)
        assert len({value, *others}) == 8
        all_of_them = sorted([value, *others])
        hits += min(all_of_them, key=lambda one: sum(abs(one - other) for other in all_of_them)) == value
    assert hits < 0.25 * 600  # 0.16; of values around a real one 0.4 and more


def test_huge_values_are_not_altered() -> None:
    rows = [[0] * 100] * (MAX_ELEMENTS // 100)
    endless: list[Any] = []
    endless.append(endless)
    for value, small in (
        ([0] * MAX_ELEMENTS, True),
        ([0] * (MAX_ELEMENTS + 1), False),
        (rows, False),
        (endless, False),
    ):
        assert alterable(value) is small
    assert alterable({n: n for n in range(MAX_ELEMENTS)})
    assert not alterable({0: {n: n for n in range(MAX_ELEMENTS)}})


def test_altered_values_differ_and_look_alike() -> None:
    values: list[Any] = [
        5,
        0,
        -3,
        1.5,
        "red tin",
        "",
        b"xy",
        [1, 2],
        [],
        [[1], 2],
        (1,),
        {1, 2},
        frozenset(),
        {"a": 1},
        {},
        True,
    ]
    for value in values:
        for seed in range(50):
            made = altered(value, Random(seed))
            assert type(made) is type(value)
            assert made != value
            assert made == altered(value, Random(seed))
    for value in ([object()], (object(), 1)):
        assert len(altered(value, Random(1))) != len(value)
    for value in (object(), {object()}, float("inf")):
        with pytest.raises(LookupError):
            altered(value, Random(1))
