"""Mutation operators: edits of a function's bytes, by which a program is broken (SWE-smith, arXiv:2504.21798)."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from etude.code.functions import Function, FunctionNode

_FAMILIES: tuple[dict[type[ast.AST], str], ...] = (
    {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    {ast.Eq: "==", ast.NotEq: "!="},
    {ast.Is: "is", ast.IsNot: "is not"},
    {ast.In: "in", ast.NotIn: "not in"},
    {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"},
    {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"},
    {ast.LShift: "<<", ast.RShift: ">>"},
    {ast.And: "and", ast.Or: "or"},
)
_TEXT = {operator: text for family in _FAMILIES for operator, text in family.items()}
FLIPPED_OPERATORS = {
    "<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "&": "|", "|": "&",
    "<<": ">>", ">>": "<<", "and": "or", "or": "and",
}  # fmt: skip
_PEERS = {
    text: tuple(t for t in family.values() if t not in (text, FLIPPED_OPERATORS.get(text)))
    for family in _FAMILIES
    for text in family.values()
}
SIMPLE_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete, ast.Assert)
_BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class ByteEdit:
    """Replace bytes [start, end) of a module by `text`."""

    start: int
    end: int
    text: bytes


class FunctionBytes:
    """A function in the bytes of its module; the positions of `ast` count bytes, not characters."""

    def __init__(self, source: str, function: Function, rng: random.Random) -> None:
        self.source = source
        self.function = function
        self.rng = rng
        self.data = source.encode()
        self._lines = [0]
        for line in self.data.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)
        self.first = self.line_start(function.first_line)
        self.last = min(self.line_start(function.last_line + 1), len(self.data))
        self.original = self.data[self.first : self.last].decode().removesuffix("\n")
        self.dump = ast.dump(function.node)
        self.nodes = list(self._walk())

    def _walk(self) -> Iterator[ast.AST]:
        """Nodes of the body without those in f-strings, which have no true positions before Python 3.12."""
        queue: list[ast.AST] = list(self.function.body)
        while queue:
            node = queue.pop(0)
            if isinstance(node, ast.JoinedStr):
                continue
            yield node
            for name, value in ast.iter_fields(node):
                if name in ("annotation", "returns", "decorator_list", "type_params"):
                    continue
                queue.extend(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST))

    def line_start(self, line: int) -> int:
        """Byte at which a line (1-based) begins."""
        return self._lines[line - 1]

    def start(self, node: ast.AST) -> int:
        """First byte of a node."""
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Byte after the last one of a node."""
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> bytes:
        """The bytes of a node."""
        return self.data[self.start(node) : self.end(node)]

    def own_lines(self, start: int, end: int) -> bool:
        """Whether the lines of [start, end) hold only space and a comment besides."""
        before = self.data[self.data.rfind(b"\n", 0, start) + 1 : start]
        stop = self.data.find(b"\n", end)
        after = self.data[end : stop if stop >= 0 else len(self.data)].strip()
        return not before.strip() and (not after or after.startswith(b"#"))

    def blocks(self) -> Iterator[tuple[ast.AST, str, list[ast.stmt]]]:
        """(owner, field, statements) of every block in the body; the docstring is not among the statements."""
        yield self.function.node, "body", self.function.body
        for node in self.nodes:
            for name in _BLOCKS:
                statements = getattr(node, name, None)
                if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                    yield node, name, statements

    def parenthesised(self, node: ast.AST, parent: ast.AST) -> tuple[int, int]:
        """Span of `node` with the parentheses around it, inside `parent`."""
        start, end = self.start(node), self.end(node)
        low, high = self.start(parent), self.end(parent)
        while True:
            before = self.data[low:start].rstrip()
            after = self.data[end:high]
            if not before.endswith(b"(") or not after.lstrip().startswith(b")"):
                return start, end
            start = low + len(before) - 1
            end = high - len(after.lstrip()) + 1

    def operator_span(self, left: ast.AST, right: ast.AST, operator: str) -> tuple[int, int] | None:
        """The span of `operator` between two operands; comments are skipped."""
        low, high = self.end(left), self.start(right)
        between = re.sub(rb"#[^\n]*", lambda m: b" " * len(m.group()), self.data[low:high])
        match = re.search(rb"\s+".join(re.escape(word.encode()) for word in operator.split()), between)
        return (low + match.start(), low + match.end()) if match else None


