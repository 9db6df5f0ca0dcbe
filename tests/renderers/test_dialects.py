"""Tool calls in the dialects of the families, by the makers' own chat templates (`templates/README.md`)."""

from __future__ import annotations

import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from etude.errors import UserError
from etude.protocol.apis import arranged
from etude.records import ToolCall
from etude.renderers import DialectVerdict, Renderer, dialect_verdict, renderer_for, typed_argument
from etude.renderers.chat import ChatRenderer
from etude.renderers.compact import IDS as COMPACT_IDS
from etude.renderers.dialects import DIALECTS
from etude.renderers.schemas import SCHEMAS
from tests.renderers.families import CHATML, FAMILIES, QWEN3, Family

PLAYED = [family for family in FAMILIES if family.dialect]
USER = {"role": "user", "content": "Fix it."}
TODO = {"items": [{"task": 'Lies "naïve.py" 漢字 🎉', "status": "open"}, {"task": "a\\b\n\tc", "status": "done"}]}
EDIT = {"path": "src/ä.py", "old": "\n    if x:\n        return '</div>'\n", "new": "5"}
RUN = {"command": 'echo "$HOME" <|im_end|> 漢', "seconds": 7, "background": True}
HISTORY: dict[str, Any] = {}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    root = tmp_path_factory.mktemp("families")
    return {family.name: renderer_for(family.write(root / family.name)) for family in PLAYED}


def call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    given = f"call{number:05d}"
    return {"id": given, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def sampled(renderer: Renderer, message: dict[str, Any]) -> list[int]:
    """The turn as a model samples it; after a thought, where the generation prompt opens one that cannot be empty."""
    try:
        return renderer.turn(message)
    except ValueError:
        pass
    try:
        return renderer.turn(message | {"reasoning_content": "Hm."})
    except ValueError:  # the history of this template has no thoughts
        assert renderer.dialect == "nemotron_json"
    functions = [c["function"] for c in message["tool_calls"]]
    calls = [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]
    said = f"Hm.\n</think>\n<TOOLCALL>{json.dumps(calls, ensure_ascii=False)}</TOOLCALL>\n<SPECIAL_12>"
    return renderer.encode_marked(said, "\0")  # type: ignore[attr-defined]


def assistant(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(*each, i) for i, each in enumerate(calls)]}


def test_at_least_eighteen_families_are_tried_and_twelve_call_tools() -> None:
    """None in silence: a family has a dialect or a refusal."""
    assert len(FAMILIES) >= 18
    assert len([family for family in PLAYED if family.calls is None]) >= 12  # with two calls in a turn
    assert all(bool(family.dialect) != bool(family.refusal) for family in FAMILIES)
    assert {family.name for family in FAMILIES} == {
        path.stem for path in Path(__file__).parent.glob("templates/*.jinja")
    }


@pytest.mark.parametrize("family", PLAYED, ids=lambda family: family.name)
def test_calls_make_the_round_trip(family: Family, renderers: dict[str, Renderer]) -> None:
    """Nested JSON, unicode, line breaks, markup, a text that is a number, and two calls in a turn."""
    renderer = renderers[family.name]
    assert (renderer.dialect, renderer.calls_per_turn) == (family.dialect, family.calls)  # type: ignore[attr-defined]
    pairs = [("todo", TODO), ("edit", EDIT)], [("run", RUN)], [("history", HISTORY)]
    for calls in pairs if family.calls is None else [[each] for pair in pairs for each in pair]:
        turn = sampled(renderer, assistant(*calls))
        thought = renderer.parse(turn, "stop", SCHEMAS)
        assert thought.calls == tuple(ToolCall(name=name, arguments=said) for name, said in calls)
        assert thought.text == ""
        assert turn[-1] in renderer.stop_ids
        assert len({i for i in turn if i in renderer.stop_ids}) == 1  # a spelled end of turn stays text
    if family.calls == 1:
        with pytest.raises(ValueError, match=r"one call|single tool"):
            renderer.prompt([USER, assistant(*pairs[0])])


