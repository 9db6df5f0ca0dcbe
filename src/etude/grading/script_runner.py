"""Runs JavaScript and TypeScript tests: node:test, mocha, tape, jest and vitest, each test file in a box of its own.

Hidden tests run in a verifier, a box without code of the agent: stubs replace the package's modules there (`stubs.py`).
A second box, with the agent's tree and without the tests, serves the stubs. A socket joins the two
(`guest/membrane.cjs`). Runs of the pristine package show once which tests can run so, and the kinds of values that the
package gives them.

The other tests share a process with the tested code. They run under a random name, with sentinels among them, and
beside negative controls: copies of the file in which expected literals are wrong. Reports come over a pipe, each record
with the one-time word of its place.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from etude.code import SCRIPT_SUFFIXES
from etude.grading import stubs
from etude.grading.javascript import (
    conditions,
    contradicted,
    guarded,
    holds_tests,
    imports,
    read_package,
    test_framework,
)
from etude.renderers import printable
from etude.sandbox import RUNNER, WORKSPACE, Backend, Changes, Image, Limits, NotFound, ProgramResult, Shell, TestReport

MAX_TESTS = 2000  # of one file
LEARN_SECONDS = 60.0
LEARN_RUNS = 2  # of the pristine package in the verifier: tests that pass in all these runs are decided there
CONTROLS = 2  # copies with wrong expectations beside a run
OBJECT_CONTROLS = 2  # copies of a file with other expected objects; each costs a run
EXAMINER = f"{RUNNER}/guest/grading/guest"  # in a box
_SERVERS = {
    "jest": f"""const {{ serve }} = require('{EXAMINER}/serve.cjs')
test('serve', () => {{ serve(require, require); return new Promise(() => {{}}) }}, 1e9)
""",
    "vitest": f"""import {{ createRequire }} from 'node:module'
