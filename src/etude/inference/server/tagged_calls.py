"""Grammars of forced calls in dialects that write argument values between tags, as rules of Lark.

The form of a call is measured: the renderer renders calls without, with one and with two arguments, and the grammar
takes the text around names and values from them. Readers of these dialects take a text as it stands and other values
as JSON (`renderers.typed_argument`), so a value is free text up to its closing tag, one of an `enum`, or JSON of its
schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from etude.inference.server.bodies import invalid
from etude.renderers import Tool, schema_branches, schema_types, typed_argument

MARK = "\0"  # encloses the id of a special token in a rendered turn
_SPACE = r"( |\n[ \t]{0,40})"  # between the parts of JSON; bounded, since a weak model might add spaces without end
_TOKEN = re.compile(r"\0(\d+)\0")
NAME, _KEY, _OTHER, _TEXT, _NUMBER = "zq0zq", "zq1zq", "zq2zq", "zq3zq\"'\\", "70737"  # placeholders
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$comment", "deprecated"}
_OF_OBJECTS = {*_ANNOTATIONS, "properties", "required", "additionalProperties", "$schema", "$defs", "definitions"}


@dataclass(frozen=True)
class _ValueOpening:
    """The text before a value: up to the name of a first argument, up to that of a later one, and from the name to the
    value."""

    first: str
    later: str
    after_name: str


@dataclass(frozen=True)
class Tags:
    """The form of calls in a dialect, as texts with marked tokens: a call without arguments, the openings of texts and
    of other values, the end of every value, and the end of a call after its last value."""

    empty_call: str
    text_opening: _ValueOpening
    json_opening: _ValueOpening
    value_end: str
    call_end: str

    @classmethod
    def measured(cls, render: Callable[[dict[str, Any]], str]) -> Tags | None:
        """The form of a dialect whose `render` returns a turn that calls the function `NAME` with these arguments. None
        for a dialect that does not write values as they stand, or repeats names."""
        text_value, json_value = _opening(render, _TEXT), _opening(render, int(_NUMBER))
        empty_call = render({})
        if text_value is None or json_value is None or empty_call.count(NAME) != 1:
            return None
        (text_opening, after_text), (json_opening, after_json) = text_value, json_value
        # Free text ends at ordinary characters that follow every value, or at a token.
        ends = takewhile(lambda pair: pair[0] == pair[1] != MARK, zip(text_opening.later, after_text, strict=False))
        value_end = "".join(character for character, _ in ends)
        if after_text != after_json or not (value_end or after_text.startswith(MARK)):
            return None
        if not json_opening.later.startswith(value_end):
            return None
        text_opening, json_opening = (
            replace(opening, later=opening.later.removeprefix(value_end)) for opening in (text_opening, json_opening)
        )
        return cls(empty_call, text_opening, json_opening, value_end, after_text.removeprefix(value_end))

    def rules(self, number: int, tool: Tool) -> tuple[str, list[str]]:
        """An alternative that calls this tool, and its further rules. Raises Refusal for an unsupported schema."""
        function = tool["function"]
        name, schema = function["name"], function.get("parameters") or {}
        properties, required = _parameters(name, schema)
        keys, rules = list(properties), list[str]()
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

        def following(start: int, first: bool) -> list[str]:
            """The alternatives from argument `start` on: an argument up to the next required one, or the end of the
            call."""
            alternatives = []
            for index in range(start, len(keys)):
                alternatives.append(argument(index, first))
                if keys[index] in required:
                    return alternatives
            return [*alternatives, rule_of(self.empty_call.replace(NAME, name) if first else self.call_end)]

        def argument(index: int, first: bool) -> str:
            key = keys[index]
            opening = self.text_opening if _is_text(properties[key]) else self.json_opening
            before = opening.first.replace(NAME, name) if first else opening.later
            return f"{rule_of(before + key + opening.after_name)} value{number}_{index} after{number}_{index + 1}"

        for index, key in enumerate(keys):
            rules += [f"value{number}_{index}{rule}" for rule in self._value(name, key, properties[key], shared)]
            rules.append(f"after{number}_{index + 1}: {' | '.join(following(index + 1, False))}")
        return f"call{number}", [f"call{number}: {' | '.join(following(0, True))}", *rules]

    def _value(self, name: str, key: str, schema: Any, shared: Mapping[str, Any]) -> list[str]:
        """The rule of a value and its end, without the rule's name. Raises Refusal."""
        close = json.dumps(self.value_end) if self.value_end else ""
        if not _is_text(schema):
            return [f": {json_rule({**shared, **schema})} {close}"]
        if values := _texts(schema):
            return [f": ({' | '.join(map(json.dumps, values))}) {close}"]
        if not any(_is_plain(branch) for branch in (schema, *schema_branches(schema))):
            unknown = sorted(schema.keys() - _ANNOTATIONS)[0]
            raise invalid(
                f"the parameter {key!r} of {name} has {unknown!r}, which a forced call does not follow in this dialect",
                "tools",
            )
        end = re.escape(self.value_end).replace("\\\n", r"\n").replace("/", r"\/")
        return [f": /(?s:.*){end}/"] if self.call_end.startswith(MARK) else [f"[lazy]: /(?s:.*){end}/"]


