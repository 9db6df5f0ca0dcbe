"""Test runs of JavaScript and TypeScript: node:test, mocha, tape, jest and vitest, each test file in a box of its own.

Node has no fork and no hot template, so a run is a live box that starts `guest/suite.mjs`. What it reports comes over
the box's terminal, which its first process drains: written once, it cannot be changed, and without the one-time word
of its place no record counts. Tested code and assertions share a process, as with Python's in-process tests, and
questions are not asked: hidden tests run under a name that nobody can know, with sentinels among them, and beside a
twin file in which expected literals are wrong. Code that reads what is expected, or patches the assertions, passes
both.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from etude.code import languages
from etude.sandbox.base import ExecResult, Image, Limits, NotFound, TestReport
from etude.sandbox.guest.root import RUNNER, WORKSPACE

if TYPE_CHECKING:
    from etude.sandbox.namespace.sandbox import Backend
    from etude.sandbox.shell import Shell

SUFFIXES = (".js", ".mjs", ".cjs", ".jsx", ".ts", ".mts", ".cts", ".tsx")
MAX_TESTS = 2000  # of one file
LEARN_SECONDS = 60.0
RESULTS = ".results"
ERRORS = ".errors"
CALLED = ".called"  # numbers of functions, a line each, that traced sources write
START_SECONDS = 10.0  # for those that compile what they run, on a machine with other work
ADDRESSES_MB = 65_536  # compilers, WebAssembly among them, reserve far more addresses than they use memory
_TEST_FOLDERS = frozenset({"test", "tests", "__tests__", "spec"})
_MODULE = re.compile(r"^\s*(?:import\b(?!\s*\()|export\b)", re.MULTILINE)
_EQUAL = frozenset({"equal", "equals", "strictEqual", "deepEqual", "deepStrictEqual", "eql", "is", "same", "be",
                    "toBe", "toEqual", "toStrictEqual", "toMatchObject", "toHaveLength", "toContain", "toBeCloseTo",
                    "toMatchInlineSnapshot"})  # fmt: skip
_TEST = re.compile(r"(?<![.\w])(?:describe|context|suite|it|test|specify|tape)(?:\.\w+)*\s*[(`]|\btap\.test\(")
_RUNNERS = re.compile(r"\b(vitest|jest|mocha)\b")
_STANDARD = frozenset({"import", "require", "default", "types", "node", "browser", "module", "deno", "bun"})
_MESSAGE = 160


def is_script(path: str) -> bool:
    """Whether a path, or the path of a node id, is JavaScript's."""
    return path.partition("::")[0].endswith(SUFFIXES)


def is_test_file(path: str) -> bool:
    """Whether a file holds JavaScript tests, by its name or its folder."""
    pure = PurePosixPath(path)
    if not path.endswith(SUFFIXES):
        return False
    marked = re.search(r"(^|[._-])(test|tests|spec)\.[cm]?[jt]sx?$", pure.name) is not None
    inside = _TEST_FOLDERS.intersection(pure.parts[:-1]) and not {"helpers", "fixtures", "support"} & set(pure.parts)
    if re.search(r"(\.d|[-.]test-d)\.[cm]?tsx?$", pure.name):  # types alone
        return False
    return marked or bool(inside)


def holds_tests(path: str, text: str) -> bool:
    """Whether a test file defines tests; what else lies in folders of tests are helpers."""
    return is_test_file(path) and _TEST.search(text) is not None


def framework(text: str, package: Mapping[str, Any]) -> str:
    """Which of the frameworks a test file is written for: what it imports, else what its package.json names first."""
    imported = (("node", "node:test"), ("tape", "tape"), ("vitest", "vitest"), ("jest", "@jest/globals"))
    for name, module in imported:
        if re.search(rf"(?:require\(|from\s+|import\s+)['\"]{module}['\"]", text):
            return name
    commands = package.get("scripts", {})
    named = [commands.get("test", ""), *commands.values(), *package.get("devDependencies", ())]
    found = _RUNNERS.search("\n".join(map(str, named)))
    return found.group(1) if found else "mocha"


