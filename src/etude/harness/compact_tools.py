"""The tools of the compact dialect: the function in focus is implied, arguments are by position, results are short."""

from typing import Any

from etude.harness.focus import EditError, View, moved, view_of
from etude.harness.tools import TEST_SECONDS, Tools, verdict
from etude.records import CodeTask, ToolCall
from etude.renderers import COMPACT_PARAMETERS, ToolError, printable
from etude.sandbox import Box, BoxError


class CompactTools(Tools):
    """Tools of the compact dialect; `focus.py` has the text that `edit` takes. Call `open` before the first call."""

    def __init__(self, box: Box, task: CodeTask) -> None:
        super().__init__(box, task)
        self._roots, self._path = task.source_roots, task.focus.path
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

    def taken(self, call: ToolCall) -> dict[str, Any]:
        """See `Tools.taken`."""
        wanted, arguments = COMPACT_PARAMETERS[call.name], call.arguments or {}
        if set(arguments) != set(wanted):
            raise ToolError(f"{call.name} takes {len(wanted)} arguments")
        return arguments

    async def open(self) -> None:
        """Reads the focus."""
        focus = self.task.focus
        self._views = [view_of(await self.text(focus.path), focus.first_line, focus.last_line)]

    async def source(self) -> str:
        """The function's current source as the prompt shows it; "" if it was moved or removed."""
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
        await self._write(self._path, edited.file)
        self._views.append(edited)
        self._count_edit(self._path, view.file, edited.file)
        return "ok"

    async def _undo(self) -> str:
        await self._view()
        if len(self._views) < 2:
            raise ToolError("nothing to undo")
        await self._write(self._path, self._views[-2].file)
        self._views.pop()
        self.metrics["undo"] += 1
        self.visible_passed = False
        return "undone"

    async def _test(self) -> str:
        return verdict(await self._run_tests())

    async def _read(self) -> str:
        return (await self._view()).source[:4000]

    async def _list(self) -> str:
        return "\n".join(await self.box.list(self._path.rpartition("/")[0]))[:1000]

    async def _search(self, pattern: str) -> str:
        hits, _ = await self._grep(pattern, self._roots, False, 20)
        return "\n".join(hits)[:1000] or "no matches"

    async def _run(self, command: str) -> str:
        self._stale = True
        done = await self._exec(command, TEST_SECONDS)
        status = "timed out" if done.timed_out else f"exit {done.rc}"
        return f"{status}\n{done.output[-400:]}".rstrip()

    async def _view(self) -> View:
        """The current view of the function, located anew if a command has changed the file."""
        if self._stale:
            text = await self.text(self._path)
            if text != self._views[-1].file:
                view = moved(self._views[-1], text)
                if view is None:
                    raise ToolError("the function was moved or removed")
                self._views = [view]  # earlier views are of another file
            self._stale = False
        return self._views[-1]
