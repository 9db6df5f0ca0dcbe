"""One conversation through all entrances, in the spelling of each API: the same tokens, or one sentence.

Random conversations have leading and later system messages, turns with several calls, their results in any order, with
ids, without, with wrong ones, contents that are null, empty or parts. ETUDE_CONVERSATIONS sets their number; of more
than a hundred, all dialects get some.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from etude.corpus import RefusedRow, encode_chat
from etude.corpus.chats import chat_of
from etude.harness.endpoint.recording import Recording
from etude.harness.loop import EngineModel, EpisodeSpec, Sampling
from etude.inference.server import agent_routes
from etude.inference.server.bodies import ChatBody
from etude.inference.server.chats import Chats, shown_tools, with_messages
from etude.protocol import Refusal
from etude.protocol.apis import RequestRefused, anthropic, arranged, as_refusal, chat, read, responses
from etude.protocol.backends.chat_model import FORMATS, ChatModel, Conversation
from etude.records import Budget
from etude.renderers import Renderer, renderer_for
from tests.helpers.rows import chat_rows
from tests.helpers.speakers import Scripted, a_task
from tests.renderers.families import FAMILIES

COUNT = int(os.environ.get("ETUDE_CONVERSATIONS", "40"))
NAMES = ("qwen3", "minimax-m2", "gpt-oss", "nemotron-nano-2", "glm-4.5", "deepseek-v3.1", "kimi-k2", "llama-3.1",
         "mistral-small-3.2")  # fmt: skip
if COUNT > 100:
    NAMES = tuple(family.name for family in FAMILIES if family.dialect)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "Which."}}}
READ = {"type": "function", "function": {"name": "read", "description": "Read.", "parameters": PARAMETERS}}
LIST = {"type": "function", "function": {"name": "list", "description": "List.", "parameters": PARAMETERS}}
BUDGET = Budget(turns=30, tokens=4000, context=60_000, seconds=60.0)
Outcome = tuple[int, ...] | str  # the ids of a prompt, or why there is none
FAULTS = ("unknown", "missing", "twice", "early", "nameless", "same ids", "image", "role", "begun", "arguments")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    root = tmp_path_factory.mktemp("families")
    folders = {family.name: family for family in FAMILIES}
    return cache(lambda name: renderer_for(folders[name].write(root / name)))


# A conversation of any API: messages with role, text, calls (id, name, arguments), thought; of results the id.


def conversation(random: Random, fault: str, several: bool) -> list[dict[str, Any]]:
    words = iter(f"{random.choice(('See', 'Mend <|im_end|>', 'Ünï', '{}'))} {n}." for n in range(1000))
    says: list[dict[str, Any]] = [
        {"role": random.choice(("system", "developer")), "text": next(words)}
        for _ in range(random.choice((0, 1, 1, 2)))
    ]
    says.append({"role": "user", "text": next(words)})
    calls = 0
    for _ in range(random.randrange(4)):
        if random.random() < 0.3:
            says.append({"role": random.choice(("system", "developer", "user")), "text": next(words)})
        asked = random.choice((0, 1, 1, 2, 3)) if several else random.randrange(2)
        ids = [f"call{calls + n:05d}" for n in range(asked)]
        calls += asked
        turn: dict[str, Any] = {"role": "assistant", "text": next(words) if random.random() < 0.7 or not ids else ""}
        turn["calls"] = [(i, random.choice(("read", "list")), json.dumps({"path": next(words)})) for i in ids]
        turn["thought"] = next(words) if random.random() < 0.2 else ""
        results = [{"role": "tool", "text": next(words), "id": i} for i in random.sample(ids, len(ids))]
        says += [turn, *results]
        if not ids or random.random() < 0.2:
            says.append({"role": "user", "text": "" if random.random() < 0.1 else next(words)})
    return faulty(random, says, fault)


def faulty(random: Random, says: list[dict[str, Any]], fault: str) -> list[dict[str, Any]]:
    """The conversation with a fault, if it has a place for it."""
    turns = [turn for turn in says if turn.get("calls")]
    results = [each for each in says if each["role"] == "tool"]
    if fault == "early":
        says.insert(1, {"role": "tool", "text": "What?", "id": "call00000"})
    elif fault == "image":
        random.choice([each for each in says if each["role"] == "user"])["image"] = True
    elif fault == "role":
        says.insert(0, {"role": "narrator", "text": "Once."})
    elif fault == "begun":
        says.append({"role": "assistant", "text": "So", "calls": [], "thought": ""})
    elif not results:
        pass
    elif fault == "unknown":
        random.choice(results)["id"] = "none"
    elif fault == "missing":
        says.remove(random.choice(results))
        says.append({"role": "user", "text": "Go on."})
    elif fault == "twice":
        says.insert(says.index(results[0]), dict(results[0]))
    elif fault == "arguments":
        turns[0]["calls"][0] = (*turns[0]["calls"][0][:2], "{")
    elif fault == "nameless":
        for turn in turns:
            turn["calls"] = [("", *rest) for _, *rest in turn["calls"]]
        for each in results:
            each["id"] = ""
    elif fault == "same ids":
        turn = random.choice(turns)
        turn["calls"] = [(turn["calls"][0][0], *rest) for _, *rest in turn["calls"]]
    return says


def content(random: Random, text: str, image: bool, kind: str, picture: str) -> Any:
    if image:
        return [{"type": kind, "text": text}, {"type": picture}]
    if not text and random.random() < 0.5:
        return random.choice((None, []))
    cut = random.randrange(len(text) + 1)
    parts = [{"type": kind, "text": text[:cut]}, {"type": kind, "text": text[cut:]}]
    return random.choice((text, parts))


def as_chat(random: Random, says: list[dict[str, Any]]) -> dict[str, Any]:
    messages = []
    for one in says:
        message = {"role": one["role"]}
        message["content"] = content(random, one["text"], one.get("image", False), "text", "image_url")
        if message["content"] is None and random.random() < 0.5:
            del message["content"]
        if one["role"] == "tool" and (one["id"] or random.random() < 0.5):
            message["tool_call_id"] = one["id"]
        if one.get("calls"):
            functions = [(i, {"name": name, "arguments": arguments}) for i, name, arguments in one["calls"]]
            message["tool_calls"] = [{"id": i, "type": "function", "function": f} for i, f in functions]
        if one.get("thought"):
            message["reasoning_content"] = one["thought"]
        messages.append(message)
    return {"messages": messages, "tools": [READ, LIST]}


def as_responses(random: Random, says: list[dict[str, Any]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for one in says:
        if one["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": one["id"], "output": one["text"]})
            continue
        if one.get("thought"):
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": one["thought"]}]})
        if one["text"] or not one.get("calls"):
            kind = "output_text" if one["role"] == "assistant" else "input_text"
            shown = content(random, one["text"], one.get("image", False), kind, "input_image")
            items.append({"type": "message", "role": one["role"], "content": shown})
        items += [
            {"type": "function_call", "call_id": i, "name": name, "arguments": arguments}
            for i, name, arguments in one.get("calls", ())
        ]
    tools = [{"type": "function", **tool["function"]} for tool in (READ, LIST)]
    return {"input": items, "tools": tools}


def as_messages(random: Random, says: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of a turn are blocks of one message of the user, with the text after them."""
    messages: list[dict[str, Any]] = []
    says, system = list(says), []
    while says and says[0]["role"] in ("system", "developer"):
        system.append(says.pop(0)["text"])
    for one in says:
        if one["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": one["id"], "content": one["text"]}
            if messages and isinstance(messages[-1]["content"], list) and messages[-1].get("open"):
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block], "open": True})
            continue
        shown = content(random, one["text"], one.get("image", False), "text", "image")
        blocks = [{"type": "text", "text": shown}] if isinstance(shown, str) else list(shown or ())
        if one["role"] == "user" and one["text"] and messages and messages[-1].get("open") and random.random() < 0.7:
            messages[-1]["content"] += blocks
            messages[-1]["open"] = False
            continue
        calls = one.get("calls") or ()
        blocks = [{"type": "thinking", "thinking": one.get("thought"), "signature": "x"}] * bool(
            one.get("thought")
        ) + blocks
        for i, name, arguments in calls:
            try:
                value = json.loads(arguments)
            except ValueError:
                value = arguments  # no client of this API sends text
            blocks.append({"type": "tool_use", "id": i, "name": name, "input": value})
        messages.append({"role": one["role"], "content": blocks or shown})
    for message in messages:
        message.pop("open", None)
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (READ["function"], LIST["function"])
    ]
    return {"messages": messages, "system": "\n\n".join(system), "tools": tools, "max_tokens": 9}


