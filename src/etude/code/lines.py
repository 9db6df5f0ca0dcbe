r"""Lines, as git, editors and agents' tools number them: "\n" alone ends one.

`str.splitlines` also cuts at form feeds, U+2028 and six other characters, so its numbers are nobody else's.
"""

import re
from typing import Any, AnyStr

_LONE = re.compile("\r(?!\n)")
_PARSED = re.compile("[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def lines_of(text: AnyStr, *, ends: bool = False) -> list[AnyStr]:
    r"""The lines of a text. The last "\n" ends the last line, so the empty text has none. A "\r" before a "\n" belongs
    to its line. With `ends`, lines keep their "\n", and joined they are the text."""
    newline: Any = "\n" if isinstance(text, str) else b"\n"
    lines: list[Any] = text.split(newline)
    last = lines.pop()
    if ends:
        lines = [line + newline for line in lines]
    return [*lines, last] if last else lines


def shown_lines(text: str) -> list[str]:
    r"""The lines of a text for people and models: without the "\r" of a "\r\n"."""
    return [line.removesuffix("\r") for line in lines_of(text)]


def parsed_lines(text: str) -> list[str]:
    r"""The lines with their ends as Python's parser counts them: "\n", "\r\n" and "\r" alone end one. The numbers of
    `ast` and `tokenize` are these."""
    return _PARSED.findall(text)


def counted_alike(text: str) -> bool:
    r"""Whether Python's parser counts the lines of a text as git does: no "\r" ends one."""
    return _LONE.search(text) is None


def occurrences(text: str, part: str) -> int:
    """The number of places at which a part begins in a text, overlapping ones among them; 0 for an empty part."""
    count, at = 0, text.find(part) if part else -1
    while at >= 0:
        count, at = count + 1, text.find(part, at + 1)
    return count
