"""The compact dialect: roles, calls and arguments are one special token each, arguments are plain text by position.

    <|user|>Fix `name` in path\n{function}<|end|><|assistant|><|call|>edit<|arg|>{old}<|arg|>{new}<|call|>test<|end|>
    <|tool|>{result}\n{result}<|end|><|assistant|><|call|>finish<|end|>

(without line breaks between messages). The token ids of this text are the same whether it is rendered at once or turn
by turn, because every piece of text stands between special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import blake3

from etude.errors import UserError
from etude.records import ToolCall
from etude.renderers.arguments import read_arguments
from etude.renderers.base import (
    ROLES,
    Message,
    ParsedTurn,
    TextCodec,
    Tool,
    checked,
    content_text,
    malformed,
    one_line,
)
from etude.renderers.schemas import COMPACT_PARAMETERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL = tuple(f"<|{name}|>" for name in (*ROLES, "end", "call", "arg"))
IDS = {token: i for i, token in enumerate(_CONTROL, 2)}  # the ids in the bundled models; see corpus/dialect.py


def is_compact(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has all tokens of the dialect at the ids of the bundled models."""
    return all(tokenizer.token_to_id(token) == i for token, i in IDS.items())


class CompactRenderer(TextCodec):
    """A renderer of the compact dialect; see the module. `digest` covers the tokenizer; the dialect has no template."""

    dialect = "compact"
    thinks = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {token: tokenizer.token_to_id(token) for token in _CONTROL}
        missing = [token for token, i in ids.items() if i is None]
        if missing:
            raise UserError(
                f"The tokenizer lacks {', '.join(missing)} of the compact dialect; leave model.dialect out."
            )
        known = {token.strip("<|>"): i for token, i in ids.items() if i is not None}
        super().__init__(tokenizer)
        self._role = {role: known[role] for role in ROLES}
        self._end, self._call, self._arg = known["end"], known["call"], known["arg"]
        text_end = tokenizer.token_to_id("<|endoftext|>")
        self.stop_ids: tuple[int, ...] = (self._end,) if text_end is None else (self._end, text_end)
        self.digest = blake3.blake3(b"compact\n" + tokenizer.to_str().encode()).hexdigest()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a conversation; consecutive tool messages are one. Tools are not rendered, because the models know
        them."""
        ids: list[int] = []
        for role, group in groupby(messages, lambda message: message["role"]):
            if role not in self._role:
                raise ValueError(f"unknown role {role!r}; known: {', '.join(ROLES)}")
            if role == "tool":
                results: Message = {"content": "\n".join(map(content_text, group))}
                group = [results]
            for message in group:
                ids += self._message(role, content_text(message), message.get("tool_calls") or ())
        return [*ids, self._role["assistant"]]

    def parse(self, ids: Sequence[int], finish_reason: str = "stop", tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Calls of a sampled turn. The last one is malformed if the turn was cut before its end token."""
        closed = finish_reason == "stop"
        if ids and ids[-1] in self.stop_ids:
            ids, closed = ids[:-1], True
        spans = _split(ids, self._call)
        text = self.text(spans[0])
        calls = [self._parse_call(span) for span in spans[1:]]
        if calls and not closed:
            calls[-1] = malformed(calls[-1].name, "the turn was cut before the call ended")
        return ParsedTurn(text, tuple(calls))

    def bridge(
        self, sampled_ids: Sequence[int], finish_reason: str, results: Sequence[str], request: str = ""
    ) -> list[int]:
        """See `Renderer.bridge`."""
        messages = [{"role": "tool", "content": text} for text in results or [""] * (not request)]
        return self.follow(sampled_ids, messages + [{"role": "user", "content": request}] * bool(request))

    def follow(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Renderer.follow`."""
        closed = bool(sampled_ids) and sampled_ids[-1] == self._end
        return [*([] if closed else [self._end]), *self.prompt(messages)]

    def end_of_thought(self, ids: Sequence[int]) -> list[int]:
        """See `Renderer.end_of_thought`. The dialect has no thoughts."""
        return []

    def turn(self, message: Message) -> list[int]:
        """See `Renderer.turn`. The dialect has no place for thoughts."""
        if message.get("reasoning_content"):
            raise ValueError("the compact dialect has no place for thoughts (`reasoning_content`)")
        return self._message("assistant", content_text(message), message.get("tool_calls") or ())[1:]

    def _message(self, role: str, content: str, calls: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        ids = [self._role[role], *self.plain(content)]
        for call in calls:
            function = call.get("function", call)
            ids += [self._call, *self.plain(str(function["name"]))]
            for value in read_arguments(function.get("arguments")).values():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                ids += [self._arg, *self.plain(text)]
        ids.append(self._end)
        return ids

    def _parse_call(self, ids: Sequence[int]) -> ToolCall:
        spans = _split(ids, self._arg)
        name, *values = (self.text(span) for span in spans)
        if any(not self._encoder.forbidden.isdisjoint(span) for span in spans):
            return malformed(name, "a special token inside a call")
        names = COMPACT_PARAMETERS.get(name)
        if names is None:
            return checked(one_line(name, 64), {f"argument{i}": value for i, value in enumerate(values)})
        if len(values) != len(names):
            return malformed(name, f"{name} takes {len(names)} arguments, got {len(values)}")
        return checked(name, dict(zip(names, values, strict=True)))


def _split(ids: Sequence[int], separator: int) -> list[Sequence[int]]:
    spans, start = [], 0
    for i, token in enumerate(ids):
        if token == separator:
            spans.append(ids[start:i])
            start = i + 1
    return [*spans, ids[start:]]