import {{ test }} from 'vitest'
const {{ serve }} = createRequire('{EXAMINER}/')('./serve.cjs')
const load = (path) => import(/* @vite-ignore */ path)
test('serve', () => {{ serve(createRequire(import.meta.url), load); return new Promise(() => {{}}) }}, 1e9)
""",
}
MAX_REPORT = 16 << 20  # bytes
CALLED_FILE = ".called"  # numbers of functions, a line each, that traced sources write
START_SECONDS = 10.0  # for frameworks that compile, on a busy machine
ADDRESSES_MB = 65_536  # compilers, WebAssembly among them, reserve far more addresses than they use memory
_MESSAGE = 160


_HiddenFile = tuple[Path, Path | None, Path | None, str]  # repository, packages, folder of tests, path


@dataclass(frozen=True)
class FileOutput:
    """The report on one file: name -> (outcome, message)."""

    tests: dict[str, tuple[str, str]]
    ended: bool
    forged: bool
    timed_out: bool
    kinds: Mapping[str, str] = field(default_factory=dict)  # of values, if the verifier records them
    lines: Mapping[str, int] = field(default_factory=dict)  # at which tests failed

    def outcome(self, name: str) -> str:
        """The outcome of a test; empty if the run reported none."""
        return self.tests.get(name, ("", ""))[0]


@dataclass
class ScriptTrace:
    """The traces of a run: numbers in CALLED, and the text on the error stream."""

    called: frozenset[int] = frozenset()
    printed: str = ""


@dataclass(frozen=True)
class ControlFile:
    """A test file with wrong expectations, and the names of the tests that the pristine library fails there."""

    text: str
    failing: frozenset[str]


@dataclass(frozen=True)
class VerifiedTests:
    """Tests of a file that the verifier can decide, and the kinds of values at each place that uses the package.

    controls: copies in which the objects that tests expect are constructed otherwise: their comparison with a result is
        the package's, and an object that shows nothing equals all. Each with the tests that fail there, and its kinds.
    """

    names: frozenset[str]
    kinds: Mapping[str, str]
    controls: tuple[tuple[ControlFile, Mapping[str, str]], ...] = ()


@dataclass
class _Report:
    """A `TestReport` in the making."""

    outcomes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    timed_out: bool = False
    crashed: bool = False
    tampered: bool = False
    outside: set[str] = field(default_factory=set)
    lines: dict[str, int] = field(default_factory=dict)
    controlled: int = 0


@dataclass(frozen=True)
class _ScriptJob:
    """A test file, and the tree on which it runs; `layers` lie over the image."""

    image: Image
    layers: Changes
    hidden: Path | None
    limits: Limits
    path: str
    text: str

    @property
    def hidden_file(self) -> _HiddenFile:
        """The key under which results about the file are kept."""
        return self.image.repository, self.image.site, self.hidden, self.path

    def pristine(self) -> _ScriptJob:
        """The same job on the pristine package."""
        return replace(self, layers={}, limits=Limits(seconds=LEARN_SECONDS))


class ScriptRunner:
    """Runs JavaScript tests on a backend, and remembers facts about hidden files from runs of the pristine package."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._controls: dict[_HiddenFile, asyncio.Task[tuple[ControlFile, ...]]] = {}
        self._verified: dict[_HiddenFile, asyncio.Task[VerifiedTests]] = {}

    async def run(
        self, image: Image, layers: Changes, tests: Sequence[str], hidden: Path | None, limits: Limits
    ) -> TestReport:
        """The report on `tests` ("path::outer > inner"), file by file; `limits` are those of one file."""
        by_path: dict[str, list[str]] = {}
        for test in dict.fromkeys(tests):
            path, _, name = test.partition("::")
            by_path.setdefault(path, []).append(name)
        started = time.monotonic()
        report = _Report()
        for path, names in by_path.items():
            if report.timed_out:
                break
            text = _text(image, layers, hidden, path)
            if text is not None:
                await self._run_file(_ScriptJob(image, layers, hidden, limits, path, text), names, report)
        outcomes = {test: report.outcomes.get(test, "missing") for test in dict.fromkeys(tests)}
        messages = {
            test: report.messages.get(test, "no such test") for test, outcome in outcomes.items() if outcome != "passed"
        }
        seconds = time.monotonic() - started
        return TestReport(
            outcomes,
            messages,
            seconds,
            report.timed_out,
            report.crashed,
            report.tampered,
            frozenset(report.outside),
            report.controlled,
            lines=report.lines,
        )

    async def _run_file(self, job: _ScriptJob, names: list[str], report: _Report) -> None:
        """Run tests of a file: in the verifier those that it can decide, the others with the tested code."""
        verified = VerifiedTests(frozenset(), {}) if job.hidden is None else await self._verifiable(job)
        outside = [name for name in names if name in verified.names]
        inside = [name for name in names if name not in verified.names]
        if outside:
            output = await self._verify(job, outside, verified.kinds)
            _add(report, job.path, outside, output)
            report.outside.update(f"{job.path}::{name}" for name in outside)
            await self._control(job, outside, verified, report)
        if inside and not report.timed_out:
            await self._run_inside(job, inside, report)

    async def _control(self, job: _ScriptJob, names: list[str], verified: VerifiedTests, report: _Report) -> None:
        """Fail the tests that pass in a copy that expects other objects, too."""
        for control, kinds in verified.controls:
            passed = [name for name in names if report.outcomes[f"{job.path}::{name}"] == "passed"]
            tried = [name for name in passed if name in control.failing]
            if report.timed_out:
                return
            if not tried:
                continue
            output = await self._verify(replace(job, text=control.text), tried, kinds)
            report.timed_out |= output.timed_out
            for name in tried:
                if output.outcome(name) != "failed" and not output.timed_out:
                    test = f"{job.path}::{name}"
                    report.outcomes[test], report.messages[test] = "failed", "another expected object is equal, too"
                    report.lines.pop(test, None)

    async def _run_inside(self, job: _ScriptJob, names: list[str], report: _Report) -> None:
        """Run tests in random order beside the tested code, and beside negative controls if the pristine package fails
        some."""
        kind = test_framework(job.text, read_package(job.image.repository))
        controls = () if job.hidden is None else await self._known_controls(job)
        failing = frozenset().union(*(control.failing for control in controls)).intersection(names)
        copies: list[tuple[str, ControlFile | None]] = [(job.text, None)]
        copies += [(control.text, control) for control in controls if control.failing & failing]
        secrets.SystemRandom().shuffle(copies)
        passed: list[str] = []
        for copy, control in copies:
            text, sentinels = (copy, {}) if job.hidden is None else guarded(copy, kind)
            output = await self._run_copy(job, text, [*names, *sentinels])
            all_passed = all(output.outcome(name) == "passed" for name in names)
            for sentinel, expected in sentinels.items():
                outcome = output.outcome(sentinel)
                # A hook of the file can fail every test, but no error makes a test pass that must fail.
                report.tampered |= outcome != expected and (all_passed or outcome == "passed")
            report.tampered |= output.forged
            if control is None:
                _add(report, job.path, names, output)
            else:
                passed += [name for name in control.failing & failing if output.outcome(name) == "passed"]
                report.timed_out |= output.timed_out
            if report.timed_out:
                break
        report.controlled += len(failing)
        report.tampered |= any(report.outcomes.get(f"{job.path}::{name}") == "passed" for name in passed)

    async def list_tests(self, image: Image, path: str, layers: Changes) -> tuple[FileOutput, ScriptTrace]:
        """Run every test of a file of the image, whose sources in `layers` write numbers to CALLED."""
        text = _text(image, {}, None, path)
        assert text is not None
        trace = ScriptTrace()
        job = _ScriptJob(image, layers, None, Limits(seconds=LEARN_SECONDS), path, text)
        return await self._run_copy(job, text, None, trace), trace

    async def _known_controls(self, job: _ScriptJob) -> tuple[ControlFile, ...]:
        """The negative controls of a hidden file, tried once on the pristine package."""
        key = job.hidden_file
        if key not in self._controls:
            self._controls[key] = asyncio.create_task(self._try_controls(job.pristine()))
        return await asyncio.shield(self._controls[key])

    async def _try_controls(self, job: _ScriptJob) -> tuple[ControlFile, ...]:
        controls: list[ControlFile] = []
        for _ in range(CONTROLS):
            wrong = contradicted(job.path, job.text)
            if wrong is not None:
                output = await self._run_copy(job, wrong, None)
                failing = frozenset(name for name in output.tests if output.outcome(name) == "failed")
                controls.append(ControlFile(wrong, failing))
        return tuple(controls)

    async def _verifiable(self, job: _ScriptJob) -> VerifiedTests:
        """The tests of a hidden file that the verifier can decide, learned once on the pristine package."""
        key = job.hidden_file
        task = self._verified.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._verified[key] = asyncio.create_task(self._learn(job.pristine()))
        return await asyncio.shield(task)

    async def _learn(self, job: _ScriptJob) -> VerifiedTests:
        names: frozenset[str] | None = None
        kinds: dict[str, str] = {}
        for _ in range(LEARN_RUNS):
            output = await self._verify(job, None, None)
            if not output.ended:  # tests that the deadline cut off have no result
                return VerifiedTests(frozenset(), {})
            passed = frozenset(name for name in output.tests if output.outcome(name) == "passed")
            names = passed if names is None else names & passed
            for place, kind in output.kinds.items():
                kinds[place] = "".join(sorted({*kinds.get(place, ""), *kind}))
        controls: list[tuple[ControlFile, Mapping[str, str]]] = []
        for _ in range(OBJECT_CONTROLS):
            wrong = contradicted(job.path, job.text, objects=True)
            if wrong is not None:
                output = await self._verify(replace(job, text=wrong), None, None)
                failing = frozenset(name for name in names or () if output.outcome(name) == "failed")
                controls.append((ControlFile(wrong, failing), output.kinds))
        return VerifiedTests(names or frozenset(), kinds, tuple(controls))

    async def _verify(self, job: _ScriptJob, wanted: list[str] | None, kinds: Mapping[str, str] | None) -> FileOutput:
        """Run tests of a hidden file in one box, and the package under test in another."""
        image = replace(job.image, changes={})
        config, flags, seconds, files = _prepared(job, job.text, wanted)
        config |= {"verify": {"kinds": kinds, "seconds": seconds}, "channel": True}
        data = {path: content for path, content in job.layers.items() if stubs.is_data(path)}
        held = {**data, **stubs.stubs(image.repository), **_hidden_files(job.hidden), **files}
        server = _server(config["framework"], job.path)
        limits = replace(job.limits, addresses_mb=ADDRESSES_MB, seconds=seconds)
        ours, theirs = socket.socketpair()
        async with AsyncExitStack() as ends:
            ends.callback(ours.close)
            ends.callback(theirs.close)
            verifier, tested = await asyncio.gather(
                self._open(ends, image, held, limits), self._open(ends, job.image, {**job.layers, **server}, limits)
            )
            serving = asyncio.create_task(self._serve(tested, config, [*server], flags, seconds, theirs.detach()))
            try:
                done = await verifier.program(
                    ["node", *flags, f"{EXAMINER}/suite.mjs"],
                    json.dumps(config).encode(),
                    seconds,
                    environment=_variables(files),
                    channel=ours.detach(),
                    max_report=MAX_REPORT,
                )
            finally:
                await tested.close()
                await asyncio.gather(serving, return_exceptions=True)
        return _parsed(done, config["words"])

    async def _serve(
        self, tested: Shell, config: dict[str, Any], server: list[str], flags: list[str], seconds: float, channel: int
    ) -> None:
        """Serve the package's modules in their box: by Node itself, or below the framework that compiles them."""
        loaders = [flag for flag in flags if not flag.startswith("--test-reporter")]
        program, payload = "serve.cjs", b""
        if server:
            settings = {name: config[name] for name in ("framework", "ui", "conditions", "channel")}
            settings |= {"words": [""] * 9, "wanted": [], "file": f"{WORKSPACE}/{server[0]}", "verify": None}
            program, payload = "suite.mjs", json.dumps(settings).encode()
        await tested.program(["node", *loaders, f"{EXAMINER}/{program}"], payload, seconds, channel=channel)

    async def _open(self, ends: AsyncExitStack, image: Image, files: Changes, limits: Limits) -> Shell:
        shell = await self._backend.shell(image, files, limits, bare=True)
        ends.push_async_callback(shell.close)
        return shell

    async def _run_copy(
        self, job: _ScriptJob, text: str, wanted: list[str] | None, trace: ScriptTrace | None = None
    ) -> FileOutput:
        """Run a copy of a test file beside the tested code, in a box of its own."""
        config, flags, seconds, files = _prepared(job, text, wanted)
        limits = replace(job.limits, addresses_mb=ADDRESSES_MB, seconds=seconds)
        async with AsyncExitStack() as ends:
            held = {**job.layers, **_hidden_files(job.hidden), **files}
            shell = await self._open(ends, job.image, held, limits)
            done = await shell.program(
                ["node", *flags, f"{EXAMINER}/suite.mjs"],
                json.dumps(config).encode(),
                seconds,
                environment=_variables(files),
                max_report=MAX_REPORT,
            )
            if trace is not None:
                numbers = (await _written(shell, CALLED_FILE)).split()
                trace.called = frozenset(int(number) for number in numbers if re.fullmatch(r"[0-9]{1,9}", number))
                trace.printed = done.errors
        return _parsed(done, config["words"])


