"""The reader of answers: bodies of the three APIs, whole or as events, as messages of OpenAI's chat format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from etude.protocol.apis.reading import read
from etude.renderers import Message, printable_json

_FIELDS = ("role", "content", "reasoning_content", "tool_calls")
_REASON = re.compile(r"[a-z_]{1,32}")


def answer_message(api: str, body: bytes, is_stream: bool) -> tuple[Message, str] | None:
    """The first answer in a body of an API ("chat", "responses" or "messages"), and the reason for which it ended:
    "abort" for a stream that broke off, "" for what is no word. None for a body without an answer."""
    try:
        whole: dict[str, Any] = _MADE[api](_events(body)) if is_stream else json.loads(body)
        if api == "chat":
            choice = next(choice for choice in whole["choices"] if choice.get("index", 0) == 0)
            messages = read("chat", {"messages": [choice["message"] | {"role": "assistant"}]}, strict=False)
            reason = choice.get("finish_reason")
        elif api == "responses":
            messages, reason = read("responses", {"input": whole["output"]}, strict=False), whole.get("status")
        else:
            spoken = {"role": "assistant", "content": whole["content"]}
            messages, reason = read("messages", {"messages": [spoken]}, strict=False), whole.get("stop_reason")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration, RecursionError):
        return None
    answer = next((message for message in messages if message["role"] == "assistant"), None)
    if answer is None:
        return None
    message: Any = printable_json({key: answer[key] for key in _FIELDS if key in answer})
    if is_stream and not reason:
        return message, "abort"
    # It stands in the log as it is: a word, not the text of another server.
    return message, reason if isinstance(reason, str) and _REASON.fullmatch(reason) else ""


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events; the last one may have been cut."""
    for line in body.split(b"\n"):
        if line.startswith(b"data:") and (text := line[5:].strip()).startswith(b"{"):
            try:
                event = json.loads(text)
            except ValueError:
                return
            yield event


def _chat(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The body of OpenAI's chat completions, of the first choice's chunks."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for event in events:
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            reason, delta = choice.get("finish_reason") or reason, choice.get("delta") or {}
            for key in ("content", "refusal", "reasoning_content", "reasoning"):
                if delta.get(key):
                    texts[key] = texts.get(key, "") + delta[key]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part.get("index", 0), {"id": "", "function": {"name": "", "arguments": ""}})
                call["id"] = part.get("id") or call["id"]
                for key in ("name", "arguments"):
                    call["function"][key] += (part.get("function") or {}).get(key) or ""
    message: dict[str, Any] = {**texts, "tool_calls": [call for _, call in sorted(calls.items())]}
    return {"choices": [{"message": message, "finish_reason": reason}] if texts or calls else []}


def _responses(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The body of OpenAI's responses: the last event's; of a stream that broke off, its items so far."""
    items: list[Any] = []
    for event in events:
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            return event["response"]
        if event.get("type") == "response.output_item.done":
            items.append(event["item"])
    return {"output": items}


def _messages(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The body of Anthropic's messages, of the events of its blocks."""
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    reason = None
    for event in events:
        kind, number, delta = event.get("type"), event.get("index", 0), event.get("delta") or {}
        if kind == "content_block_start":
            blocks[number] = dict(event["content_block"])
        elif kind == "content_block_delta":
            for key in ("text", "thinking"):
                if isinstance(delta.get(key), str):
                    blocks[number][key] = str(blocks[number].get(key) or "") + delta[key]
            arguments[number] = arguments.get(number, "") + str(delta.get("partial_json") or "")
        elif kind == "message_delta":
            reason = delta.get("stop_reason") or reason
    for number, block in blocks.items():
        if block.get("type") == "tool_use":
            block["input"] = arguments.get(number) or block.get("input") or {}
    return {"content": [block for _, block in sorted(blocks.items())], "stop_reason": reason} if blocks else {}


_MADE: Mapping[str, Any] = {"chat": _chat, "responses": _responses, "messages": _messages}
