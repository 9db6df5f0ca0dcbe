"""The base of both sets of tools: calls and their errors, files, tests, and search by pattern.

`full_tools.py` has the tools of models that know the OpenAI format, `compact_tools.py` those of the compact dialect.
Errors in a call are text for the model. Only failures that are proved to be the infrastructure's
(`BoxError` with payer "infra") are raised.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any

import blake3

from etude.harness import grep
from etude.records import Task, ToolCall
from etude.renderers import Tool, ToolError, one_line, printable
from etude.sandbox import Box, BoxError, ExecResult, NotRegular, TestReport

Exec = Callable[[str, float], Awaitable[ExecResult]]
"""Executes a shell command in a box, for so many seconds at most."""
READ_ONLY = frozenset({"list", "read", "grep", "search"})  # calls that may run at the same time
TEST_SECONDS = 10.0
MAX_FILE = 1 << 20  # bytes of a file that a tool reads or writes
GREP_SECONDS = 1.0
GREP_FILES = 500


class Tools:
    """The tools of one episode. `metrics` counts its calls, edits and tests. `visible_passed` is whether the visible
    tests passed on the current tree; None before an edit or a test run."""

    schemas: Sequence[Tool] = ()  # in OpenAI's format, where the prompt shows them

    def __init__(self, box: Box, task: Task) -> None:
        self.box = box
        self.task = task
        self.metrics: Counter[str] = Counter()
        self.visible_passed: bool | None = None
        self.deadline = math.inf  # on the monotonic clock; commands end by then
        self.grep_seconds = GREP_SECONDS
        self.seed = 0  # of the episode: what tools draw is drawn again when the episode is played again
        self.room = math.inf  # tokens that the context has left for results and further turns
        self.read_only = READ_ONLY
        self.sharing = 1  # calls of the turn, which share the room
        self._handlers: dict[str, Callable[..., Awaitable[str]]] = {}
        self._marks = 0
        self._tried: set[bytes] = set()  # digests of files as they have been

    def _count_edit(self, path: str, before: str, after: str) -> None:
        """Counts an edit; an edit that restores an earlier text of the file counts as a repeat, too."""
        texts = (f"{path}\0{text}".encode("utf-8", "surrogatepass") for text in (before, after))
        old, new = (blake3.blake3(text).digest() for text in texts)
        self._tried.add(old)
        self.metrics["edits"] += 1
        self.metrics["repeats"] += new in self._tried
        self._tried.add(new)
        self.visible_passed = False

    async def call(self, call: ToolCall) -> str:
        """The result of a call as the model reads it. Raises only BoxError whose payer is "infra"."""
        handler = self._handlers.get(call.name)
        arguments: dict[str, Any] = {}
        if call.arguments is None:
            refusal = self.malformed(call.error)
        elif handler is None:
            refusal = f"error: unknown tool {one_line(call.name, 64)}"
        else:
            try:
                arguments, refusal = self.taken(call), ""
            except ToolError as e:
                refusal = self.malformed(str(e))
        if handler is None or refusal:
            self.metrics["malformed"] += 1
            return refusal
        self.metrics[f"calls/{call.name}"] += 1
        try:
            return printable(await handler(**arguments))
        except (ToolError, BoxError) as e:
            if isinstance(e, BoxError) and e.payer == "infra":
                raise
            return printable(f"error: {e}")

    async def call_all(self, calls: Sequence[ToolCall]) -> tuple[list[str], bool]:
        """Results in the order of the calls, and whether the agent ended the episode: calls after `finish` are not run.
        Neighbouring calls that only read run at the same time."""
        results: list[str] = []
        self.sharing = max(1, len(calls))
        while (done := len(results)) < len(calls):
            if time.monotonic() >= self.deadline:
                return results + ["error: no time left"] * (len(calls) - done), False
            together = list(takewhile(lambda call: call.name in self.read_only, calls[done:])) or [calls[done]]
            if len(together) == 1:
                results.append(await self.call(together[0]))
            else:
                outcomes = await asyncio.gather(*map(self.call, together), return_exceptions=True)
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    results.append(outcome)
            if together[0].name == "finish" and together[0].arguments is not None:
                return results, True
        return results, False

    def state(self) -> str:
        """The text on the tools' state that an agent reads beside its summary in a new context; "" if there is none."""
        return ""

    def malformed(self, why: str) -> str:
        """The result of a call that has the wrong form."""
        return "error: malformed call"

    def taken(self, call: ToolCall) -> dict[str, Any]:
        """The arguments of a call of a known tool, as the tool takes them. Raises ToolError."""
        return call.arguments or {}

    async def _exec(self, command: str, seconds: float) -> ExecResult:
        return await self.box.exec(command, max(0.1, min(seconds, self.deadline - time.monotonic())))

    def _mark(self) -> str:
        """A text that no box knows beforehand, drawn from the seed: a command that is sent again is the same."""
        self._marks += 1
        return blake3.blake3(f"mark/{self.seed}/{self._marks}".encode()).hexdigest(length=16)

    async def _finish(self) -> str:
        return ""

    async def text(self, path: str) -> str:
        """A file of the box. Raises ToolError if it is binary, BoxError if it is not there."""
        data = await self.box.read(path, MAX_FILE)
        if b"\0" in data[:8192]:
            raise ToolError(f"{path} is a binary file")
        return data.decode("utf-8", "surrogateescape")

    async def _write(self, path: str, text: str) -> None:
        data = file_bytes(text)
        if len(data) > MAX_FILE:
            raise ToolError(f"a file has at most {MAX_FILE} bytes")
        await self.box.write(path, data)

    async def _run_tests(self) -> list[tuple[str, str]]:
        """The `failures` of the visible tests."""
        tests = self.task.visible_tests
        failed = failures(await self.box.run_tests(tests, TEST_SECONDS), tests)
        self.metrics["tests_run"] += 1
        self.metrics["tests_failed"] += bool(failed)
        self.visible_passed = not failed
        return failed

    async def _grep(self, pattern: str, roots: Sequence[str], ignore_case: bool, limit: int) -> tuple[list[str], bool]:
        grep.compile_pattern(pattern, ignore_case)  # before any file is read
        files = await self._texts(roots, GREP_FILES)
        hits, cut = grep.search(files, pattern, ignore_case=ignore_case, limit=limit, seconds=self.grep_seconds)
        return hits, cut or len(files) == GREP_FILES

    async def _texts(self, roots: Sequence[str], limit: int) -> list[tuple[str, str]]:
        """Paths and texts of at most `limit` files below `roots`, as they are now; binary ones are left out."""
        files: list[tuple[str, str]] = []
        for path in await self._walk(roots, limit):
            try:
                files.append((path, await self.text(path)))
            except ToolError:
                continue
            except BoxError as e:
                if e.payer == "infra":
                    raise
        return files

    async def _walk(self, roots: Sequence[str], limit: int) -> list[str]:
        """At most `limit` files below `roots`, in the order of their paths; hidden folders are left out."""
        files: list[str] = []
        pending = [root.rstrip("/") for root in reversed(roots)]
        while pending and len(files) < limit:
            path = pending.pop()
            try:
                names = await self.box.list(path)
            except NotRegular:
                files.append(path)  # a file: reading it decides
                continue
            prefix = f"{path}/" if path not in ("", ".") else ""
            names = [name for name in names if not name.startswith(".") and name != "__pycache__/"]
            files += [prefix + name for name in names if not name.endswith("/")]
            pending += [prefix + name.rstrip("/") for name in reversed(names) if name.endswith("/")]
        return sorted(files)[:limit]


def failures(report: TestReport, tests: Sequence[str]) -> list[tuple[str, str]]:
    """(node id, reason) of each test that did not pass, in the given order."""
    default = "timed out" if report.timed_out else "crashed" if report.crashed else ""
    failed = [(t, report.outcomes.get(t, "missing")) for t in tests if report.outcomes.get(t) != "passed"]
    return [(t, report.messages.get(t) or default or outcome) for t, outcome in failed]


def verdict(failed: Sequence[tuple[str, str]]) -> str:
    """`passed`, or the first of the `failures` in at most 100 characters."""
    return clean_failure(*failed[0], 100) if failed else "passed"


def clean_failure(node: str, reason: str, limit: int) -> str:
    """One line that names a test without its file or class, and why it failed."""
    name, bracket, case = node.partition("::")[2].partition("[")
    return one_line(f"failed: {name.rpartition('::')[2]}{bracket}{case}: {reason}", limit)


def file_bytes(text: str) -> bytes:
    """The bytes of a file whose text `Tools.text` has read."""
    return text.encode("utf-8", "surrogateescape")
