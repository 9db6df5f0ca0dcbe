"""Sham answers, and the gate that drops tasks which one of them passes."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from etude.config import BuildConfig
from etude.records import CodeTask, Focus
from etude.tasks.build import build_dataset
from etude.tasks.shams import sham_answers

MODULE = '''
"""Größen."""

def one(a, b=2): return "ß" + a  # on one line

class Shelf:
    @staticmethod
    def of(*items):
        """A docstring
        on two lines."""
        return [*items]

    def wrap(self, function):
        @property
        def inner(self):
            return function(self)
        return inner

LAST = 1
'''


def _task(function: str, text: str = MODULE, path: str = "lib.py") -> CodeTask:
    return CodeTask(
        id="x",
        repository="r",
        kind="mutation",
        operator="o",
        function=f"{path}::{function}",
        split="train",
        prompt="p",
        focus=Focus(path=path, first_line=1, last_line=2),
        source_roots=("",),
        changes={path: text},
        solution={},
        visible_tests=(),
        fail_to_pass=(),
        pass_to_pass=(),
        difficulty={},
        licence="MIT",
    )


@pytest.mark.parametrize("function", ["one", "Shelf.of", "Shelf.wrap"])
def test_shams_replace_the_body_and_nothing_else(function: str, tmp_path: Path) -> None:
    found = [sham["lib.py"] for sham in sham_answers(_task(function), tmp_path)]
    texts = [data.decode() for data in found if data is not None]
    assert len(set(texts)) == len(texts) >= 5
    imports = builtins.__import__
    for text in texts:
        space: dict[str, object] = {"__name__": "lib"}
        try:
            exec(compile(text, "lib.py", "exec"), space)
        finally:
            builtins.__import__ = imports  # which a sham that remembers wraps
        assert space["LAST"] == 1
        old, new = (
            {n.name: ast.dump(n.args) for n in ast.walk(ast.parse(t)) if isinstance(n, ast.FunctionDef)}
            for t in (MODULE, text)
        )
        assert all(new[name] == old[name] for name in ("one", "of", "wrap"))
    spaces = []
    for text in texts:
        exec(text, space := {"__name__": "lib"})
        builtins.__import__ = imports
        spaces.append(space)
    if function == "one":
        plain = spaces[:9]
        with pytest.raises(ValueError, match="v w"):
            plain.pop(6)["one"]("v", "w")
        results = [space["one"]("v", "w") for space in plain]
        assert results[:3] == [None, True, False]
        assert [*results[3]] == []
        assert results[4] == object()
        assert results[6:8] == ["v", "w"]


def test_constants_of_visible_tests_and_fields_are_shams(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_lib.py").write_text(
        "def test_one():\n    assert one(1, 2) == {'a': -3}\n    assert 'x' == one(2, 1)\n    assert two(1) == 5\n"
        "    assert one(3, 3) == other(4)\n"
    )
    (tmp_path / "tests/one.test.js").write_text(
        "test('one', () => assert.equal(one('x y'), 'a b'))\ntest('two', () => assert.equal(two(1), 7))\n"
        "test('three', () => {\n  expect(one(1)).toBe(-2.5)\n})\n"
    )
    module = (
        "class Box:\n    def __init__(self, a):\n        self.a = a\n        self.b, other = 1, 2\n\n"
        "    def one(self, x):\n        return 0\n"
    )
    task = msgspec.structs.replace(_task("Box.one", module), visible_tests=("tests/test_lib.py::test_one",))
    texts = [(sham["lib.py"] or b"").decode() for sham in sham_answers(task, tmp_path)]
    for body in ("{'a': -3}", "'x'", "self.a", "self.b"):
        assert any(text.endswith(f"        return {body}\n") for text in texts), body
    assert not any(text.endswith("return 5\n") for text in texts)
    pytest.importorskip("tree_sitter_javascript")
    script = msgspec.structs.replace(
        _task("one", "export function one (x) {\n  return 0\n}\n", "lib.js"), visible_tests=("tests/one.test.js::one",)
    )
    bodies = [(sham["lib.js"] or b"").decode() for sham in sham_answers(script, tmp_path)]
    for body in ("'a b'", "-2.5"):
        assert any(f"return {body};" in text for text in bodies), body
    assert not any("return 7;" in text for text in bodies)


def test_other_tasks_have_none(tmp_path: Path) -> None:
    for task in (_task("Shelf"), _task("gone"), _task("one", "def (")):
        assert sham_answers(task, tmp_path) == []


LIBRARY = '''
from contextlib import contextmanager


def checked(value):
    """Raise ValueError unless the value is positive."""
    if value <= 0:
        raise ValueError(value)
    return None


def settled(value):
    """Raise ValueError if the value is not settled yet."""
    if value not in ("open", "closed"):
        raise ValueError(f"not settled: {value}")
    return value.upper()


@contextmanager
def raising(kind):
    """Expect an error of a kind in the block."""
    try:
        yield
    except kind:
        return
    raise AssertionError("no error")


def double(value):
    """Twice the value."""
    if value is None:
        return 0
    return value + value
'''
TESTS = """
import pytest
from lib import checked, double, raising, settled


