from __future__ import annotations

import ast
import random
from collections import Counter

import pytest

from etude.corpus.filters import Function
from etude.corpus.mutations import OPERATORS, WEIGHTS, mutate

CASES = {
    "op_change": ("def f(a, b):\n    x = a < b\n    return x", {"a <= b", "a > b", "a >= b"}),
    "op_flip": ("def f(a, b):\n    x = a and b\n    return x", {"a or b"}),
    "op_swap": ("def f(a, b):\n    x = g(a, b)\n    return x", {"g(b, a)"}),
    "op_break_chain": ("def f(a, b):\n    x = a + b\n    return x", {"x = a\n", "x = b\n"}),
    "op_const": ("def f(a):\n    x = a + 5\n    return x", {"a + 4", "a + 6"}),
    "bool_flip": ("def f(a):\n    x = g(a, True)\n    return x", {"g(a, False)"}),
    "negate": ("def f(a):\n    if a:\n        return 1\n    return 2", {"if not a:"}),
    "unnegate": ("def f(a):\n    if not a:\n        return 1\n    return 2", {"if a:"}),
    "slice_bound": ("def f(a):\n    x = a[1:]\n    return x", {"a[:]"}),
    "loop_jump": ("def f(a):\n    for x in a:\n        break\n    return x", {"continue", "pass"}),
    "augmented": ("def f(a, b):\n    a += b\n    return a", {"a = b", "a -= b", "a *= b"}),
    "invert_if": (
        "def f(a):\n    if a:\n        x = 1\n    else:\n        x = 2\n    return x",
        {"if a:\n        x = 2\n    else:\n        x = 1\n    return x"},
    ),
    "shuffle_lines": ("def f(a):\n    x = a\n    y = x\n    return y", {"y = x\n    x = a\n", "return y\n    y = x"}),
    "remove_assign": ("def f(a):\n    x = a\n    return x", {"def f(a):\n    return x"}),
    "remove_cond": ("def f(a):\n    if a:\n        a = 1\n    return a", {"def f(a):\n    return a"}),
    "unwrap_cond": ("def f(a):\n    if a:\n        a = 1\n    return a", {"def f(a):\n    a = 1\n    return a"}),
    "remove_loop": ("def f(a):\n    for x in a:\n        g(x)\n    return a", {"def f(a):\n    return a"}),
    "argument_drop": ("def f(a, b):\n    x = g(a, b)\n    return x", {"g(a)"}),
    "unwrap_call": ("def f(a):\n    x = list(a)\n    return x", {"x = a\n"}),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_operator_writes_what_it_says(name: str) -> None:
    from etude.corpus.mutations import Mutation, _Function

    source, expected = CASES[name]
    written = set()
    for seed in range(20):
        for start, end, text in OPERATORS[name](_Function(source), random.Random(seed)):
            written.add(Mutation(name, start, end, text).apply(source))
    assert written
    for want in expected:
        assert any(want in text for text in written), (want, written)
    assert all(any(want in text for want in expected) for text in written), written


def test_mutants_parse_differ_and_leave_other_lines_alone(corpus: list[Function]) -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for function in corpus * 60:
        mutation = mutate(function.source, rng)
        assert mutation is not None
        seen[mutation.operator] += 1
        after = mutation.apply(function.source)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(function.source))
        untouched = function.source[: mutation.start].count("\n")
        assert after.split("\n")[:untouched] == function.source.split("\n")[:untouched]
    assert len(seen) >= 15


def test_single_line_mutants_change_one_line(corpus: list[Function]) -> None:
    rng = random.Random(1)
    for function in corpus * 20:
        mutation = mutate(function.source, rng, single_line=True)
        if mutation is not None:
            pairs = zip(function.source.split("\n"), mutation.apply(function.source).split("\n"), strict=True)
            assert sum(a != b for a, b in pairs) == 1


def test_only_operators_with_a_weight_are_used(corpus: list[Function]) -> None:
    rng = random.Random(3)
    made = [mutate(function.source, rng, weights={"negate": 1.0}) for function in corpus * 5]
    assert {mutation.operator for mutation in made if mutation} == {"negate"}


def test_a_string_is_never_replaced_by_one_that_is_not_ascii() -> None:
    source = 'def f(x):\n    return {"\\u00e9": 1, "plain": 2}[x]'
    rng = random.Random(0)
    made = [mutate(source, rng, weights={"string_const": 1.0}) for _ in range(50)]
    assert any(made)
    assert all(mutation.apply(source).isascii() for mutation in made if mutation)


def test_every_operator_has_a_weight_and_bad_input_is_refused() -> None:
    assert set(OPERATORS) == set(WEIGHTS)
    with pytest.raises(ValueError, match="one function"):
        mutate("x = 1", random.Random(0))
    assert mutate("def f():\n    pass", random.Random(0)) is None
