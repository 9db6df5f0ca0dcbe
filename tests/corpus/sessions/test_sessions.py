"""Sessions of agents as rows: in each format's own shape, what is learned is what the model said, once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.corpus.chats import LearnedRow, RowEncoders, read_row
from etude.corpus.sessions import SessionReport, session_rows
from etude.renderers import Renderer, renderer_for
from tests.helpers.folders import big_tokenizer
from tests.helpers.speakers import TEMPLATE, write_model

ASKED, LOOK, SEEN, DONE = "Mend the parser.", "I look first.", "def parse(): ...", "Mended: the index was off by one."
ARGUMENTS = {"path": "parser.py"}
TURN = f'{LOOK}\n<tool_call>\n{{"name": "read", "arguments": {{"path": "parser.py"}}}}\n</tool_call><|im_end|>'
SAID = [TURN, f"{DONE}<|im_end|>"]
TOOL = {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {"path": {}}}}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_for(write_model(tmp_path_factory.mktemp("model"), big_tokenizer(72_000), TEMPLATE))


def rows_of(folder: Path, lines: Iterable[Any], name: str = "log.jsonl", **options: Any) -> tuple[list[Any], Any]:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    report = SessionReport()
    return list(session_rows([folder], report, **options)), report


def said(rows: list[Any], renderer: Renderer) -> list[str]:
    """The texts that train, from the rows as a stage reads them."""
    texts: list[str] = []
    for line in rows:
        for row in read_row("", json.dumps(line).encode(), RowEncoders(lambda: renderer)):
            assert isinstance(row, LearnedRow), row
            ids, mask = row.tokens
            edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
            texts += [renderer.text(ids[a:b].tolist()) for a, b in pairwise(edges) if mask[a]]
    return texts


# Formats --------------------------------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps(ARGUMENTS)}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You mend code."},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": LOOK, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": SEEN},
    {"role": "assistant", "content": DONE},
]


def openai_chat() -> Iterator[dict[str, Any]]:
    """Two requests; the second repeats the first answer."""
    for end, reason in ((2, "tool_calls"), (4, "stop")):
        request = {"model": "m", "messages": CHAT[:end], "tools": [{"type": "function", "function": TOOL}]}
        yield {"request": request, "response": {"choices": [{"message": CHAT[end], "finish_reason": reason}]}}


def openai_responses() -> Iterator[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": json.dumps(ARGUMENTS)}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": LOOK}]}
    thought = {"type": "reasoning", "id": "r1", "summary": []}
    first = {"model": "m", "instructions": "You mend code.", "input": ASKED}
    yield {"request": first, "response": {"id": "resp_1", "status": "completed", "output": [thought, message, call]}}
    second = {"model": "m", "instructions": "You mend code.", "previous_response_id": "resp_1"}
    second["input"] = [{"type": "function_call_output", "call_id": "c1", "output": SEEN}]  # type: ignore[assignment]
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": DONE}]}]
    yield {"request": second, "response": {"id": "resp_2", "status": "completed", "output": output}}


def anthropic() -> Iterator[dict[str, Any]]:
    first = [{"type": "text", "text": LOOK}, {"type": "tool_use", "id": "c1", "name": "read", "input": ARGUMENTS}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    body = {"model": "m", "max_tokens": 100, "system": [{"type": "text", "text": "You mend code."}]}
    yield {"request": body | {"messages": messages}, "response": {"content": first, "stop_reason": "tool_use"}}
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": SEEN}]}]
    messages = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": result}]
    answer = [{"type": "text", "text": DONE}]
    yield {"request": body | {"messages": messages}, "response": {"content": answer, "stop_reason": "end_turn"}}


def batches() -> Iterator[dict[str, Any]]:
    pairs = list(openai_chat())
    for number, pair in enumerate(pairs):
        yield {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": pair["request"]}
    for number, pair in enumerate(pairs):
        yield {"custom_id": str(number), "response": {"status_code": 200, "body": pair["response"]}}


def claude_line(kind: str, name: str, parent: str | None, content: Any, **other: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content}
    beside = {key: other.pop(key) for key in ("id", "model", "stop_reason") if key in other}
    line = {"type": kind, "uuid": name, "parentUuid": parent, "sessionId": "s1", "cwd": "/work", "isSidechain": False}
    return line | {"timestamp": "2026-11-01T10:00:00Z", "message": message | beside} | other


def claude_code() -> Iterator[dict[str, Any]]:
    """The blocks of the first answer are lines of their own; a line of another kind stands between."""
    model = {"id": "msg_1", "model": "claude-x"}
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": ARGUMENTS}
    yield {"type": "summary", "summary": "A title", "leafUuid": "u6"}
    yield claude_line("user", "u1", None, ASKED)
    yield claude_line("assistant", "u2", "u1", [{"type": "text", "text": LOOK}], stop_reason=None, **model)
    yield claude_line("assistant", "u3", "u2", [use], stop_reason="tool_use", **model)
    yield {"type": "progress", "uuid": "u4", "parentUuid": "u3", "sessionId": "s1"}
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": SEEN}]
    yield claude_line("user", "u5", "u4", result, toolUseResult={"file": "much"})
    answer = [{"type": "text", "text": DONE}]
    yield claude_line("assistant", "u6", "u5", answer, id="msg_2", model="claude-x", stop_reason="end_turn")


def codex_line(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-11-01T10:00:00Z", "type": kind, "payload": payload}


def codex_text(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return codex_line("response_item", type="message", role=role, content=[{"type": kind, "text": text}])


def codex() -> Iterator[dict[str, Any]]:
    yield codex_line("session_meta", id="s1", timestamp="2026-11-01", instructions="You mend code.", cli_version="1")
    yield codex_text("user", ASKED)
    yield codex_line("event_msg", type="user_message", message=ASKED)
    yield codex_line("turn_context", model="gpt-x", cwd="/work")
    yield codex_line("response_item", type="reasoning", summary=[{"type": "summary_text", "text": "Look."}])
    yield codex_text("assistant", LOOK)
    call = {"type": "function_call", "name": "read", "call_id": "c1", "arguments": json.dumps(ARGUMENTS)}
    yield codex_line("response_item", **call)
    yield codex_line("response_item", type="function_call_output", call_id="c1", output=SEEN)
    yield codex_text("assistant", DONE)
    yield codex_line("event_msg", type="token_count", info=None)


def pi_line(name: str, parent: str | None, **message: Any) -> dict[str, Any]:
    return {"type": "message", "id": name, "parentId": parent, "timestamp": "2026-11-01T10:00:00Z", "message": message}


def pi() -> Iterator[dict[str, Any]]:
    call = {"type": "toolCall", "id": "c1", "name": "read", "arguments": ARGUMENTS}
    text = {"type": "text", "text": LOOK}
    yield {"type": "session", "version": 3, "id": "s1", "timestamp": "2026-11-01T10:00:00Z", "cwd": "/work"}
    yield {"type": "model_change", "id": "a0", "parentId": None, "provider": "x", "modelId": "y"}
    yield pi_line("a1", "a0", role="user", content=ASKED)
    yield pi_line("a2", "a1", role="assistant", content=[text, call], stopReason="toolUse", model="y")
    yield pi_line("a3", "a2", role="toolResult", toolCallId="c1", content=[{"type": "text", "text": SEEN}])
    yield pi_line("a4", "a3", role="assistant", content=[{"type": "text", "text": DONE}], stopReason="stop", model="y")


def hub_sessions() -> Iterator[dict[str, Any]]:
    yield {"type": "session", "harness": "own-agent", "id": "s1"}
    yield from ({"type": "message", "message": message} for message in CHAT)


def atif() -> Iterator[dict[str, Any]]:
    call = {"tool_call_id": "c1", "function_name": "read", "arguments": ARGUMENTS}
    results = {"results": [{"source_call_id": "c1", "content": SEEN}]}
    yield {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "a", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": ASKED},
            {"step_id": 2, "source": "agent", "message": LOOK, "tool_calls": [call], "observation": results},
            {"step_id": 3, "source": "agent", "message": DONE},
        ],
    }


FORMATS = [openai_chat, openai_responses, anthropic, batches, claude_code, codex, pi, hub_sessions, atif]


@pytest.mark.parametrize("lines", [*FORMATS, lambda: [{"messages": CHAT}]])
def test_what_the_model_said_is_learned_and_nothing_else(tmp_path: Path, renderer: Renderer, lines: Any) -> None:
    rows, report = rows_of(tmp_path, lines())
    assert not report.refused
    assert said(rows, renderer) == SAID
    assert all(row["id"] and row["origin"]["path"].startswith("log.jsonl") for row in rows)


@pytest.mark.parametrize("lines", FORMATS)
def test_the_same_session_twice_is_learned_once(tmp_path: Path, renderer: Renderer, lines: Any) -> None:
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    rows, _ = rows_of(tmp_path, lines())
    texts = said(rows, renderer)
    assert texts == (SAID * 2 if lines is atif else SAID)  # a trajectory is kept whole


# What the model did not say -------------------------------------------------------------------------------------------


def test_the_clients_words_for_the_assistant_are_context(tmp_path: Path, renderer: Renderer) -> None:
    """Examples of a prompt, and an earlier answer that the client has altered."""
    examples = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    request = {"messages": [*examples, {"role": "user", "content": ASKED}]}
    first = {"request": request, "response": {"choices": [{"message": CHAT[4], "finish_reason": "stop"}]}}
    altered = [*request["messages"], {"role": "assistant", "content": "Altered."}, {"role": "user", "content": "So?"}]
    answer = {"role": "assistant", "content": "Yes."}
    second = {"request": {"messages": altered}, "response": {"choices": [{"message": answer, "finish_reason": "stop"}]}}
    rows, _ = rows_of(tmp_path, [first, second])
    assert sorted(said(rows, renderer)) == [f"{DONE}<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize("reason", ["length", "content_filter", None])
def test_an_answer_that_was_cut_is_not_learned(tmp_path: Path, reason: str | None) -> None:
    pair = {"request": {"messages": CHAT[:2]}, "response": {"choices": [{"message": CHAT[4], "finish_reason": reason}]}}
    rows, report = rows_of(tmp_path, [pair])
    assert rows == []
    assert sum(report.refused.values()) == 1


@pytest.mark.parametrize(
    ("made", "date"),
    [({"created": 1790000000}, "2026-09-21"), ({"created_at": 1790000000.5}, "2026-09-21"), ({"created": -1}, None)]
    + [({"created": value}, None) for value in ("soon", None, 10**30)],
)
def test_an_answer_has_the_date_that_its_api_says(tmp_path: Path, made: dict[str, Any], date: str | None) -> None:
    response = {"choices": [{"message": CHAT[4], "finish_reason": "stop"}]} | made
    rows, _ = rows_of(tmp_path, [{"request": {"messages": CHAT[:2]}, "response": response}])
    assert rows[0]["origin"].get("date") == date


def test_several_answers_to_one_request_are_rows_each(tmp_path: Path, renderer: Renderer) -> None:
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"} for text in ("One", "Two")]
    rows, _ = rows_of(tmp_path, [{"request": {"messages": CHAT[:2]}, "response": {"choices": choices}}])
    assert said(rows, renderer) == ["One<|im_end|>", "Two<|im_end|>"]


def test_a_session_that_was_taken_back_is_learned_on_both_ways(tmp_path: Path, renderer: Renderer) -> None:
    again = claude_line("user", "v2", "u1", "No: only read it.")
    answer = claude_line("assistant", "v3", "v2", [{"type": "text", "text": "Read."}], id="m3", stop_reason="end_turn")
    rows, report = rows_of(tmp_path, [*list(claude_code()), again, answer])
    assert not report.refused
    assert sorted(said(rows, renderer)) == sorted([*SAID, "Read.<|im_end|>"])


def test_calls_side_by_side_have_their_results(tmp_path: Path, renderer: Renderer) -> None:
    """Claude Code links the result of the first call beside the line of the second."""
    uses = [{"type": "tool_use", "id": f"c{i}", "name": "read", "input": {"path": f"{i}.py"}} for i in (1, 2)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": f"file {i}"} for i in (1, 2)]
    rows, report = rows_of(
        tmp_path,
        [
            claude_line("user", "u1", None, ASKED),
            claude_line("assistant", "u2", "u1", uses[:1], id="m1", stop_reason=None),
            claude_line("user", "u3", "u2", results[:1]),
            claude_line("assistant", "u4", "u2", uses[1:], id="m1", stop_reason="tool_use"),
            claude_line("user", "u5", "u4", results[1:]),
            claude_line("assistant", "u6", "u5", [{"type": "text", "text": DONE}], id="m2", stop_reason="end_turn"),
        ],
    )
    assert not report.refused
    (row,) = rows
    assert [m["content"] for m in row["messages"] if m["role"] == "tool"] == ["file 1", "file 2"]
    assert len(said(rows, renderer)) == 2


def test_synthetic_and_interrupted_answers_are_not_learned(tmp_path: Path, renderer: Renderer) -> None:
    rows, _ = rows_of(
        tmp_path,
        [
            *claude_code(),
            claude_line("assistant", "w1", "u6", [{"type": "text", "text": "API Error"}], model="<synthetic>", id="s"),
            claude_line("user", "w2", "w1", "Go on"),
            claude_line("assistant", "w3", "w2", [{"type": "text", "text": "I was abo"}], id="m9", stop_reason=None),
            claude_line("user", "w4", "w3", [{"type": "text", "text": "[Request interrupted by user]"}]),
            claude_line("assistant", "w5", "w4", [{"type": "text", "text": "Well."}], id="m10", stop_reason="end_turn"),
        ],
    )
    assert said(rows, renderer) == [*SAID, "Well.<|im_end|>"]


def test_a_summary_begins_a_new_context(tmp_path: Path, renderer: Renderer) -> None:
    compacted = [
        codex_line("compacted", message="They mended the parser."),
        codex_text("user", "And now?"),
        codex_text("assistant", "Tests."),
    ]
    rows, _ = rows_of(tmp_path, [*codex(), *compacted])
    assert said(rows, renderer) == [*SAID, "Tests.<|im_end|>"]
    assert [m["content"] for m in rows[1]["messages"]][:4] == [
        "You mend code.",
        ASKED,
        "They mended the parser.",
        "And now?",
    ]
    (tmp_path / "log.jsonl").unlink()
    kept = [
        {"type": "compaction", "id": "b1", "parentId": "a4", "summary": "Mended.", "firstKeptEntryId": "a4"},
        pi_line("b2", "b1", role="user", content="And now?"),
        pi_line("b3", "b2", role="assistant", content=[{"type": "text", "text": "Tests."}], stopReason="stop"),
    ]
    rows, _ = rows_of(tmp_path, [*pi(), *kept], "pi.jsonl")
    assert said(rows, renderer) == [*SAID, "Tests.<|im_end|>"]
    assert [m["content"] for m in rows[1]["messages"]] == ["Mended.", DONE, "And now?", "Tests."]


def test_a_thread_ends_before_what_the_model_cannot_read(tmp_path: Path, renderer: Renderer) -> None:
    image = [{"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}}]
    after = [{"type": "text", "text": "A cat."}]
    rows, _ = rows_of(
        tmp_path,
        [
            *claude_code(),
            claude_line("user", "x1", "u6", image),
            claude_line("assistant", "x2", "x1", after, id="m7", stop_reason="end_turn"),
        ],
    )
    assert said(rows, renderer) == SAID


# Secrets, models, bad input -------------------------------------------------------------------------------------------

KEY = "ghp_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5"


def test_secrets_are_replaced_and_their_message_is_not_learned(tmp_path: Path, renderer: Renderer) -> None:
    lines = json.loads(json.dumps(list(claude_code())).replace(SEEN, f"token = {KEY}"))
    rows, report = rows_of(tmp_path, lines)
    assert KEY not in json.dumps(rows)
    assert report.secrets.total() == 1
    assert said(rows, renderer) == SAID, "a secret in a result leaves the answers"
    rows, report = rows_of(tmp_path, json.loads(json.dumps(lines).replace(DONE, f"Use {KEY}")))
    assert said(rows, renderer) == SAID[:1], "the message with the secret is context, without it"
    rows, report = rows_of(tmp_path, [json.loads(json.dumps(line).replace(SEEN, KEY)) for line in atif()])
    assert rows == []


def test_models_are_chosen_by_name(tmp_path: Path) -> None:
    rows, report = rows_of(tmp_path, claude_code(), models=("own-*",))
    assert rows == []
    assert report.refused == {"it is of a model that --model leaves out": 1}
    assert len(rows_of(tmp_path, claude_code(), models=("claude-*",))[0]) == 1


BAD: list[tuple[Any, str]] = [
    ({"request": {"messages": CHAT[:2]}}, "`request` and `response`"),
    ({"request": {"messages": CHAT[:2]}, "response": {"object": "chat.completion.chunk"}}, "no `choices`"),
    ({"request": {"messages": 5}, "response": {"choices": []}}, "format"),
    ({"custom_id": "7", "response": {"body": {}}}, "before its request"),
    ({"messages": CHAT[:2]}, "no answer"),
    ({"request": {"input": "x", "previous_response_id": "r"}, "response": {"output": []}}, "goes on from an answer"),
    ([1, 2], "not a JSON object"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: Any, why: str) -> None:
    rows, report = rows_of(tmp_path, [line, {"messages": CHAT}])
    assert len(rows) == 1, "the others are read"
    ((reason, count),) = report.refused.items()
    assert why in reason
    assert count == 1
    assert report.first[reason] == "log.jsonl:1"
