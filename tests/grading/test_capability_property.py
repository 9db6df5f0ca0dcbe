"""Whatever the tested process asks of the objects that a test hands over, it reaches nothing of the verifier's state.

The verifier's end of the wire runs in this process, on a socket that answers as an attacker would. Each kind of object
is handed over and used as a right library uses it, which is recorded; then come requests of any form.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import itertools
import json
import operator
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from etude.grading.guest import handed
from etude.grading.guest.tested import OPERATIONS
from etude.grading.guest.verifier import Recorded, Refused, Verifier
from etude.grading.guest.wire import Context, Garbage, Gone
from etude.sandbox.guest import root

SECRET = "5ecret"
TEST = '''
EXPECTED = "global-5ecret"
VERDICT = ["failed"]


def plain(value, *rest):
    return len(EXPECTED) and value


def closed():
    inner = "closure-5ecret"

    def function(value=None, *rest):
        return value if value != inner else None

    return function


def apply(function, *values):
    return function(*values)


def counted():
    hidden = "frame-5ecret"
    yield 1
    yield len(hidden)


class Thing:
    """A thing."""

    kept = "class-5ecret"

    def __init__(self):
        self.name = "thing"
        self.secret = "attribute-5ecret"

    def method(self, value):
        return value

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return {0: 1}.get(key)

    def __iter__(self):
        return iter((1, 2))

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return 1

    def __add__(self, other):
        return other

    def __call__(self, value):
        return value

    def __repr__(self):
        return self.secret

    def __format__(self, form):
        return self.secret + form

    def __enter__(self):
        return 1

    def __exit__(self, *error):
        return None

    @property
    def other(self):
        return self.secret


def failed():
    try:
        hidden = "traceback-5ecret"
        raise KeyError(len(hidden))
    except KeyError as error:
        return error


def template(item):
    return lambda form, *values: form.format(item, *values)
'''
# Kind -> how to make it in the test module, and requests of a right library; 0 stands for the object.
KINDS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "function": (lambda t: t.plain, (("call", 0, 1),)),
    "closure": (lambda t: t.closed(), (("call", 0, 1),)),
    "lambda": (lambda t: eval("lambda n: n", vars(t)), (("call", 0, 1),)),
    "higher": (lambda t: t.apply, (("call", 0, ["h", 900, [901, "m", "F", [], [["__call__", "m"]]]]),)),
    "template": (lambda t: t.template(t.Thing()), (("call", 0, "a"),)),
    "formatter": (lambda t: "{} {}".format, (("call", 0, "a", "b"),)),
    "getter": (lambda t: operator.attrgetter("name"), (("call", 0, ["h", 900, [901, "m", "F", [], []]]),)),
    "method": (lambda t: t.Thing().method, (("call", 0, 1),)),
    "partial": (lambda t: functools.partial(t.plain, 3), (("call", 0),)),
    "generator": (lambda t: t.counted(), (("op", "next", 0),)),
    "iterator": (lambda t: iter([1, 2]), ()),
    "chain": (lambda t: itertools.chain([1], [2]), ()),
    "instance": (lambda t: t.Thing(), (("get", 0, "name"), ("op", "iter", 0), ("op", "eq", 0, 1))),
    "callable": (lambda t: t.Thing(), (("call", 0, 1), ("op", "add", 0, 1))),
    "context": (lambda t: t.Thing(), (("op", "enter", 0),)),
    "class": (lambda t: t.Thing, (("call", 0), ("instance", 1, 0))),
    "mock": (lambda t: mock.Mock(return_value=1), (("call", 0, 1), ("get", 0, "closed"))),
    "magic": (lambda t: mock.MagicMock(), (("op", "iter", 0),)),
    "error": (lambda t: t.failed(), ()),
    "property": (lambda t: vars(t.Thing)["other"], ()),
    "parser": (lambda t: _parser(), (("get", 0, "parse_args"), ("call", 1, ["l", "--count", "1"]))),
    "archive": (lambda t: zipfile.ZipFile(t.folder / "public.zip"), (("get", 0, "namelist"), ("call", 1))),
    "file": (lambda t: io.StringIO("public\n"), (("get", 0, "readline"), ("call", 1))),
    "future": (lambda t: t.loop.create_future(), (("get", 0, "done"), ("call", 1))),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", exit_on_error=False)
    parser.add_argument("--count", type=int)
    parser.add_argument("--file", type=argparse.FileType())
    return parser


class Attacker:
    """A socket whose other end answers every request of the verifier with the next of some values."""

    def __init__(self, answers: list[Any]) -> None:
        self.sent = bytearray()
        self.answers = itertools.cycle(answers or [None])
        self.waiting = bytearray()

    def sendall(self, data: bytes) -> None:
        self.sent += data
        if json.loads(data[4:])[0] not in ("=", "!"):
            answer = json.dumps(["=", next(self.answers), [], []]).encode()
            self.waiting += struct.pack("<I", len(answer)) + answer

    def recv(self, size: int) -> bytes:
        data = bytes(self.waiting[:size])
        del self.waiting[: len(data)]
        return data

    def close(self) -> None:
        pass


class Watch:
    """What this process does besides, seen by an audit hook, which cannot be taken away."""

    hook: Callable[[str, tuple[Any, ...]], None] | None = None
    processes: list[str]

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.hook is not None:
            if event in ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect"):
                self.processes.append(event)
            self.hook(event, arguments)


WATCH = Watch()
sys.addaudithook(WATCH)


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A test module with secrets, in a folder that stands for the verifier's."""
    folder = tmp_path_factory.mktemp("workspace").resolve()
    (folder / "secret.txt").write_text(f"file-{SECRET}")
    (folder.parent / "public").mkdir(exist_ok=True)
    module: Any = ModuleType("test_things")
    module.folder = folder.parent / "public"
    with zipfile.ZipFile(module.folder / "public.zip", "w") as archive:
        archive.writestr("a.txt", "public")
    module.loop = asyncio.new_event_loop()
    exec(compile(TEST, f"{folder}/test_things.py", "exec"), vars(module))
    patch = pytest.MonkeyPatch()
    patch.setattr(root, "WORKSPACE", str(folder))
    patch.setitem(sys.modules, "test_things", module)
    yield module
    patch.undo()
    module.loop.close()


