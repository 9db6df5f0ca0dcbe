"""Every field of OpenAI's and vLLM's APIs on a server of the bundled model: done, or refused by name; never ignored.

The fields in docs/serving.md are made from these rows: `python -m tests.inference.test_openai_features`.
"""

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "serving.md"
BEGIN, END = "<!-- fields: made by tests/inference/test_openai_features.py -->\n", "<!-- end of fields -->\n"

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PROMPT = "def chunk(array, size):\n"
ASK = [{"role": "user", "content": "Fix `chunk` in src/a.py\ndef chunk(array, size=1):\n    return array\n"}]
SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}  # fmt: skip
EDIT, RUN, LIST = (
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("edit", "run", "list")
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Asker:
    """Asks a route for a short answer that depends on nothing but the given fields."""

    def __init__(self, http: httpx2.Client) -> None:
        self.http = http

    def post(self, route: str, **fields: Any) -> httpx2.Response:
        base: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
        if route == TEXT:
            base |= {"prompt": PROMPT, "seed": 5}
        elif route == CHAT:
            base |= {"messages": ASK, "seed": 5}
        elif route == RESPONSES:
            base = {"input": ASK[0]["content"], "max_output_tokens": 12, "temperature": 0.0}
        elif route == MESSAGES:
            base |= {"messages": ASK, "model": "nano"}
        else:
            base = {}
        return self.http.post(route, json={k: v for k, v in (base | fields).items() if v is not ...})

    def __call__(self, route: str = TEXT, **fields: Any) -> Any:
        answer = self.post(route, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def choice(self, route: str = TEXT, **fields: Any) -> Any:
        return self(route, **fields)["choices"][0]

    def text(self, **fields: Any) -> str:
        return self.choice(TEXT, **fields)["text"]

    def ids(self, **fields: Any) -> list[int]:
        return self.choice(TEXT, **fields, return_token_ids=True)["token_ids"]

    def events(self, route: str = TEXT, **fields: Any) -> list[Any]:
        answer = self.post(route, **fields, stream=True)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(frozen=True)
class Row:
    """A field of the APIs. `done` proves on a server that it is done; else `refused` are fields that are refused, and
    `param` is what the error names."""

    name: str
    done: Callable[[Asker], object] | None = None
    refused: tuple[tuple[str, dict[str, Any]], ...] = ()
    param: str | None = None
    note: str = ""


def both(**fields: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    return (TEXT, fields), (CHAT, fields)


def samples(ask: Asker, **fields: Any) -> bool:
    """Whether a field makes another answer of a hot sample what the greedy one is."""
    hot = {"temperature": 2.0, "max_tokens": 8}
    return ask.text(**hot, **fields) == ask.text(max_tokens=8) != ask.text(**hot)


def penalises(ask: Asker, **fields: Any) -> bool:
    """Whether the log-probabilities of an answer change once a token was said."""
    plain, other = (
        ask.choice(logprobs=0, max_tokens=20, temperature=1.0, **each)["logprobs"]["token_logprobs"]
        for each in ({}, fields)
    )
    return abs(plain[0] - other[0]) < 1e-3 < max(abs(a - b) for a, b in zip(plain, other, strict=True))


def listed(ask: Asker) -> bool:
    texts = [ask.text(prompt=prompt) for prompt in (PROMPT, "class A:\n")]
    whole = ask(prompt=[PROMPT, "class A:\n"])
    ids = [ask.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in (PROMPT, "class A:\n")]
    by_id = ask(prompt=ids)
    return (
        [c["text"] for c in whole["choices"]] == [c["text"] for c in by_id["choices"]] == texts
        and [c["index"] for c in whole["choices"]] == [0, 1]
        and whole["usage"]["prompt_tokens"] == sum(map(len, ids))
    )


def several(ask: Asker, route: str) -> bool:
    def told(choice: Any) -> str:
        return choice["text"] if route == TEXT else json.dumps(choice["message"])

    fields = {"n": 2, "temperature": 2.0, "max_tokens": 9}
    whole = ask(route, **fields)["choices"]
    streamed = {0: "", 1: ""}
    for event in ask.events(route, **fields):
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            streamed[choice["index"]] += choice.get("text") or delta.get("content") or ""
    expected = {c["index"]: c["text"] if route == TEXT else c["message"]["content"] or "" for c in whole}
    return told(whole[0]) != told(whole[1]) and streamed == expected


def biased(ask: Asker) -> bool:
    first = ask.ids(max_tokens=1)[0]
    return (
        first not in ask.ids(max_tokens=8, logit_bias={str(first): -100})
        and ask.ids(max_tokens=3, logit_bias={"50": 100}) == [50] * 3
    )


def stopped(ask: Asker) -> bool:
    text = ask.text(max_tokens=30)
    stop = text[8:11]
    cut = ask.choice(max_tokens=30, stop=[stop, "never said"])
    return (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")


def kept_stop(ask: Asker) -> bool:
    text = ask.text(max_tokens=30)
    stop = text[8:11]
    kept = ask.text(max_tokens=30, stop=stop, include_stop_str_in_output=True)
    return kept == text[: text.index(stop) + len(stop)]


def stop_ids(ask: Asker) -> bool:
    third = ask.ids()[2]
    return ask.ids(stop_token_ids=[third])[-1] == third and len(ask.ids(stop_token_ids=[third])) <= 3


def min_tokens(ask: Asker) -> bool:
    third = ask.ids()[2]
    return third not in ask.ids(stop_token_ids=[third], min_tokens=7)[:7]


def ignored_end(ask: Asker) -> bool:
    ends = ask.choice(CHAT, max_tokens=200)
    goes_on = ask(CHAT, max_tokens=220, ignore_eos=True)
    return ends["finish_reason"] != "length" and goes_on["usage"]["completion_tokens"] == 220


def bad_words(ask: Asker) -> bool:
    word = re.findall(r"\w{2,}", ask.text(max_tokens=20))[0]
    return word not in re.findall(r"\w+", ask.text(max_tokens=20, bad_words=[word]))


def echoed(ask: Asker) -> bool:
    whole = ask.choice(echo=True, logprobs=2, max_tokens=3)
    alone = ask.choice(echo=True, logprobs=2, max_tokens=0)
    shown = alone["logprobs"]
    scored = ask(route="/generate", ids=ask.choice(return_token_ids=True)["prompt_token_ids"], max_tokens=1)
    return (
        whole["text"] == PROMPT + ask.text(max_tokens=3)
        and alone["text"] == PROMPT == "".join(shown["tokens"])
        and shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
        and all(p <= 0 for p in shown["token_logprobs"][1:])
        and shown["text_offset"] == [len("".join(shown["tokens"][:i])) for i in range(len(shown["tokens"]))]
        and len(whole["logprobs"]["tokens"]) == len(shown["tokens"]) + len(scored["ids"]) + 2
    )


def logprobs(ask: Asker) -> bool:
    shown = ask.choice(logprobs=5, temperature=1.0)["logprobs"]
    tops = shown["top_logprobs"]
    return all(
        5 <= len(top) <= 6 and top[token] == p and max(top.values()) <= 0
        for token, p, top in zip(shown["tokens"], shown["token_logprobs"], tops, strict=True)
    )


def chat_logprobs(ask: Asker) -> bool:
    content = ask.choice(CHAT, logprobs=True, top_logprobs=3)["logprobs"]["content"]
    streamed = [
        entry
        for event in ask.events(CHAT, logprobs=True, top_logprobs=3)
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {}).get("content", ())
    ]
    return streamed == content and all(
        len(e["top_logprobs"]) == 3 and e["top_logprobs"][0]["logprob"] == e["logprob"] for e in content
    )


def prompt_logprobs(ask: Asker) -> bool:
    choice = ask.choice(prompt_logprobs=2, return_token_ids=True)
    shown = choice["prompt_logprobs"]
    rows = zip(choice["prompt_token_ids"][1:], shown[1:], strict=True)
    return shown[0] is None and all(
        str(token) in row and sorted(e["rank"] for e in row.values())[:2] == [1, 2] for token, row in rows
    )


def filled_in(ask: Asker) -> bool:
    choice = ask.choice(suffix="\n    return x\n", return_token_ids=True)
    ids = choice["prompt_token_ids"]
    text = ask("/detokenize", tokens=ids)["prompt"]
    return text == f"<|fim_prefix|>{PROMPT}<|fim_suffix|>\n    return x\n<|fim_middle|>"


def fits(ask: Asker, route: str, **fields: Any) -> bool:
    value = json.loads(said(ask(route, **fields, max_tokens=200), route))
    return sorted(value) == ["ok"]


def said(answer: Any, route: str) -> str:
    if route == TEXT:
        return answer["choices"][0]["text"]
    if route == CHAT:
        return answer["choices"][0]["message"]["content"]
    if route == MESSAGES:
        return answer["content"][0]["text"]
    return answer["output"][0]["content"][0]["text"]


def of_schema(ask: Asker) -> bool:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    responses = ask(
        RESPONSES, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, max_output_tokens=200
    )
    messages = ask(MESSAGES, output_format={"type": "json_schema", "schema": SCHEMA}, max_tokens=200)
    return all(
        (
            fits(ask, TEXT, response_format=wanted),
            fits(ask, CHAT, response_format=wanted),
            sorted(json.loads(said(responses, RESPONSES))) == ["ok"],
            sorted(json.loads(said(messages, MESSAGES))) == ["ok"],
        )
    )


def of_json(ask: Asker) -> bool:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 60}
    choice = ask.choice(**fields)
    return choice["text"].startswith("{") and (
        choice["finish_reason"] == "length" or bool(json.loads(choice["text"]) or 1)
    )


def structured(ask: Asker, field: str) -> bool:
    def text(kind: str, value: Any) -> str:
        named = {"structured_outputs": {kind: value}} if field == "structured_outputs" else {f"guided_{kind}": value}
        return ask.text(**named, max_tokens=200)

    matches = re.fullmatch(r"(foo|bar)-\d{3}", text("regex", r"(foo|bar)-\d{3}")) is not None
    if field == "guided":
        same = text("choice", ["no"]) == text("grammar", 'root ::= "no"') == "no"
        return matches and same and text("json", {"const": 1}) == "1"
    return (
        matches
        and text("choice", ["yes", "no"]) in ("yes", "no")
        and set(text("grammar", 'root ::= "ab" root | "c"')) <= set("abc")
        and sorted(json.loads(text("json", SCHEMA))) == ["ok"]
    )


def forced(ask: Asker) -> bool:
    tools = {"tools": [EDIT, RUN, LIST], "max_tokens": 60}
    chat = [{"role": "user", "content": "hello"}]
    required = ask.choice(CHAT, messages=chat, tool_choice="required", temperature=1.0, **tools)
    by_name = ask.choice(CHAT, messages=chat, tool_choice={"type": "function", "function": {"name": "list"}}, **tools)
    message = ask(
        MESSAGES,
        messages=chat,
        tools=[{"name": "list", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
    )
    response = ask(
        RESPONSES, input="hello", tools=[{"type": "function", "name": "list", "parameters": {}}], tool_choice="required"
    )
    return (
        (
            required["finish_reason"] == "length"
            or required["message"]["tool_calls"][0]["function"]["name"] in ("edit", "run", "list")
        )
        and [call["function"]["name"] for call in by_name["message"]["tool_calls"]] == ["list"]
        and by_name["finish_reason"] == "tool_calls"
        and [(block["type"], block["name"]) for block in message["content"]] == [("tool_use", "list")]
        and message["stop_reason"] == "tool_use"
        and [(item["type"], item["name"]) for item in response["output"]] == [("function_call", "list")]
    )


def one_call(ask: Asker) -> bool:
    fields = {"max_tokens": 300}
    every = ask.choice(CHAT, **fields)["message"]["tool_calls"]
    single = ask.choice(CHAT, **fields, parallel_tool_calls=False)["message"]["tool_calls"]
    return [c["function"] for c in single] == [every[0]["function"]]


def developed(ask: Asker) -> bool:
    texts = {
        json.dumps(ask("/tokenize", messages=[{"role": role, "content": "Be brief."}, *ASK])["tokens"])
        for role in ("developer", "system")
    }
    return len(texts) == 1


def continued(ask: Asker) -> bool:
    begun = [*ASK, {"role": "assistant", "content": "The function"}]
    ids = ask("/tokenize", messages=begun, continue_final_message=True)["tokens"]
    plain = ask("/tokenize", messages=ASK)["tokens"]
    text = ask("/detokenize", tokens=ids[len(plain) :])["prompt"]
    answer = ask(CHAT, messages=begun, continue_final_message=True, add_generation_prompt=False)
    return ids[: len(plain)] == plain and text == "The function" and answer["usage"]["prompt_tokens"] == len(ids)


def token_ids(ask: Asker) -> bool:
    text, chat = ask.choice(return_token_ids=True), ask(CHAT, return_token_ids=True)
    return (
        ask("/detokenize", tokens=text["token_ids"])["prompt"] == text["text"]
        and len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
        and len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    )


def streamed(ask: Asker) -> bool:
    events = ask.events(stream_options={"include_usage": True})
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text == ask.text() and events[-1]["usage"]["completion_tokens"] == 12


def predicted(ask: Asker) -> bool:
    return ask.text(prediction={"type": "content", "content": ask.text()}) == ask.text()


def special_tokens(ask: Asker) -> bool:
    fields = {"stop_token_ids": [], "logit_bias": {"7": 100}, "max_tokens": 2}  # <|call|>
    return ask.text(**fields) == "<|call|><|call|>" and ask.text(**fields, skip_special_tokens=True) == ""


def seeded(ask: Asker) -> bool:
    hot = {"temperature": 1.0, "max_tokens": 8}
    return ask.text(seed=1, **hot) == ask.text(seed=1, **hot) != ask.text(seed=2, **hot)


def limited(ask: Asker) -> bool:
    chat = ask(CHAT, max_completion_tokens=3)["usage"]
    return len(ask.ids(max_tokens=3)) == chat["completion_tokens"] == 3


def labelled(ask: Asker) -> bool:
    names = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"}
    return ask.text(**names, prompt_cache_key="y") == ask.text()


ROWS = (
    Row("`temperature`, `seed`, `top_p`", lambda ask: seeded(ask) and samples(ask, top_p=0),
        note="`top_p` 0: the most probable token"),
    Row("`top_k`", lambda ask: samples(ask, top_k=1) and ask.text(top_k=-1) == ask.text()),
    Row("`min_p`", lambda ask: samples(ask, min_p=1.0)),
    Row("`presence_penalty`", lambda ask: penalises(ask, presence_penalty=2.0)),
    Row("`frequency_penalty`", lambda ask: penalises(ask, frequency_penalty=2.0)),
    Row("`repetition_penalty`", lambda ask: ask.text(repetition_penalty=5.0, max_tokens=40) != ask.text(max_tokens=40)),
    Row("`logit_bias`", biased),
    Row("`allowed_token_ids`", lambda ask: set(ask.ids(allowed_token_ids=[40, 41])) <= {40, 41}),
    Row("`bad_words`", bad_words),
    Row("`stop`", stopped),
    Row("`stop_token_ids`", stop_ids),
    Row("`min_tokens`", min_tokens, note="not beside `stop`"),
    Row("`ignore_eos`", ignored_end),
    Row("`include_stop_str_in_output`", kept_stop, note="completions"),
    Row("`max_tokens`, `max_completion_tokens`", limited),
    Row("`n`, streamed as well", lambda ask: several(ask, TEXT) and several(ask, CHAT)),
    Row("`stream`, `stream_options.include_usage`", streamed),
    Row("lists of prompts, as texts or ids", listed, note="completions"),
    Row("`echo`, with `max_tokens` 0 as well", echoed, note="completions"),
    Row("`suffix`", filled_in, note="completions; the tokenizer needs tokens for it"),
    Row("`logprobs` up to 20", logprobs, note="completions"),
    Row("`logprobs`, `top_logprobs` up to 20", chat_logprobs, note="chat"),
    Row("`prompt_logprobs`", prompt_logprobs, note="completions, not streamed"),
    Row("`response_format` json_object", of_json),
    Row("`response_format` json_schema, `text.format`, `output_format`", of_schema),
    Row("`structured_outputs`: json, json_object, regex, choice, grammar", 
        lambda ask: structured(ask, "structured_outputs")),
    Row("`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`", lambda ask: structured(ask, "guided")),
    Row("`tools`, `tool_choice` auto, none", lambda ask: ask.choice(CHAT, max_tokens=300)["message"]["tool_calls"]),
    Row("`tool_choice` required, or a tool's name", forced, note="one call; its arguments fit the schema"),
    Row("`parallel_tool_calls` false", one_call),
    Row("role `developer`", developed, note="as `system`"),
    Row("`continue_final_message`, `add_generation_prompt`", continued),
    Row("`prediction`", predicted),
    Row("`return_token_ids`", token_ids),
    Row("`skip_special_tokens`", special_tokens, note="completions; false unless given"),
    Row("`user`", lambda ask: ask.text(user="me") == ask.text(), note="the session of the prefix cache"),
    Row("`metadata`, `store`, `service_tier`, `safety_identifier`, `prompt_cache_key`", labelled,
        note="no answer depends on them"),
    Row("`max_tokens` 0 without echo", refused=both(max_tokens=0)),
    Row("`best_of`", refused=both(best_of=3), param="best_of"),
    Row("`use_beam_search`", refused=both(use_beam_search=True), param="use_beam_search"),
    Row("images, audio, files", refused=((CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),)),
    Row("tools of type custom, or run by the provider", refused=(
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
        (RESPONSES, {"tools": [{"type": "web_search"}]}),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ), note="responses: custom tools without a grammar are done"),
    Row("`functions`, `function_call`", refused=((CHAT, {"functions": [{"name": "f"}]}),), param="functions"),
    Row("`prompt_embeds`", refused=both(prompt_embeds="AAAA"), param="prompt_embeds"),
    Row("`truncate_prompt_tokens`", refused=both(truncate_prompt_tokens=5), param="truncate_prompt_tokens"),
    Row("`chat_template`", refused=((CHAT, {"chat_template": "{{ 1 }}"}),), param="chat_template"),
    Row("`modalities`, `audio`, `web_search_options`, `verbosity`", refused=(
        (CHAT, {"web_search_options": {}}),
    ), param="web_search_options"),
    Row("`logits_processors`, `vllm_xargs`", refused=both(logits_processors=["x"]), param="logits_processors"),
    Row("responses: `background`, `conversation`, `truncation` auto, `max_tool_calls`", refused=(
        (RESPONSES, {"background": True}),
    ), param="background"),
    Row("every other field", refused=(
        *both(temprature=0.5), (RESPONSES, {"temprature": 1}), (MESSAGES, {"temprature": 1}),
    )),
)  # fmt: skip


def table() -> str:
    """The rows as two paragraphs of Markdown: what is done, and what is refused."""
    paragraphs = []
    for title, done in (("**Done**", True), ("**Refused with 400**", False)):
        rows = [row for row in ROWS if (row.done is not None) is done]
        fields = "; ".join(f"{row.name} ({row.note})" if row.note else row.name for row in rows)
        paragraphs.append(textwrap.fill(f"{title}: {fields}.", 120, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(paragraphs) + "\n"


@pytest.mark.parametrize("row", [row for row in ROWS if row.done is not None], ids=lambda row: row.name)
def test_what_is_said_to_be_done_is_done(nano_http, row):
    assert row.done(Asker(nano_http))


@pytest.mark.parametrize("row", [row for row in ROWS if row.done is None], ids=lambda row: row.name)
def test_what_is_not_done_is_refused(nano_http, row):
    ask = Asker(nano_http)
    for route, fields in row.refused:
        answer = ask.post(route, **fields)
        assert answer.status_code == 400, (route, fields, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        if row.param is not None and route != MESSAGES:
            assert error["param"] == row.param


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_an_answer_has_the_name_that_a_gateway_gives_it(nano_http, route):
    name = "01K0000000000000000000000" + str((CHAT, RESPONSES, MESSAGES).index(route))
    nano_http.headers["x-etude-turn"] = name
    try:
        assert Asker(nano_http)(route)["id"].endswith(f"_{name}" if route != CHAT else f"-{name}")
    finally:
        del nano_http.headers["x-etude-turn"]
    assert name not in Asker(nano_http)(route)["id"]


def test_the_documentation_has_these_fields():
    text = DOCS.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


if __name__ == "__main__":
    text = DOCS.read_text()
    DOCS.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :])
