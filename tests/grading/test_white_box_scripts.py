"""What the tested process cannot do to JavaScript tests: lead out by another realm, or change what a test has kept."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from etude.grading import javascript, script_runner
from etude.grading.runner import open_sandbox
from etude.sandbox.base import Changes, Image, Limits, TestReport
from tests.helpers.boxlibrary import write_tree

GUEST = Path(__file__).parents[2] / "src/etude/grading/guest"
TWO_REALMS = """
const vm = require('node:vm')
const text = require('node:fs').readFileSync(process.argv[1], 'utf8')
const context = vm.createContext({})
const inner = { exports: {} }
vm.runInContext(`(function (module, require, process) {${text}\\n})`, context)(inner, require, process)
const { intrinsicAt, intrinsicOf } = inner.exports
const emitter = new (require('node:events'))()
const others = [emitter.on.constructor, (async () => {}).constructor, process, eval]
const named = [Function, vm.runInContext('Function', context), ...others]
console.log(named.map(intrinsicOf).join(), intrinsicAt('Function') === vm.runInContext('Function', context))
"""
FILE = "test/lib.test.js"
TEST = """import assert from 'node:assert/strict'
import test from 'node:test'
import { merged, repeated, sorted, without } from '../lib.js'

test('repeated', () => {
  const items = [1, 2]
  assert.deepEqual(repeated(items), items.flatMap((item) => [item, item]))
})
test('sorted', () => {
  const items = [3, 1]
  assert.equal(sorted(items), items)
  assert.deepEqual(items, [1, 3])
})
test('kept', () => {
  const items = [5]
  repeated(items)
  repeated(items)
  assert.deepEqual(repeated(items), [5, 5])
})
test('merged', () => {
  const one = { a: 1 }
  assert.deepEqual(merged(one, { b: 2 }), { a: 1, b: 2 })
  assert.deepEqual(one, { a: 1 })
})
test('without', () => {
  const one = { a: 1, b: () => 2, c: new Set([1, 2]) }
  assert.equal(without(one, 'a'), 2)
  assert.deepEqual(Object.keys(one), ['a', 'b', 'c'])
})
"""
RIGHT = """export const repeated = (items) => items.flatMap((item) => [item, item])
export const sorted = (items) => items.sort()
export const merged = (one, other) => ({ ...one, ...other })
export const without = (one, name) => Object.keys(one).length - 1
"""
NAMES = ("repeated", "sorted", "kept", "merged", "without")
CHANGES: dict[str, tuple[str, set[str]]] = {  # other text of a function -> tests that fail
    "the right one": ("", set()),
    "emptied": ("repeated = (items) => { items.length = 0; return [] }", {"repeated", "kept"}),
    "drained": (
        "repeated = (items) => {\n  const made = []\n"
        "  while (items.length) { const item = items.shift(); made.push(item, item) }\n  return made\n}",
        {"repeated", "kept"},
    ),
    "updated": ("merged = (one, other) => { Object.assign(one, other); return { ...one } }", {"merged"}),
    "undone": (
        "without = (one, name) => {\n  const value = one[name]\n  delete one[name]\n"
        "  one.c.delete(1)\n  const size = Object.keys(one).length\n  one[name] = value\n  one.c.add(1)\n"
        "  return size\n}",
        set(),
    ),
    "sorted otherwise": (
        "sorted = (items) => {\n  const made = items.splice(0).sort()\n  items.push(...made)\n  return items\n}",
        set(),
    ),
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_objects_of_another_realm_have_names() -> None:
    command = ["node", "-e", TWO_REALMS, str(GUEST / "intrinsics.cjs")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["Function,Function,Function,AsyncFunction,process,eval", "true"]


def changed(function: str) -> str:
    """The right library with another text of a function."""
    name = function.partition("=")[0]
    return re.sub(rf"{name}=.*", lambda _: function, RIGHT) if function else RIGHT


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_arguments_that_the_right_library_leaves_alone(tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_javascript")
    package = '{"name": "lib", "type": "module", "scripts": {"test": "node --test"}}'
    write_tree(tmp_path / "repository", {"lib.js": RIGHT, "package.json": package})
    write_tree(tmp_path / "hidden", {FILE: TEST})
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    names = [f"{FILE}::{name}" for name in NAMES]

    async def run() -> list[TestReport]:
        async with open_sandbox(memo=0) as sandbox:
            image = Image(tmp_path / "repository", None, {})
            texts = [changed(function) for function, _ in CHANGES.values()]
            return [
                await sandbox.run_tests(
                    image, {"lib.js": text.encode()}, names, tmp_path / "hidden", Limits(seconds=30.0)
                )
                for text in texts
            ]

    for (name, (_, failing)), report in zip(CHANGES.items(), asyncio.run(run()), strict=True):
        assert report.outside == frozenset(names)
        failed = {test.removeprefix(f"{FILE}::") for test, outcome in report.outcomes.items() if outcome != "passed"}
        assert failed == failing, (name, report.messages)


PEG = """export class Peg {
  constructor (row, column) { this.row = row; this.column = column }
  moved (rows, columns) { return new Peg(this.row + rows, this.column + columns) }
}
"""
SHOWS_NOTHING = """export class Peg {
  #row
  constructor (row) { this.#row = row }
  moved () { return new Peg(0, 0) }
}
"""
PEG_TEST = """import assert from 'node:assert/strict'
import test from 'node:test'
import { Peg } from '../lib.js'

test('moved', () => {
  assert.deepEqual(new Peg(1, 2).moved(3, 4), new Peg(4, 6))
})
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("useless", [0, 1])
def test_objects_that_show_nothing_are_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, useless: int) -> None:
    """`useless`: first copies with other expected objects that fail no test."""
    pytest.importorskip("tree_sitter_javascript")
    copies = iter([PEG_TEST] * useless)

    def contradicted(path: str, text: str, objects: bool = False) -> str | None:
        return next(copies, None) or javascript.contradicted(path, text, objects)

    monkeypatch.setattr(script_runner, "contradicted", contradicted)
    test = f"{FILE}::moved"
    package = '{"name": "lib", "type": "module", "scripts": {"test": "node --test"}}'
    write_tree(tmp_path / "repository", {"lib.js": PEG, "package.json": package})
    write_tree(tmp_path / "hidden", {FILE: PEG_TEST})
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    async def run() -> list[TestReport]:
        async with open_sandbox(memo=0) as sandbox:
            image = Image(tmp_path / "repository", None, {})
            changes: list[Changes] = [{"lib.js": text.encode()} for text in (PEG, SHOWS_NOTHING)]
            return [
                await sandbox.run_tests(image, c, [test], tmp_path / "hidden", Limits(seconds=30.0)) for c in changes
            ]

    right, nothing = asyncio.run(run())
    assert (right.outcomes, right.outside) == ({test: "passed"}, frozenset([test]))
    assert nothing.messages == {test: "another expected object is equal, too"}
