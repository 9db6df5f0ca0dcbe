"""Small breakages of a function, written as text edits so that everything but the broken place keeps its layout.

The operator families follow the procedural bugs of SWE-smith (Yang et al. 2025). These mutations make supervised repair
examples; the tasks for reinforcement learning come from the separate operators in `etude.tasks`.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from etude.corpus.filters import parse

_FAMILIES: tuple[dict[type, str], ...] = (
    {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    {ast.Eq: "==", ast.NotEq: "!="},
    {ast.Is: "is", ast.IsNot: "is not"},
    {ast.In: "in", ast.NotIn: "not in"},
    {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"},
    {ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"},
    {ast.LShift: "<<", ast.RShift: ">>"},
    {ast.And: "and", ast.Or: "or"},
)
_TEXT = {operator: text for family in _FAMILIES for operator, text in family.items()}
_PEERS = {operator: [t for o, t in family.items() if o is not operator] for family in _FAMILIES for operator in family}
_FLIP = {ast.Lt: ">", ast.LtE: ">", ast.Gt: "<", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
         ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
_BUILTINS = frozenset(dir(builtins))
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete)

# Single-line changes of an expression dominate, as in real one-line bugs; removals need more than copying to repair.
WEIGHTS: dict[str, float] = {
    "op_change": 10, "op_flip": 8, "op_swap": 8, "op_break_chain": 6, "op_const": 9, "bool_flip": 4, "negate": 9,
    "unnegate": 5, "wrong_name": 8, "wrong_attribute": 4, "wrong_call": 4, "argument_drop": 4, "slice_bound": 5,
    "string_const": 2, "return_value": 5, "return_removal": 3, "loop_jump": 2, "augmented": 3, "unwrap_call": 3,
    "invert_if": 6, "shuffle_lines": 5, "remove_assign": 5, "remove_cond": 5, "remove_loop": 2, "unwrap_cond": 3,
    "remove_line": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """Replace `source[start:end]` by `text`."""

    operator: str
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class _Function:
    """A parsed function with the character offsets of its nodes (the source must be ASCII, so bytes are characters)."""

    def __init__(self, source: str) -> None:
        tree = parse(source)
        if tree is None or not tree.body or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
            raise ValueError("mutations need the source of exactly one function")
        if not source.isascii():
            raise ValueError("mutations need ASCII source")
        self.source = source
        self.node = tree.body[0]
        self.starts = [0]
        for line in source.split("\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        inside = [n for stmt in self.node.body for n in ast.walk(stmt)]
        self.nodes = [n for n in inside if hasattr(n, "lineno") or isinstance(n, ast.comprehension)]
        arguments = self.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        names = [a.arg for a in every if a is not None]
        names += [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.names = sorted(set(names) - {"self", "cls", "_"})
        self.attributes = sorted({n.attr for n in inside if isinstance(n, ast.Attribute)})
        self.called = sorted({n.func.id for n in inside if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)})
        self.strings = sorted({n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str)})

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def lines(self, first: int, last: int) -> tuple[int, int]:
        """Offsets of whole lines first..last (1-based), with the newline that follows them, or precedes at the end."""
        start, end = self.starts[first - 1], self.starts[last]
        if end > len(self.source):
            return max(0, start - 1), len(self.source)
        return start, end

    def blocks(self) -> Iterator[list[ast.stmt]]:
        for node in [self.node, *self.nodes]:
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    yield block


Candidates = Iterator[tuple[int, int, str]]
Operator = Callable[[_Function, random.Random], Candidates]


def _operator_span(f: _Function, left: ast.AST, right: ast.AST, text: str) -> tuple[int, int] | None:
    """Where the operator stands between two operands; None when the gap spans lines or holds a comment."""
    start, end = f.span(left)[1], f.span(right)[0]
    gap = f.source[start:end]
    if "\n" in gap:
        return None
    pattern = re.escape(text).replace(r"\ ", r"\s+") if not text.isalpha() else rf"\b{text}\b"
    found = re.search(pattern, gap)
    return (start + found.start(), start + found.end()) if found else None


def _binary(f: _Function) -> Iterator[tuple[ast.AST, type, ast.AST, ast.AST]]:
    for node in f.nodes:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, type(node.ops[0]), node.left, node.comparators[0]
        elif isinstance(node, ast.BinOp):
            yield node, type(node.op), node.left, node.right
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield node, type(node.op), left, right


def _op_change(f: _Function, rng: random.Random) -> Candidates:
    for _, operator, left, right in _binary(f):
        if operator in _PEERS and (span := _operator_span(f, left, right, _TEXT[operator])):
            yield *span, rng.choice(_PEERS[operator])


def _op_flip(f: _Function, rng: random.Random) -> Candidates:
    for _, operator, left, right in _binary(f):
        if operator in (ast.And, ast.Or):
            flipped = "or" if operator is ast.And else "and"
        elif operator in _FLIP:
            flipped = _FLIP[operator]
        else:
            continue
        if span := _operator_span(f, left, right, _TEXT[operator]):
            yield *span, flipped


def _op_swap(f: _Function, rng: random.Random) -> Candidates:
    pairs = [(left, right) for node, _, left, right in _binary(f) if not isinstance(node, ast.BoolOp)]
    for node in f.nodes:
        if isinstance(node, ast.Call):
            pairs += zip(node.args, node.args[1:], strict=False)
        elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) == 2:
            pairs.append((node.elts[0], node.elts[1]))
    for left, right in pairs:
        start, end = f.span(left)[0], f.span(right)[1]
        a, b = f.text(left), f.text(right)
        if "\n" not in f.source[start:end] and a != b and not isinstance(right, ast.Starred):
            yield start, end, b + f.source[f.span(left)[1] : f.span(right)[0]] + a


def _op_break_chain(f: _Function, rng: random.Random) -> Candidates:
    for node, operator, left, right in _binary(f):
        if isinstance(node, ast.Compare) or (operator is ast.Mod and isinstance(left, ast.Constant)):
            continue
        start, end = f.span(left)[0], f.span(right)[1]
        if "\n" not in f.source[start:end]:
            yield start, end, f.text(left if rng.random() < 0.7 else right)


def _op_const(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int and f.text(node).isdigit():
            value = node.value + (1 if node.value == 0 else rng.choice((-1, 1)))
            yield *f.span(node), str(value)


def _bool_flip(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is bool:
            yield *f.span(node), str(not node.value)


def _string_const(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= 20:
            others = [
                s
                for s in [*f.strings, "", " ", "_"]
                if s != node.value and len(s) <= 20 and s.isascii() and s.isprintable()
            ]
            text = f.text(node)
            if others and text[:1] in "'\"" and text[:3] not in ("'''", '"""'):
                yield *f.span(node), text[0] + rng.choice(others).replace("\\", "").replace(text[0], "") + text[0]


