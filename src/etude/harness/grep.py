"""Search with a pattern of the model, on the host and in this process: the pattern must be harmless.

Python's `re` backtracks and cannot be interrupted. A pattern is refused unless its worst case on one line is small, by
counting its factors: unbounded repeats (each a factor of the line's length), and choices (alternatives and
optional parts). Longer lines are cut where they would still cost too much.
"""

import re
import time
from collections.abc import Iterable, Iterator
from re import _constants as op  # type: ignore[attr-defined]  # no public syntax tree exists
from re import _parser as parser  # type: ignore[attr-defined]

from etude.code import shown_lines
from etude.renderers import ToolError

MAX_PATTERN = 500
_MAX_CHOICES = 64
_MAX_REPEATS = 2
_LINE_CHARACTERS = {0: 4000, 1: 1000, 2: 200}  # by unbounded repeats: a line costs at most about 10^7 steps
_SAME_WIDTH = {op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN, op.RANGE, op.CATEGORY, op.AT}


def compile_pattern(pattern: str, ignore_case: bool = False) -> tuple[re.Pattern[str], int]:
    """The compiled pattern and how many characters of a line it may read. Raises ToolError."""
    if len(pattern) > MAX_PATTERN:
        raise ToolError(f"the pattern is longer than {MAX_PATTERN} characters")
    flags = re.IGNORECASE if ignore_case else 0
    try:
        # `.*` at an end changes nothing about which lines match.
        trimmed = re.sub(r"^(?:\.\*)+(?![?+])|(?<!\\)(?:\.\*)+$", "", pattern)
        repeats, _ = _cost(parser.parse(trimmed, flags))
        return re.compile(trimmed, flags), _LINE_CHARACTERS[repeats]
    except (re.error, OverflowError, RecursionError) as e:
        raise ToolError(f"the pattern is not valid: {e}") from None


def _cost(tree: Iterable[tuple[int, object]]) -> tuple[int, int]:
    """Unbounded repeats and choices of a syntax tree. Raises ToolError when they may multiply too far."""
    repeats, choices = 0, 1
    for code, value in tree:
        inner, options = _node_cost(code, value)
        repeats += inner
        choices *= options
        if repeats > _MAX_REPEATS or choices > _MAX_CHOICES:
            raise ToolError("the pattern has too many repeats or alternatives; use a simpler one")
    return repeats, choices


def _node_cost(code: int, value: object) -> tuple[int, int]:
    match code, value:
        case ((op.MAX_REPEAT | op.MIN_REPEAT | op.POSSESSIVE_REPEAT), (low, high, body)):  # type: ignore[misc]
            if high > 1 and not all(c in _SAME_WIDTH for c, _ in _flat(body)):
                raise ToolError("the pattern repeats a part that has repeats or alternatives; use a simpler one")
            inner, options = _cost(body)
            return (inner + 1, options) if high > low + 8 else (inner, options * (high - low + 1))
        case op.BRANCH, (_, branches):
            costs = [_cost(branch) for branch in branches]
            return sum(r for r, _ in costs), sum(c for _, c in costs)
        case op.SUBPATTERN, (*_, body):
            return _cost(body)
        case ((op.ASSERT | op.ASSERT_NOT), (_, body)):
            return _cost(body)
        case op.ATOMIC_GROUP, body:
            return _cost(body)  # type: ignore[arg-type]
        case _ if code in _SAME_WIDTH:
            return 0, 1
        case _:
            raise ToolError("back references and conditions are not supported; use a simpler pattern")


def _flat(tree: Iterable[tuple[int, object]]) -> Iterator[tuple[int, object]]:
    """The nodes of a tree with plain groups opened."""
    for code, value in tree:
        if code is op.SUBPATTERN:
            yield from _flat(value[-1])  # type: ignore[index]
        else:
            yield code, value


def search(
    files: Iterable[tuple[str, str]], pattern: str, *, ignore_case: bool, limit: int, seconds: float
) -> tuple[list[str], bool]:
    """Matching lines as "path:line: text", at most `limit`, and whether the search was cut short. Raises ToolError."""
    compiled, width = compile_pattern(pattern, ignore_case)
    deadline = time.monotonic() + seconds
    hits: list[str] = []
    for path, text in files:
        for number, line in enumerate(shown_lines(text), 1):
            if compiled.search(line[:width]):
                if len(hits) == limit:
                    return hits, True
                hits.append(f"{path}:{number}: {line[:200]}")
            if number % 32 == 0 and time.monotonic() > deadline:
                return hits, True
        if time.monotonic() > deadline:
            return hits, True
    return hits, False
