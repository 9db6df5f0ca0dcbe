"""Clients that see the ids in bodies alone report by them: whole and streamed answers of three APIs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.live.gateway.answer_ids import AnswerId, turn_in
from etude.live.log import schema
from etude.live.log.records import ulid
from tests.helpers.http_apps import answering
from tests.helpers.live import client, live_config, new_key, running_gateway
from tests.live.test_gateway import rows

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def whole(dialect: str, name: str) -> bytes:
    inner = {"choices": [{"message": {"content": '"id": "no"', "tool_calls": [{"id": "call_1"}]}}]}
    body = {"id": name, **inner} if dialect == "chat" else {"type": "message", "content": [{"id": "no"}], "id": name}
    return json.dumps(body, indent=1).encode()


def events(dialect: str, name: str) -> bytes:
    listed: list[dict[str, Any]] = {
        "chat": [{"id": name, "choices": []}, {"id": name, "choices": [{"delta": {"content": "x"}}]}],
        "messages": [{"type": "message_start", "message": {"id": name}}, {"type": "message_stop"}],
        "responses": [{"type": "response.created", "response": {"id": name}}, {"type": "x", "item": {"id": "no"}}],
    }[dialect]
    lines = [f"event: e\r\ndata: {json.dumps(event)}\r\n\r\n" for event in listed]
    return "".join([": ping\n\n", "data: {}\n\n" * (dialect != "chat"), *lines, "data: [DONE]\n\n"]).encode()


class Foreign:
    """A server with ids of its own, or those of `etude serve` where `ours`."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.ours = False
        self.fixed = ""
        self.last = ""

    def app(self) -> Starlette:
        posts = [Route(path, self.answer, methods=["POST"]) for path in PATHS.values()]
        return Starlette(routes=[*posts, Route("/health", lambda _: JSONResponse({"version": 1, "digest": "d"}))])

    async def answer(self, http: Request) -> Response:
        dialect = next(name for name, path in PATHS.items() if path == http.url.path)
        prefix = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}[dialect]
        own = http.headers.get("x-etude-turn") if self.ours else None
        self.last = self.fixed or f"{prefix}{own or f'foreign-{next(self.numbers)}'}"
        assert "accept-encoding" not in http.headers
        if (await http.json()).get("stream"):
            data = events(dialect, self.last)
            parts = (data[i : i + 7] for i in range(0, len(data), 7))
            return StreamingResponse(parts, media_type="text/event-stream; charset=utf-8")
        return Response(whole(dialect, self.last), media_type="application/json")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Foreign, str, str, str, Any]]:
    server = Foreign()
    with answering(server.app()) as url:
        config = live_config(tmp_path, url)
        keys = new_key(config), new_key(config, "other")
        with running_gateway(config) as (gateway, at):
            yield server, at, *keys, (config, gateway)


def report(http: httpx2.Client, name: object, **headers: str) -> tuple[int, Any]:
    answer = http.post("/v1/feedback", json={"response_id": name, "name": "undone"}, headers=headers)
    body = answer.json()
    return answer.status_code, body["results"][0] if "results" in body else body


@pytest.mark.parametrize("ours", [False, True])
def test_an_answer_is_known_by_the_id_in_its_body(place: Any, ours: bool) -> None:
    server, at, key, _, (config, gateway) = place
    server.ours = ours
    turns, consents = [], ("train", "no")
    with client(at, key) as http:
        for dialect, stream, consent in itertools.product(PATHS, (False, True), consents):
            sent = http.post(PATHS[dialect], json={"stream": stream}, headers={"x-etude-consent": consent})
            assert sent.content == (events if stream else whole)(dialect, server.last)
            turns.append(sent.headers["x-etude-generation"])
            assert report(http, server.last)[1]["status"] == "recorded", (dialect, stream, consent)
            assert report(http, turns[-1])[0] == 200, "the header's id names the same turn"
        signal = {
            "name": "gen_ai.evaluation.result",
            "attributes": {
                "gen_ai.response.id": server.last,
                "gen_ai.evaluation.name": "rating",
                "gen_ai.evaluation.score.value": 1,
            },
        }
        assert http.post("/v1/feedback", json=signal).status_code == 200
        edit = {"id": ulid(), "path": "a", "base": "b", "old_lines": [1, 1], "new": "n", "characters": 1}
        shown = http.post("/v1/suggestions", json={"turn": server.last, "suggestions": [edit]})
        assert shown.json()["results"][0]["status"] == "unrecorded"
    assert not gateway.recorder.open
    assert {row["subject"] for row in rows(config, schema.signals)} == set(turns)
    kept = rows(config, schema.answers)
    assert len(kept) == (6 if ours else 12), "an id that names its turn needs no row"
    assert all(re.fullmatch("[0-9a-f]{32}", row["name"]) for row in kept), "an id may hold a secret"


