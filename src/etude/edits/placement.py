"""The places of a sketch's blocks in a file, by dynamic programming over the lines of both.

The whole sketch is aligned at once: the lines of a block with consecutive lines of the file, a marker with any lines.
An equal line is free; a line that is inserted, replaced or deleted has a cost. A deletion without a replacement costs
five insertions, so a place where the block fits without loss beats a place where more of its lines are equal. A block
shows its neighbours, so its first and its last line must stand in the file; the second and the last but one should.

The margin of a placement is the cost by which every other placement is worse. Ends are all that matter: if no block can
begin or end elsewhere for less, the result is the only one. Smith and Waterman's local alignment (1981) is the nearest
relative of the recurrence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLANK, UNKNOWN = 0, -1  # keys of blank lines, and of lines that the file does not hold

# Costs of a line, and of the ends of a block, chosen on commits of six libraries (`benchmarks.merge --set chosen`).
_INSERT, _REPLACE, _DELETE, _BLANK_LINE = 0.4, 1.0, 2.0, 0.1
_MANY, _DELETE_MANY = 8.0, 0.5  # of many deleted lines: together, and each
_NEW_END, _FALSE_END = 10.0, 60.0  # an end that the file does not hold; one that the file holds elsewhere alone
_SINGLE = 6.0  # an end at which one line alone is equal
_NO_MARKER = 1.0  # lines of the file before or after the whole sketch, without a marker for them
_NEVER = 1e9

Costs = npt.NDArray[np.float64]
"""Costs for every position in the file, and in a second row the line at which the block began."""


@dataclass(frozen=True)
class PlacedBlock:
    """A block as keys of its lines: equal lines have equal keys, those of the file too. A marker may stand before and
    after it."""

    keys: Sequence[int]
    marker_before: bool
    marker_after: bool

    @property
    def backwards(self) -> "PlacedBlock":
        """The same block, read from its end."""
        return PlacedBlock(self.keys[::-1], self.marker_after, self.marker_before)


@dataclass(frozen=True)
class Placement:
    """The lines [start, end) of the file under each block, in order, and the margin."""

    spans: tuple[tuple[int, int], ...]
    margin: float


def place(blocks: Sequence[PlacedBlock], file: Sequence[int]) -> Placement:
    """The cheapest placement of blocks in order; `file` are the keys of its lines. O(lines of the sketch x lines of
    the file)."""
    keys = np.array(file, dtype=np.int64)
    forwards = _sweep(blocks, keys)
    backwards = _sweep([block.backwards for block in reversed(blocks)], keys[::-1])[::-1]
    ends = forwards[-1].after[0] + _beyond(keys[::-1], blocks[-1].marker_after)[::-1]
    end = int(np.argmin(ends))
    best, spans = float(ends[end]), list[tuple[int, int]]()
    for sweep in reversed(forwards):
        start = int(sweep.after[1, end])
        spans.append((start, end))
        end = int(sweep.before[1, start])
    spans.reverse()
    margin, lines = _NEVER, np.concatenate([[0], np.cumsum(keys != BLANK)])
    for (start, end), forth, back in zip(spans, forwards, backwards, strict=True):
        for chosen, through in (
            (end, forth.after[0] + back.before[0, ::-1]),
            (start, forth.before[0] + back.after[0, ::-1]),
        ):
            through[lines == lines[chosen]] = _NEVER  # blank lines make no other place
            margin = min(margin, float(through.min()) - best)
    return Placement(tuple(spans), margin)


@dataclass(frozen=True)
class _Sweep:
    """Costs before a block, with the end of the block before it, and costs after the block, with its start."""

    before: Costs
    after: Costs


def _sweep(blocks: Sequence[PlacedBlock], file: npt.NDArray[np.int64]) -> list[_Sweep]:
    size = len(file)
    before = _costs(_beyond(file, blocks[0].marker_before))
    sweeps: list[_Sweep] = []
    for number, block in enumerate(blocks):
        at_start = number == 0 and not block.marker_before
        at_end = number == len(blocks) - 1 and not block.marker_after
        after = _aligned(block.keys, file, _costs(before[0]), at_start, at_end)
        sweeps.append(_Sweep(before, after))
        before = _running(after[0], np.arange(size + 1.0))
    return sweeps


def _beyond(file: npt.NDArray[np.int64], marker: bool) -> Costs:
    """The cost of lines before the sketch: free if they are blank, or if there is a marker for them."""
    lines = np.concatenate([[0], np.cumsum(file != BLANK)])
    return np.where(marker | (lines == 0), 0.0, _NO_MARKER)


def _aligned(keys: Sequence[int], file: npt.NDArray[np.int64], begin: Costs, at_start: bool, at_end: bool) -> Costs:
    """The costs after a block that may begin anywhere for `begin`. At an end that is the file's, too, every change is
    possible; at another end that is not equal, lines are inserted alone."""
    size, blank = len(file), file == BLANK
    deleted = np.concatenate([[0.0], np.cumsum(np.where(blank, _BLANK_LINE, _DELETE))])
    lines = np.concatenate([[0], np.cumsum(~blank)])
    # One equal line is enough if it is the file's first or last.
    single_first = np.where(at_start & (lines == 1), 0.0, _SINGLE)
    single_last = np.where(at_end & (lines == lines[-1] - 1), 0.0, _SINGLE)
    known = [key for key in keys if key != BLANK]
    total, seen = len(known), 0
    enter, leave = (_NEW_END if key == UNKNOWN else _FALSE_END for key in (known[0], known[-1]))
    never = _plus(begin, _NEVER)
    # By the last line: none was equal yet; equal; changed, behind an equal one; new, with no equal one to come.
    head, equal, other, tail = _plus(begin, enter), never, never, never
    if at_start:
        other = _deleting(np.where(np.arange(size + 1) == 0, begin, never), deleted, many=False)
    for key in keys:
        if key == BLANK:
            free = np.where(blank, 0.0, _NEVER)
            equal, other = (_least(_plus(costs, _BLANK_LINE), _over(costs, free)) for costs in (equal, other))
            head, tail = _plus(head, _BLANK_LINE), _plus(tail, _BLANK_LINE)
        else:
            seen += 1
            single = single_first if seen == 2 else 0.0
            left = _least(_plus(equal, single), other)
            if seen == 1:
                source = _least(begin, other)
            else:
                source = _least(_least(head, equal), _plus(other, single_last if seen == total else 0.0))
            other = _least(_plus(left, _INSERT), _over(left, np.where(blank, _NEVER, _REPLACE)))
            head, tail = _plus(head, _INSERT), _least(_plus(equal, _INSERT + single), _plus(tail, _INSERT))
            equal = _over(source, np.where(file == key, 0.0, _NEVER))
        if seen > 0 and (seen < total or at_end):
            left = _least(_plus(equal, single_first if seen == 1 else 0.0), other)
            other = _least(other, _deleting(left, deleted, many=seen < total))
    after = _least(equal, _plus(tail, leave))
    return _least(after, np.where(np.arange(size + 1) == size, other, never)) if at_end else after


def _deleting(costs: Costs, deleted: npt.NDArray[np.float64], many: bool) -> Costs:
    """The costs after any number of deleted lines, which have a lower cost in `many`; `deleted`: the cost of deleting
    all lines before a position."""
    after = costs
    for opening, each in ((0.0, deleted), (_MANY, deleted * (_DELETE_MANY / _DELETE)))[: 1 + many]:
        gap = _running(costs[0] - each, costs[1])
        after = _least(after, np.stack([gap[0] + each + opening, gap[1]]))
    return after


def _costs(costs: Costs) -> Costs:
    """Costs whose blocks begin where they stand."""
    return np.stack([costs, np.arange(float(len(costs)))])


def _plus(costs: Costs, more: float | Costs) -> Costs:
    return np.stack([costs[0] + more, costs[1]])


def _over(costs: Costs, line: Costs) -> Costs:
    """The costs behind one more line of the file, which costs `line`."""
    return np.stack([np.concatenate([[_NEVER], costs[0, :-1] + line]), np.concatenate([[0.0], costs[1, :-1]])])


def _least(one: Costs, other: Costs) -> Costs:
    return np.where(one[0] <= other[0], one, other)


def _running(costs: Costs, origins: Costs) -> Costs:
    """The least cost up to each position, and its origin."""
    least = np.minimum.accumulate(costs)
    first = np.maximum.accumulate(np.where(costs == least, np.arange(len(costs)), 0))
    return np.stack([least, origins[first]])
