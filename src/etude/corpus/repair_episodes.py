"""Repair episodes as training text: a broken function, and the search-and-replace edit that repairs it."""

import builtins
import keyword
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from etude.code import Mutant, draw_mutant, functions, occurrences
from etude.corpus.dialect import Call, Document, message, prompt, turn
from etude.corpus.filters import FunctionText

# Weights of the mutation operators. Changes of an expression dominate, as in real one-line bugs; the repair of a
# removal needs more than copying.
OPERATOR_WEIGHTS: dict[str, float] = {
    "op_change": 10,
    "op_flip": 8,
    "op_swap": 8,
    "op_break_chain": 6,
    "op_const": 9,
    "bool_flip": 4,
    "negate_cond": 14,
    "wrong_name": 8,
    "invert_if": 6,
    "shuffle_lines": 5,
    "remove_assign": 5,
    "remove_cond": 5,
    "remove_return": 3,
    "remove_loop": 2,
    "remove_wrapper": 1,
}
MAX_EDIT_LINES = 6
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class StringEdit:
    """Replaces the only occurrence of `old` by `new`; both are whole lines without the last newline."""

    old: str
    new: str

    def apply(self, source: str) -> str:
        """The text after the edit. Raises ValueError unless `old` occurs exactly once and `new` differs."""
        count = occurrences(source, self.old)
        if count != 1:
            raise ValueError("no match" if count == 0 else f"{count} matches")
        if self.old == self.new:
            raise ValueError("no change")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class BrokenFunction:
    """A function with one mutation: the agent sees `source`, and `edit` restores the original text."""

    function: FunctionText
    operator: str
    path: str
    source: str
    edit: StringEdit


def edit_between(before: str, after: str, most: int | None = None) -> StringEdit:
    """The smallest whole-line edit that turns `before` into `after`, grown to neighbours until it is unique. Raises
    ValueError when the texts are equal, or a side would have more than `most` line breaks."""
    if before == after:
        raise ValueError("the two texts are equal; there is no edit")
    a, b = before.split("\n"), after.split("\n")
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    start, end_a, end_b = head, len(a) - tail, len(b) - tail
    grow_down = True
    while True:
        if most is not None and max(end_a, end_b) - start > most + 1:
            raise ValueError(f"the edit has more than {most} lines")
        old, new = "\n".join(a[start:end_a]), "\n".join(b[start:end_b])
        # An empty side would leave an empty line behind, and a side of blank lines alone is seldom unique.
        if old.strip() and end_b > start and occurrences(before, old) == 1:
            return StringEdit(old, new)
        if start > 0 and (not grow_down or end_a == len(a)):
            start -= 1
        elif end_a < len(a):
            end_a, end_b = end_a + 1, end_b + 1
        else:
            return StringEdit(before, after)
        grow_down = not grow_down


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
) -> Document | None:
    """One whole episode of the given shape; None when no wrong attempt could be made for it.

    blind: edit and finish without a test. tested: edit, test, finish. recovers: wrong edits, each tested and undone,
    then the right one. no_match: an edit that misses its text, then the right one. no_change: an edit that replaces a
    line by itself, then the right one. gives_up: as recovers, but finish after the last failed test.
    Wrong edits are mutations by operators of these weights, all different, and not labelled.
    """
    call = Call("edit", (broken.edit.old, broken.edit.new))
    test, undo, finish = Call("test"), Call("undo"), Call("finish")
    opening = message("user", prompt(broken.function.name, broken.path, broken.source))
    end = turn([finish])
    if shape == "blind":
        if rng.random() < 0.5:
            return opening + turn([call, finish])
        return opening + turn([call]) + message("tool", "ok") + end
    if shape == "tested":
        return opening + turn([call, test]) + message("tool", "ok\npassed") + end
    name = broken.function.name
    passed = message("tool", "ok\npassed") + end
    if shape in ("no_match", "no_change"):
        if shape == "no_match":  # the right edit with a character of `old` missing
            place = rng.randrange(len(broken.edit.old))
            old, new = broken.edit.old[:place] + broken.edit.old[place + 1 :], broken.edit.new
        else:  # a line of the broken function that occurs once, replaced by itself
            source = broken.source
            lines = [line for line in source.split("\n") if line.strip() and occurrences(source, line) == 1]
            old = new = rng.choice(lines or [""])
        if (not old and shape == "no_change") or (shape == "no_match" and old in broken.source):
            return None
        wrong = Call("edit", (old, new), labelled=False)
        failed = message("tool", f"error: {shape.replace('_', ' ')}\n{failure(name, rng)}")
        return opening + turn([wrong, test]) + failed + turn([call, test]) + passed
    if shape not in TRYING:
        raise ValueError(f"unknown episode shape {shape!r}; known: {', '.join(SHAPES)}")
    limit = rng.choices((1, 2, 3, 4, 5), (6, 4, 3, 2, 1))[0]  # a short function may have fewer
    edits = (wrong_edit(broken, rng, operators) for _ in range(2 * limit))
    tries = list(dict.fromkeys(edit for edit in edits if edit is not None))[:limit]
    if not tries:
        return None
    document = opening
    for index, edit in enumerate(tries):
        wrong = Call("edit", (edit.old, edit.new), labelled=False)
        document += turn([undo, wrong, test] if index else [wrong, test])
        document += message("tool", f"{'undone' if index else ''}\nok\n{failure(name, rng)}".lstrip())
    if shape == "gives_up":
        return document + end
    return document + turn([undo, call, test]) + message("tool", "undone\nok\npassed") + end
