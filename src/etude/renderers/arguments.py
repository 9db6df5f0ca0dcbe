"""Arguments of calls: what JSON can hold, and what the schema of a tool's parameters makes of them.

JSON Schema is read by the library `jsonschema`, without remote references. A schema is a client's: what is broken in it
allows everything, patterns are not tried (they may take for ever, and are no Python's), and a question takes `STEPS`
keywords at most.
"""

import ast
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import msgspec

from etude.records import ToolCall
from etude.renderers.base import Tool, ToolError, checked, malformed, one_line, unlike_json

STEPS = 2000
LARGEST = 1 << 17  # characters of a schema that is read
_CACHED = 4000  # characters of arguments whose error is kept: a stream asks for it again and again
_CACHED_SCHEMA = 16_384  # characters; clients choose the schemas, and a parsed one takes ten times the memory
JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings
_UNTRIED = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "format")
_READ = 32  # values of an argument, at most
_PROBES = (None, True, 0.5, [], {})
_NAMES = {"true": True, "false": False, "null": None}
_left: ContextVar[int] = ContextVar("left", default=0)  # steps of the question


def read_arguments(value: Any) -> dict[str, Any]:
    """The arguments in a JSON text or a value from JSON; null and blank texts are no arguments. Of equal names in an
    object the last counts. Raises ValueError."""
    try:
        if isinstance(value, str):
            value = JSON.decode(value) if value.strip() else None
        if value is not None and not isinstance(value, dict):
            raise ValueError("not an object")
        fault = unlike_json(value)
    except (ValueError, RecursionError):
        raise ValueError("arguments are not a JSON object") from None
    if fault:
        raise ValueError(f"arguments are not JSON: {fault}")
    return value or {}


def read_call(name: str, arguments: Any) -> ToolCall:
    """A call with the arguments in a JSON text or a value from JSON; malformed for any other."""
    try:
        return checked(name, read_arguments(arguments))
    except ValueError as e:
        return malformed(name, str(e))


def python_value(node: ast.expr) -> Any:
    """The value of a literal in Python or JSON. Raises ValueError or TypeError."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {python_value(k): python_value(v) for k, v in zip(keys, values, strict=True) if k is not None}
    return ast.literal_eval(node)


def typed_argument(text: str, key: str, parameters: Any) -> Any:
    """The value of a text without quotes as the argument `key`: the text itself where the schema of the parameters
    allows it; else its value in JSON or Python, the first that the schema allows. Where the schema says nothing,
    numbers, lists and the like are recognised. Where it allows no text, the value may be one that JSON lacks."""
    error = _error(parameters, {key: text}, key)
    if error is None and any(_error(parameters, {key: probe}, key) for probe in _PROBES):
        return text
    values = list(_values(text))
    if error is not None:
        others = [value for value in values if not isinstance(value, str)] if _no_text(error) else ()
        return next(_fitting(values, key, parameters), [*others, text][0])
    return next(_fitting((value for value in values[:1] if not isinstance(value, str)), key, parameters), text)


def as_meant(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    """A call with numbers in quotes read by the schema of its tool, where that allows no text."""
    parameters = parameters_of(call.name, tools)
    if not call.arguments or parameters is None:
        return call
    arguments = {key: _meant(value, key, parameters) for key, value in call.arguments.items()}
    return msgspec.structs.replace(call, arguments=arguments)


def fitted(call: ToolCall, parameters: Any) -> dict[str, Any]:
    """The arguments of a call as its tool takes them: null leaves out what is not required and may not be null, and
    numbers in quotes are read. Raises ToolError for what does not fit the schema."""
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    taken: dict[str, Any] = {}
    for key, value in (call.arguments or {}).items():
        needed = value is not None or (isinstance(required, list) and key in required)
        if needed or _error(parameters, {key: None}, key) is None:
            taken[key] = _meant(value, key, parameters)
    if (error := _error(parameters, taken)) is not None:
        raise ToolError(_sentence(call.name, error))
    return taken


def parameters_of(name: str, tools: Sequence[Tool]) -> Any:
    """The schema of a tool's parameters; None for an unknown tool."""
    functions = (tool.get("function", tool) for tool in tools)
    return next((each.get("parameters") or {} for each in functions if each.get("name") == name), None)


def _meant(value: Any, key: str, parameters: Any) -> Any:
    """The argument `key` with its texts and whole floats read, at any depth, where the schema allows none; unchanged if
    it does not fit then."""
    arguments = {key: value}
    for _ in range(_READ):
        if (error := _error(parameters, arguments, key)) is None:
            return arguments[key]
        place = _place(error)
        others = _values(error.instance) if isinstance(error.instance, str) else _wholes(error.instance)
        ways = (_replaced(arguments, place, each) for each in others if _recordable(each))
        arguments = next((way for way in ways if place != _place(_error(parameters, way, key))), None)
        if arguments is None:
            break
    return value