# Entrances


def outcome(encode: Callable[[], list[int]]) -> Outcome:
    """Kinds of parts have names of their own in each API."""
    try:
        return tuple(encode())
    except (RequestRefused, Refusal, ValueError) as e:
        return re.sub(r"type '\w+'", "type ''", str(e))


def served(renderer: Renderer, body: ChatBody) -> list[int]:
    routes = Chats.__new__(Chats)
    routes._model = SimpleNamespace(check_characters=lambda count: None)  # type: ignore[assignment]
    return routes.encoded(body, renderer, shown_tools(body))


def served_chat(renderer: Renderer, fields: dict[str, Any]) -> list[int]:
    body = ChatBody.of(fields)
    body.check()
    body, documents = with_messages(body)
    assert not documents
    return served(renderer, body)


def served_responses(renderer: Renderer, fields: dict[str, Any]) -> list[int]:
    with as_refusal():
        request, _ = responses.parse_request(fields, {})
    return served(renderer, agent_routes._chat_of_responses(fields, request))


def served_messages(renderer: Renderer, fields: dict[str, Any]) -> list[int]:
    return served(renderer, agent_routes._chat_of_messages(fields, agent_routes._MESSAGES)[1])


def recorded(renderer: Renderer, parse: Callable[[dict[str, Any]], Any], fields: dict[str, Any]) -> list[int]:
    async def play() -> list[int]:
        with as_refusal():
            request = parse(fields)
        policy = Scripted([[renderer.stop_ids[0]]])
        recording = Recording(EpisodeSpec(a_task(), EngineModel(policy, renderer, Sampling()), BUDGET, 7))
        await (await recording.ask(request)).whole()
        return policy.prompts[0]

    return asyncio.run(play())


