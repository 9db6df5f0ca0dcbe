"""A chat model behind an URL: OpenAI's chat completions or Anthropic's messages, with native tool calls.

A conversation is kept in the API's own form, and answers are appended to it unchanged. Requests to busy servers (429,
5xx, lost connections) are repeated after the server's retry-after, else after growing pauses, for PATIENCE seconds.
References: platform.openai.com/docs/api-reference/chat, docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

import httpx2

from etude.errors import UserError
from etude.protocol.backends.client import EngineError
from etude.records import ToolCall
from etude.renderers import checked, printable_json

Api = Literal["openai", "anthropic"]
Message = dict[str, Any]
PATIENCE = 300.0  # seconds that one turn may wait for busy servers in all
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
REACH_SECONDS = 30.0  # until a server answers its first request
_BUSY = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_TOO_LONG = ("context_length_exceeded", "prompt is too long", "maximum context length", "too many tokens")


class ContextSpent(Exception):
    """The API refuses the conversation because it is too long for the model."""


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


def check_reachable(model: ChatModel) -> None:
    """Raises UserError if nothing answers at the model's URL; any HTTP status passes. (`ChatClient.answer` waits for a
    server that is away.)"""
    try:
        httpx2.get(model.url, timeout=REACH_SECONDS)
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as e:
        raise UserError(f"{model.url} is no URL of an API: {e}") from None
    except httpx2.TransportError as e:
        reason = str(e) or type(e).__name__
        raise UserError(f"nothing answers at {model.url} ({reason}): check the address, or start the server") from None


class ChatClient:
    """The client of one model, for any number of requests at a time."""

    def __init__(self, model: ChatModel, key: str | None = None, patience: float = PATIENCE) -> None:
        self.model = model
        self.format = FORMATS[model.api]
        self._patience = patience
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = self.format.headers(key) if key else {}
        self._http = httpx2.AsyncClient(limits=limits, timeout=None, headers=headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]], max_tokens: int, seed: int, timeout: float
    ) -> ChatAnswer:
        """The next turn of at most `max_tokens` tokens; `tools` are OpenAI's definitions. Raises TimeoutError if a
        server does not answer within `timeout` seconds, EngineError if servers stay busy, ContextSpent, and UserError
        for a wrong URL, key or model."""
        body = self.format.body(self.model, conversation, tools, max_tokens, seed)
        started, wait = time.monotonic(), FIRST_WAIT
        while True:
            sent = time.monotonic()
            try:
                async with asyncio.timeout(timeout):
                    response = await self._http.post(f"{self.model.url.rstrip('/')}{self.format.route}", json=body)
                if response.status_code not in _BUSY:
                    break
                busy, after = f"status {response.status_code}: {_reason(response)}", _after(response)
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as e:
                raise UserError(f"{self.model.url} is no URL of an API: {e}") from None
            except httpx2.TransportError as e:
                busy, after = f"{type(e).__name__} {e}", None
            pause = min(LONGEST_WAIT, after if after is not None else wait * random.uniform(0.5, 1.0))
            if time.monotonic() - started + pause > self._patience:
                raise EngineError(f"{self.model.url} was busy for {self._patience:.0f} seconds ({busy})")
            await asyncio.sleep(pause)
            wait *= 2
        return self._read(response, sent - started)

    def _read(self, response: httpx2.Response, waited: float) -> ChatAnswer:
        where = f"{self.model.model} at {self.model.url}"
        if response.status_code != 200:
            reason = _reason(response)
            if response.status_code in (400, 413) and any(mark in reason.lower() for mark in _TOO_LONG):
                raise ContextSpent(reason)
            raise UserError(f"{where} refuses with status {response.status_code}: {reason}; {_cure(response)}")
        try:
            answer = self.format.read(printable_json(response.json()))
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as e:
            raise EngineError(f"{where} sent what is no answer: {type(e).__name__} {e}") from None
        return ChatAnswer(answer.message, answer.text, answer.calls, answer.ids, answer.cut, answer.usage, waited)


def _cure(response: httpx2.Response) -> str:
    if response.status_code in (401, 403):
        return "give the key in the API's environment variable or with --key-file"
    if response.status_code in (404, 405):
        return "give the base of the API, ending in /v1, its kind with --api, and a model that it has with --model"
    return "change the budget or the model"


def _reason(response: httpx2.Response) -> str:
    try:
        error: Any = response.json()["error"]
        text = f"{error.get('message', '')} {error.get('code') or ''}" if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = response.text
    return " ".join(str(text).split())[:300] or "no reason given"


def _after(response: httpx2.Response) -> float | None:
    """The pause in seconds that a busy server demands; None without."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(response.headers[name]) / unit)
        except (KeyError, ValueError):  # absent, or a date
            continue
    return None


def _call(name: object, arguments: object) -> ToolCall:
    """A call whose arguments are JSON text, or an object already."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as e:
            return ToolCall(name=str(name), arguments=None, error=f"the arguments are no JSON: {e}")
    if not isinstance(value, dict):
        return ToolCall(name=str(name), arguments=None, error="the arguments are no object")
    return checked(str(name), cast(dict[str, object], value))


def _text(value: object) -> str:
    """The text of an answer. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"a text is {type(value).__name__}")
    return value


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


def _openai_read(data: Any) -> ChatAnswer:
    choice = data["choices"][0]
    message, usage = choice["message"], data.get("usage") or {}
    calls = message.get("tool_calls") or ()
    kept = {name: message[name] for name in ("content", "tool_calls", "reasoning_content") if message.get(name)}
    return ChatAnswer(
        message={"role": "assistant", "content": None} | kept,
        text=_text(message.get("content") or ""),
        calls=tuple(_call(call["function"]["name"], call["function"].get("arguments")) for call in calls),
        ids=tuple(str(call["id"]) for call in calls),
        cut=choice.get("finish_reason") == "length",
        usage=ChatUsage(
            int(usage.get("prompt_tokens") or 0),
            int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
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
    blocks, usage = list(data["content"]), data.get("usage") or {}
    calls = [block for block in blocks if block["type"] == "tool_use"]
    cached = int(usage.get("cache_read_input_tokens") or 0)
    written = int(usage.get("cache_creation_input_tokens") or 0)
    return ChatAnswer(
        message={"role": "assistant", "content": blocks},
        text="".join(_text(block["text"]) for block in blocks if block["type"] == "text"),
        calls=tuple(_call(call["name"], call["input"]) for call in calls),
        ids=tuple(str(call["id"]) for call in calls),
        cut=data.get("stop_reason") == "max_tokens",
        usage=ChatUsage(
            int(usage.get("input_tokens") or 0) + cached + written, cached, int(usage.get("output_tokens") or 0)
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
