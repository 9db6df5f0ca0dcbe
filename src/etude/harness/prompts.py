"""How a task is put to the agent: its tools, the documents before the conversation, and the first tokens."""

from __future__ import annotations

from dataclasses import dataclass

from etude.environments.base import Box
from etude.harness.documents import open_file
from etude.harness.renderers import Renderer
from etude.harness.schemas import SCHEMAS
from etude.harness.tools import CompactTools, FullTools, ToolError, Tools
from etude.records import Budget, Task

SYSTEM = (
    "You are a coding agent. You work in a repository with the tools you are given; paths are relative to its root. "
    "Find what is wrong, change the code with `edit`, check it with `test`, and call `finish` when you are done."
)
DOCUMENTS = (
    " Documents before this message show the file that is open, as it was at the start, and later what you read and "
    "found, as it was then."
)


@dataclass(frozen=True)
class Opening:
    """What an episode begins with; `documents` is empty unless they were asked for."""

    tools: Tools
    prompt: list[int]
    documents: tuple[list[int], ...]


async def open_task(task: Task, box: Box, renderer: Renderer, budget: Budget, *, documents: bool) -> Opening:
    """The task in the presentation that fits the renderer's dialect.

    With `documents` the file in focus is shown, as far as it leaves room for all that may be sampled and takes no more
    than half of the context.
    """
    focus, compact = task.focus, renderer.dialect == "compact"
    tools = CompactTools(box, task) if compact else FullTools(box, task)
    if isinstance(tools, CompactTools):
        source = await tools.open()
        prompt = renderer.prompt([{"role": "user", "content": f"{task.instruction}\n{source}"}])
    else:
        request = (
            f"{task.instruction}\n\nOpen in the editor: {focus.path}, lines {focus.first_line} to {focus.last_line}."
        )
        system = SYSTEM + DOCUMENTS if documents else SYSTEM
        messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        prompt = renderer.prompt(messages, SCHEMAS)
    room = min(budget.context // 2, budget.context - budget.tokens - len(prompt)) if documents else 0
    if room <= 0:
        return Opening(tools, prompt, ())
    try:
        text = await tools.text(focus.path)
    except ToolError:
        return Opening(tools, prompt, ())  # a binary file is no document
    return Opening(tools, prompt, tuple(open_file(text, focus, renderer.document, room, shown=compact)))
