"""Random schemas and values of calls in every dialect, through training text, parsing and three APIs of two servers.

`ETUDE_SCHEMAS=2000` tries so many, in all families; by default a few, in one family of a dialect. A table says how many
came back equal, and what became of the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.applications import Starlette

from etude.corpus import chats
from etude.harness.endpoint.recording import Recording
from etude.harness.endpoint.server import Endpoint
from etude.harness.loop import EngineModel, EpisodeSpec, Sampling
from etude.inference.engine.requests import Request, RunningSequence
from etude.inference.server.grammars import Grammars
from etude.inference.server.openai import OpenAI
from etude.protocol.access import Refusal
from etude.protocol.apis import SHAPED_HANDLERS
from etude.records import Budget, Generation
from etude.renderers import Renderer, fitted, printable_json, renderer_for
from tests.helpers.speakers import Scripted, a_task
from tests.renderers.families import FAMILIES

COUNT = int(os.environ.get("ETUDE_SCHEMAS", "42"))
SECONDS = 10.0  # of a request
PLAYED = {f.dialect if COUNT < 100 else f.name: f for f in FAMILIES if f.dialect}
NAMES = [family.name for family in PLAYED.values()]
TEXTS = ["", "a", "5", "-1.5", "true", "null", "None", '"q"', "[1]", "{}", " x ", "a\nb", "\n", "ä漢🎉", "1e999", "NaN",
         "</parameter>", "</tool_call>", "<|im_end|>", "C:\\dir", "12345", "it's", "\ud800", "0x10", "'5'"]  # fmt: skip
ODD = [2**63, 10**400, float("nan"), float("inf"), float("-inf"), 1e308, 1e-320, -0.0, 5.0]
DEFS: dict[str, Any] = {
    "Text": {"type": "string"}, "Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"},
    "Zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "Kind": {"enum": ["a", "5"], "type": "string"},
    "Tree": {"type": "object", "properties": {"sub": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}},
}  # fmt: skip
USER = {"role": "user", "content": "Go"}


class Drawn:
    """A schema of parameters and arguments, by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.family = NAMES[seed % len(NAMES)]
        keys = self.rng.sample(["a", "b", "zip", "on"], self.rng.randint(0, 3))
        parts = {key: self.schema() for key in keys}
        own = {"type": "object", "properties": parts, "required": self.rng.sample(keys, self.rng.randint(0, len(keys)))}
        self.parameters: Any = own | {"$defs": DEFS}
        if self.rng.random() < 0.1:
            self.parameters = {"$ref": "#/$defs/Own", "$defs": DEFS | {"Own": own}}
        # Halves of surrogate pairs become question marks in all prompts.
        self.arguments: Any = {
            key: self.value(part if self.rng.random() < 0.6 else True) for key, part in parts.items()
        }
        if self.rng.random() < 0.05:
            self.arguments["more"] = self.value(True)
        self.arguments = printable_json(self.arguments)

    def schema(self, depth: int = 0) -> Any:
        pick, rng = self.rng.choice, self.rng
        simple = [{"type": kind} for kind in ("string", "integer", "number", "boolean", "object", "array", "null")]
        if depth > 1 or rng.random() < 0.35:
            return pick(simple)
        return pick([
            lambda: {"$ref": f"#/$defs/{pick(list(DEFS))}"}, lambda: {"allOf": [self.schema(2)], "description": "x"},
            lambda: {"const": self.value(True)}, lambda: {"enum": [self.value(True) for _ in range(3)]},
            lambda: {"anyOf": [self.schema(depth + 1), {"type": "null"}]}, lambda: {"not": self.schema(2)},
            lambda: {"oneOf": [self.schema(depth + 1), self.schema(depth + 1)]}, lambda: pick([True, False, {}]),
            lambda: {"type": ["string", "integer"]}, lambda: {"type": "array", "items": self.schema(depth + 1)},
            lambda: {"type": "string", "pattern": "^(a+)+$"}, lambda: {"type": "integer", "minimum": 3},
            lambda: {"type": "object", "properties": {"x": self.schema(depth + 1)}, "required": ["x"]},
            lambda: pick([{"$ref": "#/no"}, {"$ref": "http://127.0.0.1:9/x"}, {"type": 5}, {"enum": 3}, {"items": 1}]),
        ])()  # fmt: skip

    def value(self, schema: Any, depth: int = 0) -> Any:
        """A value that often fits the schema."""
        rng, kind = self.rng, schema.get("type") if isinstance(schema, dict) else None
        if isinstance(schema, dict):
            for key in ("anyOf", "oneOf", "allOf"):
                if key in schema:
                    return self.value(rng.choice(schema[key]), depth)
            if "const" in schema:
                return schema["const"]
            if isinstance(schema.get("enum"), list):
                return rng.choice(schema["enum"])
            if (name := str(schema.get("$ref", "")).rpartition("/")[2]) in DEFS and name not in ("Loop", "Tree"):
                return self.value(DEFS[name], depth)
        kind = rng.choice(kind) if isinstance(kind, list) else kind
        kinds = ("string", "integer", "number", "boolean", "null", "odd") + ("array", "object") * (depth < 2)
        match kind if isinstance(kind, str) else rng.choice(kinds):
            case "string":
                return rng.choice(TEXTS)
            case "integer":
                return rng.randint(-9, 99)
            case "number":
                return rng.choice([0.5, 3, -2.25, 1e21, 12345.678])
            case "boolean":
                return rng.random() < 0.5
            case "array":
                items = schema.get("items", True) if isinstance(schema, dict) else True
                return [self.value(items, depth + 1) for _ in range(rng.randint(0, 3))]
            case "object":
                parts = schema.get("properties", {}) if isinstance(schema, dict) else {}
                named = {key: self.value(part, depth + 1) for key, part in parts.items()}
                return named | {rng.choice("xyz"): self.value(True, depth + 1) for _ in range(rng.randint(0, 2))}
            case "odd":
                return rng.choice(ODD)
        return None


