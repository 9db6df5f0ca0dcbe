"""The tools of an agent over a box, in two presentations.

`FullTools` have the arguments of production tools, for models that know the OpenAI format; `CompactTools` are those of
the compact dialect: the focus function is implied and results are a few words. Whatever goes wrong in a call is text
for the model. Only failures that are proved to be ours (`BoxError` with payer "infra") are raised.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self

import blake3

from etude.edits.edit import Edit
from etude.harness import grep
from etude.harness.focus import EditError, View, edit_file, moved, view_of
from etude.harness.history import history
from etude.harness.lints import Lints, checked_paths
from etude.harness.ranking import Lexical, Scorer, search
from etude.harness.sketches import Apply, merged
from etude.harness.terminals import Terminals
from etude.harness.todo import todo
from etude.records import Task, ToolCall
from etude.renderers.schemas import COMPACT_PARAMETERS, SCHEMAS
from etude.renderers.text import ToolError, one_line, printable
from etude.sandbox.base import Box, BoxError, ExecResult, NotFound, NotRegular, TestReport

READ_ONLY = frozenset({"list", "read", "grep", "search"})  # calls that may run at the same time
TEST_SECONDS = 10.0
RUN_SECONDS = 120.0
MAX_FILE = 1 << 20  # bytes of a file that a tool reads or writes
GREP_SECONDS = 1.0
GREP_FILES = 500
SEARCH_FILES = 2000


class Tools:
    """What both presentations share. `metrics` counts calls, edits and tests of the episode."""

    def __init__(self, box: Box, task: Task) -> None:
        self.box = box
        self.task = task
        self.metrics: Counter[str] = Counter()
        self.deadline = math.inf  # on the monotonic clock; commands end by then
        self._handlers: dict[str, Callable[..., Awaitable[str]]] = {}
        self._tried: set[bytes] = set()  # digests of files as they have been

    def _count_edit(self, path: str, before: str, after: str) -> None:
        """An edit was made; one that leads to a file as it has been before tries nothing new."""
        old, new = (
            blake3.blake3(f"{path}\0{text}".encode("utf-8", "surrogatepass")).digest() for text in (before, after)
        )
        self._tried.add(old)
        self.metrics["edits"] += 1
        self.metrics["visible_passed"] = 0
        self.metrics["repeats"] += new in self._tried
        self._tried.add(new)

    async def call(self, call: ToolCall) -> str:
        """The result of a call as the model reads it. Raises only BoxError that is ours."""
        if call.arguments is None:
            self.metrics["malformed"] += 1
            return self.malformed(call.error)
        handler = self._handlers.get(call.name)
        if handler is None:
            self.metrics["malformed"] += 1
            return f"error: unknown tool {one_line(call.name, 64)}"
        if (wrong := self.invalid(call)) is not None:
            self.metrics["malformed"] += 1
            return self.malformed(wrong)
        self.metrics[f"calls/{call.name}"] += 1
        try:
            return printable(await handler(**call.arguments))
        except (ToolError, grep.BadPattern) as e:
            return printable(f"error: {e}")
        except BoxError as e:
            if e.payer == "infra":
                raise
            return printable(f"error: {e}")

    def forked(self, box: Box) -> Self:
        """The tools as they stand, over a fork of their box."""
        new = type(self)(box, self.task)
        for name, value in vars(self).items():
            if name not in ("box", "task", "_handlers"):
                setattr(new, name, copy.copy(value))
        return new

    def state(self) -> str:
        """What an agent that has forgotten everything is told of its own doing besides its summary; "" if nothing."""
        return ""

    def malformed(self, why: str) -> str:
        """What the model reads when a call has the wrong form."""
        return "error: malformed call"

    def invalid(self, call: ToolCall) -> str | None:
        """Why the arguments of a known tool cannot be taken; None when they can."""
        return None

    async def _exec(self, command: str, seconds: float) -> ExecResult:
        return await self.box.exec(command, max(0.1, min(seconds, self.deadline - time.monotonic())))

    async def _finish(self) -> str:
        return ""

    async def text(self, path: str) -> str:
        """A file of the box. Raises ToolError if it is binary, BoxError if it is not there."""
        data = await self.box.read(path, MAX_FILE)
        if b"\0" in data[:8192]:
            raise ToolError(f"{path} is a binary file")
        return data.decode("utf-8", "surrogateescape")

    async def _write(self, path: str, text: str) -> None:
        data = _bytes(text)
        if len(data) > MAX_FILE:
            raise ToolError(f"a file has at most {MAX_FILE} bytes")
        await self.box.write(path, data)

    async def _run_tests(self) -> TestReport:
        report = await self.box.run_tests(self.task.visible_tests, TEST_SECONDS)
        self.metrics["tests_run"] += 1
        failed = bool(failures(report, self.task.visible_tests))
        self.metrics["tests_failed"] += failed
        self.metrics["visible_passed"] = int(not failed)  # of the tree as it stands
        return report

    async def _grep(self, pattern: str, roots: Sequence[str], ignore_case: bool, limit: int) -> tuple[list[str], bool]:
        grep.compile_pattern(pattern, ignore_case)  # before any file is read
        files = await self._texts(roots, GREP_FILES)
        hits, cut = grep.search(files, pattern, ignore_case=ignore_case, limit=limit, seconds=GREP_SECONDS)
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
        found: list[str] = []
        pending = [root.rstrip("/") for root in reversed(roots)]
        while pending and len(found) < limit:
            path = pending.pop()
            try:
                names = await self.box.list(path)
            except NotRegular:
                found.append(path)  # a file: reading it decides
                continue
            prefix = f"{path}/" if path not in ("", ".") else ""
            names = [name for name in names if not name.startswith(".") and name != "__pycache__/"]
            found += [prefix + name for name in names if not name.endswith("/")]
            pending += [prefix + name.rstrip("/") for name in reversed(names) if name.endswith("/")]
        return sorted(found)[:limit]


class CompactTools(Tools):
    """Tools of the compact dialect; see `focus.py` for what `edit` sees. Call `open` before the first call."""

    def __init__(self, box: Box, task: Task) -> None:
        super().__init__(box, task)
        self._views: list[View] = []
        self._stale = False  # a command ran: the file may have changed
        self._handlers = {
            "edit": self._edit,
            "undo": self._undo,
            "test": self._test,
            "read": self._read,
            "list": self._list,
            "grep": self._search,
            "run": self._run,
            "finish": self._finish,
        }

    def invalid(self, call: ToolCall) -> str | None:
        wanted = COMPACT_PARAMETERS[call.name]
        return None if set(call.arguments or {}) == set(wanted) else f"{call.name} takes {len(wanted)} arguments"

    async def open(self) -> str:
        """Reads the focus; returns the function's source as the prompt shows it."""
        focus = self.task.focus
        self._views = [view_of(await self.text(focus.path), focus.first_line, focus.last_line)]
        return printable(self._views[-1].source)

    async def source(self) -> str:
        """The function as it stands; "" if it was moved or removed."""
        try:
            return printable((await self._view()).source)
        except (ToolError, BoxError) as e:
            if isinstance(e, BoxError) and e.payer == "infra":
                raise
            return ""

    async def _edit(self, old: str, new: str) -> str:
        view = await self._view()
        try:
            edited = view.edit(old, new)
        except EditError as e:
            self.metrics["edit_errors"] += 1
            return f"error: {e}"
        await self._write(self.task.focus.path, edited.file)
        self._views.append(edited)
        self._count_edit(self.task.focus.path, view.file, edited.file)
        return "ok"

    async def _undo(self) -> str:
        await self._view()
        if len(self._views) < 2:
            raise ToolError("nothing to undo")
        await self._write(self.task.focus.path, self._views[-2].file)
        self._views.pop()
        self.metrics["undo"] += 1
        self.metrics["visible_passed"] = 0
        return "undone"

    async def _test(self) -> str:
        return verdict(await self._run_tests(), self.task.visible_tests)

    async def _read(self) -> str:
        return (await self._view()).source[:4000]

    async def _list(self) -> str:
        return "\n".join(await self.box.list(self.task.focus.path.rpartition("/")[0]))[:1000]

    async def _search(self, pattern: str) -> str:
        hits, _ = await self._grep(pattern, self.task.source_roots, False, 20)
        return "\n".join(hits)[:1000] or "no matches"

    async def _run(self, command: str) -> str:
        self._stale = True
        done = await self._exec(command, TEST_SECONDS)
        status = "timed out" if done.timed_out else f"exit {done.rc}"
        return f"{status}\n{done.output[-400:]}".rstrip()

    async def _view(self) -> View:
        """The function as it stands, found again if a command has changed the file."""
        if self._stale:
            text = await self.text(self.task.focus.path)
            if text != self._views[-1].file:
                view = moved(self._views[-1], text)
                if view is None:
                    raise ToolError("the function was moved or removed")
                self._views = [view]  # earlier views are of another file
            self._stale = False
        return self._views[-1]