def learned(renderer: Renderer, fields: dict[str, Any]) -> list[int]:
    """The prompt of a row that goes on with a text of the assistant."""
    with as_refusal():
        row = chat_of("row", fields | {"messages": [*fields["messages"], {"role": "assistant", "content": "So."}]})
        return renderer.prompt(row.messages[:-1], row.tools)


def asked(renderer: Renderer, api: str, fields: dict[str, Any]) -> list[int]:
    """As the client of `etude eval URL` sends it to a server."""
    talk = Conversation(str(fields.get("system") or ""), fields["messages"])
    sent = json.loads(json.dumps(FORMATS[api].body(ChatModel("http://x/v1", "m"), talk, [READ, LIST], 9, 7)))
    sent.pop("model")
    return served_chat(renderer, sent) if api == "openai" else served_messages(renderer, sent)


def entrances(random: Random, renderer: Renderer, says: list[dict[str, Any]]) -> dict[str, Outcome]:
    one, two, three = as_chat(random, says), as_responses(random, says), as_messages(random, says)
    return {
        "serve, chat": outcome(lambda: served_chat(renderer, one)),
        "serve, responses": outcome(lambda: served_responses(renderer, two)),
        "serve, messages": outcome(lambda: served_messages(renderer, three)),
        "endpoint, chat": outcome(lambda: recorded(renderer, chat.parse_request, one)),
        "endpoint, responses": outcome(lambda: recorded(renderer, lambda f: responses.parse_request(f, {})[0], two)),
        "endpoint, messages": outcome(lambda: recorded(renderer, anthropic.parse_request, three)),
        "sft": outcome(lambda: learned(renderer, one)),
        "eval, openai": outcome(lambda: asked(renderer, "openai", one)),
        "eval, anthropic": outcome(lambda: asked(renderer, "anthropic", three)),
    }


