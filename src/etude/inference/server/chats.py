"""The chat routes: OpenAI's chat completions and responses, Anthropic's messages and count_tokens.

The model's renderer turns messages into ids, and ids into tool calls, so text can never become a special token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from etude.errors import UserError
from etude.inference.server.bodies import ChatBody, body_of, first, invalid
from etude.inference.server.choices import Choice, Detokenizer
from etude.inference.server.grammars import answer_rule
from etude.inference.server.kept_turns import KeptTurns
from etude.inference.server.served_model import ServedModel
from etude.protocol import Refusal, characters
from etude.protocol.apis import (
    RequestRefused,
    SampledTurn,
    answering,
    arranged,
    as_refusal,
    chat,
    read,
    to_answer,
    tools_of,
)
from etude.renderers import Message, Renderer, Tool

T = TypeVar("T")
_VARIANTS = 16  # renderers kept, one per setting of the template's variables


@dataclass(frozen=True)
class OpenTurns:
    """Turns that are being sampled, and the tasks that sample them."""

    turns: list[SampledTurn]
    choices: list[Choice]
    tasks: list[asyncio.Task[None]]

    def end(self) -> None:
        """Stop the sampling."""
        for task in self.tasks:
            task.cancel()
        for choice in self.choices:  # also of tasks that have not begun
            choice.sequence.abort()

    async def ending(self, lines: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The stream; when it ends, so does the sampling."""
        try:
            async for line in lines:
                yield line
        finally:
            self.end()


