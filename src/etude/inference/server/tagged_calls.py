"""Grammars of forced calls in dialects that write argument values between tags, as rules of Lark.

The form of a call is measured: the renderer renders calls without, with one and with two arguments, and the grammar
takes the text around names and values from them. Readers of these dialects take a text as it stands and other values
as JSON (`renderers.typed_argument`), so a value is free text up to its closing tag, one of an `enum`, or JSON of its
schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from etude.inference.server.bodies import invalid
from etude.protocol import Refusal
from etude.renderers import Tool, typed_argument

MARK = "\0"  # encloses the id of a special token in a rendered turn
_SPACE = r"( |\n[ \t]{0,40})"  # between the parts of JSON; bounded, since a weak model might add spaces without end
_TOKEN = re.compile(r"\0(\d+)\0")
NAME, _KEY, _OTHER, _TEXT, _NUMBER = "zq0zq", "zq1zq", "zq2zq", "zq3zq\"'\\", "70737"  # placeholders
_ANNOTATIONS = {
    "title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema",
    "$id", "$defs", "definitions",
}  # fmt: skip
_COMBINED = {"$ref", "allOf", "anyOf", "oneOf"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_DEEPEST, _MOST_BRANCHES, _MOST_STEPS = 16, 64, 500


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
        keys, rules, openings = list(properties), list[str](), list[dict[str, _ValueOpening]]()
        for index, key in enumerate(keys):
            values = self._values(name, key, properties[key], schema)
            openings.append({f"{kind}{number}_{index}": self._opening(kind) for kind in values})
            rules += [f"{kind}{number}_{index}{rule}" for kind, rule in values.items()]

        def following(start: int, first: bool) -> list[str]:
            """The alternatives from argument `start` on: an argument up to the next required one, or the end of the
            call."""
            alternatives = []
            for index in range(start, len(keys)):
                alternatives += [argument(index, first, *each) for each in openings[index].items()]
                if keys[index] in required:
                    return alternatives
            return [*alternatives, rule_of(self.empty_call.replace(NAME, name) if first else self.call_end)]

        def argument(index: int, first: bool, value: str, opening: _ValueOpening) -> str:
            before = opening.first.replace(NAME, name) if first else opening.later
            return f"{rule_of(before + keys[index] + opening.after_name)} {value} after{number}_{index + 1}"

        rules += [f"after{number}_{index}: {' | '.join(following(index, False))}" for index in range(1, len(keys) + 1)]
        return f"call{number}", [f"call{number}: {' | '.join(following(0, True))}", *rules]

    def _opening(self, kind: str) -> _ValueOpening:
        return self.text_opening if kind == "text" else self.json_opening

    def _values(self, name: str, key: str, schema: Any, root: Any) -> dict[str, str]:
        """The rules of a value as text and as JSON, with its end and without the rule's name. Raises Refusal."""

        def refuse(what: str) -> Refusal:
            return invalid(
                f"the parameter {key!r} of {name} has {what!r}, which a forced call does not follow in this dialect",
                "tools",
            )

        close = json.dumps(self.value_end) if self.value_end else ""
        shared = {each: root[each] for each in ("$defs", "definitions") if each in root}
        branches = _branches(schema, root, refuse)
        if any(branch.keys() <= {"type"} and _is_text(branch) for branch in branches):
            end = re.escape(self.value_end).replace("\\\n", r"\n").replace("/", r"\/")
            return {"text": f": /(?s:.*){end}/" if self.call_end.startswith(MARK) else f"[lazy]: /(?s:.*){end}/"}
        texts, others = list[str](), list[dict[str, Any]]()
        for branch in branches:
            listed = [value for value in branch.get("enum", ()) if isinstance(value, str)]
            if _is_text(branch) and branch.keys() - {"type", "enum"}:
                raise refuse(min(branch.keys() - {"type", "enum"}))
            texts += [value for value in listed if typed_argument(value, key, root) == value]
            rest = [value for value in branch.get("enum", ()) if not isinstance(value, str)]
            others += [branch | {"enum": rest}] if rest else [] if "enum" in branch else [branch]
        rules = {"text": f": ({' | '.join(map(json.dumps, texts))}) {close}"} if texts else {}
        if others or not texts:
            of_json = {"anyOf": others} if texts else schema if isinstance(schema, Mapping) else {"not": {}}
            rules["json"] = f": {json_rule({**shared, **of_json})} {close}"
        return rules


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


def _parameters(name: str, schema: Any) -> tuple[dict[str, Any], set[str]]:
    """The schemas of the parameters, in order, and the names of the required ones. Raises Refusal."""

    def refuse(what: str) -> Refusal:
        return invalid(f"the parameters of {name} have {what!r}, which a forced call does not follow", "tools")

    branches = _branches(schema, schema, refuse)
    if len(branches) != 1:
        raise refuse("anyOf")
    if unknown := sorted(branches[0].keys() - _OF_OBJECTS):
        raise refuse(unknown[0])
    properties, required = branches[0].get("properties") or {}, branches[0].get("required") or []
    if (
        not isinstance(properties, dict)
        or not isinstance(required, list)
        or not all(isinstance(key, str) for key in required)
        or not all(isinstance(each, dict | bool) for each in properties.values())
    ):
        raise invalid(f"the parameters of {name} are not a JSON schema of an object", "tools")
    return properties | {key: {} for key in required if key not in properties}, set(required)