def test_a_conversation_is_the_same_tokens_or_one_sentence_at_all_entrances(
    families: Callable[[str], Renderer],
) -> None:
    table: Counter[str] = Counter()
    for seed in range(COUNT):
        random, name = Random(seed), NAMES[seed % len(NAMES)]
        renderer = families(name)
        fault = FAULTS[seed % len(FAULTS)] if random.random() < 0.3 else ""
        says = conversation(random, fault, getattr(renderer, "calls_per_turn", None) is None)
        found = entrances(random, renderer, says)
        if fault == "begun":
            del found["sft"]  # two turns of the assistant: there it is a turn to learn
        assert len(set(found.values())) == 1, (seed, name, fault, says, found)
        shown = found["serve, chat"]
        table["equal" if not isinstance(shown, str) else re.sub(r"'[^']*'|of [\w.-]+ ", "…", shown)] += 1
    print(*(f"{count:5}  {what}" for what, count in table.most_common()), sep="\n")
    assert table["equal"] > COUNT / 2


ALIKE = ("kimi-k2", "glm-4.5", "deepseek-v3.1", "llama-3.1", "mistral-small-3.2")  # no thought that turns would keep


def test_rows_are_learned_behind_what_a_server_writes(families: Callable[[str], Renderer]) -> None:
    """Put together by turns, a conversation is the whole prompt, results by their calls and later systems included."""
    seen = 0
    for seed in range(COUNT):
        renderer = families(ALIKE[seed % len(ALIKE)])
        says = conversation(Random(seed), "", renderer.calls_per_turn is None)  # type: ignore[attr-defined]
        for one in says:
            one.pop("thought", None)
        fields = as_chat(Random(seed), says)
        fields["messages"].append({"role": "assistant", "content": "So."})
        chat = chat_of("row", fields)
        reason = outcome(lambda chat=chat, renderer=renderer: list(encode_chat(chat, renderer)[0]))
        if isinstance(reason, str):
            assert re.match(r"the chat template of [\w.-]+ (refuses these|has no place|does not write)", reason)
            continue
        ids, mask = encode_chat(chat, renderer)
        seen += 1
        end = len(ids) - len(renderer.turn(chat.messages[-1]))
        assert mask[end:].all()
        whole = renderer.text(renderer.prompt(chat.messages[:-1], chat.tools))
        assert plain(renderer.text(ids[:end].tolist())) == plain(whole), (seed, says)
    assert seen > COUNT / 2


def plain(text: str) -> str:
    return re.sub(r"\s|</?think>", "", text)


