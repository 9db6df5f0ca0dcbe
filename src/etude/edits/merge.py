"""The deterministic merge of a lazy sketch into a file: no model, no torch.

A sketch holds the lines that change and some of their neighbours. A marker ("# ... existing code ...", in any comment
style) replaces lines that are left out. A block between markers replaces the lines of the file from its first line to
its last (`placement`), so two lines that are neighbours in the sketch delete the lines between them. Where the file has
no line for an end of a block, the lines there are new.

Lines are compared without the white space at their ends; a line that the file holds keeps its bytes. A merge that may
mean another text has a `doubt`, and nobody writes it without a model: with an apply model the merge is a draft, and
the model decides every token.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from etude.code import has_syntax, lines_of, parses, shown_lines
from etude.edits.indentation import at_file_indentation, indent
from etude.edits.placement import BLANK, UNKNOWN, PlacedBlock, Placement, place
from etude.edits.sketch_blocks import NoPlace, SketchBlock, is_marker, sketch_blocks, sketch_lines

MARGIN = 2.5
"""A placement with a smaller margin is one of several, chosen on the same commits as the costs of `placement`."""
_ALIKE = 0.6  # similarity of two lines from which one may be the other's new text
_SURELY_ALIKE = 0.75  # the same for a block that has no line of the file
_COMPARED = 400  # characters of a line, at most: the time is quadratic in them
_DELETED = 20  # lines that a block may delete beyond four times the lines that it shows


_DEFINITION = re.compile(
    r"\s*(?:(?:async|export|default|public|private|protected|static|abstract)\s+)*"
    r"(?:(?:def|class|function|func|struct|interface|enum|describe|it|test)\b.{6})"
)

_ROLE = re.compile(
    r"\s*(?:(return|raise|throw|break|continue)\b|(?:const |let |var )?([\w.\[\]'\"]+)(?:\s*:[^=]*)?\s*:?=[^=]"
    r"|((?:def|class|func|function) \w+))"
)

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Merge:
    """The merged text. `doubt` is a sentence on why the sketch may mean another one, or empty."""

    text: str
    doubt: str = ""


@dataclass(frozen=True)
class _LineReplacement:
    """Lines `start` to `end` (exclusive) of the file become `lines`."""

    start: int
    end: int
    lines: Sequence[str]


def merge(text: str, sketch: str, language: str | None = None) -> Merge:
    """Apply `sketch` to `text`; line ends, a byte-order mark and a missing final newline stay as in `text`. With a
    `language`, a result that does not parse where the text did is in doubt. Raises NoPlace for an empty sketch and for
    a block that matches no place."""
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    lines = lines_of(text[len(bom) :], ends=True)
    file = [line.rstrip() for line in lines]
    shown = sketch_lines(sketch, set(file), language)
    if not any(map(str.strip, shown)):
        raise NoPlace("the sketch is empty")
    if not any(file):
        whole = [line for line in shown if not is_marker(line)]
        doubt = "" if whole == shown else "the sketch has a marker, and the file is empty: leave markers out"
        return Merge(bom + "\n".join([*whole, ""]), doubt)
    needless = set[int]()
    while True:
        blocks = sketch_blocks(shown, set(file), needless)
        if not blocks:
            raise NoPlace("the sketch is empty")
        replacements, doubt = _placed(blocks, file)
        gaps = zip(blocks[1:], replacements, replacements[1:], strict=False)
        # A wording that may be a marker or a comment is a comment if nothing is left out there.
        more = {
            b.marker
            for b, one, other in gaps
            if b.marker >= 0 and one.end <= other.start and not any(file[one.end : other.start])
        }
        if not more:
            break
        needless |= more
    result = bom + _written(lines, file, replacements)
    doubt = doubt or _defined_twice(file, [line.rstrip() for line in lines_of(result)])
    if not doubt and language is not None and has_syntax(language) and parses(text, language):
        doubt = "" if parses(result, language) else f"the result would no longer be valid {language}"
    return Merge(result, doubt)


def _defined_twice(before: Sequence[str], after: Sequence[str]) -> str:
    """A doubt about a definition of which the file has one and the result more: its old lines should have gone."""
    old, new = (Counter(filter(_DEFINITION.match, lines)) for lines in (before, after))
    twice = next((line for line, count in new.items() if count > 1 == old[line]), None)
    return (
        ""
        if twice is None
        else f"the result would have the line {twice.strip()[:60]!r} twice: show more lines around it"
    )


def _written(lines: Sequence[str], file: Sequence[str], replacements: Sequence[_LineReplacement]) -> str:
    """The text with lines replaced. `file` are its lines without the white space at their ends."""
    newline = "\r\n" if sum(line.endswith("\r\n") for line in lines) * 2 > len(lines) else "\n"
    merged, at = list[str](), 0
    for placed in sorted(replacements, key=lambda p: (p.start, p.end)):
        merged += lines[at : placed.start]
        own: dict[str, list[str]] = {}
        for j in range(placed.start, placed.end):
            own.setdefault(file[j], []).append(lines[j])
        for line in placed.lines:
            there = own.get(line.rstrip())
            kept = there.pop(0) if there else ""
            # Models leave blanks at line ends out, and do not invent them.
            same = kept and line in (line.rstrip(), *shown_lines(kept))
            merged.append(kept if same else line + newline)
        at = max(at, placed.end)
    merged += lines[at:]
    result = "".join([line if line.endswith("\n") else line + newline for line in merged])
    return result if lines and lines[-1].endswith("\n") else result.removesuffix(newline)


# --- places ----------------------------------------------------------------------------------------------------------


def _placed(blocks: Sequence[SketchBlock], file: Sequence[str]) -> tuple[list[_LineReplacement], str]:
    """The replacement of every block, and a doubt about them. Raises NoPlace."""
    keys = {"": BLANK}
    numbers = [keys.setdefault(line, len(keys)) for line in file]
    texts = [at_file_indentation(block.trimmed, file) for block in blocks]
    coded = [
        PlacedBlock([keys.get(line.rstrip(), UNKNOWN) for line in text], block.marker_before, block.marker_after)
        for block, text in zip(blocks, texts, strict=True)
    ]
    known = [i for i, block in enumerate(coded) if any(key > BLANK for key in block.keys)]
    spans = dict[int, tuple[int, int]]()
    doubt = ""
    if known:
        placement = _in_any_order([coded[i] for i in known], numbers)
        spans = dict(zip(known, placement.spans, strict=True))
        doubt = _doubt([(blocks[i], coded[i], spans[i]) for i in known], placement, numbers)
        for i in known:
            spans[i], unsure = _over_new_ends(blocks[i], coded[i], texts[i], spans[i], file, numbers)
            doubt = doubt or unsure
    for i, block in enumerate(blocks):
        if i not in spans:
            low = max((end for j, (_, end) in spans.items() if j < i), default=0)
            high = min((start for j, (start, _) in spans.items() if j > i), default=len(file))
            spans[i], unsure = _new_text(block, file, low, high)
            texts[i] = _without_layout(block, file, spans[i][0])
            doubt = doubt or unsure
    return [_LineReplacement(*spans[i], text) for i, text in enumerate(texts)], doubt


def _in_any_order(blocks: Sequence[PlacedBlock], file: Sequence[int]) -> Placement:
    """The placement of the blocks in their order, or of each block alone if only so all of them have a place."""
    placement = place(blocks, file)
    if len(blocks) == 1 or not _false_ends(blocks, placement, file):
        return placement
    alone = [PlacedBlock(block.keys, True, True) for block in blocks]
    places = [place([block], file) for block in alone]
    spans = tuple(span for each in places for span in each.spans)
    margin = min(each.margin for each in places)
    ordered = sorted(spans)
    apart = all(one[1] <= other[0] for one, other in pairwise(ordered))
    freely = Placement(spans, margin)
    if apart and margin >= MARGIN and not _false_ends(alone, freely, file):
        return freely
    return placement


def _false_ends(blocks: Sequence[PlacedBlock], placement: Placement, file: Sequence[int]) -> list[int]:
    """The blocks with an end that the file holds elsewhere, but not at the block's place."""
    return [
        i
        for i, (block, span) in enumerate(zip(blocks, placement.spans, strict=True))
        if max(_loose_ends(block, span, file)) > BLANK
    ]


