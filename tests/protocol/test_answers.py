"""Answers of the three APIs, whole and as events, as messages."""

import json
from typing import Any

import pytest

from etude.protocol.apis import answer_message

CALL = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": '{"old": "a", "new": "b"}'}}
SAID = {"role": "assistant", "content": "Done: é.", "reasoning_content": "Hm.", "tool_calls": [CALL]}


def events(*each: dict[str, Any], name: bool = False) -> bytes:
    """Server-sent events."""
    lines = [(f"event: {e['type']}\n" if name else "") + f"data: {json.dumps(e)}\n\n" for e in each]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def chunk(finish: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def part(index: int = 0, **function: str) -> list[dict[str, Any]]:
    return [{"index": index, "function": function}]


OUTPUT = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done: é."}]},
    {"type": "function_call", "call_id": "c1", "name": "edit", "arguments": CALL["function"]["arguments"]},
]
BLOCKS = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "text", "text": "Done: é."},
    {"type": "tool_use", "id": "c1", "name": "edit", "input": {"old": "a", "new": "b"}},
]
CHAT_STREAM = [
    chunk(role="assistant", content=""),
    chunk(reasoning_content="H"), chunk(reasoning_content="m."),
    chunk(content="Done"), chunk(index=1, content="another"), chunk(content=": é."),
    chunk(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "edit", "arguments": ""}}]),
    chunk(tool_calls=part(arguments='{"old": "a", ')), chunk(tool_calls=part(arguments='"new": "b"}')),
    chunk(finish="tool_calls"), {"id": "x", "choices": [], "usage": {"total_tokens": 3}},
]  # fmt: skip
RESPONSES_STREAM = [
    {"type": "response.created", "response": {"output": []}},
    *({"type": "response.output_item.done", "item": item} for item in OUTPUT),
    {"type": "response.completed", "response": {"output": OUTPUT, "status": "completed"}},
]
MESSAGES_STREAM = [
    {"type": "message_start", "message": {"content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Done: "}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "é."}},
    {"type": "content_block_start", "index": 2, "content_block": BLOCKS[2] | {"input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"old": "a",'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ' "new": "b"}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]


def whole(api: str) -> dict[str, Any]:
    return {
        "chat": {"choices": [{"index": 0, "message": SAID, "finish_reason": "tool_calls"}]},
        "responses": {"output": OUTPUT, "status": "completed"},
        "messages": {"content": BLOCKS, "stop_reason": "tool_use"},
    }[api]


def plain(message: Any) -> dict[str, Any]:
    """A message with its calls' arguments as objects."""
    calls = [[c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])] for c in message["tool_calls"]]
    return {"text": message["content"], "thought": message["reasoning_content"], "calls": calls}


@pytest.mark.parametrize(
    ("api", "body", "is_stream", "reason"),
    [
        ("chat", json.dumps(whole("chat")).encode(), False, "tool_calls"),
        ("chat", events(*CHAT_STREAM), True, "tool_calls"),
        ("responses", json.dumps(whole("responses")).encode(), False, "completed"),
        ("responses", events(*RESPONSES_STREAM, name=True), True, "completed"),
        ("responses", events(*RESPONSES_STREAM[:-1], name=True), True, "abort"),
        ("messages", json.dumps(whole("messages")).encode(), False, "tool_use"),
        ("messages", events(*MESSAGES_STREAM, name=True), True, "tool_use"),
        ("messages", events(*MESSAGES_STREAM, name=True).replace(b"\n", b"\r\n"), True, "tool_use"),
    ],
)
def test_an_answer_is_the_same_message_in_every_form(api: str, body: bytes, is_stream: bool, reason: str) -> None:
    read = answer_message(api, body, is_stream)
    assert read is not None
    expected = {"text": "Done: é.", "thought": "Hm.", "calls": [["c1", "edit", {"old": "a", "new": "b"}]]}
    assert (plain(read[0]), read[1]) == (expected, reason)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_body_without_an_answer_is_none(api: str) -> None:
    for body in (b"", b"{", b"[]", b"null", b'{"error": {"message": "no"}}', b'{"choices": []}', b'{"output": 3}'):
        assert answer_message(api, body, False) is None, body
        assert answer_message(api, b"data: " + body + b"\n\n", True) is None, body


@pytest.mark.parametrize(("api", "stream"), [("chat", CHAT_STREAM), ("messages", MESSAGES_STREAM)])
def test_a_stream_may_break_off_anywhere(api: str, stream: list[dict[str, Any]]) -> None:
    data = events(*stream)
    texts = [
        "" if (read := answer_message(api, data[:cut], True)) is None else str(read[0].get("content") or "")
        for cut in range(len(data))
    ]
    assert all("Done: é.".startswith(text) for text in texts)
    assert texts[-1] == "Done: é."


def test_an_answer_holds_nothing_but_its_own_words() -> None:
    """Other servers answer in other forms: what is written to the log can be written, and the reason is a word."""
    call = {"id": "\ud800", "function": {"name": "f", "arguments": "\udfff"}}
    message = {"role": "user", "name": 10**400, "weight": 3, "content": "a\ud800", "tool_calls": [call], "more": {}}
    for reason in ("AKIA" + "Q" * 16, {"a": 1}, "\ud800", "x" * 33, 7, None):
        body = json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()
        answer = answer_message("chat", body, False)
        assert answer is not None
        assert answer[1] == ""
        assert json.loads(json.dumps(answer[0], ensure_ascii=False).encode()) == {
            "role": "assistant", "content": "a?",
            "tool_calls": [{"id": "?", "type": "function", "function": {"name": "f", "arguments": "?"}}],
        }  # fmt: skip
    items = [{"type": "message", "role": "user", "content": "q"}, OUTPUT[1]]
    said = answer_message("responses", json.dumps({"output": items, "status": "completed"}).encode(), False)
    assert said == ({"role": "assistant", "content": "Done: é."}, "completed")


def test_fields_of_calls_that_are_new_do_not_hide_an_answer() -> None:
    new = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}", "thought": {"a": 1}}}
    answer = answer_message("chat", events(chunk(content="x"), chunk(tool_calls=[new]), chunk(finish="stop")), True)
    assert answer is not None
    assert (answer[0]["content"], answer[0]["tool_calls"][0]["function"]) == ("x", {"name": "f", "arguments": "{}"})