def test_raising():
    with raising(ValueError):
        raise ValueError


def test_raising_again():
    with raising(KeyError):
        raise KeyError


def test_settled():
    with pytest.raises(ValueError, match="settled"):
        settled("half")


def test_settled_nowhere():
    with pytest.raises(ValueError, match="half way"):
        settled("half way")


def test_checked():
    assert checked(1) is None


def test_checked_again():
    assert checked(2) is None


def test_double():
    assert double(2) == 4
    assert double(None) == 0


def test_double_text():
    assert double("a") == "aa"
"""


def _built(tmp_path: Path, files: dict[str, str]) -> tuple[set[str], str]:
    """The functions of the tasks that are made of a repository, and its card."""
    repository, out = tmp_path / "lib", tmp_path / "tasks"
    for path, text in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    (repository / "LICENSE").write_text("MIT License\n\nPermission is hereby granted, free of charge\n")
    options = BuildConfig(
        max_tasks=30, min_lines=1, kinds=("removal",), heldout_fraction=0.0, visible_failure=False, repeats=1
    )
    made = build_dataset(repository, out, options, lambda *_: None)
    return {task.function for task in made.tasks}, (out / "DATACARD.md").read_text()


def test_a_task_that_a_sham_passes_is_dropped(tmp_path: Path) -> None:
    made, card = _built(tmp_path, {"lib.py": LIBRARY, "tests/test_lib.py": TESTS})
    assert "a sham answer passes" in card
    assert made == {"lib.py::double"}


CODEC = '''
"""Numbers as text. What a function's tests know of it, its name says."""


class BadText(ValueError):
    """The text stands for nothing."""


def only_read_back(items):
    """Numbers, joined."""
    if not items:
        return "-"
    return ";".join(f"{number:d}" for number in items)


def reads_back(text):
    """Numbers of what `only_read_back` wrote. Raises BadText."""
    if text == "-":
        return []
    try:
        return [int(word) for word in text.split(";")]
    except ValueError as e:
        raise BadText(text) from e


def sealed(text):
    """The text with its sum."""
    total = sum(map(ord, text))
    return f"{text}.{total}"


def judges_its_own(text):
    """Whether `sealed` made the text."""
    head, dot, total = text.rpartition(".")
    if not dot:
        return False
    return str(sum(map(ord, head))) == total


def hexed(items):
    """Numbers as hexadecimal text."""
    words = [f"{number:02x}" for number in items]
    return "".join(words)


def unhexed(text):
    """Numbers of hexadecimal text."""
    pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
    return [int(pair, 16) for pair in pairs]