def _opening(render: Callable[[dict[str, Any]], str], value: str | int) -> tuple[_ValueOpening, str] | None:
    """The opening of such a value, and the text after the last value of a call. None if a part is missing or
    repeated."""
    one, two = render({_KEY: value}), render({_OTHER: _TEXT, _KEY: value})
    shown = _NUMBER if isinstance(value, int) else _TEXT
    if one.count(NAME) != 1 or one.count(_KEY) != 1 or one.count(shown) != 1 or two.count(_KEY) != 1:
        return None
    first, _, rest = one.partition(_KEY)
    after_name, _, after_value = rest.partition(shown)
    later = two.partition(_TEXT)[2].partition(_KEY)[0]
    return _ValueOpening(first, later, after_name), after_value


def _parameters(name: str, schema: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The schemas of the parameters, in order, and the names of the required ones. Raises Refusal."""
    if unknown := sorted(schema.keys() - _OF_OBJECTS):
        raise invalid(f"the parameters of {name} have {unknown[0]!r}, which a forced call does not follow", "tools")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(isinstance(key, str) for key in required)
        or not all(isinstance(each, dict) or each is True for each in properties.values())
    ):
        raise invalid(f"the parameters of {name} are not a JSON schema of an object", "tools")
    known = {key: {} if each is True else each for key, each in properties.items()}
    return known | {key: {} for key in required if key not in known}, set(required)


def _is_text(schema: Any) -> bool:
    """Whether the readers take a value of this schema as text."""
    kinds = schema_types(schema)
    return "string" in kinds or not kinds


def _is_plain(schema: Any) -> bool:
    """Whether the schema allows every text."""
    return _is_text(schema) and isinstance(schema, Mapping) and not schema.keys() - _ANNOTATIONS


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a schema lists as its values; empty without such a list."""
    listed: Any = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, Sequence) or schema.keys() - _ANNOTATIONS - {"enum", "const"}:
        return []
    return [value for value in listed if isinstance(value, str) and typed_argument(value, schema) == value]


def json_rule(schema: Mapping[str, Any]) -> str:
    """A rule of Lark for a value of this schema in JSON."""
    return f"%json {json.dumps(dict(schema) | {'x-guidance': {'whitespace_pattern': _SPACE}})}"


def rule_of(text: str) -> str:
    """A rule of Lark for a text with marked tokens."""
    parts = _TOKEN.split(text)
    return " ".join(f"<[{part}]>" if i % 2 else json.dumps(part) for i, part in enumerate(parts) if part) or '""'