def _add(report: _Report, path: str, names: Sequence[str], output: FileOutput) -> None:
    report.timed_out |= output.timed_out
    report.crashed |= not output.ended and not output.timed_out
    for name in names:
        outcome, message = output.tests.get(name, ("missing", "the test process ended early"))
        report.outcomes[f"{path}::{name}"], report.messages[f"{path}::{name}"] = outcome, message
        report.lines |= {f"{path}::{name}": line} if (line := output.lines.get(name)) else {}


def _prepared(
    job: _ScriptJob, text: str, wanted: list[str] | None
) -> tuple[dict[str, Any], list[str], float, dict[str, bytes]]:
    """(configuration of a run, Node's flags, seconds, files): a test file under a random name."""
    pure, about = PurePosixPath(job.path), read_package(job.image.repository)
    copy = pure.with_name(f"{secrets.token_hex(6)}.test{pure.suffix}")
    count = MAX_TESTS if wanted is None else len(wanted)
    config: dict[str, Any] = {
        "words": [secrets.token_hex(8) for _ in range(count + 2)],
        "wanted": wanted,
        "file": f"{WORKSPACE}/{copy}",
        "framework": test_framework(text, about),
        "ui": "tdd" if re.search(r"^\s*suite\(", text, re.MULTILINE) else "bdd",
        "conditions": conditions(about.get("exports")),
        "verify": None,
        "channel": False,
    }
    flags, compiles = _node_flags(job.image, config)
    # CI makes a missing snapshot a failure.
    snapshots = _text(job.image, job.layers, None, _snapshots(pure))
    files = {str(copy): text.encode()} | ({_snapshots(copy): snapshots.encode()} if snapshots else {})
    return config, flags, job.limits.seconds + (START_SECONDS if compiles else 0.0), files