class Chats:
    """The chat routes of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.kept = KeptTurns(model)
        self._variants: dict[str, Renderer] = {}

    async def completions(self, http: HTTPRequest) -> Response:
        """OpenAI's chat completions. Raises Refusal, ValueError or RuntimeError."""
        body, documents = await asyncio.to_thread(with_messages, await body_of(http, ChatBody))
        sampling = await self.sample(body, http, documents)
        head: dict[str, Any] = {"id": f"chatcmpl-{sampling.turns[0].name}", "created": int(time.time())}
        head["model"] = self._model.names[0]
        logprobs = self._logprobs_of(sampling.choices, body.top_logprobs or 0) if body.logprobs else None
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            lines = sampling.ending(chat.chunks(sampling.turns, head, with_usage, logprobs))
            return StreamingResponse(lines, media_type="text/event-stream")
        shown = await whole(http, chat.completion(sampling.turns, head, logprobs), sampling)
        with answering(sampling.turns):
            if body.return_token_ids:
                shown["prompt_token_ids"] = sampling.choices[0].sequence.request.prompt
                for choice, turn in zip(shown["choices"], sampling.turns, strict=True):
                    choice["token_ids"] = turn.ids
            return JSONResponse(shown)

    async def sample(self, body: ChatBody, http: HTTPRequest, documents: Sequence[str] = ()) -> OpenTurns:
        """Begins the answers to a chat with arranged messages, and keeps the first for the gateway if `http` has the
        header for it. Raises Refusal, RequestRefused, ValueError or RuntimeError."""
        model = self._model
        model.must_be_served(body.model)
        renderer, tools = self.with_variables(model.chat_renderer, body), shown_tools(body)
        grammar = await asyncio.to_thread(self._grammar, body, renderer, tools)
        prompt = await asyncio.to_thread(self.encoded, body, renderer, tools)
        encoded = await asyncio.to_thread(self.encoded_documents, documents)
        limit = first(body.max_completion_tokens, body.max_tokens, model.engine.max_length)
        choices = await model.choices(
            body,
            prompt,
            limit,
            seed=body.first_seed,
            top_logprobs=body.top_logprobs or 0,
            documents=encoded,
            grammar=grammar,
            stops=body.stops,
            detokenizer=partial(Detokenizer, model.tokenizer) if body.stops else None,
        )
        length = len(choices[0].sequence.request.prompt)
        turns = [SampledTurn(renderer, length, body.stops, tools) for _ in choices]
        for turn in turns:
            turn.most_calls = 1 if body.parallel_tool_calls is False else None
        self.kept.keep(http, choices, turns)
        tasks = [turn.sampling(choice.play(turn)) for choice, turn in zip(choices, turns, strict=True)]
        return OpenTurns(turns, choices, tasks)

    def encoded(self, body: ChatBody, renderer: Renderer, tools: Sequence[Tool]) -> list[int]:
        """Ids of the prompt for arranged messages. Raises RequestRefused, PromptTooLong or UserError."""
        self._model.check_characters(characters((body.messages, tools)))
        with as_refusal():
            if not body.continue_final_message:
                return renderer.prompt(body.messages, tools)
            *before, last = body.messages
            return [*renderer.prompt(before, tools), *self._begun(last, renderer)]

    def encoded_documents(self, documents: Sequence[str]) -> tuple[list[int], ...]:
        """Ids of documents. Raises PromptTooLong or UserError."""
        self._model.check_characters(sum(map(len, documents)))
        return tuple(map(self._model.applier.encoder.encode, documents))

    def _begun(self, last: Message, renderer: Renderer) -> list[int]:
        """The ids of the last message, with which the answer begins. Raises Refusal."""
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise invalid("continue_final_message needs a text of the assistant as the last message", "messages")
        ids = renderer.turn({"role": "assistant", "content": last["content"]})
        while ids and ids[-1] in renderer.stop_ids:
            ids = ids[:-1]
        return ids

    def _grammar(self, body: ChatBody, renderer: Renderer, tools: Sequence[Tool]) -> tuple[str, str | None] | None:
        """The grammar of the answer, and the name of the field that requires it. Raises Refusal."""
        rule, grammars = answer_rule(body), self._model.grammars
        if forced := forced_tools(body):
            return grammars.of_call(renderer, forced), "tool_choice"
        if rule is None:
            return None
        if tools:
            return grammars.of_call(renderer, tools, rule[0]), rule[1]
        return grammars.of_text(renderer, rule[0]), rule[1]

    def with_variables(self, renderer: Renderer, body: ChatBody) -> Renderer:
        """The renderer with the template variables of the body. Raises Refusal."""
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if not variables:
            return renderer
        param = "chat_template_kwargs" if body.chat_template_kwargs else "reasoning_effort"
        if (change := getattr(renderer, "with_template_kwargs", None)) is None:
            raise invalid(f"the dialect {renderer.dialect} has no template, so no variables: leave {param} out", param)
        key = json.dumps(variables, sort_keys=True)
        if key not in self._variants:
            if len(self._variants) >= _VARIANTS:
                del self._variants[next(iter(self._variants))]
            try:
                self._variants[key] = change(variables)
            except UserError as e:
                raise invalid(str(e), param) from None
        return self._variants[key]

    def switched(self, body: ChatBody, variable: str, value: bool) -> ChatBody:
        """The body with a variable of the template set, if the template has it."""
        kwargs = (body.chat_template_kwargs or {}) | {variable: value}
        other = msgspec.structs.replace(body, chat_template_kwargs=kwargs)
        try:
            self.with_variables(self._model.chat_renderer, other)
        except Refusal:
            return body
        return other

    def _logprobs_of(self, choices: Sequence[Choice], count: int) -> chat.Logprobs:
        def shown(index: int, start: int, end: int) -> dict[str, Any]:
            choice = choices[index]
            tops = choice.tops[start:end] if count else [[]] * (end - start)
            rows = zip(choice.ids[start:end], choice.logprobs[start:end], tops, strict=True)
            content = [
                self._entry(token, logprob) | {"top_logprobs": [self._entry(*each) for each in top]}
                for token, logprob, top in rows
            ]
            return {"content": content, "refusal": None}

        return shown

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._model.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def with_messages(body: ChatBody) -> tuple[ChatBody, list[str]]:
    """The body with its messages read and arranged, and the texts of the documents in them. Raises RequestRefused."""
    documents: list[str] = []
    with as_refusal():
        messages = read("chat", {"messages": body.messages}, documents=documents)
        shown = arranged(messages) if body.continue_final_message else to_answer(messages)
    return msgspec.structs.replace(body, messages=list(shown)), documents


def shown_tools(body: ChatBody) -> Sequence[Tool]:
    """The tools in the prompt. Raises RequestRefused."""
    with as_refusal():
        return tools_of({"tools": body.tools, "tool_choice": body.tool_choice})


def forced_tools(body: ChatBody) -> Sequence[Tool]:
    """The tools of which the model must call one; empty if it may answer freely. Raises Refusal."""
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise invalid("tool_choice is required, and there are no tools", "tool_choice")
        return list(tools)
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise invalid("tool_choice must be auto, none, required, or the name of a function", "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not (named := [tool for tool in tools if tool["function"]["name"] == name]):
        raise invalid(f"tool_choice names the tool {str(name)[:100]!r}, which is not among the tools", "tool_choice")
    return named[:1]


async def whole(http: HTTPRequest, answer: Awaitable[T], sampling: OpenTurns) -> T:
    """The complete answer; its sampling ends if the client disconnects. Raises RequestRefused."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RequestRefused("lost", "the client has gone")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        sampling.end()