@pytest.mark.parametrize("family", PLAYED, ids=lambda family: family.name)
def test_turns_put_together_are_the_render_of_transformers(family: Family, renderers: dict[str, Renderer]) -> None:
    """An independent reference: transformers renders the whole conversation with the same template. Tags of empty
    thoughts, and white space beside them, are where the generation prompt has them."""
    renderer, count = renderers[family.name], family.calls or 2
    messages: list[dict[str, Any]] = [USER]
    ids = renderer.prompt(messages, SCHEMAS)
    assert renderer.text(ids) == _reference(family, renderer, messages)
    for number in range(3):
        said = assistant(*[("read", {"path": f"{number}.py"}), ("run", {"command": "ls"})][:count])
        turn = sampled(renderer, said)
        parsed = renderer.parse(turn)
        results = ["first\nresult", "second"][:count]
        ids += turn + renderer.bridge(turn, "stop", results)
        given = [i or made["id"] for i, made in zip(parsed.ids, said["tool_calls"], strict=True)]
        answers = [
            {"role": "tool", "name": c.name, "tool_call_id": i, "content": text}
            for c, i, text in zip(parsed.calls, given, results, strict=True)
        ]
        messages += [said, *answers]
    tags = re.compile(r"\s|Hm\.|</?(?:seed:)?think>|\[/?THINK\]")
    assert tags.sub("", renderer.text(ids)) == tags.sub("", _reference(family, renderer, messages))


def _reference(family: Family, renderer: Renderer, messages: list[dict[str, Any]]) -> str:
    """Arguments are objects there, as transformers asks for; ids of calls are those that the family's models give."""
    plain = [dict(message) for message in messages]
    for message in plain:
        if "tool_calls" in message:
            functions = [c["function"] for c in message["tool_calls"]]
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": f | {"arguments": json.loads(f["arguments"])}}
                for c, f in zip(message["tool_calls"], functions, strict=True)
            ]
    variables = {"eos_token": family.eos, "bos_token": family.special.split()[0]}
    (text,), _ = render_jinja_template(
        conversations=[plain],
        tools=list(SCHEMAS),
        chat_template=family.template,
        add_generation_prompt=True,
        **variables,
    )
    return text


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.refusal], ids=lambda family: family.name)
def test_what_cannot_be_played_is_refused_by_name(family: Family, tmp_path: Path) -> None:
    folder = family.write(tmp_path / family.name)
    verdict = dialect_verdict(folder)
    assert (verdict.dialect, verdict.calls_per_turn) == ("", 0)
    assert family.name in verdict.refusal
    assert family.refusal in verdict.refusal
    with pytest.raises(UserError, match=family.name):
        renderer_for(folder)


def test_a_template_without_tools_is_taken_for_conversations_without_them(tmp_path: Path) -> None:
    smollm3 = next(f for f in FAMILIES if f.name == "smollm3")
    renderer = renderer_for(smollm3.write(tmp_path / "smollm3"), tools=False)
    assert renderer.dialect == "none"
    assert renderer.text(renderer.turn({"role": "assistant", "content": "Done."})).endswith("Done.<|im_end|>")
    for messages, tools in (([USER], SCHEMAS), ([USER, assistant(("test", {}))], ())):
        with pytest.raises(ValueError, match="cannot call tools"):
            renderer.prompt(messages, tools)


