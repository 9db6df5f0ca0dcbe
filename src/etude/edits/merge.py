"""The deterministic merge of a lazy sketch into a file: no model, no torch.

A sketch holds the lines that change and some of their neighbours. A marker ("# ... existing code ...", in any comment
style) replaces lines that are left out. The lines of a block that the file holds too are its anchors: every block
between markers is placed by the chain of anchors with the greatest weight. From its first anchor to its last the block
replaces the file, so two lines that are neighbours in the sketch delete the lines between them. Lines before the first
or after the last anchor replace similar lines, or are inserted.

With an apply model the merge is only a draft: the model decides every token.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import numpy as np

_GAP = 0.02  # cost of a line of the file between two anchors: 50 of them are worth one good anchor
_ALIKE = 0.6  # similarity of two lines from which one may be the other's new text
_SURELY_ALIKE = 0.75  # the same for a block that has no anchor
# For a block that may be new text at an end of the file: `import re` is not a new version of `import os`.
_ALMOST_EQUAL = 0.85
_COMMENT = re.compile(r"^\s*(?:#+|//+|--+|;+|%+|/\*+|\{/\*|<!--)\s*(.*?)\s*(?:\*+/\}?|-->)?\s*$")
_DOTS = re.compile(r"^(?:\.{3}|…)\s*|\s*(?:\.{3}|…)$")
_LEFT_OUT = re.compile(r"\b(existing|rest|remaining|remainder|unchanged|omitted)\b", re.I)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_COMMON = 64  # lines that the file holds more often are no evidence of a place
_SPELT_OUT = re.compile(
    r"(the )?(rest|remainder)( of( the| this)? \w+)?( (is|are|stays|remains))?( (unchanged|the same|as before))?"
    r"|(the )?(existing|unchanged|remaining|other) (code|lines|methods|functions|imports)( here| unchanged)?",
    re.I,
)
_FENCE = re.compile(r"^\s*```[^\n`]*\n(.*?)^\s*```\s*$", re.M | re.S)


class NoPlace(ValueError):
    """A block of the sketch matches no place in the file; the message quotes the block."""


@dataclass(frozen=True)
class Merge:
    """The merged text. `ambiguous` is true if some block fits another place equally well."""

    text: str
    ambiguous: bool


@dataclass(frozen=True)
class _SketchBlock:
    lines: list[str]
    marker_before: bool
    marker_after: bool


@dataclass(frozen=True)
class _LineReplacement:
    """Lines `start` to `end` (exclusive) of the file become `lines`."""

    start: int
    end: int
    lines: list[str]
    ambiguous: bool = False


def merge(text: str, sketch: str) -> Merge:
    """Apply `sketch` to `text`; line ends, a byte-order mark and a missing final newline stay as in `text`. Raises
    NoPlace for an empty sketch and for a block that matches no place."""
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    lines = _LINE.findall(text[len(bom) :])
    file = [line.rstrip() for line in lines]
    blocks = _blocks(sketch, set(file))
    if not blocks:
        raise NoPlace("the sketch is empty")
    taken: list[_LineReplacement] = []
    start = 0
    for block in blocks:
        placed = _without_layout(_place(block, file, start, taken), block, file)
        taken.append(placed)
        start = placed.end
    newline = "\r\n" if sum(line.endswith("\r\n") for line in lines) * 2 > len(lines) else "\n"
    merged, at = [], 0
    for placed in sorted(taken, key=lambda p: (p.start, p.end)):
        merged += lines[at : placed.start]
        own: dict[str, list[str]] = {}  # lines that the file has at the place keep their bytes (blanks, line ends)
        for j in range(placed.start, placed.end):
            own.setdefault(file[j], []).append(lines[j])
        merged += [own[line].pop(0) if own.get(line) else line + newline for line in placed.lines]
        at = max(at, placed.end)
    merged += lines[at:]
    result = "".join([line if line.endswith("\n") else line + newline for line in merged[:-1]] + merged[-1:])
    if text and not text.endswith("\n"):
        result = result.removesuffix(newline)
    return Merge(bom + result, any(placed.ambiguous for placed in taken))


def is_marker(line: str) -> bool:
    """Whether a line of a sketch is a marker for omitted code."""
    comment = _COMMENT.match(line)
    words = comment.group(1) if comment else line.strip()
    bare = _DOTS.sub("", _DOTS.sub("", words))
    if bare == words:
        return comment is not None and _SPELT_OUT.fullmatch(words.rstrip(".")) is not None
    # A bare "..." is Python; with nothing around it only a comment makes it a marker.
    both = _DOTS.sub("", words, count=1) != bare
    return comment is not None if not bare else both or _LEFT_OUT.search(bare) is not None


def _blocks(sketch: str, file: set[str]) -> list[_SketchBlock]:
    """The runs of lines between markers. A line that the file itself holds is never a marker."""
    fenced = _FENCE.findall(sketch)
    body = fenced[0] if len(fenced) == 1 else sketch
    blocks: list[_SketchBlock] = []
    lines: list[str] = []
    marker = False
    for line in [*body.removeprefix("\ufeff").splitlines(), None]:
        if line is not None and (line.rstrip() in file or not is_marker(line)):
            lines.append(line.rstrip())
            continue
        if any(lines):
            blocks.append(_SketchBlock(lines, marker, line is not None))
        lines, marker = [], True
    return blocks


def _place(block: _SketchBlock, file: list[str], start: int, taken: Sequence[_LineReplacement]) -> _LineReplacement:
    """The place of a block: after the block before it if it fits there well, else in any free lines."""
    for lines, keys in ((block.lines, file), (_strip(block.lines), _strip(file))):
        after = _chain(lines, keys, start, taken)
        anywhere = _chain(lines, keys, 0, taken) if start else after
        best = after if after.weight * 2 >= anywhere.weight else anywhere
        if best.pairs:
            return _extend(_shift(block.lines, file, best.pairs), file, best, taken)
    at_an_end = block.marker_before != block.marker_after
    alike = _most_similar(block.lines, file, taken, _ALMOST_EQUAL if at_an_end else _SURELY_ALIKE)
    if alike is not None:
        return alike
    if block.marker_before and not block.marker_after:
        return _LineReplacement(len(file), len(file), block.lines)
    if block.marker_after and not block.marker_before:
        return _LineReplacement(0, 0, block.lines)
    first = next(line for line in block.lines if line).strip()
    raise NoPlace(f"no line of the sketch's block that begins {first[:60]!r} is in the file")


def _without_layout(placed: _LineReplacement, block: _SketchBlock, file: list[str]) -> _LineReplacement:
    """The placement without blank lines between a block and a marker, if the file has blank lines there as well."""
    lines, before, after = placed.lines, placed.start, placed.end
    while block.marker_before and len(lines) > 1 and not lines[0] and before and not file[before - 1]:
        lines, before = lines[1:], before - 1
    while block.marker_after and len(lines) > 1 and not lines[-1] and after < len(file) and not file[after]:
        lines, after = lines[:-1], after + 1
    return replace(placed, lines=lines)


@dataclass(frozen=True)
class _Chain:
    pairs: list[tuple[int, int]]  # (line of the block, line of the file), both rising
    weight: float
    ambiguous: bool


def _chain(lines: list[str], file: list[str], start: int, taken: Sequence[_LineReplacement]) -> _Chain:
    """The chain of equal lines with the greatest score: the weights of its lines less `_GAP` per line of the file
    between them. One row per line of the block, a running maximum over the lines of the file: O(lines x file)."""
    n = len(file)
    free = np.ones(n, dtype=bool)
    free[:start] = False
    for placed in taken:
        free[placed.start : placed.end] = False
    where: dict[str, list[int]] = {}
    for j in np.flatnonzero(free).tolist():
        where.setdefault(file[j], []).append(j)
    # best[j]: greatest score + _GAP * line of a chain that ends before line j of the file, and which pair ends it.
    best = np.full(n + 1, -np.inf)
    owner = np.full(n + 1, -1, dtype=np.int64)
    pairs: list[tuple[int, int, int]] = []  # (i, j, index of the pair before)
    scores: list[float] = []
    for i, line in enumerate(lines):
        places = where.get(line, []) if line else []
        row = []
        for j in places if len(places) <= _COMMON else ():
            before = best[j] - _GAP * (j - 1)
            linked = before > 0
            weight = 0.2 + min(len(line.strip()), 40) / 50  # long lines are rare, so they count more
            row.append((j, weight + (before if linked else 0.0), owner[j] if linked else -1))
        for j, score, previous in row:
            pairs.append((i, j, int(previous)))
            scores.append(score)
            value = score + _GAP * j
            better = slice(j + 1, None)
            replace = best[better] < value
            best[better][replace] = value
            owner[better][replace] = len(pairs) - 1
    if not pairs:
        return _Chain([], 0.0, False)
    index = int(np.argmax(scores))
    ambiguous = sum(score >= scores[index] - 1e-9 for score in scores) > 1
    chain: list[tuple[int, int]] = []
    at = index
    while at >= 0:
        chain.append(pairs[at][:2])
        at = pairs[at][2]
    return _Chain(chain[::-1], scores[index], ambiguous)


def _shift(lines: list[str], file: list[str], pairs: Sequence[tuple[int, int]]) -> list[str]:
    """The block at the file's indentation, moved by the difference in its anchors."""
    offsets = Counter(_indent(file[j]) - _indent(lines[i]) for i, j in pairs if lines[i])
    offset = offsets.most_common(1)[0][0] if offsets else 0
    if offset == 0:
        return lines
    filler = "\t" if any(file[j].startswith("\t") for _, j in pairs) else " "
    return [
        (filler * offset + line if offset > 0 else line[min(-offset, _indent(line)) :]) if line else line
        for line in lines
    ]


