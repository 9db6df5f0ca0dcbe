"""A function of a file as the compact dialect shows it, and edits of that view mapped back to the file exactly.

The view is the function without its decorators and docstring, dedented, with "\\n" line ends. It keeps the origin
of every line, so an edit changes only those lines of the file whose lines in the view changed. Nothing is parsed again
to locate the function, which an edit may have left broken.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from etude.code import first_line_of, occurrences, parse, parsed_lines

_PARSED = re.compile(r"([^\r\n]*)(\r\n|\n|\r|$)")  # lines as Python's parser counts them, with which a focus is named
_LINE = re.compile(r"([^\n]*?)(\r?\n|\Z)")


class EditError(ValueError):
    """A refused search and replace, with the message that the model reads; `matches` counts the matches."""

    def __init__(self, message: str, matches: int = 0) -> None:
        super().__init__(message)
        self.matches = matches


@dataclass(frozen=True)
class Line:
    """A line of the file without its end, and as shown; `shown` is None when the view leaves it out."""

    text: str
    end: str
    shown: str | None


@dataclass(frozen=True)
class View:
    """An immutable view; `edit` makes a new one. `before`, `lines` and `after` together are the file."""

    before: str
    lines: tuple[Line, ...]
    after: str
    margin: str
    newline: str

    @cached_property
    def source(self) -> str:
        """The function as shown, without a last newline."""
        return "\n".join(line.shown for line in self.lines if line.shown is not None)

    @property
    def body(self) -> str:
        """The file's text behind the view, hidden lines included."""
        return "".join(line.text + line.end for line in self.lines)

    @property
    def file(self) -> str:
        """The whole file."""
        return self.before + self.body + self.after

    def edit(self, old: str, new: str) -> View:
        """The view after replacing the only occurrence of `old`. Raises EditError."""
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
        _check(self.source, old, new)
        start = self.source.index(old)
        first = self.source.count("\n", 0, start)
        before = self.source[self.source.rfind("\n", 0, start) + 1 : start]
        after = self.source[start + len(old) :].partition("\n")[0]
        return self._replace(first, (before + old + after).split("\n"), (before + new + after).split("\n"))

    def _replace(self, first: int, old: Sequence[str], new: Sequence[str]) -> View:
        """Shown lines `old`, from shown line `first` on, become `new`; equal lines at both ends stay as they are."""
        head = common_prefix(old, new)
        tail = common_prefix(old[head:][::-1], new[head:][::-1])
        new = new[head : len(new) - tail]
        where = [i for i, line in enumerate(self.lines) if line.shown is not None]
        a, b = first + head, first + len(old) - tail  # shown lines [a, b) are replaced
        start = where[a] if a < len(where) else len(self.lines)
        stop = where[b - 1] + 1 if b > a else start
        hidden = [line for line in self.lines[start:stop] if line.shown is None]
        fresh = [Line(self.margin + text if text.strip() else text, self.newline, text) for text in new]
        if hidden:
            before = next(i for i in range(start, len(self.lines)) if self.lines[i].shown is None) - start
            cut = self._docstring_place(a, b, new, before)
            fresh = fresh if cut is None else [*fresh[:cut], *hidden, *fresh[cut:]]
        lines = [*self.lines[:start], *fresh, *self.lines[stop:]]
        ended = [line if line.end else replace(line, end=self.newline) for line in lines[:-1]]
        return replace(self, lines=(*ended, replace(lines[-1], end=self.lines[-1].end)))

    def _docstring_place(self, a: int, b: int, new: Sequence[str], default: int) -> int | None:
        """How many of the `new` lines stand before the hidden docstring; None when no place is left."""
        shown = self.source.split("\n")
        node = _function("\n".join([*shown[:a], *new, *shown[b:]]))
        if node is None:
            return min(default, len(new))
        first = first_line_of(node.body[0])
        if first == node.lineno:  # the body now stands on the line of `def`
            return None
        cut = min(max(first - 1 - a, 0), len(new))
        while cut and new[cut - 1].strip()[:1] in ("", "#"):  # comments belong to the body
            cut -= 1
        return cut


