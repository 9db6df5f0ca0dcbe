"""Python functions as tools of an agent: their schemas and their calls."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, get_type_hints

import msgspec

from etude.errors import UserError
from etude.harness import FullTools, fault_of
from etude.records import Task, ToolCall
from etude.renderers import COMPACT_PARAMETERS, SCHEMAS, ToolError
from etude.sandbox import Box, BoxError

BOX_TOOLS = frozenset({"list", "read", "grep", "search", "edit", "undo", "run", "output", "kill"})
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


async def call_python(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a user's function. One that is not `async` runs in a thread, so that it blocks nothing else.
    Cancelling does not end the thread, but nothing waits for it then, the end of the program included."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments, **named)
        except StopIteration as e:  # a future refuses it
            error = RuntimeError(f"StopIteration: {e}")
        except Exception as e:
            error = e
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    result = await future
    return await result if inspect.isawaitable(result) else result


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI schema of a function: its name, docstring and parameters. Raises UserError."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise UserError(f"the tool {function!r} has no name: write a function")
    try:
        hints = get_type_hints(function)
    except Exception as e:
        raise UserError(f"the tool {name}: its annotations cannot be read ({type(e).__name__}: {e})") from e
    properties: dict[str, dict[str, str]] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, str)
        kind = _KINDS.get(getattr(hint, "__origin__", hint))
        if kind is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"the tool {name}: {parameter} must be a str, int, float, bool or list with a name")
        properties[parameter.name] = {"type": kind}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class PythonTools(FullTools):
    """The functions of an environment as tools, and those of the built-in tools in `box_tools`. In the compact dialect
    arguments come by position, as text. Raises UserError for names and parameters that cannot be used."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        box_tools: Sequence[str],
        box: Box | None,
        task: Task,
        *,
        compact: bool,
    ) -> None:
        no_box: Any = None  # tools that need a box are not among the handlers then
        super().__init__(no_box if box is None else box, task)
        schemas = list(map(schema_of, functions))
        own = {schema["function"]["name"]: schema for schema in schemas}
        taken = {*box_tools, "finish"} & set(own)
        if taken:
            raise UserError(f"the tool {min(taken)} of the environment has the name of a built-in tool")
        for name in sorted(
            COMPACT_PARAMETERS.keys() & own if compact else ()
        ):  # the dialect has parameters for these names
            if list(own[name]["function"]["parameters"]["properties"]) != list(COMPACT_PARAMETERS[name]):
                raise UserError(
                    f"the tool {name} of the environment must take the parameters of the model's own: "
                    f"({', '.join(COMPACT_PARAMETERS[name])})"
                )
        if wrong := sorted(set(box_tools) - BOX_TOOLS):
            raise UserError(f"box_tools: {wrong[0]} is none of {', '.join(sorted(BOX_TOOLS))}")
        if box_tools and compact:
            raise UserError("box_tools need a model that knows the OpenAI tool format (model.dialect)")
        built_in = [schema for schema in SCHEMAS if schema["function"]["name"] in box_tools]
        self.schemas = (*own.values(), *built_in)
        self._compact = compact
        self._parameters = {name: schema["function"]["parameters"] for name, schema in own.items()}
        self._handlers = {name: self._handlers[name] for name in (*box_tools, "finish")}
        self._handlers |= {function.__name__: _handler(function) for function in functions}

    def summary(self) -> str:
        """A line per tool, for prompts of the compact dialect, which does not show its built-in tools."""
        lines: list[str] = []
        for schema in self.schemas:
            about = schema["function"]
            if about["name"] in COMPACT_PARAMETERS:
                continue
            lines.append(f"{about['name']}({', '.join(about['parameters']['properties'])}): {about['description']}")
        return "\n".join(lines)

    async def call(self, call: ToolCall) -> str:
        """The result of a call as the model reads it. Raises only BoxError whose payer is "infra"."""
        parameters = self._parameters.get(call.name)
        if self._compact and parameters is not None and call.arguments is not None:
            arguments = dict(zip(parameters["properties"], call.arguments.values(), strict=False))
            extra = len(call.arguments) > len(arguments)
            arguments = {name: _converted(value, parameters["properties"][name]) for name, value in arguments.items()}
            call = msgspec.structs.replace(call, arguments=arguments | ({"": ""} if extra else {}))
        return await super().call(call)

    def invalid(self, call: ToolCall) -> str | None:
        """Why the arguments of a known tool cannot be taken; None when they can."""
        parameters = self._parameters.get(call.name)
        if parameters is not None:
            return fault_of(call, parameters)
        return None if call.name == "finish" else super().invalid(call)


def _handler(function: Callable[..., Any]) -> Callable[..., Awaitable[str]]:
    async def handle(**arguments: Any) -> str:
        try:
            return str(await call_python(function, **arguments))
        except (ToolError, BoxError):
            raise
        except Exception as e:
            raise ToolError(f"{type(e).__name__}: {e}") from None

    return handle


def _converted(value: object, about: dict[str, str]) -> object:
    """The text of an argument as a value of the parameter's type, or the text itself if it cannot be converted."""
    if about["type"] == "string":
        return value
    try:
        return msgspec.json.decode(str(value))
    except msgspec.MsgspecError:
        return value
