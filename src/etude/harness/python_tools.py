"""Python functions of users as tools of an agent: the decorator `tool`, their schemas and their calls.

    @tool(seconds=5.0)
    def search_docs(query: str, most: int = 3) -> str:
        \"""The sections of our manual on a subject.\"""

A function runs in the controller, with the user's rights, or with `boxed=True` inside of the agent's box
(`boxed_tools.py`). What goes wrong in a call is text for the model.
"""

import asyncio
import inspect
import math
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

from etude.config import import_object
from etude.errors import UserError
from etude.harness.boxed_tools import call_boxed, module_of, refuse_inner
from etude.harness.tools import Exec
from etude.records import CodeTask, Task, ToolCall
from etude.renderers import SCHEMAS, Tool, ToolError, fitted
from etude.sandbox import Box, BoxError, ExecResult
from etude.sandbox.guest.boxed_runner import cut_to, sentence_of, text_of

F = TypeVar("F", bound=Callable[..., Any])

MAX_RESULT = 65_536  # characters of a result
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_FIT = "a str, int, float, bool, list, dict or Literal, or one of these or None with a default"
_KEY = "rollout.custom_tools"
_OPTIONS = "__etude_tool__"  # whether a function runs in the agent's box, and its seconds
_SECONDS = 30.0  # of a call


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, boxed: bool = False, seconds: float = _SECONDS) -> Callable[[F], F]: ...
def tool(function: Any = None, *, boxed: bool = False, seconds: float = _SECONDS) -> Any:
    """Marks a function as a tool for agents, and returns it unchanged.

    A call may take `seconds`. A `boxed` function runs inside of the agent's box: its module travels there as one file.
    Any other function runs in the controller; the episode's box and task are passed to its parameters with the
    annotations `Box` and `Task`. Raises UserError for a boxed function that is not at the top of a module.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UserError(f"the seconds of a tool are a number above 0, and {seconds!r} is none")

    def mark(function: Any) -> Any:
        if boxed:
            refuse_inner(function)
        try:
            setattr(function, _OPTIONS, (boxed, float(seconds)))
        except AttributeError:
            raise UserError(f"the tool {function!r} cannot be marked: write a function") from None
        return function

    return mark if function is None else mark(function)


async def call_until(until: float, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """See `call_python`. Commands of the function in a `UsersBox` end at `until`, on the monotonic clock."""
    _until.set(until)
    return await call_python(function, *arguments, **named)


async def call_python(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """The result of a user's function. One that is not `async` runs in a thread, so that it blocks nothing else.
    Cancelling does not end the thread, but nothing waits for it then, the end of the program included."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        future = Future[Any]()
        future.set_running_or_notify_cancel()  # so that it is not cancelled

        def work() -> None:
            try:
                future.set_result(function(*arguments, **named))
            except BaseException as e:  # sys.exit, too, which would end the thread alone
                passes = isinstance(e, Exception) and not isinstance(e, StopIteration | CancelledError)
                future.set_exception(e if passes else RuntimeError(sentence_of(e)))

        threading.Thread(target=work, daemon=True).start()
        result = await asyncio.wrap_future(future)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as e:  # it would end the event loop
        raise RuntimeError(sentence_of(e)) from None


_until: ContextVar[float] = ContextVar("until", default=math.inf)  # on the monotonic clock: the end of the call


