"""Survival of an edit in a later text: the share of its characters that are alive, by an alignment of tokens.

Texts are compared as tokens, without the differences that formatters make (`_normalised`): whitespace and line breaks,
the kind of quotes, commas before a closing bracket, and backslashes that continue a line. Parentheses that a formatter
adds cost nothing; parentheses that it removes, rewritten numbers (0XAB) and escapes in strings count as changed.

The alignment maximises the matched characters, and prefers text outside of the edit where both are possible, so that a
removed edit does not match its own surroundings. Matches that are too short (a bracket here, a name there) do not
count. The rest of the edit is then sought as whole blocks elsewhere in the text: a moved block is alive.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Literal

import numpy as np

MAX_LINES = 16_000
"""Lines of a file whose edits are followed; the alignment of two such files takes about two seconds and 64 MB."""
MAX_CELLS = 1 << 28  # of the table of an alignment, two bits each
LEAST_RUN = 4  # tokens that must match together, unless they are a whole line of the edit
LEAST_BLOCK = 8  # tokens of a moved block, at least
SAME_FILE = 0.5  # share of the tokens that a renamed file keeps, as in git's rename detection
GONE = 0.05  # share alive below which an edit is gone; a single bracket of it may still match
BACK = 0.95  # share of the replaced text that is back after an undo

_TOKEN = re.compile(r"\w+|[^\w\s]")
_CLOSING = frozenset(")]}>")


@dataclass(frozen=True)
class AppliedHunk:
    """One edit of a file: at line `first` (0-based) of the text before, lines `old` became lines `new`, which begin at
    line `place` of the text after. Lines have no line ends."""

    first: int
    old: tuple[str, ...]
    place: int
    new: tuple[str, ...]


Fate = Literal["alive", "undone", "changed"]


def hunks(before: str, after: str) -> list[AppliedHunk]:
    """The edits that turn `before` into `after`, in their order, by an alignment of lines. Raises ValueError for texts
    of more than MAX_LINES lines."""
    old, new = lines_of(before), lines_of(after)
    partners = _partners(old, new, [1] * len(old))
    result: list[AppliedHunk] = []
    first = place = 0
    for line, partner in [*((i, j) for i, j in enumerate(partners) if j >= 0), (len(old), len(new))]:
        if line > first or partner > place:
            result.append(AppliedHunk(first, tuple(old[first:line]), place, tuple(new[place:partner])))
        first, place = line + 1, partner + 1
    return result


def alive(applied: str, place: int, count: int, later: str) -> float:
    """Share, in [0, 1], of the characters in lines `place` to `place + count - 1` of `applied` that are in `later`.

    Whitespace is not counted. 1.0 for an edit without characters, such as a deletion: see `fate`. Raises ValueError
    for texts of more than MAX_LINES lines.
    """
    (tokens, lines), (other, others) = _normalised(applied), _normalised(later)
    if len(tokens) * len(other) > MAX_CELLS:  # whole lines instead
        (tokens, lines), (other, others) = _joined(tokens, lines), _joined(other, others)
    inside = [place <= line < place + count for line in lines]
    total = sum(len(token) for token, yes in zip(tokens, inside, strict=True) if yes)
    if not total:
        return 1.0
    # A match outside of the edit weighs a little more than a match inside; all extras weigh less than a character.
    weights = [(len(token) << 24) + (not yes) for token, yes in zip(tokens, inside, strict=True)]
    partners = _partners(tokens, other, weights, inside)
    shares: list[float] = []
    # Pieces that match in place may hide that the whole was moved, so the second count begins without them.
    for kept in (_kept(partners, lines, inside), [False] * len(tokens)):
        _find_moved(tokens, other, inside, partners, kept)
        shares.append(sum(len(token) for token, yes in zip(tokens, kept, strict=True) if yes) / total)
    return max(shares)


def fate(before: str, applied: str, edit: AppliedHunk, later: str) -> tuple[float, Fate]:
    """The share of the edit that is alive in `later`, and the fate of the whole.

    "undone": the text before the edit is back, or nothing is in the edit's place; "changed": another text is. For an
    edit that only removes lines, the share is that of the characters that stayed away.
    """
    if not any(line.strip() for line in edit.new):
        back = alive(before, edit.first, len(edit.old), later) if any(line.strip() for line in edit.old) else 0.0
        return 1.0 - back, "undone" if back >= BACK else "alive"
    share = alive(applied, edit.place, len(edit.new), later)
    if share > GONE:
        return share, "alive"
    if any(line.strip() for line in edit.old) and alive(before, edit.first, len(edit.old), later) >= BACK:
        return share, "undone"
    return share, "changed" if _replaced(before, applied, edit, later) else "undone"


def _replaced(before: str, applied: str, edit: AppliedHunk, later: str) -> bool:
    """Whether `later` has new lines in place of the edit, compared with the text after the edit and, for an edit that
    removed no lines, also with the text before it."""
    over = range(edit.place, edit.place + len(edit.new))
    if not any(h.new and h.first in over for h in hunks(applied, later)):
        return False
    near = range(edit.first - 1, edit.first + 2)
    return bool(edit.old) or any(h.new and h.first in near for h in hunks(before, later))


def renamed(text: str, candidates: Mapping[str, str]) -> str | None:
    """The new path of a renamed file with `text`: the candidate (path -> text) that shares the most tokens with it, at
    least SAME_FILE of the larger; None without such a candidate."""
    ours = Counter(_normalised(text)[0])
    best, most = None, SAME_FILE
    for path, other in sorted(candidates.items()):
        theirs = Counter(_normalised(other)[0])
        larger = max(ours.total(), theirs.total())
        share = (ours & theirs).total() / larger if larger else 0.0
        if share > most or (share == most and best is None):
            best, most = path, share
    return best


def characters(lines: Sequence[str]) -> int:
    """The number of characters of an edit, to which shares refer."""
    return sum(len(token) for token in _normalised("\n".join(lines))[0])


def lines_of(text: str) -> list[str]:
    """Lines without their ends, as git and editors count them: a form feed ends none."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _normalised(text: str) -> tuple[list[str], list[int]]:
    """Tokens, without formatters' differences, and their lines."""
    tokens: list[str] = []
    lines: list[int] = []
    for number, line in enumerate(lines_of(text)):
        for token in _TOKEN.findall(line.rstrip().removesuffix("\\")):
            if token in _CLOSING and tokens and tokens[-1] == ",":
                del tokens[-1], lines[-1]
            tokens.append('"' if token == "'" else token)
            lines.append(number)
    return tokens, lines