Operator = Callable[[FunctionBytes], Iterator[tuple[ByteEdit, ...]]]


def _delete(place: FunctionBytes, statement: ast.stmt, block: list[ast.stmt]) -> tuple[ByteEdit, ...] | None:
    """Remove a statement with its lines; the last one of a block becomes `pass`."""
    start, end = place.start(statement), place.end(statement)
    if not place.own_lines(start, end):
        return None
    if len(block) == 1 and not place.data[start:end].startswith(b"elif"):
        return (ByteEdit(start, end, b"pass"),)
    line = place.line_start(statement.lineno)
    stop = place.data.find(b"\n", end)
    return (ByteEdit(line, stop + 1 if stop >= 0 else len(place.data), b""),)


def _remove(*kinds: type[ast.stmt]) -> Callable[[FunctionBytes], Iterator[tuple[ByteEdit, ...]]]:
    def operator(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
        for _, _, block in place.blocks():
            for statement in block:
                edits = _delete(place, statement, block) if isinstance(statement, kinds) else None
                if edits:
                    yield edits

    return operator


def _invert_if(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for node in place.nodes:
        if isinstance(node, ast.IfExp):
            yield _exchange(place, place.parenthesised(node.body, node), place.parenthesised(node.orelse, node))
        if not isinstance(node, ast.If) or not node.orelse:
            continue
        spans = [(place.start(part[0]), place.end(part[-1])) for part in (node.body, node.orelse)]
        if all(place.own_lines(*span) for span in spans) and not place.data[spans[1][0] :].startswith(b"elif"):
            yield _exchange(place, *spans)


def _shuffle_lines(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for _, _, block in place.blocks():
        for first, second in pairwise(block):
            spans = [(place.start(s), place.end(s)) for s in (first, second)]
            if isinstance(first, SIMPLE_STATEMENTS) and all(place.own_lines(*span) for span in spans):
                yield _exchange(place, *spans)


def _exchange(place: FunctionBytes, one: tuple[int, int], two: tuple[int, int]) -> tuple[ByteEdit, ...]:
    data = place.data
    return ByteEdit(*one, data[two[0] : two[1]]), ByteEdit(*two, data[one[0] : one[1]])


def _operators(place: FunctionBytes) -> Iterator[tuple[list[tuple[int, int]], str]]:
    """(spans, text) of every operator; a chain of `and` or `or` has several spans."""
    for node in place.nodes:
        if isinstance(node, ast.BoolOp):
            text = _TEXT[type(node.op)]
            pairs = pairwise(node.values)
            spans = [place.operator_span(left, right, text) for left, right in pairs]
            yield [span for span in spans if span], text
        elif isinstance(node, ast.BinOp) and type(node.op) in _TEXT:
            text = _TEXT[type(node.op)]
            span = place.operator_span(node.left, node.right, text)
            yield [span] if span else [], text
        elif isinstance(node, ast.AugAssign) and type(node.op) in _TEXT:
            text = _TEXT[type(node.op)]
            span = place.operator_span(node.target, node.value, text)
            yield [span] if span else [], text
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, op in zip(operands, operands[1:], node.ops, strict=False):
                span = place.operator_span(left, right, _TEXT[type(op)])
                yield [span] if span else [], _TEXT[type(op)]


def _op_change(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for spans, text in _operators(place):
        if spans and _PEERS[text]:
            new = place.rng.choice(_PEERS[text]).encode()
            yield tuple(ByteEdit(*span, new) for span in spans)


def _op_flip(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for spans, text in _operators(place):
        if spans and text in FLIPPED_OPERATORS:
            yield tuple(ByteEdit(*span, FLIPPED_OPERATORS[text].encode()) for span in spans)


def _op_swap(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for node in place.nodes:
        if isinstance(node, ast.BinOp):
            pair = node.left, node.right
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            pair = node.left, node.comparators[0]
        else:
            continue
        one, two = (place.parenthesised(operand, node) for operand in pair)
        if one[1] <= two[0]:
            yield _exchange(place, one, two)


def _op_break_chain(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for node in place.nodes:
        if isinstance(node, ast.BoolOp):
            spans = [place.parenthesised(value, node) for value in node.values]
            for i in range(len(spans)):
                cut = (spans[i][0], spans[i + 1][0]) if i + 1 < len(spans) else (spans[i - 1][1], spans[i][1])
                yield (ByteEdit(*cut, b""),)
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp):
            yield (ByteEdit(place.end(node.left), place.end(node), b""),)
        elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.BinOp):
            yield (ByteEdit(place.start(node), place.start(node.right), b""),)


def _op_const(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for node in place.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            step = place.rng.choice((1, -1))
            value = node.value + (1 if node.value == 0 else step)
            yield (ByteEdit(place.start(node), place.end(node), str(value).encode()),)


def _negate_cond(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for node in place.nodes:
        tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
        for test in tests:
            if not isinstance(test, ast.expr) or isinstance(node, ast.Assert):
                continue
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                yield (ByteEdit(place.start(test), place.start(test.operand), b""),)
            else:
                simple = isinstance(test, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
                new = place.text(test) if simple else b"(" + place.text(test) + b")"
                yield (ByteEdit(place.start(test), place.end(test), b"not " + new),)


def _bool_flip(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    for node in place.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is bool:
            yield (ByteEdit(place.start(node), place.end(node), b"False" if node.value else b"True"),)


def _wrong_name(place: FunctionBytes) -> Iterator[tuple[ByteEdit, ...]]:
    assert isinstance(place.function.node, FunctionNode)
    arguments = place.function.node.args
    parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    stored = [n.id for n in place.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names = sorted(set(parameters + stored) - {"self", "cls"})
    for node in place.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            new = place.rng.choice([name for name in names if name != node.id])
            yield (ByteEdit(place.start(node), place.end(node), new.encode()),)


OPERATORS: dict[str, Operator] = {
    "remove_loop": _remove(ast.For, ast.While, ast.AsyncFor),
    "remove_cond": _remove(ast.If),
    "remove_assign": _remove(ast.Assign, ast.AugAssign, ast.AnnAssign),
    "remove_wrapper": _remove(ast.With, ast.Try, ast.AsyncWith),
    "remove_return": _remove(ast.Return),
    "invert_if": _invert_if,
    "shuffle_lines": _shuffle_lines,
    "op_change": _op_change,
    "op_flip": _op_flip,
    "op_swap": _op_swap,
    "op_break_chain": _op_break_chain,
    "op_const": _op_const,
    "negate_cond": _negate_cond,
    "bool_flip": _bool_flip,
    "wrong_name": _wrong_name,
}

# Weights of the mutation operators. Changes of an expression dominate, as in real one-line bugs; the repair of a
# removal needs more than copying.
OPERATOR_WEIGHTS: dict[str, float] = {
    "op_change": 10,
    "op_flip": 8,
    "op_swap": 8,
    "op_break_chain": 6,
    "op_const": 9,
    "bool_flip": 4,
    "negate_cond": 14,
    "wrong_name": 8,
    "invert_if": 6,
    "shuffle_lines": 5,
    "remove_assign": 5,
    "remove_cond": 5,
    "remove_return": 3,
    "remove_loop": 2,
    "remove_wrapper": 1,
}