def test_rows_say_developer_and_system_alike(families: Callable[[str], Renderer], tmp_path: Path) -> None:
    """Eleven templates know no developer and wrote nothing; three left a later system message out."""
    rest = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "<think>Hm.</think>Yes."}]
    rows = [{"messages": [{"role": role, "content": "Be brief."}, *rest]} for role in ("developer", "system")]
    rows.append({"messages": [*rest, {"role": "developer", "content": "Be long."}, *rest]})
    rows.append({"messages": [{"role": "user", "content": "Go."}, TWO, result("b", "2"), *rest]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("qwen3", "glm-4.5", "deepseek-v3.1", "gpt-oss", "kimi-k2"):
        one, two, later, lost = chat_rows([tmp_path], lambda name=name: families(name))
        assert not isinstance(one, RefusedRow)
        assert not isinstance(two, RefusedRow)
        assert not isinstance(later, RefusedRow)
        assert one.tokens[0].tolist() == two.tokens[0].tolist()
        assert "Be brief." in families(name).text(one.tokens[0].tolist())
        assert "Be long." in families(name).text(later.tokens[0].tolist())
        assert lost == RefusedRow("rows.jsonl:4", "the call 'a' has no results: send one")


def turn(*ids: str, text: str | None = None) -> dict[str, Any]:
    function = {"name": "read", "arguments": "{}"}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": i, "function": function} for i in ids]}


def result(call: str, text: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


GO, TWO = {"role": "user", "content": "Go."}, turn("a", "b")


@pytest.mark.parametrize(("messages", "reason"), [
    ([GO, TWO, result("a"), result("c")], "a tool result names 'c', no call of the turn before"),
    ([GO, TWO, result("a"), result("")], "a tool result names '', no call of the turn before"),
    ([GO, TWO, result("a")], "the call 'b' has no results: send one"),
    ([GO, TWO, GO], "the call 'a' has no results: send one"),
    ([GO, TWO, result("a"), result("b"), result("a")], "the call 'a' has 2 results: send one"),
    ([GO, result("a")], "a tool result follows a turn without calls"),
    ([result("a"), GO], "a tool result follows a turn without calls"),
    ([GO, TWO, result("b"), result("a"), turn(text="x"), result("a")], "a tool result follows a turn without calls"),
    ([GO, turn("", "b"), result(""), result("b")], "several calls of a turn need an id each, all different"),
    ([GO, turn("a", "a"), result("a"), result("a")], "several calls of a turn need an id each, all different"),
    ([GO, turn("a"), result("z")], "a tool result names 'z', no call of the turn before"),
])  # fmt: skip
def test_results_and_calls_that_are_no_pairs_are_refused_by_name(messages: list[Any], reason: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        arranged(read("chat", {"messages": messages}))
    assert str(refusal.value) == reason


def test_what_honest_clients_send_is_paired() -> None:
    """Without ids where they say nothing, results late and beside a text, ids that come again in a later turn."""

    def shown(api: str, messages: list[Any]) -> list[tuple[str, str]]:
        return [(m["role"], m.get("name") or m["content"]) for m in arranged(read(api, {"messages": messages}))]

    assert shown("chat", [GO, turn(""), result("")]) == [("user", "Go."), ("assistant", ""), ("tool", "read")]
    assert shown("chat", [GO, turn("a"), result("")])[2] == ("tool", "read")
    assert shown("chat", [turn("a", text="I look."), result("a"), GO])[0] == ("assistant", "I look.")  # cut history
    assert len(shown("chat", [GO, turn("a"), result("a"), turn("a"), result("a")])) == 5
    use = [{"type": "tool_use", "id": i, "name": n, "input": {}} for i, n in (("a", "read"), ("b", "list"))]
    asked = [GO, {"role": "assistant", "content": [{"type": "text", "text": "Both."}, *use]}]
    blocks = [{"type": "tool_result", "tool_use_id": i, "is_error": True, "content": "Interrupted"} for i in "ba"]
    stop = {"type": "text", "text": "Stop."}
    pairs = [("tool", "read"), ("tool", "list"), ("user", "Stop.")]
    for late in (
        [{"role": "user", "content": [*blocks, stop]}],
        [{"role": "user", "content": [stop, *blocks]}],
        [{"role": "user", "content": "Stop."}, {"role": "user", "content": blocks}],
    ):
        assert shown("messages", asked + late)[2:] == pairs


def test_contents_mean_the_same_however_they_are_spelled() -> None:
    for empty in ({"content": None}, {"content": ""}, {"content": []}, {}):
        assert read("chat", {"messages": [{"role": "user"} | empty]}) == [{"role": "user", "content": ""}]
    refusal = [{"type": "refusal", "refusal": "No."}]
    for said in ({"content": refusal}, {"content": None, "refusal": "No."}, {"content": "No.", "function_call": None}):
        assert read("chat", {"messages": [{"role": "assistant"} | said]}) == [{"role": "assistant", "content": "No."}]
    for old in ({"role": "function", "name": "f", "content": "x"}, turn() | {"function_call": {"name": "f"}}):
        with pytest.raises(RequestRefused, match="an old format"):
            read("chat", {"messages": [old]})
    with pytest.raises(RequestRefused, match="calls stand in messages of the assistant"):
        read("chat", {"messages": [turn("a") | {"role": "user"}]})
