"""Grades, in their order, and changes outside the hunks."""

import importlib.util

import pytest

from etude.code.functions import functions
from etude.code.languages import has_syntax, language_of, parses, same_syntax
from etude.edits.grades import EditGrade, grade_edit, lines_changed_outside

CODE = "def f(a):\n    # note\n    return a + 1\n"
TREE_SITTER = importlib.util.find_spec("tree_sitter") is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (CODE, EditGrade.EXACT),
        (CODE.replace("return a + 1", "return a + 1  "), EditGrade.WHITESPACE),
        (CODE + "\n\n", EditGrade.WHITESPACE),
        (CODE.rstrip("\n"), EditGrade.WHITESPACE),
        (CODE.replace("a + 1", "(a + 1)"), EditGrade.SYNTAX),
        (CODE.replace("    ", "  "), EditGrade.SYNTAX),
        (CODE.replace("# note", "# other"), EditGrade.FAIL),
        (CODE.replace("    # note\n", ""), EditGrade.FAIL),
        (CODE.replace("+ 1", "+ 2"), EditGrade.FAIL),
        ("def f(:\n", EditGrade.FAIL),
        (None, EditGrade.FAIL),
    ],
)
def test_the_first_grade_that_holds(given, expected):
    assert grade_edit(CODE, given, "python") == expected


def test_json_is_compared_by_its_values_in_order():
    assert grade_edit('{"a": 1, "b": [2]}\n', '{ "a": 1,\n"b": [2] }\n', "json") == EditGrade.SYNTAX
    assert grade_edit('{"a": 1, "b": 2}\n', '{"b": 2, "a": 1}\n', "json") == EditGrade.FAIL


def test_texts_that_are_too_deep_are_no_syntax():
    """A model may write them: comparing must not raise, at any depth of the stack that it is called from."""
    elif_chain = "if x:\n    pass\n" + "elif x:\n    pass\n" * 900
    nested = "[" * 900 + "]" * 900
    for text, language in ((elif_chain, "python"), (nested, "json"), (f"x = {nested}", "python")):
        assert grade_edit(text, text + "\n\n#", language) == EditGrade.FAIL
    assert functions("a.py", "class A:\n" + "".join(f"    {line}\n" for line in elif_chain.splitlines())) == []


def test_markdown_has_no_syntax_to_compare():
    assert grade_edit("# a\n\nb\n", "# a\nb\n", "markdown") == EditGrade.FAIL
    assert parses("``` *", "markdown")


@pytest.mark.skipif(not TREE_SITTER, reason="needs the extra `apply`")
@pytest.mark.parametrize(
    ("path", "code", "alike", "other"),
    [
        ("a.js", "f(1); // x\n", "f( 1 );  // x\n", "f(1); // y\n"),
        ("a.ts", "let a: number = 1;\n", "let a : number=1;\n", "let a: string = 1;\n"),
        ("a.go", "package a\nfunc f() int { return 1 }\n", "package a\n\nfunc f() int {\n\treturn 1\n}\n",
         "package a\nfunc f() int { return 2 }\n"),
        ("A.java", "class A { int a; }\n", "class A {\n  int a;\n}\n", "class A { int b; }\n"),
        ("a.c", "int f(void) { return 1; }\n", "int f(void)\n{\n  return 1;\n}\n", "int f(int a) { return 1; }\n"),
    ],
)  # fmt: skip
def test_trees_of_other_languages(path, code, alike, other):
    language = language_of(path)
    assert parses(code, language)
    assert not parses(code + "((", language)
    assert same_syntax(code, alike, language)
    assert not same_syntax(code, other, language)


@pytest.mark.skipif(TREE_SITTER, reason="the extra `apply` is installed")
def test_without_a_parser_nothing_is_claimed():
    assert not has_syntax("go")
    assert not same_syntax("a", "a ", "go")
    with pytest.raises(ValueError, match="extra `apply`"):
        parses("a", "go")


def test_changes_outside_the_hunks_are_counted():
    file = "".join(f"line {i}\n" for i in range(20))
    result = file.replace("line 5\n", "five\n")
    assert lines_changed_outside(file, result, result) == 0
    assert lines_changed_outside(file, result, result.replace("line 5", "six").replace("five", "six")) == 0
    assert lines_changed_outside(file, result, result.replace("line 12\n", "")) == 1
    assert lines_changed_outside(file, result, result.replace("line 12\n", "line 12\nextra\n")) == 1
    assert lines_changed_outside(file, result, result.replace("five\n", "five\nsix\n")) == 0
