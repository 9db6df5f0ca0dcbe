"""The common part of the dialects: a request as chat messages, and digests by which conversations are recognised."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import blake3

from etude.renderers import Message, Tool, content_text, printable

MAX_STOPS, MAX_STOP = 16, 1024  # texts that end an answer, and characters of each
Kind = Literal["invalid", "key", "unknown", "context", "spent", "lost", "failed"]


class RequestRefused(Exception):
    """A refused request. Each dialect has its own shape and status for a `kind`."""

    def __init__(self, kind: Kind, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.param = param


@dataclass(frozen=True)
class AgentRequest:
    """A request in any dialect. Messages and tools are in OpenAI's chat format, without sampling options."""

    model: str  # as the client calls it; the answer repeats the name
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise RequestRefused(
                "invalid", f"the number of tokens to sample must be at least 1, got {self.max_tokens!r}"
            )
        if not all(isinstance(stop, str) for stop in self.stops):
            raise RequestRefused("invalid", "stop must be text or a list of texts", "stop")
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in self.stops):
            raise RequestRefused("invalid", f"at most {MAX_STOPS} stop texts of at most {MAX_STOP} characters", "stop")


@contextmanager
def as_refusal() -> Iterator[None]:
    """Raises RequestRefused for errors in reading a request that is not in the format of its API."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as e:
        raise RequestRefused("invalid", f"the request is not in the API's format: {type(e).__name__} {e}") from None


def function(name: str, description: object, parameters: object) -> Tool:
    """A tool in OpenAI's chat format."""
    if not isinstance(name, str) or not name:
        raise RequestRefused("invalid", "a tool has no name", "tools")
    shown = {"name": name, "description": str(description or ""), "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": shown}


def arranged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages as chat templates take them: one system message at the start, and later ones as the user's, because most
    templates silently drop them. Raises RequestRefused without a message to answer."""
    count = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    system = "\n\n".join(filter(None, map(content_text, messages[:count])))
    rest = [m if m["role"] not in ("system", "developer") else dict(m) | {"role": "user"} for m in messages[count:]]
    if not rest:
        raise RequestRefused("invalid", "messages must hold one from the user", "messages")
    if rest[-1]["role"] == "assistant":
        raise RequestRefused(
            "invalid", "the last message is the assistant's: its turns cannot be begun for it", "messages"
        )
    return (*([{"role": "system", "content": system}] if system else []), *rest)


def text_of(content: object) -> str:
    """The text of a message's content: a string, or parts of text. Raises RequestRefused for images and files."""
    if content is None or isinstance(content, str):
        return printable(content or "")
    if not isinstance(content, list):
        raise RequestRefused("invalid", "a message's content must be text or a list of parts", "messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestRefused("invalid", f"the model reads text only, not a part of type {kind!r}", "messages")
        texts.append(part if isinstance(part, str) else str(part.get("text") or part.get("refusal") or ""))
    return printable("".join(texts))


def call_message(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """A tool call of an assistant message; `arguments` as JSON text or as an object."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(call_id), "type": "function", "function": {"name": str(name), "arguments": text}}


def conversation_digest(before: bytes, message: Message) -> bytes:
    """The digest of a conversation that ends with `message`; equal for all spellings that clients may use. White space
    around the assistant's text, the order and spelling of JSON, ids of calls, and thoughts do not count."""
    text = content_text(message)
    calls = [
        [call["function"]["name"], _plain(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    role = message["role"]
    shown = json.dumps([role, text.strip() if role == "assistant" else text, calls], sort_keys=True)
    return blake3.blake3(before + shown.encode()).digest()


def conversation_digests(request: AgentRequest) -> list[bytes]:
    """The digests of the tools, and of the conversation after each message."""
    chain = [blake3.blake3(json.dumps(request.tools, sort_keys=True).encode()).digest()]
    for message in request.messages:
        chain.append(conversation_digest(chain[-1], message))
    return chain


def _plain(arguments: object) -> object:
    """Arguments of a call without their spelling: 1.0 and 1 are one number in JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return arguments
    return _numbers(arguments)


def _numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
