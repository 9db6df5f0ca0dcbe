"""Forced calls in dialects that write values between tags, as rules of Lark.

How a dialect writes a call is measured: the renderer writes calls without, with one and with two arguments, and what
stands around names and values is the grammar. Readers of these dialects take a text as it stands and other values as
JSON (`renderers.calls.typed`), so a value is free text up to its closing tag, one of an `enum`, or JSON of its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from etude.inference.server.bodies import invalid
from etude.renderers import Tool
from etude.renderers.calls import branches_of, kinds_of, typed

MARK = "\0"  # around the id of a token in a written turn
_SPACE = r"( |\n[ \t]{0,40})"  # between the parts of JSON: a weak model would go on with spaces for ever
_TOKEN = re.compile(r"\0(\d+)\0")
NAME, _KEY, _OTHER, _TEXT, _NUMBER = "zq0zq", "zq1zq", "zq2zq", "zq3zq\"'\\", "70737"  # placeholders
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$comment", "deprecated"}
_OF_OBJECTS = {*_ANNOTATIONS, "properties", "required", "additionalProperties", "$schema", "$defs", "definitions"}


@dataclass(frozen=True)
class _ValueOpening:
    """What stands before a value: of the first argument up to its name, of a later one, and behind the name."""

    first: str
    later: str
    named: str


@dataclass(frozen=True)
class Tags:
    """How a dialect writes calls, as texts with marked tokens: one without arguments, what stands before a text and
    before another value, what ends a value, and what follows a value's end: another argument, or nothing."""

    none: str
    text: _ValueOpening
    other: _ValueOpening
    close: str
    tail: str

    @classmethod
    def measured(cls, written: Callable[[dict[str, Any]], str]) -> Tags | None:
        """`written` gives a turn that calls the function `NAME` with these arguments. None where values are not
        written as they stand, or names more than once."""
        found = [_opening(written, value) for value in (_TEXT, int(_NUMBER))]
        none = written({})
        if None in found or none.count(NAME) != 1:
            return None
        (text, tail), (other, same) = [each for each in found if each is not None]
        # Free text ends at ordinary characters that stand at every end, or at a token.
        close = "".join(
            a for a, _ in takewhile(lambda pair: pair[0] == pair[1] != MARK, zip(text.later, tail, strict=False))
        )
        if tail != same or not (close or tail.startswith(MARK)):
            return None
        if any(not opening.later.startswith(close) for opening in (text, other)):
            return None
        cut = len(close)
        text, other = (_ValueOpening(each.first, each.later[cut:], each.named) for each in (text, other))
        return cls(none, text, other, close, tail[cut:])

    def rules(self, number: int, tool: Tool) -> tuple[str, list[str]]:
        """An alternative that calls this tool, and the rules that it needs. Raises Refusal for a schema that is not
        followed here."""
        function = tool["function"]
        name, schema = function["name"], function.get("parameters") or {}
        properties, required = _parameters(name, schema)
        keys, rules = list(properties), list[str]()
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

        def following(start: int, first: bool) -> list[str]:
            """What may follow `start` arguments, some of them left out."""
            ways = []
            for index in range(start, len(keys)):
                ways.append(argument(index, first))
                if keys[index] in required:
                    return ways
            return [*ways, rule_of(self.none.replace(NAME, name) if first else self.tail)]

        def argument(index: int, first: bool) -> str:
            key = keys[index]
            opening = self.text if _is_text(properties[key]) else self.other
            before = opening.first.replace(NAME, name) if first else opening.later
            return f"{rule_of(before + key + opening.named)} value{number}_{index} after{number}_{index + 1}"

        for index, key in enumerate(keys):
            rules += [f"value{number}_{index}{rule}" for rule in self._value(name, key, properties[key], shared)]
            rules.append(f"after{number}_{index + 1}: {' | '.join(following(index + 1, False))}")
        return f"call{number}", [f"call{number}: {' | '.join(following(0, True))}", *rules]

    def _value(self, name: str, key: str, schema: Any, shared: Mapping[str, Any]) -> list[str]:
        """The rule of a value with its end, without the rule's name."""
        close = json.dumps(self.close) if self.close else ""
        if not _is_text(schema):
            return [f": {json_rule({**shared, **schema})} {close}"]
        if values := _texts(schema):
            return [f": ({' | '.join(map(json.dumps, values))}) {close}"]
        if not any(_is_plain(branch) for branch in (schema, *branches_of(schema))):
            unknown = sorted(schema.keys() - _ANNOTATIONS)[0]
            raise invalid(
                f"the parameter {key!r} of {name} has {unknown!r}, which a forced call does not follow in this dialect",
                "tools",
            )
        end = re.escape(self.close).replace("\\\n", r"\n").replace("/", r"\/")
        return [f": /(?s:.*){end}/"] if self.tail.startswith(MARK) else [f"[lazy]: /(?s:.*){end}/"]


def _opening(written: Callable[[dict[str, Any]], str], value: str | int) -> tuple[_ValueOpening, str] | None:
    """What stands before such a value, and what stands behind the last one."""
    one, two = written({_KEY: value}), written({_OTHER: _TEXT, _KEY: value})
    other = _NUMBER if isinstance(value, int) else _TEXT
    if one.count(NAME) != 1 or one.count(_KEY) != 1 or one.count(other) != 1 or two.count(_KEY) != 1:
        return None
    first, _, rest = one.partition(_KEY)
    named, _, tail = rest.partition(other)
    later = two.partition(_TEXT)[2].partition(_KEY)[0]
    return _ValueOpening(first, later, named), tail


def _parameters(name: str, schema: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The schemas of the parameters, in order, and which of them are required. Raises Refusal."""
    if unknown := sorted(schema.keys() - _OF_OBJECTS):
        raise invalid(f"the parameters of {name} have {unknown[0]!r}, which a forced call does not follow", "tools")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(isinstance(key, str) for key in required)
        or not all(isinstance(each, dict) or each is True for each in properties.values())
    ):
        raise invalid(f"the parameters of {name} are no JSON schema of an object", "tools")
    known = {key: {} if each is True else each for key, each in properties.items()}
    return known | {key: {} for key in required if key not in known}, set(required)


def _is_text(schema: Any) -> bool:
    """Whether the readers take a value as text."""
    kinds = kinds_of(schema)
    return "string" in kinds or not kinds


def _is_plain(schema: Any) -> bool:
    """Whether any text is a value of the schema."""
    return _is_text(schema) and isinstance(schema, Mapping) and not schema.keys() - _ANNOTATIONS


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a schema lists as values; none if it lists none."""
    given: Any = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(given, Sequence) or schema.keys() - _ANNOTATIONS - {"enum", "const"}:
        return []
    return [value for value in given if isinstance(value, str) and typed(value, schema) == value]


def json_rule(schema: Mapping[str, Any]) -> str:
    """A value with this schema, as a rule of Lark."""
    return f"%json {json.dumps(dict(schema) | {'x-guidance': {'whitespace_pattern': _SPACE}})}"


def rule_of(text: str) -> str:
    """A text with marked tokens as a rule of Lark."""
    parts = _TOKEN.split(text)
    return " ".join(f"<[{part}]>" if i % 2 else json.dumps(part) for i, part in enumerate(parts) if part) or '""'
