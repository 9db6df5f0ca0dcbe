"""The opening of a coding task: its tools, its first messages, and the text of the open file."""

from contextlib import suppress
from typing import Any

from etude.errors import UserError
from etude.harness.compact_tools import CompactTools
from etude.harness.full_tools import FullTools
from etude.harness.loop import EngineModel, EpisodeSpec, Opening, Toolset
from etude.harness.python_tools import python_tool
from etude.records import CodeTask, Task
from etude.renderers import Renderer, ToolError, named
from etude.sandbox import Box

TURN = 100  # tokens that a prompt leaves for a task and a turn, at least
SYSTEM = (
    "You are a coding agent. You work in a repository with the tools you are given; paths are relative to its root. "
    "Find what is wrong, change the code with `edit`, check it with `test`, and call `finish` when you are done."
)
DOCUMENTS = (
    " Documents before this message show the file that is open, as it was at the start, and later what you read and "
    "found, as it was then."
)


async def open_task(spec: EpisodeSpec, box: Box) -> Opening:
    """A coding task, presented as the model's dialect has it."""
    task, model = spec.task, spec.model
    if model.compact:
        assert isinstance(task, CodeTask)
        tools = CompactTools(box, task)
        await tools.open()
    else:
        tools = FullTools(box, task, spec.toolset.apply_edit, spec.toolset.names, spec.toolset.functions)

    documents = isinstance(model, EngineModel) and model.sampling.documents

    async def messages(memory: str) -> list[dict[str, str]]:
        memory = f"\n\n{memory}" if memory else ""
        if isinstance(tools, CompactTools):
            return [{"role": "user", "content": f"{task.prompt}\n{await tools.source()}{memory}"}]
        return messages_of(task, memory, documents=documents)

    text = None
    if documents and task.focus.path:
        with suppress(ToolError):  # a binary file is no document
            text = await tools.text(task.focus.path)
    return Opening(tools, messages, text=text)


def check_context(renderer: Renderer, toolset: Toolset, context: int) -> None:
    """Raises UserError if the prompt with these full tools leaves no room for a turn in a context of so many tokens, or
    if the template has no place for instructions. The compact dialect shows no schemas."""
    if renderer.dialect == "compact":
        return
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Fix it."}]
    try:
        taken = len(renderer.prompt(messages, schemas_of(toolset)))
    except ValueError as e:
        raise UserError(f"the instructions are a system message, and {e}: give another by --chat-template") from None
    if taken + TURN > context:
        raise UserError(
            f"instructions and schemas of the tools take {taken:,} tokens of every prompt, and the context has "
            f"{context:,}: raise rollout.context (--context), or name fewer tools in rollout.tools (--tools)"
        )


def schemas_of(toolset: Toolset) -> list[dict[str, Any]]:
    """The schemas of full tools, in OpenAI's format. Raises UserError for unknown names."""
    return [*named(toolset.names), *(python_tool(function).schema for function in toolset.functions)]


def messages_of(task: Task, memory: str = "", *, documents: bool = False) -> list[dict[str, str]]:
    """The task as messages for a model that knows the OpenAI format; its tools are those of `FullTools`."""
    focus = task.focus
    request = task.prompt
    if focus.path:
        request += f"\n\nOpen in the editor: {focus.path}, lines {focus.first_line} to {focus.last_line}."
    system = SYSTEM + DOCUMENTS if documents else SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": request + memory}]
