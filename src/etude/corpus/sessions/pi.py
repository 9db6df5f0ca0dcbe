"""Session files of the agent Pi (`~/.pi/agent/sessions/**/*.jsonl`), versions 1 to 3, and traces in the Hub's simple
format for sessions, which has the same envelope with messages in OpenAI's format.

    {"type": "session", "version": 3, "id": ..., "cwd": ...}
    {"type": "message", "id": ..., "parentId": ..., "message": {"role": "user" | "assistant" | "toolResult", ...}}
    {"type": "compaction", "summary": ..., "firstKeptEntryId": ...}          the summary replaces what is before

The system prompt and the tools are not in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.corpus.sessions.thread import AgentThread, readable
from etude.protocol.apis import RequestRefused, read
from etude.renderers import Message

_WHOLE = ("stop", "toolUse", "end_turn", "tool_calls", None)


def is_session(line: Mapping[str, Any]) -> bool:
    """Whether a line is the head of such a file."""
    return line.get("type") == "session" and "id" in line


def threads(lines: Sequence[Mapping[str, Any]]) -> Iterator[AgentThread]:
    """The threads of a file: a way to each leaf, in parts between its compactions."""
    place = next(place for place, line in enumerate(lines) if is_session(line))
    head = lines[place]
    origin = {"session": str(head["id"]), "harness": str(head.get("harness") or "pi")}
    origin |= {"date": str(head.get("timestamp") or "")[:10]}
    entries: list[Mapping[str, Any]] = []
    before: list[int] = []  # the entry before each, -1 at a root; it stands earlier in the file, so no way is a circle
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines[place + 1 :]):
        entries.append(line)
        before.append(numbers.get(str(line["parentId"]), -1) if "parentId" in line else number - 1)
        if line.get("id") is not None:
            numbers[str(line["id"])] = number
    inner, leaves = set[int](), list[int]()
    for number in reversed(range(len(entries))):
        if number not in inner and not _is_answer(entries[number]):
            continue  # nothing is learned behind the last answer of a way
        leaves += [] if number in inner else [number]
        inner.add(before[number])
    for leaf in reversed(leaves):
        way: list[Mapping[str, Any]] = []
        while leaf >= 0:
            way.append(entries[leaf])
            leaf = before[leaf]
        yield from _parts(way[::-1], origin)


def _is_answer(entry: Mapping[str, Any]) -> bool:
    message = entry.get("message")
    return isinstance(message, dict) and message.get("role") == "assistant"


def _parts(way: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> Iterator[AgentThread]:
    """The conversations of one way: one up to each compaction, and one behind the last."""
    since = 0
    for place, entry in enumerate(way):
        if entry.get("type") == "compaction":
            yield from _thread(way[since:place], origin, way[:since])
            since = place
    yield from _thread(way[since:], origin, way[:since])


def _thread(
    way: Sequence[Mapping[str, Any]], origin: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()
) -> Iterator[AgentThread]:
    entries, context = way, list[Mapping[str, Any]]()
    if way and way[0].get("type") == "compaction":
        kept = way[0].get("firstKeptEntryId")
        start = next((i for i, entry in enumerate(earlier) if entry.get("id") == kept), len(earlier))
        context, entries = list(earlier[start:]), way
    summary = [entry for entry in entries[:1] if entry.get("type") == "compaction"]
    messages = [*_read(summary, 0), *_read(context, 0), *_read([e for e in entries if e not in summary], 1)]
    shown = readable(messages)
    models = sorted({str(e["message"]["model"]) for e in way if (e.get("message") or {}).get("model")})
    if shown:
        yield AgentThread(shown, origin={**origin, "model": ", ".join(models)})


def _read(entries: Sequence[Mapping[str, Any]], weight: int) -> list[Message]:
    messages: list[Message] = []
    for entry in entries:
        try:
            for message in read("chat", {"messages": list(_entry(entry))}):
                whole = (entry.get("message") or {}).get("stopReason") in _WHOLE
                is_answer = message["role"] == "assistant"
                messages.append(dict(message) | ({"weight": int(weight and whole)} if is_answer else {}))
        except (RequestRefused, KeyError, TypeError, AttributeError):
            break
    return messages


def _entry(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message of an entry in OpenAI's format; none for an entry that is not in the model's context."""
    kind = entry.get("type")
    if kind in ("compaction", "branch_summary"):
        yield {"role": "user", "content": str(entry["summary"])}
    elif kind == "custom_message":
        yield {"role": "user", "content": entry["content"]}
    if kind != "message":
        return
    message = entry["message"]
    match message["role"]:
        case "toolResult":
            yield {"role": "tool", "tool_call_id": message["toolCallId"], "content": message["content"]}
        case "bashExecution" if message.get("excludeFromContext"):
            return
        case "bashExecution":
            yield {"role": "user", "content": f"Ran `{message['command']}`\n{message.get('output', '')}"}
        case "compactionSummary" | "branchSummary":
            yield {"role": "user", "content": message["summary"]}
        case "custom" | "hookMessage":
            yield {"role": "user", "content": message["content"]}
        case "assistant" if message.get("stopReason") in ("error", "aborted") and not message.get("content"):
            return
        case "assistant" if isinstance(message.get("content"), list):
            calls = [part for part in message["content"] if part.get("type") == "toolCall"]
            shown = {
                "role": "assistant",
                "content": [part for part in message["content"] if part.get("type") != "toolCall"],
                "tool_calls": [
                    {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
                    for call in calls
                ],
            }
            kept = ("tool_calls",) if calls else ()
            yield {key: value for key, value in shown.items() if value or key in ("role", *kept)}
        case _:
            yield dict(message)
