"""Repair episodes as training text: a broken function, and the search-and-replace edit that repairs it."""

from __future__ import annotations

import builtins
import json
import keyword
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.code import OPERATOR_WEIGHTS, Mutant, draw_mutant, functions, occurrences
from etude.corpus import FunctionText, StringEdit, edit_between

MAX_EDIT_LINES = 6
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class BrokenFunction:
    """A function with one mutation: the agent sees `source`, and `edit` restores the original text."""

    function: FunctionText
    operator: str
    path: str
    source: str
    edit: StringEdit


def break_function(
    function: FunctionText, rng: random.Random, weights: Mapping[str, float] = OPERATOR_WEIGHTS
) -> BrokenFunction | None:
    """One random mutation of a function by operators of these weights. None when none applies or its repair is longer
    than six lines."""
    mutant = _mutant(function.source, rng, weights)
    if mutant is None:
        return None
    source = mutant.text
    edit = edit_between(source, function.source)
    if max(edit.old.count("\n"), edit.new.count("\n")) >= MAX_EDIT_LINES:
        return None
    path = f"src/{function.path}" if rng.random() < 0.5 else function.path
    return BrokenFunction(function, mutant.operator, path, source, edit)


def _mutant(
    source: str, rng: random.Random, weights: Mapping[str, float], *, single_line: bool = False
) -> Mutant | None:
    units = functions.functions("", source)
    return draw_mutant(source, units[0], rng, weights, single_line=single_line) if units else None


def inferable(broken: BrokenFunction) -> bool:
    """Whether every name of the repair occurs in the broken function, or is a keyword or builtin."""
    names = set(_NAME.findall(broken.edit.new)) - set(_NAME.findall(broken.source))
    return all(keyword.iskeyword(name) or hasattr(builtins, name) for name in names)


def wrong_edit(
    broken: BrokenFunction, rng: random.Random, operators: Mapping[str, float] = OPERATOR_WEIGHTS
) -> StringEdit | None:
    """A plausible edit that does not repair: another one-line mutation of the broken function; None if no operator
    applies."""
    mutant = _mutant(broken.source, rng, operators, single_line=True)
    if mutant is None or mutant.text == broken.function.source:
        return None
    edit = edit_between(broken.source, mutant.text)
    return edit if edit.old.count("\n") < 3 else None


def failure(name: str, rng: random.Random) -> str:
    """A test result line like that of a failing run; it is context, and never labelled."""
    test = rng.choice((f"test_{name}", f"test_{name}", f"doctest:{name}", f"test_{name}[case{rng.randrange(9)}]"))
    kind = rng.random()
    if kind < 0.6:
        detail = f"AssertionError: assert {_value(rng)} == {_value(rng)}"
    elif kind < 0.7:
        detail = f"expected {_value(rng)}, got {_value(rng)}"
    else:
        detail = rng.choice(_ERRORS).format(name=name, word=rng.choice(_WORDS), index=rng.randrange(4))
    return f"failed: {test}: {detail}"[:100]


_WORDS = ("a", "b", "key", "value", "x", "item", "name", "result", "items", "obj", "count")
_ERRORS = (
    "TypeError: 'NoneType' object is not iterable",
    "TypeError: 'NoneType' object is not subscriptable",
    "TypeError: 'int' object is not callable",
    "TypeError: 'bool' object is not iterable",
    "TypeError: {name}() missing 1 required positional argument: '{word}'",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "TypeError: '<' not supported between instances of 'str' and 'int'",
    "AttributeError: 'list' object has no attribute '{word}'",
    "AttributeError: 'NoneType' object has no attribute '{word}'",
    "KeyError: '{word}'",
    "IndexError: list index out of range",
    "NameError: name '{word}' is not defined",
    "UnboundLocalError: cannot access local variable '{word}' where it is not associated with a value",
    "ValueError: not enough values to unpack (expected 2, got {index})",
    "ZeroDivisionError: division by zero",
    "RecursionError: maximum recursion depth exceeded",
    "AssertionError: assert None == {index}",
)


