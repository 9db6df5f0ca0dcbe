"""Readers for the syntax of tool calls: JSON, tags around values, Python calls.

A reader takes a text and a position in it, and returns the calls that begin there and the position behind them. It
raises `Broken` for an incomplete call. `sections` finds the calls in a text, and turns broken ones into malformed
calls, so that the rest of the text is still read.
"""

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etude.records import ToolCall
from etude.renderers.arguments import JSON, parameters_of, python_value, read_call, typed_argument
from etude.renderers.base import Tool, checked, malformed, printable


@dataclass(frozen=True)
class ParsedCall:
    """A call in a sampled turn, and its id from the model ("" in most dialects)."""

    call: ToolCall
    id: str = ""


class Broken(Exception):
    """The text at this place is not a complete call."""

    def __init__(self, why: str, name: str = "") -> None:
        super().__init__(why)
        self.why, self.name = why, name


Reader = Callable[[str, int, Sequence[Tool]], tuple[list[ParsedCall], int]]

_SPACE = re.compile(r"\s*")


def skip_space(text: str, start: int) -> int:
    """The position of the next character that is not white space."""
    match = _SPACE.match(text, start)
    assert match is not None, "the pattern matches an empty text"
    return match.end()


def sections(
    text: str, opening: str, closing: str, read: Reader, tools: Sequence[Tool], *, several: bool = False
) -> tuple[str, list[ParsedCall]]:
    """The text besides calls, and the calls between `opening` and `closing`, which strings in calls may contain, too.
    Without `several` a section has one call. With an empty `closing` a section ends with its calls."""
    parts: list[str] = []
    calls: list[ParsedCall] = []
    at = 0
    while (start := text.find(opening, at)) >= 0:
        parts.append(text[at:start])
        more, at = _section(text, start + len(opening), (opening, closing), read, tools, several)
        calls += more
    return "".join([*parts, text[at:]]), calls


def _section(
    text: str, at: int, marks: tuple[str, str], read: Reader, tools: Sequence[Tool], several: bool
) -> tuple[list[ParsedCall], int]:
    opening, closing = marks
    calls: list[ParsedCall] = []
    try:
        while True:
            at = skip_space(text, at)
            if closing and calls and text.startswith(closing, at):
                return calls, at + len(closing)
            if calls and not several:
                raise Broken("not closed", calls.pop().call.name)
            if calls and at == len(text):
                return calls, at  # each of several calls has its own end
            more, at = read(text, at, tools)
            calls += more
            if not closing:
                return calls, at
    except Broken as e:
        ends = [i for i in (text.find(closing, at) if closing else -1, text.find(opening, at)) if i >= 0]
        end = min(ends, default=len(text))
        calls.append(ParsedCall(malformed(e.name, e.why if ends else "not closed")))
        return calls, end + (len(closing) if closing and text.startswith(closing, end) else 0)


# JSON


def json_at(text: str, start: int, name: str = "") -> tuple[Any, int]:
    """The JSON value at `start` and its end. Raises Broken with `name`."""
    try:
        return JSON.raw_decode(text, start)
    except (ValueError, RecursionError) as e:
        raise Broken(f"not JSON: {getattr(e, 'msg', type(e).__name__)}", name) from None


def json_call(value: Any) -> ParsedCall:
    """The call described by a JSON object with `name` and `arguments` (or `parameters`); malformed for any other
    value."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedCall(malformed("", "no name"))
    arguments, call_id = value.get("arguments", value.get("parameters", {})), value.get("id")
    return call_of(name, arguments, call_id if isinstance(call_id, str) else "")


def call_of(name: str, arguments: Any, call_id: str = "") -> ParsedCall:
    """A call with these arguments, an object or the text of one; malformed for any other value."""
    return ParsedCall(read_call(name, arguments), printable(call_id))


def json_object(text: str, at: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    """A reader of `{"name": ..., "arguments": {...}}`."""
    value, end = json_at(text, at)
    return [json_call(value)], end


def json_list(text: str, at: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    """A reader of `[{"name": ..., "arguments": {...}}, ...]`."""
    value, end = json_at(text, at)
    if not isinstance(value, list) or not value:
        raise Broken("not a list of calls")
    return [json_call(item) for item in value], end


def headed_json(heading: str, ending: str) -> Reader:
    """A reader of JSON arguments between a heading and an ending, which are patterns; the heading's groups are `name`
    and, in some dialects, `id`."""
    head, tail = re.compile(heading), re.compile(ending)

    def read(text: str, at: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
        match = head.match(text, at)
        if match is None:
            raise Broken("a call does not begin with its name")
        name = match["name"]
        close = tail.match(text, match.end()) if ending else None
        arguments, end = (None, match.end()) if close else json_at(text, match.end(), name)
        close = tail.match(text, end)
        if close is None:
            raise Broken("not closed", name)
        return [call_of(name, arguments, match.groupdict().get("id") or "")], close.end()

    return read


# Tags

_NO_TEXT = {"additionalProperties": {"type": ["number", "boolean", "object", "array", "null"]}}


def tagged(heading: str, parameter: str, ending: str, *, lines: bool = False) -> Reader:
    """A reader of calls whose values stand between tags. The arguments are patterns: `heading` with a group `name`,
    `parameter` with `key`, `value` and, if the model marks strings, `string`. With `lines` the dialect puts a line
    break before and after a value."""
    head, one, tail = re.compile(heading), re.compile(parameter, re.DOTALL), re.compile(ending)

    def read(text: str, at: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
        match = head.match(text, at)
        if match is None:
            raise Broken("a call does not begin with its name")
        name, at = match["name"].strip(), match.end()
        if not name:
            raise Broken("no name")
        parameters = parameters_of(name, tools)
        arguments: dict[str, Any] = {}
        while (close := tail.match(text, at)) is None:
            item = one.match(text, at)
            if item is None:
                raise Broken("neither an argument nor the end of the call follows", name)
            value = item["value"]
            if lines:
                value = value.removeprefix("\n").removesuffix("\n")
            marked = item.groupdict().get("string")
            schema = parameters if marked is None else _NO_TEXT
            arguments[item["key"]] = value if marked == "true" else typed_argument(value, item["key"], schema)
            at = item.end()
        return [ParsedCall(checked(name, arguments))], close.end()

    return read


# Python


def python_calls(text: str) -> list[ParsedCall]:
    """Calls in Python syntax, `f(a=1)` one per line or in a list; values are literals or JSON constants. Raises
    Broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(text.strip()).body
        nodes = [node.value for node in body if isinstance(node, ast.Expr)]
        calls = [call for node in nodes for call in (node.elts if isinstance(node, ast.List) else [node])]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise Broken(f"not Python: {getattr(e, 'msg', type(e).__name__)}") from None
    if not calls or len(nodes) != len(body) or not all(isinstance(call, ast.Call) for call in calls):
        raise Broken("not Python calls")
    return [_python_call(call) for call in calls if isinstance(call, ast.Call)]


def _python_call(node: ast.Call) -> ParsedCall:
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ParsedCall(malformed(name, "arguments have no names"))
    try:
        return ParsedCall(checked(name, {str(k.arg): python_value(k.value) for k in node.keywords}))
    except (ValueError, TypeError, RecursionError):
        return ParsedCall(malformed(name, "an argument is not a value"))
