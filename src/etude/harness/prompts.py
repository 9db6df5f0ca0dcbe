"""How a task is put to the agent: its tools, and the first tokens."""

from __future__ import annotations

from etude.environments.base import Box
from etude.harness.renderers import Renderer
from etude.harness.schemas import SCHEMAS
from etude.harness.tools import CompactTools, FullTools, Tools
from etude.records import Task

SYSTEM = (
    "You are a coding agent. You work in a repository with the tools you are given; paths are relative to its root. "
    "Find what is wrong, change the code with `edit`, check it with `test`, and call `finish` when you are done."
)


async def open_task(task: Task, box: Box, renderer: Renderer) -> tuple[Tools, list[int]]:
    """The tools of a task and the ids of its prompt, in the presentation that fits the renderer's dialect."""
    if renderer.dialect == "compact":
        compact = CompactTools(box, task)
        source = await compact.open()
        return compact, renderer.prompt([{"role": "user", "content": f"{task.instruction}\n{source}"}])
    focus = task.focus
    request = f"{task.instruction}\n\nOpen in the editor: {focus.path}, lines {focus.first_line} to {focus.last_line}."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
    return FullTools(box, task), renderer.prompt(messages, SCHEMAS)