def _replaced(value: Any, place: Sequence[Any], part: Any) -> Any:
    """A value with another part at a place."""
    if not place:
        return part
    other = value.copy()
    other[place[0]] = _replaced(value[place[0]], place[1:], part)
    return other


def _place(error: Any) -> list[Any]:
    return [] if error is None else list(error.absolute_path)


def _fitting(values: Iterable[Any], key: str, parameters: Any) -> Iterator[Any]:
    """The values that a record can hold, and that the schema allows as the argument `key`."""
    return (each for each in values if _recordable(each) and _error(parameters, {key: each}, key) is None)


def _values(text: str, *, deeper: bool = True) -> Iterator[Any]:
    """The values that a text may spell: in JSON, in Python (templates write True, None and {'a': 1}), in quotes."""
    spelled: list[Any] = []
    with suppress(ValueError, RecursionError):
        spelled.append(json.loads(text))
    if not spelled:
        with warnings.catch_warnings(), suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            warnings.simplefilter("ignore")
            spelled.append(python_value(ast.parse(text.strip(), mode="eval").body))
    for value in spelled:
        yield value
        yield from _wholes(value)
        if isinstance(value, str) and deeper:
            yield from _values(value, deeper=False)


def _wholes(value: Any) -> list[int]:
    """The integer that a float is exactly; empty for any other value."""
    return [int(value)] if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else []


def _recordable(value: Any) -> bool:
    return checked("", {"": value}).arguments is not None


# Schemas


def _error(parameters: Any, arguments: Mapping[str, Any], key: str | None = None) -> Any:
    """The first error of arguments by a schema, or the first of the argument `key`; None for a schema that cannot be
    read."""
    try:
        schema, instance = json.dumps(parameters), json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        return None
    if len(schema) > LARGEST:
        return None
    small = len(schema) <= _CACHED_SCHEMA and len(instance) <= _CACHED
    return (_first_error if small else _first_error.__wrapped__)(schema, instance, key)


@lru_cache(maxsize=256)
def _first_error(schema: str, arguments: str, key: str | None) -> Any:
    token, errors = _left.set(STEPS), list[Any]()
    with suppress(Exception):  # whatever a broken schema provokes in the library, a loop of references included
        validator = (_validator if len(schema) <= _CACHED_SCHEMA else _validator.__wrapped__)(schema)
        errors.extend(validator.iter_errors(json.loads(arguments)))
    _left.reset(token)
    errors = [error for error in errors if key is None or _place(error)[:1] == [key]]
    return min(errors, key=lambda error: list(map(str, _place(error))), default=None)  # the library's order varies


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    """A validator of a schema as JSON text, in the latest draft: the library would leave ours at a `$schema`."""
    from referencing import Registry

    def of_one_draft(value: dict[str, Any]) -> dict[str, Any]:
        return {key: item for key, item in value.items() if key != "$schema" or not isinstance(item, str)}

    return _bounded()(json.loads(schema, object_hook=of_one_draft), registry=Registry())


@lru_cache
def _bounded() -> Any:
    """The class of validators that counts its steps, tries no patterns, and takes no float for an integer."""
    from jsonschema.validators import Draft202012Validator, extend

    def counted(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def step(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            if not _left.get():
                raise RecursionError
            _left.set(_left.get() - 1)
            if name in _UNTRIED or (name == "additionalProperties" and "patternProperties" in schema):
                return None
            return check(validator, value, instance, schema)

        return step

    kinds = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    checks = {name: counted(name, check) for name, check in Draft202012Validator.VALIDATORS.items()}
    return extend(Draft202012Validator, checks, None, kinds)


def _sentence(name: str, error: Any) -> str:
    """An error in the arguments of a function as a sentence."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    value, instance = error.validator_value, error.instance
    why = f"does not fit {json.dumps({error.validator: value})}"
    match error.validator:
        case "required":
            why = f"needs {next(key for key in value if key not in instance)}"
        case "type":
            why = f"is not of type {' or '.join(value) if isinstance(value, list) else value}"
        case "additionalProperties" if value is False:
            why = f"has no argument {next(key for key in instance if key not in error.schema.get('properties', {}))}"
    return one_line(f"{''.join(parts).removeprefix('.') or name} {why}", 300)


def _no_text(error: Any) -> bool:
    """Whether the schema behind an error allows no text at all."""
    value = error.validator_value
    if error.validator in ("enum", "const"):
        return not any(isinstance(each, str) for each in (value if error.validator == "enum" else [value]))
    return error.validator == "type" or (bool(error.context) and all(map(_no_text, error.context)))