@pytest.mark.parametrize(
    ("name", "given"), [("qwen3", {"enable_thinking": False}), ("glm-4.5", {"enable_thinking": False})]
)
def test_thinking_off_is_a_variable_of_the_template(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    folder = family.write(tmp_path / name)
    on, off = renderer_for(folder), renderer_for(folder, None, given)
    assert "</think>" not in on.text(on.prompt([USER])[-20:])
    assert off.text(off.prompt([USER])).rstrip().endswith("</think>")
    assert off.digest != on.digest
    for renderer in (on, off):
        turn = renderer.turn(assistant(("test", {})))
        assert renderer.parse(turn).calls == (ToolCall(name="test", arguments={}),)
        again = renderer.text(renderer.bridge(turn, "stop", ["passed"]))
        assert again.rstrip().endswith("</think>") == (renderer is off)  # also behind results
    assert isinstance(on, ChatRenderer)
    assert on.with_template_kwargs(given).prompt([USER]) == off.prompt([USER])
    with pytest.raises(UserError, match=r"no variable 'enable_thinkin'.*enable_thinking"):
        renderer_for(folder, None, {"enable_thinkin": False})


def test_a_thought_that_the_prompt_opens_is_read_before_the_calls(renderers: dict[str, Renderer]) -> None:
    for name in ("qwen3.5", "nemotron-3", "glm-4.7", "minimax-m2", "step-3.5"):
        renderer = renderers[name]
        turn = sampled(renderer, assistant(("test", {})))
        start = [*renderer.plain("Maybe this."), *_token(renderer, "</think>")]
        said = renderer.text(turn).partition("</think>")[2] or renderer.text(turn)
        parsed = renderer.parse([*start, *renderer.encode_marked(said, "\0")])  # type: ignore[attr-defined]
        assert (parsed.reasoning, parsed.text, len(parsed.calls)) == ("Maybe this.", "", 1), name
        assert renderer.parse(renderer.plain("Maybe")).calls == ()


SYSTEM = {"role": "system", "content": "Text 0."}
READS = [call("read", {}, number) for number in range(2)]
RESULT = {"role": "tool", "name": "read", "tool_call_id": READS[0]["id"], "content": "Text 3."}


def said(role: str, number: int) -> dict[str, Any]:
    return {"role": role, "content": f"Text {number}."}


@pytest.mark.parametrize("family", PLAYED, ids=lambda family: family.name)
@pytest.mark.parametrize("messages", [
    [SYSTEM, said("user", 1), said("system", 2)],
    [SYSTEM, said("user", 1), said("assistant", 2), said("system", 3)],
    [said("user", 1), said("assistant", 2), said("system", 3), said("user", 4)],
    [said("user", 1), said("system", 2), said("assistant", 3), said("user", 4)],
    [said("user", 1), assistant(("read", {})), RESULT, said("system", 4)],
    [said("user", 1), said("assistant", 2) | {"tool_calls": READS[:1]}, RESULT, said("user", 4)],
    [said("assistant", 1), said("user", 2)],
], ids=lambda messages: " ".join(message["role"] for message in messages))  # fmt: skip
def test_every_text_is_in_its_place_or_the_message_is_refused(
    family: Family, messages: list[dict[str, Any]], renderers: dict[str, Renderer]
) -> None:
    """At once, and behind a turn that was sampled. The text beside calls may be dropped from a prompt, not from a turn
    to learn from."""
    renderer = renderers[family.name]

    def written(ids: list[int], due: list[dict[str, Any]]) -> bool:
        lost = {m["content"] for m in due if m["content"]} if family.name in ("llama-3.1", "mistral-small-3.2") else {}
        texts = [m["content"] for m in due if m["content"] and not (m.get("tool_calls") and m["content"] in lost)]
        return re.findall(r"Text \d\.", renderer.text(ids)) == texts

    reasons = []
    encoded = [(messages, lambda: renderer.prompt(messages))]
    for at, message in enumerate(messages[:-1]):
        if message["role"] == "assistant":
            encoded.append((messages[at + 1 :], lambda at=at: renderer.follow([], messages[at + 1 :])))
    for due, encode in encoded:
        try:
            assert written(encode(), due)
        except ValueError as e:
            reasons.append(str(e))
    refused = rf"the chat template of {family.name} (refuses these|has no place|does not write)"
    assert all(re.match(refused, reason) for reason in reasons)


def test_a_later_system_message_is_the_templates_if_it_has_a_place_for_it(renderers: dict[str, Renderer]) -> None:
    later = [said("user", 1), said("assistant", 2), said("system", 3)]
    asks = [*later[:2], said("user", 3)]
    own = {name for name, renderer in renderers.items() if renderer.prompt(later) != renderer.prompt(asks)}
    assert own >= {"qwen2.5", "qwen3", "kimi-k2", "llama-3.1"}
    assert not own & {"minimax-m2", "gpt-oss", "nemotron-nano-2", "deepseek-v3.1", "qwen3.5", "glm-4.5"}
    for name in ("llama-3.1", "mistral-small-3.2"):
        with pytest.raises(ValueError, match="does not write the text of a message by 'assistant'"):
            renderers[name].turn(said("assistant", 1) | {"tool_calls": READS[:1]})


def test_results_have_the_names_and_ids_of_their_calls_in_any_order(renderers: dict[str, Renderer]) -> None:
    """Behind a sampled turn as in a prompt: some templates name the call, some write the results by place."""
    names = ("read", "list", "run")
    calls = [call(name, {}, number) for number, name in enumerate(names)]
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"of {n}"} for c, n in zip(calls, names, strict=True)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    for family in PLAYED:
        if family.calls is None:
            renderer = renderers[family.name]
            prompts = {tuple(renderer.prompt(arranged([USER, turn, *some]))) for some in permutations(results)}
            ids = sampled(renderer, turn)
            after = {tuple(renderer.follow(ids, arranged([USER, turn, *some])[2:])) for some in permutations(results)}
            assert len(prompts) == len(after) == 1, family.name
            whole = re.sub(r"\s", "", renderer.text(list(prompts.pop())))
            assert whole.endswith(re.sub(r"\s", "", renderer.text(list(after.pop())))), family.name
    (one,) = arranged([USER, turn | {"tool_calls": calls[1:2]}, results[1]])[2:]
    assert "functions.list" in renderers["gpt-oss"].text(renderers["gpt-oss"].follow([], [one]))


