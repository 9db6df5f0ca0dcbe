"""A repository as chunks that `search` can find: one per syntax node of Python, windows of lines of other text."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import blake3

from etude.code import counted_alike, first_line_of, parse

WINDOW = 40  # lines of a chunk of text without a known syntax
LONGEST = 120  # lines of a chunk; a longer function is cut, and each part bears its name
MAX_LINE = 400  # characters of a line that count

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class CodeChunk:
    """Lines `first` to `last` (1-based, inclusive) of a file; `name` is the name that they define, or ""."""

    path: str
    first: int
    last: int
    name: str
    text: str
    key: bytes = field(repr=False)  # blake3 of the chunk without line numbers: equal chunks are analysed once


@lru_cache(maxsize=4096)
def chunks(path: str, text: str) -> tuple[CodeChunk, ...]:
    """A file cut into chunks, in its order; blank ones are left out."""
    lines = [line.removesuffix("\r")[:MAX_LINE] for line in text.split("\n")]
    python = path.endswith((".py", ".pyi")) and counted_alike(text)
    tree = parse(text.removeprefix("\ufeff")) if python else None
    spans = list(_spans(tree.body, 1, len(lines), "")) if tree is not None else []
    parts = []
    for first, last, name in spans or [(1, len(lines), "")]:
        size = LONGEST if name else WINDOW
        for start in range(first, last + 1, size):
            end = min(start + size - 1, last)
            body = "\n".join(lines[start - 1 : end])
            if body.strip():
                key = blake3.blake3("\0".join((path, name, body)).encode("utf-8", "surrogatepass")).digest(16)
                parts.append(CodeChunk(path, start, end, name, body, key))
    return tuple(parts)


def _spans(body: Sequence[ast.stmt], first: int, last: int, inside: str) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, qualified name) of functions, of the rest of classes, and of the lines between.
    Comments right above a definition belong to it."""
    begin = first  # of lines that belong to no definition yet
    for node in body:
        if not isinstance(node, DEFINITIONS):
            continue
        start = first_line_of(node)
        end = node.end_lineno or node.lineno
        if start > begin:
            yield begin, start - 1, inside
        name = f"{inside}.{node.name}" if inside else node.name
        if isinstance(node, ast.ClassDef) and any(isinstance(child, DEFINITIONS) for child in node.body):
            yield from _spans(node.body, start, end, name)
        elif end >= max(start, begin):
            yield max(start, begin), end, name
        begin = max(begin, end + 1)
    if begin <= last:
        yield begin, last, inside
