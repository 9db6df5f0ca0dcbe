"""New diagnostics of files: syntax errors by Python's own compiler, the rest by ruff or pyflakes if the box has one."""

import asyncio
import base64
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence

from etude.harness.tools import Exec, file_bytes
from etude.renderers import ToolError, one_line

MOST = 100  # diagnostics
SECONDS = 20.0  # for a linter and one file
LONGEST = 60_000  # bytes of a file for the linter, which travel in a command

_FIND = "python3 -c \"import importlib.util as u; print([m for m in ('ruff', 'pyflakes') if u.find_spec(m)])\""
_COMMANDS = {
    "ruff": "python3 -m ruff check --quiet --no-cache --output-format=concise --stdin-filename {path} -",
    "pyflakes": "python3 -m pyflakes",
}
_DIAGNOSTIC = re.compile(r"^[^\n]*?:(\d+):(?:\d+:?)?\s+(.+)$", re.MULTILINE)

Diagnostics = list[tuple[int, str]]  # line, message


class Lints:
    """The diagnostics of one box. `first` holds the original texts of edited files, "" for new ones."""

    def __init__(self, execute: Exec) -> None:
        self._exec = execute
        self._linter: str | None = None  # "": none
        self.first: dict[str, str] = {}

    async def new(self, files: Sequence[tuple[str, str]], changed: Sequence[str]) -> str:
        """The problems of files (path, text) that are new since the start; `changed` are the files that have changed.
        Raises ToolError for a file that is not Python."""
        if others := [path for path, _ in files if not path.endswith((".py", ".pyi"))]:
            raise ToolError(f"there is no linter for {others[0]}")
        lines: list[str] = []
        for path, text in files:
            if path not in changed:
                continue
            known = path in self.first
            earlier = await self._of(path, self.first[path]) if known else []
            before = Counter(message for _, message in earlier)
            for line, message in await self._of(path, text):
                if before[message]:
                    before[message] -= 1
                    continue
                lines.append(f"{path}:{line}: {message}" + ("" if known else " (may be older)"))
        if len(lines) > MOST:
            lines = [*lines[:MOST], f"[{len(lines) - MOST} more]"]
        alone = "" if self._linter else " (the box has no linter: only syntax was checked)"
        return "\n".join(lines) or f"nothing new{alone}"

    async def _of(self, path: str, text: str) -> Diagnostics:
        if errors := await asyncio.to_thread(_syntax, text):
            return errors
        if self._linter is None:
            modules = (await self._exec(_FIND, SECONDS)).output
            self._linter = next((name for name in _COMMANDS if f"'{name}'" in modules), "")
        data = text.encode("utf-8", "surrogateescape")
        if not self._linter or len(data) > LONGEST:
            return []
        command = _COMMANDS[self._linter].format(path=shlex.quote(path))
        done = await self._exec(f"base64 -d <<< {base64.b64encode(data).decode()} | {command} 2>&1", SECONDS)
        return [(int(line), one_line(message, 200)) for line, message in _DIAGNOSTIC.findall(done.output)]


def _syntax(text: str) -> Diagnostics:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(file_bytes(text), "file", "exec", dont_inherit=True)
    except SyntaxError as e:
        return [(e.lineno or 1, one_line(f"{type(e).__name__}: {e.msg}", 200))]
    except (ValueError, RecursionError, MemoryError, OverflowError) as e:
        return [(1, one_line(f"it cannot be compiled: {e}", 200))]
    return []
