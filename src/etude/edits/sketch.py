"""Draws lazy sketches of a known edit, in the manner of agents: changed lines, some neighbours, markers.

A deletion must be visible, so the sketch shows its two neighbours next to each other; otherwise "deleted" could not be
told from "left out". One to three kinds of noise make a sketch look like those that models write. Noise may not remove
lines that determine the result; `determined` checks this with the deterministic merge.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from etude.code import line_comment, shown_lines
from etude.edits.merge import merge
from etude.edits.sketch_blocks import NoPlace

MARKER = "... existing code ..."
_WORDINGS = (
    "... existing code ...", "... rest of code ...", "... rest of the file unchanged ...", "... unchanged ...",
    "...", "... (existing code) ...", "rest of code unchanged", "... rest of the code ...", "... remaining code ...",
    "existing code here", "... other methods unchanged ...", "... rest of file ...",
)  # fmt: skip
_PROSE = (
    "Here is the updated code:",
    "I changed the following:",
    "Update the file like this:",
    "Apply this edit:",
    "Here's the change:",
    "The fix is below.",
    "Edit:",
)
_AFTERWARDS = (
    "",
    "",
    "The rest stays as it is.",
    "Everything else is unchanged.",
    "Let me know if anything else is needed.",
)
_DEFINITION = re.compile(
    r"^\s*(?:async\s+def|def|class|function|export\s|func|public|private|protected|static|struct)\b"
)


@dataclass(frozen=True)
class Hunk:
    """Lines [start, end) of the file become lines [low, high) of the result."""

    start: int
    end: int
    low: int
    high: int


@dataclass(frozen=True)
class Region:
    """A run of the result's lines in the sketch: [low, high), and whether it contains a deletion."""

    low: int
    high: int
    deletion: bool


@dataclass(frozen=True)
class Sketch:
    """The sketch, the kinds of noise in it, and whether its deterministic merge gives the result."""

    text: str
    noise: tuple[str, ...]
    merges: bool


@dataclass(frozen=True)
class _SketchDraft:
    """A sketch before it is written: blocks of lines in order, and the way in which they are joined."""

    blocks: tuple[tuple[str, ...], ...]
    heads: tuple[str, ...]  # an enclosing definition's line before each block, or ""
    marker: str
    before: bool  # a marker before the first block
    after: bool
    fence: str | None = None
    prose: tuple[str, str] | None = None


def edit_hunks(file: Sequence[str], result: Sequence[str]) -> list[Hunk]:
    """The changed runs of lines, in order."""
    codes = SequenceMatcher(None, file, result, autojunk=False).get_opcodes()
    return [Hunk(*code[1:]) for code in codes if code[0] != "equal"]


def determined(before: str, after: str, sketch: str) -> bool:
    """Whether the merge finds one place for every block, and the result is `after`, byte for byte."""
    try:
        merged = merge(before, sketch)
    except NoPlace:
        return False
    return merged.text == after and not merged.doubt


def draw_sketch(before: str, after: str, language: str, rng: random.Random, kinds: int | None = None) -> Sketch | None:
    """A noisy sketch that determines `after`; None if even a generous one does not. `kinds` is the number of kinds of
    noise, one to three if None. First a clean sketch is found from which the merge makes `after` without doubt, with
    more context if need be. Noise is kept only while no block fits equally well elsewhere, and noise that removes
    context only if the merge stays right. So a noisy sketch may mislead the merge, but it still determines the
    result."""
    file, result = shown_lines(before), shown_lines(after)
    changes = edit_hunks(file, result)
    if not changes:
        return None
    sizes = [rng.choices((1, 2, 3), (3, 4, 3))[0], 3, 6, 12]
    for size in sizes:
        regions = _regions(changes, result, size)
        draft = _draft(regions, result, language)
        if determined(before, after, _written(draft)):
            break
    else:
        return None
    wanted = rng.sample(list(NOISE), rng.randint(1, 3) if kinds is None else kinds)
    noise: list[str] = []
    for kind in sorted(wanted, key=list(NOISE).index):
        noisy = NOISE[kind](draft, regions, result, language, rng)
        if noisy is None or not _still_determined(kind, before, after, _written(noisy)):
            continue
        draft, noise = noisy, [*noise, kind]
    text = _written(draft)
    return Sketch(text, tuple(noise), determined(before, after, text))


