"""TypeScript: what its functions are, what may be an answer to copy, and, with npm, how its test runners report."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_typescript")
if shutil.which("node") is None or shutil.which("npm") is None:
    pytest.skip("needs Node.js and npm", allow_module_level=True)

from etude.code import functions, languages
from etude.config import BuildConfig
from etude.grading import javascript as scripts
from etude.grading import leaks
from etude.grading.grade import acceptable
from etude.grading.runner import open_sandbox
from etude.sandbox.base import Image, Limits, TestReport
from etude.tasks import bootstrap, javascript, node
from etude.tasks.build import build_dataset
from etude.tasks.check import check_dataset

SOURCE = """export interface Range { low: number; high: number }
export enum Side { Low = 'low', High = 'high' }

export function clamp<T extends Range>(value: number, range: T): number {
  if (value < range.low) {
    return range.low
  }
  return value > range.high ? range.high : value
}

export abstract class Meter {
  private readonly seen: number[] = []

  constructor (protected range: Range) {}

  read = (value: number): Side | undefined => {
    const kept = clamp(value, this.range)
    this.seen.push(kept)
    if (kept === this.range.low) return Side.Low
    return kept === this.range.high ? Side.High : undefined
  }

  get total (): number {
    let sum = 0
    for (const value of this.seen as number[]) {
      sum += value
    }
    return sum
  }
}
"""
TESTS = """import { clamp, Meter, Side } from './index'

class Plain extends Meter {}

describe('clamp', () => {
  it('low', () => { same(clamp(1, { low: 2, high: 3 }), 2) })
  it('high', () => { same(clamp(4, { low: 2, high: 3 }), 3) })
  it('between', () => { same(clamp(2.5, { low: 2, high: 3 }), 2.5) })
  it('edge', () => { same(clamp(3, { low: 2, high: 3 }), 3) })
})