def verifier(recording: bool, answers: list[Any]) -> tuple[Verifier, Attacker]:
    end = Attacker(answers)
    request = {"recording": recording, "names": ["things"], "exports": {}, "secret": ""}
    wire = Verifier(end, request, lambda: None)  # type: ignore[arg-type]
    return wire, end


def hand(wire: Verifier, value: object) -> None:
    """Hand an object over, as an argument of a call does."""
    context = Context()
    wire.encode(value, context)
    wire.described.update(context.described)


def ask(wire: Verifier, message: list[Any]) -> None:
    WATCH.hook = handed.watch(wire)
    try:
        wire.answer(message)
    finally:
        WATCH.hook = None


def honest(request: tuple[Any, ...]) -> list[Any]:
    """The frame of a right library's request."""
    operation, *parts = request
    if operation == "op":
        return ["op", parts[0], *[["o", 0] if n == 0 and part == 0 else part for n, part in enumerate(parts[1:])]]
    if operation == "call":
        return ["call", ["o", parts[0]], ["t", *parts[1:]], ["d"]]
    if operation == "instance":
        return ["instance", parts[0], ["o", 0]]
    return ["get", ["o", parts[0]], parts[1]]


def recorded(make: Callable[[Any], Any], uses: tuple[Any, ...], tests: ModuleType) -> list[str]:
    wire, _ = verifier(True, [1])
    hand(wire, make(tests))
    for use in uses:
        ask(wire, honest(use))
    assert not wire.fault
    return list(wire.places)


NAMES = st.sampled_from(
    [
        *("name", "secret", "kept", "other", "closed", "func", "write", "read", "extractall", "readline", "namelist"),
        *("buffer", "fget", "mro", "get_loop", "parse_args", "configure_mock", "return_value", "__class__", "__dict__"),
        *("__globals__", "__closure__", "__code__", "__self__", "__func__", "__wrapped__", "__init__", "__doc__"),
        *("__subclasses__", "__traceback__", "gi_frame", "tb_frame", "f_globals"),
    ]
)


def forms(path: str) -> st.SearchStrategy[Any]:
    """Anything that can stand in a request."""
    classes = st.sampled_from(
        ["type", "object", "int", "str", "dict", "list", "Exception", "KeyboardInterrupt", "eval"]
    )
    texts = st.sampled_from(
        [
            *(path, f"@{path}", path.replace("secret.txt", "made.txt"), "--file", "secret", "__globals__", "a", "%s"),
            *("{0.secret}", "{0.__class__.__init__.__globals__}", "{0.__func__.__globals__[EXPECTED]}", "{0!r}", "{}"),
        ]
    )
    class_ = st.tuples(st.integers(900, 905), st.just("things"), st.sampled_from(["X", "type", "code"])).map(
        lambda parts: [*parts, [["g", "builtins", "int"]], [["__eq__", "m"], ["__call__", "m"], ["__index__", "m"]]]
    )
    leaves = st.one_of(
        st.sampled_from([0, 0, 1, 2, 3, -1, 12]).map(lambda n: ["o", n]),
        classes.map(lambda name: ["k", ["g", "builtins", name]]),
        classes.map(lambda name: ["g", "builtins", name]),
        class_.map(lambda form: ["h", form[0] + 10, form]),
        class_.map(lambda form: ["k", form]),
        texts, NAMES, st.none(), st.booleans(), st.integers(-3, 5),
    )  # fmt: skip
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: ["l", *items]),
            st.lists(inner, max_size=3).map(lambda items: ["t", *items]),
            st.tuples(texts | NAMES, inner).map(lambda pair: ["d", *pair]),
            st.tuples(st.integers(920, 925), inner).map(
                lambda pair: ["E", pair[0], ["g", "builtins", "ValueError"], ["t", pair[1]], ""]
            ),
        ),
        max_leaves=4,
    )


