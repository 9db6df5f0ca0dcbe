"""The program that calls a function inside a box; `harness/boxed_tools.py` sends it there with the function's module.

It needs the standard library alone, of a Python from 3.8 on, and writes one line to descriptor 3: the order's mark,
then a report as JSON.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_LINE = 30_000  # bytes of a report's line: the shell keeps 32,000 of an output whole
NAME = "etude_tool"  # of the module in the box, where the repository may have one of the module's own name


def text_of(result: object) -> str:
    """A result as the model reads it: text as it is, bytes as UTF-8, anything else as `str` has it."""
    if isinstance(result, (bytes, bytearray)):
        return bytes(result).decode("utf-8", "replace")
    return str(result)


def sentence_of(error: BaseException) -> str:
    """The type and the message of an exception, as the last line of a traceback has them."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def cut_to(text: str, most: int) -> str:
    """The beginning and the end of a text of more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[len(text) - half :]}"


def _tool(function: Any = None, **_: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


class _Anything(Exception):
    """A class of `etude` for a module that only names it: in annotations, as a base, as an error to raise, or as a
    decorator of methods."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> type[_Anything]:
        return cls

    def __init__(self, *values: Any, **_: Any) -> None:
        super().__init__(*values)

    def __call__(self, function: Any = None, **_: Any) -> Any:
        return function


class _StandIn(types.ModuleType):
    """A module of `etude`, which boxes do not have: `tool` returns the function, any other name is an empty class."""

    tool = staticmethod(_tool)

    def __getattr__(self, name: str) -> type[Exception]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _StandIns:
    """Finds and loads the stand-ins."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        own = name.partition(".")[0] == "etude"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if own else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _call(order: dict[str, Any]) -> str:
    sys.meta_path.insert(0, _StandIns())  # type: ignore[arg-type]
    module = types.ModuleType(NAME)
    module.__file__ = order["file"]
    sys.modules[NAME] = module
    exec(compile(order["source"], order["file"], "exec", dont_inherit=True), module.__dict__)
    function: Callable[..., Any] = getattr(module, order["function"])

    async def wait(result: Any) -> Any:
        return await result

    result = function(**order["arguments"])
    return text_of(asyncio.run(wait(result)) if inspect.isawaitable(result) else result)


def run(order: dict[str, Any]) -> None:
    """Calls a function, reports, and ends the process. The order has the keys `mark`, `source` and `file` of a module,
    `function` and `arguments`."""
    out, process = os.dup(3), os.getpid()
    os.close(3)  # programs that the function starts do not inherit the copy
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")  # files of bytecode would be changes of the tree
    try:
        key, text = "text", _call(order)
    except BaseException as e:
        key, text = "error", sentence_of(e)
    if os.getpid() != process:  # a fork that returned
        os._exit(0)
    most, line = MAX_LINE, b""
    while not line or len(line) > MAX_LINE:
        # Surrogates without a partner are no text.
        shown = cut_to(text, most).encode("utf-8", "replace").decode()
        line = f"\n{order['mark']}{json.dumps({key: shown}, ensure_ascii=False)}\n".encode()
        most = most * 3 // 4
    while line:
        line = line[os.write(out, line) :]
    os._exit(0)  # threads of the function are not waited for
