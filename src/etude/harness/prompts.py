"""The opening of a coding task: its tools, the documents before the conversation, and the first tokens."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from etude.errors import UserError
from etude.harness.compact_tools import CompactTools
from etude.harness.documents import open_file
from etude.harness.edit_appliers import EditApplier
from etude.harness.full_tools import FullTools
from etude.harness.tools import Tools
from etude.records import Budget, Task
from etude.renderers import Renderer, ToolError, named
from etude.sandbox import Box

TURN = 100  # tokens that a prompt leaves for a task and a turn, at least
SYSTEM = (
    "You are a coding agent. You work in a repository with the tools you are given; paths are relative to its root. "
    "Find what is wrong, change the code with `edit`, check it with `test`, and call `finish` when you are done."
)
SUMMARISE = (
    "Your context is almost full, and all of it but the task will be dropped. Please summarise your work for yourself: "
    "what you found out and where it stands, what you changed and why, what the tests say, and what to do next. "
    "Call no tool. Think first if you need to; only what follows your thoughts is kept."
)
AGAIN = "That was {fault}. It must be there whole, in fewer words. "
MEMORY = "Your context was full, so this is all you keep of your work so far (summary {count}):\n{summary}"
DOCUMENTS = (
    " Documents before this message show the file that is open, as it was at the start, and later what you read and "
    "found, as it was then."
)


Reopen = Callable[[str, int], Awaitable[list[int]]]
"""The first tokens of the segment after a summary: of the summary and its number from 1."""


@dataclass(frozen=True)
class Opening:
    """The beginning of an episode: its tools, the tokens of its prompt, and the documents before the prompt."""

    tools: Tools
    prompt: list[int]
    reopen: Reopen
    documents: tuple[list[int], ...] = ()


async def open_task(
    task: Task,
    box: Box,
    renderer: Renderer,
    budget: Budget,
    apply_edit: EditApplier,
    *,
    documents: bool,
    names: Sequence[str] = (),
) -> Opening:
    """A coding task, presented as the renderer's dialect has it, with the full tools of these names, or all. With
    `documents` the file in focus is shown, as far as it leaves room for all tokens that may be sampled and takes no
    more than half of the context."""
    focus, compact = task.focus, renderer.dialect == "compact"
    tools = CompactTools(box, task) if compact else FullTools(box, task, apply_edit, names)
    source = await tools.open() if isinstance(tools, CompactTools) else ""
    prompt = _prompt(task, renderer, tools, source, documents)

    async def reopen(summary: str, count: int) -> list[int]:
        source = await tools.source() if isinstance(tools, CompactTools) else ""
        return _prompt(task, renderer, tools, source, documents, memory_of(summary, count, tools))

    room = min(budget.context // 2, budget.context - budget.tokens - len(prompt)) if documents else 0
    if room <= 0:
        return Opening(tools, prompt, reopen)
    try:
        text = await tools.text(focus.path)
    except ToolError:
        return Opening(tools, prompt, reopen)  # a binary file is no document
    return Opening(tools, prompt, reopen, tuple(open_file(text, focus, renderer.document, room, shown=compact)))


def check_context(renderer: Renderer, names: Sequence[str], context: int) -> None:
    """Raises UserError if the prompt with the full tools of these names, or all, leaves no room for a turn in a context
    of so many tokens. The compact dialect shows no schemas."""
    if renderer.dialect == "compact":
        return
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Fix it."}]
    taken = len(renderer.prompt(messages, named(names)))
    if taken + TURN > context:
        raise UserError(
            f"instructions and schemas of the tools take {taken:,} tokens of every prompt, and the context has "
            f"{context:,}: raise rollout.context (--context), or name fewer tools in rollout.tools (--tools)"
        )


def memory_of(summary: str, count: int, tools: Tools) -> str:
    """The message that holds an agent's memory of its work after its `count`-th summary."""
    return "\n\n".join(filter(None, (MEMORY.format(count=count, summary=summary or "(nothing)"), tools.state())))


def _prompt(task: Task, renderer: Renderer, tools: Tools, source: str, documents: bool, memory: str = "") -> list[int]:
    memory = f"\n\n{memory}" if memory else ""
    if renderer.dialect == "compact":
        return renderer.prompt([{"role": "user", "content": f"{task.prompt}\n{source}{memory}"}])
    return renderer.prompt(messages_of(task, memory, documents=documents), tools.schemas)


def messages_of(task: Task, memory: str = "", *, documents: bool = False) -> list[dict[str, str]]:
    """The task as messages for a model that knows the OpenAI format; its tools are those of `FullTools`."""
    focus = task.focus
    request = task.prompt
    if focus.path:
        request += f"\n\nOpen in the editor: {focus.path}, lines {focus.first_line} to {focus.last_line}."
    system = SYSTEM + DOCUMENTS if documents else SYSTEM
    return [{"role": "system", "content": system}, {"role": "user", "content": request + memory}]
