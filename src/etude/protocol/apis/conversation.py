"""The common part of the APIs: a request, its messages as all entrances take them, and digests of conversations."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import blake3

from etude.renderers import Message, Tool, content_text

MAX_STOPS, MAX_STOP = 16, 1024  # texts that end an answer, and characters of each
RETRY = {"retry-after": "1"}
"""Headers of a refusal of kind "lost": the same request may be answered in a second."""
Kind = Literal["invalid", "key", "unknown", "context", "spent", "lost", "failed"]


class RequestRefused(Exception):
    """A refused request. Each dialect has its own shape and status for a `kind`."""

    def __init__(self, kind: Kind, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.param = param


def invalid(why: str, param: str | None = "messages") -> RequestRefused:
    """The refusal of a request that is wrong in itself."""
    return RequestRefused("invalid", why, param)


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
            raise invalid(f"the number of tokens to sample must be at least 1, got {self.max_tokens!r}", None)
        if not all(isinstance(stop, str) for stop in self.stops):
            raise invalid("stop must be text or a list of texts", "stop")
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in self.stops):
            raise invalid(f"at most {MAX_STOPS} stop texts of at most {MAX_STOP} characters", "stop")


@contextmanager
def as_refusal() -> Iterator[None]:
    """Raises RequestRefused for errors in reading a request or in rendering its messages."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as e:
        why = str(e) if type(e) is ValueError else f"it is not in the API's format: {type(e).__name__} {e}"
        raise invalid(why) from None


def arranged(messages: Sequence[Message]) -> tuple[Message, ...]:
    """A conversation that was read, as renderers take it: one system message for those at the start, and the results of
    a turn's calls behind it, in the order of the calls and with their names. Raises RequestRefused for results and
    calls that are no pairs; the calls of a last turn may be without results."""
    at = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system = "\n\n".join(filter(None, map(content_text, messages[:at])))
    shown: list[Message] = [{"role": "system", "content": system}] if system else []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for start, end in pairwise(sorted({at, *turns, len(messages)})):
        shown += _paired(messages[start:end], end == len(messages))
    return tuple(shown)


def _paired(messages: Sequence[Message], last: bool) -> list[Message]:
    """A turn and what follows up to the next one, the results by their ids."""
    turn, calls = messages[0], messages[0].get("tool_calls") or ()
    results = [message for message in messages if message["role"] == "tool"]
    if not calls or (last and len(messages) == 1):
        if results:
            raise invalid("a tool result follows a turn without calls")
        return list(messages)
    ids = [call["id"] for call in calls]
    names = [str(result.get("tool_call_id") or "") for result in results]
    if len(ids) == len(names) == 1 and not (ids[0] and names[0]):
        names = ids  # of one call and one result it is clear without ids
    elif "" in ids or len(set(ids)) < len(ids):
        raise invalid("several calls of a turn need an id each, all different")
    counts = dict.fromkeys(ids, 0)
    for name in names:
        if name not in counts:
            raise invalid(f"a tool result names {name!r}, no call of the turn before")
        counts[name] += 1
    for name, count in counts.items():
        if count != 1:
            raise invalid(f"the call {name!r} has {count or 'no'} results: send one")
    by_id = dict(zip(names, results, strict=True))
    paired = [dict(by_id[c["id"]]) | {"name": c["function"]["name"], "tool_call_id": c["id"]} for c in calls]
    return [turn, *paired, *(message for message in messages[1:] if message["role"] != "tool")]


def to_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    """An arranged conversation that a model goes on from. Raises RequestRefused."""
    shown = arranged(messages)
    if not shown:
        raise invalid("messages must hold one from the user")
    if shown[-1]["role"] == "assistant":
        raise invalid("the last message is the assistant's: its turns cannot be begun for it")
    return shown


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
    try:
        return _numbers(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
    except (ValueError, RecursionError):
        return arguments


def _numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
