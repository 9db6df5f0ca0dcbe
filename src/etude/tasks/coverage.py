"""Finds the tests that call each function, and the tests that fail: the suite runs under a profile hook, inside a
box."""

import inspect
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from etude.code import lines_of
from etude.code.functions import RepositoryLayout
from etude.errors import UserError
from etude.sandbox import SITE, Box, BoxError, ExecResult, NotFound
from etude.tasks.settings import FILE as SETTINGS

SCRIPT = ".etude_trace.py"
RESULT = ".etude_trace.json"
COUNT = ".etude_trace.count"  # "done total" of the tests, while they run
COUNT_SECONDS = 5.0  # between two readings of it
OUTPUT, ENDED = ".etude_trace.out", ".etude_trace.ended"
_ASK_SECONDS = 60.0  # for a command of a moment, on a busy machine
SLOW = "left out, since"  # in the messages of tests that took too long
TEST_SECONDS = 30.0  # of one test, and of all tests of a file, under the profile hook
FILE_SECONDS = 90.0
SUITE_SECONDS = 480.0  # of all tests; those that come later are left out


class _CallTrace(msgspec.Struct):
    functions: list[str]  # "path::qualname"
    tests: dict[str, list[int]]  # node id -> indices into `functions`
    failed: dict[str, str]  # node id -> the end of pytest's message
    broken: dict[str, str]  # test file that cannot be collected -> the same


@dataclass(frozen=True)
class SuiteTrace:
    """One run of the suite. `failed` and `broken` (files that cannot be collected) map to the end of pytest's
    message."""

    callers: dict[str, set[str]]  # function id -> node ids of the passing tests that call it
    passed: int
    failed: dict[str, str]
    broken: dict[str, str]
    printed: str  # the end of the output

    @property
    def missing(self) -> tuple[list[str], list[str]]:
        """(modules, fixtures) that failing tests could not find."""
        text = "\n".join([*self.failed.values(), *self.broken.values(), "" if self.passed else self.printed])
        modules = re.findall(r"No module named '([\w.]+)'", text)
        fixtures = re.findall(r"fixture '(\w+)' not found", text)
        if "async def functions are not natively supported" in text:
            modules.append("pytest_asyncio")
        if re.search(r"settings are not configured|Apps aren't loaded yet|Model class \S+ doesn't declare", text):
            modules.append("pytest_django")
        return sorted({name.split(".")[0] for name in modules}), sorted(set(fixtures))


class TookLong(BaseException):
    """A test takes too long."""


class Counter:
    """A plugin of pytest: writes "done total" of the tests to a file, at most once a second."""

    def __init__(self, path: str) -> None:
        self.path, self.done, self.total, self.written = path, 0, 0, 0.0

    def _write(self) -> None:
        now = time.monotonic()
        if now - self.written >= 1:
            self.written = now
            with open(self.path + ".new", "w") as file:
                file.write(f"{self.done} {self.total}")
            os.replace(self.path + ".new", self.path)

    def pytest_collection_finish(self, session):  # type: ignore[no-untyped-def]
        """Counts the tests."""
        self.total = len(session.items)
        self._write()

    def pytest_runtest_logfinish(self):  # type: ignore[no-untyped-def]
        """Counts a test."""
        self.done += 1
        self._write()


class TimeLimits:
    """A plugin of pytest: a test that takes longer than `test` seconds, the rest of a file whose tests take longer than
    `file` seconds, and the rest of a suite that takes longer than `suite` seconds, fail with `slow` in the message."""

    def __init__(self, slow: str, test: float, file: float, suite: float) -> None:
        self.slow, self.test, self.file, self.suite = slow, test, file, suite
        self.used: dict[str, float] = {}

    def _begin(self) -> None:
        signal.signal(signal.SIGALRM, self._stop)  # anew: a test may have set its own
        signal.setitimer(signal.ITIMER_REAL, self.test)

    def _stop(self, *_: object) -> None:
        raise TookLong(f"{self.slow} it takes longer than {self.test:.0f} s")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):  # type: ignore[no-untyped-def]
        """Adds the time of a test to that of its file."""
        started = time.monotonic()
        yield
        path = item.nodeid.partition("::")[0]
        self.used[path] = self.used.get(path, 0.0) + time.monotonic() - started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):  # type: ignore[no-untyped-def]
        """Raises TookLong for a file or a suite that has used its time."""
        if sum(self.used.values()) > self.suite:
            raise TookLong(f"{self.slow} the suite takes longer than {self.suite:.0f} s")
        if self.used.get(item.nodeid.partition("::")[0], 0.0) > self.file:
            raise TookLong(f"{self.slow} the tests of its file take longer than {self.file:.0f} s")

    @pytest.hookimpl(hookwrapper=True, specname="pytest_runtest_setup")
    def pytest_setup_limit(self):  # type: ignore[no-untyped-def]
        """Limits the fixtures of a test."""
        self._begin()
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    @pytest.hookimpl(hookwrapper=True, specname="pytest_runtest_call")
    def pytest_call_limit(self):  # type: ignore[no-untyped-def]
        """Limits a test."""
        self._begin()
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)


