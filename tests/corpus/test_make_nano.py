"""The repair episodes that nano is made of."""

from __future__ import annotations

import json
import random

import pytest
from models.make_nano.episodes import SHAPES, break_function, episode, failure
from tokenizers import Tokenizer

from etude.code import OPERATOR_WEIGHTS
from etude.code.operators import OPERATORS
from etude.corpus import FunctionText, StringEdit, edit_between
from etude.corpus.chats import chat_of, encode_chat
from etude.renderers.compact import CompactRenderer


def test_edit_is_the_smallest_unique_one() -> None:
    before = "def f(a):\n    x = a\n    x = a\n    return x"
    after = "def f(a):\n    x = a\n    x = b\n    return x"
    edit = edit_between(before, after)
    assert edit.apply(before) == after
    assert edit.old.count("\n") == 1
    removed = edit_between("def f(a):\n    return x", "def f(a):\n    x = a\n    return x")
    assert removed == StringEdit("    return x", "    x = a\n    return x")
    with pytest.raises(ValueError, match="equal"):
        edit_between("a", "a")


def test_edit_refuses_text_that_is_missing_or_repeated() -> None:
    with pytest.raises(ValueError, match="no match"):
        StringEdit("z", "y").apply("x")
    with pytest.raises(ValueError, match="2 matches"):
        StringEdit("x", "y").apply("x x")


def test_the_edit_restores_the_original_exactly(corpus: list[FunctionText]) -> None:
    rng = random.Random(0)
    made = 0
    for function in corpus * 80:
        broken = break_function(function, rng)
        if broken is not None:
            made += 1
            assert broken.source != function.source
            assert broken.source.count(broken.edit.old) == 1
            assert broken.edit.apply(broken.source) == function.source
    assert made > 300


@pytest.mark.parametrize("shape", SHAPES)
def test_playing_an_episode_ends_where_it_says(shape: str, corpus: list[FunctionText]) -> None:
    """Apply every call to the broken function: the results in the episode are those the tools would give."""
    rng = random.Random(5)
    played = 0
    for function in corpus * 20:
        broken = break_function(function, rng)
        messages = episode(broken, shape, rng) if broken else None
        if broken is None or messages is None:
            continue
        played += 1
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        results = [message["content"].split(":") for message in messages if message["role"] == "tool"]
        current, history, got = broken.source, [], []
        for call in calls:
            name, arguments = call["name"], json.loads(call["arguments"])
            if name == "edit":
                try:
                    after = StringEdit(**arguments).apply(current)
                    history.append(current)
                    current = after
                    got.append(["ok"])
                except ValueError as error:
                    got.append(["error", f" {error}"])
            elif name == "undo":
                current = history.pop()
                got.append(["undone"])
            elif name == "test":
                got.append(["passed" if current == function.source else "failed"])
        assert got[: len(results)] == [result[:1] if result[0] == "failed" else result for result in results]
        assert (current == function.source) == (shape != "gives_up")
        assert messages[-1]["tool_calls"][-1]["function"]["name"] == "finish"
    assert played > 20


def test_turns_with_a_wrong_edit_are_not_learned(corpus: list[FunctionText], tokenizer: Tokenizer) -> None:
    """By token, as stage sft encodes the rows: what is learned holds the right edit alone, and ends the episode."""
    rng, renderer = random.Random(2), CompactRenderer(tokenizer)
    for shape in SHAPES:
        messages = None
        while messages is None:
            broken = break_function(corpus[0], rng)
            messages = episode(broken, shape, rng) if broken else None
        ids, mask = encode_chat(chat_of("", {"messages": messages}), renderer)
        learned = tokenizer.decode(ids[mask == 1].tolist(), skip_special_tokens=False)
        right = f"<|call|>edit<|arg|>{broken.edit.old}<|arg|>{broken.edit.new}"
        assert learned.count("<|call|>edit<|arg|>") == (0 if shape == "gives_up" else 1)
        assert (right in learned) == (shape != "gives_up")
        assert learned.endswith("<|call|>finish<|end|>")


def test_exact_text_of_the_simplest_episode(corpus: list[FunctionText], tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    broken = break_function(corpus[1], rng)
    assert broken is not None
    ids, _ = encode_chat(chat_of("", {"messages": episode(broken, "tested", rng)}), CompactRenderer(tokenizer))
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == (
        f"<|user|>Fix `clamp` in {broken.path}\n{broken.source}<|end|>"
        f"<|assistant|><|call|>edit<|arg|>{broken.edit.old}<|arg|>{broken.edit.new}<|call|>test<|end|>"
        "<|tool|>ok\npassed<|end|><|assistant|><|call|>finish<|end|>"
    )


def test_failure_lines_are_short_single_lines() -> None:
    rng = random.Random(4)
    for _ in range(200):
        line = failure("chunk", rng)
        assert line.startswith("failed: ")
        assert "\n" not in line
        assert len(line) <= 100


def test_every_operator_has_a_weight() -> None:
    assert set(OPERATOR_WEIGHTS) == set(OPERATORS)
