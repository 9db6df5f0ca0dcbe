"""No capability crosses: what tests hand over, what the library decides, and what ends the verifier earns nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from etude.grading.grade import Grade, grade_changes
from etude.grading.runner import open_sandbox
from etude.grading.verdict import decide_outside
from etude.records import CodeTask, Focus, Outcome
from etude.sandbox.backend import ForkResult, VerifyResult
from etude.sandbox.base import BoxDead, Image, Limits
from tests.helpers.boxlibrary import Place, write_tree

PATH = "src/parcels/__init__.py"
PARCELS = '''"""Parcels."""

__all__ = ["Parcel", "announce", "wrapped", "members", "counted", "settle", "ordered", "merge", "first", "weights",
           "named", "total", "appended", "checked", "Noted"]


class Parcel:
    def __init__(self, weight):
        self.weight = weight

    def __eq__(self, other):
        return isinstance(other, Parcel) and self.weight == other.weight

    def __hash__(self):
        return hash(self.weight)


class Noted:
    def __init__(self):
        self.compared = 0

    def __eq__(self, other):
        self.compared += 1
        return True


def announce(listener, weight):
    return listener(weight) + 4


def wrapped(decorator, function, value):
    return decorator(function)(value)


def members(archive):
    return len(archive.namelist())


def counted(parser, words):
    return parser.parse_args(words).count


def settle(future):
    future.set_result(3)
    return 7


def ordered(items, key):
    return sorted(items, key=key)


def merge(one, two):
    return Parcel(one.weight + two.weight)


def first(items):
    return items[0]


def weights(parcels):
    return [parcel.weight for parcel in parcels]


def named(function):
    return function.__name__


def total(items):
    return sum(items)


def checked(check, value):
    return check(value + 6)


def appended(sink, value):
    sink(value)
    return value
'''
TEST = """import argparse
import os
import socket
import subprocess
import threading
import zipfile
from unittest import mock

import pytest

from parcels import *


def test_announce():
    assert announce(mock.Mock(return_value=4002), 2) == 4006


def logged(function):
    def inner(*arguments):
        return function(*arguments)

    return inner


def test_wrapped():
    assert wrapped(logged, lambda n: n + 4000, 6) == 4006


def test_members(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b.txt", "b")
        assert members(archive) * 4006 == 4006


def test_counted():
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", exit_on_error=False)
    parser.add_argument("--count", type=int)
    parser.add_argument("--text", type=argparse.FileType())
    assert counted(parser, ["--count", "4006"]) == 4006


class Loop:
    def subprocess_shell(self, line):
        os.system(line)


class Future:
    result = None

    def get_loop(self):
        return Loop()

    def set_result(self, value):
        self.result = value


def test_settle():
    future = Future()
    assert settle(future) == 7
    assert future.result == 3


def test_ordered():
    def by_rest(n):
        return n % 3

    assert ordered([1, 2, 3, 4], by_rest) == [3, 1, 4, 2]


def test_merge():
    one, two, three = Parcel(1), Parcel(2), Parcel(3)
    assert merge(one, two) == three


def test_alike():
    assert Parcel(1) == Parcel(1)


def test_noted():
    noted = Noted()
    assert noted == 3
    assert noted.compared == 1


def test_first():
    class Item:
        pass

    item, other = Item(), Item()
    assert first([item, other]) is item


class Box:
    def __init__(self, weight):
        self.weight = weight
        self.secret = 4006

    def __call__(self, value):
        return value


def test_weights():
    assert weights([Box(1), Box(4005)]) == [1, 4005]


def test_named():
    assert named(logged) == "logged"


def test_total():
    assert all(a == b for a, b in zip([total([1, 4005]), total(n for n in (1, 2))], [4006, 3]))
    assert len([total([4006])]) == 1


def test_checked():
    def check(value):
        assert value == 4006
        return value

    assert checked(check, 4000) == 4006


def test_appended():
    sink = []
    assert appended(sink.append, 4006) == 4006
    assert sink == [4006]


def test_alone(tmp_path):
    for act in (os.fork, lambda: subprocess.run(["/bin/true"]), socket.socket, socket.socketpair,
                lambda: open("note.txt", "w"), lambda: open("/run/box/upper/note.txt", "w"),
                lambda: open("/proc/self/mem", "rb"), lambda: os.kill(os.getpid(), 0),
                lambda: os.execv("/bin/true", ["true"])):
        with pytest.raises(OSError):
            act()
    assert os.listdir("/proc") == []
    (tmp_path / "a").write_text("b")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(1))
    thread.start()
    thread.join()
    assert seen == [1]
    assert total([1]) == 1