describe('Meter', () => {
  it('says low', () => { same(new Plain({ low: 2, high: 5 }).read(1), 'low') })
  it('says high', () => { same(new Plain({ low: 2, high: 5 }).read(7), 'high') })
  it('says nothing', () => { same(new Plain({ low: 2, high: 5 }).read(3), undefined) })
  it('adds', () => {
    const meter = new Plain({ low: 2, high: 5 })
    meter.read(3)
    meter.read(4)
    same(meter.total, 7)
  })
  it('adds what it kept', () => {
    const meter = new Plain({ low: 2, high: 5 })
    meter.read(9)
    same(meter.total, 5)
  })
  it('begins', () => { same(new Plain({ low: 2, high: 5 }).total, 0) })
})
"""
ALWAYS = """
const always: any = new Proxy({}, {
  get (_, key) {
    if (key === '$$typeof') return Symbol.for('jest.asymmetricMatcher')
    return key === Symbol.toPrimitive ? () => 2 : () => true
  }
})
export const clamp = (): any => always
export class Meter { read = (): any => always; total = always }
export const Side = always
"""
HEADS = {
    "node": "import { describe, it } from 'node:test'\nimport assert from 'node:assert'\n",
    "mocha": "import assert from 'node:assert'\n",
    "vitest": "import { describe, expect, it } from 'vitest'\n",
    "jest": "",
}
PACKAGES = {
    "node": {},
    "mocha": {"mocha": "^11"},
    "vitest": {"vitest": "^4"},
    "jest": {"jest": "^30", "ts-jest": "^29.4", "typescript": "^5.9"},
}


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total, stage


def _tests(kind: str) -> str:
    if kind in ("node", "mocha"):
        return HEADS[kind] + TESTS.replace("same(", "assert.strictEqual(")
    return HEADS[kind] + re.sub(r"same\((.*), (.*?)\)( }\)|$)", r"expect(\1).toBe(\2)\3", TESTS, flags=re.MULTILINE)


def _repository(root: Path, kind: str) -> Path:
    (root / "src").mkdir(parents=True)
    (root / "src/index.ts").write_text(SOURCE)
    (root / "src/index.test.ts").write_text(_tests(kind))
    about = {"name": "meter", "version": "1.0.0", "license": "MIT", "devDependencies": PACKAGES[kind]}
    if kind == "jest":
        about["jest"] = {"preset": "ts-jest"}
    (root / "package.json").write_text(json.dumps(about))
    return root


def test_functions() -> None:
    found = {f.qualname: f for f in javascript.functions("src/index.ts", SOURCE)}
    assert set(found) == {"clamp", "Meter.constructor", "Meter.read", "Meter.total"}
    options = BuildConfig(kinds=("mutation", "removal"))
    used: set[str] = set()
    for function in found.values():
        for broken in javascript.broken(SOURCE, function, options):
            used.add(broken.mutant.operator)
            assert languages.parses(broken.mutant.text, "typescript")
            assert not languages.same_syntax(broken.mutant.text, SOURCE, "typescript")
            assert "enum Side { Low = 'low', High = 'high' }" in broken.mutant.text
    assert {"removal", "op_flip", "negate_cond", "invert_if", "remove_loop", "op_const"} <= used


def test_builds_are_no_part_of_the_repository(tmp_path: Path) -> None:
    _repository(tmp_path / "meter", "jest")
    about = {
        "main": "./lib/bundle.cjs",
        "exports": {".": {"import": "./index.mjs"}, "./package.json": "./package.json"},
    }
    (tmp_path / "meter/package.json").write_text(json.dumps(about))
    (tmp_path / "meter/tsconfig.json").write_text('{"compilerOptions": {"outDir": "./esm" /* here */}}')
    built = ["lib/bundle.cjs", "lib/deep/a.js", "esm/index.js", "index.mjs", "index.d.ts", "src/index.js"]
    kept = ["scripts/run.js", "src/hand.js", "other.js"]
    for path in [*built, *kept, "src/a.js.map", ".turbo/x", "src/__snapshots__/index.test.ts.snap"]:
        (tmp_path / "meter" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "meter" / path).write_text("module.exports = 1\n")
    layout = javascript.layout(tmp_path / "meter", functions.clean_files(tmp_path / "meter"))
    settings = ["package.json", "tsconfig.json"]
    tests = ["src/__snapshots__/index.test.ts.snap", "src/index.test.ts"]
    assert sorted(layout.files) == sorted([*kept, *settings, *tests, "src/index.ts"])
    assert sorted(layout.tests) == tests
    assert sorted(layout.sources) == ["other.js", "src/hand.js", "src/index.ts"]


def test_a_package_of_javascript_keeps_its_entry(tmp_path: Path) -> None:
    for path in ("index.js", "index.d.ts", "lib/a.js", "test/index.test-d.ts", "test/a.test.ts", "package.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("{}" if path == "package.json" else "export const a = 1\n")
    (tmp_path / "package.json").write_text('{"main": "index.js", "bin": "lib/a.js"}')
    assert javascript.layout(tmp_path, functions.clean_files(tmp_path)).sources == ("index.js", "lib/a.js")


def test_a_source_map_holds_the_answer(tmp_path: Path) -> None:
    held = {"version": 3, "sourcesContent": [SOURCE], "mappings": ""}
    (tmp_path / "copy.js.map").write_text(json.dumps(held))
    wanted = leaks.answer_fingerprint(
        SOURCE, SOURCE.replace("sum += value", "sum -= value").replace("< range.low", "> range.low")
    )
    assert "copy.js.map!0" in list(leaks.scan(tmp_path, wanted))
    (tmp_path / "copy.js.map").write_text(json.dumps(held | {"sourcesContent": [None, "nothing"]}))
    assert list(leaks.scan(tmp_path, wanted)) == []


def test_sources_under_a_name_of_their_own() -> None:
    exports = {
        ".": {"@meter/source": "./src/index.ts", "types": "./index.d.ts", "import": "./index.js"},
        "./x": "./x.ts",
    }
    assert scripts.conditions(exports) == ["@meter/source"]
    assert scripts.conditions("./index.js") == []


def test_settings_of_the_runners_are_not_graded() -> None:
    good = ("src/index.ts", "src/deep/view.tsx")
    bad = ("src/__mocks__/fs.ts", "src/a.test.ts", "src/__tests__/help.ts", "src/vitest.config.ts", "src/jest.setup.js")
    assert [path for path in (*good, *bad) if acceptable(path, ("src",))] == list(good)


def test_the_next_try_adds_what_was_missing(tmp_path: Path) -> None:
    repository = _repository(tmp_path / "meter", "mocha")
    about = json.loads((repository / "package.json").read_text())
    about["devDependencies"] |= {"linter": "1", "helper": "2"}
    (repository / "package.json").write_text(json.dumps(about))
    layout = replace(javascript.layout(repository, functions.clean_files(repository)), modules=("src/index.test.ts",))
    tries: list[bootstrap.Try] = []
    first = node._by_rules(repository, layout, tries)
    assert first == ("mocha@^11", "tsx@*")
    tries.append(bootstrap.Try(first, (("tests", "Error: Cannot find package 'helper' imported from a"),)))
    second = node._by_rules(repository, layout, tries)
    assert second == ("mocha@^11", "tsx@*", "helper@2")
    tries.append(bootstrap.Try(second, (("tests", "0 of 3 tests pass"),)))
    third = node._by_rules(repository, layout, tries)
    assert third == ("mocha@^11", "linter@1", "helper@2", "tsx@*")


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(PACKAGES))
def test_tasks_of_every_runner(tmp_path: Path, kind: str) -> None:
    """Built from packages of npm, checked, and not fooled by code that patches the assertions."""
    repository = _repository(tmp_path / "meter", kind)
    options = BuildConfig(max_tasks=2, kinds=("mutation",), min_lines=2, per_function=1, workers=1, hang_seconds=60.0)
    made = build_dataset(repository, tmp_path / "out", options, quiet)
    assert len(made.tasks) == 2
    assert all(task.difficulty["covered"] > 0 for task in made.tasks)
    report = check_dataset(made.root, quiet)
    assert (report.problems, report.failures) == ((), {})
    names = ["clamp > low", "clamp > high"]
    patch = (
        "import a from 'node:assert'\n(a as any).strictEqual = () => {}\n"
        if kind in ("node", "mocha")
        else "const e = (globalThis as any).expect\ne.extend({ toBe: () => ({ pass: true, message: () => '' }) })\n"
    )
    broken = SOURCE.replace("return range.low", "return 77")
    honest = _run(made.repository, made.site, made.hidden, SOURCE, names)
    assert set(honest.outcomes.values()) == {"passed"}
    assert (honest.tampered, len(honest.outside)) == (False, 2)
    wrong = _run(made.repository, made.site, made.hidden, broken, names)
    assert list(wrong.outcomes.values()) == ["failed", "passed"]
    assert not wrong.tampered
    for cheat in (patch + broken, ALWAYS):
        report = _run(made.repository, made.site, made.hidden, cheat, names)
        assert next(iter(report.outcomes.values())) != "passed"
        assert len(report.outside) == 2


def _run(repository: Path, site: Path, hidden: Path, text: str, names: list[str]) -> TestReport:
    async def run() -> TestReport:
        async with open_sandbox(memo=0) as sandbox:
            image, tests = Image(repository, site, {}), [f"src/index.test.ts::{name}" for name in names]
            changes = {"src/index.ts": text.encode()}
            return await sandbox.run_tests(image, changes, tests, hidden, Limits(seconds=60.0))

    return asyncio.run(run())