def _branches(
    schema: Any, root: Any, refuse: Callable[[str], Refusal], depth: int = 0, steps: Iterator[int] | None = None
) -> list[dict[str, Any]]:
    """The alternatives of a schema: without references, combinations, constants and annotations. Raises Refusal."""
    steps = steps or iter(range(_MOST_STEPS))
    if isinstance(schema, bool):
        return [{}] if schema else []
    if not isinstance(schema, Mapping) or depth > _DEEPEST or next(steps, None) is None:
        raise refuse("$ref" if depth else "a form that is no JSON schema")
    own = {key: value for key, value in schema.items() if key not in _ANNOTATIONS and key not in _COMBINED}
    if not isinstance(own.get("enum", []), list):
        raise refuse("enum")
    if "const" in own:
        own = _both(own, {"enum": [own.pop("const")]}, refuse) or {}
    whole = [own]
    parts = [[part] for part in _parts(schema, "allOf", refuse)]
    parts += [alternatives for key in ("anyOf", "oneOf") if (alternatives := _parts(schema, key, refuse))]
    texts = [
        b for each in schema.get("oneOf", ()) for b in _branches(each, root, refuse, depth + 1, steps) if _is_text(b)
    ]
    listed = [value for branch in texts for value in branch.get("enum", ())]
    if len(texts) > 1 and (
        not all("enum" in branch for branch in texts) or any(listed.count(value) > 1 for value in listed)
    ):
        raise refuse("oneOf")  # a text might fit several of them
    if "$ref" in schema:
        parts.append([_referred(schema["$ref"], root, refuse)])
    for part in parts:
        others = [branch for each in part for branch in _branches(each, root, refuse, depth + 1, steps)]
        if len(whole) * len(others) > _MOST_BRANCHES:
            raise refuse("too many alternatives")
        merged = [_both(one, other, refuse) for one in whole for other in others]
        whole = [branch for branch in merged if branch is not None]
    return whole


def _parts(schema: Mapping[str, Any], key: str, refuse: Callable[[str], Refusal]) -> list[Any]:
    parts = schema.get(key, [])
    if not isinstance(parts, list):
        raise refuse(key)
    return parts


def _referred(pointer: Any, root: Any, refuse: Callable[[str], Refusal]) -> Any:
    """The schema at a pointer such as `#/$defs/Name`. Raises Refusal."""
    try:
        resource = Resource.from_contents(root, default_specification=DRAFT202012)
        return Registry().resolver_with_root(resource).lookup(pointer).contents
    except Exception:  # whatever a broken schema provokes in the library
        raise refuse("$ref") from None


def _both(one: Mapping[str, Any], other: Mapping[str, Any], refuse: Callable[[str], Refusal]) -> dict[str, Any] | None:
    """The keywords of two schemas that hold together; None if no value fits both. Raises Refusal."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        mine, theirs = one[key], other[key]
        if mine == theirs:
            continue
        if key == "enum" and isinstance(mine, list) and isinstance(theirs, list):
            both[key] = [value for value in mine if value in theirs]
        elif key == "type":
            both[key] = [kind for kind in _kinds(mine) if kind in _kinds(theirs)]
        elif key == "required" and isinstance(mine, list) and isinstance(theirs, list):
            both[key] = [*mine, *theirs]
        elif key == "properties" and isinstance(mine, dict) and isinstance(theirs, dict):
            shared = {name: {"allOf": [mine[name], theirs[name]]} for name in mine.keys() & theirs.keys()}
            both[key] = mine | theirs | shared
        else:
            raise refuse(key)
        if key in ("enum", "type") and not both[key]:
            return None
    return both


def _kinds(kind: Any) -> list[Any]:
    kinds = kind if isinstance(kind, list) else [kind]
    return [*kinds, "integer"] if "number" in kinds else kinds


def _is_text(branch: Mapping[str, Any]) -> bool:
    """Whether a branch allows texts."""
    if "enum" in branch:
        return any(isinstance(value, str) for value in branch["enum"])
    return "type" not in branch or "string" in _kinds(branch["type"])


def json_rule(schema: Mapping[str, Any]) -> str:
    """A rule of Lark for a value of this schema in JSON."""
    return f"%json {json.dumps(dict(schema) | {'x-guidance': {'whitespace_pattern': _SPACE}})}"


def rule_of(text: str) -> str:
    """A rule of Lark for a text with marked tokens."""
    parts = _TOKEN.split(text)
    return " ".join(f"<[{part}]>" if i % 2 else json.dumps(part) for i, part in enumerate(parts) if part) or '""'