def _value(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(8 if depth < 2 else 5)
    if kind == 0:
        return rng.choice(("None", "True", "False", "''", "[]", "{}"))
    if kind <= 2:
        return str(rng.choice((0, 1, 2, 3, 4, 5, 10, 42, -1, 1.5)))
    if kind <= 4:
        return repr(rng.choice(_WORDS))
    if kind == 7:
        return "{" + ", ".join(f"{rng.choice(_WORDS)!r}: {_value(rng, 2)}" for _ in range(rng.randint(1, 3))) + "}"
    return "[" + ", ".join(_value(rng, depth + 1) for _ in range(rng.randint(1, 4))) + "]"


SHAPES = ("blind", "tested", "recovers", "no_match", "no_change", "gives_up")
TRYING = ("recovers", "gives_up")  # the shapes with wrong edits that were tested


def episode(
    broken: BrokenFunction, shape: str, rng: random.Random, operators: Mapping[str, float] = OPERATOR_WEIGHTS
) -> list[dict[str, Any]] | None:
    """The messages of one whole episode of the given shape; None when no wrong attempt could be made for it.

    blind: edit and finish without a test. tested: edit, test, finish. recovers: wrong edits, each tested and undone,
    then the right one. no_match: an edit that misses its text, then the right one. no_change: an edit that replaces a
    line by itself, then the right one. gives_up: as recovers, but finish after the last failed test.
    Wrong edits are mutations by operators of these weights, all different; turns with one have the weight 0.
    """
    right, test, undo, finish = ("edit", broken.edit), ("test", None), ("undo", None), ("finish", None)
    name = broken.function.name
    talk = _Talk(f"Fix `{name}` in {broken.path}\n{broken.source}")
    if shape == "blind":
        if rng.random() < 0.5:
            talk.turn([right, finish], [])
        else:
            talk.turn([right], ["ok"])
            talk.turn([finish], [])
        return talk.messages
    if shape == "tested":
        talk.turn([right, test], ["ok", "passed"])
    elif shape in ("no_match", "no_change"):
        wrong = _useless(broken, shape, rng)
        if wrong is None:
            return None
        talk.turn([("edit", wrong), test], [f"error: {shape.replace('_', ' ')}", failure(name, rng)], weight=0)
        talk.turn([right, test], ["ok", "passed"])
    elif shape in TRYING:
        limit = rng.choices((1, 2, 3, 4, 5), (6, 4, 3, 2, 1))[0]  # a short function may have fewer
        edits = (wrong_edit(broken, rng, operators) for _ in range(2 * limit))
        tries = list(dict.fromkeys(edit for edit in edits if edit is not None))[:limit]
        if not tries:
            return None
        for number, edit in enumerate(tries):
            again = [undo] if number else []
            results = [*(["undone"] if number else []), "ok", failure(name, rng)]
            talk.turn([*again, ("edit", edit), test], results, weight=0)
        if shape == "recovers":
            talk.turn([undo, right, test], ["undone", "ok", "passed"])
    else:
        raise ValueError(f"unknown episode shape {shape!r}; known: {', '.join(SHAPES)}")
    talk.turn([finish], [])
    return talk.messages


class _Talk:
    """Messages of an episode, in OpenAI's format."""

    def __init__(self, request: str) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
        self._calls = 0

    def turn(self, calls: Sequence[tuple[str, StringEdit | None]], results: Sequence[str], weight: int = 1) -> None:
        """A turn of the assistant and the results of its calls."""
        made: list[dict[str, Any]] = []
        for name, edit in calls:
            self._calls += 1
            arguments = json.dumps({} if edit is None else {"old": edit.old, "new": edit.new})
            function = {"name": name, "arguments": arguments}
            made.append({"id": f"call_{self._calls}", "type": "function", "function": function})
        self.messages.append({"role": "assistant", "content": "", "tool_calls": made, "weight": weight})
        for call, result in zip(made, results, strict=False):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def _useless(broken: BrokenFunction, shape: str, rng: random.Random) -> StringEdit | None:
    """The right edit with a character of `old` missing, or a line that occurs once replaced by itself."""
    source = broken.source
    if shape == "no_match":
        place = rng.randrange(len(broken.edit.old))
        old = broken.edit.old[:place] + broken.edit.old[place + 1 :]
        return None if old in source else StringEdit(old, broken.edit.new)
    lines = [line for line in source.split("\n") if line.strip() and occurrences(source, line) == 1]
    old = rng.choice(lines or [""])
    return StringEdit(old, old) if old else None
