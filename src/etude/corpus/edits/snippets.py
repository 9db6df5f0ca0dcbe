"""Cuts snippets out of files: whole definitions between blank lines, so that small models get small files.

A snippet begins and ends at lines that follow a blank line, at one indentation, which is removed.
"""

import random
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from etude.code import parses, shown_lines

_MIN_LINES = 4  # of a snippet
_TRIES = 8
_REACH = 12  # possible cuts on each side of a change that are tried


def part(text: str, language: str, max_lines: int, rng: random.Random) -> str | None:
    """The text itself if it has at most `max_lines` lines, else a part of it that parses; None if there is no such
    part."""
    lines = shown_lines(text)
    if len(lines) <= max_lines:
        return text if len(lines) >= _MIN_LINES and parses(text, language) else None
    if language == "json":
        return None
    starts = [i for i in range(len(lines)) if _begins(lines, i)]
    for _ in range(_TRIES if starts else 0):
        start = rng.choice(starts)
        ends = [i for i in [*starts, len(lines)] if start + _MIN_LINES <= i <= start + max_lines]
        if ends and (cut := _cut(lines, start, rng.choice(ends))) is not None and parses(cut, language):
            return cut
    return None


def parts(before: str, after: str, language: str, max_lines: int, rng: random.Random) -> tuple[str, str] | None:
    """The same part of both texts around one of their differences, at most `max_lines` lines each; None if there is
    none."""
    old, new = shown_lines(before), shown_lines(after)
    if max(len(old), len(new)) <= max_lines:
        return (before, after) if parses(before, language) and parses(after, language) else None
    if language == "json":
        return None
    changes, both = _aligned(before, after)
    for first, last, low, high in rng.sample(changes, min(len(changes), _TRIES)):
        above = [(i, j) for i, j in both if i <= first and j <= low][-_REACH:]
        below = [(i, j) for i, j in both if i >= last and j >= high][:_REACH]
        rng.shuffle(above)
        for i, j in above:
            for end, stop in below:
                if not _MIN_LINES <= end - i <= max_lines or not _MIN_LINES <= stop - j <= max_lines:
                    continue
                one, other = _cut(old, i, end), _cut(new, j, stop)
                if one is None or other is None or one == other:
                    continue
                if parses(one, language) and parses(other, language):
                    return one, other
    return None


@lru_cache(maxsize=4)  # several draws in a row use one file
def _aligned(before: str, after: str) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]:
    """The changed runs of lines, and the (old, new) lines at which a part may begin or end in both texts."""
    old, new = shown_lines(before), shown_lines(after)
    codes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [code[1:] for code in codes if code[0] != "equal"]
    same = [(i + k, j + k) for tag, i, end, j, _ in codes if tag == "equal" for k in range(end - i)]
    return changes, [(0, 0), *((i, j) for i, j in same if _begins(old, i) and _begins(new, j)), (len(old), len(new))]


def _begins(lines: Sequence[str], i: int) -> bool:
    return bool(lines[i].strip()) and (i == 0 or not lines[i - 1].strip()) and lines[i].strip()[0] not in ")]}"


def _cut(lines: Sequence[str], start: int, end: int) -> str | None:
    """Lines [start, end) without the indentation of the first line; None if a line is indented less."""
    block = list(lines[start:end])
    while block and not block[-1].strip():
        block.pop()
    if len(block) < _MIN_LINES:
        return None
    margin = block[0][: len(block[0]) - len(block[0].lstrip())]
    if any(line.strip() and not line.startswith(margin) for line in block):
        return None
    return "\n".join(line[len(margin) :] if line.strip() else line.strip() for line in block) + "\n"