def _extend(lines: list[str], file: list[str], chain: _Chain, taken: Sequence[_LineReplacement]) -> _LineReplacement:
    """The lines of the file under the chain and, beyond it, the lines of which the block's ends are new versions."""
    (first_i, start), (last_i, last) = chain.pairs[0], chain.pairs[-1]
    end = last + 1
    floor = max((p.end for p in taken if p.end <= start), default=0)
    ceiling = min((p.start for p in taken if p.start >= end), default=len(file))
    held = set(lines)
    # Blank lines beside a marker are layout of the sketch.
    if not any(lines[last_i + 1 :]):
        lines = lines[: last_i + 1]
    if not any(lines[:first_i]):
        lines, first_i, last_i = lines[first_i:], 0, last_i - first_i
    reach = 2 * (len(lines) - 1 - last_i) + 2
    for line in lines[last_i + 1 :]:
        for j in range(end, min(ceiling, last + 1 + reach)):
            if (line and file[j] == line) or (file[j] not in held and _alike(line, file[j])):
                end = j + 1
                break
    reach = 2 * first_i + 2
    top = start
    for line in reversed(lines[:first_i]):
        for j in range(start - 1, max(floor, top - reach) - 1, -1):
            if (line and file[j] == line) or (file[j] not in held and _alike(line, file[j])):
                start = j
                break
    return _LineReplacement(start, end, lines, chain.ambiguous)


def _most_similar(
    lines: list[str], file: list[str], taken: Sequence[_LineReplacement], threshold: float
) -> _LineReplacement | None:
    """The place of a block without anchors: the lines of the file of which its lines are clearly new versions."""
    covered = {j for p in taken for j in range(p.start, p.end)}
    places, ambiguous = set[int](), False
    for line in lines[:20]:
        alike = [
            (SequenceMatcher(None, line, other, autojunk=False).ratio(), -j)
            for j, other in enumerate(file)
            if j not in covered and len(line.strip()) > 4 and _alike(line, other)
        ]
        if alike and max(alike)[0] >= threshold:
            ratio, place = max(alike)
            places.add(-place)
            ambiguous |= sum(other == ratio for other, _ in alike) > 1
    # Lines that are far apart are not one place.
    if not places or max(places) + 1 - min(places) > len(lines) + 2:
        return None
    return _LineReplacement(min(places), max(places) + 1, lines, ambiguous)


def _alike(line: str, other: str) -> bool:
    if not line.strip() or not other.strip() or _indent(line) != _indent(other):
        return False
    matcher = SequenceMatcher(None, line.strip(), other.strip(), autojunk=False)
    return matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE


def _strip(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