def draw_no_op(before: str, language: str, rng: random.Random) -> Sketch | None:
    """A sketch of some unchanged lines, since a model must also learn to change nothing. None for a short text."""
    lines = shown_lines(before)
    if len(lines) < 4:
        return None
    low = rng.randrange(len(lines) - 2)
    region = Region(low, min(len(lines), low + rng.randint(2, 6)), False)
    text = _written(_draft([region], lines, language))
    return Sketch(text, ("no-op",), True) if determined(before, before, text) else None


def _regions(changes: Sequence[Hunk], result: Sequence[str], size: int) -> list[Region]:
    """The regions of the result in the sketch: hunks with `size` lines of context, near ones joined."""
    regions: list[Region] = []
    for hunk in changes:
        low, high = max(0, hunk.low - size), min(len(result), hunk.high + size)
        deletion = hunk.low == hunk.high or hunk.end - hunk.start > hunk.high - hunk.low
        if regions and low - regions[-1].high <= 1:  # a marker for one line is no shorter
            last = regions.pop()
            low, deletion = last.low, deletion or last.deletion
        regions.append(Region(low, high, deletion))
    return regions


def _draft(regions: Sequence[Region], result: Sequence[str], language: str) -> _SketchDraft:
    return _SketchDraft(
        blocks=tuple(tuple(result[r.low : r.high]) for r in regions),
        heads=("",) * len(regions),
        marker=line_comment(language, MARKER),
        before=regions[0].low > 0,
        after=regions[-1].high < len(result),
    )


def _written(draft: _SketchDraft) -> str:
    lines: list[str] = []
    if draft.before:
        lines.append(_indented(draft.marker, draft.heads[0] or draft.blocks[0]))
    for i, (head, block) in enumerate(zip(draft.heads, draft.blocks, strict=True)):
        if i:
            lines.append(_indented(draft.marker, head or block))
        if head:
            lines += [head, _indented(draft.marker, block)]
        lines += block
    if draft.after:
        lines.append(_indented(draft.marker, draft.blocks[-1][-1:]))
    if draft.fence is not None:
        lines = [f"```{draft.fence}", *lines, "```"]
    if draft.prose is not None:
        lines = [draft.prose[0], "", *lines, *(["", draft.prose[1]] if draft.prose[1] else [])]
    return "\n".join(lines) + "\n"


def _indented(marker: str, block: Sequence[str]) -> str:
    """The marker at the indentation of the first indented line."""
    lines = [block] if isinstance(block, str) else block
    first = next((line for line in lines if line.strip()), "")
    return first[: len(first) - len(first.lstrip())] + marker


def _still_determined(kind: str, before: str, after: str, sketch: str) -> bool:
    """Whether noise may stay: noise that removes context must leave the merge right, other kinds lose nothing and may
    mislead it."""
    if kind in _LOSING:
        return determined(before, after, sketch)
    try:
        return not merge(before, sketch).doubt
    except NoPlace:
        return False


# --- kinds of noise: each gives a new draft, or None where it has no place -----------------------------------------


def _wording(
    draft: _SketchDraft, _: Sequence[Region], __: Sequence[str], language: str, rng: random.Random
) -> _SketchDraft:
    styles = [language, language, "javascript", "python"]
    return replace(draft, marker=line_comment(rng.choice(styles), rng.choice(_WORDINGS)))


def _one_sided(
    draft: _SketchDraft, regions: Sequence[Region], result: Sequence[str], _: str, rng: random.Random
) -> _SketchDraft | None:
    """Drop the context before or after a block's change, unless the block contains a deletion."""
    places = [i for i, region in enumerate(regions) if not region.deletion and len(draft.blocks[i]) > 3]
    if not places:
        return None
    at = rng.choice(places)
    block = draft.blocks[at]
    cut = block[1:] if rng.random() < 0.5 else block[:-1]
    return replace(draft, blocks=(*draft.blocks[:at], cut, *draft.blocks[at + 1 :]))


