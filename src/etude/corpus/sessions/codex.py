"""Session files of Codex (`~/.codex/sessions/**/rollout-*.jsonl`).

A line is {"timestamp", "type", "payload"}; the payloads of type `response_item` are items of OpenAI's responses API.
`compacted` replaces the conversation so far, and begins a new thread. Reasoning is encrypted, but for its summary,
which the model did not say in this place: thoughts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.corpus.sessions.thread import AgentThread, readable
from etude.protocol.apis import RequestRefused, read
from etude.renderers import Message

_ENDED = frozenset({"turn_aborted", "thread_rolled_back"})


def is_session(line: Mapping[str, Any]) -> bool:
    """Whether a line is one of Codex."""
    return line.get("type") == "session_meta" and isinstance(line.get("payload"), dict)


def threads(lines: Sequence[Mapping[str, Any]]) -> Iterator[AgentThread]:
    """The threads of a file: one, and another behind each compaction."""
    meta = next((line["payload"] for line in lines if line.get("type") == "session_meta"), {})
    models = sorted(
        {
            str(line["payload"]["model"])
            for line in lines
            if line.get("type") == "turn_context" and line["payload"].get("model")
        }
    )
    date = str(meta.get("timestamp") or "")[:10]
    origin = {"session": str(meta.get("id", "")), "harness": "codex", "model": ", ".join(models), "date": date}
    instructions = meta.get("base_instructions") or meta.get("instructions") or ""
    text = instructions.get("text", "") if isinstance(instructions, dict) else str(instructions)
    system: list[Message] = [{"role": "system", "content": text}] if text else []
    context: list[Message] = []
    items: list[dict[str, Any]] = []
    for line in lines:
        payload = line.get("payload")
        if not isinstance(payload, dict):
            continue
        if line.get("type") == "response_item":
            items.append(payload)
        elif line.get("type") == "event_msg" and payload.get("type") in _ENDED:
            items.append({"type": "end", "event": payload})
        elif line.get("type") == "compacted":
            yield from _thread([*system, *context], items, origin)
            replaced = payload.get("replacement_history")
            context = [
                {key: value for key, value in message.items() if key != "weight"}
                for message in (
                    _read(replaced, 0)
                    if isinstance(replaced, list)
                    else [*(m for m in _read(items, 0) if m["role"] == "user"), _user(payload.get("message"))]
                )
            ]
            items = []
    yield from _thread([*system, *context], items, origin)


def _thread(
    context: Sequence[Message], items: Sequence[dict[str, Any]], origin: Mapping[str, Any]
) -> Iterator[AgentThread]:
    messages = readable([*context, *_read(items, 1)])
    if messages:
        yield AgentThread(messages, origin=origin)


def _read(items: Sequence[dict[str, Any]], weight: int) -> list[Message]:
    """Items as messages, up to the first that a model of text cannot read. Items of the assistant that follow each
    other are one answer, which is the model's but for the last one before an abortion."""
    messages: list[Message] = []
    answer: list[dict[str, Any]] = []

    def close(whole: bool) -> None:
        if answer:
            read_items = read("responses", {"input": answer})
            messages.extend(dict(m) | {"weight": weight * whole} for m in read_items if m["role"] == "assistant")
        answer.clear()

    try:
        for item in items:
            kind = item.get("type", "message")
            if kind == "reasoning":
                continue
            if kind == "end":
                close(False)
            elif kind == "local_shell_call":
                call = {"type": "function_call", "name": "local_shell", "call_id": item.get("call_id")}
                answer.append(call | {"arguments": item.get("action")})
            elif kind in ("function_call", "custom_tool_call") or item.get("role") == "assistant":
                answer.append(item)
            else:
                close(True)
                messages += read("responses", {"input": [item]})
        close(True)
    except (RequestRefused, KeyError, TypeError, AttributeError):
        pass
    return messages


def _user(text: object) -> Message:
    return {"role": "user", "content": str(text or "")}
