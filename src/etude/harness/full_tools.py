"""The tools of models that know the OpenAI format, with the arguments of production tools (`renderers/schemas.py`)."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import blake3

from etude.code import lines_of, shown_lines
from etude.edits import Edit
from etude.harness.edit_appliers import EditApplier, merge_applier
from etude.harness.focus import EditError, common_prefix, edit_file
from etude.harness.lints import Lints
from etude.harness.python_tools import PythonTool, python_tools
from etude.harness.ranking import Lexical, Scorer, search
from etude.harness.terminals import Terminals
from etude.harness.tools import MAX_FILE, READ_ONLY, Tools, clean_failure, file_bytes
from etude.records import Task, ToolCall
from etude.renderers import SCHEMAS, ToolError, fitted, named, one_line
from etude.sandbox import WORKSPACE, Box, BoxError, NotFound

RUN_SECONDS = 120.0
SEARCH_FILES = 2000
MAX_READ = 65536  # characters
ROOM_SHARE = 1.5  # characters of a result for a token of room: about half of the room, at three characters a token
MAX_ITEMS = 50  # of the list of work
LINTED = 20  # files of a call
MAX_COMMITS, HISTORY_SECONDS = 20, 10.0
_SIGNS = {"open": "[ ]", "doing": "[~]", "done": "[x]"}
_GIT = "GIT_OPTIONAL_LOCKS=0 git --no-pager -c core.fsmonitor=false -c core.quotePath=false -c safe.directory='*'"
_COMMIT = re.compile(r"[0-9a-f]{4,40}")


@dataclass(frozen=True)
class _MadeEdit:
    """The inverse of an edit, without a copy of the file: at `start`, `removed` stood instead of `inserted` bytes."""

    path: str
    start: int
    removed: bytes
    inserted: int
    digest: bytes  # of the file after the edit

    @staticmethod
    def between(path: str, before: bytes, after: bytes) -> _MadeEdit:
        start = common_prefix(before, after)
        tail = common_prefix(before[start:][::-1], after[start:][::-1])
        removed = before[start : len(before) - tail]
        return _MadeEdit(path, start, removed, len(after) - tail - start, blake3.blake3(after).digest())


class FullTools(Tools):
    """Tools with the arguments of `SCHEMAS`, those of `names` or all, and the user's `functions` beside them. `scorer`
    ranks for `search`; all episodes share its index. `apply_edit` puts the lazy edit snippets of the tool `apply` into
    files. Raises UserError for functions that cannot be tools of this episode."""

    schemas = SCHEMAS
    scorer: Scorer = Lexical()

    def __init__(
        self,
        box: Box,
        task: Task,
        apply_edit: EditApplier = merge_applier,
        names: Sequence[str] = (),
        functions: Sequence[Callable[..., Any]] = (),
    ) -> None:
        super().__init__(box, task)
        built_in = named(names)
        self._users_box = box  # that functions get
        self._functions = python_tools(functions, built_in)
        self.schemas = (*built_in, *(tool.schema for tool in self._functions.values()))
        self._parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}
        self.apply_edit = apply_edit
        self._edits: list[_MadeEdit] = []
        self._terminals = Terminals(self._exec)
        self._lints = Lints(self._exec)
        self._list_of_work = ""
        self._handlers = {
            "list": self._list,
            "read": self._read,
            "grep": self._search,
            "search": self._find,
            "edit": partial(self._change, self._edited),
            "apply": partial(self._change, self._applied),
            "undo": self._undo,
            "run": self._run,
            "output": self._terminals.output,
            "kill": self._terminals.kill,
            "test": self._test,
            "todo": self._todo,
            "lints": self._new_lints,
            "history": self._history,
            "finish": self._finish,
        }
        self.read_only = READ_ONLY - self._functions.keys()  # a user's function may have such a name, and change things
        for tool in self._functions.values():
            tool.refuse_without(box, task)
            self._handlers[tool.name] = partial(self._call_function, tool)

    def state(self) -> str:
        """The edited files, the list of work and the terminals."""
        done = sorted({edit.path for edit in self._edits})
        parts = [f"Files you have edited: {', '.join(done)}"] if done else []
        parts += [f"Your list:\n{self._list_of_work}"] if self._list_of_work else []
        parts += [f"Terminals: {', '.join(map(str, self._terminals.ids))}"] if self._terminals.ids else []
        return "\n".join(parts)

    async def call(self, call: ToolCall) -> str:
        """See `Tools.call`. The results of a turn take about half of the room that the context has left, at most."""
        if call.arguments is not None and call.name not in self._parameters:
            self.metrics["malformed"] += 1
            return f"error: unknown tool {one_line(call.name, 64)}"
        text, most = await super().call(call), self._most()
        if len(text) <= most or (call.name == "read" and "read" not in self._functions):  # it cuts its result itself
            return text
        half = most // 2
        return f"{text[:half]}\n[cut short: your context has room for no more at once]\n{text[-half:]}"

    def _most(self) -> int:
        """Characters of a result, at most."""
        return int(min(max(self.room, 100) * ROOM_SHARE / self.sharing, 1e9))

    def malformed(self, why: str) -> str:
        """The result of a call that has the wrong form."""
        return f"error: malformed call: {why}"

    def taken(self, call: ToolCall) -> dict[str, Any]:
        """See `Tools.taken`."""
        tool = self._functions.get(call.name)
        return (
            fitted(call, self._parameters[call.name] | {"additionalProperties": False})
            if tool is None
            else tool.taken(call)
        )

    async def _call_function(self, tool: PythonTool, /, **arguments: Any) -> str:
        seconds, mark = self.deadline - time.monotonic(), self._mark()
        return await tool.call(arguments, self._users_box, self.task, self._exec, seconds, mark)

    async def _list(self, path: str = "") -> str:
        entries = await self.box.list(path)
        rest = [f"[{len(entries) - 1000} more]"] if len(entries) > 1000 else []
        return "\n".join([*entries[:1000], *rest]) or "empty folder"

    async def _read(self, path: str, offset: int = 1, limit: int = 2000) -> str:
        lines = shown_lines(await self.text(path))
        start = max(offset, 1) - 1
        chosen = lines[start : start + max(1, min(limit, 2000))]
        shown, size, most = [], 0, min(MAX_READ, self._most())
        for number, line in enumerate(chosen, start + 1):
            text, wide = f"{number:6}\t{line}", min(2000 + 7, most)
            text = text if len(text) <= wide else f"{text[:wide]} [line cut short]"
            size += len(text) + 1
            if size > most and shown:
                break
            shown.append(text)
        left = len(lines) - start - len(shown)
        full = "your context has room for no more at once; " if len(shown) < len(chosen) and most < MAX_READ else ""
        if left > 0:
            shown.append(f"[{left} more lines; {full}read on with offset {start + len(shown) + 1}]")
        return "\n".join(shown) or ("empty file" if not lines else f"error: the file has {len(lines)} lines")

    async def _search(self, pattern: str, path: str = "", ignore_case: bool = False) -> str:
        hits, cut = await self._grep(pattern, [path], ignore_case, 200)
        return "\n".join([*hits, *(["[search cut short]"] if cut else [])]) or "no matches"

    async def _change(self, edited: Callable[..., Awaitable[tuple[str, str]]], /, path: str, **arguments: str) -> str:
        try:
            before, after = await edited(path, **arguments)
        except (ToolError, BoxError):
            self.metrics["edit_errors"] += 1
            raise
        await self._write(path, after)
        self._lints.first.setdefault(path, before)
        self._edits.append(_MadeEdit.between(path, file_bytes(before), file_bytes(after)))
        self._count_edit(path, before, after)
        return "ok"

    async def _edited(self, path: str, old: str, new: str) -> tuple[str, str]:
        """The text of a file before and after an edit; before is empty for a new file."""
        if not old:
            try:
                await self.box.read(path, MAX_FILE)
            except NotFound:
                return "", new
            raise ToolError(f"{path} exists; give the text to replace")
        text = await self.text(path)
        try:
            return text, edit_file(text, old, new)
        except EditError as e:
            if e.matches > 1:
                raise ToolError(f"{e}: give more lines around the text, so that it occurs once") from None
            near = _nearest(text, old) if str(e) == "no match" else ""
            raise ToolError(f"{e}{near}") from None

    async def _applied(self, path: str, sketch: str, instruction: str = "") -> tuple[str, str]:
        text = await self.text(path)
        if not _proper(text) or not _proper(sketch):
            raise ToolError(f"{path} or the sketch is not UTF-8; use edit")
        after = await self.apply_edit(Edit(text, sketch, instruction, path))
        if after == text:
            raise ToolError("no change")
        return text, after

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
        self.visible_passed = False
        return f"undone: {edit.path}"

    async def _find(self, question: str, folder: str = "") -> str:
        files = await self._texts([folder], SEARCH_FILES)
        places = await asyncio.to_thread(search, question, files, self.scorer)
        return places or "nothing found"

    async def _todo(self, items: list[dict[str, str]]) -> str:
        """Replaces the list of work as a whole; it is kept over summaries."""
        if len(items) > MAX_ITEMS:
            raise ToolError(f"a list has at most {MAX_ITEMS} items")
        lines, left = list[str](), 0
        for number, item in enumerate(items, 1):
            if not item["task"].strip() or set(item) != {"task", "status"}:
                raise ToolError(f"item {number} is no object of a task and a status")
            lines.append(f"{number}. {_SIGNS[item['status']]} {one_line(item['task'], 200)}")
            left += item["status"] != "done"
        self._list_of_work, self.metrics["todo_open"] = "\n".join(lines), left
        return self._list_of_work or "the list is empty"

    async def _new_lints(self, paths: list[str]) -> str:
        if not paths or len(paths) > LINTED:
            raise ToolError(f"give one to {LINTED} paths")
        files = [(path, await self.text(path)) for path in paths]
        return await self._lints.new(files, list(await self.box.changes()))

    async def _history(self, query: str = "", path: str = "", author: str = "", commit: str = "") -> str:
        """Commits whose message has `query`, that touch `path`, by `author`; or all of one commit. Git runs inside
        the box, since the agent may change its configuration. `tasks/git_history.py` wrote the history."""
        if commit and not _COMMIT.fullmatch(commit):
            raise ToolError("give a commit as this tool names it")
        chosen = [f"--author={author}"] if author else []
        chosen += ["--regexp-ignore-case", "--fixed-strings", f"--grep={query}"] if query else []
        if commit:
            what, chosen = "show --no-ext-diff --no-textconv --date=short --stat --patch", [commit]
        else:
            what = f"log -{MAX_COMMITS} --date=short --format='%h %ad %an: %s'"
        words = " ".join(map(shlex.quote, [*chosen, "--", *([path] if path else [])]))
        line = f"( cd {WORKSPACE} && {{ [ -e .git ] || exit 77; {_GIT} {what} {words}; }} )"
        done = await self._exec(line, HISTORY_SECONDS)
        if done.rc == 77:
            raise ToolError("this repository has no history")
        if done.rc != 0:
            raise ToolError(f"git says: {done.output[-200:].strip()}")
        return done.output.strip() or "no commits"

    async def _run(self, command: str, seconds: int = 30, background: bool = False) -> str:
        if background:
            return await self._terminals.start(command)
        done = await self._exec(command, max(1.0, min(float(seconds), RUN_SECONDS)))
        status = "timed out" if done.timed_out else f"exit code {done.rc}"
        cut = f" ({done.cut} bytes cut)" if done.cut else ""
        return f"{status}{cut}\n{done.output}".rstrip()

    async def _test(self) -> str:
        if not self.task.visible_tests:
            raise ToolError("this task has no tests that you may see; check your work with `run`")
        failed = await self._run_tests()
        total = len(self.task.visible_tests)
        return "\n".join([f"{total - len(failed)} of {total} passed", *(clean_failure(*f, 400) for f in failed[:10])])


def _proper(text: str) -> bool:
    """Whether a text can be sent to a server: no half of a surrogate pair, which represents a byte that is no UTF-8."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _nearest(text: str, old: str) -> str:
    """A hint at the line of the file that is most like the first line of `old`."""
    wanted = next((line.strip() for line in lines_of(old) if line.strip()), "")
    lines = [line.strip() for line in lines_of(text)[:5000]]
    near = [wanted] if wanted in lines else get_close_matches(wanted[:200], dict.fromkeys(lines), 1, 0.6)
    if not wanted or not near:
        return ""
    return f"; the nearest line is {lines.index(near[0]) + 1}: {near[0][:200]}"
