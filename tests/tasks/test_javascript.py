"""A JavaScript package becomes tasks; cheats on its graders come out as tamper or fail."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_javascript")
if shutil.which("node") is None:
    pytest.skip("needs Node.js", allow_module_level=True)

from etude.code import languages
from etude.config import BuildConfig
from etude.errors import UserError
from etude.grading import javascript as scripts
from etude.grading.grade import grade_changes, is_test_file
from etude.grading.runner import open_sandbox
from etude.records import Outcome
from etude.sandbox.base import Image, Limits, TestReport
from etude.tasks import dataset, javascript, node
from etude.tasks.build import build_dataset
from etude.tasks.check import check_dataset
from tests.tasks.harbor_box import reward

SOURCE = """'use strict'

/** Sums what is above a limit. */
function total (items, limit) {
  let sum = 0
  for (const item of items) {
    if (item > limit && item !== null) {
      sum = sum + item
    } else {
      sum -= 1
    }
  }
  try {
    sum = Math.round(sum)
  } catch (e) {
    sum = 0
  }
  return sum
}

class Shelf {
  constructor () {
    this.items = []
  }

  add (item) {
    const full = this.items.length >= 3
    if (full) {
      throw new Error('full')
    }
    this.items.push(item)
    return true
  }
}

const clamp = (value, low, high) => {
  if (value < low) return low
  return value > high ? high : value
}

module.exports = { total, Shelf, clamp }
"""
TESTS = """'use strict'
const { test, describe, it } = require('node:test')
const assert = require('node:assert')
const { total, Shelf, clamp } = require('../index.js')

test('total of nothing', () => {
  assert.strictEqual(total([], 1), 0)
})

test('total above', () => {
  assert.strictEqual(total([5, 1, 7], 2), 11)
})

test('total below', () => {
  assert.strictEqual(total([1, 1], 2), -2)
})

test('total rounds', () => {
  assert.strictEqual(total([2.6], 2), 3)
})

describe('Shelf', () => {
  it('adds', () => {
    const shelf = new Shelf()
    assert.strictEqual(shelf.add(4), true)
    assert.deepStrictEqual(shelf.items, [4])
  })

  it('is full', () => {
    const shelf = new Shelf()
    shelf.add(1)
    shelf.add(1)
    shelf.add(1)
    assert.throws(() => shelf.add(1), /full/)
  })
})

test('clamp low', () => {
  assert.strictEqual(clamp(1, 2, 3), 2)
})

test('clamp high', () => {
  assert.strictEqual(clamp(4, 2, 3), 3)
})

