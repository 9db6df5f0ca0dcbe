"""Replaces a changed function in a module that is already imported.

Importing a library costs more than most of its tests. A hot template has imported the pristine library; a forked run
then needs only the bodies of the functions that changed. That equals a fresh import if the change touches only function
bodies, and if none of these functions ran while the library was imported: `record` lists those that ran. Any other
change is refused, and the run is made in a cold template, which imports afresh.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType

from . import code

_PLAIN = frozenset({"staticmethod", "classmethod"})
Ran = set[tuple[str, str]]  # file, qualified name


@contextmanager
def record(ran: Ran, root: str) -> Iterator[None]:
    """Add the functions of files below `root` that run inside the block."""
    prefix = root + os.sep

    def hook(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            ran.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)


def swap(source: code.TreeSource, text: str, module: ModuleType, ran: Ran) -> bool:
    """Make `module`, imported from `source`, equal to an import of a file with `text`. False if that is impossible."""
    cut = source.cut(text)
    if cut is None:
        return False
    old = code.parse(cut.old, cut.begin)
    changed: list[tuple[str, ast.FunctionDef, int]] = []  # qualified name, new definition, pristine line
    if not _differing(old, cut.new, "", changed):
        return False
    compiled = code.compile_part(cut.new, source.path, source.flags, first=False) if changed else None
    changes = []
    for name, node, line in changed:
        function = _function(module, name)
        new = _find(compiled, name, node.lineno)
        if function is None or new is None or (source.path, name) in ran:
            return False
        present = function.__code__
        if present.co_filename != source.path or present.co_firstlineno != line:
            return False
        if present.co_freevars != new.co_freevars:
            return False
        changes.append((function, new, ast.get_docstring(node, clean=False)))
    if cut.shift:
        _shift(module, source.path, cut.end, cut.shift)
    for function, new, docstring in changes:
        function.__code__ = new
        function.__doc__ = docstring
    return True


def _differing(
    old: list[ast.stmt], new: list[ast.stmt], prefix: str, changed: list[tuple[str, ast.FunctionDef, int]]
) -> bool:
    """Collect functions whose bodies differ; False if any other part differs."""
    if len(old) != len(new):
        return False
    for before, after in zip(old, new, strict=True):
        if type(before) is not type(after):
            return False
        kinds = ast.FunctionDef, ast.ClassDef
        if isinstance(before, kinds) and isinstance(after, kinds):
            bodies = before.body, after.body
            before.body, after.body = [], []
            same = ast.dump(before) == ast.dump(after)
            before.body, after.body = bodies
            if not same:
                return False
            if isinstance(before, ast.ClassDef):
                if not _differing(before.body, after.body, f"{prefix}{before.name}.", changed):
                    return False
            elif isinstance(after, ast.FunctionDef) and [*map(ast.dump, before.body)] != [*map(ast.dump, after.body)]:
                if not all(isinstance(d, ast.Name) and d.id in _PLAIN for d in before.decorator_list):
                    return False
                line = min([before.lineno, *(d.lineno for d in before.decorator_list)])
                changed.append((prefix + before.name, after, line))
        elif ast.dump(before) != ast.dump(after):
            return False
    return True


def _function(module: ModuleType, name: str) -> FunctionType | None:
    space = vars(module)
    *classes, last = name.split(".")
    for part in classes:
        kind = space.get(part)
        if not isinstance(kind, type):
            return None
        space = dict(vars(kind))
    value = space.get(last)
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def _find(compiled: CodeType | None, name: str, line: int) -> CodeType | None:
    """The code of a definition that starts at `line`, or whose first decorator does."""
    if compiled is None:
        return None
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == name and 0 <= line - constant.co_firstlineno < 3:
                return constant
            if name.startswith(constant.co_qualname + ".") and (inner := _find(constant, name, line)) is not None:
                return inner
    return None


def _shift(module: ModuleType, path: str, end: int, lines: int) -> None:
    """Move the functions below line `end`, for tracebacks and `inspect`."""
    seen: set[int] = set()
    spaces = [vars(module)]
    while spaces:
        for value in list(spaces.pop().values()):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, FunctionType):
                present = value.__code__
                if present.co_filename == path and present.co_firstlineno > end:
                    value.__code__ = code.moved(present, lines)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                spaces.append(dict(vars(value)))
