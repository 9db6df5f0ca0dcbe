"""Cuts an example out of a hidden test: the statement at which the test fails, and those before it that it needs.

Imports, constants of the file and a row of values come first. All other names that it reads are defined in files that
the agent sees. So the example can be read, and mostly run, without the test.
"""

import ast
import builtins
import re
from collections.abc import Callable, Iterable
from typing import Any

from etude.code import is_script, parse
from etude.code.functions import FunctionNode
from etude.tasks import javascript
from etude.tasks.split import functions_of

MAX_LINES = 12
MAX_WIDTH = 200  # of a line
_KNOWN = {*dir(builtins), "self", "cls", "tmp_path", "monkeypatch", "capsys", "caplog", "recwarn", "request"}
_SCRIPT_NAMES = ("identifier", "shorthand_property_identifier")
_BINDING = {  # kind of node -> its field with the names that it binds
    "variable_declarator": "name",
    "assignment_expression": "left",
    "function_declaration": "name",
    "class_declaration": "name",
    "arrow_function": "parameter",
}
_ASSERTS = re.compile(rb"(?:await\s+)?(?:assert|expect|should|t|\w*[eE]quals?|is|ok|same|throws|rejects)\b")
_BLOCKS = ("statement_block", "program")


def example(test: str, text: str, line: int, known: Callable[[str], bool]) -> str:
    """The example in the hidden `test`, which fails at this line of its file's text; empty if there is none.

    known: whether the agent can see what a name stands for, besides the builtins.
    """
    path, _, name = test.partition("::")
    lines = (_script if is_script(path) else _python)(path, text, name, line, known)
    fits = 0 < len(lines) <= MAX_LINES and all(len(each) <= MAX_WIDTH for each in lines)
    return "\n".join(lines) if fits else ""


def _python(path: str, text: str, name: str, line: int, known: Callable[[str], bool]) -> list[str]:
    tree = parse(text)
    plain, bracket, row = name.partition("[")
    node = dict(functions_of(tree.body, "")).get(plain) if tree is not None else None
    body = node.body if node is not None else ()
    place = next((i for i, part in enumerate(body) if part.lineno <= line <= (part.end_lineno or part.lineno)), None)
    if tree is None or node is None or place is None:
        return []
    chosen, needed = [body[place]], _loaded(body[place])
    for part in reversed(body[:place]):
        bound = _bound(part)
        if bound & needed or (isinstance(part, ast.Expr) and _changes(part) & needed):
            chosen.insert(0, part)
            needed |= _loaded(part)
    made = {name for part in chosen for name in _bound(part)}
    values = _row(node, row.removesuffix("]")) if bracket else {}
    wanted = {name for name in needed - made - _KNOWN if name not in values}
    if bracket and not values and wanted & _rows(node):
        return []
    lines, bound_above = _above(tree, wanted - _arguments(node))
    if not all(map(known, wanted - bound_above)):
        return []
    lines += [f"{name} = {value}" for name, value in values.items() if name in needed]
    source = text.split("\n")
    for part in chosen:
        lines += [each[part.col_offset :] for each in source[part.lineno - 1 : part.end_lineno]]
    return lines


def _above(tree: ast.Module, names: set[str]) -> tuple[list[str], set[str]]:
    """(lines that give names, these names): imports and constants at the top of a test file."""
    lines: list[str] = []
    bound_above: set[str] = set()
    for part in tree.body:
        match part:
            case ast.Import() | ast.ImportFrom(level=0):
                if kept := [alias for alias in part.names if (alias.asname or alias.name.partition(".")[0]) in names]:
                    source = f"from {part.module} " if isinstance(part, ast.ImportFrom) else ""
                    lines.append(f"{source}import {', '.join(map(ast.unparse, kept))}")
                    bound_above |= {alias.asname or alias.name.partition(".")[0] for alias in kept}
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names and _is_literal(value):
                lines.append(f"{name} = {ast.unparse(value)}")
                bound_above.add(name)
            case _:
                pass
    return lines, bound_above


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _arguments(node: FunctionNode) -> set[str]:
    return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}


