"""Edits of the view, mapped back to the file exactly."""

from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.corpus.filters import function_texts
from etude.corpus.sources import File
from etude.harness.focus import EditError, edit_file, moved, view_of

FILE = '''\
"""A module."""
import functools


class Shelf:
    @property
    @functools.cache  # a decorator
    def books(
        self,
    ):
        """The books.

            >>> Shelf().books
            []
        """
        text = """one
  two"""

        if self.open:
            return [text]
        return []

    def after(self):
        return 1
'''


def focus(text: str, name: str) -> tuple[int, int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or 0
    raise ValueError(name)


def test_the_view_has_no_decorators_and_no_docstring() -> None:
    view = view_of(FILE, *focus(FILE, "books"))
    # The string's second line has two spaces, so no more can be taken off.
    expected = '''\
  def books(
      self,
  ):
      text = """one
two"""

      if self.open:
          return [text]
      return []'''
    assert textwrap.dedent(expected) == expected
    assert view.source == "\n".join(
        line.removeprefix("  ") for line in FILE.split("\n")[7:10] + FILE.split("\n")[15:21]
    )
    assert view.file == FILE


def test_an_edit_changes_only_the_lines_it_names() -> None:
    view = view_of(FILE, *focus(FILE, "after"))
    edited = view.edit("return 1", "if self:\n        return 2\n    return 3")
    assert edited.file == FILE.replace(
        "        return 1\n", "        if self:\n            return 2\n        return 3\n"
    )
    assert edited.source == "def after(self):\n    if self:\n        return 2\n    return 3"
    assert edited.edit("def after(self)", "def later(self)").file == edited.file.replace("def after", "def later")


DOCUMENTED = 'def f(x):\n    """Say\n    so."""\n    # first\n    y = x\n    return y\n'


DOC = '    """Say\n    so."""\n'
REST = "    # first\n    y = x\n    return y\n"
ALL = "(x):\n    # first\n    y = x\n    return y"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # An insertion between the signature and the body goes below the docstring.
        ("def f(x):\n", "def f(x):\n    z = 0\n", f"def f(x):\n{DOC}    z = 0\n{REST}"),
        # Both sides of the docstring change: it stays first in the body.
        ("(x):\n    # f", "(x, z=0,\n  w=1):\n    # F", f"def f(x, z=0,\n  w=1):\n{DOC}    # F{REST[7:]}"),
        (ALL, "(x):\n    return x", f"def f(x):\n{DOC}    return x\n"),
        (
            ALL,
            "(x):\n    @d\n    def g(): pass\n    return g",
            f"def f(x):\n{DOC}    @d\n    def g(): pass\n    return g\n",
        ),
        # No longer Python: the docstring stays where it was.
        ("(x):\n    # f", "(x:\n    # F", f"def f(x:\n{DOC}    # F{REST[7:]}"),
        # A body on the line of `def` leaves no place for it.
        (ALL, "(x): return x", "def f(x): return x\n"),
        ("\n    return y", "", f"def f(x):\n{DOC}    # first\n    y = x\n"),
        ("return y", "return y\n", f"def f(x):\n{DOC}{REST}\n"),
    ],
)
def test_edits_around_a_hidden_docstring(old: str, new: str, expected: str) -> None:
    head, tail = "import a\n\n\n", "\n\ndef g():\n    pass\n"
    text = head + DOCUMENTED + tail
    view = view_of(text, *focus(text, "f"))
    assert view.source == "def f(x):\n    # first\n    y = x\n    return y"
    edited = view.edit(old, new)
    assert edited.file == head + expected + tail
    assert edited.source == view.source.replace(old, new)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("indent", ["    ", "\t", "  "])
@pytest.mark.parametrize("end", [True, False])
def test_line_ends_and_tabs_are_kept(newline: str, indent: str, end: bool) -> None:
    two = indent * 2
    text = f"class A:\n{indent}def f(self):\n{two}'''Doc.'''\n{two}a = 1\n\n{two}return a\n"
    text = (text if end else text.rstrip("\n")).replace("\n", newline)
    view = view_of(text, 2, 6)
    assert view.source == f"def f(self):\n{indent}a = 1\n\n{indent}return a"
    edited = view.edit(f"{indent}a = 1\n\n{indent}return a", f"{indent}b = 2\n{indent}if b:\n{indent}{indent}return b")
    expected = text.replace(
        f"{indent * 2}a = 1\n\n{indent * 2}return a".replace("\n", newline),
        f"{indent * 2}b = 2\n{indent * 2}if b:\n{indent * 3}return b".replace("\n", newline),
    )
    assert edited.file == expected
    assert edited.edit("return b", "return c\n").file.endswith("return c" + newline * (1 + end))


