"""Anthropic's messages API: requests, answers and refusals."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import blake3
from starlette.responses import JSONResponse, Response, StreamingResponse

from etude.protocol.access import Refusal
from etude.protocol.apis.chat import sse
from etude.protocol.apis.conversation import RETRY, AgentRequest, Kind, RequestRefused
from etude.protocol.apis.reading import read, request_of
from etude.protocol.apis.turn import SampledTurn, answered_lines, answering

STATUS: dict[Kind, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "key": (401, "authentication_error"),
    "unknown": (404, "not_found_error"),
    "context": (400, "invalid_request_error"),  # clients know it by its text: prompt is too long
    "spent": (400, "invalid_request_error"),
    "lost": (529, "overloaded_error"),
    "failed": (500, "api_error"),
}
_REFUSALS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    500: "api_error",
}  # fmt: skip
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse_request(body: dict[str, Any]) -> AgentRequest:
    """A body as a request."""
    return request_of(body, read("messages", body))


def refused(refusal: RequestRefused) -> Response:
    """A refusal in the format and with the status of the API."""
    headers = RETRY if refusal.kind == "lost" else None
    return JSONResponse(error(refusal), STATUS[refusal.kind][0], headers)


def refusal_of_server(e: Refusal) -> Response:
    """A refusal by the server's own checks, such as that of a too large body, in the API's format."""
    kind = _REFUSALS.get(e.status, "overloaded_error" if e.status >= 500 else "invalid_request_error")
    return JSONResponse({"type": "error", "error": {"type": kind, "message": str(e)}}, e.status, e.headers)


def error(refusal: RequestRefused) -> dict[str, Any]:
    """An error object in Anthropic's shape."""
    return {"type": "error", "error": {"type": STATUS[refusal.kind][1], "message": str(refusal)}}


async def respond(turn: SampledTurn, request: AgentRequest, body: dict[str, Any]) -> Response:
    """The turn as one message, or as a stream of its parts."""
    thinks = (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")
    head: dict[str, Any] = {
        "id": f"msg_{turn.name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    if request.stream:
        lines = answered_lines([turn], _parts(turn, head, thinks), lambda refusal: sse(error(refusal), "error"))
        return StreamingResponse(lines, media_type="text/event-stream")
    with answering([turn]):
        await turn.whole()
        reasoning = turn.parsed.reasoning
        content = [{"type": "thinking", "thinking": reasoning, "signature": _signature(reasoning)}] * (
            thinks and bool(reasoning)
        )
        content += [{"type": "text", "text": turn.text}] * bool(turn.text)
        for call in turn.message.get("tool_calls", ()):
            content.append(_tool_use(call) | {"input": json.loads(call["function"]["arguments"])})
        return JSONResponse(head | {"content": content, "usage": _usage(turn)} | _stopped(turn))


async def _parts(turn: SampledTurn, head: dict[str, Any], thinks: bool) -> AsyncIterator[bytes]:
    def part(name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields}, name)

    started = {"input_tokens": turn.prompt_tokens, "output_tokens": 0}
    yield part("message_start", message=head | {"usage": started})
    number, opened, thought = -1, "", ""

    def closing() -> Iterator[bytes]:
        if opened == "reasoning":
            delta = {"type": "signature_delta", "signature": _signature(thought)}
            yield part("content_block_delta", index=number, delta=delta)
        if opened:
            yield part("content_block_stop", index=number)

    async for event in turn.events():
        if event[0] == "reasoning" and not thinks:
            continue
        if event[0] == "call" or event[0] != opened:
            for data in closing():
                yield data
            number, opened = number + 1, event[0]
            yield part("content_block_start", index=number, content_block=_block(event[0], event[1]))
        if event[0] == "reasoning":
            thought += event[1]
            delta = {"type": "thinking_delta", "thinking": event[1]}
        elif event[0] == "text":
            delta = {"type": "text_delta", "text": event[1]}
        else:
            delta = {"type": "input_json_delta", "partial_json": event[1]["function"]["arguments"]}
        yield part("content_block_delta", index=number, delta=delta)
    for data in closing():
        yield data
    yield part("message_delta", delta=_stopped(turn), usage=_usage(turn))
    yield part("message_stop")


def _block(kind: str, value: Any) -> dict[str, Any]:
    """An empty content block."""
    if kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""} if kind == "text" else _tool_use(value)


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _signature(thought: str) -> str:
    return blake3.blake3(thought.encode()).hexdigest()


def _stopped(turn: SampledTurn) -> dict[str, Any]:
    if turn.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop}
    return {"stop_reason": _REASONS[turn.finish_reason], "stop_sequence": None}


def _usage(turn: SampledTurn) -> dict[str, int]:
    generation = turn.generation
    assert generation is not None
    cached = generation.cached_tokens
    return {
        "input_tokens": turn.prompt_tokens - cached,
        "output_tokens": len(generation.ids),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
