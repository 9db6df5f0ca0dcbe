"""Test runs of JavaScript: node:test, mocha and tape, each test file in a process and a box of its own.

Node has no fork and no hot template, so a run is a live box that starts `inside/suite.mjs`. What it reports comes over
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from etude.edits import languages
from etude.environments.base import ExecResult, Image, Limits, NotFound, TestReport
from etude.environments.inside.root import RUNNER, WORKSPACE

if TYPE_CHECKING:
    from etude.environments.namespace import Backend

SUFFIXES = (".js", ".mjs", ".cjs")
MAX_TESTS = 2000  # of one file
LEARN_SECONDS = 60.0
RESULTS = ".results"
_TEST_FOLDERS = frozenset({"test", "tests", "__tests__", "spec"})
_MODULE = re.compile(r"^\s*(?:import\b(?!\s*\()|export\b)", re.MULTILINE)
_EQUAL = frozenset({"equal", "equals", "strictEqual", "deepEqual", "deepStrictEqual", "eql", "is", "same", "be",
                    "toBe", "toEqual", "toStrictEqual"})  # fmt: skip
_MESSAGE = 160


def is_script(path: str) -> bool:
    """Whether a path, or the path of a node id, is JavaScript's."""
    return path.partition("::")[0].endswith(SUFFIXES)


def is_test_file(path: str) -> bool:
    """Whether a file holds JavaScript tests, by its name or its folder."""
    pure = PurePosixPath(path)
    if not path.endswith(SUFFIXES):
        return False
    marked = re.search(r"(^|[._-])(test|tests|spec)\.[cm]?js$", pure.name) is not None
    inside = _TEST_FOLDERS.intersection(pure.parts[:-1]) and not {"helpers", "fixtures", "support"} & set(pure.parts)
    return marked or bool(inside)


def framework(text: str) -> str:
    """Which of the frameworks a test file is written for; mocha's needs no import."""
    for name, pattern in (("node", r"['\"]node:test['\"]"), ("tape", r"['\"]tape['\"]")):
        if re.search(rf"(?:require\(|from\s+|import\s+){pattern}", text):
            return name
    return "mocha"


@dataclass(frozen=True)
class Said:
    """What a run of one file reported: name -> (outcome, message)."""

    tests: dict[str, tuple[str, str]]
    ended: bool
    forged: bool
    timed_out: bool


@dataclass(frozen=True)
class Twin:
    """A test file with wrong expectations, and the tests that the pristine library fails because of them."""

    text: str
    tells: frozenset[str]


def guarded(text: str) -> tuple[str, dict[str, str]]:
    """A test file with sentinels at its end, and their outcomes by name."""
    wrong, right = secrets.token_hex(8), secrets.token_hex(8)
    one, two = secrets.SystemRandom().sample(range(10_000), 2)
    module = _MODULE.search(text) is not None
    kind, mark = framework(text), f"s{secrets.token_hex(4)}"

    def bring(name: str, source: str) -> str:
        return f"import {name} from '{source}';" if module else f"const {name} = require('{source}');"

    assertion = f"{bring(mark + 'a', 'node:assert')}\n"
    checks = ((wrong, one, two), (right, one, one))
    if kind == "mocha":
        calls = [f"it('{name}', () => {{ {mark}a.strictEqual({a}, {b}) }});" for name, a, b in checks]
    elif kind == "tape":
        assertion = f"{bring(mark + 't', 'tape')}\n"
        calls = [f"{mark}t('{name}', (t) => {{ t.equal({a}, {b}); t.end() }});" for name, a, b in checks]
    else:
        assertion += f"{bring(mark + 't', 'node:test')}\n"
        calls = [f"{mark}t('{name}', () => {{ {mark}a.strictEqual({a}, {b}) }});" for name, a, b in checks]
    if not module:  # a block of its own: no name of the file is taken
        calls = ["{", assertion, *calls, "}"]
        assertion = ""
    return f"{text}\n;{assertion}" + "\n".join(calls) + "\n", {wrong: "failed", right: "passed"}


