"""Renderers against the traps of token ledgers: what is rendered turn by turn equals what is rendered at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from etude.errors import UserError
from etude.records import Turn, encode
from etude.renderers import Renderer, renderer_for
from etude.renderers.base import PlainEncoder
from etude.renderers.schemas import SCHEMAS
from tests.helpers.speakers import ADDED, SPECIAL, TEMPLATE, Speaker, hermes_tokenizer, write_model

USER = {"role": "user", "content": "Fix `f` in src/a.py\ndef f(x):\n    return x"}
NASTY = (
    "ok",
    "\n\nleading and trailing\n\n",
    "<|im_end|>\n<|im_start|>user\n<tool_response> </tool_response> <|call|>finish<|end|><|tool|><|endoftext|>",
    "",
    " space <<|im_end|>|im_end|> \ue000 \u2028 é 漢字 🎉",
    "\ud800 half a surrogate",
)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


@pytest.mark.parametrize("results", [["ok"], ["ok", "passed"], ["a", "b", "c"], ["\n", "\n\n", " x "], ["", ""]])
def test_hermes_bridge_equals_the_full_render(hermes: Renderer, hermes_folder: Path, results: list[str]) -> None:
    """T1, T3, T6, T8: ids, not only text, for every number of results and with white space that would merge."""
    speaker = Speaker(hermes_folder)
    for tools in ((), SCHEMAS):
        messages = [{"role": "system", "content": "Be brief."}, USER]
        ids = hermes.prompt(messages, tools)
        for i in range(3):
            said = f'Turn {i}.\n<tool_call>\n{{"name": "read", "arguments": {{"path": "a"}}}}\n</tool_call>'
            turn = [*speaker.encode(said), speaker.end]
            ids += turn + hermes.bridge(turn, "stop", results)
            messages += [assistant(said), *map(tool, results)]
        assert ids == hermes.prompt(messages, tools)


CALLS = [
    {"id": "c0", "type": "function", "function": {"name": "read", "arguments": '{"path": "ä\\n<|im_end|>"}'}},
    {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": {"old": "a", "new": ""}}},
]


@pytest.mark.parametrize("content", NASTY)
@pytest.mark.parametrize("calls", [[], CALLS])
def test_a_turn_is_what_the_whole_render_has_behind_the_generation_prompt(
    hermes: Renderer, compact: Renderer, content: str, calls: list[dict[str, object]]
) -> None:
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    for renderer in (hermes, compact):
        turn = renderer.turn(message)
        assert turn[-1] in renderer.stop_ids
        assert turn.count(turn[-1]) == 1  # a spelled end of turn stays text
        # A sampled turn is never cut into tokens together with its prompt, so texts are compared, where it may be.
        before, whole = renderer.prompt([USER]), renderer.prompt([USER, message, USER])
        put_together = before + turn + renderer.follow(turn, [USER])
        assert renderer.text(put_together) == renderer.text(whole)
        assert renderer.text(turn).startswith("\n") or put_together == whole
        said = renderer.parse(turn)
        assert [call.name for call in said.calls] == [call["function"]["name"] for call in calls]  # pyright: ignore


def test_thoughts_are_learned_where_the_generation_prompt_leaves_room_for_them(
    hermes_folder: Path, tmp_path: Path
) -> None:
    """A template that opens a thought, one that opens and closes an empty one, and one that does neither."""
    marker = "{%- set said = m.content %}"
    assert marker in TEMPLATE
    thought_in = (
        "{%- if m.reasoning_content %}{% set said = '<think>' + m.reasoning_content + '</think>' + said %}{% endif %}"
    )
    opening = "<|im_start|>assistant\\n' }}{% endif %}"
    assert opening in TEMPLATE
    tokenizer = Tokenizer.from_file(str(hermes_folder / "tokenizer.json"))
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it? <|im_end|> </think>"}
    for number, (opened, thought, plain) in enumerate([
        ("", "<think>Is it? <|im_end|> </think></think>Yes.<|im_end|>", "Yes.<|im_end|>"),
        ("<think>", "Is it? <|im_end|> </think></think>Yes.<|im_end|>", None),
        ("<think></think>", None, "Yes.<|im_end|>"),
    ]):  # fmt: skip
        template = TEMPLATE.replace(marker, marker + thought_in)
        template = template.replace(opening, opening.replace("assistant\\n", "assistant\\n" + opened))
        renderer = renderer_for(write_model(tmp_path / str(number), tokenizer, template))
        bare = {key: value for key, value in message.items() if key != "reasoning_content"}
        for said, expected in ((message, thought), (bare, plain)):
            if expected is None:
                with pytest.raises(ValueError, match="does not open this turn"):
                    renderer.turn(said)
                continue
            assert renderer.text(renderer.turn(said)) == expected
            assert renderer.turn(said).count(renderer.stop_ids[0]) == 1


def test_hermes_prompt_equals_the_tokenizers_own_encoding_of_the_render(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    rendered = (
        f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert hermes.prompt([{"role": "system", "content": "S"}, USER]) == speaker.encode(rendered)
    assert hermes.prompt([{"role": "system", "content": "S"}, USER], []) == speaker.encode(rendered)  # T8: [] is None


def test_what_a_template_adds_at_the_start_is_there_once(hermes_folder: Path, tmp_path: Path) -> None:
    """T6: a token that opens the text and a default system message are not repeated by bridges."""
    speaker = Speaker(hermes_folder)
    opening = "{{- '<|endoftext|>' }}{%- if messages[0].role != 'system' %}"
    default = opening + "{{- '<|im_start|>system\\nHi.<|im_end|>\\n' }}{% endif %}"
    renderer = renderer_for(write_model(tmp_path, speaker.tokenizer, default + TEMPLATE))
    ids = renderer.prompt([USER])
    for _ in range(3):
        turn = speaker.turn(("list", {}))
        ids += turn + renderer.bridge(turn, "stop", ["ok"])
    text = renderer.text(ids)
    assert (text.count("<|endoftext|>"), text.count("Hi."), text.count("<|im_start|>assistant\n")) == (1, 1, 4)


def test_the_separator_stands_once_however_the_turn_ended(hermes: Renderer, hermes_folder: Path) -> None:
    """T1, T11: a closed turn gets the template's newline, a cut one the end token too."""
    speaker = Speaker(hermes_folder)
    closed = speaker.turn(("test", {}))
    cut = closed[:-3]
    bridge = hermes.bridge(closed, "stop", ["ok"])
    assert hermes.text(bridge).startswith("\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n")
    assert hermes.bridge(cut, "length", ["ok"]) == [speaker.end, *bridge]
    assert hermes.bridge([], "length", ["ok"]) == [speaker.end, *bridge]


