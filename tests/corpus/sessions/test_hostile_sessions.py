"""Session files that are broken or made to do harm: every line is read or counted, and nothing hangs or is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.corpus.chats import RefusedRow, RowEncoders, read_row
from tests.corpus.sessions import test_sessions as formats
from tests.corpus.sessions.test_sessions import claude_line, rows_of

KEY = "p8ix4ea4q9om4894zjoj0r1w7c2x5v3k"
ODD: tuple[Any, ...] = (None, 5, "", [], {}, "x", [None], ["x"], [{}], {"type": 5}, [{"type": []}], "\ud800", 10**30)


def pi_line(name: str, parent: str | None, role: str, text: str) -> dict[str, Any]:
    message = {"role": role, "content": text, "model": "own", "stopReason": "stop"}
    return {"type": "message", "id": name, "parentId": parent, "message": message}


def learned(rows: list[Any]) -> list[str]:
    return [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant" and m["weight"]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("name", ["claude_code", "codex", "pi", "openai_chat", "openai_responses", "anthropic"])
def test_no_wrong_value_anywhere_ends_a_reading(tmp_path: Path, name: str) -> None:
    lines = list(getattr(formats, name)())
    for number, path in enumerate(places(lines)):
        broken = copy.deepcopy(lines)
        place = broken
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = ODD[number % len(ODD)]
        rows, report = rows_of(tmp_path, broken)
        assert rows or report.refused
        json.dumps([rows, *report.models, *report.refused], ensure_ascii=False).encode()


def test_ways_that_are_circles_end(tmp_path: Path) -> None:
    head = {"type": "session", "version": 3, "id": "s"}
    circle = [pi_line("a", "b", "user", "one"), pi_line("b", "a", "assistant", "two")]
    same = [pi_line("c", "c", "user", "three"), pi_line("c", "c", "assistant", "four")]
    rows, _ = rows_of(tmp_path, [head, *circle, *same, pi_line("d", "c", "assistant", "five")])
    assert sorted(learned(rows)) == ["five", "four", "two"]


def test_messages_without_an_answer_are_no_ways(tmp_path: Path) -> None:
    lines = [claude_line("user", "0", None, "0")]
    for number in range(1, 400):
        more = {"id": f"m{number}", "model": "own", "stop_reason": "end_turn"} if number % 2 else {}
        kind = "assistant" if number % 2 else "user"
        lines.append(claude_line(kind, str(number), str(number - 1), [{"type": "text", "text": str(number)}], **more))
        lines += [claude_line("user", f"dead {number}", str(number), "taken back")] if number % 2 else []
    rows, _ = rows_of(tmp_path, lines)
    assert len(rows) == 1
    assert len(learned(rows)) == 200


def test_a_repeated_line_is_read_once(tmp_path: Path) -> None:
    lines = list(formats.claude_code())
    once, _ = rows_of(tmp_path, lines)
    twice, _ = rows_of(tmp_path, [*lines[:4], *lines])
    assert [row["messages"] for row in twice] == [row["messages"] for row in once]


def test_an_interrupted_answer_is_learned_on_no_way(tmp_path: Path) -> None:
    answer = {"id": "m1", "model": "own", "stop_reason": None}
    lines = [
        claude_line("user", "1", None, "begin"),
        claude_line("assistant", "2", "1", [{"type": "text", "text": "I be"}], **answer),
        claude_line("user", "3", "2", "[Request interrupted by user]"),
        claude_line("user", "4", "2", "go on"),
        claude_line("assistant", "5", "4", "whole", id="m2", model="own", stop_reason="end_turn"),
    ]
    assert learned(rows_of(tmp_path, lines)[0]) == ["whole"]


def deep(count: int) -> Any:
    value: Any = {}
    for _ in range(count):
        value = {"a": value}
    return value


def test_what_is_nested_deeply_is_counted(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "n", "parameters": deep(700)}}
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows, report = rows_of(tmp_path, [{"messages": turn, "tools": [tool]}])
    assert not rows
    assert report.refused == {"it is nested more than 100 deep": 1}
    call = {"id": "1", "type": "function", "function": {"name": "n", "arguments": "[" * 900 + "]" * 900}}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    rows, _ = rows_of(tmp_path, [{"messages": [turn[0], turn[1] | {"tool_calls": [call]}, result, turn[1]]}])
    assert learned(rows) == ["a", "a"]


@pytest.mark.parametrize("hide", [json.dumps, lambda code: '"' + "".join(f"\\u{ord(c):04x}" for c in code) + '"'])
def test_a_secret_behind_the_escapes_of_a_call_is_replaced(tmp_path: Path, hide: Any) -> None:
    arguments = f'{{"new": {hide(f"""api_key = "{KEY}" """)}}}'
    call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "with", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "assistant", "content": "done"},
    ]
    rows, report = rows_of(tmp_path, [{"messages": messages}])
    assert learned(rows) == ["done"]
    assert report.secrets == {"generic-api-key": 1}
    (shown,) = rows[0]["messages"][1]["tool_calls"]
    assert json.loads(shown["function"]["arguments"]) == {"new": 'api_key = "<generic-api-key>" '}
    # A stage looks behind them, too.
    (row,) = read_row(
        "row", json.dumps({"messages": messages}).encode(), RowEncoders(lambda: pytest.fail("it is refused"))
    )
    assert isinstance(row, RefusedRow)
    assert "generic-api-key" in row.why


def test_a_secret_in_the_name_of_a_session_leaves_its_row_out(tmp_path: Path) -> None:
    head = {"type": "session", "version": 3, "id": f'api_key = "{KEY}"'}
    lines = [head, pi_line("a", None, "user", "q"), pi_line("b", "a", "assistant", "x")]
    rows, report = rows_of(tmp_path, lines)
    assert not rows
    assert report.refused == {"it holds a likely secret that cannot be cut out (generic-api-key)": 1}
