"""Hidden tests run as written in a process of their own, on a library in another; what comes from there is data."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from etude.grading import runner
from etude.grading.grade import grade_changes
from etude.grading.runner import hidden_tests, library_names, open_sandbox
from etude.grading.verdict import decide_outside
from etude.records import CodeTask, Focus, Outcome
from etude.sandbox.backend import ForkResult, RunImage, VerifyResult
from etude.sandbox.base import BoxDead, Image, Limits, TestReport
from tests.helpers.boxlibrary import Place, write_tree

SHAPES = '''"""Shapes."""

import abc, time
import warnings
from collections import namedtuple

REGISTRY = {}
LIMIT = 3
Point = namedtuple("Point", "x y")


class ShapeError(ValueError):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.code = code


class Shape(abc.ABC):
    sides = 0

    def __init__(self, name):
        self.name = name
        self.log = []

    def __eq__(self, other):
        return isinstance(other, Shape) and self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def __lt__(self, other):
        return self.name < other.name

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, error, trace):
        self.log.append(kind.__name__ if kind else "none")
        return kind is ShapeError

    def __iter__(self):
        return iter(self.name)

    def __len__(self):
        return len(self.name)

    def describe(self):
        return f"{self.name}: {self.area()}"

    def area(self):
        raise NotImplementedError


class Square(Shape):
    sides = 4

    def __init__(self, size):
        super().__init__("square")
        self.size = size

    @classmethod
    def unit(cls):
        return cls(1)

    @property
    def double(self):
        return Square(self.size * 2)

    def area(self):
        return self.size**2


class Bag(dict):
    def total(self):
        return sum(self.values())


def total(items):
    return sum(items)


def sort(items, key=None):
    items.sort(key=key)
    return items


def same(value):
    return value


def count(start):
    while True:
        yield start
        start += 1


def check(n):
    if n > LIMIT:
        raise ShapeError("too large", code=n)
    return n


def old():
    warnings.warn("use new", DeprecationWarning, stacklevel=2)
    return 1


def call(function, *values):
    return function(*values)


def bag(**values):
    return Bag(values)


def point():
    return Point(1, 2)


def nested():
    return {"a": [(1, 2.5, None), {3}], b"k": frozenset("x")}


def wait():
    time.sleep(600)
'''
TEST = """import functools
import operator
from unittest import mock

import pytest

import shapes
from shapes import REGISTRY, Shape, ShapeError, Square


@pytest.fixture
def square():
    return Square(2)


def test_plain():
    assert shapes.nested() == {"a": [(1, 2.5, None), {3}], b"k": frozenset("x")}
    assert shapes.LIMIT == 3
    assert type(shapes.total([1])) is int


def test_very_many():
    for i in range(5_001):
        try:
            assert shapes.total([i]) == i
        except Exception:
            pass


def test_objects(square):
    assert square.area() == 4
    assert square.double.size == 4
    assert Square.unit() == Square(5)
    assert square != 3
    assert isinstance(square, Shape) and issubclass(Square, Shape)
    assert type(square) is Square
    assert not isinstance(3, Shape)
    assert {square: 1}[Square(9)] == 1
    assert list(square) == list("square") and len(square) == 6
    assert sorted([Square(1), square]) == [square, square]
    square.size = 5
    assert square.describe() == "square: 25"
    assert square.sides == Square.sides == 4


def test_raises():
    with pytest.raises(ShapeError, match="too large") as caught:
        shapes.check(7)
    assert caught.value.code == 7
    assert isinstance(caught.value, ValueError)
    with pytest.raises(TypeError):
        Shape()
    with pytest.raises(NotImplementedError):
        Shape.area(Square(1))
    with pytest.raises(AttributeError):
        Square(1).missing
    try:
        shapes.check(8)
    except ValueError as error:
        assert str(error) == "too large"


def test_contexts(square):
    with square as inner:
        assert inner is square
        raise ShapeError("inside")
    assert square.log == ["enter", "ShapeError"]


def test_mutation():
    items = [3, 1, 2]
    assert shapes.sort(items) is items
    assert items == [1, 2, 3]
    table = {"k": []}
    assert shapes.same(table)["k"] is table["k"]


