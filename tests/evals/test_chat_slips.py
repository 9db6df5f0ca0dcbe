"""A model's slip costs it a turn, a server's own words cost one more request, and a refusal one episode: real HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.errors import UserError
from etude.protocol.backends import EngineError
from etude.protocol.backends.chat_formats import Api, ChatAnswer, ChatModel, Conversation
from etude.protocol.backends.chat_model import ChatClient, ContextSpent, ConversationRefused
from etude.records import StopReason, Turn, encode
from etude.renderers.schemas import SCHEMAS
from etude.tasks import dataset
from tests.evals.test_chat_api import APIS, BUDGET, play
from tests.helpers.chat_apis import FakeModel
from tests.helpers.http_apps import answering
from tests.helpers.mixtures import TINY

Body = dict[str, Any]
Answers = Callable[[Body], JSONResponse]


def served(answers: Answers) -> Starlette:
    async def route(request: Request) -> JSONResponse:
        return answers(json.loads(await request.body(), parse_constant=no_number))

    paths = ("/v1/chat/completions", "/v1/messages")
    return Starlette(routes=[Route(path, route, methods=["POST"]) for path in paths])


def no_number(name: str) -> None:
    raise ValueError(name)


def refusal(message: str, status: int = 400, **more: Any) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", **more}}, status)


def openai(message: Any, **more: Any) -> JSONResponse:
    # As a server writes it: halves of pairs and numbers that JSON lacks stand in the text.
    answer = JSONResponse({})
    answer.body = json.dumps({"choices": [{"message": {"role": "assistant", **message}}], **more}).encode()
    answer.init_headers()
    return answer


def anthropic(content: Any) -> JSONResponse:
    return JSONResponse({"content": content, "stop_reason": "tool_use"})


def fault(body: Body) -> str:
    """What a strict server of either API has against the calls and texts of a conversation; "" for nothing."""
    for message in body["messages"]:
        content, calls = message["content"], message.get("tool_calls") or []
        blocks = content if isinstance(content, list) else []
        if content is not None and not isinstance(content, str) and not all(isinstance(b, dict) for b in blocks):
            return "content"
        uses = [(u["id"], u["name"], u["input"]) for u in blocks if u["type"] == "tool_use"]
        uses += [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        if len({id for id, _, _ in uses}) < len(uses) or not all(isinstance(id, str) and id for id, _, _ in uses):
            return "ids"
        if not all(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) for _, name, _ in uses):
            return "names"
        if not all(isinstance(arguments, dict) for _, _, arguments in uses):
            return "arguments"
        if any(block["type"] == "text" and not block["text"].strip() for block in blocks):
            return "blank text"
    return ""


def turns(api: Api, answers: Answers, count: int = 2) -> list[ChatAnswer]:
    """So many turns of a conversation, each with the results of its calls."""

    async def work(url: str) -> list[ChatAnswer]:
        talk, made = Conversation("s", [{"role": "user", "content": "hello"}]), list[ChatAnswer]()
        async with ChatClient(ChatModel(f"{url}/v1", "m", api, 0.5), patience=0.1) as client:
            for _ in range(count):
                made.append(await client.answer(talk, SCHEMAS, 10, 1, 5.0))
                talk.messages += [made[-1].message, *client.format.results(made[-1], ["ok"] * len(made[-1].calls))]
        return made

    with answering(served(answers)) as url:
        return asyncio.run(work(url))


def function(name: object = "read", arguments: object = '{"path": "a"}', **entry: object) -> Body:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}} | entry


SLIPS = [
    ([function(arguments='{"path": "a')], [None]),
    ([function(arguments="[1]")], [None]),
    ([function(arguments='"text"')], [None]),
    ([function(arguments='{"path": "\\ud83d"}')], [None]),
    ([function(arguments='{"offset": 123456789012345678901234567890}')], [None]),
    ([function(arguments='{"offset": NaN}')], [None]),
    ([function(arguments='{"offset": 1e999}')], [None]),
    ([function(arguments=None)], [{}]),
    ([function(arguments="null")], [{}]),
    ([function(arguments=" ")], [{}]),
    ([function(arguments={"path": "a"})], [{"path": "a"}]),
    ([function(name=None)], [None]),
    ([function(name=7)], [None]),
    ([function(name="")], [None]),
    ([function(name="a b/\ud800")], [{"path": "a"}]),
    ([{"id": "c1", "type": "function"}], [None]),
    ([{"id": "c1", "type": "custom", "custom": {"name": "read", "input": "x"}}], [None]),
    ([function(id=None)], [{"path": "a"}]),
    ([function(), function()], [{"path": "a"}] * 2),
    ([function(id=5), function(id="5"), function(id="")], [{"path": "a"}] * 3),
    (function(), [{"path": "a"}]),
]


@pytest.mark.parametrize(("calls", "read"), SLIPS)
def test_a_slip_of_a_model_goes_back_in_a_valid_form(calls: Any, read: list[Any]) -> None:
    def answers(body: Body) -> JSONResponse:
        return refusal(why) if (why := fault(body)) else openai({"content": None, "tool_calls": calls})

    for answer in turns("openai", answers):
        assert [call.arguments for call in answer.calls] == read
        assert all(call.error for call in answer.calls if call.arguments is None)
        encode(Turn(text=answer.text, calls=answer.calls, results=(), seconds_model=0.0, seconds_tools=0.0))


def test_a_slip_over_messages_goes_back_in_a_valid_form() -> None:
    use = {"type": "tool_use", "id": "u", "name": "read", "input": {"path": "a"}}
    blocks = [
        {"type": "text", "text": " "}, {"type": "thinking", "thinking": "hm", "signature": "x"}, use, use,
        use | {"id": None}, use | {"input": "text"}, use | {"input": None}, use | {"name": None}, use | {"name": "a b"},
        use | {"input": '{"path": "b"}'}, use | {"input": {"x": 1 << 70}}, {"type": "text", "text": "done"},
    ]  # fmt: skip

    def answers(body: Body) -> JSONResponse:
        return refusal(why) if (why := fault(body)) else anthropic(blocks)

    for answer in turns("anthropic", answers):
        arguments = [call.arguments for call in answer.calls]
        assert arguments == [{"path": "a"}] * 3 + [None, {}, None, {"path": "a"}, {"path": "b"}, None]
        assert answer.text == " done"
        assert answer.message["content"][0]["type"] == "thinking"


@pytest.mark.parametrize(("message", "text"), [
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image_url"}]}, "ab"),
    ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    ({"content": None, "refusal": "I will not."}, "I will not."),
    ({"content": "a\ud800", "reasoning": "so"}, "a?"),
    ({}, ""),
])  # fmt: skip
def test_the_text_of_an_answer_is_a_text(message: Body, text: str) -> None:
    seen: list[Body] = []
    for answer in turns("openai", lambda body: seen.append(body) or openai(message | {"tool_calls": [function()]})):
        assert answer.text == text
        assert answer.message["content"] == (text or None)
    assert seen[1]["messages"][2].get("reasoning") == message.get("reasoning")
    assert turns("anthropic", lambda _: anthropic("plain"), 1)[0].text == "plain"


TEXTS = {
    "max_tokens": ("Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                   "'max_completion_tokens' instead.", {"param": "max_tokens", "code": "unsupported_parameter"}),
    "seed": ("Unrecognized request argument supplied: seed", {}),
    "temperature": ("Unsupported value: 'temperature' does not support 0.5 with this model.", {"param": "temperature"}),
}  # fmt: skip


@pytest.mark.parametrize("pydantic", [False, True])
def test_a_server_is_asked_in_its_own_words(pydantic: bool) -> None:
    """Each refused parameter costs one request, and no other turn of the client."""
    bodies: list[Body] = []

    def answers(body: Body) -> JSONResponse:
        bodies.append(body)
        if not (refused := next((name for name in TEXTS if name in body), None)):
            return openai({"content": None, "tool_calls": [function()]})
        if pydantic:
            detail = [{"type": "extra_forbidden", "loc": ["body", refused], "msg": "Extra inputs are not permitted"}]
            return JSONResponse({"detail": detail}, 422)
        return refusal(TEXTS[refused][0], **TEXTS[refused][1])

    turns("openai", answers)
    assert len(bodies) == 5
    for body in bodies[-2:]:
        assert body["max_completion_tokens"] == 10
        assert not TEXTS.keys() & body.keys()


@pytest.mark.parametrize("reason", [
    "temperature must be at most 2", "max_tokens is too large: 10. This model supports at most 8 completion tokens",
    "this text is not supported", "the random_seed is not supported",
])  # fmt: skip
@pytest.mark.parametrize("api", APIS)
def test_a_first_refusal_is_the_users_and_a_later_one_the_conversations(reason: str, api: Api) -> None:
    asked = 0

    def answers(body: Body) -> JSONResponse:
        nonlocal asked
        asked += 1
        first = openai({"content": "x"}) if api == "openai" else anthropic("x")
        begins = all(message["role"] != "assistant" for message in body["messages"])
        return first if later and begins else refusal(reason)

    later = False
    with pytest.raises(UserError, match=re.escape(reason)):
        turns(api, answers)
    assert asked == 1
    later = True
    with pytest.raises(ConversationRefused, match=re.escape(reason)):
        turns(api, answers)
    reason = "prompt is too long"
    with pytest.raises(ContextSpent):
        turns(api, answers)


VALUES = (None, 5, -1, 1e999, 10**30, True, "", "text", "\ud800", [], [None], [{}], {}, {"function": {}}, {"id": []},
          [{"type": "text"}], [{"type": "tool_use"}], [{"function": {"name": [], "arguments": 1e999}}])  # fmt: skip


@pytest.mark.parametrize("api", APIS)
def test_any_answer_is_read_or_is_none(api: Api) -> None:
    """What a server may write in place of a part of its answer: no other error than that it is no answer."""
    part = {"text": "a", "type": "text"}
    good = {
        "openai": {"choices": [{"message": {"content": "a", "tool_calls": [function()]}, "finish_reason": "stop"}],
                   "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}},
        "anthropic": {"content": [part, {"type": "tool_use", "id": "u", "name": "read", "input": {}}],
                      "stop_reason": "end_turn", "usage": {"input_tokens": 1, "cache_read_input_tokens": 1}},
    }[api]  # fmt: skip
    client = ChatClient(ChatModel("http://x/v1", "m", api))

    def variants(value: Any) -> Iterator[Any]:
        yield from VALUES
        for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            for changed in variants(value[key]):
                other = copy.copy(value)
                other[key] = changed
                yield other

    read = 0
    for answer in variants(good):
        try:
            read_one = client._read(httpx2.Response(200, content=json.dumps(answer).encode()), 0.0)
        except EngineError:
            continue
        read += 1
        encode(Turn(text=read_one.text, calls=read_one.calls, results=(), seconds_model=0.0, seconds_tools=0.0))
        assert not fault({"messages": [json.loads(json.dumps(read_one.message), parse_constant=no_number)]})
        assert len(read_one.calls) == len(read_one.ids)
        float(read_one.usage.prompt)
    assert read > 100


class Refusing(FakeModel):
    """Refuses the second turn of a task."""

    def turn(self, user: str, number: int) -> Any:
        if number and self.tasks[0].prompt in user:
            raise LookupError
        return super().turn(user, number)

    async def openai(self, request: Request) -> JSONResponse:
        try:
            return await super().openai(request)
        except LookupError:
            return refusal("flagged")


def test_a_refused_conversation_ends_its_episode_alone() -> None:
    tasks = dataset.load_dataset(TINY).split("train")
    (result,) = play(Refusing(tasks), "openai", BUDGET, tasks=2)
    assert result.stops == {StopReason.FINISHED: 1, StopReason.REFUSED: 1}
    assert result.outcomes == {"scored": 2}
