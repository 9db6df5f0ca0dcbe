"""Breaks functions: AST operators that edit the text in place, so untouched lines keep their layout.

The procedural operators follow SWE-smith (arXiv:2504.21798). Every mutant parses, differs in its AST, and leaves the
docstring and all text outside the edited spans as they were. Tasks are made by `mutants`, `combined` and `removal`;
training text is made by `draw`.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

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
FLIP = {
    "<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "&": "|", "|": "&",
    "<<": ">>", ">>": "<<", "and": "or", "or": "and",
}  # fmt: skip
_PEERS = {
    text: tuple(t for t in family.values() if t not in (text, FLIP.get(text)))
    for family in _FAMILIES
    for text in family.values()
}
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete, ast.Assert)
_BLOCKS = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class ByteEdit:
    """Replace bytes [start, end) of a module by `text`."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Mutant:
    """A module with one broken function: `snippet` in place of `original`, on lines first_line to last_line."""

    operator: str
    source: str
    edits: tuple[ByteEdit, ...]
    original: str  # the function's text before
    snippet: str
    first_line: int  # 1-based, decorators included
    last_line: int  # inclusive
    body_line: int  # lines before it hold the signature and the docstring, the same in both

    @property
    def body(self) -> str:
        """The broken statements, docstring left out."""
        return "\n".join(self.snippet.split("\n")[self.body_line - self.first_line :])

    @property
    def original_body(self) -> str:
        """The statements before the change, docstring left out."""
        return "\n".join(self.original.split("\n")[self.body_line - self.first_line :])

    @property
    def text(self) -> str:
        """The broken module. It is built on demand, since thousands of mutants share one long module."""
        data = self.source.encode()
        for edit in self.edits:
            data = data[: edit.start] + edit.text + data[edit.end :]
        return data.decode()


@dataclass(frozen=True)
class MutationCandidate:
    """One way to break a repository: `mutant` in the file of a function, and `elsewhere` in others (path, mutant)."""

    kind: str
    mutant: Mutant
    elsewhere: tuple[tuple[str, Mutant], ...] = ()
    instruction: str = ""  # empty: made of the kind and the function
    sites: int = 1


def mutants(
    source: str, function: Function, seed: int, operators: Mapping[str, Operator] | None = None
) -> list[Mutant]:
    """Every single-site mutant of `function`, in a seeded order in which operators take turns."""
    operators = OPERATORS if operators is None else operators
    rng = random.Random(f"{seed} {function.id}")
    place = FunctionBytes(source, function, rng)
    by_operator: dict[str, list[Mutant]] = {}
    seen = set()
    for name, operator in operators.items():
        fresh = []
        for edits in operator(place):
            mutant = _apply(place, name, edits)
            if mutant is not None and mutant.snippet not in seen:
                seen.add(mutant.snippet)
                fresh.append(mutant)
        rng.shuffle(fresh)
        by_operator[name] = fresh
    ordered: list[Mutant] = []
    while any(by_operator.values()):
        names = [name for name, left in by_operator.items() if left]
        rng.shuffle(names)
        ordered += [by_operator[name].pop() for name in names]
    return ordered


def combined(source: str, function: Function, seed: int, allowed: set[str], limit: int = 12) -> list[Mutant]:
    """At most `limit` mutants with two or three sites, each site broken by another of the `allowed` operators."""
    rng = random.Random(f"{seed} {function.id} combined")
    single = [mutant for mutant in mutants(source, function, seed) if mutant.operator in allowed][: 4 * limit]
    place = FunctionBytes(source, function, rng)
    by_snippet: dict[str, Mutant] = {}
    for size in (2, 3):
        groups = list(combinations(single[: 12 if size == 3 else None], size))
        rng.shuffle(groups)
        for group in groups[: 4 * limit]:
            spans = sorted((edit.start, edit.end) for mutant in group for edit in mutant.edits)
            names = [mutant.operator for mutant in group]
            apart = all(one[1] <= two[0] and one != two for one, two in pairwise(spans))
            if apart and len(set(names)) == size and len(by_snippet) < limit * (size - 1) // 2:
                both = _apply(place, "+".join(sorted(names)), tuple(e for mutant in group for e in mutant.edits))
                if both is not None:
                    by_snippet.setdefault(both.snippet, both)
    result = list(by_snippet.values())
    rng.shuffle(result)
    return result


def merged(parts: Sequence[Mutant], operator: str) -> Mutant:
    """Broken functions of one module as one mutant; its lines are those of the first part."""
    first = parts[0]
    data = first.source.encode()
    edits = tuple(sorted((edit for part in parts for edit in part.edits), key=lambda e: e.start, reverse=True))
    start = min(edit.start for edit in first.edits)
    above = [edit for edit in edits if edit.start < start]
    shift = sum(edit.text.count(b"\n") - data[edit.start : edit.end].count(b"\n") for edit in above)
    return Mutant(
        operator=operator,
        source=first.source,
        edits=edits,
        original="\n".join(part.original for part in parts),
        snippet="\n".join(part.snippet for part in parts),
        first_line=first.first_line + shift,
        last_line=first.last_line + shift,
        body_line=first.body_line + shift,
    )


