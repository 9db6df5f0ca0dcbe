"""Calls of a user's functions inside the box: the function's module travels there as source, with the arguments.

The box's Python executes the module (`sandbox/guest/boxed_runner.py`), so that a crash, a lack of memory or a loop
costs the call. The result comes back in a line of its own; printed text goes nowhere. Nothing is written into the tree.
"""

import ast
import base64
import inspect
import json
import shlex
import signal
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from etude.code import first_line_of
from etude.code.functions import decoded
from etude.errors import UserError
from etude.harness.tools import Exec
from etude.renderers import ToolError, one_line
from etude.sandbox import WORKSPACE
from etude.sandbox.guest import boxed_runner

MAX_SOURCE = 60_000  # bytes of the compressed modules in base64
MAX_ORDER = 95_000  # of these and the arguments: a command line of a box has at most 100,000 bytes
MAX_ERROR = 400  # characters

_RUNNER = inspect.getsource(boxed_runner)
# Modules of the tree that are called like the standard library's do not stand in the way of these imports.
_START = """
import sys
path, sys.path[:] = sys.path[:], [folder for folder in sys.path if folder.startswith(sys.base_prefix)]
import base64, json, zlib
order, names = json.loads(zlib.decompress(base64.b64decode(sys.stdin.buffer.read()))), {}
exec(compile(order["runner"], "runner", "exec"), names)
sys.path[:] = path
names["run"](order)
"""
# -B: bytecode would be a change of the tree.
_COMMAND = f"( cd {WORKSPACE} && exec python3 -B -c {shlex.quote(_START)} 3>&1 >/dev/null 2>&1 ) <<< "


class _CallReport(msgspec.Struct):
    """The result of a call in a box, or its error."""

    text: str | None = None
    error: str | None = None


def refuse_inner(function: Callable[..., Any]) -> None:
    """Raises UserError for a function that its module does not have by name: a closure, a lambda or a method."""
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise UserError(
            f"the tool {name or repr(function)} cannot run in a box: a boxed tool is a function at the top of a module"
        )


def module_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The file name and the source of a function's module. Raises UserError if a box cannot execute it."""
    name, module = function.__name__, sys.modules.get(function.__module__)
    why = f"the tool {name} cannot run in a box: "
    if module is None or getattr(module, name, None) is not function:
        raise UserError(f"{why}{function.__module__}.{name} is another object")
    try:
        file = inspect.getsourcefile(module)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise UserError(f"{why}its module {function.__module__} has no source file")
    return Path(file).name, _needed(file, name, f"{why}its module {function.__module__}")


@cache
def _needed(file: str, function: str, why: str) -> str:
    """The statements of a file that a function needs, on their lines: its own, and those that define or change a name
    that these read. Raises UserError, whose message `why` begins."""
    try:
        source = decoded(Path(file).read_bytes())
        statements = ast.parse(source).body
    except (OSError, ValueError, SyntaxError) as e:
        raise UserError(f"{why} cannot be read: {e}") from None
    names, kept, count = {function, "annotations", "*"}, list[ast.stmt](), -1
    while len(kept) > count:
        count, kept = len(kept), [statement for statement in statements if _defined(statement) & names]
        names |= {node.id for statement in kept for node in ast.walk(statement) if isinstance(node, ast.Name)}
    for node in (node for statement in kept for node in ast.walk(statement)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise UserError(
                f"{why} imports from its package (line {node.lineno}: {ast.unparse(node)}), which the box does not "
                "have: a part of one file travels there, with imports of the standard library, the repository and its "
                "packages"
            )
    lines, source_lines = set[int](), source.split("\n")
    for statement in kept:
        lines |= {*range(first_line_of(statement), (statement.end_lineno or 0) + 1)}
    source = "\n".join(line if number in lines else "" for number, line in enumerate(source_lines, 1))
    if (size := len(_packed(source=source))) > MAX_SOURCE:
        raise UserError(f"{why} is too large: {size:,} bytes compressed, and {MAX_SOURCE:,} fit a command")
    return source


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module defines or changes."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            root: ast.expr = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            names |= {root.id} if isinstance(root, ast.Name) else set()
    return names


def _packed(**order: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(order | {"runner": _RUNNER}).encode())).decode()


async def call_boxed(
    name: str, module: tuple[str, str], arguments: dict[str, Any], execute: Exec, seconds: float, mark: str
) -> str:
    """The result of a function in a box, as text; `module` is of `module_of`, and `mark` a text that the function
    cannot know. Raises ToolError, and BoxError."""
    data = _packed(mark=mark, file=module[0], source=module[1], function=name, arguments=arguments)
    if len(data) > MAX_ORDER:
        raise ToolError(f"the arguments of {name} are too long")
    done = await execute(_COMMAND + data, seconds)
    try:
        report = msgspec.json.decode(done.output.partition(mark)[2].partition("\n")[0], type=_CallReport)
    except (msgspec.MsgspecError, UnicodeError):
        report = _CallReport()
    if report.text is not None:
        return report.text
    if report.error is not None:
        raise ToolError(one_line(report.error, MAX_ERROR))
    if done.timed_out:
        raise ToolError(f"{name} took longer than {seconds:.3g} seconds")
    raise ToolError(f"{name} ended without a result ({_end(done.rc)})")


def _end(code: int | None) -> str:
    """How a command ended, by its exit code in a shell."""
    if code is None:
        return "the shell of the box was lost: too much memory ends all its processes"
    if code == 127:
        return "the box has no python3"
    try:
        return f"ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"