def _negate(f: _Function, rng: random.Random) -> Candidates:
    tests: list[ast.expr] = []
    for node in f.nodes:
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            tests.append(node.test)
        elif isinstance(node, ast.comprehension):
            tests += node.ifs
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Compare | ast.BoolOp):
            tests.append(node.value)
    for test in tests:
        text = f.text(test)
        if "\n" in text or (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            continue
        plain = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        yield *f.span(test), f"not {text}" if plain or rng.random() < 0.3 else f"not ({text})"


def _unnegate(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub) and "\n" not in f.text(node):
            yield *f.span(node), f.text(node.operand)


def _wrong_name(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in f.names:
            others = [name for name in f.names if name != node.id]
            if others:
                yield *f.span(node), rng.choice(others)


def _wrong_attribute(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Attribute):
            others = [name for name in f.attributes if name != node.attr]
            end = f.span(node)[1]
            if others and f.source[end - len(node.attr) : end] == node.attr:
                yield end - len(node.attr), end, rng.choice(others)


_LIKE_BUILTINS = (
    ("min", "max"),
    ("any", "all"),
    ("list", "tuple", "set"),
    ("int", "float", "str"),
    ("sorted", "reversed"),
    ("map", "filter"),
    ("isinstance", "issubclass"),
    ("getattr", "hasattr"),
    ("enumerate", "zip"),
)


def _wrong_call(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            others = [name for name in f.called if name != node.func.id]
            others += [
                name for group in _LIKE_BUILTINS if node.func.id in group for name in group if name != node.func.id
            ]
            if others:
                yield *f.span(node.func), rng.choice(others)


def _unwrap_call(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and "\n" not in f.text(node):
            named = isinstance(node.func, ast.Name) and (node.func.id in _BUILTINS or node.func.id in f.called)
            if named and not isinstance(node.args[0], ast.Starred | ast.GeneratorExp):
                yield *f.span(node), f.text(node.args[0])


def _argument_drop(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if not isinstance(node, ast.Call):
            continue
        spans = [f.span(a) for a in node.args] + [f.span(k) for k in node.keywords]
        if len(spans) > 1:
            index = rng.randrange(1, len(spans))
            start, end = spans[index - 1][1], spans[index][1]
            if "\n" not in f.source[start:end]:
                yield start, end, ""


def _slice_bound(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if not isinstance(node, ast.Slice):
            continue
        for bound in (node.lower, node.upper):
            if bound is not None and "\n" not in f.text(bound):
                text = f.text(bound)
                simple = isinstance(bound, ast.Name | ast.Call | ast.Attribute)
                choices = ["", f"{text} + 1", f"{text} - 1"] if simple else [""]
                yield *f.span(bound), rng.choice(choices)


def _return_value(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Return) and node.value is not None and "\n" not in f.text(node.value):
            others = [name for name in [*f.names, "None"] if name != f.text(node.value)] or ["True"]
            yield *f.span(node.value), rng.choice(others)


def _return_removal(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Return) and node.value is not None and "\n" not in f.text(node):
            yield *f.span(node), rng.choice((f.text(node.value), "return", "pass"))


def _loop_jump(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.Break):
            yield *f.span(node), rng.choice(("continue", "pass"))
        elif isinstance(node, ast.Continue):
            yield *f.span(node), rng.choice(("break", "pass"))


def _augmented(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.AugAssign):
            start, end = f.span(node.target)[1], f.span(node.value)[0]
            text = _TEXT.get(type(node.op), "")
            if text and f.source[start:end].strip() == f"{text}=":
                yield start, end, rng.choice((" = ", *(f" {peer}= " for peer in _PEERS[type(node.op)])))


def _invert_if(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.IfExp) and "\n" not in f.text(node):
            start, end = f.span(node)
            yield start, end, f"{f.text(node.orelse)} if {f.text(node.test)} else {f.text(node.body)}"
        elif isinstance(node, ast.If) and node.orelse:
            body, other = node.body, node.orelse
            first, last = body[0].lineno, body[-1].end_lineno or 0
            after, end = other[0].lineno, other[-1].end_lineno or 0
            # Only `if A: ... else: ...` with each branch on lines of its own, and `else:` alone between them.
            middle = f.source.split("\n")[last : after - 1]
            if [line.strip() for line in middle] != ["else:"] or first <= (node.test.end_lineno or 0):
                continue
            a, b = f.lines(first, last), (f.starts[after - 1], f.starts[end] - 1)
            between = f.source[a[1] : b[0]]
            yield a[0], b[1], f"{f.source[slice(*b)]}\n{between}{f.source[a[0] : a[1] - 1]}"


def _own_lines(f: _Function, stmt: ast.stmt) -> bool:
    """Whether a statement shares no line with another one."""
    start, end = f.span(stmt)
    line_end = f.source.find("\n", end)
    rest = f.source[end : line_end if line_end >= 0 else len(f.source)].strip()
    return not f.source[f.starts[stmt.lineno - 1] : start].strip() and (not rest or rest.startswith("#"))


def _shuffle_lines(f: _Function, rng: random.Random) -> Candidates:
    for block in f.blocks():
        for one, two in itertools.pairwise(block):
            if not (isinstance(one, _SIMPLE) and isinstance(two, _SIMPLE)) or isinstance(one, ast.Return | ast.Raise):
                continue
            if one.lineno == one.end_lineno and two.lineno == two.end_lineno == one.lineno + 1:
                a, b = f.starts[one.lineno - 1], f.starts[two.lineno - 1]
                end = f.starts[two.lineno] - 1
                yield a, end, f"{f.source[b:end]}\n{f.source[a : b - 1]}"


def _removal(kinds: tuple[type, ...], lines: int) -> Operator:
    def candidates(f: _Function, rng: random.Random) -> Candidates:
        for block in f.blocks():
            for stmt in block:
                last = stmt.end_lineno or 0
                if isinstance(stmt, kinds) and last - stmt.lineno < lines and len(block) > 1 and _own_lines(f, stmt):
                    inside_elif = f.text(stmt).startswith("elif")
                    if not inside_elif:
                        yield *f.lines(stmt.lineno, last), ""

    return candidates


def _unwrap_cond(f: _Function, rng: random.Random) -> Candidates:
    for node in f.nodes:
        if isinstance(node, ast.If) and not node.orelse and f.text(node).startswith("if"):
            last = node.end_lineno or 0
            if node.body[0].lineno == node.lineno + 1 and last - node.lineno <= 3 and _own_lines(f, node):
                shift = node.body[0].col_offset - node.col_offset
                body = f.source.split("\n")[node.lineno : last]
                if all(not line.strip() or line[:shift].isspace() for line in body):
                    start, end = f.starts[node.lineno - 1], f.starts[last] - 1
                    yield start, end, "\n".join(line[shift:] for line in body)


OPERATORS: dict[str, Operator] = {
    "op_change": _op_change, "op_flip": _op_flip, "op_swap": _op_swap, "op_break_chain": _op_break_chain,
    "op_const": _op_const, "bool_flip": _bool_flip, "string_const": _string_const, "negate": _negate,
    "unnegate": _unnegate, "wrong_name": _wrong_name, "wrong_attribute": _wrong_attribute, "wrong_call": _wrong_call,
    "unwrap_call": _unwrap_call, "argument_drop": _argument_drop, "slice_bound": _slice_bound,
    "return_value": _return_value, "return_removal": _return_removal, "loop_jump": _loop_jump, "augmented": _augmented,
    "invert_if": _invert_if, "shuffle_lines": _shuffle_lines, "unwrap_cond": _unwrap_cond,
    "remove_assign": _removal((ast.Assign, ast.AugAssign, ast.AnnAssign), 3), "remove_cond": _removal((ast.If,), 4),
    "remove_loop": _removal((ast.For, ast.While), 4), "remove_line": _removal((ast.Expr, ast.Return, ast.Raise), 2),
}  # fmt: skip


def mutate(
    source: str, rng: random.Random, *, weights: Mapping[str, float] = WEIGHTS, single_line: bool = False
) -> Mutation | None:
    """A random mutation of one function, or None when none applies; the broken function always parses and differs.

    The operator is drawn by `weights` among those that apply, then the place uniformly; one without a weight is not
    used. `single_line` keeps to changes inside one line. Raises ValueError when `source` is not one ASCII function.
    """
    function = _Function(source)
    operators = [
        name
        for name in OPERATORS
        if weights.get(name) and not (single_line and name.startswith(("remove", "shuffle", "unwrap_cond")))
    ]
    while operators:
        name = rng.choices(operators, [weights[operator] for operator in operators])[0]
        found = list(OPERATORS[name](function, rng))
        rng.shuffle(found)
        for start, end, text in found[:3]:
            mutation = Mutation(name, start, end, text)
            if single_line and ("\n" in text or "\n" in source[start:end]):
                continue
            if _meaningful(source, mutation):
                return mutation
        operators.remove(name)
    return None


def _meaningful(source: str, mutation: Mutation) -> bool:
    """The result parses to a different syntax tree, so the change is neither a syntax error nor mere layout."""
    before, after = parse(source), parse(mutation.apply(source))
    return before is not None and after is not None and ast.dump(before) != ast.dump(after)
