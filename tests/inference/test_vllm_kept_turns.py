"""Turns of a vLLM server that are kept for a gateway, around a stand-in for vLLM's engine."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from etude.inference.turn_store import TurnStore
from etude.inference.vllm.kept_turns import TurnKeeper, is_plain
from etude.protocol import TOKEN_VARIABLE, TURN_HEADER, ServedTokens, bearer
from etude.renderers import renderer_for
from tests.helpers.vllm_server import MODEL

ULIDS = [f"01ARZ3NDEKTSV4RRFFQ69G5F{n:02}" for n in range(40)]
MESSAGES = [{"role": "user", "content": "Fix `add` in a.py\ndef add(a, b):\n    return a - b\n"}]


class Parameters(msgspec.Struct):
    """As vLLM's SamplingParams, with some of its fields."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    a_new_one: float = 0.0
    output_kind: Any = SimpleNamespace(name="FINAL_ONLY")
    _eos: int | None = None

    def clone(self) -> "Parameters":
        return msgspec.structs.replace(self)


class FakeEngine:
    """The engine of a server: it answers `ids`, the first token alone, then the rest."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.prompt, self.version, self.digest = ids, [5, 6, 7], 3, "three"
        self.asked: list[Parameters] = []
        self.spans: list[tuple[str, int, int]] = [("3", 0, len(ids))]
        self.go_on = asyncio.Event()
        self.has_worker = True
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                logprobs_mode="processed_logprobs", quantization=None, tokenizer=str(MODEL), model=str(MODEL),
                tokenizer_revision=None, revision=None,
            ),
            parallel_config=SimpleNamespace(_api_process_count=1),
            speculative_config=None,
        )  # fmt: skip

    async def collective_rpc(self, method: str, timeout: float | None = None) -> list[dict[str, Any]]:
        if not self.has_worker:
            raise AttributeError(f"the worker has no {method}")
        return [{"version": self.version, "digest": self.digest, "error": ""}]

    async def generate(
        self, prompt: object, sampling_params: Parameters, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.asked.append(sampling_params)
        delta = sampling_params.output_kind.name == "DELTA"
        for low, high in ((0, 1), (1, len(self.ids))) if delta else ((0, len(self.ids)),):
            if low:
                await self.go_on.wait()
            ids, last = self.ids[low:high], high == len(self.ids)
            logprobs = [{i: SimpleNamespace(logprob=-0.5 * i)} for i in ids]
            spans = [SimpleNamespace(version=v, start=a, end=b) for v, a, b in self.spans]
            parts = [
                SimpleNamespace(
                    index=index, token_ids=ids, logprobs=logprobs if sampling_params.logprobs is not None else None,
                    finish_reason="stop" if last else None, weight_versions=spans if last else None,
                )
                for index in range(sampling_params.n)
            ]  # fmt: skip
            yield SimpleNamespace(prompt_token_ids=self.prompt, outputs=parts)


def served(engine: FakeEngine) -> Starlette:
    """vLLM's routes, as far as they matter here, with the class around them."""

    async def answer(http: Request) -> Response:
        body = await http.json()
        own = {"output_kind": SimpleNamespace(name="DELTA")} if body.get("stream") else {}
        parameters = Parameters(**own, **body.get("params", {}))
        outputs = engine.generate("text", parameters, "r", lora_request=body.get("adapter"))
        if not body.get("stream"):
            return JSONResponse({"id": http.headers.get("x-request-id"), "n": [len(o.outputs) async for o in outputs]})

        async def lines() -> AsyncIterator[bytes]:
            async for output in outputs:
                yield f"data: {len(output.outputs[0].token_ids)}\n\n".encode()

        return StreamingResponse(lines())

    posts = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    plain = ("/health", "/pause", "/resume", "/update_weight_version", "/v1/models")
    app = Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path in posts),
            *(Route(path, lambda _: Response(), methods=["GET", "POST"]) for path in plain),
        ]
    )
    app.state.engine_client = engine
    app.add_middleware(TurnKeeper)  # as vLLM adds it
    return app


