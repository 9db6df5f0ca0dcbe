"""Sham answers: bodies that need no understanding of a function, such as `return None`. A task whose hidden tests one
of them passes would reward shams, and is none."""

from __future__ import annotations

import ast

from etude.code import is_script
from etude.records import CodeTask

# Equal to everything, callable, iterable, and a context that no exception leaves.
_EVERYTHING = """class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __call__(self, *arguments, **named): return self
    def __getattr__(self, name): return self
    def __iter__(self): return iter(())
    def __enter__(self): return self
    def __exit__(self, *error): return True
return Anything()"""
# Of a context manager: what happens in its block is swallowed.
_SWALLOW = """try:
    yield None
except BaseException:
    pass"""
# An error of as many classes as go together, with every text and name of the module in its message.
_RAISE = """texts, bases = [*map(str, locals().values())], ()
own = [v for v in globals().values() if isinstance(v, type) and issubclass(v, Exception)]
for kind in (*own, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError):
    try:
        bases = type("Error", (*bases, kind), {}).__bases__
    except TypeError:
        pass
code = [v.__code__ for v in globals().values() if hasattr(v, "__code__")]
texts += [text for each in code for text in (*each.co_consts, *each.co_names) if isinstance(text, str)]
texts += globals()
raise type("Error", bases, {"__str__": lambda self: " ".join(texts)[:4000]})()"""
_BODIES = ("return None", "return True", "return False", "return iter(())", _EVERYTHING, _SWALLOW, _RAISE)


def shams(task: CodeTask) -> list[dict[str, bytes | None]]:
    """The change sets of sham answers to a task on one function of Python; empty for other tasks."""
    path = task.focus.path
    qualname = task.function.partition("::")[2]
    if is_script(path) or path not in task.changes:
        return []
    text = task.changes[path]
    try:
        definition = _definition(ast.parse(text), qualname.split("."))
    except (SyntaxError, ValueError):
        return []
    if definition is None:
        return []
    parameters = [argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args)]
    bodies = [*_BODIES, *(f"return {name}" for name in parameters[:2])]
    return [{path: _with_body(text, definition, body).encode("utf-8", "surrogateescape")} for body in bodies]


def _definition(tree: ast.AST, names: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function of that qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == names[0]:
            if names[1:]:
                return _definition(node, names[1:])
            return None if isinstance(node, ast.ClassDef) else node
    return None


def _with_body(text: str, definition: ast.FunctionDef | ast.AsyncFunctionDef, body: str) -> str:
    """The text with another body of the function, on lines of its own below the signature."""
    lines = text.split("\n")
    first, last = definition.body[0], definition.end_lineno or definition.lineno
    margin = lines[definition.lineno - 1]
    indent = margin[: len(margin) - len(margin.lstrip())] + "    "
    begin = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))])
    # Of a body on the line of its signature, the part of the line before the body stays. Offsets count bytes.
    before = lines[begin - 1].encode("utf-8", "surrogateescape")[: first.col_offset].decode("utf-8", "surrogateescape")
    head = [before.rstrip()] if begin == first.lineno and before.strip() else []
    return "\n".join([*lines[: begin - 1], *head, *(indent + line for line in body.split("\n")), *lines[last:]])