test('clamp between', () => {
  assert.strictEqual(clamp(2.5, 2, 3), 2.5)
})
"""


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total, stage


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package") / "shelf"
    (root / "test").mkdir(parents=True)
    (root / "index.js").write_text(SOURCE)
    (root / "test/index.test.js").write_text(TESTS)
    shutil.copytree(root / "test", root.with_name("hidden") / "test")
    (root / "package.json").write_text('{"name": "shelf", "version": "1.0.0", "license": "MIT"}\n')
    return root


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dataset.Dataset:
    options = BuildConfig(max_tasks=5, kinds=("mutation", "removal"), min_lines=2, heldout_fraction=0.3)
    return build_dataset(repository, tmp_path_factory.mktemp("built") / "shelf", options, quiet)


def test_functions() -> None:
    found = {f.qualname: f for f in javascript.functions("index.js", SOURCE)}
    assert set(found) == {"total", "Shelf.constructor", "Shelf.add", "clamp"}
    assert SOURCE.encode()[found["clamp"].start :].startswith(b"(value, low")
    assert found["total"].complexity == 5


def test_every_operator_changes_the_tree() -> None:
    options = BuildConfig(kinds=("mutation", "removal"))
    used: set[str] = set()
    for function in javascript.functions("index.js", SOURCE):
        for broken in javascript.broken(SOURCE, function, options):
            mutant = broken.mutant
            used.add(mutant.operator)
            assert languages.parses(mutant.text, "javascript")
            assert not languages.same_syntax(mutant.text, SOURCE, "javascript")
            old, new = SOURCE.split("\n"), mutant.text.split("\n")
            assert new[: mutant.first_line - 1] == old[: mutant.first_line - 1]
            assert new[mutant.last_line :] == old[function.last_line :]
            assert new.count("") == old.count("")
            assert all(line == line.rstrip() for line in new)
    assert used == {*javascript.OPERATORS, "removal"}


def test_hidden_tests_are_cut_out() -> None:
    text = javascript.without_tests("a.js", TESTS, {"Shelf > is full", "clamp low", "total above"})
    assert javascript.titles("a.js", text) == javascript.titles("a.js", TESTS) - {
        "Shelf > is full",
        "clamp low",
        "total above",
    }
    assert languages.parses(text, "javascript")
    assert "describe('Shelf'" in text


def test_parents_and_namesakes_are_no_tests_of_their_own() -> None:
    names = ["parse", "parse > a", "parse > b", "parse > b #2", "parse > b #3", "issue #7"]
    assert node.single(names) == {"parse > a", "issue #7"}


def test_tasks(built: dataset.Dataset) -> None:
    assert len(built.tasks) == 4  # the others have no visible test that fails, and nothing that describes them
    assert {task.kind for task in built.tasks} == {"mutation", "removal"}
    shown = (built.repository / "test/index.test.js").read_text()
    for task in built.tasks:
        assert task.solution == {"index.js": SOURCE}
        for test in task.fail_to_pass:
            assert test.startswith("test/index.test.js::")
            assert test.split(" > ")[-1].split("::")[-1] not in shown
    report = check_dataset(built.root, quiet)
    assert (report.problems, report.failures) == ((), {})


def _run(repository: Path, text: str, tests: list[str]) -> TestReport:
    """Hidden tests on the package with another index.js."""

    async def run() -> TestReport:
        async with open_sandbox(memo=0) as sandbox:
            image, hidden = Image(repository, None, {}), repository.with_name("hidden")
            names = [f"test/index.test.js::{name}" for name in tests]
            return await sandbox.run_tests(image, {"index.js": text.encode()}, names, hidden, Limits(seconds=30.0))

    return asyncio.run(run())


HONEST = ["total above", "Shelf > adds", "clamp high"]


def test_the_script_of_a_task_grades_outside_of_etude(built: dataset.Dataset) -> None:
    for task in built.tasks[:2]:
        assert reward(built.root, task.id, solved=False) == "0"
        assert reward(built.root, task.id, solved=True) == "1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import test from 'ava'\ntest('x', t => t.pass())\n", "written for ava, which is not supported: etude runs"),
        ("const t = require('tap')\nt.test('x', t => t.end())\n", "written for tap, which is not supported"),
        ("console.log('x')\n", "no test files that define tests"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "index.js").write_text("module.exports = () => 1\n")
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "test/index.js").write_text(text)
    with pytest.raises(UserError, match=why):
        build_dataset(tmp_path, tmp_path.with_name("out"), BuildConfig(), lambda *_: pytest.fail("something was begun"))


def test_an_honest_run(repository: Path) -> None:
    report = _run(repository, SOURCE, HONEST)
    assert set(report.outcomes.values()) == {"passed"}
    assert (report.tampered, report.crashed, len(report.outside), report.controlled) == (False, False, 3, 0)
    wrong = _run(repository, SOURCE.replace("sum + item", "sum - item"), HONEST)
    assert wrong.outcomes["test/index.test.js::total above"] == "failed"
    assert wrong.outcomes["test/index.test.js::clamp high"] == "passed"
    assert not wrong.tampered
    assert "11" in wrong.messages["test/index.test.js::total above"]


def test_an_early_exit_is_a_failure(repository: Path) -> None:
    report = _run(repository, "process.exit(0)\n", HONEST)
    assert set(report.outcomes.values()) == {"missing"}
    assert report.crashed
    assert not report.tampered


def test_a_hang_is_a_failure(repository: Path) -> None:
    async def run() -> TestReport:
        async with open_sandbox(memo=0) as sandbox:
            changes = {"index.js": b"for (;;) {}\n"}
            tests = ["test/index.test.js::total above"]
            image, hidden = Image(repository, None, {}), repository.with_name("hidden")
            return await sandbox.run_tests(image, changes, tests, hidden, Limits(seconds=2.0))

    report = asyncio.run(run())
    assert report.timed_out
    assert set(report.outcomes.values()) == {"missing"}


def test_what_is_graded(built: dataset.Dataset) -> None:
    """Changed tests and packages are set aside; the gold answer passes beside them."""
    task = built.tasks[0]
    gold = {path: text.encode() for path, text in task.solution.items()}
    extra = {"test/index.test.js": b"", "package.json": b"{}", "node_modules/x/index.js": b""}

    async def run() -> tuple[Outcome, bool, str]:
        async with open_sandbox(memo=0) as sandbox:
            found = await grade_changes(
                sandbox, task, built.image(task), built.hidden, gold | extra, Limits(seconds=30.0)
            )
            return found.outcome, found.passed, found.detail

    outcome, passed, detail = asyncio.run(run())
    assert (outcome, passed) == (Outcome.SCORED, True), detail
    assert "set aside 3" in detail


def test_frameworks() -> None:
    assert scripts.test_framework("import { test } from 'node:test'", {}) == "node"
    assert scripts.test_framework("var test = require('tape')", {"scripts": {"test": "jest"}}) == "tape"
    assert scripts.test_framework("import { it } from 'vitest'", {"devDependencies": {"mocha": "*"}}) == "vitest"
    assert scripts.test_framework("describe('x', function () {})", {}) == "mocha"
    assert (
        scripts.test_framework("describe('x', () => {})", {"scripts": {"lint": "tsc", "test": "c8 jest --ci"}})
        == "jest"
    )
    assert scripts.test_framework("describe('x', () => {})", {"devDependencies": {"vitest": "*"}}) == "vitest"
    assert is_test_file("test/a.js")
    assert is_test_file("src/a.spec.mjs")
    assert not is_test_file("test/helpers/a.js")
    assert is_test_file("src/__tests__/a.ts")
    assert not is_test_file("test/types.test-d.ts")
    assert not is_test_file("latest.js")


def test_files_beside_tests_and_tests_that_others_import(tmp_path: Path) -> None:
    """A sample, a README, a helper that defines tests itself: hidden tests read them by their own place."""
    root = tmp_path / "queue"
    for folder in ("test/fixtures", "samples"):
        (root / folder).mkdir(parents=True)
    (root / "package.json").write_text('{"name": "queue", "version": "1.0.0", "type": "module"}')
    (root / "README.md").write_text("# Queue of rows\n")
    (root / "samples/rows.json").write_text("[1, 2]\n")
    (root / "test/fixtures/rows.txt").write_text("1 2")
    (root / "queue.js").write_text(QUEUE)
    (root / "test/common.test.js").write_text(
        "import assert from 'node:assert'\nimport test from 'node:test'\nimport { double } from '../queue.js'\n"
        "export function doubles (name) {\n  test(name, () => assert.equal(double([]).length, 0))\n}\n"
        "doubles('of none')\n"
    )
    head = (
        "import assert from 'node:assert'\nimport test from 'node:test'\nimport { readFileSync } from 'node:fs'\n"
        "import { double } from '../queue.js'\nimport { doubles } from './common.test.js'\n"
        "const read = (path) => readFileSync(new URL(path, import.meta.url), 'utf8')\n"
    )
    bodies = (
        "assert.deepEqual(double(JSON.parse(read('../samples/rows.json'))), [1, 1, 2, 2])",
        "assert.deepEqual(double(read('fixtures/rows.txt').split(' ')), ['1', '1', '2', '2'])",
        "assert.deepEqual(double(read('../README.md').split(' ').slice(0, 2)), ['#', '#', 'Queue', 'Queue'])",
        "assert.deepEqual(double([doubles.name, 1]), ['doubles', 'doubles', 1, 1])",
    )
    rows = "".join(f"test('reads {i}', () => {body})\n" for i, body in enumerate(bodies))
    (root / "test/reading.test.js").write_text(head + rows)
    options = BuildConfig(max_tasks=2, kinds=("mutation",), repeats=1, min_lines=2, heldout_fraction=0.0)
    data = build_dataset(root, tmp_path / "out", options, quiet)
    assert {"README.md", "samples/rows.json", "test/fixtures/rows.txt", "test/common.test.js"} <= {
        path.relative_to(data.hidden).as_posix() for path in data.hidden.rglob("*") if path.is_file()
    }
    assert not (data.hidden / "queue.js").exists()
    card = (data.root / "DATACARD.md").read_text()
    assert "No other test was left out." in card
    tests = [test for task in data.tasks for test in (*task.fail_to_pass, *task.pass_to_pass, *task.visible_tests)]
    names = {test.partition("::")[2] for test in tests}
    assert {f"reads {i}" for i in range(len(bodies))} <= names


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A registry of npm with four packages: one with a script, one of another system, and one that needs what is not
    there."""
    script = f"node -e \"require('fs').writeFileSync('{tmp_path}/ran', '')\""
    more = {
        "good": {"scripts": {"install": script, "postinstall": script}},
        "mac": {"os": ["darwin"]},
        "needy": {"dependencies": {"absent": "^1"}},
        "old": {},
    }
    archives, about = {}, {}
    for name, extra in more.items():
        manifest = {"name": name, "version": "1.0.0", **extra}
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w:gz") as tar:
            data = json.dumps(manifest).encode()
            for path, content in (("package/package.json", data), ("package/index.js", b"module.exports = 3\n")):
                entry = tarfile.TarInfo(path)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        archives[f"/{name}.tgz"] = held.getvalue()
        about[f"/{name}"] = manifest

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = f"http://127.0.0.1:{self.server.server_address[1]}"
            body = archives.get(self.path)
            if body is None and self.path in about:
                manifest = about[self.path] | {"dist": {"tarball": f"{place}{self.path}.tgz"}}
                versions = {"name": manifest["name"], "versions": {"1.0.0": manifest}, "dist-tags": {"latest": "1.0.0"}}
                body = json.dumps(versions).encode()
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_packages_that_npm_cannot_install_are_left_out_and_named(registry: None, tmp_path: Path) -> None:
    """The others are installed, and no script runs."""
    wanted = ["good@^1", "absent@*", "mac@1.0.0", "needy@1", "old@^9"]
    assert node.install_most(wanted, tmp_path / "site", None) == {
        "absent@*": "the registry has no such absent",
        "needy@1": "the registry has no such absent",
        "mac@1.0.0": "mac is not for this system or its Node.js",
        "old@^9": "the registry has no such old",
    }
    assert sorted(path.name for path in (tmp_path / "site/node_modules").glob("[a-z]*")) == ["good"]
    root = tmp_path / "shelf"
    (root / "test").mkdir(parents=True)
    about = {"name": "shelf", "devDependencies": {"good": "*", "absent": "^2", "near": "file:../near"}}
    (root / "package.json").write_text(json.dumps(about))
    (root / "shelf.js").write_text("exports.top = (rows) => {\n  const n = rows.length\n  return rows[n - 1]\n}\n")
    text = "const test = require('node:test')\nconst { equal } = require('assert')\nconst { top } = require('..')\n"
    text = text.replace("'..'", "'../shelf.js'") + "const n = require('good')\n/* 'absent' 'near' */\n"
    rows = [f"test('row {i}', () => equal(top([1, {i}]) + n, {i + 3}))\n" for i in range(4)]
    (root / "test/shelf.test.js").write_text(text + "".join(rows))
    options = BuildConfig(max_tasks=2, kinds=("mutation",), min_lines=1, repeats=1, heldout_fraction=0.0)
    data = build_dataset(root, tmp_path / "out", options, quiet)
    why = "Not installed: absent@^2: the registry has no such absent. Not of a registry: near (file:../near)."
    assert why in data.manifest.warnings
    assert why in (data.root / "DATACARD.md").read_text()
    assert "good@*" in (data.root / "DATACARD.md").read_text()
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_takes_no_settings_of_a_repository_around_the_folder(tmp_path, monkeypatch):
    """A dataset may lie in its repository, whose package.json may call that folder a workspace of its own."""
    site = tmp_path / "outputs/run/tasks.incomplete/site"
    (site / "node_modules").mkdir(parents=True)
    (site / "package.json").write_text('{"private": true}')
    (tmp_path / "package.json").write_text('{"name": "root", "workspaces": ["outputs/*/*/site"]}')
    run, done = subprocess.run, []
    monkeypatch.setattr(node.subprocess, "run", lambda *a, **options: done.append(run(*a, **options)) or done[-1])
    node.npm(["prefix"], site, 60.0)
    assert Path(done[0].stdout.strip()) == site