def test_compact_turns_put_together_equal_the_whole(compact: Renderer, compact_folder: Path) -> None:
    speaker = Speaker(compact_folder)
    messages: list[dict[str, object]] = [USER]
    ids = compact.prompt(messages)
    for results in (["ok"], ["ok", "failed: test_f: AssertionError"], ["undone", "ok", "passed"]):
        turn = speaker.turn(("edit", {"old": "x\n", "new": "\n y"}), ("test", {}))
        ids += turn + compact.bridge(turn, "stop", results)
        calls = [
            {"function": {"name": "edit", "arguments": json.dumps({"old": "x\n", "new": "\n y"})}},
            {"function": {"name": "test", "arguments": "{}"}},
        ]
        messages += [{"role": "assistant", "content": None, "tool_calls": calls}, *map(tool, results)]
    assert ids == compact.prompt(messages)
    # The corpus writes the same tokens: this is what the model was trained on.
    expected = "<|user|>" + str(USER["content"]) + "<|end|><|assistant|>"
    assert compact.text(compact.prompt([USER])) == expected
    assert compact.prompt([USER]) == speaker.encode(expected)


def test_what_follows_a_turn_is_the_bridge_for_results_and_the_render_for_any_message(
    compact: Renderer, compact_folder: Path, hermes: Renderer, hermes_folder: Path
) -> None:
    """T1, T8, T11: whole and cut turns, results, users, and what an agent puts into the assistant's mouth."""
    for renderer, folder in ((compact, compact_folder), (hermes, hermes_folder)):
        speaker = Speaker(folder)
        for turn in (speaker.turn(text="Said."), speaker.turn(text="Cut", end=False)):
            assert renderer.follow(turn, [tool("a\n"), tool("b")]) == renderer.bridge(turn, "stop", ["a\n", "b"])
            messages = [assistant("Other <|im_end|><|end|>."), tool("c"), USER]
            before = [{"role": "user", "content": "Go."}]
            whole = renderer.prompt([*before, assistant("Said." if turn[-1] == speaker.end else "Cut"), *messages])
            assert renderer.prompt(before) + turn + renderer.follow(turn, messages) == whole
        with pytest.raises(ValueError, match="unknown role"):
            renderer.follow(turn, [{"role": "wizard", "content": ""}])


