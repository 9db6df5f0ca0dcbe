"""Held-out functions are never trained on; hidden tests are not in the tree the agent sees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from etude.code import functions as discover
from etude.config import BuildConfig
from etude.errors import UserError
from etude.tasks import build, commits, split
from etude.tasks.build import check_operators
from etude.tasks.leaks import LeakIndex

TESTS = """import pytest


@pytest.mark.parametrize("x", [1, 2])
def test_one(x):
    assert x


class TestGroup:
    @pytest.mark.slow
    def test_two(self):
        assert 2

    def helper(self):
        return 3


class TestOther:
    def test_three(self):
        assert 3
"""


def test_functions_with_equal_bodies_stay_together() -> None:
    source = "".join(f"def f{i}(x):\n    return x + {i // 2}\n" for i in range(40))
    functions = discover.functions("m.py", source)
    heldout = split.heldout_functions(functions, 0.25, 1, {})
    assert len(heldout) == 10
    assert all((f"m.py::f{i}" in heldout) == (f"m.py::f{i + 1}" in heldout) for i in range(0, 40, 2))
    assert heldout == split.heldout_functions(functions[::-1], 0.25, 1, {})
    assert heldout != split.heldout_functions(functions, 0.25, 2, {})
    assert split.heldout_functions(functions, 0.0, 1, {"commit": [frozenset({functions[0].id})]}) == set()


def test_every_kind_of_change_has_held_out_ones() -> None:
    source = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(80))
    functions = discover.functions("m.py", source)
    changes = {
        "commit": [frozenset({f"m.py::f{i}", f"m.py::f{i + 1}", f"m.py::other{i}"}) for i in range(0, 30, 3)],
        "feature": [frozenset({f"m.py::f{i}", f"m.py::f{i + 1}"}) for i in range(20, 60, 4)],
    }
    heldout = split.heldout_functions(functions, 0.25, 1, changes)
    assert sum(f.id in heldout for f in functions) == 20
    for sets in changes.values():
        sides = [split.side(members, heldout) for members in sets]
        assert 3 <= sides.count("heldout") <= 5
        assert sides.count("train") >= 5
    assert heldout == split.heldout_functions(functions[::-1], 0.25, 1, {k: v[::-1] for k, v in changes.items()})
    # One large change must not take most of the functions away from training.
    large = {"class": [frozenset(f.id for f in functions[:60])]}
    assert sum(f.id in split.heldout_functions(functions, 0.25, 1, large) for f in functions) == 20


def test_what_a_change_touches() -> None:
    right = (
        "X = 1\n\n\nclass A:\n    y = 2\n\n    def f(self):\n        def g():\n            return 1\n"
        "        return g\n\n    @property\n    def h(self):\n        return 3\n"
    )

    def touched(old: str, new: str) -> set[str]:
        assert old in right
        return set(split.touched("m.py", right, right.replace(old, new)))

    assert touched("X = 1", "X = 2") == set()
    assert touched("y = 2", "y = 3") == {"m.py::A"}
    assert touched("            return 1", "            return 2") == {"m.py::A.f"}
    assert touched("    @property\n", "") == {"m.py::A.h"}
    assert touched("        return g\n", "        print()\n        return g\n") == {"m.py::A.f"}
    assert touched("    y = 2\n\n    def f", "    def f") == {"m.py::A"}
    assert split.touched("a.js", "function f() {\n  return 1\n}\n", "function f() {\n  return 2\n}\n") == {"a.js::f"}


def test_hidden_tests_are_cut_out() -> None:
    text = split.without_tests("t.py", TESTS, {"t.py::test_one", "t.py::TestOther::test_three"})
    assert "test_one" not in text
    assert "test_three" not in text
    assert "parametrize" not in text
    assert TESTS[TESTS.index("class TestGroup") : TESTS.index("class TestOther")] in text
    assert isinstance(ast.parse(text).body[-1].body[0], ast.Pass)
    assert split.without_tests("t.py", TESTS, set()) == TESTS


def test_visible_half() -> None:
    callers = {
        "m.py::f": {"a.py::test_f[1]", "a.py::test_f[2]", "a.py::test_g", "a.py::test_h", "b.py::TestF::test_i"},
        "m.py::g": {"a.py::test_g", "a.py::test_h"},
        "m.py::only": {"b.py::test_only"},
    }
    visible = split.visible_half(callers, 1)
    assert len(visible & {"a.py::test_g", "a.py::test_h"}) == 1
    assert len(visible & {split.base(test) for test in callers["m.py::f"]}) == 2
    assert "b.py::test_only" not in visible
    assert visible == split.visible_half(callers, 1)


def test_leak_share(tmp_path: Path) -> None:
    original = "def f(items, low):\n    kept = [i * 2 + low for i in items if i > low and i % 3]\n    return kept\n"
    broken = original.replace("i > low", "i < low")
    (tmp_path / "m.py").write_text(original)
    assert LeakIndex(tmp_path).share(original, broken) == 0.0
    (tmp_path / "docs.rst").write_text("See::\n\n    kept = [i * 2 + low for i in items if i > low and i % 3]\n")
    both = LeakIndex(tmp_path)
    assert both.share(original, broken) > 0.5
    assert both.place("m.py", original, broken) == "docs.rst"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tasks": 1},
        {"min_lines": 9, "max_lines": 8},
        {"heldout_fraction": 1.0},
        {"kinds": ("other",)},
        {"bootstrap": "somehow"},
    ],
)
def test_options_are_checked(wrong: dict) -> None:
    with pytest.raises(ValueError, match="validation error"):
        BuildConfig(**wrong)


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(UserError, match="unknown operator x"):
        check_operators(BuildConfig(operators=("op_flip", "x")))


PAGES = "".join(f"def f{i}(x):\n    y = {i}{{odd}}\n    return x + y\n{{page}}\n\n" for i in range(6))


@pytest.mark.parametrize(
    ("page", "odd"),
    [
        ("\f", ""),
        ("\f\f", "  # \f"),
        ("", "  # \x1c"),
        ("", "  # \x85\u2028"),
        ("", "\r"),
        ("\r", "  # \v"),
    ],
)
def test_a_change_touches_the_function_that_the_parser_names(page: str, odd: str) -> None:
    """Whatever cuts lines elsewhere stands above the change; a lone carriage return is a line for Python alone."""
    right = PAGES.format(page=page, odd=odd)
    wrong = right.replace("y = 4", "y = 40")
    node = ast.parse(right).body[4]
    assert split.touched("m.py", right, wrong) == {"m.py::f4"}
    mutant, lines = commits._mutant(right, wrong)
    assert lines == [node.lineno + 1]
    assert mutant.text == wrong
    assert commits._mutant(wrong, right)[0].text == right


def test_scripts_are_cut_as_their_parser_does() -> None:
    text = "function a() {\n  return 1 /* \f\r */\n}\n\nfunction b() {\n  return 2\n}\n"
    assert split.touched("m.js", text, text.replace("return 2", "return 3")) == {"m.js::b"}


def test_tests_are_cut_out_of_files_as_they_are(tmp_path: Path) -> None:
    """Line ends, page breaks and bytes of other lines stay."""
    text = "# \u2028\f\r\n\r\ndef test_a():\r\n    assert 1\r\n\f\r\ndef test_b():\r\n    assert '\x1c'\r\n"
    (tmp_path / "test_m.py").write_bytes(text.encode())
    build._cut_out(tmp_path, ["test_m.py::test_a"])
    left = text.replace("def test_a():\r\n    assert 1\r\n", "")
    assert (tmp_path / "test_m.py").read_bytes() == left.encode()
