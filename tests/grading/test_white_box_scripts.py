"""What the tested process cannot do to JavaScript tests: lead out by another realm, or change what a test has kept."""

from __future__ import annotations

import asyncio
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
import { repeated, sorted } from '../lib.js'

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
"""
RIGHT = """export const repeated = (items) => items.flatMap((item) => [item, item])
export const sorted = (items) => items.sort()
"""
EMPTIED = "export const repeated = (items) => { items.length = 0; return [] }\n"
DRAINED = """export const repeated = (items) => {
  const made = []
  while (items.length) { const item = items.shift(); made.push(item, item) }
  return made
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_objects_of_another_realm_have_names() -> None:
    command = ["node", "-e", TWO_REALMS, str(GUEST / "intrinsics.cjs")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["Function,Function,Function,AsyncFunction,process,eval", "true"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_arguments_that_the_right_library_leaves_alone_stay(tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_javascript")
    package = '{"name": "lib", "type": "module", "scripts": {"test": "node --test"}}'
    write_tree(tmp_path / "repository", {"lib.js": RIGHT, "package.json": package})
    write_tree(tmp_path / "hidden", {FILE: TEST})
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    names = [f"{FILE}::{name}" for name in ("repeated", "sorted", "kept")]

    async def run() -> list[TestReport]:
        async with open_sandbox(memo=0) as sandbox:
            image = Image(tmp_path / "repository", None, {})
            texts = (
                RIGHT,
                RIGHT.replace(RIGHT.split("\n")[0] + "\n", EMPTIED),
                RIGHT.replace(RIGHT.split("\n")[0] + "\n", DRAINED),
            )
            changed = [{"lib.js": text.encode()} for text in texts]
            return [
                await sandbox.run_tests(image, each, names, tmp_path / "hidden", Limits(seconds=30.0))
                for each in changed
            ]

    right, emptied, drained = asyncio.run(run())
    assert [*right.outcomes.values()] == ["passed"] * 3, right.messages
    assert right.outside == frozenset(names)
    assert [*emptied.outcomes.values()] == ["failed", "passed", "failed"]
    assert [*drained.outcomes.values()] == ["passed"] * 3, "its copy of the list is its own"


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
def test_objects_that_show_nothing_are_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, useless: int
) -> None:
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