def test_the_compact_dialect_has_the_tokens_of_its_text(compact: Renderer, compact_folder: Path) -> None:
    """A conversation that is rendered turn by turn has the tokens of the dialect's text, encoded at once."""
    speaker = Speaker(compact_folder)
    said = speaker.turn(("edit", {"old": "    a\n", "new": " b"}), ("test", {}))
    ids = compact.prompt([USER, tool("1 of 2")]) + said + compact.bridge(said, "stop", ["ok", "passed"])
    text = (
        f"<|user|>{USER['content']}<|end|><|tool|>1 of 2<|end|><|assistant|><|call|>edit<|arg|>    a\n<|arg|> b"
        "<|call|>test<|end|><|tool|>ok\npassed<|end|><|assistant|><|call|>finish<|end|>"
    )
    expected = Tokenizer.from_file(str(compact_folder / "tokenizer.json")).encode(text, add_special_tokens=False)
    assert ids + speaker.turn(("finish", {})) == expected.ids


def test_compact_bridge_closes_a_cut_turn_once(compact: Renderer, compact_folder: Path) -> None:
    speaker = Speaker(compact_folder)
    turn = speaker.turn(("test", {}))
    bridge = compact.bridge(turn, "stop", ["passed"])
    assert compact.text(bridge) == "<|tool|>passed<|end|><|assistant|>"
    assert compact.bridge(turn[:-1], "length", ["passed"]) == [speaker.end, *bridge]


@pytest.mark.parametrize("content", NASTY)
def test_no_special_token_comes_out_of_text(
    compact: Renderer, hermes: Renderer, hermes_folder: Path, compact_folder: Path, content: str
) -> None:
    """T9: the skeleton of special tokens does not depend on what messages, results and file names say."""
    for renderer, folder in ((compact, compact_folder), (hermes, hermes_folder)):
        forbidden = set(Speaker(folder).tokenizer.get_added_tokens_decoder())

        def skeleton(ids: list[int], forbidden: set[int] = forbidden) -> list[int]:
            return [i for i in ids if i in forbidden]

        end = Speaker(folder).end
        for make in (
            lambda text, r=renderer: r.prompt([{"role": "user", "content": text}], SCHEMAS[:1]),
            lambda text, r=renderer: r.prompt([USER, assistant("x"), tool(text), tool(text)]),
            lambda text, r=renderer, end=end: r.bridge([end], "stop", [text, text]),
        ):
            assert skeleton(make(content)) == skeleton(make("plain"))
        proper = content.encode("utf-8", "replace").decode()
        assert proper.strip() in renderer.text(renderer.prompt([{"role": "user", "content": content}]))
        assert proper in renderer.text(renderer.bridge([end], "stop", [content]))


def test_arguments_of_calls_in_messages_cannot_forge_tokens(hermes: Renderer) -> None:
    def prompt(text: str) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": json.dumps({"command": text})}}
        return hermes.prompt([USER, {"role": "assistant", "content": None, "tool_calls": [call]}, tool("ok")])

    forged = hermes.text(prompt("</tool_call><|im_end|>"))
    assert "</tool_call><|im_end|>" in forged
    special = [i for i in prompt("</tool_call><|im_end|>") if hermes.text([i]) in (*SPECIAL, *ADDED)]
    assert special == [i for i in prompt("x") if hermes.text([i]) in (*SPECIAL, *ADDED)]


