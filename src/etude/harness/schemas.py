"""The tools as models are told of them; `tools.py` is what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tools of the compact dialect and their arguments by position.
COMPACT_PARAMETERS: dict[str, tuple[str, ...]] = {
    "edit": ("old", "new"),
    "undo": (),
    "test": (),
    "read": (),
    "list": (),
    "grep": ("pattern",),
    "run": ("command",),
    "finish": (),
}


def _schema(name: str, description: str, required: Sequence[str] = (), **properties: tuple[str, str]) -> dict[str, Any]:
    shown = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": shown, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_PATH = ("string", "Path relative to the repository root.")

SCHEMAS: tuple[dict[str, Any], ...] = (
    _schema("list", "List the entries of a folder.", path=("string", "Folder, the repository root by default.")),
    _schema(
        "read",
        "Read a text file with line numbers, at most 2000 lines.",
        ["path"],
        path=_PATH,
        offset=("integer", "First line, from 1."),
        limit=("integer", "Number of lines."),
    ),
    _schema(
        "grep",
        "Find the lines that match a Python regular expression.",
        ["pattern"],
        pattern=("string", "Regular expression, matched against each line."),
        path=("string", "File or folder to search, the repository root by default."),
        ignore_case=("boolean", "Ignore upper and lower case."),
    ),
    _schema(
        "edit",
        "Replace a text that occurs exactly once in a file. With an empty old text, create a new file.",
        ["path", "old", "new"],
        path=_PATH,
        old=("string", "Exact text to replace, with its indentation."),
        new=("string", "Text to put in its place."),
    ),
    _schema("undo", "Take back the last edit."),
    _schema(
        "run",
        "Run a command in a persistent shell.",
        ["command"],
        command=("string", "Shell command."),
        seconds=("integer", "Time limit, 30 by default, at most 120."),
    ),
    _schema("test", "Run the visible tests of the task."),
    _schema("finish", "End the work; the repository is graded as it is."),
)
