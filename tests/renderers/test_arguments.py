"""Arguments of calls: what schemas, JSON and Python make of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from etude.records import ToolCall
from etude.renderers import Renderer, ToolError, fitted, read_call, renderer_for, typed_argument
from etude.renderers.calls import python_calls
from tests.renderers.families import FAMILIES

DEFS = {
    "Zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "Note": {"type": "string"}, "Count": {"type": "integer"},
    "Loop": {"$ref": "#/$defs/Loop"},
}  # fmt: skip
PROPERTIES = {
    "zip": {"$ref": "#/$defs/Zip"}, "note": {"allOf": [{"$ref": "#/$defs/Note"}], "description": "a note"},
    "mode": {"const": "1"}, "level": {"enum": ["1", 2]},
}  # fmt: skip
SEND = {"type": "object", "properties": PROPERTIES, "required": ["zip"], "$defs": DEFS}
SENT = {"zip": "12345", "note": "true", "mode": "1", "level": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def family(name: str, folders: Path) -> Renderer:
    found = next(family for family in FAMILIES if family.name == name)
    return renderer_for(folders / name if (folders / name).exists() else found.write(folders / name))


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def said(renderer: Renderer, name: str, arguments: dict[str, Any]) -> list[int]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call00000", "type": "function", "function": function}
    return renderer.turn({"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.mark.parametrize("name", ["qwen3-coder", "seed-oss", "glm-4.5", "minimax-m2", "deepseek-v3.2", "qwen3"])
def test_the_type_behind_a_reference_is_read(name: str, folders: Path) -> None:
    renderer = family(name, folders)
    try:
        ids = said(renderer, "send", SENT)
    except ValueError:  # its generation prompt opens a thought
        pairs = "".join(f'<parameter name="{key}">{value}</parameter>' for key, value in SENT.items())
        body = f'</think>\n\n<minimax:tool_call>\n<invoke name="send">{pairs}</invoke>\n</minimax:tool_call>'
        ids = renderer.encode_marked(body, "\0")  # type: ignore[attr-defined]
    assert renderer.parse(ids, "stop", [tool("send", SEND)]).calls == (ToolCall(name="send", arguments=SENT),)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12345", {"$ref": "#/$defs/Zip"}, "12345"), ("1", {"$ref": "#/$defs/Zip"}, "1"),
        ("7", {"$ref": "#/$defs/Count"}, 7), ("2", {"enum": ["1", 2]}, 2), ("3", {"enum": ["1", 2]}, "3"),
        ("3", {"not": {"type": "string"}}, 3), ("3", {"not": {"type": "integer"}}, "3"),
        ("3", {"oneOf": [{"type": "string", "maxLength": 0}, {"type": "integer"}]}, 3), ("3", True, 3), ("3", False, 3),
        ('"30"', {"type": "integer"}, 30), ("7.0", {"type": "integer"}, 7), ("7.5", {"type": "integer"}, 7.5),
        ("1e300", {"type": "integer"}, 1e300), ("1e999", {}, "1e999"), ("Infinity", {}, "Infinity"),
        ("{1, 2}", {}, "{1, 2}"),
        ("null", {"type": "integer"}, None),
        ("9" * 30, {}, "9" * 30),
        # Broken and hostile schemas allow everything, at once.
        ("3", {"$ref": "#/$defs/Loop"}, 3), ("3", {"$ref": "#/$defs/None"}, 3),
        ("3", {"$ref": "http://127.0.0.1:9"}, 3),
        ("3", {"type": "wrong"}, 3), ("3", [1], 3), ("3", {"multipleOf": 0}, 3), ("3", {"$ref": 5}, 3),
        ("a" * 40 + "!", {"type": "string", "pattern": "^(a+)+$"}, "a" * 40 + "!"),
        ("3", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "string", "pattern": "^(a+)+$"}, "3"),
    ],
)  # fmt: skip
def test_the_schema_decides_what_a_text_is(text: str, schema: Any, value: Any) -> None:
    started = time.monotonic()
    found = typed_argument(text, "a", {"type": "object", "properties": {"a": schema}, "$defs": DEFS})
    assert (found, type(found)) == (value, type(value))
    assert time.monotonic() - started < 5


def test_a_schema_of_many_ways_takes_no_time() -> None:
    many: dict[str, Any] = {"0": {"type": "string"}}
    for depth in range(1, 40):
        many[str(depth)] = {"allOf": [{"$ref": f"#/$defs/{depth - 1}"}] * 4}
    parameters = {"properties": {"a": {"$ref": "#/$defs/39"}}, "$defs": many}
    started = time.monotonic()
    assert typed_argument("3", "a", parameters) == "3"
    assert fitted(ToolCall(name="f", arguments={"a": "3"}), parameters) == {"a": "3"}
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("f(a={1, 2})", "set is no type"), ('f(a=b"x")', "bytes is no type"), ("f(a=...)", "ellipsis is no type"),
        ("f(a=1j)", "complex is no type"), ("f(a=[{1: 2}])", "the name 1 is no text"), ("f(a=1e999)", "Infinity is no"),
        ("f(a=-1e999)", "-Infinity is no number"), ("f(a={**b})", "not a value"), ("f(a=g())", "not a value"),
        ("f(a=9999999999999999999999)", "more than 64 bits"), ("f(a='\\ud800')", "half of a surrogate"),
        ("f(a=inf)", "not a value"), ("f(**a)", "no names"), ("f(1)", "no names"),
    ],
)  # fmt: skip
def test_python_values_that_json_lacks_are_malformed(text: str, why: str) -> None:
    (parsed,) = python_calls(text)
    assert parsed.call.arguments is None
    assert why in parsed.call.error


@pytest.mark.parametrize(
    ("written", "arguments"),
    [("null", {}), ('""', {}), ('" \\n"', {}), ("{}", {}), ('"{}"', {}), ('{"a": 1, "a": 2}', {"a": 2}),
     ('{"a": NaN}', "NaN is no number"), ('{"a": [-1e999]}', "-Infinity is no number"), ("[]", "not a JSON object"),
     ("0", "not a JSON object"), ('"x"', "not a JSON object"), ('"{\\"a\\": NaN}"', "NaN is no number")],
)  # fmt: skip
def test_arguments_of_a_call_in_json(written: str, arguments: Any, folders: Path) -> None:
    """Null and blank texts are no arguments; of equal names the last counts, as in JSON's own library."""
    renderer = family("qwen3", folders)
    ids = renderer.encode_marked(f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>', "\0")  # type: ignore[attr-defined]
    (call,) = renderer.parse(ids, "stop").calls
    assert call == read_call("f", json.loads(written))
    if isinstance(arguments, str):
        assert call.arguments is None
        assert arguments in call.error
        function = {"name": "f", "arguments": json.loads(written)}
        with pytest.raises(ValueError, match="arguments are not"):
            renderer.turn({"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": function}]})
    else:
        assert call.arguments == arguments
    kimi = family("kimi-k2", folders)
    head = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    ids = kimi.encode_marked(f"{head} {written}<|tool_call_end|><|tool_calls_section_end|>", "\0")  # type: ignore[attr-defined]
    assert [each.arguments for each in kimi.parse(ids, "stop").calls] == [call.arguments]
    ids = kimi.encode_marked(f"{head}<|tool_call_end|><|tool_calls_section_end|>", "\0")  # type: ignore[attr-defined]
    assert [each.arguments for each in kimi.parse(ids, "stop").calls] == [{}]


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [("NaN", "number", "NaN is no number"), ("-1e999", "number", "-Infinity is no number"), ("{1}", "object", "set is"),
     ("9" * 30, "integer", "more than 64 bits"), ("[NaN]", "array", "NaN is no"), ("{1: 2}", "object", "name 1 is")],
)  # fmt: skip
def test_values_that_json_lacks_are_malformed_between_tags(text: str, kind: str, why: str, folders: Path) -> None:
    renderer = family("qwen3-coder", folders)
    said = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    tools = [tool("f", {"type": "object", "properties": {"a": {"type": kind}}})]
    (call,) = renderer.parse(renderer.encode_marked(said, "\0"), "stop", tools).calls  # type: ignore[attr-defined]
    assert (call.name, call.arguments) == ("f", None)
    assert why in call.error