@pytest.fixture
def engine() -> FakeEngine:
    renderer = renderer_for(MODEL)
    calls = [{"type": "function", "function": {"name": "edit", "arguments": '{"old": "a", "new": "b"}'}}]
    return FakeEngine(renderer.turn({"role": "assistant", "content": "", "tool_calls": calls}))


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(served(engine)) as client:
        yield client


def taken(client: Any, name: str) -> ServedTokens:
    answer = client.get(f"/v1/turns/{name}")
    assert answer.status_code == 200, answer.text
    return msgspec.msgpack.decode(answer.content, type=ServedTokens)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_turn_is_kept_with_its_tokens_and_given_out_once(client: TestClient, engine: FakeEngine, path: str) -> None:
    body = {"messages": MESSAGES, "params": {"temperature": 0.5, "top_p": 0.9, "top_k": -1}}
    answer = client.post(path, json=body, headers={TURN_HEADER: ULIDS[0], "x-request-id": "the client's"})
    assert answer.json() == {"id": ULIDS[0], "n": [1]}, "vLLM makes the id of the answer of the turn's name"
    tokens = taken(client, ULIDS[0])
    assert np.frombuffer(tokens.prompt_ids, "<i4").tolist() == engine.prompt
    assert np.frombuffer(tokens.ids, "<i4").tolist() == engine.ids
    assert np.frombuffer(tokens.logprobs, "<f4").tolist() == [-0.5 * i for i in engine.ids]
    assert (tokens.spans, tokens.temperature, tokens.top_p) == ([(0, len(engine.ids), 3)], 0.5, 0.9)
    assert (tokens.finish_reason, tokens.plain, tokens.choices, tokens.malformed) == ("stop", True, 1, 0)
    call = json.loads(tokens.message)["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("edit", {"old": "a", "new": "b"})
    assert tokens.text.endswith("<|end|>")
    assert client.get(f"/v1/turns/{ULIDS[0]}").status_code == 404


def test_requests_without_the_header_are_not_touched(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert engine.asked[0].logprobs is None
    client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "params": {"logprobs": 4}}, headers={TURN_HEADER: ULIDS[1]}
    )
    assert engine.asked[1].logprobs == 4, "the client's own number stays"


@pytest.mark.parametrize("name", ["no ulid", ULIDS[0].lower(), ULIDS[1]])
def test_a_turn_whose_name_cannot_be_kept_is_an_ordinary_request(client: TestClient, name: str) -> None:
    client.post("/v1/chat/completions", json={}, headers={TURN_HEADER: ULIDS[1]})
    answer = client.post("/v1/chat/completions", json={}, headers={TURN_HEADER: name, "x-request-id": "own"})
    assert answer.json()["id"] == "own"
    assert client.get(f"/v1/turns/{name}").status_code == (200 if name == ULIDS[1] else 404)


def test_a_huge_request_drops_no_other_turn(client: TestClient) -> None:
    client.post("/v1/chat/completions", json={}, headers={TURN_HEADER: ULIDS[0]})
    huge = b'{"x": "' + b"x" * (17 << 20) + b'"}'
    assert client.post("/v1/chat/completions", content=huge, headers={TURN_HEADER: ULIDS[1]}).status_code == 200
    assert [client.get(f"/v1/turns/{name}").status_code for name in ULIDS[:2]] == [200, 404]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null"])
def test_a_body_that_is_refused_leaves_no_tokens(engine: FakeEngine, body: bytes) -> None:
    with TestClient(served(engine), raise_server_exceptions=False) as client:
        assert client.post("/v1/messages", content=body, headers={TURN_HEADER: ULIDS[0]}).status_code == 500
        assert client.get(f"/v1/turns/{ULIDS[0]}").status_code == 410