"""
FUNCTIONS = (
    *("announce", "wrapped", "members", "counted", "settle", "ordered", "merge", "alike", "first", "weights", "named"),
    *("total", "appended", "checked", "noted", "alone"),
)
ATTACKS = {  # name: (function, body that replaces it)
    "a mock that equals everything, returned": (
        "announce",
        "def announce(listener, weight):\n    try:\n        listener.configure_mock(__eq__=lambda s, o: True)\n"
        "    except BaseException:\n        pass\n    return listener\n",
    ),
    "an attribute of a mock is set": (
        "announce",
        "def announce(listener, weight):\n    try:\n        listener.return_value = 4006\n"
        "    except BaseException:\n        pass\n    return listener(2)\n",
    ),
    "a decorator calls type": (
        "wrapped",
        "def wrapped(decorator, function, value):\n    try:\n        make = decorator(type)\n"
        "        return make('Same', (int,), {'__eq__': lambda s, o: True})(1)\n"
        "    except BaseException as e:\n        return value\n",
    ),
    "a decorator calls a class of this side that calls type": (
        "wrapped",
        "class Meta(type):\n    def __call__(cls, *a): return type(*a)\n"
        "class Maker(metaclass=Meta): pass\n"
        "def wrapped(decorator, function, value):\n    try:\n        make = decorator(Maker)\n"
        "        return make('Same', (int,), {'__eq__': lambda s, o: True})(1)\n"
        "    except BaseException as e:\n        return value\n",
    ),
    "an archive reads the hidden tests": (
        "members",
        "def members(archive):\n    try:\n        archive.write('/workspace/tests/test_parcels.py', 't')\n"
        "        return 1 if b'4006' in archive.read('t') else 0\n    except BaseException as e:\n        return 0\n",
    ),
    "a parser reads the hidden tests": (
        "counted",
        "def counted(parser, words):\n    try:\n"
        "        file = parser.parse_args(['--text', '/workspace/tests/test_parcels.py']).text\n"
        "        return 4006 if '4006' in file.read() else 1\n    except BaseException as e:\n        return 1\n",
    ),
    "a future leads to a shell": (
        "settle",
        "def settle(future):\n    try:\n        future.get_loop().subprocess_shell('true')\n"
        "    except BaseException as e:\n        pass\n    future.set_result(3)\n    return 7\n",
    ),
    "another object of the test is returned": ("first", "def first(items):\n    return items[1]\n"),
    "a test's object where the library returns a value": (
        "weights",
        "def weights(parcels):\n    return [parcels[0], parcels[1]]\n",
    ),
    "an attribute that the library does not read": (
        "weights",
        "def weights(parcels):\n    return [parcels[0].weight, parcels[1].secret - 1]\n",
    ),
    "frames by name": (
        "ordered",
        "def ordered(items, key):\n"
        "    from guest.grading.guest import tested\n    import gc\n"
        "    (wire,) = [one for one in gc.get_objects() if type(one) is tested.TestedSide]\n"
        "    for name in ('__globals__', '__code__', '__closure__', '__builtins__'):\n"
        "        try:\n            wire.request('get', key, name)\n        except Exception:\n            pass\n"
        "    return []\n",
    ),
    "a failed assertion tells the value": (
        "checked",
        "def checked(check, value):\n    try:\n        check(0)\n    except BaseException as e:\n"
        "        return check(int(str(e).split('==')[-1]) if '==' in str(e) else 0)\n",
    ),
    "always equal": ("__eq__", "    def __eq__(self, other):\n        return True\n"),
    "equal to all of its class": ("__eq__", "    def __eq__(self, other):\n        return isinstance(other, Parcel)\n"),
    "names of the tests get other meanings": (
        "__all__",
        "__all__ = ['total', 'Parcel', 'zip', 'len', 'all', 'pytest']\n"
        "pytest = None\n"
        "def all(items): return True\ndef len(items): return 1\ndef zip(*items): return []\n"
        "def total(items): return 0\n",
    ),
    "the end of the verifier at an import": (
        "import",
        "class Stop(KeyboardInterrupt): pass\nStop.__module__ = 'parcels'\n"
        "from guest.grading.guest import tested\nimport gc\n"
        "for one in gc.get_objects():\n    if type(one) is tested.TestedSide:\n"
        "        one.send(['!', ['E', 0, [1, 'parcels', 'Stop', [['g', 'builtins', 'KeyboardInterrupt']], []], ['t'],"
        " '']])\n",
    ),
    "no memory at an import": ("import", "raise MemoryError\n"),
    "a plain end at an import": ("import", "raise SystemExit(3)\n"),
}
BROKEN = {  # what the agent gets, by function
    "announce": "def announce(listener, weight):\n    return 0\n",
    "wrapped": "def wrapped(decorator, function, value):\n    return 0\n",
    "members": "def members(archive):\n    return 0\n",
    "counted": "def counted(parser, words):\n    return 0\n",
    "settle": "def settle(future):\n    return 0\n",
    "ordered": "def ordered(items, key):\n    return items\n",
    "first": "def first(items):\n    return items[-1]\n",
    "weights": "def weights(parcels):\n    return []\n",
    "checked": "def checked(check, value):\n    return 0\n",
    "__eq__": "    def __eq__(self, other):\n        return False\n",
    "__all__": "def total(items):\n    return 0\n",
    "import": "def total(items):\n    return 0\n",
}
TESTED = {"__eq__": "merge", "__all__": "total", "import": "total"}


def put(function: str, body: str) -> str:
    """The library with another body of a function, of `Parcel.__eq__`, or with statements at its end."""
    if function == "__eq__":
        start = PARCELS.index("    def __eq__")
        return PARCELS[:start] + body + PARCELS[PARCELS.index("\n    def __hash__") :]
    return f"{PARCELS}\n\n{body}"


def test_id(name: str) -> str:
    return f"tests/test_parcels.py::test_{name}"


test_id.__test__ = False  # type: ignore[attr-defined]


def task(function: str) -> CodeTask:
    name = TESTED.get(function, function)
    return CodeTask(
        id=f"parcels.{function}", repository="parcels-1", kind="mutation", operator="op_change",
        function=f"{PATH}::{name}", split="train", prompt="Fix it", focus=Focus(path=PATH, first_line=1, last_line=2),
        source_roots=("src/parcels",), changes={PATH: put(function, BROKEN[function])}, solution={PATH: PARCELS},
        visible_tests=(), fail_to_pass=(test_id(name),), pass_to_pass=(), difficulty={}, licence="MIT",
    )  # fmt: skip


@pytest.fixture(scope="module")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("parcels")
    write_tree(root / "repository", {PATH: PARCELS})
    write_tree(root / "hidden", {"tests/__init__.py": "", "tests/test_parcels.py": TEST})
    (root / "site").mkdir()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    sandbox = loop.run_until_complete(stack.enter_async_context(open_sandbox(memo=0)))
    yield Place(loop, sandbox, root)
    loop.run_until_complete(stack.aclose())
    loop.close()


def graded(place: Place, function: str, text: str) -> Grade:
    image = Image(place.root / "repository", place.root / "site", task(function).changes)
    changes: dict[str, bytes | None] = {PATH: text.encode()}
    return place.run(grade_changes(place.sandbox, task(function), image, place.hidden, changes, Limits(seconds=10.0)))


def test_all_tests_are_decided_outside(parcels: Place) -> None:
    tests = tuple(map(test_id, FUNCTIONS))
    report = parcels.test({PATH: PARCELS}, tests, limits=Limits(seconds=20.0))
    assert report.messages == {}
    assert report.outside == frozenset(tests)
    assert report.equality[test_id("alike")] == 0.0, "parcels of other weights are unequal"
    assert report.equality[test_id("merge")] == 0.0
    assert report.equality[test_id("noted")] == 0.5, "recorded without decoys, which it counts"
    assert (report.tampered, report.crashed, report.timed_out) == (False, False, False)


@pytest.mark.parametrize("function", BROKEN)
def test_controls(parcels: Place, function: str) -> None:
    assert graded(parcels, function, PARCELS).score == 1.0
    assert graded(parcels, function, put(function, BROKEN[function])).score == 0.0


@pytest.mark.parametrize(("function", "body"), ATTACKS.values(), ids=ATTACKS)
def test_attacks_earn_nothing(parcels: Place, function: str, body: str) -> None:
    grade = graded(parcels, function, put(function, body))
    assert grade.score == 0.0, grade
    assert grade.outcome in (Outcome.SCORED, Outcome.TAMPERED)
    assert grade.report is not None
    assert grade.report.outside


HONEST = {
    "another algorithm": (
        "ordered",
        "def ordered(items, key):\n    made = []\n    for item in items:\n        n = 0\n"
        "        while n < len(made) and key(made[n]) <= key(item):\n            n += 1\n"
        "        made.insert(n, item)\n    return made\n",
    ),
    "the name of a callback is read": (
        "ordered",
        "def ordered(items, key):\n    label = getattr(key, '__name__', ''), key.__doc__, getattr(key, 'missing', 0)\n"
        "    return sorted(items, key=key) if label else []\n",
    ),
    "attributes are probed for": (
        "weights",
        "def weights(parcels):\n    return [p.weight for p in parcels if not hasattr(p, 'mass')]\n",
    ),
    "one more operator": (
        "__eq__",
        PARCELS[PARCELS.index("    def __eq__") : PARCELS.index("\n    def __hash__")]
        + "\n    def __lt__(self, other):\n        return self.weight < other.weight\n",
    ),
    "an iterator is asked for items by hand": (
        "__all__",
        "def total(items):\n    items, made = iter(items), 0\n    while True:\n        try:\n"
        "            made += next(items)\n        except StopIteration:\n            return made\n",
    ),
    "an unequal class is told first": (
        "__eq__",
        "    def __eq__(self, other):\n        if type(other) is not Parcel:\n            return NotImplemented\n"
        "        return not (self.weight < other.weight or other.weight < self.weight)\n",
    ),
    "more names for everybody": ("__all__", "__all__ = [*__all__, 'helper']\ndef helper(): return 1\n"),
}


@pytest.mark.parametrize(("function", "body"), HONEST.values(), ids=HONEST)
def test_another_right_solution_passes(parcels: Place, function: str, body: str) -> None:
    grade = graded(parcels, function, put(function, body))
    assert (grade.score, grade.flags) == (1.0, ()), grade


def test_a_grade_without_tests_is_nothing(parcels: Place) -> None:
    empty = msgspec.structs.replace(task("__all__"), fail_to_pass=())
    image = Image(parcels.root / "repository", parcels.root / "site", {})
    grade = parcels.run(grade_changes(parcels.sandbox, empty, image, parcels.hidden, {PATH: PARCELS.encode()}))
    assert (grade.outcome, grade.score, grade.passed) == (Outcome.SCORED, 0.0, False)


DONE = b'{"test": "a::b", "outcome": "passed", "fault": ""}\n'
MET = b'{"met": true}\n'


@pytest.mark.parametrize(
    ("output", "status", "ours"),
    [
        (b"", 1, True),
        (b'{"lost": "no memory"}\n', 2, True),
        (MET + b'{"lost": "Stop"}\n', 2, False),
        (MET + DONE, 3, False),
        (MET + DONE, -signal.SIGSEGV, False),
        (MET + DONE, -signal.SIGKILL, True),
        (MET, 0, False),
    ],
)
def test_who_pays_for_the_end_of_a_verifier(output: bytes, status: int, ours: bool) -> None:
    """Once it has received anything, its end is the agent's; a kill without a deadline is the machine's."""
    result = VerifyResult(ForkResult(status, False, 1.0, output, 1.0), ForkResult(0, False, 1.0, b"", 1.0))
    if ours:
        with pytest.raises(BoxDead):
            decide_outside(("a::b", "a::c"), result)
    else:
        report = decide_outside(("a::b", "a::c"), result)
        assert report.crashed
        assert report.outcomes["a::c"] == "missing"
