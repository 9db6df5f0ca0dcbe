"""The formats of two chat APIs: OpenAI's chat completions and Anthropic's messages, with native tool calls.

An answer is read as its API's standard says, and what a model got wrong in it is a malformed call, never an error: only
an answer without a message is one. What goes back in the history is valid for servers that read it: every call has a
name, an id of its own and an object of arguments, and a text is a text.
References: platform.openai.com/docs/api-reference/chat, docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from etude.records import ToolCall
from etude.renderers import read_call

Api = Literal["openai", "anthropic"]
Message = dict[str, Any]
# Of servers that read them again.
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks")
_NAME, _BLANK = re.compile(r"[^A-Za-z0-9_-]"), re.compile(r"\s")


@dataclass(frozen=True)
class ChatUsage:
    """Tokens of an answer, as the API counts them; `cached` are part of `prompt`."""

    prompt: int = 0
    cached: int = 0
    sampled: int = 0


@dataclass(frozen=True)
class ChatAnswer:
    """One turn of the model: `message` in the API's form, its text and its calls, which have the `ids` in order. `cut`:
    it ended at the limit of tokens."""

    message: Message
    text: str
    calls: tuple[ToolCall, ...]
    ids: tuple[str, ...]
    cut: bool
    usage: ChatUsage
    waited: float = 0.0  # seconds that busy servers took


@dataclass
class Conversation:
    """Messages in an API's form; `system` stands beside them, "" for none."""

    system: str
    messages: list[Message] = field(default_factory=list[Message])


@dataclass(frozen=True)
class ChatFormat:
    """The formats of one API's requests and answers."""

    route: str
    headers: Callable[[str], dict[str, str]]
    body: Callable[[ChatModel, Conversation, Sequence[Mapping[str, Any]], int, int], dict[str, Any]]
    read: Callable[[Any], ChatAnswer]
    results: Callable[[ChatAnswer, Sequence[str]], list[Message]]


@dataclass(frozen=True)
class ChatModel:
    """A model of an API. `url` is its base, ending in /v1; `temperature` None leaves the API's own."""

    url: str
    model: str
    api: Api = "openai"
    temperature: float | None = None


def _call(name: object, arguments: object) -> ToolCall:
    """A call of this name, or a malformed call without one."""
    if not isinstance(name, str) or not name.strip():
        return ToolCall(name="", arguments=None, error="the call names no function")
    return read_call(name, arguments)


def _argument_text(arguments: object, call: ToolCall) -> str:
    """Arguments as they go back: the model's own text if it is the object that was read, `{}` for a malformed call."""
    with suppress(ValueError, RecursionError):
        if isinstance(arguments, str) and call.arguments and json.loads(arguments) == call.arguments:
            return arguments
    return json.dumps(call.arguments or {})


def _call_name(call: ToolCall) -> str:
    """The name as it goes back: APIs refuse others than of letters, digits, "_" and "-"."""
    return _NAME.sub("_", call.name)[:64] or "unnamed"


def _ids(entries: Iterable[Mapping[str, Any]], odd: re.Pattern[str]) -> tuple[str, ...]:
    """An id for each call of an answer: its own unless it is missing, another's, or has an odd character."""
    ids: dict[str, None] = {}
    for entry in entries:
        own = str(entry.get("id") or "")
        ids[own if own and own not in ids and not odd.search(own) else uuid.uuid4().hex[:9]] = None  # as Mistral's
    return tuple(ids)


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    """A number of tokens; 0 for what is none."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 53 else 0


def _text(content: object) -> str:
    """The text of an answer: a text, or a list of parts with texts and refusals. Raises TypeError for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError(f"a text is {type(content).__name__}")
    parts = [part if isinstance(part, dict) else {"text": part} for part in cast(list[object], content)]
    texts = [part.get("text") or part.get("refusal") for part in cast(list[dict[str, object]], parts)]
    return "".join(text for text in texts if isinstance(text, str))


def _openai_body(
    model: ChatModel, talk: Conversation, tools: Sequence[Mapping[str, Any]], max_tokens: int, seed: int
) -> dict[str, Any]:
    system = [{"role": "system", "content": talk.system}] if talk.system else []
    body = {
        "model": model.model,
        "messages": [*system, *talk.messages],
        "tools": list(tools) or None,
        "max_tokens": max_tokens,
        "seed": seed & 0x7FFFFFFF,
        "temperature": model.temperature,
    }
    return {name: value for name, value in body.items() if value is not None}