def _server(kind: str, path: str) -> dict[str, bytes]:
    """A test file that serves modules below jest or vitest; empty for frameworks that compile no modules."""
    if kind not in _SERVERS:
        return {}
    copy = PurePosixPath(path).with_name(f"{secrets.token_hex(6)}.test.{'cjs' if kind == 'jest' else 'mjs'}")
    return {str(copy): _SERVERS[kind].encode()}


def _variables(files: Mapping[str, bytes]) -> dict[str, str]:
    return {"CI": "1"} if len(files) > 1 else {}


def _hidden_files(hidden: Path | None) -> dict[str, bytes | None]:
    """Helpers and data among the hidden tests; None for the test files, which never have their own name in a box unless
    another one imports them."""
    if hidden is None:
        return {}
    files = {path.relative_to(hidden).as_posix(): path.read_bytes() for path in hidden.rglob("*") if path.is_file()}
    texts = {path: data.decode("utf-8", "replace") for path, data in files.items() if path.endswith(SCRIPT_SUFFIXES)}
    shared = {imported for path, text in texts.items() for imported in imports(path, text, files)}
    return {
        path: None if path in texts and path not in shared and holds_tests(path, texts[path]) else data
        for path, data in files.items()
    }


def _text(image: Image, layers: Changes, hidden: Path | None, path: str) -> str | None:
    if hidden is None and path in layers:
        data = layers[path]
        return None if data is None else data.decode("utf-8", "replace")
    file = (hidden if hidden is not None else image.repository) / path
    return file.read_text("utf-8", "replace") if file.is_file() else None