@dataclass(frozen=True)
class _Edited:
    """What takes an edit back, without keeping the file: at `start`, `removed` stood instead of `inserted` bytes."""

    path: str
    start: int
    removed: bytes
    inserted: int
    digest: bytes  # of the file after the edit

    @staticmethod
    def between(path: str, before: bytes, after: bytes) -> _Edited:
        start = _common_prefix(before, after)
        tail = _common_prefix(before[start:][::-1], after[start:][::-1])
        removed = before[start : len(before) - tail]
        return _Edited(path, start, removed, len(after) - tail - start, blake3.blake3(after).digest())


class FullTools(Tools):
    """Tools with the arguments of `SCHEMAS`. `scorer` ranks for `search`; all episodes share what it has read.

    `lay` lays the sketches of `apply` into files.
    """

    scorer: Scorer = Lexical()

    def __init__(self, box: Box, task: Task, lay: Apply = merged) -> None:
        super().__init__(box, task)
        self.lay = lay
        self._edits: list[_Edited] = []
        self._terminals = Terminals(self._exec)
        self._lints = Lints(self._exec)
        self._list_of_work = ""
        self._handlers = {
            "list": self._list,
            "read": self._read,
            "grep": self._search,
            "search": self._find,
            "edit": self._edit,
            "apply": self._apply,
            "undo": self._undo,
            "run": self._run,
            "output": self._output,
            "kill": self._kill,
            "test": self._test,
            "todo": self._todo,
            "lints": self._new_lints,
            "history": self._history,
            "finish": self._finish,
        }

    def state(self) -> str:
        done = sorted({edit.path for edit in self._edits})
        parts = [f"Files you have edited: {', '.join(done)}"] if done else []
        parts += [f"Your list:\n{self._list_of_work}"] if self._list_of_work else []
        parts += [f"Terminals: {', '.join(map(str, self._terminals.ids))}"] if self._terminals.ids else []
        return "\n".join(parts)

    def forked(self, box: Box) -> Self:
        new = super().forked(box)
        new._terminals, new._lints = Terminals(new._exec), Lints(new._exec)  # processes stay behind
        new._lints.first = dict(self._lints.first)
        return new

    def malformed(self, why: str) -> str:
        return f"error: malformed call: {why}"

    def invalid(self, call: ToolCall) -> str | None:
        schema = next(s["function"]["parameters"] for s in SCHEMAS if s["function"]["name"] == call.name)
        arguments = call.arguments or {}
        for name in schema["required"]:
            if name not in arguments:
                return f"{call.name} needs {name}"
        for name, value in arguments.items():
            kind = schema["properties"].get(name, {}).get("type")
            if kind is None:
                return f"{call.name} has no argument {name[:64]}"
            if type(value) is not _TYPES[kind]:
                return f"{name} is not of type {kind}"
        return None

    async def _list(self, path: str = "") -> str:
        entries = await self.box.list(path)
        rest = [f"[{len(entries) - 1000} more]"] if len(entries) > 1000 else []
        return "\n".join([*entries[:1000], *rest]) or "empty folder"

    async def _read(self, path: str, offset: int = 1, limit: int = 2000) -> str:
        lines = (await self.text(path)).splitlines()
        start = max(offset, 1) - 1
        chosen = lines[start : start + max(1, min(limit, 2000))]
        shown, size = [], 0
        for number, line in enumerate(chosen, start + 1):
            text = f"{number:6}\t{line[:2000]}"
            size += len(text) + 1
            if size > 65536:
                break
            shown.append(text)
        left = len(lines) - start - len(shown)
        if left > 0:
            shown.append(f"[{left} more lines; read on with offset {start + len(shown) + 1}]")
        return "\n".join(shown) or ("empty file" if not lines else f"error: the file has {len(lines)} lines")

    async def _search(self, pattern: str, path: str = "", ignore_case: bool = False) -> str:
        hits, cut = await self._grep(pattern, [path], ignore_case, 200)
        return "\n".join([*hits, *(["[search cut short]"] if cut else [])]) or "no matches"

    async def _edit(self, path: str, old: str, new: str) -> str:
        return await self._change(path, self._edited(path, old, new))

    async def _apply(self, path: str, sketch: str, instruction: str = "") -> str:
        return await self._change(path, self._laid(path, sketch, instruction))

    async def _change(self, path: str, made: Awaitable[tuple[str, str]]) -> str:
        try:
            before, after = await made
        except (ToolError, BoxError):
            self.metrics["edit_errors"] += 1
            raise
        await self._write(path, after)
        self._lints.first.setdefault(path, before)
        self._edits.append(_Edited.between(path, _bytes(before), _bytes(after)))
        self._count_edit(path, before, after)
        return "ok"

    async def _edited(self, path: str, old: str, new: str) -> tuple[str, str]:
        """The text of a file before and after an edit; before is empty for a new file."""
        if not old:
            if await self._exists(path):
                raise ToolError(f"{path} exists; give the text to replace")
            return "", new
        text = await self.text(path)
        try:
            return text, edit_file(text, old, new)
        except EditError as e:
            if e.matches > 1:
                raise ToolError(f"{e}: give more lines around the text, so that it occurs once") from None
            near = _nearest(text, old) if str(e) == "no match" else ""
            raise ToolError(f"{e}{near}") from None

    async def _laid(self, path: str, sketch: str, instruction: str) -> tuple[str, str]:
        text = await self.text(path)
        if not _proper(text) or not _proper(sketch):
            raise ToolError(f"{path} or the sketch is not UTF-8; use edit")
        after = await self.lay(Edit(text, sketch, instruction))
        if after == text:
            raise ToolError("no change")
        return text, after

    async def _exists(self, path: str) -> bool:
        try:
            await self.box.read(path, MAX_FILE)
        except NotFound:
            return False
        return True

    async def _undo(self) -> str:
        if not self._edits:
            raise ToolError("nothing to undo")
        edit = self._edits[-1]
        data = await self.box.read(edit.path, MAX_FILE)
        if blake3.blake3(data).digest() != edit.digest:
            raise ToolError(f"{edit.path} has changed since that edit")
        if edit.removed == b"" and edit.inserted == len(data):
            await self.box.delete(edit.path)
        else:
            stop = edit.start + edit.inserted
            await self.box.write(edit.path, data[: edit.start] + edit.removed + data[stop:])
        self._edits.pop()
        self.metrics["undo"] += 1
        self.metrics["visible_passed"] = 0
        return f"undone: {edit.path}"

    async def _find(self, question: str, folder: str = "") -> str:
        files = await self._texts([folder], SEARCH_FILES)
        found = await asyncio.to_thread(search, question, files, self.scorer)
        return found or "nothing found"

    async def _output(self, id: int) -> str:
        return await self._terminals.output(id)

    async def _kill(self, id: int) -> str:
        return await self._terminals.kill(id)

    async def _todo(self, items: list[object]) -> str:
        self._list_of_work, self.metrics["todo_open"] = todo(items)
        return self._list_of_work or "the list is empty"

    async def _new_lints(self, paths: list[object]) -> str:
        files = [(path, await self.text(path)) for path in checked_paths(paths)]
        return await self._lints.new(files, list(await self.box.changes()))

    async def _history(self, query: str = "", path: str = "", author: str = "", commit: str = "") -> str:
        return await history(self._exec, query, path, author, commit)

    async def _run(self, command: str, seconds: int = 30, background: bool = False) -> str:
        if background:
            return await self._terminals.start(command)
        done = await self._exec(command, max(1.0, min(float(seconds), RUN_SECONDS)))
        status = "timed out" if done.timed_out else f"exit code {done.rc}"
        cut = f" ({done.cut} bytes cut)" if done.cut else ""
        return f"{status}{cut}\n{done.output}".rstrip()

    async def _test(self) -> str:
        report = await self._run_tests()
        failed = failures(report, self.task.visible_tests)
        total = len(self.task.visible_tests)
        return "\n".join([f"{total - len(failed)} of {total} passed", *(clean_failure(*f, 400) for f in failed[:10])])