def contradicted(text: str) -> str | None:
    """A test file in which the first literal of every expected value is wrong; None if there is none to change."""
    tree = languages.tree(text, "javascript")
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
        said: dict[bool, Said] = {}
        for copy, wrong in copies:
            guard = guarded(copy) if hidden is not None else (copy, {})
            arrived = {**layers, **files}
            said[wrong] = await _run_copy(sandbox, image, arrived, path, guard[0], [*names, *guard[1]], limits)
            for sentinel, expected in guard[1].items():
                found = said[wrong].tests.get(sentinel, ("missing", ""))[0]
                everything = all(said[wrong].tests.get(n, ("", ""))[0] == "passed" for n in names)
                tampered |= found not in (expected, "missing") or (found == "missing" and everything)
            timed_out |= said[wrong].timed_out
            tampered |= said[wrong].forged
            if timed_out:
                break
        real = said.get(False, Said({}, False, False, True))
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
        files[path] = None if is_test_file(path) else file.read_bytes()
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
    wrong = contradicted(text)
    if wrong is None:
        return None
    said = await _run_copy(sandbox, image, _arriving(hidden), path, wrong, None, Limits(seconds=LEARN_SECONDS))
    return Twin(wrong, frozenset(name for name, (outcome, _) in said.tests.items() if outcome == "failed"))


async def listed(sandbox: Backend, image: Image, path: str, coverage: bool) -> tuple[Said, list[dict[str, Any]]]:
    """Every test of a file as it stands in the image, and V8's coverage of the scripts that it ran, if wanted."""
    text = _text(image, {}, None, path)
    assert text is not None
    found: list[dict[str, Any]] = []
    limits = Limits(seconds=LEARN_SECONDS)
    said = await _run_copy(sandbox, image, {}, path, text, None, limits, found if coverage else None)
    return said, found


async def _run_copy(
    sandbox: Backend,
    image: Image,
    layers: Mapping[str, bytes | None],
    path: str,
    text: str,
    wanted: list[str] | None,
    limits: Limits,
    coverage: list[dict[str, Any]] | None = None,
) -> Said:
    """Run a test file under a name that nobody can know, in a box of its own."""
    pure = PurePosixPath(path)
    copy = str(pure.with_name(f"{secrets.token_hex(6)}.test{pure.suffix}"))
    words = [secrets.token_hex(8) for _ in range(MAX_TESTS + 1 if wanted is None else len(wanted) + 1)]
    ui = "tdd" if re.search(r"^\s*suite\(", text, re.MULTILINE) else "bdd"
    config = {"words": words, "wanted": wanted, "file": f"{WORKSPACE}/{copy}", "framework": framework(text), "ui": ui}
    config["requires"] = []
    inside = f"{RUNNER}/inside"
    flags = f"--test-reporter={inside}/report.mjs --test-reporter-destination=stdout"
    channel = f"3>{RESULTS}" if wanted is None else "3>&1"
    before = "NODE_V8_COVERAGE=.coverage " if coverage is not None else ""
    line = f"{before}node {flags} {inside}/suite.mjs {channel} >/dev/null 2>&1"
    shell = await sandbox.shell(image, {**layers, copy: text.encode()}, limits, plain=True)
    try:
        await shell.write("config", json.dumps(config).encode())
        # Read by the shell and gone before the run starts; a command line is too short for it.
        done = await shell.exec(f'C=$(cat config); rm config; printf %s "$C" | {line}', limits.seconds)
        output = done.output
        if wanted is None:
            try:
                output = (await shell.read(RESULTS, 4 << 20)).decode("utf-8", "replace")
            except NotFound:
                output = ""
        if coverage is not None:
            for name in await shell.list(".coverage"):
                coverage += json.loads(await shell.read(f".coverage/{name}", 64 << 20))["result"]
    finally:
        await shell.close()
    return _listen(output, words, done)


def _listen(output: str, words: Sequence[str], done: ExecResult) -> Said:
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
        record = json.loads(rest)
        if "end" in record:
            ended = True
        else:
            tests[record["test"]] = (record["outcome"], " ".join(record["message"].split())[:_MESSAGE])
    return Said(tests, ended, forged, done.timed_out)