def _functions(calls: Any) -> list[dict[str, Any]]:
    """The calls of an answer; what calls no function has an empty one."""
    listed = calls if isinstance(calls, list) else [calls]
    fit = (isinstance(each, dict) and isinstance(each.get("function"), dict) for each in listed)
    return [each if good else {"function": {}} for each, good in zip(listed, fit, strict=True)]


def _openai_read(data: Any) -> ChatAnswer:
    choice = data["choices"][0]
    message, usage = choice["message"], _map(data.get("usage"))
    entries = _functions(message.get("tool_calls") or [])
    calls = tuple(_call(entry["function"].get("name"), entry["function"].get("arguments")) for entry in entries)
    ids, text = _ids(entries, _BLANK), _text(message.get("content")) or _text(message.get("refusal"))
    made: list[Message] = []
    for entry, call, id in zip(entries, calls, ids, strict=True):
        function = entry["function"]
        valid = {"name": _call_name(call), "arguments": _argument_text(function.get("arguments"), call)}
        made.append(entry | {"id": id, "type": "function", "function": function | valid})
    kept = {name: message[name] for name in _THOUGHTS if message.get(name)} | ({"tool_calls": made} if made else {})
    return ChatAnswer(
        message={"role": "assistant", "content": text or None} | kept,
        text=text,
        calls=calls,
        ids=ids,
        cut=choice.get("finish_reason") == "length",
        usage=ChatUsage(
            _count(usage.get("prompt_tokens")),
            _count(_map(usage.get("prompt_tokens_details")).get("cached_tokens")),
            _count(usage.get("completion_tokens")),
        ),
    )


def _openai_results(answer: ChatAnswer, results: Sequence[str]) -> list[Message]:
    return [{"role": "tool", "tool_call_id": id, "content": text} for id, text in zip(answer.ids, results, strict=True)]


def _anthropic_body(
    model: ChatModel, talk: Conversation, tools: Sequence[Mapping[str, Any]], max_tokens: int, seed: int
) -> dict[str, Any]:
    functions = [tool["function"] for tool in tools]
    shown = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in functions
    ]
    body = {
        "model": model.model,
        "system": talk.system or None,
        "messages": talk.messages,
        "tools": shown or None,
        "temperature": model.temperature,
        "max_tokens": max_tokens,
    }
    return {name: value for name, value in body.items() if value is not None}


def _anthropic_read(data: Any) -> ChatAnswer:
    content, usage = data["content"], _map(data.get("usage"))
    listed: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    blocks = [block for block in listed if isinstance(block, dict) and isinstance(block.get("type"), str)]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    calls, ids = tuple(_call(use.get("name"), use.get("input")) for use in uses), _ids(uses, _NAME)
    texts = [_text(block.get("text")) for block in blocks if block.get("type") == "text"]
    valid = iter(
        use | {"id": id, "name": _call_name(call), "input": call.arguments or {}}
        for use, call, id in zip(uses, calls, ids, strict=True)
    )
    kept = [
        next(valid) if block.get("type") == "tool_use" else block
        for block in blocks
        if block.get("type") != "text" or _text(block.get("text")).strip()  # the API refuses blank texts
    ]
    cached, written = (_count(usage.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
    return ChatAnswer(
        message={"role": "assistant", "content": kept},
        text="".join(texts),
        calls=calls,
        ids=ids,
        cut=data.get("stop_reason") == "max_tokens",
        usage=ChatUsage(
            _count(usage.get("input_tokens")) + cached + written, cached, _count(usage.get("output_tokens"))
        ),
    )


def _anthropic_results(answer: ChatAnswer, results: Sequence[str]) -> list[Message]:
    blocks = [
        {"type": "tool_result", "tool_use_id": id, "content": text}
        for id, text in zip(answer.ids, results, strict=True)
    ]
    return [{"role": "user", "content": blocks}]


FORMATS: dict[str, ChatFormat] = {
    "openai": ChatFormat(
        "/chat/completions", lambda key: {"authorization": f"Bearer {key}"}, _openai_body, _openai_read, _openai_results
    ),
    "anthropic": ChatFormat(
        "/messages",
        lambda key: {"x-api-key": key, "anthropic-version": "2023-06-01"},
        _anthropic_body,
        _anthropic_read,
        _anthropic_results,
    ),
}
