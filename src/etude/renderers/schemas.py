"""The schemas of the built-in tools; `harness/full_tools.py` and `compact_tools.py` are the code behind them."""

from collections.abc import Sequence
from typing import Any

from etude.errors import UserError

# Tools of the compact dialect and their arguments by position.
COMPACT_PARAMETERS: dict[str, tuple[str, ...]] = {
    "edit": ("old", "new"), "undo": (), "test": (), "read": (), "list": (), "grep": ("pattern",),
    "run": ("command",), "finish": (),
}  # fmt: skip


_WORK = {
    "task": {"type": "string", "description": "What is to be done."},
    "status": {"type": "string", "enum": ["open", "doing", "done"]},
}
_ITEMS = {  # element types of arrays, by name
    "items": {"type": "object", "properties": _WORK, "required": ["task", "status"]},
    "paths": {"type": "string"},
}


def _schema(name: str, description: str, required: Sequence[str] = (), **properties: tuple[str, str]) -> dict[str, Any]:
    shown = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    shown |= {key: shown[key] | {"items": items} for key, items in _ITEMS.items() if key in shown}
    parameters = {"type": "object", "properties": shown, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def named(names: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """The schemas of the tools with these names, or of all without names, in the order of `SCHEMAS`. Raises UserError
    for an unknown name, and for a set without `finish`, by which an agent ends its work."""
    known = [schema["function"]["name"] for schema in SCHEMAS]
    if unknown := sorted({*names} - {*known}):
        raise UserError(f"there is no tool {unknown[0]!r}; known: {', '.join(known)}")
    if names and "finish" not in names:
        raise UserError("an agent ends its work by the tool `finish`: name it among the tools, too")
    return tuple(schema for name, schema in zip(known, SCHEMAS, strict=True) if name in names or not names)


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
        "search",
        "Find the code that a question is about: the ten best places, by words and structure. "
        "Use grep for an exact name.",
        ["question"],
        question=("string", "What you look for, in words."),
        folder=("string", "Folder to search, the repository root by default."),
    ),
    _schema(
        "edit",
        "Replace a text that occurs exactly once in a file. With an empty old text, create a new file.",
        ["path", "old", "new"],
        path=_PATH,
        old=("string", "Exact text to replace, with its indentation."),
        new=("string", "Text to put in its place."),
    ),
    _schema(
        "apply",
        "Change a file by a sketch: the new lines with a neighbour or two, and a comment "
        "like `... existing code ...` for what stays. Neighbours in the sketch delete what lies between them.",
        ["path", "sketch"],
        path=_PATH,
        sketch=("string", "Sketch of the file after the change."),
        instruction=("string", "What the change is about, in a sentence."),
    ),
    _schema("undo", "Take back the last edit."),
    _schema(
        "run",
        "Run a command in a persistent shell.",
        ["command"],
        command=("string", "Shell command."),
        seconds=("integer", "Time limit, 30 by default, at most 120."),
        background=("boolean", "Go on at once, with the command in a terminal of its own; the result is its id."),
    ),
    _schema(
        "output",
        "What a background command has printed since you last looked, and whether it still runs.",
        ["id"],
        id=("integer", "Id of its terminal."),
    ),
    _schema("kill", "End a background command.", ["id"], id=("integer", "Id of its terminal.")),
    _schema("test", "Run the visible tests of the task."),
    _schema(
        "todo",
        "Write down the whole list of your work; it outlives your context. What is open at the end counts against you.",
        ["items"],
        items=("array", "All items, in order, at most 50."),
    ),
    _schema(
        "lints",
        "Errors and warnings in Python files that were not there when you began.",
        ["paths"],
        paths=("array", "Paths relative to the repository root."),
    ),
    _schema(
        "history",
        "The commits that led to this tree, newest first, at most 20; or one of them with its changes.",
        query=("string", "Text in the message."),
        path=("string", "File or folder that they touch."),
        author=("string", "Name or address of the author."),
        commit=("string", "Id of the commit to show."),
    ),
    _schema("finish", "End the work; the repository is graded as it is."),
)
