"""Session files of Claude Code (`~/.claude/projects/*/*.jsonl`, as of version 2).

A line is a block of an answer, a message of the user or a result of a tool; `parentUuid` links it to the line before.
The lines of one answer share the identifier of the message. Threads are the ways from a root to a leaf: a session that
was taken back to an earlier place has several, and a summary of a full context begins a new one. The system prompt and
the tools are not in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.corpus.sessions.thread import AgentThread, readable
from etude.protocol.apis import RequestRefused, read
from etude.renderers import Message

_WHOLE = ("end_turn", "tool_use", "stop_sequence")
_INTERRUPTED = "[Request interrupted by user"


@dataclass
class _SessionEntry:
    """An answer with the results of its calls, or a message of the user. `parent` is the unit before it."""

    role: str
    parent: _SessionEntry | None
    content: list[Any] = field(default_factory=list[Any])
    results: list[Any] = field(default_factory=list[Any])
    model: str = ""
    reason: object = None
    cut: bool = False  # the user interrupted it
    inner: bool = False  # an answer stands behind it


def is_session(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of Claude Code's."""
    return "sessionId" in line and ("uuid" in line or line.get("type") in ("summary", "queue-operation"))


def threads(lines: Sequence[Mapping[str, Any]]) -> Iterator[AgentThread]:
    """The threads of a file. A thread ends before the first part that a model of text cannot read, such as an
    image."""
    units = _entries(lines)
    first = next((line for line in lines if line.get("sessionId")), {})
    leaves: list[_SessionEntry] = []
    for unit in reversed(units):
        if unit.role == "assistant" or unit.inner:  # nothing is learned behind the last answer of a way
            leaves += [] if unit.inner else [unit]
            if unit.parent is not None:
                unit.parent.inner = True
    for leaf in reversed(leaves):
        way: list[_SessionEntry] = []
        unit: _SessionEntry | None = leaf
        while unit is not None:
            way.append(unit)
            unit = unit.parent
        messages = readable(_messages(way[::-1]))
        models = sorted({unit.model for unit in way if unit.model})
        origin = {"session": str(first.get("sessionId", "")), "harness": "claude-code", "model": ", ".join(models)}
        if messages:
            yield AgentThread(messages, origin=origin | {"date": str(first.get("timestamp", ""))[:10]})


def _entries(lines: Sequence[Mapping[str, Any]]) -> list[_SessionEntry]:
    units: list[_SessionEntry] = []
    at: dict[str, _SessionEntry | None] = {}  # by the identifier of a line
    answers: dict[str, _SessionEntry] = {}
    calls: dict[str, _SessionEntry] = {}
    for line in lines:
        parent = at.get(str(line.get("parentUuid")))
        name, kind, message = str(line.get("uuid", "")), line.get("type"), line.get("message") or {}
        if name in at:
            continue  # a session that goes on may repeat lines
        shown = kind in ("user", "assistant") and not line.get("isVisibleInTranscriptOnly")
        if not shown or message.get("model") == "<synthetic>" or line.get("isApiErrorMessage"):
            at[name] = parent  # not in the model's context; what follows is behind what came before
            continue
        content = message.get("content") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if kind == "assistant":
            unit = answers.get(str(message.get("id")))
            if unit is None:
                unit = _SessionEntry("assistant", parent, model=str(message.get("model", "")))
                answers[str(message.get("id") or name)] = unit
                units.append(unit)
            unit.content += parts
            unit.reason = message.get("stop_reason") or unit.reason
            calls |= {part["id"]: unit for part in parts if part.get("type") == "tool_use"}
            at[name] = unit
            continue
        results = [part for part in parts if part.get("type") == "tool_result"]
        owner = next((calls[part["tool_use_id"]] for part in results if part.get("tool_use_id") in calls), None)
        if owner is not None:
            owner.results += results
            parts = [part for part in parts if part.get("type") != "tool_result"]
            parent = owner
        if owner is not None and not parts:
            at[name] = owner
            continue
        at[name] = unit = _SessionEntry("user", parent, parts)
        units.append(unit)
        if parent is not None and _text(unit).startswith(_INTERRUPTED):
            parent.cut = True
    return units


def _messages(way: Sequence[_SessionEntry]) -> list[Message]:
    messages: list[Message] = []
    for unit in way:
        entries: list[dict[str, Any]] = [{"role": unit.role, "content": unit.content}]
        if unit.role == "assistant":
            whole = not unit.cut if unit.reason is None else unit.reason in _WHOLE
            entries[0]["weight"] = int(whole)
        if unit.results:
            entries.append({"role": "user", "content": unit.results})
        try:
            messages += read("messages", {"messages": entries})
        except RequestRefused:
            break
    return messages


def _text(unit: _SessionEntry) -> str:
    return "".join(str(part.get("text", "")) for part in unit.content if isinstance(part, dict))