def record(
    roots: Sequence[str],
    test_files: Sequence[str],
    settings: str,
    result: str,
    count: str,
    slow: str,
    seconds: Sequence[float],
) -> None:
    """Run pytest in this process, with these limits of time, and write which functions below `roots` each passing test
    calls, and before that the `count` of tests. The box runs the source of this function and of the classes above, so
    they use no other name of this module."""
    import json
    import sys
    import threading

    here = os.getcwd() + os.sep
    prefixes = tuple(os.path.join(here, root) for root in roots)
    index: dict[str, int] = {}
    tests: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    broken: dict[str, str] = {}

    def message_end(report):  # type: ignore[no-untyped-def]
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr) if crash is None else crash.message
        return text[:300] if crash is not None else text[-600:]

    class Tracer:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_call(self, item):  # type: ignore[no-untyped-def]
            codes = set()

            def hook(frame, event, argument):  # type: ignore[no-untyped-def]
                if event == "call":
                    codes.add(frame.f_code)

            threading.setprofile(hook)
            sys.setprofile(hook)
            outcome = yield
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            if outcome.excinfo is not None:  # a test that failed, was skipped or was expected to fail decides nothing
                return
            called = set()
            for code in codes:
                path = os.path.abspath(code.co_filename)
                if path.startswith(prefixes):
                    # A nested function or comprehension counts as the function around it.
                    name = code.co_qualname.split(".<locals>")[0]
                    called.add(path[len(here) :] + "::" + name)
            tests[item.nodeid] = sorted(index.setdefault(name, len(index)) for name in called)

        def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
            if report.failed:
                failed.setdefault(report.nodeid, message_end(report))

        def pytest_collectreport(self, report):  # type: ignore[no-untyped-def]
            if report.failed:
                broken.setdefault(report.nodeid, message_end(report))

    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:warnings", "--continue-on-collection-errors"]
    rest = ["-c", settings if os.path.isfile(settings) else os.devnull, "--rootdir", here]
    pytest.main([*options, *rest, *test_files], plugins=[TimeLimits(slow, *seconds), Counter(here + count), Tracer()])
    passed = {test: called for test, called in tests.items() if test not in failed}
    with open(here + result, "w", encoding="utf-8") as file:
        json.dump({"functions": list(index), "tests": passed, "failed": failed, "broken": broken}, file)


async def trace(box: Box, layout: RepositoryLayout, timeout: float, ran: Callable[[int, int], None]) -> SuiteTrace:
    """Run a suite in `box`: the tests that call each function, and the tests that fail. Meanwhile `ran` is called
    with the numbers of tests that have run, and of all. Raises UserError if the run does not end, or if its result file
    is malformed."""
    settings, limits = f"{SITE}/{SETTINGS}", (TEST_SECONDS, FILE_SECONDS, SUITE_SECONDS)
    values = (list(layout.source_roots), list(layout.modules), settings, RESULT, COUNT, SLOW, limits)
    arguments = ", ".join(map(json.dumps, values))
    sources = "\n\n".join(map(inspect.getsource, (TookLong, Counter, TimeLimits, record)))
    head = "from __future__ import annotations\n\nimport os\nimport signal\nimport time\n\nimport pytest\n\n\n"
    script = f"{head}{sources}\n\nrecord({arguments})\n"
    await box.write(SCRIPT, script.encode())
    done = await _run(box, timeout, ran)
    if done.timed_out:
        raise UserError(
            f"the test suite runs longer than {timeout:.0f} s; leave slow test files out with `--exclude FILE`."
        )
    try:
        calls = msgspec.json.decode(await box.read(RESULT, max_bytes=64 << 20), type=_CallTrace)
        callers: dict[str, set[str]] = defaultdict(set)
        for test, indices in calls.tests.items():
            for i in indices:
                callers[calls.functions[i]].add(test)
    except NotFound:
        return SuiteTrace({}, 0, {}, {}, done.output)
    except (BoxError, ValueError, IndexError) as e:  # msgspec's errors are ValueErrors
        if isinstance(e, BoxError) and e.payer == "infra":
            raise
        raise UserError(f"the test suite spoiled the record of its run ({e}); exclude the tests that do.") from None
    return SuiteTrace(dict(callers), len(calls.tests), calls.failed, calls.broken, done.output)


async def _run(box: Box, timeout: float, ran: Callable[[int, int], None]) -> ExecResult:
    """Run the script beside the shell of the box, which answers no one while a command runs, and ask for its count."""
    started = await box.exec(f"( python3 {SCRIPT} </dev/null >{OUTPUT} 2>&1; echo >{ENDED} ) & echo $!", _ASK_SECONDS)
    if not (match := re.search(r"(\d+)\s*$", started.output)):
        return started
    gone = f"{{ [ -e {ENDED} ] || ! kill -0 {match[1]} 2>/dev/null; }}"
    ask = f"for i in $(seq {10 * COUNT_SECONDS:.0f}); do {gone} && break; sleep 0.1; done; {gone} && echo ended"
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = (await box.exec(f"{ask}; cat {COUNT} 2>/dev/null", COUNT_SECONDS + _ASK_SECONDS)).output
        if answer.startswith("ended"):
            return await box.exec(f"cat {OUTPUT}", _ASK_SECONDS)
        if count := re.fullmatch(r"(\d{1,9}) (\d{1,9})", answer.strip()):
            ran(int(count[1]), int(count[2]))
    return replace(started, timed_out=True)


def last_lines(text: str) -> str:
    """The last informative lines of an output, without frames of Node's stacks, joined into one line."""
    lines = [line.strip() for line in lines_of(text) if re.search(r"\w", line)]
    lines = [line for line in lines if not re.match(r"at .*[(:/]\S+:\d+:\d+\)?$", line)] or lines
    return " / ".join(line[:200] for line in lines[-4:]) or "nothing"
