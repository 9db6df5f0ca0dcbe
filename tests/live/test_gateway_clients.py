"""The libraries that users have, through the gateway, before the bundled model: same bytes, exact tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import anthropic
import httpx2
import msgspec
import numpy as np
import openai
import pytest

from etude.config import EngineConfig
from etude.inference.engine.loading import load_engine
from etude.inference.server.server import build_app
from etude.inference.server.weights import WeightWatcher
from etude.live.log import journal
from etude.live.log.accounts import Accounts, open_blobs, open_log, unseal
from etude.live.log.records import TurnContent
from tests.helpers.http_apps import guarded
from tests.helpers.live import bytes_below, client, live_config, new_key, running_gateway
from tests.inference.conftest import NANO

pytestmark = pytest.mark.slow

ASK = [
    {"role": "user", "content": "Fix `chunk` in src/pydash/arrays.py\ndef chunk(array, size=1):\n    return array\n"}
]
SECRET = "AKIAQWERTYUIOPASDFGH"


class _Tap:
    """An application, and the bytes of the bodies that it sent, one entry for each answer."""

    def __init__(self, app, engine) -> None:
        self.app, self.engine, self.sent = app, engine, []

    async def __call__(self, scope, receive, send):
        whole = bytearray()
        if scope["path"].startswith(("/v1/chat", "/v1/resp", "/v1/mess")):
            self.sent.append(whole)

        async def told(message):
            whole.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, told)


@pytest.fixture(scope="module")
def nano():
    engine = load_engine(NANO, EngineConfig(cache_mb=64, speculate=False))
    engine.start()
    tap = _Tap(build_app(engine, WeightWatcher(engine, None), NANO, ("nano",)), engine)
    with guarded(tap) as port:
        yield tap, f"http://127.0.0.1:{port}"
    engine.close()


def contents(config) -> list[tuple]:
    """The turns of a log with what was sampled."""
    folder = Path(config.folder)
    engine, accounts, store = open_log(folder, None), Accounts(folder), open_blobs(folder)
    with journal.reading(engine) as connection:
        turns = list(journal.turns(connection, time.time_ns() * 2))
        sessions = journal.of_ids(connection, journal.Session, [turn.session for turn in turns])
        keys = [accounts.key(connection, sessions[turn.session].account) for turn in turns]
    engine.dispose()
    opened = [unseal(key, store.get(turn.blob), turn.blob) for key, turn in zip(keys, turns, strict=True)]
    return [(turn, msgspec.msgpack.decode(data, type=TurnContent)) for turn, data in zip(turns, opened, strict=True)]


@pytest.mark.smoke
def test_stock_clients_get_what_the_server_sent_and_their_tokens_are_exact(tmp_path, nano):
    tap, url = nano
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    with running_gateway(config) as (_, at):
        ours = openai.OpenAI(base_url=f"{at}/v1", api_key=key, max_retries=0)
        chat = {"model": "nano", "messages": ASK, "max_tokens": 24}
        with_head = ours.chat.completions.with_raw_response.create(**chat)
        assert with_head.headers["x-etude-recorded"] == "true"
        assert 0 < with_head.parse().usage.completion_tokens <= 24
        assert [chunk.object for chunk in ours.chat.completions.create(**chat, stream=True)]
        assert 0 < ours.responses.create(model="nano", input="hello", max_output_tokens=8).usage.output_tokens <= 8
        events = list(ours.responses.create(model="nano", input="hello", max_output_tokens=8, stream=True))
        assert events[0].type == "response.created"
        assert events[-1].type in ("response.incomplete", "response.completed"), "a model may end its turn early"
        theirs = anthropic.Anthropic(base_url=at, api_key=key, max_retries=0)
        message = {"model": "nano", "max_tokens": 8, "messages": ASK}
        assert 0 < theirs.messages.create(**message).usage.output_tokens <= 8
        with theirs.messages.stream(**message) as stream:
            assert 0 < stream.get_final_message().usage.output_tokens <= 8
        assert theirs.messages.count_tokens(model="nano", messages=ASK).input_tokens > 10
        assert [card.id for card in ours.models.list()] == ["nano"]
        with client(at, key) as http:
            for path, body in (
                ("/v1/chat/completions", chat | {"logprobs": True, "return_token_ids": True}),
                ("/v1/chat/completions", chat | {"stream": True}),
                ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}),
                ("/v1/messages", message),
                ("/v1/messages", message | {"stream": True}),
                ("/v1/messages", {"messages": 3}),
                ("/v1/chat/completions", {"nonsense": 1}),
            ):
                answer = http.post(path, json=body)
                assert answer.content == tap.sent[-1], "byte for byte, refusals, too"
                assert answer.status_code == (200 if "model" in body or "input" in body else 400)
    turns = contents(config)
    assert [content.dialect for _, content in turns] == [
        "chat",
        "chat",
        "responses",
        "responses",
        "messages",
        "messages",
        "chat",
        "chat",
        "responses",
        "messages",
        "messages",
    ]
    for turn, content in turns:
        prompt, ids = np.frombuffer(content.prompt_ids, "<i4"), np.frombuffer(content.ids, "<i4")
        assert (turn.reason, turn.prompt_tokens, turn.sampled_tokens) == ("", len(prompt), len(ids))
        assert [(span.low, span.high, span.version) for span in turn.spans] == [(0, len(ids), 0)]
        assert turn.stop in ("length", "stop")
        assert json.loads(content.response)["role"] == "assistant"
        scored = httpx2.post(f"{url}/score", json={"sequences": [[*prompt.tolist(), *ids.tolist()]]}, timeout=60).json()
        # Sampled at temperature 1: the score's own log-probabilities. Batched and decoded passes add in another order.
        expected = scored["logprobs"][0][len(prompt) - 1 :]
        np.testing.assert_allclose(np.frombuffer(content.logprobs, "<f4"), expected, atol=2e-3)


def test_a_secret_that_a_response_goes_on_from_is_found_in_the_tokens(tmp_path, nano):
    _, url = nano
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    with running_gateway(config) as (_, at):
        ours = openai.OpenAI(base_url=f"{at}/v1", api_key=key, max_retries=0)
        first = ours.responses.create(model="nano", input=f"my key is {SECRET}", max_output_tokens=4)
        ours.responses.create(model="nano", input="go on", previous_response_id=first.id, max_output_tokens=4)
        ours.responses.create(model="nano", input="go on", max_output_tokens=4)
    turns = contents(config)
    assert [(turn.reason, turn.scrubbed) for turn, _ in turns] == [
        ("scrubbed", {"aws": 2}),
        ("scrubbed", {"aws": 1}),
        ("", {}),
    ]
    assert not any(content.ids for _, content in turns[:2])
    assert SECRET.encode() not in bytes_below(tmp_path) + b"".join(msgspec.msgpack.encode(c) for _, c in turns)


def test_a_client_that_stops_reading_leaves_an_exact_turn(tmp_path, nano):
    tap, url = nano
    before = tap.engine.counters.sampled_tokens
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    body = {"messages": ASK, "stream": True, "max_tokens": 2000, "ignore_eos": True}
    with running_gateway(config) as (gateway, at), client(at, key) as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()  # held: the connection ends with it
            next(lines)
            deadline = time.monotonic() + 30  # the first line tells the role, and comes before the tokens
            while tap.engine.counters.sampled_tokens == before:
                assert not stream.is_closed
                assert time.monotonic() < deadline
                time.sleep(0.01)
        deadline = time.monotonic() + 30
        while not gateway.queue.counters.turns and time.monotonic() < deadline:
            time.sleep(0.02)
    ((turn, content),) = contents(config)
    assert turn.stop == "abort"
    assert 0 < turn.sampled_tokens < 2000
    assert len(content.ids) == len(content.logprobs) == 4 * turn.sampled_tokens