_TYPES = {"string": str, "integer": int, "boolean": bool, "array": list}


def failures(report: TestReport, tests: Sequence[str]) -> list[tuple[str, str]]:
    """(node id, reason) of each test that did not pass, in the given order."""
    default = "timed out" if report.timed_out else "crashed" if report.crashed else ""
    failed = [(t, report.outcomes.get(t, "missing")) for t in tests if report.outcomes.get(t) != "passed"]
    return [(t, report.messages.get(t) or default or outcome) for t, outcome in failed]


def verdict(report: TestReport, tests: Sequence[str]) -> str:
    """`passed`, or the first failure in at most 100 characters."""
    failed = failures(report, tests)
    return clean_failure(*failed[0], 100) if failed else "passed"


def clean_failure(node: str, reason: str, limit: int) -> str:
    """One line that names a test without its file or class, and why it failed."""
    name, bracket, case = node.partition("::")[2].partition("[")
    return one_line(f"failed: {name.rpartition('::')[2]}{bracket}{case}: {reason}", limit)


def _proper(text: str) -> bool:
    """Whether a server can be told it: it has no halves of surrogate pairs, which stand for bytes that are no UTF-8."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _common_prefix(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix, by halving: comparing slices is fast, a loop over bytes is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _nearest(text: str, old: str) -> str:
    """Where the first line of `old` may have been meant: the line of the file that is most like it."""
    wanted = next((line.strip() for line in old.splitlines() if line.strip()), "")
    lines = [line.strip() for line in text.splitlines()[:5000]]
    near = [wanted] if wanted in lines else get_close_matches(wanted[:200], dict.fromkeys(lines), 1, 0.6)
    if not wanted or not near:
        return ""
    return f"; the nearest line is {lines.index(near[0]) + 1}: {near[0][:200]}"
