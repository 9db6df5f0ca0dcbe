"""Reads a sketch: its lines without a wrapper of prose and fences, and the blocks between its markers.

What the file holds is text. A marker is a comment with dots around or before words of leaving out, or three dots, a
space and such words. Other wordings ("# other methods", "# the rest of the code ...") may be comments as well: they are
markers only where lines are left out.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from etude.code import shown_lines

_COMMENT = re.compile(r"^\s*(?:#+|//+|--+|;+|%+|/\*+|\{/\*|<!--)\s*(.*?)\s*(?:\*+/\}?|-->)?\s*$")
_LEFT_OUT = re.compile(r"\b(existing|rest|remaining|remainder|unchanged|omitted)\b", re.I)
_BEFORE = re.compile(r"^(?:\.{3,}|…)\s*")
_AFTER = re.compile(r"\s*(?:\.{3,}|…)$")
_BARE = re.compile(r"(?:\.{3,}|…) [\w ,;:'()-]+?( ?(?:\.{3,}|…))?$")  # without a comment sign
_SPELT_OUT = re.compile(
    r"(the )?(rest|remainder)( of( the| this)? \w+)?( (is|are|stays|remains))?( (unchanged|the same|as before))?"
    r"|(the )?(existing|unchanged|remaining|other) (code|lines|methods|functions|imports)( here| unchanged)?",
    re.I,
)
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})([^`]*)")


class NoPlace(ValueError):
    """A block of the sketch matches no place in the file, or the sketch has no block; the message says which."""


@dataclass(frozen=True)
class SketchBlock:
    """Lines between two markers. `marker` is the number of the line before them if that line may be a comment, else
    -1."""

    lines: Sequence[str]
    marker_before: bool
    marker_after: bool
    marker: int = -1

    @property
    def trimmed(self) -> Sequence[str]:
        """The lines without blank lines at the ends, which are layout of the sketch."""
        filled = [i for i, line in enumerate(self.lines) if line.strip()]
        return self.lines[filled[0] : filled[-1] + 1]

    @property
    def name(self) -> str:
        """The block as messages call it."""
        first = next(line for line in self.lines if line.strip()).strip()
        return f"the sketch's block that begins {first[:60]!r}"


def sketch_lines(sketch: str, held: Collection[str], language: str | None) -> Sequence[str]:
    """The lines of a sketch without the fence and the prose around it. `held` are the lines of the file: if one stands
    outside of the fence, the fence is a part of the text. Raises NoPlace for several fenced blocks."""
    lines = shown_lines(sketch.removeprefix("\ufeff"))
    fences = [i for i, line in enumerate(lines) if _FENCE.fullmatch(line)]
    if not fences or lines[fences[0]].rstrip() in held:
        return lines
    first, last = fences[0], fences[-1]
    info = _FENCE.fullmatch(lines[first])
    outside = lines[:first] if len(fences) == 1 else [*lines[:first], *lines[last + 1 :]]
    if any(line.strip() and (line.rstrip() in held or is_marker(line)) for line in outside):
        return lines
    if len(fences) == 1:
        return lines[first + 1 :] if not any(map(str.strip, outside)) else lines
    if len(fences) == 2 or (info is not None and info[1].strip() in ("markdown", "md")) or language == "markdown":
        return lines[first + 1 : last]
    raise NoPlace("the sketch has several fenced blocks, and it is not said which of them are of this file")


def sketch_blocks(lines: Sequence[str], held: Collection[str], needless: Collection[int]) -> list[SketchBlock]:
    """The runs of lines between markers. `held` are lines of the file, `needless` the numbers of lines at which nothing
    is left out: neither are markers."""
    blocks: list[SketchBlock] = []
    block: list[str] = []
    before, doubtful = False, -1
    for number, line in enumerate([*lines, None]):
        if line is not None and (line.rstrip() in held or number in needless or not is_marker(line)):
            block.append(line)
            continue
        sure = line is None or _is_sure(line)
        if any(map(str.strip, block)):
            blocks.append(SketchBlock(block, before, line is not None, doubtful))
            doubtful = -1 if sure else number
        elif sure:
            doubtful = -1
        block, before = [], True
    return blocks


def is_marker(line: str) -> bool:
    """Whether a line of a sketch is a marker for omitted code, or may be one."""
    if _is_sure(line):
        return True
    comment = _COMMENT.match(line)
    if comment is None:
        return False
    words = _AFTER.sub("", comment.group(1))
    dots = words != comment.group(1)
    return _SPELT_OUT.fullmatch(words.rstrip(".")) is not None or (dots and _LEFT_OUT.search(words) is not None)


def _is_sure(line: str) -> bool:
    """Whether a line can only be a marker."""
    comment = _COMMENT.match(line)
    if comment is None:
        bare = _BARE.fullmatch(line.strip())
        return bare is not None and (bool(bare[1]) or _LEFT_OUT.search(line) is not None)
    words = _BEFORE.sub("", comment.group(1))
    if words == comment.group(1):
        return False
    return not words or _AFTER.sub("", words) != words or _LEFT_OUT.search(words) is not None
