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
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec

from etude.records import ToolCall
from etude.renderers.base import Tool, ToolError, checked, malformed, one_line, unlike_json

STEPS = 2000
JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings
_UNTRIED = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "format")
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
    spelled = list(_values(text))
    found = list(filter(_recordable, spelled))
    refused = _objection(parameters, {key: text}, key)
    if refused is None:
        free = all(_objection(parameters, {key: probe}, key) is None for probe in (*_PROBES, *found))
        return found[0] if free and found and not isinstance(found[0], str) else text
    fitting = [value for value in found if _objection(parameters, {key: value}, key) is None]
    return [*fitting, *(spelled if refused.no_text else ()), text][0]


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
        if needed or _objection(parameters, {key: None}, key) is None:
            taken[key] = _meant(value, key, parameters)
    if (refused := _objection(parameters, taken)) is not None:
        raise ToolError(f"{refused.place or call.name} {refused.why}")
    return taken


def parameters_of(name: str, tools: Sequence[Tool]) -> Any:
    """The schema of a tool's parameters; None for an unknown tool."""
    functions = (tool.get("function", tool) for tool in tools)
    return next((each.get("parameters") or {} for each in functions if each.get("name") == name), None)


def _meant(value: Any, key: str, parameters: Any) -> Any:
    others: Iterable[Any] = filter(_recordable, _values(value)) if isinstance(value, str) else ()
    if _whole(value):
        others = [int(value)]
    if others == () or _objection(parameters, {key: value}, key) is None:
        return value
    return next((each for each in others if _objection(parameters, {key: each}, key) is None), value)


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
        if _whole(value):
            yield int(value)
        if isinstance(value, str) and deeper:
            yield from _values(value, deeper=False)


def _whole(value: Any) -> bool:
    """Whether a value is a float that is exactly an integer."""
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**53


def _recordable(value: Any) -> bool:
    return checked("", {"": value}).arguments is not None


# Schemas


@dataclass(frozen=True)
class _Objection:
    """What a schema has against arguments: at which place ("" for the whole), why, and whether it allows no text
    there."""

    place: str
    why: str
    no_text: bool


class _Spent(Exception):
    """A question took too many steps."""


def _objection(parameters: Any, arguments: Mapping[str, Any], key: str | None = None) -> _Objection | None:
    """The first objection of a schema, or the first to the argument `key`; None for a schema that cannot be read."""
    try:
        return _asked(json.dumps(parameters), json.dumps(arguments), key)
    except (TypeError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=512)
def _asked(schema: str, arguments: str, key: str | None) -> _Objection | None:
    token = _left.set(STEPS)
    try:
        for error in _validator(schema).iter_errors(json.loads(arguments)):
            if key is None or list(error.absolute_path)[:1] == [key]:
                return _Objection(_place(error), one_line(_why(error), 300), _no_text(error))
    except Exception:  # whatever a broken schema provokes in the library, a loop of references included
        return None
    finally:
        _left.reset(token)
    return None


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """A validator of a schema as JSON text."""
    from jsonschema import validators
    from referencing import Registry

    plain = json.loads(schema)
    draft = plain.get("$schema") if isinstance(plain, dict) else None
    base = validators.validator_for({"$schema": str(draft)}, validators.Draft202012Validator)
    # The library changes to the plain validator at an inner `$schema`.
    return _bounded(base)(json.loads(schema, object_hook=_of_one_draft), registry=Registry())


def _of_one_draft(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != "$schema" or not isinstance(item, str)}


@lru_cache
def _bounded(base: Any) -> Any:
    """A class of validators that counts its steps, tries no patterns, and takes no float for an integer."""
    from jsonschema import validators

    def counted(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def step(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            if not _left.get():
                raise _Spent
            _left.set(_left.get() - 1)
            if name in _UNTRIED or (name == "additionalProperties" and "patternProperties" in schema):
                return None
            return check(validator, value, instance, schema)

        return step

    kinds = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return validators.extend(base, {name: counted(name, check) for name, check in base.VALIDATORS.items()}, None, kinds)


def _place(error: Any) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return one_line("".join(parts).removeprefix("."), 64)


def _why(error: Any) -> str:
    value = error.validator_value
    match error.validator:
        case "required":
            return f"needs {next(name for name in value if name not in error.instance)}"
        case "type":
            return f"is not of type {' or '.join(value) if isinstance(value, list) else value}"
        case "additionalProperties" if value is False:
            known = error.schema.get("properties", {})
            return f"has no argument {one_line(next(name for name in error.instance if name not in known), 64)}"
        case "enum":
            return f"is not one of {json.dumps(value)}"
        case None:
            return "is not allowed"
    return f"does not fit {json.dumps({error.validator: value})}"


def _no_text(error: Any) -> bool:
    """Whether the schema behind an error allows no text at all."""
    value = error.validator_value
    match error.validator:
        case "type":
            return True
        case "enum" | "const":
            return not any(isinstance(each, str) for each in (value if error.validator == "enum" else [value]))
        case "anyOf" | "oneOf":
            branches = groupby(error.context, key=lambda inner: inner.schema_path[0])
            return bool(error.context) and all(any(map(_no_text, inner)) for _, inner in branches)
    return False