def package(repository: Path) -> dict[str, Any]:
    """What a repository's package.json says; empty if it cannot be read."""
    try:
        found = json.loads((repository / "package.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def conditions(exports: object) -> list[str]:
    """Names under which a package.json exports its TypeScript sources, for tests that import the package by name."""
    found: list[str] = []
    for key, value in exports.items() if isinstance(exports, dict) else ():
        if isinstance(value, str):
            source = re.search(r"\.[cm]?tsx?$", value) and not re.search(r"\.d\.[cm]?ts$", value)
            found += [key] if source and not key.startswith(".") and key not in _STANDARD else []
        found += conditions(value)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class FileOutput:
    """What a run of one file reported: name -> (outcome, message)."""

    tests: dict[str, tuple[str, str]]
    ended: bool
    forged: bool
    timed_out: bool


@dataclass
class ScriptTrace:
    """What a run left behind: numbers in CALLED, and what was printed on the error stream."""

    called: frozenset[int] = frozenset()
    printed: str = ""


@dataclass(frozen=True)
class Twin:
    """A test file with wrong expectations, and the tests that the pristine library fails because of them."""

    text: str
    tells: frozenset[str]


def guarded(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """A test file of the framework `kind` with sentinels at its end, and their outcomes by name."""
    wrong, right = secrets.token_hex(8), secrets.token_hex(8)
    one, two = secrets.SystemRandom().sample(range(10_000), 2)
    module = kind == "vitest" or _MODULE.search(text) is not None
    check, test = (f"s{secrets.token_hex(4)}" for _ in range(2))

    def bring(names: str, source: str) -> str:
        if module:
            return f"import {names} from '{source}';\n"
        return f"const {names.replace(' as ', ': ').removeprefix('*: ')} = require('{source}');\n"

    brought = {
        "node": bring(f"{{ test as {test} }}", "node:test"),
        "tape": bring(test, "tape"),
        "jest": bring(f"{{ it as {test} }}", "@jest/globals"),
        "vitest": bring(f"{{ it as {test} }}", "vitest"),
        "mocha": f"const {test} = globalThis.it ?? globalThis.test;\n",
    }[kind] + bring(f"* as {check}", "node:assert")
    checks = ((wrong, one, two), (right, one, one))
    if kind == "tape":
        calls = [f"{test}('{name}', (t) => {{ t.equal({a}, {b}); t.end() }});" for name, a, b in checks]
    else:
        calls = [f"{test}('{name}', () => {{ {check}.strictEqual({a}, {b}) }});" for name, a, b in checks]
    added = brought + "\n".join(calls)
    added = added if module else f"{{\n{added}\n}}"  # a block of its own: no name of the file is taken
    return f"{text}\n;{added}\n", {wrong: "failed", right: "passed"}


def contradicted(path: str, text: str) -> str | None:
    """A test file in which the first literal of every expected value is wrong; None if there is none to change."""
    tree = languages.tree(text, languages.language_of(path) or "javascript")
    if tree is None:
        return None
    data = text.encode()
    edits: list[tuple[int, int, bytes]] = []
    pending = [tree.root_node]
    while pending:
        node = pending.pop()
        pending += node.children
        callee = node.child_by_field_name("function") if node.type == "call_expression" else None
        name = callee.child_by_field_name("property") if callee is not None else None
        if name is None or name.text.decode() not in _EQUAL:
            continue
        arguments = [child for child in node.child_by_field_name("arguments").named_children if child.type != "comment"]
        literal = _literal(arguments[min(1, len(arguments) - 1)]) if arguments else None
        if literal is not None:
            edits.append((literal.start_byte, literal.end_byte, _wrong(literal)))
    for start, end, new in sorted(set(edits), reverse=True):
        data = data[:start] + new + data[end:]
    return data.decode() if edits else None


def _literal(node: Any) -> Any:
    """The first number, text or truth value in an expected value that is written out."""
    if node.type in ("number", "string", "true", "false"):
        return node
    if node.type == "template_string" and all(child.type in ("`", "string_fragment") for child in node.children):
        return node
    if node.type not in ("array", "object", "pair", "unary_expression"):
        return None
    children = [node.child_by_field_name("value")] if node.type == "pair" else node.named_children
    return next((found for child in children if child is not None and (found := _literal(child)) is not None), None)


def _wrong(node: Any) -> bytes:
    if node.type in ("true", "false"):
        return b"false" if node.type == "true" else b"true"
    if node.type == "number":
        return b"%d" % (1_000_000 + secrets.randbelow(1_000_000))
    return node.text[:-1] + secrets.token_hex(3).encode() + node.text[-1:]


async def run(
    sandbox: Backend,
    image: Image,
    layers: Mapping[str, bytes | None],
    tests: Sequence[str],
    hidden: Path | None,
    limits: Limits,
) -> TestReport:
    """The report on `tests` ("path::outer > inner"), file by file; `limits` are those of one file."""
    wanted: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        path, _, name = test.partition("::")
        wanted.setdefault(path, []).append(name)
    started = time.monotonic()
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    tampered = crashed = timed_out = False
    mirrored = 0
    files = _arriving(hidden)
    for path, names in wanted.items():
        if timed_out:
            break
        text = _text(image, layers, hidden, path)
        if text is None:
            continue
        twin = await _twin(sandbox, image, hidden, path, text) if hidden is not None else None
        copies = [(text, False)] + ([(twin.text, True)] if twin is not None and twin.tells & set(names) else [])
        secrets.SystemRandom().shuffle(copies)
        said: dict[bool, FileOutput] = {}
        for copy, wrong in copies:
            kind = framework(text, package(image.repository))
            guard = guarded(copy, kind) if hidden is not None else (copy, {})
            arrived = {**layers, **files}
            said[wrong] = await _run_copy(sandbox, image, arrived, path, guard[0], [*names, *guard[1]], limits)
            for sentinel, expected in guard[1].items():
                found = said[wrong].tests.get(sentinel, ("missing", ""))[0]
                everything = all(said[wrong].tests.get(n, ("", ""))[0] == "passed" for n in names)
                # A hook of the file can fail every test; what must fail passes by nobody's mistake.
                tampered |= found != expected and (everything or found == "passed")
            timed_out |= said[wrong].timed_out
            tampered |= said[wrong].forged
            if timed_out:
                break
        real = said.get(False, FileOutput({}, False, False, True))
        crashed |= not real.ended and not timed_out
        for name in names:
            outcome, message = real.tests.get(name, ("missing", "the test process ended early"))
            outcomes[f"{path}::{name}"], messages[f"{path}::{name}"] = outcome, message
            if True in said and twin is not None and name in twin.tells:
                mirrored += 1
                tampered |= outcome == "passed" == said[True].tests.get(name, ("", ""))[0]
    result = {test: outcomes.get(test, "missing") for test in dict.fromkeys(tests)}
    texts = {test: messages.get(test, "no such test") for test, outcome in result.items() if outcome != "passed"}
    seconds = time.monotonic() - started
    return TestReport(result, texts, seconds, timed_out, crashed, tampered, apart=0, mirrored=mirrored)


def _arriving(hidden: Path | None) -> dict[str, bytes | None]:
    """Helpers and data of hidden tests as files; the test files themselves are gone, under any known name."""
    if hidden is None:
        return {}
    files: dict[str, bytes | None] = {}
    for file in (path for path in hidden.rglob("*") if path.is_file()):
        path = file.relative_to(hidden).as_posix()
        data = file.read_bytes()
        files[path] = None if holds_tests(path, data.decode("utf-8", "replace")) else data
    return files


def _text(image: Image, layers: Mapping[str, bytes | None], hidden: Path | None, path: str) -> str | None:
    if hidden is None and path in layers:
        data = layers[path]
        return None if data is None else data.decode("utf-8", "replace")
    file = (hidden if hidden is not None else image.repository) / path
    return file.read_text("utf-8", "replace") if file.is_file() else None


async def _twin(sandbox: Backend, image: Image, hidden: Path, path: str, text: str) -> Twin | None:
    """The twin of a hidden file, tried once on the pristine library."""
    key = ((image.repository, image.site, hidden), path)
    if key not in sandbox.twins:
        sandbox.twins[key] = asyncio.create_task(_try_twin(sandbox, image, hidden, path, text))
    return await asyncio.shield(sandbox.twins[key])


async def _try_twin(sandbox: Backend, image: Image, hidden: Path, path: str, text: str) -> Twin | None:
    wrong = contradicted(path, text)
    if wrong is None:
        return None
    said = await _run_copy(sandbox, image, _arriving(hidden), path, wrong, None, Limits(seconds=LEARN_SECONDS))
    return Twin(wrong, frozenset(name for name, (outcome, _) in said.tests.items() if outcome == "failed"))


async def listed(
    sandbox: Backend, image: Image, path: str, layers: Mapping[str, bytes | None]
) -> tuple[FileOutput, ScriptTrace]:
    """Every test of a file as it stands in the image, whose sources in `layers` write numbers to CALLED."""
    text = _text(image, {}, None, path)
    assert text is not None
    trace = ScriptTrace()
    return await _run_copy(sandbox, image, layers, path, text, None, Limits(seconds=LEARN_SECONDS), trace), trace


async def _run_copy(
    sandbox: Backend,
    image: Image,
    layers: Mapping[str, bytes | None],
    path: str,
    text: str,
    wanted: list[str] | None,
    limits: Limits,
    trace: ScriptTrace | None = None,
) -> FileOutput:
    """Run a test file under a name that nobody can know, in a box of its own."""
    pure, about = PurePosixPath(path), package(image.repository)
    copy = pure.with_name(f"{secrets.token_hex(6)}.test{pure.suffix}")
    kind = framework(text, about)
    words = [secrets.token_hex(8) for _ in range(MAX_TESTS + 1 if wanted is None else len(wanted) + 1)]
    config = {
        "words": words,
        "wanted": wanted,
        "file": f"{WORKSPACE}/{copy}",
        "framework": kind,
        "ui": "tdd" if re.search(r"^\s*suite\(", text, re.MULTILINE) else "bdd",
        "conditions": conditions(about.get("exports")),
    }
    flags, compiles = _flags(image, config)
    seconds = limits.seconds + (START_SECONDS if compiles else 0.0)
    limits = replace(limits, addresses_mb=ADDRESSES_MB, seconds=seconds)
    found = _text(image, layers, None, _snapshots(pure))  # with them, a snapshot that is missing is a failure: CI
    arriving = {**layers, str(copy): text.encode()} | ({_snapshots(copy): found.encode()} if found else {})
    channel = f"3>{RESULTS}" if wanted is None else "3>&1"
    shell = await sandbox.shell(image, arriving, limits, plain=True)
    try:
        await shell.write("config", json.dumps(config).encode())
        # Read by the shell and gone before the run starts; a command line is too short for it.
        line = f"{'CI=1 ' if found else ''}node {flags} {RUNNER}/guest/suite.mjs {channel} >/dev/null"
        errors = ERRORS if trace is not None else "/dev/null"
        done = await shell.exec(f'C=$(cat config); rm config; printf %s "$C" | {line} 2>{errors}', limits.seconds)
        output = done.output if wanted is not None else await _written(shell, RESULTS)
        if trace is not None:
            trace.called = frozenset(map(int, (await _written(shell, CALLED)).split()))
            trace.printed = await _written(shell, ERRORS)
    finally:
        await shell.close()
    return _listen(output, words, done)


def _flags(image: Image, config: Mapping[str, Any]) -> tuple[str, bool]:
    """(Node's flags, whether something compiles): jest and vitest by themselves, others with tsx, where it is."""
    flags = [f"--test-reporter={RUNNER}/guest/report.mjs", "--test-reporter-destination=stdout", "--expose-gc"]
    flags += [f"--conditions={name}" for name in config["conditions"] if re.fullmatch(r"[@\w./-]+", name)]
    if config["framework"] in ("jest", "vitest"):
        return " ".join([*flags, "--experimental-vm-modules"]), True
    compiles = image.site is not None and (image.site / "node_modules/tsx").is_dir()
    return " ".join([*flags, *(["--import=tsx"] if compiles else [])]), compiles


def _snapshots(test: PurePosixPath) -> str:
    """Where jest and vitest keep the snapshots of a test file."""
    return str(test.parent / "__snapshots__" / f"{test.name}.snap")


async def _written(shell: Shell, path: str) -> str:
    try:
        return (await shell.read(path, 4 << 20)).decode("utf-8", "replace")
    except NotFound:
        return ""


def _listen(output: str, words: Sequence[str], done: ExecResult) -> FileOutput:
    """Records in their order, each with the word of its place; other lines are what a shell says of a crash."""
    tests: dict[str, tuple[str, str]] = {}
    ended = forged = False
    place = 0
    for line in output.split("\n"):
        word, _, rest = line.partition(" ")
        if not re.fullmatch(r"[0-9a-f]{16}", word):
            continue
        if ended or place >= len(words) or not secrets.compare_digest(word, words[place]):
            forged = True
            break
        place += 1
        try:
            record = json.loads(rest)
        except ValueError:  # cut off where the run was killed
            break
        if "end" in record:
            ended = True
        else:
            tests[record["test"]] = (record["outcome"], " ".join(record["message"].split())[:_MESSAGE])
    return FileOutput(tests, ended, forged, done.timed_out)