def _loose_ends(block: PlacedBlock, span: tuple[int, int], file: Sequence[int]) -> tuple[int, int]:
    """The keys of the block's ends that are not equal to those of its place, else BLANK."""
    start, end = span
    known = [key for key in block.keys if key != BLANK]
    first, last = (start < end and file[at] == key for at, key in ((start, known[0]), (end - 1, known[-1])))
    return BLANK if first else known[0], BLANK if last else known[-1]


def _doubt(
    placed: Sequence[tuple[SketchBlock, PlacedBlock, tuple[int, int]]], placement: Placement, file: Sequence[int]
) -> str:
    """Why the sketch may mean other places; empty if it does not."""
    more = "show more of the lines beside the change"
    loose = [_loose_ends(keyed, span, file) for _, keyed, span in placed]
    (first, begun, (start, until)), (last, ended, (since, end)) = placed[0], placed[-1]
    if not first.marker_before and _cut_off(begun.keys, file[:start], file[start:until], loose[0][0]):
        return "the sketch begins after the file does: begin it with a marker, or with the file's first lines"
    if not last.marker_after and _cut_off(ended.keys[::-1], file[end:][::-1], file[since:end][::-1], loose[-1][1]):
        return "the sketch ends before the file does: end it with a marker, or with the file's last lines"
    if placement.margin < MARGIN:
        return f"the sketch fits more than one place: {more}"
    low = 0
    for number, (block, keyed, (start, end)) in enumerate(placed):
        if (loose[number][0] > BLANK and block.marker_before) or (loose[number][1] > BLANK and block.marker_after):
            return f"the lines at an end of {block.name} stand elsewhere in the file: {more}"
        high = placed[number + 1][2][0] if number + 1 < len(placed) else len(file)
        if low <= start <= end <= high and _deletes_elsewhere(keyed.keys, file[low:high], start - low, end - low):
            return f"{block.name} fits more than one place: {more}"
        size = sum(key != BLANK for key in keyed.keys)
        deleted = sum(key != BLANK for key in file[start:end]) - size
        if deleted > _DELETED + 4 * size:
            return f"{block.name} would delete {deleted} lines that it does not show: edit the file in smaller steps"
        low = end
    return ""