def _joined(tokens: Sequence[str], lines: Sequence[int]) -> tuple[list[str], list[int]]:
    """Lines in place of tokens, for texts that are too long to be aligned token by token."""
    whole: dict[int, str] = {}
    for token, line in zip(tokens, lines, strict=True):
        whole[line] = whole.get(line, "") + token
    return list(whole.values()), list(whole)


def _partners(
    a: Sequence[str], b: Sequence[str], weights: Sequence[int], inside: Sequence[bool] | None = None
) -> list[int]:
    """For each element of `a` its partner in `b`, or -1: an order-preserving matching of greatest weight.

    Equal beginnings and ends are matched directly, as far as they lie outside of the edit (`inside`). Raises ValueError
    if the rest has more than MAX_CELLS pairs.
    """
    edit = [i for i, yes in enumerate(inside) if yes] if inside else []
    before, after = (edit[0], len(a) - edit[-1] - 1) if edit else (len(a), len(a))
    head = _common(a[:before], b)
    tail = _common(a[max(head, len(a) - after) :][::-1], b[head:][::-1])
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    middle = _align(middle_a, middle_b, weights[head : len(a) - tail])
    partners = [*range(head), *(j + head if j >= 0 else -1 for j in middle), *range(len(b) - tail, len(b))]
    assert len(partners) == len(a)
    return partners


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _align(a: Sequence[str], b: Sequence[str], weights: Sequence[int]) -> list[int]:
    """Heaviest common subsequence, row by row: best(i, j) = max(best(i-1, j), best(i, j-1), best(i-1, j-1) + w_i)."""
    if not a or not b:
        return [-1] * len(a)
    if len(a) * len(b) > MAX_CELLS:
        raise ValueError(f"texts of {len(a)} and {len(b)} parts that differ are too long to be compared")
    numbers = {part: n for n, part in enumerate(dict.fromkeys([*a, *b]))}
    other = np.array([numbers[part] for part in b])
    row = np.zeros(len(b) + 1, dtype=np.int64)
    up: list[np.ndarray] = []
    left: list[np.ndarray] = []
    for part, weight in zip(a, weights, strict=True):
        taken = np.where(other == numbers[part], row[:-1] + weight, 0)
        new = np.concatenate(([0], np.maximum.accumulate(np.maximum(taken, row[1:]))))
        up.append(np.packbits(new == row))
        left.append(np.packbits(new[1:] == new[:-1]))
        row = new
    partners = [-1] * len(a)
    i, j = len(a) - 1, len(b) - 1
    while i >= 0 and j >= 0:
        if _bit(up[i], j + 1):
            i -= 1
        elif _bit(left[i], j):
            j -= 1
        else:
            partners[i] = j
            i, j = i - 1, j - 1
    return partners


