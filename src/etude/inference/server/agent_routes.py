"""The routes of OpenAI's responses and of Anthropic's messages: each request becomes a chat of `chats.py`.

The formats are those of the endpoint for outside agents (`etude.protocol.apis`). Conversations that
`previous_response_id` may name are kept in memory, up to a limit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from etude.inference.server.bodies import ChatBody, invalid, refuse_others
from etude.inference.server.chats import Chats, OpenTurns, shown_tools, whole
from etude.inference.server.served_model import ServedModel
from etude.protocol import decoded
from etude.protocol.apis import AgentRequest, anthropic, as_refusal, responses
from etude.renderers import Message

_KEPT_CHARACTERS = 64 << 20

_RESPONSES = frozenset({
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens",
    "temperature", "top_p", "stream", "text", "reasoning", "previous_response_id", "user", "include",
})  # fmt: skip
_RESPONSES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,), "background": (False,), "conversation": (), "prompt": (), "max_tool_calls": (),
    "truncation": ("disabled",), "context_management": (), "stream_options": ({}, {"include_obfuscation": False}),
}  # fmt: skip
_MESSAGES = frozenset({
    "model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream", "temperature",
    "top_p", "top_k", "thinking", "output_format", "output_config",
})  # fmt: skip
_MESSAGES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
    "inference_geo": (),
    "speed": ("standard",),
    "cache_control": ({"type": "ephemeral"},),
}


class Conversations(dict[str, list[Message]]):
    """Conversations by the id of their last response. All together hold at most `room` characters; the oldest are
    dropped."""

    def __init__(self, room: int = _KEPT_CHARACTERS) -> None:
        super().__init__()
        self._room, self._sizes = room, dict[str, int]()

    def __setitem__(self, name: str, messages: list[Message]) -> None:
        super().__setitem__(name, messages)
        self._sizes[name] = sum(len(json.dumps(message, ensure_ascii=False)) for message in messages)
        while sum(self._sizes.values()) > self._room:
            oldest = next(iter(self))
            del self[oldest], self._sizes[oldest]


class AgentRoutes:
    """The routes of one model."""

    def __init__(self, model: ServedModel, chats: Chats) -> None:
        self._model, self._chats = model, chats
        self._kept = Conversations()

    async def responses(self, http: HTTPRequest) -> Response:
        """OpenAI's responses. Raises Refusal, RequestRefused, ValueError or RuntimeError."""
        fields: dict[str, Any] = await decoded(http, dict[str, Any])
        refuse_others(fields, _RESPONSES, _RESPONSES_NEUTRAL)
        with as_refusal():
            request, conversation = await asyncio.to_thread(responses.parse_request, fields, self._kept)
            body = _chat_of_responses(fields, request)
        sampling = await self._chats.sample(body, http)
        kept = {} if fields.get("store") is False else self._kept
        (turn,) = sampling.turns
        named = _named(request, self._model)
        return await _ended(http, sampling, responses.respond(turn, named, conversation, fields, kept), request.stream)

    async def messages(self, http: HTTPRequest) -> Response:
        """Anthropic's messages. Raises Refusal, RequestRefused, ValueError or RuntimeError."""
        fields: dict[str, Any] = await decoded(http, dict[str, Any])
        request, body = await asyncio.to_thread(_chat_of_messages, fields, _MESSAGES)
        if request.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        sampling = await self._chats.sample(self._with_thoughts(fields, body), http)
        (turn,) = sampling.turns
        named = _named(request, self._model)
        return await _ended(http, sampling, anthropic.respond(turn, named, fields), request.stream)

    async def count_tokens(self, http: HTTPRequest) -> Response:
        """The tokens of a prompt in Anthropic's format. Raises Refusal, RequestRefused or ValueError."""
        fields: dict[str, Any] = await decoded(http, dict[str, Any])
        _, body = await asyncio.to_thread(_chat_of_messages, fields, _MESSAGES)
        body = self._with_thoughts(fields, body)
        self._model.must_be_served(body.model)
        renderer = self._chats.with_variables(self._model.chat_renderer, body)
        prompt = await asyncio.to_thread(self._chats.encoded, body, renderer, shown_tools(body))
        return JSONResponse({"input_tokens": len(prompt)})

    def _with_thoughts(self, fields: Mapping[str, Any], body: ChatBody) -> ChatBody:
        """The body with the template's switch for thoughts set by `thinking`. Without a switch, `thinking` has no
        effect on the prompt."""
        with as_refusal():
            kind = (fields.get("thinking") or {}).get("type")
        if kind is None:
            return body
        if kind not in ("enabled", "adaptive", "disabled"):
            raise invalid(f"thinking of type {kind!r} is not supported", "thinking")
        return self._chats.switched(body, "enable_thinking", kind != "disabled")


