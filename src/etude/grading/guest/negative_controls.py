"""Negative-control tests, which must fail: the call of a test, compared with a wrong value.

A test whose last statement is `assert CALL == EXPECTED` gets a control that compares with a value unlike EXPECTED.
Honest code passes the test and fails the control; a result that claims to equal everything passes both.
"""

from __future__ import annotations

import ast
import copy

WRONG = "@wrong"  # not a name that source text can hold
_UNFIT = (ast.Assert, ast.Return, ast.Yield, ast.YieldFrom, ast.With)


def add(tree: ast.Module, token: str) -> None:
    """Append negative controls of the module's test functions, named `test_TOKEN_NAME`."""
    controls = [control for node in tree.body if (control := _control(node, token)) is not None]
    if controls:
        tree.body.extend(controls)
        first = tree.body.index(controls[0])
        tree.body[first:first] = ast.parse(f"from {__name__} import wrong").body
        tree.body[first].names[0].asname = WRONG  # type: ignore[attr-defined]


def name(test: str, token: str) -> str:
    """Node id of the negative control of a module's test function; methods and doctests have none."""
    path, _, rest = test.partition("::")
    return f"{path}::test_{token}_{rest}"


def _control(node: ast.stmt, token: str) -> ast.stmt | None:
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return None
    last = node.body[-1]
    if not isinstance(last, ast.Assert) or not isinstance(last.test, ast.Compare):
        return None
    if len(last.test.ops) != 1 or not isinstance(last.test.ops[0], ast.Eq):
        return None
    # After an early return or a loop's assertion the control could pass, or fail, for another reason.
    if any(isinstance(part, _UNFIT) for stmt in node.body[:-1] for part in ast.walk(stmt)):
        return None
    control = copy.deepcopy(node)
    control.name = f"test_{token}_{node.name}"
    compare = control.body[-1].test  # type: ignore[attr-defined]
    if _calls(compare.comparators[0]) and not _calls(compare.left):
        compare.left = _falsified(control, compare.left)
    else:
        compare.comparators[0] = _falsified(control, compare.comparators[0])
    ast.fix_missing_locations(control)
    return control


def _calls(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Call) for part in ast.walk(node))


def _falsified(control: ast.FunctionDef, expected: ast.expr) -> ast.expr:
    """An expression with another value than `expected`, so that the control's frame does not hold the right value."""
    if isinstance(expected, ast.Name):
        uses = sum(isinstance(part, ast.Name) and part.id == expected.id for part in ast.walk(control))
        if uses == 1 and any(parameter.arg == expected.id for parameter in control.args.args):
            assign = ast.Assign([ast.Name(expected.id, ast.Store())], _wrapped(expected))
            control.body.insert(0, ast.copy_location(assign, control.body[0]))
            return expected
    try:
        text = repr(wrong(ast.literal_eval(expected)))
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return _wrapped(expected)
    literal = ast.parse(text, mode="eval").body
    for part in ast.walk(literal):
        ast.copy_location(part, expected)
    return literal


def _wrapped(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(WRONG, ast.Load()), [node], []), node)


def wrong(value: object, depth: int = 8) -> object:
    """A value of the same type and size whose every part differs from `value`."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float, complex):
        return value + 1 if abs(value) < 1e9 else 0  # type: ignore[operator,arg-type]
    if kind is str:
        return f"{value}~"
    if kind is bytes:
        return value + b"~"  # type: ignore[operator]
    if depth and value and kind in (list, tuple):
        return kind(wrong(item, depth - 1) for item in value)  # type: ignore[call-arg,attr-defined]
    if depth and value and kind is dict:
        return {key: wrong(item, depth - 1) for key, item in value.items()}  # type: ignore[attr-defined]
    if kind in (list, tuple, set):
        return kind(["~"])  # type: ignore[call-arg]
    return {"~": "~"} if kind is dict else "~" if value is None else object()
