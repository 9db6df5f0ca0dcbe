"""The agent's list of its work: replaced as a whole, kept over summaries."""

from collections.abc import Sequence
from typing import cast

from etude.renderers.text import ToolError, one_line

MOST = 50
_SIGNS = {"open": "[ ]", "doing": "[~]", "done": "[x]"}


def todo(items: Sequence[object]) -> tuple[str, int]:
    """The list as text, and how many of its items are not done. Raises ToolError."""
    if len(items) > MOST:
        raise ToolError(f"a list has at most {MOST} items")
    lines, left = [], 0
    for number, item in enumerate(items, 1):
        entry = cast(dict[str, object], item) if isinstance(item, dict) else {}
        task, status = entry.get("task"), entry.get("status")
        if not isinstance(task, str) or not task.strip() or set(entry) != {"task", "status"}:
            raise ToolError(f"item {number} is no object of a task and a status")
        if not isinstance(status, str) or status not in _SIGNS:
            raise ToolError(f"item {number} has no status of {', '.join(_SIGNS)}")
        lines.append(f"{number}. {_SIGNS[status]} {one_line(task, 200)}")
        left += status != "done"
    return "\n".join(lines), left
