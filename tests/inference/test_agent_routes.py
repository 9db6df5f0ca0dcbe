"""Responses and messages on a served model: their errors, their conversations, their streams."""

import json

import pytest

from etude.inference.server.agent_routes import Conversations
from tests.inference.test_openai_features import ASK, EDIT, MESSAGES, RESPONSES, Asker

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def ask(nano_http):
    return Asker(nano_http)


def test_mistakes_have_the_shape_of_their_api(nano_http):
    http = nano_http
    long = {"messages": [{"role": "user", "content": "word " * 5000}], "max_tokens": 1}
    for route, body, status, kind, sentence in (
        (MESSAGES, long, 400, "invalid_request_error", "prompt is too long"),
        (MESSAGES, {"messages": HELLO}, 400, "invalid_request_error", "max_tokens"),
        (MESSAGES, {"messages": HELLO, "max_tokens": 0}, 400, "invalid_request_error", "at least 1"),
        (
            MESSAGES,
            {"messages": HELLO, "max_tokens": 1, "model": "gpt-7"},
            404,
            "not_found_error",
            "is not served here",
        ),
        (MESSAGES, {"messages": 3, "max_tokens": 1}, 400, "invalid_request_error", "not in the API's format"),
        (f"{MESSAGES}/nothing", {}, 404, "not_found_error", "is not served here"),
        (f"{MESSAGES}/count_tokens", {"messages": []}, 400, "invalid_request_error", "one from the user"),
    ):
        answer = http.post(route, json=body)
        error = answer.json()
        assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), error
        assert sentence in error["error"]["message"]
    for body, code, param in (
        ({"input": "word " * 5000}, "context_length_exceeded", None),
        ({"input": "x", "previous_response_id": "resp_none"}, None, "previous_response_id"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, None, "messages"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, None, "response_format"),
    ):
        answer = http.post(RESPONSES, json=body)
        assert answer.status_code == 400, answer.text
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)
    assert http.get(RESPONSES).json()["error"]["code"] == "method_not_allowed"
    assert http.get("/v1/models/gpt-7").json()["error"]["code"] == "model_not_found"
    assert http.get("/v1/models/other").json()["id"] == "other"
    assert http.post("/v1/embeddings", json={}).json()["error"]["code"] == "not_found"
    assert (http.get("/ping").status_code, set(http.get("/version").json())) == (200, {"version"})


def test_results_without_their_calls_are_refused_in_the_shape_of_the_api(nano_http):
    call = {"id": "a", "type": "function", "function": {"name": "test", "arguments": "{}"}}
    turn, result = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "b", "content": "ok"}
    use, block = (
        {"type": "tool_use", "id": "a", "name": "test", "input": {}},
        {"type": "tool_result", "tool_use_id": "b"},
    )
    items = [{"type": "function_call", "call_id": "a", "name": "test", "arguments": "{}"}]
    items.append({"type": "function_call_output", "call_id": "b", "output": "ok"})
    blocks = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
    for route, body in (
        ("/v1/chat/completions", {"messages": [*HELLO, turn, result]}),
        ("/tokenize", {"messages": [*HELLO, turn, result]}),
        (RESPONSES, {"input": [*HELLO, *items]}),
        (MESSAGES, {"messages": [*HELLO, *blocks], "max_tokens": 1}),
        (f"{MESSAGES}/count_tokens", {"messages": [*HELLO, *blocks]}),
    ):
        answer = nano_http.post(route, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"] == "a tool result names 'b', no call of the turn before"
        assert (answer.json().get("type") == "error") == route.startswith(MESSAGES)


def test_a_response_goes_on_from_another(ask):
    one = ask(RESPONSES, input="hello")
    two = ask(RESPONSES, input="go on", previous_response_id=one["id"])
    assert two["usage"]["input_tokens"] > one["usage"]["total_tokens"]
    unkept = ask(RESPONSES, input="hello", store=False)
    assert ask.post(RESPONSES, input="x", previous_response_id=unkept["id"]).status_code == 400


def test_old_conversations_make_room():
    kept = Conversations(1000)
    for number in range(4):
        kept[str(number)] = [{"role": "user", "content": "x" * 333}]
    assert list(kept) == ["2", "3"]


def test_streams_tell_what_the_whole_answer_says(ask):
    fields = {"messages": ASK, "max_tokens": 120}
    whole = ask(MESSAGES, **fields)
    events = ask.events(MESSAGES, **fields)
    assert events[0]["type"] == "message_start"
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    given = "".join(e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta")
    assert [block["name"] for block in blocks] == [block["name"] for block in whole["content"]]
    assert given == "".join(json.dumps(block["input"], ensure_ascii=False) for block in whole["content"])
    (usage,) = [event["usage"] for event in events if event["type"] == "message_delta"]
    assert usage["output_tokens"] == whole["usage"]["output_tokens"]
    streamed = ask.events(RESPONSES, input="hello", max_output_tokens=30)
    assert [event["type"] for event in streamed[:2]] == ["response.created", "response.in_progress"]
    text = "".join(event["delta"] for event in streamed if event["type"] == "response.output_text.delta")
    assert text == "".join(p["text"] for item in streamed[-1]["response"]["output"] for p in item.get("content", ()))


def test_tokens_are_counted_as_they_are_used(ask):
    counted = ask(f"{MESSAGES}/count_tokens", messages=ASK, model="nano", system="Be brief.")
    usage = ask(MESSAGES, messages=ASK, system="Be brief.")["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_stop_text_inside_a_call_is_no_call(ask):
    call = ask.choice("/v1/chat/completions", max_tokens=120)["message"]["tool_calls"][0]["function"]
    value = next(iter(json.loads(call["arguments"]).values()))
    cut = ask.choice("/v1/chat/completions", max_tokens=120, stop=[value[3:6]])
    assert (cut["finish_reason"], cut["message"].get("tool_calls")) == ("stop", None)
    assert "malformed" not in (cut["message"]["content"] or "")


def test_a_tool_of_another_model_is_refused_by_the_compact_dialect(ask):
    unknown = {"type": "function", "function": {"name": "bash"}}
    answer = ask.post("/v1/chat/completions", tools=[unknown, EDIT], tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "the compact dialect has no tool 'bash'" in answer.json()["error"]["message"]