class ScriptedEngine:
    """The part of an engine that the server asks; it answers every request with `ids`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.max_length, self.version, self.load, self.scoring = vocab_size, 1 << 20, 0, (0, 0), 0
        self.config, self.ids = SimpleNamespace(max_batch=4), list[int]()

    def submit(self, request: Request, on_token: Any = None) -> RunningSequence:
        sequence = RunningSequence(request, Future(), on_token)
        for token in self.ids:
            on_token(token, -0.5)
        count = len(self.ids)
        sequence.future.set_result(
            Generation(ids=self.ids, logprobs=[-0.5] * count, versions=[0] * count, finish_reason="stop")
        )
        return sequence


class Served:
    """A family's renderer, behind a server with a scripted engine."""

    def __init__(self, folder: Path) -> None:
        self.renderer = renderer_for(folder)
        tokenizer = self.renderer._tokenizer  # type: ignore[attr-defined]
        self.grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), self.renderer.stop_ids)
        self.engine = ScriptedEngine(tokenizer.get_vocab_size())
        model: Any = self.engine
        self.app = Starlette(routes=OpenAI(model, folder).routes(), exception_handlers=SHAPED_HANDLERS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    root = tmp_path_factory.mktemp("families")
    return {family.name: Served(family.write(root / family.name)) for family in PLAYED.values()}


def plain(value: Any) -> Any:
    """A value of which equals are equal in JSON: 5.0 is 5, True is not 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, dict):
        return {"dict": {key: plain(item) for key, item in value.items()}}
    return ["list", *map(plain, value)] if isinstance(value, list) else (type(value).__name__, value)


def encoded(drawn: Drawn, renderer: Renderer, tools: list[dict[str, Any]], arguments: Any) -> list[int]:
    """The turn that calls with these arguments, as sft learns it. Raises ValueError."""
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    for thought in ({}, {"reasoning_content": "Hm."}):
        try:
            ids, mask = chats.encode_chat(
                chats.chat_of("row", {"messages": [USER, message | thought], "tools": tools}), renderer
            )
        except ValueError as e:
            if thought or "sample" not in str(e):
                raise
        else:
            return ids[np.flatnonzero(mask)].tolist()
    raise ValueError("the template has no thoughts")


def bodies(tools: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    functions = [tool["function"] for tool in tools]
    inputs = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    for stream in (False, True):
        yield "/v1/chat/completions", {"messages": [USER], "tools": tools, "stream": stream}
        flat = [function | {"type": "function"} for function in functions]
        yield "/v1/responses", {"input": "Go", "tools": flat, "stream": stream}
        yield "/v1/messages", {"messages": [USER], "max_tokens": 9999, "tools": inputs, "stream": stream}


def arguments_in(route: str, stream: bool, answer: Any) -> list[Any]:
    """The arguments of the calls in an answer, as its client reads them."""
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if route == "/v1/messages":
        if not stream:
            return [block["input"] for block in answer.json()["content"] if block["type"] == "tool_use"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return [strict(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
    if route == "/v1/responses":
        body = events[-1]["response"] if stream else answer.json()
        return [strict(item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    messages = [event["choices"][0]["delta"] for event in events if event.get("choices")]
    messages = messages if stream else [answer.json()["choices"][0]["message"]]
    return [strict(c["function"]["arguments"]) for message in messages for c in message.get("tool_calls") or ()]


def strict(text: str) -> Any:
    def no_constant(name: str) -> Any:
        raise AssertionError(f"{name} reached a client")

    return json.loads(text, parse_constant=no_constant)


async def asked(app: Any, route: str, body: dict[str, Any], headers: dict[str, str], counts: Counter[str]) -> Any:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        try:
            content = json.dumps(body).encode()
            sent = {"content-type": "application/json"}
            answer = await asyncio.wait_for(http.post(route, content=content, headers=sent), SECONDS)
        except TimeoutError:
            counts["open requests"] += 1
            return None
    counts["requests"] += 1
    counts["status 500"] += answer.status_code >= 500
    return answer


async def tried(number: int, served: Served, counts: Counter[str], wrong: list[Any]) -> None:
    drawn, renderer = Drawn(number), served.renderer
    tools = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": drawn.parameters}}]
    try:
        ids = encoded(drawn, renderer, tools, drawn.arguments)
    except ValueError as e:
        counts[f"refused in training text: {reason(e)}"] += 1
        return
    (call,) = renderer.parse(ids, "stop", tools).calls
    counts[verdict(drawn, renderer, tools, ids, call, wrong)] += 1
    served.engine.ids = ids
    spec = EpisodeSpec(a_task(), EngineModel(Scripted(lambda _: ids), renderer, Sampling(max_tokens=9999)),
                       Budget(turns=9, tokens=99_999, context=999_999, seconds=60.0), 0)  # fmt: skip
    for index, (route, body) in enumerate(bodies(tools)):
        answers = [await asked(served.app, route, body, {}, counts)]
        if index == number % 6:
            endpoint, recording = Endpoint(Path("none")), Recording(spec)
            key = {"authorization": f"Bearer {endpoint.open(recording)}"}
            answers.append(await asked(endpoint.app, route, body, key, counts))
            await recording.close()
        for answer in answers:
            if answer is None or answer.status_code != 200:
                counts[f"refused by an API: {'' if answer is None else reason(answer.json()['error']['message'])}"] += 1
                continue
            found = arguments_in(route, body["stream"], answer)
            wanted = [] if call.arguments is None else [call.arguments]
            if plain(found) != plain(wanted):
                wrong.append((drawn.family, route, body["stream"], wanted, found))


def verdict(drawn: Drawn, renderer: Renderer, tools: Any, ids: list[int], call: Any, wrong: list[Any]) -> str:
    """What became of the arguments."""
    if call.arguments is None:
        return f"malformed: {call.error[:60]}"
    if plain(call.arguments) == plain(drawn.arguments):
        return "equal"
    if encoded(drawn, renderer, tools, call.arguments) == ids:
        return "spelled alike in this dialect, and read by the schema"
    if out_of_quotes(drawn.arguments, call.arguments):
        return "in quotes, and read by the schema"
    wrong.append((drawn.family, drawn.parameters, drawn.arguments, call.arguments))
    return "WRONG"


def out_of_quotes(value: Any, read: Any) -> bool:
    """Whether two values differ only where a text became another value."""
    if plain(value) == plain(read):
        return True
    if isinstance(value, dict) and isinstance(read, dict):
        return value.keys() == read.keys() and all(out_of_quotes(value[key], read[key]) for key in value)
    if isinstance(value, list) and isinstance(read, list):
        return len(value) == len(read) and all(map(out_of_quotes, value, read))
    return isinstance(value, str) and not isinstance(read, str)


def reason(error: object) -> str:
    return "".join(c for c in str(error).partition(":")[0] if not c.isdigit())[:70]


def test_arguments_come_back_equal_or_are_refused_by_name(served: dict[str, Served]) -> None:
    counts, wrong = Counter[str](), list[Any]()

    async def play() -> None:
        for number in range(COUNT):
            await tried(number, served[NAMES[number % len(NAMES)]], counts, wrong)

    asyncio.run(play())
    print("\n".join(f"{count:6} {what}" for what, count in sorted(counts.items())))
    assert not wrong, "\n".join(map(repr, wrong[:20]))
    assert counts["open requests"] == counts["status 500"] == 0
    assert counts["equal"] > COUNT / 3


TAGGED = ("qwen3_coder", "seed_oss", "glm45", "deepseek_v32", "hermes")


def walked(grammars: Grammars, lark: str, renderer: Renderer, seed: int) -> list[int] | None:
    """Random tokens that the grammar allows, up to its end; None for a walk that goes on."""
    matcher, rng, ids = grammars.matcher(lark, "tool_choice"), np.random.default_rng(seed), list[int]()
    while not matcher.is_stopped() and len(ids) < 300:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ends = [token for token in renderer.stop_ids if token in allowed]
        ids.append(ends[0] if ends else int(rng.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return ids if matcher.is_stopped() else None


def test_a_forced_call_fits_its_schema_or_is_refused_by_name(served: dict[str, Served]) -> None:
    """Whatever the grammar of a schema allows is read as a call that fits the schema."""
    counts = Counter[str]()
    forced = [family.name for family in PLAYED.values() if family.dialect in TAGGED]
    for number in range(COUNT):
        served_model = served[forced[number % len(forced)]]
        renderer, grammars = served_model.renderer, served_model.grammars
        parameters = printable_json(json.loads(json.dumps(Drawn(number).parameters), parse_constant=lambda _: 1))
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        try:
            ids = walked(grammars, grammars.of_call(renderer, tools), renderer, number)
        except Refusal as e:
            counts[f"refused with {e.status}: {reason(e)}"] += 1
            continue
        if ids is None:
            counts["a walk that goes on"] += 1
            continue
        (call,) = renderer.parse(ids, "stop", tools).calls
        if call.arguments is None:  # of a number too large, or where no value fits the schema
            counts[f"malformed: {call.error}"] += 1
            continue
        if re.search(r"\d{16}", json.dumps(call.arguments)):
            counts["a number that is too large for a grammar, which counts in float64"] += 1
            continue
        fitted(call, parameters)
        counts["fits"] += 1
    print("\n".join(f"{count:6} {what}" for what, count in sorted(counts.items())))
    assert counts["fits"] > COUNT / 4
    assert all("with 400" in what for what in counts if what.startswith("refused"))