def _over_new_ends(
    block: SketchBlock,
    keyed: PlacedBlock,
    lines: Sequence[str],
    span: tuple[int, int],
    file: Sequence[str],
    keys: Sequence[int],
) -> tuple[tuple[int, int], str]:
    """The span of a block with the lines of which its new ends are other versions, and a doubt: new lines beside a
    marker may also replace the file's next line, if that has their indentation."""
    (start, end), doubt = span, ""
    first, last = _loose_ends(keyed, span, keys)
    before = next((j for j in range(start - 1, -1, -1) if file[j]), None)
    after = next((j for j in range(end, len(file)) if file[j]), None)
    for loose, marker, line, beside in (
        (first, block.marker_before, lines[0], before),
        (last, block.marker_after, lines[-1], after),
    ):
        if loose != UNKNOWN or not marker or beside is None:
            continue
        alike = any(_alike(each, file[beside]) for each in lines)
        instead = indent(line) == indent(file[beside]) and bool(role := _role(line)) and role == _role(file[beside])
        if not instead and (alike or indent(line) == indent(file[beside])):
            doubt = f"new lines at an end of {block.name} may replace the next line of the file: show that line"
        if alike or instead:
            start, end = min(start, beside), max(end, beside + 1)
    return (start, end), doubt


def _role(line: str) -> str:
    """The role of a line that nobody writes twice in a row: an exit, a value of a name, a definition; or ""."""
    match = _ROLE.match(line)
    return next(filter(None, match.groups()), "") if match else ""


def _cut_off(keys: Sequence[int], before: Sequence[int], place: Sequence[int], loose: int) -> bool:
    """Whether a block at the start of a sketch, without a marker before it, may delete the lines `before` its place. It
    has its marker forgotten only if it changes other lines, and begins with a line that is not the file's first."""
    block, lines, outside = ([key for key in each if key != BLANK] for each in (keys, place, before))
    if loose != BLANK:
        return bool(outside) or loose in place
    return bool(outside) and (block == lines or block[0] == outside[0])


