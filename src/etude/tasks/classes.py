"""Breaks classes: drops a base, permutes methods, or removes a method with the statements that use it."""

import ast
from collections.abc import Iterator

from etude.code import SIMPLE_STATEMENTS, ByteEdit, FunctionBytes, Operator, first_line_of
from etude.code.functions import FunctionNode

_Edits = Iterator[tuple[ByteEdit, ...]]
MIN_COMPLEXITY = 10  # of a class, as in SWE-smith
MAX_LINES = 40  # of a method that is removed


def _methods(place: FunctionBytes) -> list[FunctionNode]:
    return [statement for statement in place.function.body if isinstance(statement, FunctionNode)]


def _span(place: FunctionBytes, method: FunctionNode) -> tuple[int, int]:
    """The bytes of a method with its decorators, from the column of its first `@` or `def`."""
    return place.line_start(first_line_of(method)) + method.col_offset, place.end(method)


def _remove_base(place: FunctionBytes) -> _Edits:
    node = place.function.node
    assert isinstance(node, ast.ClassDef)
    listed = sorted([*node.bases, *node.keywords], key=place.start)
    spans = [(place.start(part), place.end(part)) for part in listed]
    for i, part in enumerate(listed):
        if part not in node.bases:
            continue
        start, end = spans[i]
        if i:
            start = spans[i - 1][1]
        elif len(listed) > 1:
            end = spans[1][0]
        else:
            start, end = place.data.rfind(b"(", 0, start), place.data.find(b")", end) + 1
        yield (ByteEdit(start, end, b""),)


def _shuffle_methods(place: FunctionBytes) -> _Edits:
    spans = [_span(place, method) for method in _methods(place)]
    order = list(spans)
    place.rng.shuffle(order)
    if order != spans and all(place.own_lines(*span) for span in spans):
        yield tuple(
            ByteEdit(*slot, place.data[slice(*moved)])
            for slot, moved in zip(spans, order, strict=True)
            if slot != moved
        )


def _remove_method(place: FunctionBytes) -> _Edits:
    for method in _methods(place):
        start, end = _span(place, method)
        long = method.end_lineno - method.lineno > MAX_LINES  # type: ignore[operator]
        if long or len(place.function.node.body) < 2 or not place.own_lines(start, end):
            continue
        used = [
            ByteEdit(place.start(statement), place.end(statement), b"pass")
            for _, _, block in place.blocks()
            for statement in block
            if isinstance(statement, SIMPLE_STATEMENTS)
            and any(isinstance(part, ast.Attribute) and part.attr == method.name for part in ast.walk(statement))
        ]
        line, stop = place.data.rfind(b"\n", 0, start) + 1, place.data.find(b"\n", end)
        gone = ByteEdit(line, stop + 1 if stop >= 0 else len(place.data), b"")
        yield (gone, *(edit for edit in used if not gone.start <= edit.start < gone.end))


OPERATORS: dict[str, Operator] = {
    "class_rm_base": _remove_base,
    "class_shuffle": _shuffle_methods,
    "class_rm_funcs": _remove_method,
}