def _indent(
    draft: _SketchDraft, _: Sequence[Region], __: Sequence[str], ___: str, rng: random.Random
) -> _SketchDraft | None:
    """Move the whole sketch to the left or to the right."""
    shown = [line for block in draft.blocks for line in block if line.strip()]
    room = min((len(line) - len(line.lstrip(" ")) for line in shown), default=0)
    if any(line.startswith("\t") for line in shown) or any(draft.heads):
        return None
    if room == 0:
        filler = " " * rng.choice((2, 4))
        return replace(draft, blocks=tuple(tuple(filler + x if x.strip() else x for x in b) for b in draft.blocks))
    return replace(draft, blocks=tuple(tuple(x[room:] if x.strip() else x for x in b) for b in draft.blocks))


def _reordered(
    draft: _SketchDraft, _: Sequence[Region], __: Sequence[str], ___: str, rng: random.Random
) -> _SketchDraft | None:
    if len(draft.blocks) < 2 or not (draft.before and draft.after):
        return None
    order = list(range(len(draft.blocks)))
    rng.shuffle(order)
    if order == sorted(order):
        order.reverse()
    blocks, heads = zip(*((draft.blocks[i], draft.heads[i]) for i in order), strict=True)
    return replace(draft, blocks=blocks, heads=heads)


def _enclosing(
    draft: _SketchDraft, regions: Sequence[Region], result: Sequence[str], _: str, rng: random.Random
) -> _SketchDraft | None:
    """Add the line of the class or function around a block, with a marker for the lines between."""
    at = rng.randrange(len(regions))
    block = [line for line in draft.blocks[at] if line.strip()]
    if not block or len(regions) != len(draft.blocks):
        return None
    depth = min(len(line) - len(line.lstrip()) for line in block)
    for j in range(regions[at].low - 2, -1, -1):
        line = result[j]
        if line.strip() and len(line) - len(line.lstrip()) < depth:
            if not _DEFINITION.match(line):
                return None
            return replace(draft, heads=(*draft.heads[:at], line, *draft.heads[at + 1 :]))
    return None


def _stale(
    draft: _SketchDraft, regions: Sequence[Region], _: Sequence[str], __: str, rng: random.Random
) -> _SketchDraft | None:
    """Make a line of context look older: without its trailing comment or with other blanks inside."""
    places = [
        (i, j)
        for i, block in enumerate(draft.blocks)
        for j in (0, len(block) - 1)
        if len(block) > 4 and not regions[i].deletion and re.search(r"\S {2,}\S|\S\s+(#|//)\s", block[j])
    ]
    if not places:
        return None
    i, j = rng.choice(places)
    block = list(draft.blocks[i])
    line = block[j]
    margin = line[: len(line) - len(line.lstrip())]
    block[j] = margin + re.sub(r" {2,}", " ", re.sub(r"\s+(#|//)\s.*$", "", line.strip()))
    return replace(draft, blocks=(*draft.blocks[:i], tuple(block), *draft.blocks[i + 1 :]))


def _fence(
    draft: _SketchDraft, _: Sequence[Region], __: Sequence[str], language: str, rng: random.Random
) -> _SketchDraft | None:
    if any(line.lstrip().startswith("```") for block in draft.blocks for line in block):
        return None
    return replace(draft, fence=rng.choice((language, "")))


def _prose(
    draft: _SketchDraft, a: Sequence[Region], b: Sequence[str], language: str, rng: random.Random
) -> _SketchDraft | None:
    """Add a sentence before or after the block, which then needs a fence."""
    fenced = draft if draft.fence is not None else _fence(draft, a, b, language, rng)
    return fenced and replace(fenced, prose=(rng.choice(_PROSE), rng.choice(_AFTERWARDS)))


_Noise = Callable[[_SketchDraft, Sequence[Region], Sequence[str], str, random.Random], _SketchDraft | None]
# In the order in which they are made: kinds that must keep the merge right come first, and kinds that move blocks come
# after kinds that name blocks by their place.
NOISE: dict[str, _Noise] = {
    "one-sided": _one_sided,
    "enclosing": _enclosing,
    "stale": _stale,
    "indent": _indent,
    "reordered": _reordered,
    "wording": _wording,
    "fence": _fence,
    "prose": _prose,
}
_LOSING = ("one-sided",)
