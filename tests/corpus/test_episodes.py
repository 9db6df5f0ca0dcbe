from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from etude.code.operators import OPERATORS
from etude.corpus import dialect
from etude.corpus.dialect import SPECIAL_IDS, SPECIALS
from etude.corpus.filters import FunctionText
from etude.corpus.repair_episodes import (
    OPERATOR_WEIGHTS,
    SHAPES,
    StringEdit,
    break_function,
    edit_between,
    episode,
    failure,
)


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


def _calls(ids: list[int], tokenizer: Tokenizer) -> list[list[str]]:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return [call.split("<|end|>")[0].split("<|arg|>") for call in text.split("<|call|>")[1:]]


@pytest.mark.parametrize("shape", SHAPES)
def test_playing_an_episode_ends_where_it_says(shape: str, corpus: list[FunctionText], tokenizer: Tokenizer) -> None:
    """Apply every call to the broken function: the results in the episode are those the tools would give."""
    rng = random.Random(5)
    played = 0
    for function in corpus * 20:
        broken = break_function(function, rng)
        document = episode(broken, shape, rng) if broken else None
        if broken is None or document is None:
            continue
        played += 1
        ((ids, _),) = dialect.encode(tokenizer, [document])
        text = dialect.text(document)
        results = [part.split("<|end|>")[0] for part in text.split("<|tool|>")[1:]]
        current, history, got = broken.source, [], []
        for name, *arguments in _calls(ids.tolist(), tokenizer):
            if name == "edit":
                try:
                    after = StringEdit(*arguments).apply(current)
                    history.append(current)
                    current = after
                    got.append("ok")
                except ValueError as error:
                    got.append(f"error: {error}")
            elif name == "undo":
                current = history.pop()
                got.append("undone")
            elif name == "test":
                got.append("passed" if current == function.source else "failed")
        said = [line.split(":")[0] if line.startswith("failed") else line for r in results for line in r.split("\n")]
        assert got[: len(said)] == said
        assert (current == function.source) == (shape != "gives_up")
        assert text.endswith("<|call|>finish<|end|>")
    assert played > 20


def test_mask_covers_exactly_what_the_assistant_should_say(corpus: list[FunctionText], tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for shape in SHAPES:
        document = None
        while document is None:
            broken = break_function(corpus[0], rng)
            document = episode(broken, shape, rng) if broken else None
        ((ids, mask),) = dialect.encode(tokenizer, [document])
        role = ""
        wrong = shape in ("recovers", "no_match", "no_change", "gives_up")
        for token, labelled in zip(ids.tolist(), mask.tolist(), strict=True):
            if SPECIALS[token : token + 1] and SPECIALS[token] in ("<|user|>", "<|assistant|>", "<|tool|>"):
                role = SPECIALS[token]
                assert not labelled
            elif role != "<|assistant|>":
                assert not labelled
            elif not wrong or token == SPECIAL_IDS["<|end|>"]:
                assert labelled
        spoken = tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False)
        right = f"<|call|>edit<|arg|>{broken.edit.old}<|arg|>{broken.edit.new}"
        assert spoken.count("<|call|>edit<|arg|>") == (0 if shape == "gives_up" else 1)
        assert (right in spoken) == (shape != "gives_up")
        assert spoken.endswith("<|call|>finish<|end|>")


def test_exact_text_of_the_simplest_episode(corpus: list[FunctionText]) -> None:
    rng = random.Random(3)
    broken = break_function(corpus[1], rng)
    assert broken is not None
    document = episode(broken, "tested", rng)
    assert document is not None
    assert dialect.text(document) == (
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
