"""Every operator changes what the function means and nothing of the text around the place it breaks."""

from __future__ import annotations

import ast
import random

import pytest

from etude.code import functions, mutate
from etude.code.functions import Function
from etude.code.operators import OPERATORS

# A function that every operator finds something in, with layout that a parser would not give back.
SOURCE = '''"""Ümläuts before the function: positions count bytes."""
import contextlib

LIMIT = 3   # odd   spacing


def target( items, low = 0, *, strict=False ):
    """Docstring with  a + b  and True and 3.

    >>> target([1])
    """
    total = 0   # a comment
    name = "é"
    for item in items:
        if item < low  and not strict:
            continue
        elif (item) == (  # + inside a comment
            low + 1
        ):
            total += 2
        else:
            total = total*2 + item - 1
    with contextlib.suppress(ValueError):
        total = (total + low) * len(items)
    if strict:
        total = -total
    else:
        name = f"{name} {total + 1}"
    flag = True
    return total if flag else name



def after( ):
    return   1
'''


def _function(source: str = SOURCE, name: str = "target") -> Function:
    return next(f for f in functions.functions("m.py", source) if f.qualname == name)


def test_every_operator_applies() -> None:
    assert {mutant.operator for mutant in mutate.mutants(SOURCE, _function(), 1)} == set(OPERATORS)
    assert len(OPERATORS) >= 10


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_operator(operator: str) -> None:
    function = _function()
    before = ast.dump(ast.parse(SOURCE))
    found = [mutant for mutant in mutate.mutants(SOURCE, function, 1) if mutant.operator == operator]
    for mutant in found:
        tree = ast.parse(mutant.text)
        assert ast.dump(tree) != before
        broken = next(n for n in tree.body if isinstance(n, ast.FunctionDef))
        assert ast.get_docstring(broken, clean=False) == ast.get_docstring(function.node, clean=False)
        assert (broken.lineno, broken.end_lineno) == (mutant.first_line, mutant.last_line)
        old, new = SOURCE.split("\n"), mutant.text.split("\n")
        start = function.first_line - 1
        assert new[:start] == old[:start]
        assert new[mutant.last_line :] == old[function.last_line :]
        assert "\n".join(new[start : mutant.last_line]) == mutant.snippet
        # Lines are moved or taken out whole; at most the lines of one statement are written anew.
        fresh = [line for line in new if line not in old]
        assert len(fresh) <= 2, fresh


def test_expected_texts() -> None:
    lines = {mutant.operator: set() for mutant in mutate.mutants(SOURCE, _function(), 1)}
    for mutant in mutate.mutants(SOURCE, _function(), 1):
        lines[mutant.operator] |= set(mutant.text.split("\n")) - set(SOURCE.split("\n"))
    assert "        if item > low  and not strict:" in lines["op_flip"]
    assert "        if item < low  or not strict:" in lines["op_flip"]
    assert "        elif (item) != (  # + inside a comment" in lines["op_flip"]
    assert "        if not strict:" in lines["op_break_chain"]
    assert "        if item < low:" in lines["op_break_chain"]
    assert "        total = len(items) * (total + low)" in lines["op_swap"]
    assert "    return name if flag else total" in lines["invert_if"]
    assert "    return total if not flag else name" in lines["negate_cond"]
    assert "    flag = False" in lines["bool_flip"]


def test_same_seed_same_mutants() -> None:
    first, second = (mutate.mutants(SOURCE, _function(), 1) for _ in range(2))
    assert first == second
    assert first != mutate.mutants(SOURCE, _function(), 2)


def test_operators_take_turns() -> None:
    first = [mutant.operator for mutant in mutate.mutants(SOURCE, _function(), 1)[: len(OPERATORS)]]
    assert sorted(first) == sorted(OPERATORS)


def test_removal() -> None:
    mutant = mutate.body_removal(SOURCE, _function())
    assert mutant is not None
    start, end = SOURCE.index("    total = 0"), SOURCE.index("\n\n\n\ndef after")
    assert mutant.text == SOURCE[:start] + "    raise NotImplementedError" + SOURCE[end:]
    assert mutant.snippet.endswith('"""\n    raise NotImplementedError')
    one_line = "def f(): return 1\n"
    assert mutate.body_removal(one_line, _function(one_line, "f")) is None


def test_method_and_decorator() -> None:
    source = "class A:\n    @staticmethod\n    def f(x):\n        return x + 1\n"
    function = _function(source, "A.f")
    assert (function.first_line, function.last_line) == (2, 4)
    flipped = [m.text for m in mutate.mutants(source, function, 1) if m.operator == "op_flip"]
    assert flipped == [source.replace("+", "-")]


def test_fstrings_are_left_alone() -> None:
    source = 'def f(a, b):\n    return f"{a + b}"\n'
    assert {m.operator for m in mutate.mutants(source, _function(source, "f"), 1)} == {"remove_return"}


def test_drawn_mutants_follow_the_weights_and_stay_in_a_line() -> None:
    rng, weights = random.Random(0), dict.fromkeys(OPERATORS, 1.0)
    drawn = [mutate.draw_mutant(SOURCE, _function(), rng, weights) for _ in range(200)]
    assert {mutant.operator for mutant in drawn if mutant} == set(OPERATORS)
    drawn = [mutate.draw_mutant(SOURCE, _function(), rng, {"op_flip": 1.0, "bool_flip": 0.0}) for _ in range(20)]
    assert {mutant.operator for mutant in drawn if mutant} == {"op_flip"}
    for _ in range(50):
        mutant = mutate.draw_mutant(SOURCE, _function(), rng, weights, single_line=True)
        assert mutant is not None
        pairs = zip(SOURCE.split("\n"), mutant.text.split("\n"), strict=True)
        assert sum(one != other for one, other in pairs) == 1
    source = "def f():\n    print()\n"
    assert mutate.draw_mutant(source, _function(source, "f"), rng, weights) is None
