"""Grammars of answers, walked at random: whatever they allow is what was asked for, in the dialect of the model."""

import json
import re

import numpy as np
import pytest

from etude.inference.server.bodies import ChatBody, CompletionBody
from etude.inference.server.grammars import Grammars, answer_rule, json_rule
from etude.protocol.access import Refusal
from etude.renderers import fitted, renderer_for
from etude.renderers.base import load_tokenizer
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model
from tests.renderers.families import FAMILIES

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"}, "kind": {"enum": ["a</tool_call>b", '"quoted"']}, "n": {"enum": [1, None]},
    },
    "required": ["ok", "kind", "n"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "second", "parameters": {"type": "object", "maxProperties": 0}}},
]


def walked(grammars, lark, seed):
    """Random tokens that the grammar allows, up to its end."""
    matcher, rng, ids = grammars.matcher(lark, "x"), np.random.default_rng(seed), []
    while not matcher.is_stopped() and len(ids) < 2000:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ids.append(int(rng.choice(np.flatnonzero(bits))))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    assert matcher.is_stopped()
    return ids


def of_folder(folder):
    renderer, tokenizer = renderer_for(folder), load_tokenizer(folder)
    return renderer, Grammars(tokenizer, tokenizer.get_vocab_size(), renderer.stop_ids)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return of_folder(write_model(tmp_path_factory.mktemp("hermes"), hermes_tokenizer(), TEMPLATE))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A template whose generation prompt begins a thought."""
    template = TEMPLATE.replace(
        "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    assert template != TEMPLATE
    return of_folder(write_model(tmp_path_factory.mktemp("thinking"), hermes_tokenizer(), template))


def fits(value):
    return sorted(value) == ["kind", "n", "ok"] and value["kind"] in SCHEMA["properties"]["kind"]["enum"]


@pytest.mark.parametrize("seed", range(4))
def test_a_forced_call_is_parsed_and_fits_its_schema(hermes, seed):
    renderer, grammars = hermes
    names = set()
    for walk in range(6):
        parsed = renderer.parse(walked(grammars, grammars.of_call(renderer, TOOLS), 10 * seed + walk), "stop")
        (call,) = parsed.calls
        names.add(call.name)
        assert parsed.text == ""
        assert fits(call.arguments) if call.name == "first" else (call.name, call.arguments) == ("second", {})
    (call,) = renderer.parse(walked(grammars, grammars.of_call(renderer, TOOLS[:1]), seed), "stop").calls
    assert call.name == "first"


TAGGED = {
    "type": "object", "required": ["kind", "n"],
    "properties": {
        "text": {"type": "string", "description": "Any."}, "kind": {"type": "string", "enum": ["a</b", "x\ny"]},
        "n": {"type": "integer", "minimum": 3, "maximum": 5}, "deep": {"$ref": "#/$defs/deep", "type": "object"},
    },
    "$defs": {"deep": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}},
}  # fmt: skip
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SECOND = {"type": "function", "function": {"name": "second", "parameters": EMPTY}}
TAGGED_TOOLS = [{"type": "function", "function": {"name": "first", "parameters": TAGGED}}, SECOND]
FREE = 'a <b> </c> </function> "q" ü\n\n\tif x:\n'


def of_call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]
    }  # fmt: skip


def family(name, folder):
    return of_folder(next(family for family in FAMILIES if family.name == name).write(folder / name))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "qwen3.6", "seed-oss", "glm-4.5", "deepseek-v3.2"])
def test_a_forced_call_between_tags(tmp_path, name):
    """The grammar takes the calls that the template writes and refuses those that do not fit; a random walk through it
    is read as a call that fits."""
    renderer, grammars = family(name, tmp_path)
    simple = json.loads(json.dumps(TAGGED))
    del simple["properties"]["text"], simple["properties"]["deep"]
    lark = grammars.of_call(renderer, TAGGED_TOOLS)

    def allowed(function, arguments):
        ids = renderer.turn(of_call(function, arguments))
        while ids[-1] in renderer.stop_ids:
            ids.pop()
        assert [c.arguments for c in renderer.parse(ids, "stop", TAGGED_TOOLS).calls] == [arguments]
        matcher = grammars.matcher(lark, "x")
        return all(map(matcher.consume_token, ids)) and matcher.is_accepting()

    assert allowed("first", {"text": FREE, "kind": "x\ny", "n": 4})
    assert allowed("first", {"kind": "a</b", "n": 3})
    assert allowed("second", {})
    if name in ("qwen3", "qwen3.6", "glm-4.5"):  # the others write {'a': 1}
        assert allowed("first", {"kind": "a</b", "n": 3, "deep": {"a": 1}})
    assert not allowed("first", {"kind": "x\ny", "n": 6})
    assert not allowed("first", {"kind": "other", "n": 4})
    assert not allowed("first", {"n": 4})
    assert not allowed("second", {"x": 1})
    names = set()
    walkable = {"type": "function", "function": {"name": "first", "parameters": simple}}
    lark = grammars.of_call(renderer, [walkable, SECOND])
    for seed in range(5):
        (call,) = renderer.parse(walked(grammars, lark, seed), "stop", TAGGED_TOOLS).calls
        names.add(call.name)
        if call.name == "first":
            assert call.arguments["kind"] in ("a</b", "x\ny")
            assert call.arguments["n"] in (3, 4, 5)
    assert names == {"first", "second"}


MANY = {str(n): {"allOf": [{"$ref": f"#/$defs/{n - 1}"}] * 4} for n in range(1, 15)} | {"0": {}}  # four ways to each
PYDANTIC = {
    "$ref": "#/$defs/Send",
    "$defs": {
        "Send": {
            "type": "object", "title": "Send", "required": ["zip", "mode", "level"],
            "properties": {
                "zip": {"$ref": "#/$defs/Zip"}, "mode": {"const": "1"}, "level": {"enum": ["1", 2]},
                "note": {"allOf": [{"$ref": "#/$defs/Note"}], "description": "A note."},
                "near": {"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}], "default": None},
                "count": {"anyOf": [{"type": "integer", "maximum": 3, "minimum": 3}, {"type": "null"}]},
            },
        },
        "Zip": {"type": "string", "enum": ["12345", "true"]}, "Note": {"type": "string"},
        "Kind": {"enum": ["a", "b"], "type": "string"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3-coder", "seed-oss", "glm-4.5", "deepseek-v3.2"])
def test_a_schema_by_reference_is_forced_and_read(tmp_path, name):
    """As pydantic and zod write schemas: what the grammar allows fits, and what fits is read as it was meant."""
    renderer, grammars = family(name, tmp_path)
    tools = [{"type": "function", "function": {"name": "send", "parameters": PYDANTIC}}]
    lark = grammars.of_call(renderer, tools)
    written = {"zip": "12345", "note": "true", "mode": "1", "level": "1", "near": "b", "count": 3}
    ids = renderer.turn(of_call("send", written))
    assert [call.arguments for call in renderer.parse(ids, "stop", tools).calls] == [written]
    matcher = grammars.matcher(lark, "x")
    say = renderer.turn(of_call("send", {"zip": "true", "mode": "1", "level": 2, "count": 3}))
    while say[-1] in renderer.stop_ids:
        say.pop()
    assert all(map(matcher.consume_token, say))
    assert matcher.is_accepting()
    short = json.loads(json.dumps(tools))
    del short[0]["function"]["parameters"]["$defs"]["Send"]["properties"]["note"]
    lark, levels = grammars.of_call(renderer, short), set()
    for seed in range(8):
        (call,) = renderer.parse(walked(grammars, lark, seed), "stop", short).calls
        assert fitted(call, PYDANTIC) == call.arguments
        levels.add(call.arguments["level"])
    assert levels == {"1", 2}


@pytest.mark.parametrize(
    ("name", "schema", "sentence"),
    [
        ("seed-oss", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "of first have '[$]ref'"),
        ("seed-oss", {"properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}, "'a' of first has '[$]ref'"),
        ("seed-oss", {"$ref": "#/$defs/14", "$defs": MANY}, "of first have '[$]ref'"),
        (
            "seed-oss",
            {"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}},
            "'a' of first has 'oneOf'",
        ),
        ("seed-oss", {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "of first have 'anyOf'"),
        ("seed-oss", {"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 3}]}}}, "has 'minLength'"),
        ("seed-oss", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "'a' of first has 'pattern'"),
        ("seed-oss", {"properties": {"a": {"$ref": "#/x"}}}, "'a' of first has '[$]ref'"),
        ("seed-oss", {"properties": {"a": {"type": "string"}}, "minProperties": 1}, "of first have 'minProperties'"),
        ("seed-oss", {"properties": {"a": 1}}, "not a JSON schema of an object"),
        ("seed-oss", {"required": "a"}, "not a JSON schema of an object"),
        ("seed-oss", {"properties": {"a": {"type": [{}], "anyOf": 1}}}, "'a' of first has 'anyOf'"),
        ("lfm2", {}, "as JSON or between tags"),
    ],
)
def test_calls_that_cannot_be_forced_are_refused_by_name(tmp_path, name, schema, sentence):
    renderer, grammars = family(name, tmp_path)
    with pytest.raises(Refusal, match=sentence):
        grammars.of_call(renderer, [{"type": "function", "function": {"name": "first", "parameters": schema}}])


def test_json_or_a_call(hermes):
    renderer, grammars = hermes
    body = ChatBody.of(
        {"messages": [{}], "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    )
    rule, param = answer_rule(body)
    assert param == "response_format"
    kinds = set()
    for seed in range(20):
        parsed = renderer.parse(walked(grammars, grammars.of_call(renderer, TOOLS, rule), seed), "stop")
        kinds.add(bool(parsed.calls))
        assert parsed.calls or fits(json.loads(parsed.text))
        assert fits(json.loads(renderer.parse(walked(grammars, grammars.of_text(renderer, rule), seed), "stop").text))
    assert kinds == {True, False}


def test_a_constrained_answer_is_no_thought(thinking):
    renderer, grammars = thinking
    parsed = renderer.parse(walked(grammars, grammars.of_text(renderer, f"answer: {json_rule(SCHEMA)}"), 0), "stop")
    assert fits(json.loads(parsed.text))
    assert parsed.reasoning == ""


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"a/b\/c|\d{3}"}}, r"a/b/c|\d{3}"),
        ({"guided_choice": ["yes\n", 'no"']}, 'yes\n|no"'),
        ({"guided_grammar": 'start: "(" start ")" | "start"'}, r"\(*start\)*"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": None}}, None),
    ],
)
def test_what_an_answer_may_look_like(hermes, fields, pattern):
    rule = answer_rule(CompletionBody.of({"prompt": "x"} | fields))
    assert (rule is None) is (pattern is None)
    if rule is not None and "json_object" not in str(fields):
        text = hermes[0].text(walked(hermes[1], f"start: answer\n{rule[0]}", 3))
        assert re.fullmatch(pattern, re.sub(r"<\|\w+\|>$", "", text), re.DOTALL), text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "type 'xml' is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "must be a JSON schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "several fields"),
        ({"structured_outputs": {"structural_tag": "x"}}, "'structural_tag' is not supported"),
        ({"guided_choice": []}, "'choice' is not supported with this value"),
        ({"guided_json": "{"}, "the schema is not JSON"),
        ({"guided_grammar": 'first: "x"'}, "guided_grammar: the grammar"),
        ({"guided_json": {"not": {}}}, "cannot be followed: .*not"),
        ({"guided_regex": "("}, "cannot be followed"),
        ({"guided_json": {"type": "object", "not": {}, "x-guidance": {"lenient": True}}}, "cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(hermes, fields, sentence):
    def follow():
        rule, param = answer_rule(CompletionBody.of({"prompt": "x"} | fields))
        return hermes[1].matcher(f"start: answer\n{rule}", param)

    with pytest.raises(Refusal, match=sentence):
        follow()
