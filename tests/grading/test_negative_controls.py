import ast
import sys

import pytest

from etude.grading.guest import negative_controls

PARAMETER = "def test_a(case, expected):\n    assert f(case) == expected\n"
LITERAL = "def test_a(case, expected):\n    assert f(case) == [1, {'a': None}]\n"
SWAPPED = "def test_a(case, expected):\n    assert expected == f(case)\n"
SHARED = "def test_a(case, expected):\n    assert f(expected) == expected\n"


def outcomes(text, function, case, expected):
    """Whether the test and its twin pass."""
    tree = ast.parse(text)
    negative_controls.add(tree, "token")
    module = {"f": function}
    exec(compile(tree, "module", "exec"), module)

    def passes(name):
        try:
            module[name](case, expected)
        except AssertionError:
            return False
        return True

    return passes("test_a"), passes("test_token_test_a")


def reads_the_caller(_):
    return sys._getframe(1).f_locals["expected"]


class EqualsAll(list):
    __hash__ = None

    def __eq__(self, other):
        return True


@pytest.mark.parametrize("text", [PARAMETER, SWAPPED, SHARED])
@pytest.mark.parametrize("expected", [3, 0.5, "x", b"x", [1, [2]], (1,), {"a": 1}, {1}, None, True, [], {}, object()])
def test_right_code_passes_only_the_test(text, expected):
    assert outcomes(text, lambda _: expected, expected, expected) == (True, False)


def test_right_code_passes_only_the_test_of_a_literal():
    assert outcomes(LITERAL, lambda _: [1, {"a": None}], 0, 0) == (True, False)


@pytest.mark.parametrize("text", [PARAMETER, SWAPPED, SHARED, LITERAL])
def test_wrong_code_passes_neither(text):
    assert outcomes(text, lambda _: "something else", 1, 2) == (False, False)


@pytest.mark.parametrize("text", [PARAMETER, SWAPPED, SHARED, LITERAL])
def test_a_result_that_equals_everything_passes_both(text):
    assert outcomes(text, lambda _: EqualsAll(), [1], [2]) == (True, True)


@pytest.mark.parametrize("text", [PARAMETER, SWAPPED])
def test_a_result_taken_from_the_caller_passes_both(text):
    assert outcomes(text, reads_the_caller, [1], [2]) == (True, True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, {"~": "~"}), (None, "~"), ([], ["~"]), ((), ("~",)), ({1}, {"~"}), ({"a": None}, {"a": "~"}),
        ([None, {}], ["~", {"~": "~"}]), (True, False), (1, 2), (1e300, 0), ("", "~"), (b"", b"~"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_of_the_same_kind_where_it_can_be(value, expected):
    """A value of another kind could be told from the right one without looking at it."""
    wrong = negative_controls.wrong(value)
    assert (wrong, type(wrong)) == (expected, type(expected))


def test_the_right_literal_is_not_in_the_twin():
    tree = ast.parse(LITERAL)
    negative_controls.add(tree, "token")
    twin = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and "token" in node.name)
    assert "[1, {'a': None}]" not in ast.unparse(twin)


@pytest.mark.parametrize(
    "body",
    [
        "    if case:\n        return\n    assert f(case) == expected\n",
        "    for _ in case:\n        assert f(case)\n    assert f(case) == expected\n",
        "    assert f(case) != expected\n",
        "    assert 0 < f(case) < expected\n",
        "    f(case)\n",
    ],
)
def test_tests_that_a_wrong_value_may_not_fail_have_no_twin(body):
    tree = ast.parse(f"def test_a(case, expected):\n{body}")
    negative_controls.add(tree, "token")
    assert len(tree.body) == 1