def _token(renderer: Renderer, name: str) -> list[int]:
    ids = renderer.encode_marked(name, "\0")  # type: ignore[attr-defined]
    assert len(ids) == 1
    return ids


def test_what_only_spells_a_call_is_text(renderers: dict[str, Renderer]) -> None:
    """Sampled tokens decide: the same characters in ordinary tokens call nothing, where the marks are tokens."""
    for name in ("qwen3", "glm-4.5", "kimi-k2", "deepseek-v3.1", "minimax-m2", "gpt-oss", "lfm2", "ministral-3"):
        renderer = renderers[name]
        said = renderer.text(sampled(renderer, assistant(("test", {})))[:-1]).replace("Hm.", "").replace("</think>", "")
        start = _token(renderer, "</think>") if name == "minimax-m2" else []
        parsed = renderer.parse([*start, *renderer.plain(said)])
        assert parsed.calls == (), name
        assert "test" in parsed.text
    renderer = renderers["qwen3"]
    inner = "<tool_call> and </tool_call>"
    turn = renderer.turn(assistant(("run", {"command": inner})))
    assert renderer.parse(turn).calls == (ToolCall(name="run", arguments={"command": inner}),)


def test_ids_and_names_of_calls_stand_in_the_bridge(renderers: dict[str, Renderer]) -> None:
    kimi = renderers["kimi-k2"]
    said = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
    )
    turn = kimi.encode_marked(said, "\0")  # type: ignore[attr-defined]
    parsed = kimi.parse(turn)
    assert parsed.ids == ("functions.read:7",)
    assert parsed.openai("call_")["tool_calls"][0]["id"] == "functions.read:7"
    assert "## Return of functions.read:7" in kimi.text(kimi.bridge(turn, "stop", ["x"]))
    harmony = renderers["gpt-oss"]
    said = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.read "
    said += '<|constrain|>json<|message|>{"path": "a"}<|call|>'
    turn = harmony.encode_marked(said, "\0")  # type: ignore[attr-defined]
    parsed = harmony.parse(turn)
    assert (parsed.reasoning, parsed.calls) == ("Look.", (ToolCall(name="read", arguments={"path": "a"}),))
    assert harmony.text(harmony.bridge(turn, "stop", ["x"])).startswith("<|start|>functions.read to=assistant")
    # What a user asks after an answer: the sampled <|return|> is not said again as <|end|>.
    turn = harmony.encode_marked("<|channel|>final<|message|>Done.<|return|>", "\0")  # type: ignore[attr-defined]
    assert harmony.text(harmony.follow(turn, [USER])).startswith("<|start|>user")
    assert harmony.parse(turn).text == "Done."


def test_glm_ends_a_turn_with_the_next_role(renderers: dict[str, Renderer]) -> None:
    glm = renderers["glm-4.7"]
    turn = glm.turn(assistant(("test", {})))
    assert glm.text(turn[-1:]) == "<|observation|>"
    assert glm.text(glm.bridge(turn, "stop", ["x"])).startswith("<tool_response>x")
    assert glm.text(glm.bridge(turn[:-1], "length", ["x"])).startswith("<|observation|><tool_response>x")
    assert {glm.text([i]) for i in glm.stop_ids} >= {"<|observation|>", "<|user|>", "<|endoftext|>"}


BROKEN = [
    ("qwen3-coder", "<tool_call>\n<function=read>\n<parameter=path>\na", "read|", "not closed"),
    ("qwen3-coder", "<tool_call>\n<function=read>\nnothing\n</function>\n</tool_call>", "read", "neither an argument"),
    ("qwen3-coder", '<tool_call>{"name": "read"}</tool_call>', "", "does not begin with its name"),
    ("glm-4.5", "<tool_call>read\n<arg_key>path</arg_key>\n</tool_call>", "read", "neither an argument"),
    ("glm-4.5", "<tool_call>" + " " * 50_000, "", "not closed"),
    ("kimi-k2", "<|tool_calls_section_begin|>read<|tool_calls_section_end|>", "", "does not begin with its name"),
    ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{a",
     "functions.read:0|read", "not closed"),
    ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "read", "not a JSON object"),
    ("gpt-oss", "<|channel|>commentary to=functions.read<|message|>{'a': 1}<|call|>", "read", "not JSON"),
    ("gpt-oss", "<|channel|>commentary to=functions.read <|constrain|>json", "read", "not JSON"),
    ("llama-3.1", '{"name": "read", "parameters": {"path": ', "", "not JSON"),
    ("llama-3.1", '{"na', "", "not JSON"),
    ("llama-3.1", "<|python_tag|>print(1)", "", "not JSON"),
    ("lfm2", "<|tool_call_start|>[read(1)]<|tool_call_end|>", "read", "no names"),
    ("lfm2", "<|tool_call_start|>[read(path=open('x'))]<|tool_call_end|>", "read", "not a value"),
    ("lfm2", "<|tool_call_start|>[read(path=]<|tool_call_end|>", "", "not Python"),
    ("ministral-3", "[TOOL_CALLS]read[ARGS]{a", "read", "not closed"),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="read">\n</minimax:tool_call>', "read", "neither an argument"),
    ("nemotron-nano-2", "<TOOLCALL>[]</TOOLCALL>", "", "not a list of calls"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "said", "called", "why"), BROKEN)