def test_callbacks():
    seen = []
    assert shapes.sort([1, 2, 3], key=lambda n: -n) == [3, 2, 1]
    assert shapes.call(seen.append, 4) is None and seen == [4]
    assert shapes.call(operator.add, 1, 2) == 3
    assert shapes.call(functools.partial(max, 3), 2) == 3

    def fails(n):
        raise KeyError(n)

    with pytest.raises(KeyError):
        shapes.call(fails, 1)
    assert shapes.call(lambda f: f(2), lambda n: shapes.total([n, 1])) == 3


def test_generators():
    numbers = shapes.count(2)
    assert [next(numbers), next(numbers)] == [2, 3]
    assert shapes.total(n for n in (1000, 3000, 6)) == 4006


def test_warns():
    with pytest.warns(DeprecationWarning, match="use new"):
        assert shapes.old() == 1


def test_patched(monkeypatch):
    monkeypatch.setattr(shapes, "LIMIT", 10)
    monkeypatch.setattr(Square, "area", lambda self: 7)
    monkeypatch.setattr(Square, "unit", lambda: 8)
    assert shapes.check(7) == 7
    assert Square(2).describe() == "square: 7"
    assert Square.unit() == 8


def test_not_patched_any_more():
    with pytest.raises(ShapeError):
        shapes.check(7)
    assert Square(2).area() == 4
    assert Square.unit().size == 1


def test_content():
    bag = shapes.bag(a=1, b=2)
    assert bag == {"a": 1, "b": 2} and bag.total() == 3 and bag["a"] == 1
    assert isinstance(bag, dict) and sorted(bag) == ["a", "b"]
    assert shapes.point() == (1, 2) and shapes.point().x == 1


class TestSubclass:
    class Circle(Shape):
        def __init__(self):
            super().__init__("circle")
            self.radius = 2

        def area(self):
            return self.radius * 3

    def test_described(self):
        assert self.Circle().describe() == "circle: 6"

    @pytest.mark.parametrize("n", [1, 2])
    def test_many(self, n):
        assert shapes.check(n) == n


@mock.patch("time.sleep")
def test_patched_module(sleep):
    shapes.wait()
    assert sleep.call_count == 1


