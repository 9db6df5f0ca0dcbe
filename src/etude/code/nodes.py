"""Places of syntax nodes in a text: the share that does not parse, spans of nodes, definitions around a place.

Python is parsed by the standard library, in which one error spoils the whole text; the other languages by tree-sitter.
Places are offsets of characters.
"""

from __future__ import annotations

import ast
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

from etude.code.languages import first_line_of, has_syntax, parse, parses, tolerant_tree
from etude.code.lines import parsed_lines

Span = tuple[int, int]
_DEFINITION = re.compile(r"function|method|class|interface|struct|constructor|^(lexical|type|enum)_.*declaration$")
_TRIES = 4  # drawn places for each span that is wanted


class SyntaxNodes(ABC):
    """The nodes of a text that was parsed. `error_share` is the share of its bytes that does not parse."""

    error_share: float

    @abstractmethod
    def draw(self, rng: random.Random, count: int, longest: int) -> list[Span]:
        """Up to `count` spans of random nodes of at most `longest` characters, each smaller than the text."""

    @abstractmethod
    def definition(self, start: int, end: int) -> Span | None:
        """The smallest definition, in whole lines, that holds all of a place; None if there is none."""

    @abstractmethod
    def definitions(self) -> list[Span]:
        """Definitions that no other one holds, in whole lines, in order."""


def syntax_nodes(text: str, language: str) -> SyntaxNodes | None:
    """The nodes of a text; None for a language without nodes or without a parser here. JSON is not in it."""
    if language == "python":
        return _PythonNodes(text)
    tree = tolerant_tree(text, language)
    return None if tree is None else _TreeNodes(text, tree.root_node)


def error_share(text: str, language: str, nodes: SyntaxNodes | None) -> float:
    """The share of a text that does not parse; 0 where nothing can tell."""
    if nodes is not None:
        return nodes.error_share
    return 0.0 if not has_syntax(language) or parses(text, language) else 1.0


class _PythonNodes(SyntaxNodes):
    def __init__(self, text: str) -> None:
        self._lines = parsed_lines(text)
        self._starts = [0, *accumulate(map(len, self._lines))]
        self._bom = text.startswith("\ufeff")
        self._tree = parse(text.removeprefix("\ufeff"))
        self.error_share = float(self._tree is None)

    def draw(self, rng: random.Random, count: int, longest: int) -> list[Span]:
        if self._tree is None:
            return []
        kinds = ast.stmt | ast.Call | ast.BinOp | ast.Compare | ast.comprehension | ast.Dict | ast.List | ast.JoinedStr
        nodes = [node for node in ast.walk(self._tree) if isinstance(node, kinds) and hasattr(node, "end_lineno")]
        spans: list[Span] = []
        for node in rng.sample(nodes, min(len(nodes), _TRIES * count)):
            start, end = self._span(node)
            if 0 < end - start <= longest and end - start < self._starts[-1] and len(spans) < count:
                spans.append((start, end))
        return spans

    def definition(self, start: int, end: int) -> Span | None:
        held = [(low, high) for low, high in self._all if low <= start and end <= high]
        return min(held, key=lambda span: span[1] - span[0], default=None)

    def definitions(self) -> list[Span]:
        return _outermost(self._all)

    @cached_property
    def _all(self) -> list[Span]:
        """All definitions; a file that copies a suite is asked for thousands of places."""
        return [
            (self._starts[first_line_of(node) - 1], self._starts[node.end_lineno or node.lineno])
            for node in (ast.walk(self._tree) if self._tree is not None else ())
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]

    def _span(self, node: Any) -> Span:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        """The offset of a column in UTF-8 bytes."""
        text, start = self._lines[line - 1], self._starts[line - 1]
        if line == 1 and self._bom:
            text, start = text[1:], start + 1
        return start + (column if text.isascii() else len(text.encode("utf-8")[:column].decode("utf-8", "ignore")))


class _TreeNodes(SyntaxNodes):
    def __init__(self, text: str, root: Any) -> None:
        self._text, self._root = text, root
        self._data = None if text.isascii() else text.encode("utf-8", "surrogatepass")
        self._size = len(text) if self._data is None else len(self._data)
        self.error_share = _errors(root) / max(1, self._size)

    def draw(self, rng: random.Random, count: int, longest: int) -> list[Span]:
        spans: list[Span] = []
        for _ in range(_TRIES * count if self._size > 1 else 0):
            low = rng.randrange(self._size - 1)
            high = min(self._size - 1, low + rng.choice((4, 40, 200)))
            node = self._root.named_descendant_for_byte_range(low, high)
            if node is None or node.has_error or node.parent is None or len(spans) == count:
                continue
            start, end = self._character(node.start_byte), self._character(node.end_byte)
            part = self._text[start:end].rstrip()  # some nodes end with their line
            if 0 < len(part) <= longest and len(part) < len(self._text):
                spans.append((start, start + len(part)))
        return spans

    def definition(self, start: int, end: int) -> Span | None:
        node = self._root.named_descendant_for_byte_range(self._byte(start), self._byte(end))
        while node is not None and node.parent is not None:
            if _DEFINITION.search(node.type):
                return self._rows(node)
            node = node.parent
        return None

    def definitions(self) -> list[Span]:
        return _outermost(self._rows(node) for node in _defining(self._root, 3))

    def _rows(self, node: Any) -> Span:
        """A node in whole lines."""
        start, end = self._character(node.start_byte), self._character(node.end_byte)
        stop = self._text.find("\n", end)
        return self._text.rfind("\n", 0, start) + 1, len(self._text) if stop < 0 else stop + 1

    def _character(self, at: int) -> int:
        return at if self._data is None else len(self._data[:at].decode("utf-8", "ignore"))

    def _byte(self, at: int) -> int:
        return at if self._data is None else len(self._text[:at].encode("utf-8", "surrogatepass"))


def _errors(node: Any) -> int:
    """Bytes below a node that do not parse; a token that is missing counts as one."""
    if not node.has_error and not node.is_missing:
        return 0
    total, left = 0, [node]
    while left:
        node = left.pop()
        if node.is_error or node.is_missing:
            total += max(1, node.end_byte - node.start_byte)
        elif node.has_error:
            left += node.children
    return total


def _defining(node: Any, depth: int) -> Iterator[Any]:
    for child in node.named_children:
        if _DEFINITION.search(child.type):
            yield child
        elif depth:
            yield from _defining(child, depth - 1)


def _outermost(spans: Iterable[Span]) -> list[Span]:
    kept: list[Span] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not kept or start >= kept[-1][1]:
            kept.append((start, end))
    return kept
