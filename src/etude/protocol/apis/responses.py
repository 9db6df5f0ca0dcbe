"""OpenAI's responses API. Conversations are kept for `previous_response_id` as long as the episode lasts."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response, StreamingResponse

from etude.protocol.apis import chat
from etude.protocol.apis.chat import sse
from etude.protocol.apis.conversation import AgentRequest, RequestRefused, invalid
from etude.protocol.apis.reading import read, request_of
from etude.protocol.apis.turn import SampledTurn, answered_lines, answering
from etude.renderers import Message

refused = chat.refused
Kept = dict[str, list[Message]]  # conversations by the id of their last response, without instructions


def parse_request(body: dict[str, Any], kept: Kept) -> tuple[AgentRequest, list[Message]]:
    """A body as a request, and its conversation without the instructions, which hold for one request."""
    before: list[Message] = []
    if (previous := body.get("previous_response_id")) is not None:
        if previous not in kept:
            raise invalid(f"Previous response with id {previous!r} not found.", "previous_response_id")
        before = kept[previous]
    conversation = read("responses", body | {"instructions": None}, before=before)
    return request_of(body, [*read("responses", body | {"input": []}), *conversation]), conversation


async def respond(
    turn: SampledTurn, request: AgentRequest, conversation: list[Message], body: dict[str, Any], kept: Kept
) -> Response:
    """The turn as one response, or as a stream of its events."""
    with answering([turn]):
        writer = _Writer(turn, request, conversation, body, kept)
        if request.stream:
            lines = answered_lines([turn], writer.events(), writer.failed)
            return StreamingResponse(lines, media_type="text/event-stream")
        await turn.whole()
        return JSONResponse(writer.completed())


class _Writer:
    """Writes one response; `output` holds its items as they come."""

    def __init__(
        self, turn: SampledTurn, request: AgentRequest, conversation: list[Message], body: dict[str, Any], kept: Kept
    ) -> None:
        self.turn = turn
        self.conversation = conversation
        self.kept = kept
        self.custom = {tool["name"] for tool in body.get("tools") or () if tool["type"] == "custom"}
        self.head: dict[str, Any] = {
            "id": f"resp_{turn.name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "instructions": body.get("instructions"),
            "previous_response_id": body.get("previous_response_id"),
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "metadata": {},
            "error": None,
            "incomplete_details": None,
        }
        self.number = -1

    def completed(self) -> dict[str, Any]:
        """The complete response, which is kept for `previous_response_id`."""
        turn = self.turn
        generation = turn.generation
        assert generation is not None
        answer = turn.message | {"content": turn.text, "reasoning_content": turn.parsed.reasoning}
        self.kept[self.head["id"]] = [*self.conversation, answer]
        cut = turn.finish_reason == "length"
        output = [_reasoning(turn.parsed.reasoning)] * bool(turn.parsed.reasoning)
        output += [_message_item(turn.text)] * bool(turn.text)
        output += map(self._call, turn.message.get("tool_calls", ()))
        usage = {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens},
            "output_tokens": len(generation.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + len(generation.ids),
        }
        ended = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        return self.head | {"status": "incomplete" if cut else "completed", "output": output, "usage": usage} | ended

    async def events(self) -> AsyncIterator[bytes]:
        """The response as numbered server-sent events."""
        started = self.head | {"status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        at, thought, text, item = 0, "", "", _message_item("")
        async for event in self.turn.events():
            if event[0] == "reasoning":
                thought += event[1]
                continue
            if thought:
                for data in self._whole(_reasoning(thought), at):
                    yield data
                at, thought = at + 1, ""
            if event[0] == "text":
                if not text:
                    for data in self._opened(item, at):
                        yield data
                text += event[1]
                yield self._text("delta", item, at, delta=event[1], logprobs=[])
                continue
            if text:
                for data in self._closed(item, at, text):
                    yield data
                at, text = at + 1, ""
            for data in self._called(self._call(event[1]), at):
                yield data
            at += 1
        for data in self._whole(_reasoning(thought), at) if thought else ():
            yield data
        for data in self._closed(item, at, text) if text else ():
            yield data
        whole = self.completed()
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, refusal: RequestRefused) -> bytes:
        """The last event of a response that failed."""
        head = self.head | {"status": "failed", "output": [], "usage": None}
        error = {"code": "server_error", "message": str(refusal)}
        return self._event("response.failed", response=head | {"error": error})

    def _opened(self, item: dict[str, Any], at: int) -> Iterator[bytes]:
        yield self._event(
            "response.output_item.added", output_index=at, item=item | {"status": "in_progress", "content": []}
        )
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event(
            "response.content_part.added", item_id=item["id"], output_index=at, content_index=0, part=part
        )

    def _closed(self, item: dict[str, Any], at: int, text: str) -> Iterator[bytes]:
        item = _message_item(text) | {"id": item["id"]}
        part = item["content"][0]
        yield self._text("done", item, at, text=text, logprobs=[])
        yield self._event("response.content_part.done", item_id=item["id"], output_index=at, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _text(self, what: str, item: dict[str, Any], at: int, **fields: Any) -> bytes:
        name = f"response.output_text.{what}"
        return self._event(name, item_id=item["id"], output_index=at, content_index=0, **fields)

    def _called(self, item: dict[str, Any], at: int) -> Iterator[bytes]:
        kind, name = ("arguments", "function_call") if "arguments" in item else ("input", "custom_tool_call")
        stem, value = f"response.{name}_{kind}", item[kind]
        begun = item | {"status": "in_progress", kind: ""}
        yield self._event("response.output_item.added", output_index=at, item=begun)
        yield self._event(f"{stem}.delta", item_id=item["id"], output_index=at, delta=value)
        yield self._event(f"{stem}.done", item_id=item["id"], output_index=at, **{kind: value})
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _whole(self, item: dict[str, Any], at: int) -> Iterator[bytes]:
        yield self._event("response.output_item.added", output_index=at, item=item)
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        shown = call["function"]
        item = {"id": f"fc_{call['id']}", "call_id": call["id"], "name": shown["name"], "status": "completed"}
        if shown["name"] in self.custom:
            text = msgspec.json.decode(shown["arguments"]).get("input", "")
            return item | {"type": "custom_tool_call", "input": str(text)}
        return item | {"type": "function_call", "arguments": shown["arguments"]}

    def _event(self, name: str, **fields: Any) -> bytes:
        self.number += 1
        return sse({"type": name, "sequence_number": self.number, **fields}, name)


def _message_item(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    content = {"role": "assistant", "status": "completed", "content": [part]}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message"} | content


def _reasoning(text: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}]
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": summary}