def _deletes_elsewhere(keys: Sequence[int], window: Sequence[int], start: int, end: int) -> bool:
    """Whether a block without a new line may delete other lines than those between `start` and `end` of the window: its
    first lines and its rest stand in other places as well."""
    if UNKNOWN in keys:
        return False
    block, lines = ("".join(chr(key) for key in each if key != BLANK) for each in (keys, window))
    here = sum(key != BLANK for key in window[:start]), sum(key != BLANK for key in window[:end])
    for i in range(1, len(block)):
        firsts = lines.find(block[:i]), lines.rfind(block[:i])
        rests = lines.find(block[i:]), lines.rfind(block[i:])
        readings = {(a, z + len(block) - i) for a in firsts for z in rests if a >= 0 and z >= a + i}
        if readings - {here}:
            return True
    return False


# --- text without a line of the file ---------------------------------------------------------------------------------


def _new_text(block: SketchBlock, file: Sequence[str], low: int, high: int) -> tuple[tuple[int, int], str]:
    """The place of a block without a line of the file, between two others, and a doubt: the file's start or end if the
    sketch has a marker on the other side alone, else the lines of which its lines are clearly new versions."""
    alike = _most_similar(block.trimmed, file, low, high)
    if block.marker_before != block.marker_after:
        at, beside = (0, file[0]) if block.marker_after else (len(file), file[-1])
        if low <= at <= high:
            unsure = alike is not None or any(_alike(line, beside) for line in block.trimmed)
            return (at, at), "the new lines may replace others: show a line of the file beside them" if unsure else ""
    if alike is None:
        raise NoPlace(f"no line of {block.name} is in the file")
    replaced = [file[j] for j in range(*alike) if file[j]]
    if all(any(_is_version(line, old) for line in block.trimmed) for old in replaced):
        return alike, ""
    return alike, f"{block.name} may replace lines or stand beside them: show a line of the file beside it"


def _is_version(line: str, old: str) -> bool:
    """Whether a line can hardly stand beside another: it does the same, or has all of its words."""
    same = bool(role := _role(line)) and role == _role(old)
    return indent(line) == indent(old) and (same or set(_WORD.findall(old)) <= set(_WORD.findall(line)))


def _most_similar(lines: Sequence[str], file: Sequence[str], low: int, high: int) -> tuple[int, int] | None:
    """The lines of the file of which `lines` are clearly new versions; None without one such place."""
    places = set[int]()
    for line in lines[:20]:
        ratios = sorted(
            (_matcher(line, file[j]).ratio(), j)
            for j in range(low, high)
            if len(line.strip()) > 4 and _alike(line, file[j])
        )
        if ratios and ratios[-1][0] >= _SURELY_ALIKE:
            if len(ratios) > 1 and ratios[-2][0] >= _SURELY_ALIKE:
                return None
            places.add(ratios[-1][1])
    # Lines that are far apart are not one place.
    if not places or max(places) + 1 - min(places) > len(lines) + 2:
        return None
    return min(places), max(places) + 1


def _matcher(line: str, other: str) -> SequenceMatcher[str]:
    return SequenceMatcher(None, line[:_COMPARED], other[:_COMPARED], autojunk=False)


def _alike(line: str, other: str) -> bool:
    if not line.strip() or not other.strip():
        return False
    matcher = _matcher(line.strip(), other.strip())
    return matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE


def _without_layout(block: SketchBlock, file: Sequence[str], at: int) -> Sequence[str]:
    """The lines of a block without blank lines at the ends of the sketch or of the file, or where the file has blank
    lines as well."""
    lines, before, after = block.lines, at, at
    while not lines[0].strip() and not (block.marker_before and before and file[before - 1]):
        lines, before = lines[1:], before - 1
    while not lines[-1].strip() and not (block.marker_after and after < len(file) and file[after]):
        lines, after = lines[:-1], after + 1
    return lines
