"""Answers questions in a box: runs what computes a value, and sends the value out as plain data.

Nothing here is trusted. The tested code shares this process and may change any of it: then it sends other values, which
are compared with what only the owner knows (`grading/questions.py`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

PREFIX = "questions:"
MAX_DEPTH = 60
MAX_BITS = 10_000  # longer integers have no decimal form here
MAX_ANSWERS = 4096  # characters of the answers to one question; a longer value is no right answer
Codes = dict[str, dict[str, CodeType]]  # path -> name of a question -> its code


def compiled(sources: Mapping[str, str], path: str) -> dict[str, CodeType]:
    """Code of the questions of a file, by name. Raises SyntaxError."""
    return {name: compile(ast.parse(source), path, "exec", dont_inherit=True) for name, source in sources.items()}


def warm(codes: Codes, path: str) -> None:
    """Import what the questions of a file import."""
    for name in codes[path]:
        _load(codes, path, name, lambda _: None)


def _load(codes: Codes, path: str, name: str, observe: Callable[[object], None]) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "question", "observe": observe}
    exec(codes[path][name], space)
    return space


def run(
    codes: Codes,
    tests: Sequence[str],
    report: Callable[[dict[str, Any]], None],
    describe: Callable[[BaseException], str],
) -> None:
    """Report the values that each question `questions:PATH::NAME::ROW` observes, or the exception that ended it."""
    spaces: dict[str, dict[str, Any]] = {}
    observed: list[object] = []
    for test in tests:
        path, name, row = test.removeprefix(PREFIX).split("::")
        key = f"{path}::{name}"
        observed.clear()
        outcome = "error"  # of what the test imports
        try:
            if key not in spaces:
                spaces[key] = _load(codes, path, name, lambda value: observed.append(plain(value)))
            arguments = spaces[key]["ROWS"][int(row)]
            outcome = "failed"
            spaces[key][name](*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # the tested code may raise anything, SystemExit too
            report({"test": test, "outcome": outcome, "message": describe(e)})
        else:
            record = {"test": test, "answers": observed}
            if len(json.dumps(observed)) > MAX_ANSWERS:  # the pipe is read when the run has ended
                record = {"test": test, "outcome": "failed", "message": "the value is too long"}
            report(record)


def plain(value: object, depth: int = 0) -> object:
    """JSON for a value of built-in types; of a subclass the built-in content, whatever its own methods claim."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if depth < MAX_DEPTH:
        inner = depth + 1
        if isinstance(value, list):
            return [plain(item, inner) for item in list.__iter__(value)]
        if isinstance(value, tuple):
            return {"tuple": [plain(item, inner) for item in tuple.__iter__(value)]}
        if isinstance(value, dict):
            return {"dict": [[plain(key, inner), plain(item, inner)] for key, item in dict.items(value)]}
        for base in (set, frozenset):
            if isinstance(value, base):
                return {base.__name__: [plain(item, inner) for item in base.__iter__(value)]}  # type: ignore[arg-type]
    if isinstance(value, str):
        return str.__str__(value)[:]
    if isinstance(value, int) and int.bit_length(value) <= MAX_BITS:
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"opaque": f"{kind.__module__}.{kind.__qualname__}"}