def _bit(packed: np.ndarray, place: int) -> bool:
    return bool(packed[place >> 3] >> (7 - (place & 7)) & 1)


def _kept(partners: Sequence[int], lines: Sequence[int], inside: Sequence[bool]) -> list[bool]:
    """The tokens of the edit that count as alive. A run may be interrupted by up to two inserted tokens."""
    kept = [False] * len(partners)
    start = 0
    for end in range(1, len(partners) + 1):
        goes_on = end < len(partners) and partners[end - 1] >= 0 and 0 < partners[end] - partners[end - 1] <= 3
        if goes_on:
            continue
        if partners[start] >= 0:
            long = end - start >= LEAST_RUN
            whole = (start == 0 or lines[start - 1] != lines[start]) and (
                end == len(lines) or lines[end] != lines[end - 1]
            )
            for i in range(start, end):
                kept[i] = inside[i] and (long or whole)
        start = end
    return kept


def _find_moved(
    a: Sequence[str], b: Sequence[str], inside: Sequence[bool], partners: Sequence[int], kept: list[bool]
) -> None:
    """Marks dead tokens of the edit as kept that occur, as a block, among the tokens of `b` without a partner."""
    taken = {j for i, j in enumerate(partners) if j >= 0 and (kept[i] or not inside[i])}
    dead = [i for i, yes in enumerate(inside) if yes and not kept[i]]
    free = [j for j in range(len(b)) if j not in taken]
    if len(free) * len(dead) > MAX_CELLS:
        return
    least = max(LEAST_RUN, min(LEAST_BLOCK, len(dead)))
    # Barriers, which equal no token, separate tokens that are not neighbours in their text.
    words, spots = _apart(a, dead, "\0a")
    others, places = _apart(b, free, "\0b")
    while len(spots) >= least:
        block = SequenceMatcher(None, words, others, autojunk=False).find_longest_match()
        if block.size < least:
            return
        for i in spots[block.a : block.a + block.size]:
            kept[i] = True
        words[block.a : block.a + block.size] = ["\0a"]
        spots[block.a : block.a + block.size] = [-1]
        others[block.b : block.b + block.size] = ["\0b"]
        places[block.b : block.b + block.size] = [-1]


def _apart(text: Sequence[str], chosen: Sequence[int], barrier: str) -> tuple[list[str], list[int]]:
    words: list[str] = []
    spots: list[int] = []
    for place, i in enumerate(chosen):
        if place and chosen[place - 1] != i - 1:
            words.append(barrier)
            spots.append(-1)
        words.append(text[i])
        spots.append(i)
    return words, spots