def test_names_and_ids_that_no_record_can_hold(folders: Path) -> None:
    renderer = family("qwen3", folders)
    said = '{"name": "f", "id": "\\ud800", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}'
    ids = renderer.encode_marked("".join(f"<tool_call>{each}</tool_call>" for each in said), "\0")  # type: ignore[attr-defined]
    turn = renderer.parse(ids, "stop")
    assert (turn.ids, [call.arguments for call in turn.calls]) == (("?", ""), [{}, None])
    json.dumps(turn.openai("x"), ensure_ascii=False).encode()


def test_numbers_in_quotes_are_read_in_every_dialect(folders: Path) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}, "s": DEFS["Note"]},
    }
    for name in ("qwen3", "qwen3-coder", "deepseek-v3.2", "lfm2"):
        renderer = family(name, folders)
        ids = said(renderer, "f", {"n": "30", "on": "true", "s": "5"})
        (call,) = renderer.parse(ids, "stop", [tool("f", parameters)]).calls
        assert call.arguments == {"n": 30, "on": True, "s": "5"}, name


NEEDS = {"type": "object", "properties": {"n": DEFS["Count"], "s": DEFS["Note"], "l": {"type": ["array", "null"]},
         "deep": {"type": "array", "items": {"type": "object", "required": ["x"],
         "properties": {"x": DEFS["Count"]}}}}, "required": ["s"]}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"s": "a", "n": None, "l": None}, {"s": "a", "l": None}), ({"s": "5", "n": "5"}, {"s": "5", "n": 5}),
        ({"s": "a", "n": 5.0}, {"s": "a", "n": 5}), ({"s": None}, "s is not of type string"), ({}, "f needs s"),
        ({"s": "a", "n": "x"}, "n is not of type integer"), ({"s": "a", "n": True}, "n is not of type integer"),
        ({"s": "a", "deep": [{"x": 1}, {}]}, "deep[1] needs x"), ({"s": "a", "z": 1}, "f has no argument z"),
        ({"s": "a", "deep": [{"x": "1"}, {"x": 2.0}]}, {"s": "a", "deep": [{"x": 1}, {"x": 2}]}),
        ({"s": "a", "deep": [{"x": "1"}, {"x": "y"}]}, "deep[0].x is not of type integer"),
        ({"s": "a", "l": "[1]"}, {"s": "a", "l": [1]}), ({"s": "a", "n": 10**15}, {"s": "a", "n": 10**15}),
    ],
)  # fmt: skip
def test_arguments_fit_or_the_sentence_says_why(arguments: dict[str, Any], taken: Any) -> None:
    call = ToolCall(name="f", arguments=arguments)
    parameters = NEEDS | {"additionalProperties": False}
    if isinstance(taken, str):
        with pytest.raises(ToolError) as refused:
            fitted(call, parameters)
        assert str(refused.value) == taken
    else:
        found = fitted(call, parameters)
        assert found == taken
        assert all(type(found[key]) is type(value) for key, value in taken.items())


def test_arguments_that_readers_in_python_cannot_follow_are_malformed():
    """The schema of a tool was not checked for them deep in a stack, and its function got a list as text."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        texts = {depth: f'{{"path": {opening * depth}1{closing * depth}}}' for depth in (99, 100, 900)}
        assert read_call("f", texts[99]).arguments is not None
        assert "nested more than 100 deep" in read_call("f", texts[100]).error
        assert read_call("f", texts[900]).arguments is None