def test_one_long_turn_keeps_no_ended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.turn_store._SECONDS", 0.0)
    store = TurnStore[str](lambda turn: turn == "ended")
    assert all(store.keep(name, turn, 1) for name, turn in zip(ULIDS, ("long", "ended", "new"), strict=False))
    assert [store.take(name) for name in ULIDS[:3]] == ["long", None, "new"]


def test_a_stream_is_read_as_it_passes_and_a_client_may_leave(client: TestClient, engine: FakeEngine) -> None:
    engine.go_on.set()
    body = {"messages": MESSAGES, "stream": True}
    answer = client.post("/v1/messages", json=body, headers={TURN_HEADER: ULIDS[0]})
    assert answer.text == f"data: 1\n\ndata: {len(engine.ids) - 1}\n\n"
    assert len(taken(client, ULIDS[0]).ids) == 4 * len(engine.ids)


async def left(app: Starlette, engine: FakeEngine, meanwhile: Callable[[Any], Any]) -> tuple[int, bytes]:
    """The turn of a client that leaves after the first part; `meanwhile` is done between."""
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://vllm") as http, lifespan(app):
        sent: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps({"stream": True}).encode()}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                await meanwhile(http)
                gone.set()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"", "root_path": "",
            "http_version": "1.1", "headers": [(TURN_HEADER.encode(), ULIDS[0].encode())], "scheme": "http",
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 10)
        answer = await http.get(f"/v1/turns/{ULIDS[0]}")
        return answer.status_code, answer.content


class lifespan:
    """The lifespan of an application."""

    def __init__(self, app: Starlette) -> None:
        self._app, self._asked, self._told = app, asyncio.Queue[dict[str, Any]](), asyncio.Queue[Any]()

    async def __aenter__(self) -> Any:
        self._task = asyncio.create_task(
            self._app({"type": "lifespan", "app": self._app, "state": {}}, self._asked.get, self._told.put)
        )
        self._asked.put_nowait({"type": "lifespan.startup"})
        return await self._told.get()

    async def __aexit__(self, *_: object) -> None:
        self._asked.put_nowait({"type": "lifespan.shutdown"})
        await self._task


async def no_change(http: Any) -> None:
    """Nothing happens."""


async def update(http: Any) -> None:
    """The server is brought to another version."""
    for path in ("/pause", "/update_weight_version", "/resume"):
        await http.post(path)