@lru_cache(maxsize=256)
def view_of(text: str, first_line: int, last_line: int) -> View:
    """The view of lines first_line to last_line (1-based, inclusive) of a file: the function there, or all of them."""
    lines = parsed_lines(text)
    before, body, after = lines[: first_line - 1], lines[first_line - 1 : last_line], lines[last_line:]
    if not any(body):
        return View(text, (Line("", "", ""),), "", "", _newline(text))
    return view_of_body("".join(before), "".join(body), "".join(after))


def view_of_body(before: str, body: str, after: str) -> View:
    """The view of the function in `body`, a run of whole lines, between the rest of the file."""
    pieces = [(text, end) for text, end in _PARSED.findall(body) if text or end]
    texts = [text for text, _ in pieces]
    node = _function("\n".join(texts))
    first = 0 if node is None else node.lineno - 1  # decorators are not shown
    hidden = () if node is None else _docstring_lines(node)
    kept = [i for i in range(first, len(texts)) if i not in hidden]
    shown = textwrap.dedent("\n".join(texts[i] for i in kept)).split("\n")
    at = dict(zip(kept, shown, strict=True))
    text = next((i for i in kept if at[i]), first)
    margin = texts[text][: len(texts[text]) - len(at[text])] if kept else ""
    lines = tuple(Line(line, end, at.get(i)) for i, (line, end) in enumerate(pieces))
    above = "".join(line + end for line, end in pieces[:first])
    return View(before + above, lines[first:], after, margin, _newline(body or before))


def edit_file(text: str, old: str, new: str) -> str:
    """A whole file after replacing the only occurrence of `old`; its line ends are kept. Raises EditError."""
    if "\r" in text:  # a view that shows every line as it is
        lines = tuple(Line(line, end, line) for line, end in _LINE.findall(text) if line or end)
        if lines[-1].end:
            lines = (*lines, Line("", "", ""))  # so that the shown text ends with a newline where the file does
        return View("", lines, "", "", _newline(text, r"\r?\n")).edit(old, new).file
    old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    _check(text, old, new)
    return text.replace(old, new)


def _check(text: str, old: str, new: str) -> None:
    """Raises EditError unless replacing `old` by `new` in `text` is one change."""
    if old == new:
        raise EditError("no change")
    matches = occurrences(text, old)
    if matches != 1:
        raise EditError("no match" if matches == 0 else f"{matches} matches", matches)


def moved(view: View, text: str) -> View | None:
    """The view of the same function in a file that was changed otherwise; None when it is not there."""
    body = view.body
    if text.startswith(view.before) and text.endswith(view.after) and len(view.before + view.after) < len(text):
        start, stop = len(view.before), len(text) - len(view.after)
    elif occurrences(text, body) == 1:
        start = text.index(body)
        stop = start + len(body)
    else:
        return None
    return view_of_body(text[:start], text[start:stop], text[stop:])


def _newline(text: str, pattern: str = r"\r\n|\n|\r") -> str:
    match = re.search(pattern, text)
    return match.group() if match else "\n"


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix, by halving: comparing slices is fast, a loop over bytes is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _function(text: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The first function of a piece of a file, with line numbers of that piece; None if it does not parse as one."""
    indented = text[:1] in (" ", "\t", "\f")
    tree: ast.AST | None = parse("if 1:\n" + text if indented else text.removeprefix("\ufeff"))
    if tree is None:
        return None
    if indented:
        ast.increment_lineno(tree, -1)
        tree = tree.body[0]  # type: ignore[attr-defined]  # the `if`
    node = next(iter(tree.body), None)  # type: ignore[attr-defined]
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    """Indices of the lines that hold nothing but the docstring; none when the body is only that."""
    first, *rest = node.body
    end = first.end_lineno or first.lineno
    if (
        not rest
        or ast.get_docstring(node, clean=False) is None
        or first.lineno == node.lineno
        or first_line_of(rest[0]) == end
    ):
        return range(0)
    return range(first.lineno - 1, end)
