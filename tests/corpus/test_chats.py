"""Conversations as training text: what is learned, token by token, and every row that is refused, by name."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.corpus import chats
from etude.errors import UserError
from etude.renderers import Renderer, renderer_for
from etude.renderers.schemas import SCHEMAS
from tests.helpers.folders import big_tokenizer
from tests.helpers.rows import chat_rows
from tests.helpers.speakers import TEMPLATE, write_model

CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You mend code."},
    {"role": "user", "content": "<|im_end|> is text. Mend it."},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "read", "content": "def f(): <|im_start|>assistant"},
    {"role": "assistant", "content": "Wrong.", "weight": 0},
    {"role": "user", "content": [{"type": "text", "text": "Try "}, {"type": "text", "text": "again"}]},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks"},
]
LEARNED = [
    'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>', "Done.<|im_end|>",
]  # fmt: skip


@pytest.fixture(scope="module", params=[72_000, pytest.param(151_936, marks=pytest.mark.slow)])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_for(write_model(tmp_path_factory.mktemp("model"), big_tokenizer(request.param), TEMPLATE))


def spans(ids: np.ndarray, mask: np.ndarray, renderer: Renderer) -> list[tuple[bool, str]]:
    """Runs of tokens with the same mask, as text."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    pairs = pairwise(edges)
    return [(bool(mask[a]), renderer.text(ids[a:b].tolist())) for a, b in pairs]


def test_only_the_assistants_tokens_are_learned(renderer: Renderer) -> None:
    ids, mask = chats.encode_chat(chats.chat_of("row", {"messages": MESSAGES}), renderer)
    found = spans(ids, mask, renderer)
    assert [text for learned, text in found if learned] == LEARNED
    assert [learned for learned, _ in found] == [False, True, False, True]
    # Every turn stands where the model would sample it: behind what the harness puts before it.
    asked = [renderer.prompt(chats.chat_of("", {"messages": MESSAGES[:2]}).messages)]
    assert ids[: len(asked[0])].tolist() == asked[0]
    first = len(asked[0]) + int(mask[len(asked[0]) :].argmin())
    turn = ids[len(asked[0]) : first].tolist()
    between = renderer.follow(turn, MESSAGES[3:4])
    assert ids[first : first + len(between)].tolist() == between
    assert ids.dtype == np.uint32
    assert ids.max() > 65_535  # of special and of ordinary tokens
    assert sorted(set(ids.tolist()))[-12] > 65_535


def test_the_tools_and_the_whole_text_are_those_of_the_template(renderer: Renderer) -> None:
    chat = chats.chat_of("row", {"messages": MESSAGES[:4] + MESSAGES[6:7], "tools": list(SCHEMAS)})
    ids, _ = chats.encode_chat(chat, renderer)
    whole = renderer.prompt([*chat.messages, {"role": "user", "content": "x"}], chat.tools)
    assert renderer.text(whole).startswith(renderer.text(ids.tolist()))
    assert '"name": "lints"' in renderer.text(ids.tolist())


ROWS: list[tuple[object, str | None]] = [
    ({"messages": MESSAGES}, None),
    ('{"messages": [', "not JSON"),
    ([1], "not a JSON object"),
    ({"conversations": []}, "this one conversations"),
    ({"messages": MESSAGES[:2]}, "no message of the assistant"),
    ({"messages": [*MESSAGES[:4], MESSAGES[4]]}, None),
    ({"messages": [MESSAGES[1], MESSAGES[4]]}, "no message of the assistant is to be learned"),
    ({"messages": [MESSAGES[6]]}, "begins with the assistant"),
    ({"messages": [MESSAGES[1], {"role": "assistant", "content": None}]}, "message 2, of the assistant, is empty"),
    ({"messages": [{"role": "narrator", "content": "x"}, MESSAGES[6]]}, "unknown role 'narrator'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, MESSAGES[6]]}, "'image_url'"),
    ({"messages": [MESSAGES[1], {**MESSAGES[6], "weight": 0.5}]}, "0 or 1"),
    ({"messages": [MESSAGES[1], {"role": "assistant", "function_call": {}, "content": "x"}], "functions": [1]}, "old"),
    ({"messages": [MESSAGES[1], {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "row"),
    ({"messages": "hello"}, "are lists"),
    ({"messages": [{"content": "x"}]}, "'role'"),
    ({"text": "plain"}, "this one text"),
    ({"steps": []}, "not a trajectory"),
]


def test_every_row_that_cannot_be_used_is_named(renderer: Renderer, tmp_path: Path) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row, _ in ROWS]
    (tmp_path / "some.jsonl").write_text("\n".join(lines) + "\n\n")
    found = list(chat_rows([tmp_path], lambda: renderer))
    assert [row.name for row in found] == [f"some.jsonl:{i}" for i in range(1, len(ROWS) + 1)]
    for row, (given, why) in zip(found, ROWS, strict=True):
        assert isinstance(row, chats.LearnedRow) == (why is None), (given, row)
        if isinstance(row, chats.RefusedRow) and why != "row":
            assert why is not None
            assert why in row.why, given
    with pytest.raises(UserError, match="neither a file nor a folder"):
        list(chat_rows([tmp_path / "none"], lambda: renderer))


def test_a_row_with_a_secret_is_refused(renderer: Renderer, tmp_path: Path) -> None:
    token = "ghp_" + "aB3dE5gH7" * 4
    rows = [{"messages": [{"role": "user", "content": f"Use {text}"}, MESSAGES[6]]} for text in ("it", token)]
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps(row) for row in rows).replace("gh", "\\u0067h"))
    first, second = chat_rows([tmp_path], lambda: renderer)
    assert isinstance(first, chats.LearnedRow)
    assert second == chats.RefusedRow("some.jsonl:2", "it holds a likely secret (github-pat)")


TRAJECTORY: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "agent": {"name": "other", "version": "1", "tool_definitions": list(SCHEMAS[:2])},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "Mend it."},
        {"step_id": 3, "source": "agent", "message": "Old.", "is_copied_context": True},
        {
            "step_id": 4, "source": "agent", "message": "",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "read", "arguments": {"path": "a.py"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "text"}]},
        },
        {"step_id": 5, "source": "agent", "message": "No call.", "observation": {"results": [{"content": "and?"}]}},
        {"step_id": 6, "source": "agent", "message": "Done."},
    ],
}  # fmt: skip


def test_trajectories_of_other_agents_are_conversations(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(TRAJECTORY))
    [row] = chat_rows([tmp_path / "t.json"], lambda: renderer)
    assert isinstance(row, chats.LearnedRow)
    found = spans(*row.tokens, renderer)
    assert [text for learned, text in found if learned] == [
        '\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>',
        "No call.<|im_end|>", "Done.<|im_end|>",
    ]  # fmt: skip
    assert "<tool_response>\ntext\n</tool_response>" in found[2][1]
    assert "<|im_start|>user\nand?<|im_end|>" in found[4][1]
    low, high = ({**TRAJECTORY, "extra": {"reward": reward}} for reward in (0.2, 0.7))
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps(one) for one in (low, high, TRAJECTORY)))
    some = list(chat_rows([tmp_path / "some.jsonl"], lambda: renderer, min_reward=0.5))
    assert [isinstance(one, chats.LearnedRow) for one in some] == [False, True, False]