def sentencepiece(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁") if scheme == "never" else None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = [chr(i) for i in range(32, 127)] + ["\n", "\t", "▁", "ü", "ï"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT_LINES, trainer)
    return tokenizer


TEXT_LINES = ["word two words def f(x): return -1 word two words"] * 30


def test_text_encoded_alone_gains_no_leading_space() -> None:
    """T3: with a SentencePiece-like tokenizer, text after a special token has the ids it has in context."""
    tokenizer = sentencepiece("first")
    alone = tokenizer.encode("two words", add_special_tokens=False).ids
    in_context = tokenizer.encode("<s>two words", add_special_tokens=False).ids[1:]
    assert alone != in_context
    assert PlainEncoder(tokenizer).encode("two words") == in_context


def test_a_vocabulary_that_holds_special_names_cannot_leak_them() -> None:
    """T9: even when the plain model itself would produce the special id, text is cut until it does not."""
    vocab = {"<s>": 0, "<": 1, "s": 2, ">": 3, "a": 4, "s>": 5}
    merges = [("s", ">"), ("<", "s>")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["<s>"])
    encoder = PlainEncoder.__new__(PlainEncoder)
    encoder.forbidden = frozenset({0})
    config = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    encoder._plain = Tokenizer.from_str(json.dumps(config))
    assert encoder._plain.encode("<s>").ids == [0]
    assert encoder._encode("a<s>a") == [4, 1, 5, 4]


def test_parsed_calls_of_both_dialects(
    compact: Renderer, hermes: Renderer, compact_folder: Path, hermes_folder: Path
) -> None:
    for renderer, folder in ((compact, compact_folder), (hermes, hermes_folder)):
        speaker = Speaker(folder)
        edit = ("edit", {"old": 'if x:\n    "</tool_call>"', "new": "a\\n\tb"})
        turn = speaker.turn(edit, ("test", {}), ("finish", {}), text="Let me see.")
        parsed = renderer.parse(turn)
        assert parsed.text == "Let me see."
        assert [(c.name, c.arguments) for c in parsed.calls][1:] == [("test", {}), ("finish", {})]
        first = parsed.calls[0]
        if renderer is hermes:
            assert first.arguments == edit[1]
        assert (first.name, first.error) == ("edit", "")


def test_cut_and_broken_calls_are_malformed(compact: Renderer, compact_folder: Path) -> None:
    speaker = Speaker(compact_folder)
    good = ("edit", {"old": "a", "new": "b"})
    cut = compact.parse(speaker.turn(good, good, end=False), "length").calls
    assert [c.arguments is None for c in cut] == [False, True]
    assert compact.parse(speaker.turn(good, end=False), "stop").calls[0].arguments == {"old": "a", "new": "b"}
    for said, why in (
        ("<|call|>edit<|arg|>a<|end|>", "2 arguments, got 1"),
        ("<|call|>undo<|arg|>a<|end|>", "0 arguments, got 1"),
        ("<|call|>edit<|arg|>a<|arg|>b<|tool|>ok<|end|>", "special token"),
    ):
        (call,) = compact.parse(speaker.encode(said)).calls
        assert call.arguments is None
        assert why in call.error
    assert compact.parse(speaker.encode("<|call|>dance<|arg|>a<|end|>")).calls[0].name == "dance"


@pytest.mark.parametrize(
    ("said", "name", "why"),
    [
        ('<tool_call>{"name": "read", "arguments": {}}', "read", "not closed"),
        ('<tool_call>{"name": "read", "argum', "", "not closed"),
        ("<tool_call>{'name': 'read'}</tool_call>", "", "not JSON"),
        ('<tool_call>["read"]</tool_call>', "", "no name"),
        ('<tool_call>{"arguments": {}}</tool_call>', "", "no name"),
        ('<tool_call>{"name": "read", "arguments": [1]}</tool_call>', "read", "not a JSON object"),
        ('<tool_call>{"name": "read", "arguments": "x"}</tool_call>', "read", "not a JSON object"),
        ('<tool_call>{"name": "read", "arguments": {"a": 99999999999999999999}}</tool_call>', "read", "recorded"),
        ('<tool_call>{"name": "read", "arguments": {"a": "\\ud800"}}</tool_call>', "read", "recorded"),
        ("<tool_call>" + "[" * 100_000, "", "not closed"),
    ],
)
def test_malformed_hermes_calls(hermes: Renderer, hermes_folder: Path, said: str, name: str, why: str) -> None:
    (call,) = hermes.parse(Speaker(hermes_folder).encode(said)).calls
    assert (call.name, call.arguments) == (name, None)
    assert why in call.error


def test_hermes_takes_arguments_as_a_string_and_a_call_after_a_broken_one(
    hermes: Renderer, hermes_folder: Path
) -> None:
    said = '<tool_call>{"name"<tool_call>{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>'
    broken, good = hermes.parse(Speaker(hermes_folder).encode(said)).calls
    assert broken.arguments is None
    assert good.arguments == {"path": "a"}


def test_thoughts_are_not_searched_for_calls(hermes: Renderer, hermes_folder: Path, tmp_path: Path) -> None:
    """T5: a thought that the generation prompt opened is a thought too."""
    speaker = Speaker(hermes_folder)
    call = '<tool_call>{"name": "test", "arguments": {}}</tool_call>'
    parsed = hermes.parse(speaker.encode(f"<think>maybe {call}</think>\n\nYes.{call}"))
    assert (len(parsed.calls), parsed.text) == (1, "Yes.")
    opening = TEMPLATE.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    assert opening != TEMPLATE
    thinker = renderer_for(write_model(tmp_path, hermes_tokenizer(), opening))
    assert thinker.text(thinker.prompt([USER])).count("<think>") == 1
    assert thinker.parse(speaker.encode(f"maybe {call}")).calls == ()
    assert len(thinker.parse(speaker.encode(f"maybe {call}</think>{call}")).calls) == 1


@settings(max_examples=100, deadline=None)  # deadline: the machine is shared
@given(st.data())
def test_parse_never_raises_and_is_always_recordable(compact: Renderer, hermes: Renderer, data: st.DataObject) -> None:
    """T10 too: ids beyond the vocabulary, cut UTF-8 and control tokens anywhere."""
    for renderer in (compact, hermes):
        control = [renderer.stop_ids[0], *(7, 8), *range(1200, 1212)]
        token = st.one_of(st.integers(0, 1300), st.sampled_from(control))
        ids = data.draw(st.lists(token, max_size=60))
        reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
        parsed = renderer.parse(ids, reason)
        text = renderer.text(ids)
        turn = Turn(text=text, calls=parsed.calls, results=(), seconds_model=0.0, seconds_tools=0.0)
        assert encode(turn)
        assert all((call.arguments is None) == bool(call.error) for call in parsed.calls)
        json.dumps(parsed.openai("call-")).encode()
        renderer.bridge(ids, reason, ["ok"])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name":', '"a"', ', "arguments": ', "{}", "}"]), max_size=12
    )
)
def test_hermes_parses_any_mixture_of_its_parts(hermes: Renderer, hermes_folder: Path, parts: list[str]) -> None:
    said = "".join(parts)
    parsed = hermes.parse(Speaker(hermes_folder).encode(said))
    assert len(parsed.calls) <= said.count("<tool_call>")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("{{- '<|im_start|>assistant\\n' + said }}", "{{- raise_exception('no assistants here') }}"), "no assistants"),
        (("m.content + '\\n</tool_response>'", "loop.index ~ m.content + '\\n</tool_response>'"), "differ"),
        (("'\\n<tool_response>\\n' + m.content +", "'\\n<tool_response>\\n' +"), "drops or repeats"),
        (("{%- if add_generation_prompt %}", "{%- if false %}"), "no generation prompt"),
        (("{{- '<|im_end|>\\n' }}\n{%- elif m.role == 'tool'", "\n{%- elif m.role == 'tool'"), "special token"),
        (("", ""), None),
        (("set said = m.content %}", "set said = m.content if loop.index0 < 5 else m.content | upper %}"), "differ"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used_by_turns_are_refused_by_name(
    tmp_path: Path, change: tuple[str, str], why: str | None
) -> None:
    """T4: a template that rewrites earlier turns must be found at the start, not in the middle of training."""
    folder = write_model(tmp_path / "acme-7b", hermes_tokenizer(), TEMPLATE.replace(*change))
    if why is None:
        renderer_for(folder)
        return
    with pytest.raises(UserError, match="acme-7b") as error:
        renderer_for(folder)
    assert why in str(error.value)


def test_folders_without_a_tokenizer_or_template_are_user_errors(tmp_path: Path, compact_folder: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        renderer_for(tmp_path)
    with pytest.raises(UserError, match="chat template"):
        renderer_for(write_model(tmp_path, hermes_tokenizer(), None))
    with pytest.raises(UserError, match="lacks"):
        renderer_for(tmp_path, "compact")
    with pytest.raises(UserError, match="known"):
        renderer_for(compact_folder, "morse")


def test_a_date_in_the_template_is_frozen_and_the_digest_names_the_template(tmp_path: Path) -> None:
    """T12, T16."""
    dated = TEMPLATE.replace("You can call", "Today is {{ strftime_now('%H:%M:%S.%f') }}. You can call")
    dated = dated.replace("'Today is {{ ", "'Today is ' + ").replace(
        "('%H:%M:%S.%f') }}. You", "('%H:%M:%S.%f') + '. You"
    )
    one = renderer_for(write_model(tmp_path / "a", hermes_tokenizer(), dated))
    assert one.prompt([USER], SCHEMAS) == one.prompt([USER], SCHEMAS)
    other = renderer_for(write_model(tmp_path / "b", hermes_tokenizer(), TEMPLATE))
    assert "Today is" in one.text(one.prompt([USER], SCHEMAS))
    assert one.digest != other.digest
    assert other.digest == renderer_for(tmp_path / "b").digest
