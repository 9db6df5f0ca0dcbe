"""Rows of training text made of functions: code, fill-in-the-middle and repair episodes, as lines of JSON."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from models.make_nano.episodes import break_function, episode, inferable

from etude.corpus import FunctionText
from etude.corpus.fim import split

Row = dict[str, Any]


def tokenizer_texts(train: Sequence[FunctionText], rng: random.Random) -> Iterator[str]:
    """The text on which the tokenizer is trained: prompts and functions, in the proportions of the model's training
    text."""
    for function in train:
        text = function.source if rng.random() < 0.7 else function.document
        yield f"Fix `{function.name}` in {function.path}\n{text}"
    # The fixed words of the dialect, often enough that each becomes one token.
    words = ("edit", "test", "finish", "undo", "read", "list", "grep", "run", "ok", "passed", "undone", "failed")
    results = ("ok\npassed", "undone\nok\npassed", "error: no match", "AssertionError", "TypeError", "doctest")
    for _ in range(max(1, len(train) // 10)):
        yield from words
        yield from results


def code_rows(train: Sequence[FunctionText], rng: random.Random) -> Iterator[Row]:
    """One to four neighbouring functions of a file under its path, with the docstring cut to a line or removed."""
    by_file: dict[tuple[str, str], list[FunctionText]] = {}
    for function in train:
        by_file.setdefault((function.package, function.path), []).append(function)
    groups: list[tuple[str, list[FunctionText]]] = []
    for (_, path), members in by_file.items():
        at = 0
        while at < len(members):
            size = rng.randint(1, 4)
            groups.append((path, members[at : at + size]))
            at += size
    rng.shuffle(groups)
    for path, members in groups:
        body = "\n\n\n".join(f.document if rng.random() < 0.5 else f.source for f in members)
        yield {"text": f"# {path}\n{body}\n"}


def middle_rows(train: Sequence[FunctionText], rng: random.Random) -> Iterator[Row]:
    """One example of filling in the middle per function, in random order."""
    for function in rng.sample(train, len(train)):
        prefix, middle, suffix = split(function.source, rng)
        yield {"prefix": prefix, "suffix": suffix, "middle": middle}


def repair_rows(
    train: Sequence[FunctionText], shapes: Mapping[str, float], operators: Mapping[str, float], rng: random.Random
) -> Iterator[Row]:
    """Endless repair episodes, each over a new mutation, with the functions in turn. `shapes` are shares of episode
    shapes, `operators` weights of mutation operators. Raises ValueError if no function can be mutated."""
    names, weights = list(shapes), list(shapes.values())
    while True:
        made = False
        for function in rng.sample(train, len(train)):
            broken = break_function(function, rng, operators)
            # A repair with a name that does not occur in the function teaches guessing; keep only some of these.
            if broken is not None and not inferable(broken) and rng.random() < 0.65:
                continue
            messages = episode(broken, rng.choices(names, weights)[0], rng, operators) if broken else None
            if messages is not None:
                made = True
                yield {"messages": messages}
        if not made:
            raise ValueError("no function can be mutated")
