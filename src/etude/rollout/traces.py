"""Scripted solutions: episodes of an agent that knows the gold answer, with the run's tools in a real box.

    look      read the open lines, or find the function first, or run the tests first
    try       often a wrong edit or two, tested and undone, so that the tests' output matters
    mend      the gold answer as the smallest edit of whole lines, then the tests
    finish

Calls are chosen here; results are the tools' own. A trace is a conversation in OpenAI's format with the tools' schemas,
so stage sft writes it in the dialect of the model that it trains. Wrong edits have the weight 0: they are context, not
targets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from etude.code import OPERATOR_WEIGHTS, draw_mutant, functions
from etude.corpus import StringEdit, edit_between
from etude.harness import FullTools, messages_of
from etude.records import CodeTask, ToolCall
from etude.sandbox import Box

TRACE_TOOLS = frozenset({"read", "edit", "undo", "test", "finish"})  # tools
TRIES = (0, 1, 2)  # wrong edits
_TRIED = (8, 3, 1)  # their weights
_LOOKS = ("read", "grep", "test")
_LOOKED = (6, 2, 2)
_LINES = 40  # of one read: the lines of the function, rounded up
MAX_EDIT_LINES = 12  # of a gold answer, at most

_Call = tuple[str, dict[str, Any]]  # name and arguments
_TEST: _Call = ("test", {})
_UNDO: _Call = ("undo", {})
_FINISH: _Call = ("finish", {})


@dataclass
class _Talk:
    """A conversation in progress."""

    tools: FullTools
    messages: list[dict[str, Any]]

    async def act(self, *calls: _Call, learned: bool = True) -> list[str]:
        """A turn of calls, and their results."""
        made = [ToolCall(name=name, arguments=arguments) for name, arguments in calls]
        results, _ = await self.tools.call_all(made)
        ids = [f"call_{len(self.messages)}_{number}" for number in range(len(calls))]
        tool_calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id, (name, arguments) in zip(ids, calls, strict=True)
        ]
        weight = {} if learned else {"weight": 0}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls} | weight)
        self.messages += [
            {"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(ids, results, strict=True)
        ]
        return results


async def record_trace(task: CodeTask, box: Box, seed: int, tools: Sequence[str] = ()) -> dict[str, Any] | None:
    """The trace of a task in its box, as a row of training data, with the tools of these names, or all. None if
    there is none: the answer changes several files or many lines, or the agent sees no test, or its tests do not pass
    with the answer. Raises BoxError."""
    edit = gold_edit(task)
    if edit is None or not task.visible_tests:
        return None
    rng, (path,) = random.Random(seed), task.changes
    talk = _Talk(FullTools(box, task, names=tools), [dict(message) for message in messages_of(task)])
    await _look(talk, task, path, rng)
    taken_back: list[_Call] = []
    for wrong in _wrong_edits(task, path, edit, rng):
        await talk.act(*taken_back, _edit(path, wrong), _TEST, learned=False)
        if talk.tools.visible_passed:
            return None  # the tests pass
        taken_back = [_UNDO]
    turns = [*taken_back, _edit(path, edit), _TEST]
    if rng.random() < 0.3:
        await talk.act(*turns[:-1])
        turns = turns[-1:]
    await talk.act(*turns)
    if not talk.tools.visible_passed:
        return None
    await talk.act(_FINISH)
    return {"messages": talk.messages[:-1], "tools": list(talk.tools.schemas)}


def gold_edit(task: CodeTask) -> StringEdit | None:
    """The smallest edit of whole lines that solves a task; None if several files or more than a dozen lines change."""
    if len(task.changes) != 1 or task.changes.keys() != task.solution.keys():
        return None
    ((path, broken),) = task.changes.items()
    edit = edit_between(broken, task.solution[path])
    return edit if max(edit.old.count("\n"), edit.new.count("\n")) < MAX_EDIT_LINES else None


async def _look(talk: _Talk, task: CodeTask, path: str, rng: random.Random) -> None:
    first, count = task.focus.first_line, task.focus.last_line - task.focus.first_line + 1
    # Numbers of the prompt: a small model learns to copy long before it learns to subtract.
    read = ("read", {"path": path, "offset": first, "limit": -(-count // _LINES) * _LINES})
    name = task.function.rpartition("::")[2].rpartition(".")[2]
    match rng.choices(_LOOKS, _LOOKED)[0]:
        case "grep" if any(schema["function"]["name"] == "grep" for schema in talk.tools.schemas):
            folder = str(PurePosixPath(path).parent) if rng.random() < 0.5 else path
            await talk.act(("grep", {"pattern": rf"def {name}\b", "path": folder}))
            await talk.act(read)
        case "test":
            await talk.act(_TEST)
            await talk.act(read)
        case _:
            await talk.act(read)


def _wrong_edits(task: CodeTask, path: str, gold: StringEdit, rng: random.Random) -> Sequence[StringEdit]:
    """Plausible wrong edits: other mutations of one line of the broken function."""
    broken, edits = task.changes[path], list[StringEdit]()
    unit = next((unit for unit in functions.functions(path, broken) if unit.id == task.function), None)
    count = rng.choices(TRIES, _TRIED)[0]
    if unit is None:
        return edits
    for _ in range(2 * count):
        mutant = draw_mutant(broken, unit, rng, OPERATOR_WEIGHTS, single_line=True)
        if mutant is None or mutant.text in (broken, task.solution[path]):
            continue
        edit = edit_between(broken, mutant.text)
        if edit.old.count("\n") < 3 and edit not in (gold, *edits):
            edits.append(edit)
    return edits[:count]


def _edit(path: str, edit: StringEdit) -> _Call:
    return "edit", {"path": path, "old": edit.old, "new": edit.new}