def _loaded(node: ast.AST) -> set[str]:
    """Names that a statement reads, and members of `self`."""
    own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    members = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _is_self(n.value)}
    return own | {name for name in members if not name.startswith("assert")}


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement binds."""
    names: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                names.add(name)
            case _:
                pass
    return names


def _changes(node: ast.Expr) -> set[str]:
    """The names of objects that the call of a statement may change: `items.append(1)`, `fill(items)`."""
    if not isinstance(node.value, ast.Call) or any(name.startswith("assert") for name in _called(node.value)):
        return set()
    return {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}


def _called(call: ast.Call) -> list[str]:
    return [call.func.attr] if isinstance(call.func, ast.Attribute) else []


def _marks(node: FunctionNode) -> list[tuple[list[str], list[ast.expr]]]:
    """(names, rows) of each `parametrize` above a test."""
    marks = []
    for decorator in node.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.parametrize")):
            continue
        parts = [*decorator.args, *(word.value for word in decorator.keywords if word.arg == "argvalues")]
        match parts[:2]:
            case [ast.Constant(value=str(names)), ast.List(elts=rows) | ast.Tuple(elts=rows)]:
                marks.append(([name.strip() for name in names.split(",") if name.strip()], rows))
            case [ast.List(elts=names) | ast.Tuple(elts=names), ast.List(elts=rows) | ast.Tuple(elts=rows)]:
                marks.append(([str(getattr(name, "value", "")) for name in names], rows))
            case _:
                marks.append(([], []))
    return marks


def _rows(node: FunctionNode) -> set[str]:
    """The parameters that rows give; all, if they cannot be read."""
    marks = _marks(node)
    if any(not names for names, _ in marks):
        return _arguments(node)
    return {name for names, _ in marks for name in names}


def _row(node: FunctionNode, wanted: str) -> dict[str, str]:
    """Parameter -> its value in the row of this id, as source text; empty if the row cannot be told."""
    marks = _marks(node)
    if len(marks) != 1:
        return {}
    (names, rows), hits = marks[0], list[dict[str, str]]()
    for place, row in enumerate(rows):
        cells = row.elts if len(names) > 1 and isinstance(row, ast.Tuple | ast.List) else [row]
        if len(cells) == len(names):
            ids = [_id(cell, f"{name}{place}") for name, cell in zip(names, cells, strict=True)]
            if "-".join(ids) == wanted:
                hits.append({name: ast.unparse(cell) for name, cell in zip(names, cells, strict=True)})
    return hits[0] if len(hits) == 1 else {}


def _id(cell: ast.expr, other: str) -> str:
    """The part of a test's id for a value, as pytest makes it."""
    try:
        value = ast.literal_eval(cell)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return other
    if isinstance(value, str):
        return value.encode("unicode_escape").decode("ascii")
    return str(value) if isinstance(value, int | float | bool | complex) or value is None else other


def _script(path: str, text: str, name: str, line: int, known: Callable[[str], bool]) -> list[str]:
    node = javascript.test_nodes(path, text).get(name)
    blocks = [part for part in javascript.walk(node) if part.type in _BLOCKS] if node is not None else []
    inside = [block for block in blocks if block.start_point[0] + 1 <= line <= block.end_point[0] + 1]
    body = inside[0].named_children if inside else []  # that of the test's own function
    place = next((i for i, part in enumerate(body) if part.start_point[0] < line <= part.end_point[0] + 1), None)
    if place is None:
        return []
    chosen, needed = [body[place]], _names(body[place])
    for part in reversed(body[:place]):
        bound = _declared([part])
        changed = _names(part) if part.type == "expression_statement" and not _asserts(part) else set[str]()
        if bound & needed or changed & needed & _declared(body[:place]):
            chosen.insert(0, part)
            needed |= _names(part)
    wanted = needed - _declared(chosen) - javascript.BUILTINS
    if not all(map(known, wanted)):
        return []
    source, lines = text.split("\n"), list[str]()
    for part in chosen:
        indent = len(source[part.start_point[0]]) - len(source[part.start_point[0]].lstrip())
        for each in source[part.start_point[0] : part.end_point[0] + 1]:
            lines.append(each[indent:] if not each[:indent].strip() else each)
    return lines


def _names(node: Any) -> set[str]:
    return {part.text.decode() for part in javascript.walk(node) if part.type in _SCRIPT_NAMES}


def _declared(nodes: Iterable[Any]) -> set[str]:
    """Names that declarations, parameters and assignments among these nodes bind."""
    names: set[str] = set()
    for part in (part for node in nodes for part in javascript.walk(node)):
        target = part.child_by_field_name(_BINDING[part.type]) if part.type in _BINDING else None
        if part.type == "formal_parameters":
            target = part
        for inner in javascript.walk(target) if target is not None else ():
            if inner.type in ("identifier", "shorthand_property_identifier_pattern"):
                names.add(inner.text.decode())
    return names


def _asserts(node: Any) -> bool:
    return _ASSERTS.match(node.text) is not None