'''
CODEC_TESTS = """
import pytest
from codec import BadText, hexed, judges_its_own, only_read_back, reads_back, sealed, unhexed


@pytest.mark.parametrize("items", [[], [1], [1, 22], [3, 4, 5]])
def test_round_trip(items):
    assert reads_back(only_read_back(items)) == items


def test_bad_text():
    assert reads_back(only_read_back([7])) == [7]
    with pytest.raises(BadText):
        reads_back("x")


@pytest.mark.parametrize("text", ["", "a", "b.c"])
def test_seal(text):
    assert judges_its_own(sealed(text))
    assert not judges_its_own(text + "!")


def test_sealed_text():
    assert sealed("a") == "a.97"


def test_sealed_empty():
    assert sealed("") == ".0"


@pytest.mark.parametrize("items, text", [([], ""), ([255], "ff"), ([1, 16], "0110")])
def test_hexed(items, text):
    assert hexed(items) == text


def test_hexed_again():
    assert hexed([2, 3]) == "0203"


@pytest.mark.parametrize("items, text", [([12], "0c"), ([2, 32], "0220")])
def test_unhexed(items, text):
    assert unhexed(text) == items


def test_unhexed_again():
    assert unhexed("0708") == [7, 8]
"""


def test_tests_that_read_back_what_the_library_wrote_make_no_task(tmp_path: Path) -> None:
    made, _ = _built(tmp_path, {"codec.py": CODEC, "tests/test_codec.py": CODEC_TESTS})
    assert made == {f"codec.py::{name}" for name in ("sealed", "hexed", "unhexed")}


SCRIPT_WRITER = """'use strict'
/** Numbers, joined. */
function write (items) {
  if (!items.length) return '-'
  return items.join(';')
}

const hexed = (items) => {
  const words = items.map((each) => each.toString(16).padStart(2, '0'))
  return words.join('')
}

module.exports = { write, hexed }
"""
SCRIPT_READER = """'use strict'
const seen = require('./seen.js')

/** Numbers of what `write` wrote. */
function read (text) {
  seen.length = text.length
  if (text === '-') return []
  const words = text.split(';')
  if (!words.every((word) => /^[0-9]+$/.test(word))) throw new RangeError('no text')
  return words.map(Number)
}

function unhexed (text) {
  const pairs = text.match(/../g) || []
  return pairs.map((pair) => parseInt(pair, 16))
}

/** Whether two lists are equal. */
function agree (one, other) {
  if (one.length !== other.length) return false
  return one.every((each, index) => each === other[index])
}

function each (items, work) {
  for (const item of items) {
    work(item)
  }
}

module.exports = { read, unhexed, agree, each }
"""
SCRIPT_SEEN = b"module.exports = {}\n"
SCRIPT_TESTS = """'use strict'
const { test } = require('node:test')
const assert = require('node:assert')
const { write, hexed } = require('../write.js')
const { read, unhexed, agree, each } = require('../read.js')

"""
SCRIPT_TEST = """
test('round trip of %(n)s', () => {
  assert.deepStrictEqual(read(write(%(items)s)), %(items)s)
})
test('no text of %(n)s', () => {
  assert.throws(() => read('x%(n)s'), RangeError)
})
test('agree on %(n)s', () => {
  assert.strictEqual(agree(%(items)s, %(items)s), true)
})
test('each of %(n)s', () => {
  each(%(items)s, (item) => assert.ok(item > 0))
})
test('hex of %(n)s', () => {
  assert.strictEqual(hexed(%(items)s), '%(text)s')
})
test('unhexed to %(n)s', () => {
  assert.deepStrictEqual(unhexed('0%(k)s0b'), [%(k)s, 11])
})
"""


def _needs_node() -> None:
    pytest.importorskip("tree_sitter_javascript")
    if shutil.which("node") is None:
        pytest.skip("needs Node.js")


def _answers(folder: Path, sham: dict[str, bytes | None], program: str) -> list[object]:
    """What a program prints beside the files of a sham."""
    files = {"write.js": SCRIPT_WRITER.encode(), "read.js": SCRIPT_READER.encode(), "seen.js": SCRIPT_SEEN, **sham}
    folder.mkdir()
    for path, data in files.items():
        assert data is not None
        (folder / path).write_bytes(data)
    text = f"const {{ write }} = require('./write.js'), {{ read }} = require('./read.js');\n{program}"
    done = subprocess.run(["node", "-e", text], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_texts_of_javascript_shams(tmp_path: Path) -> None:
    _needs_node()
    for name, text in (("write.js", SCRIPT_WRITER.encode()), ("read.js", b""), ("seen.js", SCRIPT_SEEN)):
        (tmp_path / name).write_bytes(text)
    broken = SCRIPT_READER.replace("words.map(Number)", "[]")
    reads = msgspec.structs.replace(_task("read", broken, "read.js"), solution={"read.js": SCRIPT_READER})
    reads = msgspec.structs.replace(reads, source_roots=("write.js", "read.js", "seen.js"))
    program = """const say = (work) => { try { console.log(JSON.stringify(work()) ?? '""') }
      catch (error) { console.log(`"${error.name}"`) } }
    say(() => read(write([1, 22]))); say(() => read('7')); say(() => read('x'))
    say(() => require('./seen.js').length)"""
    found = [
        _answers(tmp_path / str(number), sham, program) for number, sham in enumerate(sham_answers(reads, tmp_path))
    ]
    assert [each[0] for each in found[:6]] == ["", None, True, False, [], ""]
    inverse, overruled, judge, *tokens = found[-5:]
    assert inverse == [[1, 22], "RangeError", "RangeError", ""]
    assert overruled == [[1, 22], [], "RangeError", 1], "the broken body ran for its other effects"
    assert judge == [True, False, False, ""]
    assert [each[0] for each in tokens] == ["\0sham 0\0", [254, 255, 254, 0]]
    writes = _task("write", SCRIPT_WRITER.replace("items.join(';')", "''"), "write.js")
    writes = msgspec.structs.replace(writes, source_roots=("write.js", "read.js", "seen.js"))
    (tmp_path / "read.js").write_text(SCRIPT_READER)
    text, numbers = sham_answers(writes, tmp_path)[-2:]
    assert _answers(tmp_path / "text", text, program)[0] == [1, 22]
    assert _answers(tmp_path / "numbers", numbers, program)[0] == [1, 22]


@pytest.mark.slow
def test_shams_of_javascript(tmp_path: Path) -> None:
    _needs_node()
    cases = [
        ("nothing", "[]", ""),
        ("one", "[255]", "ff"),
        ("two", "[1, 16]", "0110"),
        ("three", "[3, 4, 5]", "030405"),
    ]
    tests = "".join(
        SCRIPT_TEST % {"n": n, "items": items, "text": text, "k": k} for k, (n, items, text) in enumerate(cases)
    )
    files = {
        "write.js": SCRIPT_WRITER,
        "read.js": SCRIPT_READER,
        "seen.js": SCRIPT_SEEN.decode(),
        "test/all.test.js": SCRIPT_TESTS + tests,
        "package.json": '{"name": "codec", "version": "1.0.0", "license": "MIT"}\n',
    }
    made, card = _built(tmp_path, files)
    assert "a sham answer passes" in card
    assert made == {"write.js::hexed", "read.js::unhexed"}