def _node_flags(image: Image, config: Mapping[str, Any]) -> tuple[list[str], bool]:
    """(Node's flags, whether the run compiles modules): jest and vitest compile by themselves, others with tsx, if
    present."""
    flags = [f"--test-reporter={EXAMINER}/suite.mjs", "--test-reporter-destination=stdout", "--expose-gc"]
    flags += [f"--conditions={name}" for name in config["conditions"] if re.fullmatch(r"[@\w./-]+", name)]
    if config["framework"] in ("jest", "vitest"):
        return [*flags, "--experimental-vm-modules"], True
    compiles = image.site is not None and (image.site / "node_modules/tsx").is_dir()
    return [*flags, *(["--import=tsx"] if compiles else [])], compiles


def _snapshots(test: PurePosixPath) -> str:
    """The path at which jest and vitest keep the snapshots of a test file."""
    return str(test.parent / "__snapshots__" / f"{test.name}.snap")


async def _written(shell: Shell, path: str) -> str:
    try:
        return (await shell.read(path, 4 << 20)).decode("utf-8", "replace")
    except NotFound:
        return ""


def _parsed(done: ProgramResult, words: Sequence[str]) -> FileOutput:
    """Read records in their order, each with the word of its place; any other line counts as forged."""
    tests: dict[str, tuple[str, str]] = {}
    kinds: dict[str, str] = {}
    places: dict[str, int] = {}
    ended = False
    *lines, last = done.report.decode("utf-8", "replace").split("\n")
    forged = bool(last) and done.status == 0
    for place, line in enumerate(lines):
        word, _, rest = line.partition(" ")
        record = _record(rest)
        if ended or place >= len(words) or not secrets.compare_digest(word.encode(), words[place].encode()):
            forged = True
            break
        if record is None:
            forged = True
        elif "end" in record:
            ended = True
        elif "kinds" in record:
            kinds = {str(name): str(kind) for name, kind in record["kinds"].items()}
        else:
            places |= {record["test"]: at} if type(at := record.get("line")) is int and at > 0 else {}
            tests[record["test"]] = (record["outcome"], " ".join(printable(record["message"]).split())[:_MESSAGE])
    return FileOutput(tests, ended, forged, done.timed_out, kinds, places)


def _record(text: str) -> dict[str, Any] | None:
    """A record of a report; None for a line that `suite.mjs` never writes."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if "end" in record or isinstance(record.get("kinds"), dict):
        return record
    known = (
        record.get("outcome") in ("passed", "failed", "skipped") if isinstance(record.get("outcome"), str) else False
    )
    return record if known and isinstance(record.get("test"), str) and isinstance(record.get("message"), str) else None
