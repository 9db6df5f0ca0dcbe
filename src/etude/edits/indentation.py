"""The indentation of a sketch in the levels of the file, for sketches in spaces of a file in tabs and their like.

The lines that sketch and file share say how the levels of the one translate into those of the other: all lines are
moved by the same white space, or each level of the sketch is one of the file. A block of which one indented line stands
in the file as it is needs no translation.
"""

from collections.abc import Sequence
from itertools import pairwise

from etude.edits.sketch_blocks import NoPlace

_UNIT = 4  # columns of a level, where the sketch does not say


def at_file_indentation(lines: Sequence[str], file: Sequence[str]) -> Sequence[str]:
    """The lines of a block at the indentation of the file. Raises NoPlace for lines in spaces for a file in tabs, or
    the other way round, whose levels nothing tells."""
    there: dict[str, set[str]] = {}
    for line in file:
        there.setdefault(line.strip(), set()).add(indent(line))
    shared = set[tuple[str, str]]()
    for line in lines:
        own, known = indent(line), there.get(line.strip(), set()) if line.strip() else set()
        if own in known and own:
            return lines
        if own in known or len(known) == 1:
            shared.add((own, own if own in known else next(iter(known))))
    signs = {line[0] for line in file if line.strip() and line[0] in " \t"}
    strange = len(signs) == 1 and any(line.strip() and line[0] in {" ", "\t"} - signs for line in lines)
    if not strange and all(own == other for own, other in shared):
        return lines
    for translation in (_shift(shared), _levels(lines, file, shared)):
        if translation is not None and all(translation(own) == other for own, other in shared):
            moved = [translation(indent(line)) if line.strip() else "" for line in lines]
            if None not in moved:
                return [f"{margin}{line[len(indent(line)) :]}" for margin, line in zip(moved, lines, strict=True)]
    if strange:
        names = {" ": "spaces", "\t": "tabs"}
        (sign,) = signs
        raise NoPlace(f"the file is indented by {names[sign]} and the sketch is not: its levels cannot be told")
    return lines


def _shift(shared: set[tuple[str, str]]):
    """The translation that puts white space before every line, or takes it away; None if the lines differ in it."""
    longer = {other.removesuffix(own) for own, other in shared if other.endswith(own)}
    shorter = {own.removeprefix(other) for own, other in shared if own.startswith(other)}
    if len(longer) == 1 and "" not in longer and all(other.endswith(own) for own, other in shared):
        (more,) = longer
        return lambda own: more + own
    if len(shorter) == 1 and "" not in shorter and all(own.endswith(other) for own, other in shared):
        (less,) = shorter
        return lambda own: own[len(less) :] if own.startswith(less) else None
    return None


def _levels(lines: Sequence[str], file: Sequence[str], shared: set[tuple[str, str]]):
    """The translation of levels; a remainder of columns stays spaces."""
    own_unit = _step([indent(line) for line in lines if line.strip()] + [own for own, _ in shared])
    unit = _step([indent(line) for line in file if line.strip()])
    low, base = min(shared, key=lambda pair: len(pair[0]), default=("", ""))
    if not unit:
        return None

    def translated(own: str) -> str | None:
        level, rest = divmod(len(own) - len(low), len(own_unit) or _UNIT)
        wide = base + unit * level if level >= 0 else base[: max(0, len(base) + level * len(unit))]
        return wide + " " * rest

    return translated


def _step(indents: Sequence[str]) -> str:
    """The smallest difference of two indentations; empty without one."""
    widths = sorted({"", *indents}, key=len)
    return min(
        (wide[len(narrow) :] for narrow, wide in pairwise(widths) if len(wide) > len(narrow)), key=len, default=""
    )


def indent(line: str) -> str:
    """The white space before a line's text."""
    return line[: len(line) - len(line.lstrip(" \t"))]
