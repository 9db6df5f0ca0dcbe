"""Failures between sampling and answering: the client is answered in the shape of its API, and the log says why."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from etude.inference.engine.engine import Engine
from etude.inference.server.chats import Chats
from etude.inference.server.choices import Choice, Detokenizer
from etude.inference.server.completions import _Shown
from etude.inference.server.kept_turns import KeptTurns
from etude.protocol.apis import SampledTurn, anthropic, chat, responses
from etude.renderers import ParsedTurn
from etude.renderers.compact import CompactRenderer

HELLO = [{"role": "user", "content": "hello"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    MESSAGES: {"messages": HELLO, "max_tokens": 4},
    RESPONSES: {"input": "hello", "max_output_tokens": 4},
}
SECONDS = 20.0  # of a slow machine; the client's own limit is two minutes


def odd(*_: Any, **__: Any) -> Any:
    raise ValueError("odd")  # of a kind that a wrong request has, too


def refusal_in(route: str, answer: Any, stream: bool) -> dict[str, Any]:
    """The error of an answer, in the shape of its API."""
    if not stream:
        assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
        shown = answer.json()
    else:
        assert answer.status_code == 200
        shown = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
        if route == RESPONSES:
            assert (shown["type"], shown["response"]["status"]) == ("response.failed", "failed")
            return shown["response"]["error"]
    if route == MESSAGES:
        assert (shown["type"], shown["error"]["type"]) == ("error", "api_error")
    return shown["error"]


def assert_answered(http: Any, caplog: Any, route: str, body: dict[str, Any], stream: bool) -> None:
    caplog.clear()
    started = time.monotonic()
    answer = http.post(route, json=body | {"stream": stream})
    assert time.monotonic() - started < SECONDS
    assert "ValueError" in refusal_in(route, answer, stream)["message"]
    assert any(r.exc_info and str(r.exc_info[1]) == "odd" for r in caplog.records), "the log has the traceback"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", list(BODIES))
@pytest.mark.parametrize(
    ("owner", "name"),
    [(CompactRenderer, "parse"), (ParsedTurn, "openai"), (SampledTurn, "settle"), (Choice, "settled")],
)
def test_a_turn_that_cannot_be_read_is_answered(
    owner: Any, name: str, route: str, stream: bool, nano_http: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(owner, name, odd)
    assert_answered(nano_http, caplog, route, BODIES[route], stream)


@pytest.mark.parametrize(
    ("route", "stream", "owner", "name", "more"),
    [
        (CHAT, False, Chats, "_entry", {"logprobs": True}), (CHAT, True, Chats, "_entry", {"logprobs": True}),
        (CHAT, True, chat, "merge_streams", {}),
        (CHAT, True, chat, "usage_of", {"stream_options": {"include_usage": True}}),
        (CHAT, False, chat, "usage_of", {}), (CHAT, False, Detokenizer, "add", {"stop": "zq"}),
        (CHAT, True, Detokenizer, "add", {"stop": "zq", "n": 2}), (CHAT, True, SampledTurn, "events", {"n": 2}),
        (MESSAGES, False, anthropic, "_stopped", {}), (MESSAGES, True, anthropic, "_stopped", {}),
        (MESSAGES, True, SampledTurn, "events", {}), (RESPONSES, True, SampledTurn, "events", {}),
        (RESPONSES, False, responses._Writer, "completed", {}), (RESPONSES, True, responses._Writer, "completed", {}),
        (RESPONSES, False, responses._Writer, "__init__", {}),
        ("/v1/completions", False, Detokenizer, "add", {}), ("/v1/completions", True, Detokenizer, "add", {"n": 2}),
        ("/v1/completions", False, _Shown, "whole", {}), ("/v1/completions", True, _Shown, "part", {}),
        ("/v1/completions", True, _Shown, "_logprobs", {"logprobs": 1}),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_written_is_answered(
    route: str, stream: bool, owner: Any, name: str, more: Any, nano_http: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(owner, name, odd)
    body = BODIES.get(route, {"prompt": "hello", "max_tokens": 4})
    assert_answered(nano_http, caplog, route, body | more, stream)


def test_a_failing_turn_leaves_the_server_as_it_was(nano_http: Any, monkeypatch: Any) -> None:
    turn = {"X-Etude-Turn": "0" * 26}
    with monkeypatch.context() as patch:
        patch.setattr(SampledTurn, "settle", odd)
        assert nano_http.post(CHAT, json=BODIES[CHAT]).status_code == 500
        patch.setattr(KeptTurns, "_served_tokens", odd)
        nano_http.post(CHAT, json=BODIES[CHAT], headers=turn)
        assert nano_http.get(f"/v1/turns/{turn['X-Etude-Turn']}").status_code == 500
    assert nano_http.post(CHAT, json=BODIES[CHAT]).status_code == 200


def test_a_look_at_a_kept_turn_does_not_take_it(nano_http: Any) -> None:
    name = "1" * 26
    nano_http.post(CHAT, json=BODIES[CHAT], headers={"X-Etude-Turn": name})
    assert [nano_http.request(verb, f"/v1/turns/{name}").status_code for verb in ("HEAD", "GET", "GET")] == [
        404,
        200,
        404,
    ]


def test_a_dead_engine_answers_what_waits_for_it() -> None:
    """A future that has its answer already does not keep the others from theirs."""
    engine = Engine.__new__(Engine)
    done, waiting = Future[Any](), Future[Any]()
    done.set_result(None)
    engine._wake, engine._closed, engine.failure = threading.Condition(), True, None
    engine._arrived, engine.scheduler = [], SimpleNamespace(sequences=list, add=lambda _: None)  # type: ignore[assignment]
    engine._swaps, engine._scores = [(1, odd, done)], [([], 0, waiting)]  # type: ignore[assignment]
    engine._run()
    assert isinstance(waiting.exception(0), RuntimeError)