def draw(
    source: str, function: Function, rng: random.Random, weights: Mapping[str, float], *, single_line: bool = False
) -> Mutant | None:
    """One random mutant: the operator drawn by `weights` among those that apply, then a site uniformly. None if no
    operator with a weight applies. `single_line` keeps to changes inside one line."""
    place = FunctionBytes(source, function, rng)
    names = [name for name in OPERATORS if weights.get(name)]
    while names:
        name = rng.choices(names, [weights[name] for name in names])[0]
        sites = list(OPERATORS[name](place))
        rng.shuffle(sites)
        for edits in sites[:3]:
            mutant = None if single_line and _spans_lines(place, edits) else _apply(place, name, edits)
            if mutant is not None:
                return mutant
        names.remove(name)
    return None


def _spans_lines(place: FunctionBytes, edits: tuple[ByteEdit, ...]) -> bool:
    start, end = min(edit.start for edit in edits), max(edit.end for edit in edits)
    return b"\n" in place.data[start:end] or any(b"\n" in edit.text for edit in edits)


def removal(source: str, function: Function) -> Mutant | None:
    """The function with its body replaced by NotImplementedError; signature and docstring stay."""
    place = FunctionBytes(source, function, random.Random(0))
    first, last = function.body[0], function.body[-1]
    start, end = place.start(first), place.end(last)
    if first.lineno == function.node.lineno or not place.own_lines(start, end):
        return None
    decorators = getattr(first, "decorator_list", [])
    if decorators:
        start = place.line_start(decorators[0].lineno) + decorators[0].col_offset - 1
    return _apply(place, "removal", (ByteEdit(start, end, b"raise NotImplementedError"),))


def _apply(place: FunctionBytes, operator: str, edits: tuple[ByteEdit, ...]) -> Mutant | None:
    """The module after `edits`, or None if it does not parse, or its function means the same."""
    # Only the function is edited and parsed: a module of thousands of lines would cost seconds over all its mutants.
    ordered = tuple(sorted(edits, key=lambda e: e.start, reverse=True))
    data = place.data[place.first : place.last]
    for edit in ordered:
        data = data[: edit.start - place.first] + edit.text + data[edit.end - place.first :]
    snippet = data.decode().removesuffix("\n")
    parsed = parse_snippet(snippet)
    if parsed is None or type(parsed) is not type(place.function.node) or ast.dump(parsed) == place.dump:
        return None
    if ast.get_docstring(parsed, clean=False) != ast.get_docstring(place.function.node, clean=False):
        return None
    first_line = place.function.first_line
    return Mutant(
        operator=operator,
        source=place.source,
        edits=ordered,
        original=place.original,
        snippet=snippet,
        first_line=first_line,
        last_line=first_line + snippet.count("\n"),
        body_line=place.function.body[0].lineno,
    )


def parse_snippet(snippet: str) -> FunctionNode | ast.ClassDef | None:
    """The one function or class in a (possibly indented) snippet; None if it is anything else."""
    indented = snippet[:1] in (" ", "\t")
    try:
        tree = ast.parse("if 1:\n" + snippet if indented else snippet)
    except (SyntaxError, ValueError):
        return None
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    return body[0] if len(body) == 1 and isinstance(body[0], FunctionNode | ast.ClassDef) else None


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
        """Nodes of the body. F-strings are left out: before Python 3.12 their parts have no true positions."""
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
        """Whether nothing but space and a comment shares the lines of [start, end)."""
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
        """Where `operator` stands between two operands; comments are looked past."""
        low, high = self.end(left), self.start(right)
        between = re.sub(rb"#[^\n]*", lambda m: b" " * len(m.group()), self.data[low:high])
        match = re.search(rb"\s+".join(re.escape(word.encode()) for word in operator.split()), between)
        return (low + match.start(), low + match.end()) if match else None


Operator = Callable[[FunctionBytes], Iterator[tuple[ByteEdit, ...]]]


def _delete(place: FunctionBytes, statement: ast.stmt, block: list[ast.stmt]) -> tuple[ByteEdit, ...] | None:
    """Take a statement out with its lines; the last one of a block becomes `pass`."""
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
            if isinstance(first, SIMPLE) and all(place.own_lines(*span) for span in spans):
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
        if spans and text in FLIP:
            yield tuple(ByteEdit(*span, FLIP[text].encode()) for span in spans)


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
