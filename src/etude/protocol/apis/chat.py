"""OpenAI's chat completions API: requests, answers and refusals."""

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from etude.protocol.apis.conversation import RETRY, AgentRequest, Kind, RequestRefused, invalid
from etude.protocol.apis.reading import read, request_of
from etude.protocol.apis.turn import SampledTurn, answered_lines, answering, merge_streams
from etude.records import Generation

STATUS: dict[Kind, tuple[int, str, str | None]] = {
    "invalid": (400, "invalid_request_error", None),
    "key": (401, "invalid_request_error", "invalid_api_key"),
    "unknown": (404, "invalid_request_error", "not_found"),
    "context": (400, "invalid_request_error", "context_length_exceeded"),
    "spent": (400, "invalid_request_error", "episode_ended"),  # 429 would be tried again
    "lost": (503, "server_error", None),
    "failed": (500, "server_error", None),
}
Logprobs = Callable[[int, int, int], dict[str, Any]]
"""(turn, first, end) -> log-probabilities of the turn's tokens from `first` to `end`, in OpenAI's shape."""
_UNKNOWN = {"logprobs": None, "finish_reason": None}


def parse_request(body: dict[str, Any]) -> AgentRequest:
    """A body as a request."""
    if body.get("n") not in (None, 1):
        raise invalid("one answer is sampled: set n to 1", "n")
    return request_of(body, read("chat", body))


def refused(refusal: RequestRefused) -> Response:
    """A refusal in the format and with the status of the API."""
    headers = RETRY if refusal.kind == "lost" else None
    return JSONResponse(error(refusal), STATUS[refusal.kind][0], headers)


def error(refusal: RequestRefused) -> dict[str, Any]:
    """An error object in OpenAI's shape."""
    _, kind, code = STATUS[refusal.kind]
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": code}}


async def respond(turn: SampledTurn, request: AgentRequest, body: dict[str, Any]) -> Response:
    """The turn as one chat completion, or as a stream of its chunks."""
    head = {"id": f"chatcmpl-{turn.name}", "created": int(time.time()), "model": request.model}
    if request.stream:
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(chunks([turn], head, with_usage), media_type="text/event-stream")
    with answering([turn]):
        return JSONResponse(await completion([turn], head))


async def completion(
    turns: Sequence[SampledTurn], head: dict[str, Any], logprobs: Logprobs | None = None
) -> dict[str, Any]:
    """One chat completion with turns on the same prompt as its choices, once all are complete. Raises
    RequestRefused."""
    choices = []
    with answering(turns):
        for index, turn in enumerate(turns):
            await turn.whole()
            message = turn.message | ({"reasoning_content": turn.parsed.reasoning} if turn.parsed.reasoning else {})
            shown = logprobs(index, 0, len(turn.ids)) if logprobs is not None else None
            choices.append({"index": index, "message": message, "logprobs": shown, "finish_reason": turn.finish_reason})
        return head | {"object": "chat.completion", "choices": choices, "usage": usage_of(turns)}


def chunks(
    turns: Sequence[SampledTurn], head: dict[str, Any], with_usage: bool, logprobs: Logprobs | None = None
) -> AsyncIterator[bytes]:
    """The same completion as a stream of chunks, the turns interleaved."""
    return answered_lines(turns, _chunks(turns, head, with_usage, logprobs), lambda refusal: sse(error(refusal)))


async def _chunks(
    turns: Sequence[SampledTurn], head: dict[str, Any], with_usage: bool, logprobs: Logprobs | None
) -> AsyncIterator[bytes]:
    head = head | {"object": "chat.completion.chunk"} | ({"usage": None} if with_usage else {})
    reported, calls = [0] * len(turns), [0] * len(turns)

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        shown = None
        if logprobs is not None and (new := len(turns[index].ids)) > reported[index]:
            shown, reported[index] = logprobs(index, reported[index], new), new
        return sse(head | {"choices": [{"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}]})

    for index in range(len(turns)):
        yield sse(head | {"choices": [{"index": index, "delta": {"role": "assistant", "content": ""}} | _UNKNOWN]})
    async for index, event in merge_streams([turn.events() for turn in turns]):
        if event is None:
            yield chunk(index, {}, turns[index].finish_reason)
        elif event[0] == "call":
            yield chunk(index, {"tool_calls": [event[1] | {"index": calls[index]}]})
            calls[index] += 1
        else:
            yield chunk(index, {"content" if event[0] == "text" else "reasoning_content": event[1]})
    if with_usage:
        yield sse(head | {"choices": [], "usage": usage_of(turns)})
    yield b"data: [DONE]\n\n"


def usage_of(turns: Sequence[SampledTurn]) -> dict[str, Any]:
    """Usage of turns on the same prompt."""
    return usage(turns[0].prompt_tokens, [turn.generation for turn in turns if turn.generation is not None])


def usage(prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, Any]:
    """Usage in OpenAI's shape. Rejected prediction tokens are not among the completion tokens."""
    sampled = sum(len(g.ids) for g in generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {
            "cached_tokens": max((g.cached_tokens for g in generations), default=0),
            "cached_document_tokens": max((g.cached_document_tokens for g in generations), default=0),
        },
        "completion_tokens_details": {
            # A stop string may cut inside an accepted run.
            "accepted_prediction_tokens": min(sampled, sum(g.accepted_draft_tokens for g in generations)),
            "rejected_prediction_tokens": sum(g.rejected_draft_tokens for g in generations),
        },
    }


def sse(event: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    first = f"event: {name}\n" if name else ""
    return f"{first}data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