async def _ended(http: HTTPRequest, sampling: OpenTurns, answer: Any, stream: bool) -> Response:
    """The response; the sampling ends with it, or when the client disconnects."""
    if not stream:
        return await whole(http, answer, sampling)
    try:
        response = await answer
    except BaseException:
        sampling.end()
        raise
    response.body_iterator = sampling.ending(response.body_iterator)
    return response


def _named(request: AgentRequest, model: ServedModel) -> AgentRequest:
    """The request with the name of the model that answers."""
    return replace(request, model=model.names[0])


def _chat_of_responses(fields: Mapping[str, Any], request: AgentRequest) -> ChatBody:
    for tool in fields.get("tools") or ():
        kind, form = tool.get("type"), tool.get("format") or {"type": "text"}
        if kind not in ("function", "custom") or (kind == "custom" and form.get("type") != "text"):
            raise invalid(f"a tool of type {kind!r} is not supported here: describe a function", "tools")
    include = [name for name in fields.get("include") or () if name != "reasoning.encrypted_content"]
    if include:
        raise invalid(f"include: {include[0]!r} is not supported", "include")
    text = dict(fields.get("text") or {})
    form = text.get("format") or {"type": "text"}
    if text.get("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity is not supported: leave it out", "text")
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    reasoning = fields.get("reasoning") or {}
    return _chat(
        request,
        temperature=fields.get("temperature"),
        top_p=fields.get("top_p"),
        user=fields.get("user"),
        tool_choice=choice,
        parallel_tool_calls=fields.get("parallel_tool_calls"),
        response_format=form,
        reasoning_effort=reasoning.get("effort"),
    )


def _chat_of_messages(fields: dict[str, Any], done: frozenset[str]) -> tuple[AgentRequest, ChatBody]:
    refuse_others(fields, done, _MESSAGES_NEUTRAL)
    with as_refusal():
        for tool in fields.get("tools") or ():
            if tool.get("type") not in (None, "custom"):
                raise invalid(f"a tool of type {tool['type']!r} is not supported: describe it by a schema", "tools")
        request = anthropic.parse_request(fields)
        choice = fields.get("tool_choice") or {"type": "auto"}
        name = {"type": "function", "function": {"name": choice.get("name")}}
        forced = {"auto": "auto", "any": "required", "none": "none", "tool": name}[choice["type"]]
        config = fields.get("output_config") or {}
        if unknown := sorted(config.keys() - {"format", "effort"}):
            raise invalid(f"output_config.{unknown[0]} is not supported: leave it out", "output_config")
        form = fields.get("output_format") or config.get("format")
        if form is not None:
            form = {"type": form["type"], "json_schema": {"schema": form["schema"]}}
        body = _chat(
            request,
            temperature=fields.get("temperature"),
            top_p=fields.get("top_p"),
            top_k=fields.get("top_k"),
            tool_choice=forced,
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
            response_format=form,
            reasoning_effort=config.get("effort"),
        )
    return request, body


def _chat(request: AgentRequest, **options: Any) -> ChatBody:
    """A request as a chat. Raises Refusal."""
    fields = {
        "model": request.model,
        "messages": list(request.messages),
        "tools": list(request.tools) or None,
        "stop": list(request.stops) or None,
        "max_tokens": request.max_tokens,
        **options,
    }
    body = ChatBody.of(fields)
    body.check()
    return body