QUEUE = """export class Queue {
  #rows = []

  join (row, first = false) {
    if (first) {
      this.#rows.unshift(row)
    } else {
      this.#rows.push(row)
    }
    return this.#rows.length
  }

  see (place) {
    if (place < 0) {
      return this.#rows[this.#rows.length + place]
    }
    return this.#rows[place]
  }
}

export function double (rows) {
  const out = []
  for (const row of rows) {
    out.push(row, row)
  }
  return out
}
"""
STEPS = """import assert from 'node:assert'
import test from 'node:test'
import { Queue, double } from '../queue.js'

test('steps', async (t) => {
  const queue = new Queue()
  await t.test('joins', () => assert.equal(queue.join('a'), 1))
  await t.test('joins again', () => assert.equal(queue.join('b'), 2))
  await t.test('comes first', () => assert.equal(queue.join('c', true), 3))
  await t.test('sees the first', () => assert.equal(queue.see(0), 'c'))
  await t.test('sees the last', () => assert.equal(queue.see(-1), 'b'))
  await t.test('sees the second', () => assert.equal(queue.see(1), 'a'))
})

test('double', () => assert.deepEqual(double([1]), [1, 1]))
test('double of two', () => assert.equal(double([1, 2]).length, 4))
"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_visible_tests_pass_as_they_are_shown(tmp_path: Path, seed: int) -> None:
    """Steps of one test share its state, so some of them fail where others are cut out as hidden tests."""
    (tmp_path / "lib/test").mkdir(parents=True)
    (tmp_path / "lib/package.json").write_text('{"name": "queue", "version": "1.0.0", "type": "module"}')
    (tmp_path / "lib/queue.js").write_text(QUEUE)
    (tmp_path / "lib/test/queue.test.js").write_text(STEPS)
    options = BuildConfig(seed=seed, max_tasks=4, kinds=("mutation", "removal"), per_function=2, repeats=1, min_lines=2)
    data = build_dataset(tmp_path / "lib", tmp_path / "out", options, quiet)

    async def outcomes() -> list[str]:
        async with open_sandbox(memo=0) as sandbox:
            found: list[str] = []
            for task in data.tasks:
                gold = {path: text.encode() for path, text in task.solution.items()}
                tests = task.visible_tests
                report = await sandbox.run_tests(data.image(task), gold, tests, None, Limits(seconds=60.0))
                found += report.outcomes.values()
            return found

    assert set(asyncio.run(outcomes())) == {"passed"}