def test_blank_lines_with_white_space_are_left_alone() -> None:
    text = "def f():\n    a = 1\n   \t \n    return a\n"
    view = view_of(text, 1, 4)
    assert view.source == "def f():\n    a = 1\n\n    return a"
    assert view.edit("a = 1\n\n", "a = 2\n\n").file == text.replace("a = 1", "a = 2")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("zzz", "a", "no match"), ("", "a", "no match"), ("a", "b", "2 matches"), ("a = 1", "a = 1", "no change")],
)
def test_refused_edits(old: str, new: str, message: str) -> None:
    with pytest.raises(EditError, match=f"^{message}$"):
        view_of("def f():\n    a = 1\n    return a\n", 1, 3).edit(old, new)


def test_carriage_returns_in_an_edit_are_line_ends() -> None:
    view = view_of("def f():\r\n    a = 1\r\n    return a\r\n", 1, 3)
    assert view.edit("a = 1\r\n    return a", "return 1\r\n").file == "def f():\r\n    return 1\r\n\r\n"


def test_what_is_not_a_function_is_shown_whole() -> None:
    text = "x = 1\n\nclass A:\n    '''Doc.'''\n    y = 2\n\nz = (\n"
    assert view_of(text, 3, 5).source == "class A:\n    '''Doc.'''\n    y = 2"
    assert view_of(text, 7, 7).source == "z = ("
    assert view_of(text, 50, 60).file == text
    assert view_of(text, 3, 5).edit("y = 2", "y = 3").file == text.replace("y = 2", "y = 3")


def test_a_lone_docstring_or_one_beside_code_is_shown() -> None:
    for text in (
        'def f():\n    """Only."""\n',
        'def f():\n    """Doc."""; x = 1\n    return x\n',
        'def f(): """Doc."""\n',
    ):
        assert view_of(text, 1, text.count("\n")).source == text.rstrip("\n")


def test_an_edited_view_survives_what_no_longer_parses() -> None:
    view = view_of(FILE, *focus(FILE, "after"))
    broken = view.edit("return 1", "return (((")
    assert broken.edit("(((", "2").file == FILE.replace("return 1", "return 2")


def test_a_function_that_moved_is_found_again() -> None:
    view = view_of(FILE, *focus(FILE, "after"))
    assert moved(view, "# new\n" + FILE).source == view.source  # type: ignore[union-attr]
    changed = moved(view, FILE.replace("return 1", "return 2"))
    assert changed is not None
    assert changed.source == view.source.replace("return 1", "return 2")
    assert moved(view, "# new\n" + FILE.replace("return 1", "return 2")) is None


def test_a_whole_file_is_edited_with_its_own_line_ends() -> None:
    text = "a = 1\r\nb = 2\nc = 3"
    assert edit_file(text, "a = 1\nb = 2", "a = 5\nb = 6") == "a = 5\r\nb = 6\r\nc = 3"
    for newline in ("\n", "\r\n"):
        assert edit_file(f"a{newline}", "a\n", "b\r\n") == f"b{newline}"
        assert edit_file(f"a{newline}", "a\n", "") == ""
        with pytest.raises(EditError, match="2 matches"):
            edit_file(f"a{newline}a", "a", "b")


def test_the_view_is_what_the_model_was_trained_on() -> None:
    """The corpus cuts functions out of files by other code; both must show the same text."""
    text = FILE + "\n\n" + DOCUMENTED + "\n\nasync def g(a, *, b=None):\n    await a\n    return b\n"
    shown = {f.name: f.source for f in function_texts(File("p", "a.py", text))}
    assert set(shown) == {"books", "after", "f", "g"}
    for name, source in shown.items():
        assert view_of(text, *focus(text, name)).source == source


lines = st.lists(st.sampled_from(["a = 1", "b", "", "    c", "        d", "\te", "# x", "  "]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(lines, lines, st.integers(0, 40), st.integers(1, 30), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_any_edit_of_the_view_is_the_same_edit_of_the_file(
    body: list[str], new: list[str], start: int, length: int, newline: str, documented: bool
) -> None:
    """The file without its hidden lines, dedented, is always the view; and what stands around it never changes."""
    doc = ["    '''Doc.", "    '''"] if documented else []
    inner = ["def f():", *doc, "    pass", *(f"    {line}" for line in body)]
    before, after = "class A:" + newline, "    x = 1" + newline
    text = before + "".join(f"    {line}{newline}" for line in inner) + after
    view = view_of(text, 2, 1 + len(inner))
    old = view.source[start : start + length]
    try:
        edited = view.edit(old, "\n".join(new))
    except EditError:
        return
    assert edited.source == view.source.replace(old, "\n".join(new))
    assert edited.file.startswith(before)
    assert edited.file.endswith(after)
    kept = [line for line in edited.lines if line.shown is not None]
    middle = "\n".join(line.text.removeprefix(view.margin) if line.text.strip() else "" for line in kept)
    blank = "\n".join(line if line.strip() else "" for line in edited.source.split("\n"))
    assert middle == blank
    if newline == "\r\n":
        assert edited.file.count("\n") == edited.file.count("\r\n")