def test_patched_by_name(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    shapes.wait()


def test_source():
    import inspect

    assert "sum" in inspect.getsource(shapes.total)
"""
PATH = "src/shapes/__init__.py"
NAMES = (
    *("plain", "objects", "raises", "contexts", "mutation", "callbacks", "generators", "warns", "patched"),
    *("not_patched_any_more", "content"),
)
OUTSIDE = (
    *(f"tests/test_shapes.py::test_{name}" for name in NAMES),
    "tests/test_shapes.py::TestSubclass::test_described",
    "tests/test_shapes.py::TestSubclass::test_many[1]",
)
SOURCE = "tests/test_shapes.py::test_source"
MANY = "tests/test_shapes.py::test_very_many"
PATCHED = tuple(f"tests/test_shapes.py::test_patched_{name}" for name in ("module", "by_name"))
GOLD = "    return sum(items)\n"
BROKEN = SHAPES.replace(GOLD, "    return len(items)\n")
TOTAL, PLAIN = "tests/test_shapes.py::test_generators", "tests/test_shapes.py::test_plain"
TASK = CodeTask(
    id="shapes.total", repository="shapes-1", kind="mutation", operator="op_change", function=f"{PATH}::total",
    split="train", prompt="Fix `total`", focus=Focus(path=PATH, first_line=80, last_line=81),
    source_roots=("src/shapes",), changes={PATH: BROKEN}, solution={PATH: SHAPES}, visible_tests=(),
    fail_to_pass=(TOTAL,), pass_to_pass=(PLAIN,), difficulty={}, licence="MIT",
)  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("shapes")
    write_tree(root / "repository", {PATH: SHAPES})
    write_tree(root / "hidden", {"tests/__init__.py": "", "tests/test_shapes.py": TEST})
    (root / "site").mkdir()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    sandbox = loop.run_until_complete(stack.enter_async_context(open_sandbox(memo=0)))
    yield Place(loop, sandbox, root)
    loop.run_until_complete(stack.aclose())
    loop.close()


def tried(place: Place, text: str, tests: tuple[str, ...], seconds: float = 20.0) -> TestReport:
    return place.test({PATH: text}, tests, limits=Limits(seconds=seconds))


def test_tests_as_written_are_decided_outside(shapes: Place) -> None:
    report = tried(shapes, SHAPES, (*OUTSIDE, SOURCE))
    assert report.messages == {}
    assert report.outside == frozenset(OUTSIDE)
    assert report.decided == pytest.approx(len(OUTSIDE) / (len(OUTSIDE) + 1))
    assert (report.tampered, report.crashed, report.timed_out) == (False, False, False)


def test_very_many_operations_are_not_recorded_and_hold_up_no_other_test(shapes: Place) -> None:
    """The limit is a number, so that equal builds decide the same tests outside on any machine."""
    image, tests = RunImage(shapes.root / "repository", shapes.root / "site", None), (MANY, PLAIN)
    made = shapes.run(runner._record_once(shapes.sandbox.backend, hidden_tests(image, shapes.hidden), tests, "", {}))
    assert {test: (one.outcome, one.fault) for test, one in made.items()} == {
        MANY: ("failed", "refused"), PLAIN: ("passed", "")
    }  # fmt: skip


def test_where_a_plugin_of_pytest_imports_the_library_all_is_decided_inside(
    shapes: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As pytest-django does by the settings: the verifier, which has no library, does not start."""
    root = tmp_path_factory.mktemp("plugin")
    site = write_tree(root / "site", {"pytest.ini": "[pytest]\naddopts = -p shapes\n"})
    for path in (root, site, *site.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    image = Image(shapes.root / "repository", site, {})
    report = shapes.run(shapes.sandbox.run_tests(image, {}, (PLAIN,), shapes.hidden, Limits(seconds=20)))
    assert (report.outcomes, report.outside) == ({PLAIN: "passed"}, frozenset())


def test_what_patches_the_standard_library_runs_beside_the_library(shapes: Place) -> None:
    """The library has modules of its own, so it would sleep."""
    image = RunImage(shapes.root / "repository", shapes.root / "site", None)
    made = shapes.run(runner._record_once(shapes.sandbox.backend, hidden_tests(image, shapes.hidden), PATCHED, "", {}))
    assert {test: (recording.outcome, recording.fault) for test, recording in made.items()} == dict.fromkeys(
        PATCHED, ("failed", "refused")
    )
    report = tried(shapes, SHAPES, PATCHED)
    assert report.outcomes == dict.fromkeys(PATCHED, "passed")
    assert report.outside == frozenset()


@pytest.mark.parametrize(
    ("old", "new", "tests"),
    [
        (GOLD, "    return len(items)\n", ["generators", "callbacks"]),
        ("self.size**2", "self.size", ["objects"]),
        ("code=n", "code=0", ["raises"]),
        ("items.sort(key=key)\n    return items", "return sorted(items, key=key)", ["mutation"]),
        ("kind is ShapeError", "False", ["contexts"]),
        ("DeprecationWarning", "UserWarning", ["warns"]),
        ("if n > LIMIT", "if n > 3", ["patched"]),
        ("sum(self.values())", "0", ["content"]),
        ("Point(1, 2)", "(1, 3)", ["content"]),
        ('frozenset("x")', 'frozenset("y")', ["plain"]),
    ],
)
def test_wrong_code_fails(shapes: Place, old: str, new: str, tests: list[str]) -> None:
    assert old in SHAPES
    report = tried(shapes, SHAPES.replace(old, new), OUTSIDE)
    failed = {test.rpartition("test_")[2] for test, outcome in report.outcomes.items() if outcome != "passed"}
    assert set(tests) <= failed, report.messages
    assert len(failed) < len(OUTSIDE)
    assert not report.tampered


EQUAL = """
class Same{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __lt__(self, other): return True
    def __contains__(self, item): return True
    def __sub__(self, other): return 0
    def startswith(self, text): return True
    def get(self, *args): return Same()
    def __getattr__(self, name): return Same()
    def __call__(self, *args): return Same()
"""
POSING = {
    "an object": EQUAL.format(base="") + "def same_total(items): return Same()",
    "a subclass of int": EQUAL.format(base="(int)") + "def same_total(items): return Same()",
    "a class": EQUAL.format(base="(type)") + "def same_total(items): return Same('x', (), {})",
    "another's class": "def same_total(items):\n    made = Square(1)\n    made.name = Everything()\n    return made\n"
    + "class Everything:\n    __eq__ = lambda self, other: True\n",
    "any key": "class Keys:\n    def __getitem__(self, key): return key\ndef same_total(items): return Keys()",
    "the test's own object": "def same_total(items): return items",
    "frames": "import sys\ndef same_total(items):\n    f = sys._getframe()\n    while f:\n        for v in f.f_locals"
    ".values():\n            if v == 4006: return v\n        f = f.f_back\n",
}


@pytest.mark.parametrize("text", POSING.values(), ids=POSING)
def test_no_object_poses_as_a_plain_value(shapes: Place, text: str) -> None:
    image = Image(shapes.root / "repository", shapes.root / "site", {PATH: BROKEN})
    change = BROKEN + "\n\n" + text + "\n\n\ndef total(items):\n    return same_total(items)\n"
    data: dict[str, bytes | None] = {PATH: change.encode()}
    graded = shapes.run(grade_changes(shapes.sandbox, TASK, image, shapes.hidden, data, Limits(seconds=10.0)))
    assert (graded.score, graded.passed) == (0.0, False), graded


@pytest.mark.parametrize(("text", "reward"), [(SHAPES, 1.0), (BROKEN, 0.0)])
def test_controls(shapes: Place, text: str, reward: float) -> None:
    image = Image(shapes.root / "repository", shapes.root / "site", {PATH: BROKEN})
    data: dict[str, bytes | None] = {PATH: text.encode()}
    graded = shapes.run(grade_changes(shapes.sandbox, TASK, image, shapes.hidden, data, Limits(seconds=10.0)))
    assert (graded.outcome, graded.score) == (Outcome.SCORED, reward)


FRAME = """
import json, os, struct

def say(data):
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            pass

def frame(text):
    data = text.encode()
    return struct.pack("<I", len(data)) + data
"""
GARBAGE = [
    "b'x' * 100",
    "struct.pack('<I', 1 << 31)",
    "frame('[')",
    "frame('null')",
    "frame('[]')",
    "frame('{}')",
    "frame('[[' + '[' * 100000)",
    "frame('[\"=\"]')",
    "frame('[\"=\", 6, [], [], []]')",
    "frame('[\"=\", {}, [], []]')",
    "frame('[\"=\", [], [], []]')",
    'frame(\'["=", ["x", "Decimal", "y"], [], []]\')',
    'frame(\'["=", ["o", 0], [], []]\')',
    'frame(\'["=", ["h", 1, 7], [], []]\')',
    'frame(\'["=", ["a", 5], [], []]\')',
    "frame('[\"=\", 6, [[0, 1]], []]')",
    'frame(\'["=", 6, [], [["eval"]]]\')',
    'frame(\'["=", ["g", "builtins", "eval"], [], []]\')',
    'frame(\'["=", ["g", "os", "system"], [], []]\')',
    "frame('[\"=\", [\"l\"' + ', [\"l\"' * 900 + ']' * 901 + ', [], []]')",
    "frame('[\"!\", []]')",
    'frame(\'["!", ["E", 1, ["g", "builtins", "KeyboardInterrupt"], ["t"], ""]]\')',
    'frame(\'["!", ["E", 1, ["g", "builtins", "int"], ["t"], ""]]\')',
    'frame(\'["call", ["g", "builtins", "str"], ["t"], ["d"]]\')',
    'frame(\'["get", ["o", 0], "__globals__"]\')',
    'frame(\'["op", "eq", 1, 1]\')',
    'frame(\'["import", "os"]\')',
    'frame(\'["class", "x", ["t"], ["d"]]\')',
    "frame('[\"=\", [\"i\", \"' + 'f' * 3000000 + '\"], [], []]')",
    "frame('[\"=\", 1' + '0' * 5000 + ', [], []]')",
    'frame(\'["=", ["m", "os"], [], []]\')',
    'frame(\'["=", ["re", "(", 0], [], []]\')',
    'frame(\'["=", ["h", 1, [1, "m", "n", [["g", "builtins", "bool"]], []]], [], []]\')',
    'frame(\'["=", ["h", 1, [1, "m", "n", [], [["__eq__", 1]]]], [], []]\')',
]


@pytest.mark.parametrize("said", GARBAGE, ids=[text[:50] for text in GARBAGE])
def test_garbage_is_the_agents_failure(shapes: Place, said: str) -> None:
    text = SHAPES.replace(GOLD, f"    say({said})\n    os._exit(0)\n") + FRAME
    report = tried(shapes, text, (TOTAL, PLAIN), 4.0)
    assert report.outcomes[TOTAL] != "passed"
    assert report.tampered or report.crashed or report.timed_out


@pytest.mark.parametrize(
    ("body", "crashed", "timed_out"),
    [
        ("import os; os._exit(0)", True, False),
        ("import os; os.abort()", True, False),
        ("raise SystemExit(0)", False, False),
        ("raise KeyboardInterrupt", False, False),
        ("import time; time.sleep(60)", False, True),
        ("return 'x' * (16 << 20)", False, False),
        ("x = []; x.append(x); return x", False, False),
        ("while True: items = [items]", False, True),
    ],
)
def test_the_end_of_the_tested_process_fails_its_tests(
    shapes: Place, body: str, crashed: bool, timed_out: bool
) -> None:
    report = tried(shapes, SHAPES.replace("    return sum(items)", f"    {body}"), (TOTAL, PLAIN), 1.5)
    assert "passed" not in [report.outcomes[TOTAL]]
    assert (report.crashed, report.timed_out) in ((crashed, timed_out), (True, False))


def test_a_failure_of_the_verifier_is_ours(shapes: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the agent's, and never a verdict."""
    tried(shapes, SHAPES, (TOTAL,))
    monkeypatch.setattr("etude.sandbox.namespace.run_templates.encode", _without_names)
    with pytest.raises(BoxDead, match="verifier"):
        tried(shapes, SHAPES + "\n", (TOTAL,))


def _without_names(request: dict[str, object], changes: dict[str, bytes]) -> bytes:
    from etude.sandbox.connection import encode

    return encode({key: value for key, value in request.items() if key != "names"}, changes)


def test_library_names(tmp_path: Path) -> None:
    write_tree(tmp_path, {
        "a/src/pkg/__init__.py": "", "a/setup.py": "", "a/tests/__init__.py": "", "a/docs/index.txt": "",
        "a/tool/tests/test_x.py": "", "h/tests/__init__.py": "", "h/tool/tests/test_x.py": "",
    })  # fmt: skip
    assert library_names(tmp_path / "a", tmp_path / "h") == ("pkg", "setup", "tool")
    write_tree(tmp_path, {
        "a/lib/python/other/__init__.py": "", "a/code/alone.py": "",
        "site/pytest.ini": "[pytest]\npythonpath =\n    /workspace/code\n    /workspace/lib/python\naddopts = 100%\n",
    })  # fmt: skip
    expected = ("alone", "other", "pkg", "setup", "tool")
    assert library_names(tmp_path / "a", tmp_path / "h", tmp_path / "site") == expected


MADE = """
def total(items):
    import gc
    from guest.grading.guest import tested
    (wire,) = [found for found in gc.get_objects() if type(found) is tested.TestedSide]
    for number in range(-3, 60):
        for target in (["o", number], ["g", "builtins", "type"]):
            try:
                wire.send(["call", target, ["t", "Same", ["t", ["g", "builtins", "int"]], ["d"]], ["d"]])
                wire._wait()
            except BaseException:
                pass
    return 4006
"""
KEYED = """
def total(items):
    class Keys:
        def __getitem__(self, key):
            return 4006
    return Keys()
"""


@pytest.mark.parametrize(("text", "tampered"), [(MADE, True), (KEYED, False)])
def test_the_tested_process_makes_nothing_in_the_verifier(shapes: Place, text: str, tampered: bool) -> None:
    report = tried(shapes, BROKEN + text, (TOTAL, PLAIN))
    assert report.outcomes[TOTAL] == "failed"
    assert report.tampered == tampered


def test_a_verifier_that_runs_out_of_memory_is_the_agents_failure() -> None:
    """It ends normally with the right library."""
    ended = ForkResult(3, False, 1.0, b'{"met": true}\n{"test": "a::b", "outcome": "passed", "fault": ""}\n', 1.0)
    report = decide_outside(("a::b", "a::c"), VerifyResult(ended, ForkResult(0, False, 1.0, b"", 1.0)))
    assert report.outcomes == {"a::b": "passed", "a::c": "missing"}
    assert report.crashed