def test_ids_of_others_are_as_unknown_as_those_that_are_not_there(place: Any) -> None:
    server, at, key, other, (config, _) = place
    with client(at, key) as http, client(at, other) as foreign:
        http.post(PATHS["chat"], json={}, headers={"x-etude-user": "ann"})
        first = server.last
        status, nothing = report(foreign, "chatcmpl-none")
        assert (status, nothing["status"]) == (404, "unknown")
        assert "has no turn" in nothing["message"]
        for http_, name, headers in (
            (foreign, first, {}), (http, first, {"x-etude-user": "bob"}), (http, f"{first}0", {}),
            (http, f"chatcmpl-{ulid()}", {}),
        ):  # fmt: skip
            status, result = report(http_, name, **headers)
            assert (status, {**result, "event": 0}) == (404, {**nothing, "event": 0})
        assert report(http, first, **{"x-etude-user": "ann"})[0] == 200
        for wrong in ("", "x", "a bcdef", "x" * 201, 7, None, "\n"):
            assert report(http, wrong)[0] == 400
        server.fixed = "chatcmpl-0"  # of a server that counts from its start
        http.post(PATHS["chat"], json={})
        assert report(http, "chatcmpl-0")[0] == 200
        foreign.post(PATHS["chat"], json={})
        assert report(foreign, "chatcmpl-0")[0] == 200, "another tenant's answer of that id is another"
        turn = http.post(PATHS["chat"], json={}).headers["x-etude-generation"]
        status, result = report(http, "chatcmpl-0")
        assert (status, result["status"]) == (422, "ambiguous")
        assert "several answers" in result["message"]
        assert report(http, turn)[0] == 200
    assert sorted(row["turn"] == "" for row in rows(config, schema.answers)) == [False, False, True]


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("size", [1, 2, 3, 10, 10_000])
def test_ids_are_read_from_any_parts(dialect: str, size: int) -> None:
    for media, data in (("application/json", whole(dialect, "ans-1")), ("text/event-stream", events(dialect, "ans-1"))):
        reader = AnswerId(media, dialect)
        names = [reader.feed(data[i : i + size]) for i in range(0, len(data), size)]
        assert [name for name in names if name] == ["ans-1"]


@pytest.mark.parametrize("data", [
    b"", b"{", b'{"id": 5}', b"[]", b"\xff\xfe", b'{"id": "a bcdef"}', b'{"id": "abcd"}', b'{"id": null}', b"[" * 5000,
    b'{"id": "' + b"x" * 201 + b'"}', b'{"choices": [{"id": "never"}]}', b'{"error": {"id": "never"}}',
])  # fmt: skip
def test_what_is_no_id_is_none(data: bytes) -> None:
    for media, dialect in itertools.product(("application/json", "text/event-stream", ""), PATHS):
        assert AnswerId(media, dialect).feed(b"data: " * media.startswith("text") + data + b"\n") == ""


def test_turns_in_ids() -> None:
    name = ulid()
    assert [turn_in(f"{prefix}{name}") for prefix in ("", "chatcmpl-", "msg_", "resp_", "x-")] == [name] * 4 + [
        f"x-{name}"
    ]


def test_a_forgotten_account_leaves_no_ids(place: Any) -> None:
    from etude.live.log.privacy import _erase_rows

    server, at, key, _, (config, gateway) = place
    with client(at, key) as http:
        http.post(PATHS["chat"], json={}, headers={"x-etude-user": "ann"})
        assert report(http, server.last)[0] == 200
    (row,) = rows(config, schema.answers)
    with gateway.engine.begin() as connection:
        _erase_rows(connection, row["account"])
        assert connection.scalar(sa.select(sa.func.count()).select_from(schema.answers)) == 0