def requests(path: str) -> st.SearchStrategy[list[Any]]:
    own = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3]).map(lambda n: ["o", n])
    value = forms(path)
    arguments = st.lists(value, max_size=3).map(lambda items: ["t", *items])
    keywords = st.just(["d"]) | st.tuples(NAMES, value).map(lambda pair: ["d", *pair])
    operations = st.sampled_from([*OPERATIONS])
    return st.one_of(
        st.tuples(st.just("get"), own, NAMES).map(list),
        st.tuples(st.just("get"), own, NAMES).map(list),
        st.tuples(st.just("call"), own, arguments, keywords).map(list),
        st.tuples(st.just("call"), own, arguments, st.just(["d"])).map(list),
        st.tuples(st.just("set"), own, NAMES, value).map(list),
        st.tuples(st.just("op"), operations, own, st.lists(value, max_size=2)).map(lambda p: [*p[:3], *p[3]]),
        st.tuples(st.just("op"), operations, value, own).map(list),
        st.tuples(st.just("instance"), value, own).map(list),
        st.tuples(st.sampled_from(["import", "class", "del", "method", "content", "?"]), value, value).map(list),
    )


def present() -> list[str]:
    """The files of the tests, and those in the folder beside them."""
    folder = Path(root.WORKSPACE)
    return sorted(str(path) for place in (folder, folder.parent / "public") for path in place.rglob("*"))


def attack(tests: Any, kind: str, frames: list[Any], answers: list[Any], result: Any) -> None:
    """Send requests about a handed object, then a result; assert that nothing was reached."""
    make, uses = KINDS[kind]
    allowed = recorded(make, uses, tests)
    wire, end = verifier(False, answers)
    wire.begin(Recorded(allowed))
    value = make(tests)
    hand(wire, value)
    before = {name: repr(part) for name, part in vars(tests).items() if not name.startswith("__")}
    files = present()
    WATCH.processes = []
    faults = []
    try:
        for frame in frames:
            ask(wire, frame)
            faults.append(wire.fault)
        got = wire._result(["=", result, [], []], [])
    except (Garbage, Gone, Refused):
        got = None
    except Exception:  # an exception of the library, or one that a test would see
        got = None
    assert SECRET.encode() not in end.sent
    assert WATCH.processes == []
    assert present() == files
    assert {name: repr(part) for name, part in vars(tests).items() if not name.startswith("__")} == before
    assert kind == "magic" or value != 4006
    assert kind not in ("instance", "callable") or vars(value) == vars(make(tests))
    assert not any(got is one for one in (value, *wire.exported))
    refused = [fault for fault in faults if fault]
    assert not refused or wire.fault == refused[0], "a fault stays until the test ends"


def played(tests: ModuleType, count: int, kinds: Sequence[str] = tuple(KINDS)) -> None:
    path = f"{root.WORKSPACE}/secret.txt"

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(
        st.sampled_from(kinds), st.lists(requests(path), min_size=1, max_size=5), st.lists(forms(path), max_size=2),
        forms(path),
    )  # fmt: skip
    def play(kind: str, frames: list[Any], answers: list[Any], result: Any) -> None:
        attack(tests, kind, frames, answers, result)

    play()


def test_nothing_of_the_verifier_is_reached(tests: ModuleType) -> None:
    played(tests, 300)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_library_is_served(tests: ModuleType, kind: str) -> None:
    make, uses = KINDS[kind]
    wire, _ = verifier(False, [1])
    wire.begin(Recorded(recorded(make, uses, tests)))
    hand(wire, make(tests))
    for use in uses:
        ask(wire, honest(use))
    assert wire.fault == ""


def permissive(wire: Any, operation: str, values: list[Any], owned: list[Any]) -> object:
    """As operations were served before they were recorded: by public names."""
    if operation in ("call", "get", "set") and id(values[0]) not in wire.numbers:
        raise Garbage("not handed over")
    if operation == "call":
        return values[0](*values[1], **values[2])
    if operation in ("get", "set"):
        if values[1].startswith(("_", "gi_", "tb_", "f_")):
            raise AttributeError(values[1])
        return getattr(values[0], values[1]) if operation == "get" else setattr(*values)
    if operation == "op":
        return OPERATIONS[values[0]](*values[1:])
    return isinstance(*values)


@pytest.mark.parametrize("kind", ["instance"])
def test_it_finds_what_is_reached(tests: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(handed, "serve", permissive)
    with pytest.raises((AssertionError, ExceptionGroup)):
        played(tests, 1500, [kind])