class UsersBox:
    """The episode's box for users' functions. Commands end with the call's time, and are not cancelled with the call: a
    cancelled command would end the box."""

    def __init__(self, box: Box) -> None:
        self.inner = box
        self._commands: set[asyncio.Task[ExecResult]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def exec(self, line: str, timeout: float) -> ExecResult:
        """See `Box.exec`; the command ends with the call. Raises BoxError when the call has ended."""
        left = _until.get() - time.monotonic()
        if left <= 0:
            raise BoxError("the time of the call is over")
        command = asyncio.ensure_future(self.inner.exec(line, min(timeout, left)))
        self._commands.add(command)
        command.add_done_callback(self._ended)
        return await asyncio.shield(command)

    def _ended(self, command: asyncio.Task[ExecResult]) -> None:
        self._commands.discard(command)
        _ = command.cancelled() or command.exception()  # read, so that asyncio does not complain

    async def close(self) -> None:
        """Raises BoxError: the box ends with its episode."""
        raise BoxError("the box is closed when its episode ends")

    async def ended(self) -> None:
        """Waits for commands of a call that was given up."""
        if self._commands:
            await asyncio.wait(self._commands)


@dataclass(frozen=True)
class PythonTool:
    """One function as a tool."""

    function: Callable[..., Any]
    schema: dict[str, Any]  # in OpenAI's format
    seconds: float  # of a call, at most
    nullable: frozenset[str]  # parameters that may be None
    passed: dict[str, type]  # parameters that the model does not give -> Box, or a class of tasks
    module: tuple[str, str] | None  # file name and source, for a box

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.schema["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the parameters."""
        return self.schema["function"]["parameters"]

    def taken(self, call: ToolCall) -> dict[str, Any]:
        """The arguments of a call as the function takes them. Raises ToolError."""
        nulls = {n: None for n, value in (call.arguments or {}).items() if value is None and n in self.nullable}
        return fitted(call, self.parameters | {"additionalProperties": False}) | nulls

    def refuse_kind(self, kind: type[Task]) -> None:
        """Raises UserError if the function takes tasks of another class."""
        for taken in self.passed.values():
            if taken is not Box and not issubclass(kind, taken):
                raise UserError(f"the tool {self.name} takes a {taken.__name__}, and these tasks are {kind.__name__}s")

    def refuse_without(self, box: Box | None, task: Task) -> None:
        """Raises UserError if an episode has no box, or no task of the class, that the function needs."""
        self.refuse_kind(type(task))
        if box is None and (self.module is not None or Box in self.passed.values()):
            raise UserError(f"the tool {self.name} needs a box, and episodes without files have none")

    async def call(
        self, arguments: dict[str, Any], box: Box, task: Task, execute: Exec, seconds: float, mark: str
    ) -> str:
        """The result as text; `seconds` are left to the episode, and `execute` runs commands in the box, of which
        `mark` distinguishes the result. Raises ToolError, and BoxError of the box."""
        seconds = max(0.1, min(seconds, self.seconds))
        if self.module is not None:
            return await call_boxed(self.name, self.module, arguments, execute, seconds, mark)
        own = box if isinstance(box, UsersBox) else UsersBox(box)
        passed = {name: own if kind is Box else task for name, kind in self.passed.items()}

        async def as_text(until: float) -> str:
            result = await call_until(until, self.function, **arguments, **passed)
            return result if type(result) is str else await call_python(text_of, result)  # `__str__` may be slow

        call = asyncio.ensure_future(as_text(time.monotonic() + seconds))
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # it may have been given up
        try:
            await asyncio.wait({call}, timeout=seconds)
        finally:
            call.cancel()
        if not call.done():
            await own.ended()
            raise ToolError(f"{self.name} took longer than {seconds:.3g} seconds")
        try:
            return cut_to(call.result(), MAX_RESULT)
        except (ToolError, BoxError):
            raise
        except (Exception, asyncio.CancelledError) as e:
            raise ToolError(cut_to(sentence_of(e), MAX_RESULT)) from None


def python_tools(functions: Sequence[Callable[..., Any]], built_in: Sequence[Tool]) -> dict[str, PythonTool]:
    """The functions as tools, by name. Raises UserError for functions that cannot be tools, and names that `built_in`
    tools have, or several functions."""
    if not isinstance(functions, Iterable) or isinstance(functions, str | Mapping):
        raise UserError(
            f"tools are a list of functions, and {functions!r} is none: return a list, if need be an empty one"
        )
    tools, taken = dict[str, PythonTool](), {schema["function"]["name"] for schema in built_in}
    for function in functions:
        made = python_tool(function)
        if made.name in taken:
            raise UserError(f"the tool {made.name} has the name of a built-in tool: rename the function")
        if made.name in tools:
            raise UserError(f"two tools have the name {made.name}: rename one of the functions")
        tools[made.name] = made
    return tools


def import_tools(paths: Sequence[str]) -> tuple[Callable[..., Any], ...]:
    """The functions at import paths, for agents on repositories. Raises UserError for what is no tool of theirs."""
    functions = tuple(import_object(path, _KEY) for path in paths)
    try:
        for path, function in zip(paths, functions, strict=True):
            if not callable(function):
                raise UserError(f"{path} is no function")
        for tool in python_tools(functions, SCHEMAS).values():
            tool.refuse_kind(CodeTask)
    except UserError as e:
        raise UserError(f"{_KEY}: {e}") from None
    return functions


def python_tool(function: Callable[..., Any]) -> PythonTool:
    """A function as a tool. Raises UserError if its name, its parameters or its module do not fit."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier() or inspect.isclass(function):
        raise UserError(f"the tool {function!r} is no function with a name: write one")
    try:
        hints, parameters = get_type_hints(function), inspect.signature(function).parameters.values()
    except Exception as e:
        raise UserError(f"the tool {name}: its annotations cannot be read ({type(e).__name__}: {e})") from e
    boxed, seconds = getattr(function, _OPTIONS, (False, _SECONDS))
    properties: dict[str, dict[str, Any]] = {}
    nullable, passed, required = set[str](), dict[str, type](), list[str]()
    for parameter in parameters:
        hint = hints.get(parameter.name, str)
        parameter = parameter.replace(annotation=hint)  # as it is shown
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"the tool {name}: {parameter} must be {_FIT}, with a name")
        if hint is Box or (isinstance(hint, type) and issubclass(hint, Task)):
            if boxed:
                raise UserError(f"the tool {name}: it runs in the box, where there is no {parameter}")
            passed[parameter.name] = cast(type, hint)
            continue
        inner, optional = _without_none(hint)
        schema = _schema(inner)
        if schema is None or (optional and parameter.default is parameter.empty):
            raise UserError(f"the tool {name}: {parameter} must be {_FIT}")
        properties[parameter.name] = schema
        if optional:
            nullable.add(parameter.name)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    shown = {"type": "object", "properties": properties, "required": required}
    about = {"name": name, "description": inspect.getdoc(function) or "", "parameters": shown}
    module = module_of(function) if boxed else None
    return PythonTool(function, {"type": "function", "function": about}, seconds, frozenset(nullable), passed, module)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """An annotation without None, and whether it had None."""
    if get_origin(hint) not in (Union, types.UnionType) or type(None) not in get_args(hint):
        return hint, False
    others = [part for part in get_args(hint) if part is not type(None)]
    return (others[0] if len(others) == 1 else hint), True


def _schema(hint: Any) -> dict[str, Any] | None:
    """The JSON schema of an annotation; None if there is none."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        kinds = {_KINDS.get(type(value)) for value in parts}
        kind = kinds.pop()
        return {"type": kind, "enum": list(parts)} if kind is not None and not kinds else None
    if (kind := _KINDS.get(origin)) is None:
        return None
    schema: dict[str, Any] = {"type": kind}
    if origin is dict and parts and parts[0] is not str:
        return None
    if parts and parts[-1] is not Any:
        inner = _schema(parts[-1])
        if inner is None:
            return None
        schema["items" if origin is list else "additionalProperties"] = inner
    return schema