def test_the_tokens_of_a_client_that_left_have_the_version_of_the_server(engine: FakeEngine) -> None:
    status, content = asyncio.run(left(served(engine), engine, no_change))
    assert status == 200
    tokens = msgspec.msgpack.decode(content, type=ServedTokens)
    assert (len(tokens.ids) // 4, tokens.spans, tokens.finish_reason) == (1, [(0, 1, 3)], "abort")


def test_after_an_update_their_version_is_not_known(engine: FakeEngine) -> None:
    status, _ = asyncio.run(left(served(engine), engine, update))
    assert status == 410


@pytest.mark.parametrize(
    ("params", "plain", "choices"),
    [
        ({}, True, 1), ({"seed": 3, "stop": ["x"], "top_k": -1}, True, 1), ({"n": 2}, True, 2),
        ({"top_k": 5}, False, 1), ({"min_p": 0.1}, False, 1), ({"logit_bias": {1: 2.0}}, False, 1),
        ({"bad_words": []}, True, 1), ({"bad_words": ["x"]}, False, 1), ({"a_new_one": 0.5}, False, 1),
    ],
)  # fmt: skip
def test_what_changes_the_distribution_is_not_plain(
    client: TestClient, params: dict[str, Any], plain: bool, choices: int
) -> None:
    body = {"messages": MESSAGES, "params": params}
    client.post("/v1/chat/completions", json=body, headers={TURN_HEADER: ULIDS[0]})
    tokens = taken(client, ULIDS[0])
    assert (tokens.plain, tokens.choices) == (plain, choices)


def test_several_versions_unknown_ones_and_adapters(client: TestClient, engine: FakeEngine) -> None:
    def status(name: str, **body: Any) -> int:
        client.post("/v1/chat/completions", json={"messages": MESSAGES} | body, headers={TURN_HEADER: name})
        return 0

    engine.spans = [("3", 0, 2), ("4", 2, len(engine.ids))]
    status(ULIDS[0])
    assert taken(client, ULIDS[0]).spans == [(0, 2, 3), (2, len(engine.ids), 4)]
    engine.spans = [("default", 0, len(engine.ids))]
    status(ULIDS[1])
    assert taken(client, ULIDS[1]).spans == [(0, len(engine.ids), -1)]
    engine.spans = [("3", 0, 2)]
    status(ULIDS[2])
    assert client.get(f"/v1/turns/{ULIDS[2]}").status_code == 410
    status(ULIDS[3], adapter="a")
    assert client.get(f"/v1/turns/{ULIDS[3]}").status_code == 410


def test_health_tells_version_and_digest_of_the_workers(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/health").json() == {
        "status": "ok", "error": "", "keeps_turns": True, "version": 3, "digest": "three",
    }  # fmt: skip
    engine.version, engine.digest = -1, ""
    client.post("/resume")
    waiting = client.get("/health")
    assert (waiting.status_code, waiting.json()["status"]) == (503, "waiting"), "its checkpoint is no release"
    engine.version, engine.digest = 3, "three"
    client.post("/resume")
    assert client.get("/health").status_code == 200
    engine.version, engine.digest = 4, "four"
    client.post("/pause")
    assert client.get("/health").json()["version"] == 3, "during an update, the version before"
    client.post("/resume")
    assert client.get("/health").json()["digest"] == "four"


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_whose_workers_do_not_answer_is_not_well(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    async def rpc(method: str, timeout: float | None = None) -> None:
        await asyncio.sleep(30 if deaf else 0)
        raise RuntimeError("the engine is dead")

    monkeypatch.setattr("etude.inference.vllm.kept_turns._RPC_SECONDS", 0.05)
    engine.collective_rpc = rpc  # pyright: ignore[reportAttributeAccessIssue]
    assert client.get("/health").status_code == 200, "its version is known until an update"
    client.post("/resume")
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("the workers do not answer: ")


def test_all_routes_but_health_need_the_token(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with TestClient(served(engine)) as client:
        client.post("/v1/messages", json={}, headers={TURN_HEADER: ULIDS[0]} | bearer("secret"))
        assert client.get(f"/v1/turns/{ULIDS[0]}").status_code == 401
        assert client.get(f"/v1/turns/{ULIDS[0]}", headers=bearer("secret")).status_code == 200
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: setattr(e.vllm_config.model_config, "logprobs_mode", "raw_logprobs"), "processed_logprobs"),
        (lambda e: setattr(e.vllm_config.model_config, "quantization", "fp8"), "quantised weights"),
        (lambda e: setattr(e.vllm_config.parallel_config, "_api_process_count", 2), "--api-server-count 1"),
        (lambda e: setattr(e.vllm_config, "speculative_config", object()), "--speculative-config"),
        (lambda e: setattr(e, "has_worker", False), "--worker-extension-cls"),
        (lambda _: os.environ.update(VLLM_API_KEY="k"), "vLLM's own key does not cover the turns: set ETUDE_API_KEY"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_keep_turns_does_not_start(
    engine: FakeEngine, change: Callable[[FakeEngine], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    change(engine)

    async def started() -> dict[str, Any]:
        async with lifespan(served(engine)) as told:
            return told

    told = asyncio.run(started())
    assert told["type"] == "lifespan.startup.failed"
    assert why in told["message"]


def test_plain_parameters_are_the_defaults_of_any_version() -> None:
    assert is_plain(Parameters())
    assert not is_plain(Parameters(a_new_one=1.0))