def test_a_malformed_call_has_a_typed_error(
    name: str, said: str, called: str, why: str, renderers: dict[str, Renderer]
) -> None:
    renderer = renderers[name]
    closed = "</think>" * renderer.text(renderer.prompt([USER])).rstrip().endswith("<think>")
    turn = renderer.encode_marked(closed + said, "\0")  # type: ignore[attr-defined]
    (found,) = renderer.parse(turn, "stop", SCHEMAS).calls
    assert found.arguments is None
    assert found.name in called.split("|")
    assert why in found.error
    renderer.bridge(turn, "stop", ["error"])  # the agent is told


def test_an_answer_in_json_is_no_call(renderers: dict[str, Renderer]) -> None:
    llama = renderers["llama-3.1"]
    for text in ('{"answer": 5}', '{"name": "x"}', "[1, 2]", "{"):
        parsed = llama.parse(llama.plain(text))
        assert parsed.calls == () or parsed.calls[0].arguments is None
    assert llama.parse(llama.plain('{"answer": 5}')).text == '{"answer": 5}'
    said = '{"type": "function", "name": "read", "parameters": {"path": "a"}}; {"name": "test", "parameters": {}}'
    assert [c.name for c in llama.parse(llama.plain(said)).calls] == ["read", "test"]


@pytest.mark.parametrize(
    ("said", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"), ("5", {"type": "integer"}, 5), ("5", {}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("True", {"type": "boolean"}, True), ("true", None, True), ("null", {"type": "object"}, None), ("x", None, "x"),
        ("x", {"type": "integer"}, "x"), ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ('"x"', None, '"x"'),
        ('"x"', {"anyOf": [{"type": "integer"}, {"type": "null"}]}, '"x"'),
        ("a", {"enum": ["a", "b"]}, "a"), ("(" * 5000, {"type": "array"}, "(" * 5000),
    ],
)  # fmt: skip
def test_values_without_quotes_have_the_type_of_the_schema(said: str, schema: Any, value: Any) -> None:
    parameters = {"type": "object", "properties": {} if schema is None else {"a": schema}}
    assert typed_argument(said, "a", parameters) == value


def test_the_compact_dialect_needs_all_its_tokens_at_their_ids(tmp_path: Path) -> None:
    """gpt-oss has `<|call|>` and `<|end|>`, too."""
    from etude.corpus.dialect import SPECIAL_IDS

    assert {token: SPECIAL_IDS[token] for token in COMPACT_IDS} == COMPACT_IDS
    qwen = next(f for f in FAMILIES if f.name == "qwen3")
    shifted = Family("qwen3", qwen.eos, CHATML + " " + " ".join(COMPACT_IDS), QWEN3)
    assert dialect_verdict(shifted.write(tmp_path / "x")) == DialectVerdict("hermes")


def test_a_dialect_that_is_named_must_be_that_of_the_template(tmp_path: Path) -> None:
    folder = next(f for f in FAMILIES if f.name == "qwen3").write(tmp_path / "qwen3")
    assert renderer_for(folder, "hermes").dialect == "hermes"
    with pytest.raises(UserError, match="no dialect"):
        renderer_for(folder, "qwen3_coder")
    with pytest.raises(UserError, match="known: auto, compact, hermes"):
        renderer_for(folder, "morse")


def test_the_documentation_lists_what_is_played_and_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs/dialects.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| ([\w.-]+) \| ([\w-]+) \|", text, re.MULTILINE))
    shown = {f.name: f.dialect or "refused" for f in FAMILIES}
    assert {name: table.get(name) for name in shown} == shown
    assert {d.name for d in DIALECTS} <= set(re.findall(r"\w+", text))
