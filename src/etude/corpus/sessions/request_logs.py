"""Logs of requests to OpenAI's and Anthropic's APIs, with their answers.

    {"request": {...}, "response": {...}}                               a line of a proxy's log: the two bodies
    {"custom_id": ..., "body": {...}}, {"custom_id": ..., "response": {"body": {...}}}          a batch of OpenAI's
    {"custom_id": ..., "params": {...}}, {"custom_id": ..., "result": {"message": {...}}}       a batch of Anthropic's

The API of a pair is that of the answer: "choices" (chat completions), "output" (responses), "content" (messages).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from etude.corpus.sessions.thread import AgentThread, readable
from etude.protocol.apis import RequestRefused, as_refusal, read, tools_of
from etude.renderers import Message

_WHOLE = frozenset({"stop", "tool_calls", "end_turn", "tool_use", "stop_sequence", "completed"})
"""Reasons for which an answer ends where the model ended it. Others (length, content_filter, refusal, ...) cut it."""


class RequestLog:
    """The pairs of a log. A batch's requests wait for their answers, and the conversations of answers that were kept by
    the server ("previous_response_id") for the requests that go on from them."""

    def __init__(self) -> None:
        self._batch: dict[str, dict[str, Any]] = {}
        self._kept: dict[str, list[Message]] = {}

    def threads(self, line: Mapping[str, Any]) -> Iterator[AgentThread]:
        """The threads of a line, one for each answer. Raises ValueError for a line that is no pair."""
        name = str(line.get("custom_id", ""))
        if name and "response" not in line and "result" not in line:
            self._batch[name] = line.get("body") or line["params"]
            return
        request, response = line.get("request"), line.get("response")
        if name and request is None:
            request = self._batch.pop(name, None)
            if request is None:
                raise ValueError(f"the answer {name!r} of a batch stands before its request, or without it")
            outcome = line.get("result") or response or {}
            response = outcome.get("message") or outcome.get("body")
        if not isinstance(request, dict) or not isinstance(response, dict):
            raise ValueError("a line has `request` and `response`, the bodies of one exchange as JSON objects")
        yield from self._pair(request, response)

    def _pair(self, request: dict[str, Any], response: dict[str, Any]) -> Iterator[AgentThread]:
        origin = {"model": str(response.get("model") or request.get("model") or "")} | _date(response)
        if "choices" in response:
            before = read("chat", request)
            for choice in response["choices"]:
                spoken = {"role": "assistant"} | choice["message"]
                yield _thread(
                    before, read("chat", {"messages": [spoken]}), choice.get("finish_reason"), request, origin
                )
        elif "output" in response:
            kept = self._kept.get(str(request.get("previous_response_id") or ""), [])
            if request.get("previous_response_id") and not kept:
                raise ValueError("it goes on from an answer that the log does not hold (`previous_response_id`)")
            # Only the last message can be of one turn with what follows. The others are shared by all that go on.
            new = read("responses", request | {"instructions": None}, before=kept[-1:])
            conversation = [*kept[:-1], *new]
            before = [*read("responses", request | {"input": []}), *conversation]
            answer = read("responses", {"input": response["output"]})
            self._kept[str(response.get("id"))] = [*conversation, *answer]
            yield _thread(before, answer, response.get("status"), request, origin)
        elif "content" in response:
            before = read("messages", request)
            answer = read("messages", {"messages": [{"role": "assistant", "content": response["content"]}]})
            yield _thread(before, answer, response.get("stop_reason"), request, origin)
        else:
            raise ValueError("the answer has no `choices`, `output` or `content`: log whole answers, not their events")


def _date(response: Mapping[str, Any]) -> dict[str, str]:
    """The day on which an answer was made; nothing if it does not say, as those of Anthropic's API."""
    made = response.get("created") or response.get("created_at")
    if not isinstance(made, int | float) or not 0 < made < 2**35:
        return {}
    return {"date": datetime.fromtimestamp(made, UTC).date().isoformat()}


def answered_thread(
    api: str, request: Mapping[str, Any], answer: Mapping[str, Any], reason: str, origin: Mapping[str, Any]
) -> AgentThread:
    """The thread of a request to an API ("chat", "responses" or "messages") and of its answer, a message in OpenAI's
    chat format that ended for `reason`. Raises RequestRefused for what is no conversation."""
    with as_refusal():
        spoken = read("chat", {"messages": [{"role": "assistant"} | dict(answer)]})
        return _thread(read(api, request), spoken, reason, request, origin)


def _thread(
    before: list[Message], answer: list[Message], reason: object, request: Mapping[str, Any], origin: Mapping[str, Any]
) -> AgentThread:
    """The thread of an answer. Only the answer has a weight: the assistant's earlier messages are the client's word."""
    context = [{key: value for key, value in message.items() if key != "weight"} for message in before]
    answers = [
        dict(message) | {"weight": int(reason in _WHOLE)} for message in answer if message["role"] == "assistant"
    ]
    with as_refusal():
        messages = readable([*context, *answers[:1]])
    if not answers or not messages or messages[-1]["role"] != "assistant":
        raise RequestRefused("invalid", "its answer is empty, or its calls and results are no pairs")
    return AgentThread(messages, tools_of(request, strict=False), origin)
