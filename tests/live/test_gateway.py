"""The gateway before applications of the test: what passes, who answers, what is kept."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import sqlalchemy as sa
from benchmarks.live_stub import TOKENS
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.cli import live_gateway
from etude.cli.main import main
from etude.config.live import LabelsConfig
from etude.corpus.sessions import SessionReport
from etude.errors import UserError
from etude.live.gateway import proxy
from etude.live.gateway.arms import Stages, assign
from etude.live.gateway.gateway import Gateway
from etude.live.gateway.upstream import Clusters
from etude.live.learn.consented import consented_threads
from etude.live.learn.window import LiveContents, cut_window
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_blobs, open_log, unseal
from etude.live.log.records import (
    Arm,
    LivePolicy,
    Release,
    ReleaseEvent,
    ReleaseStage,
    SignalKind,
    Tombstone,
    TurnContent,
    ulid,
)
from etude.live.log.tenants import create_key, revoke_key, set_policy
from etude.live.log.users import person_of
from etude.protocol.wire import ServedTokens
from tests.helpers.http_apps import answering
from tests.helpers.live import bytes_below, client, live_config, new_key, new_proxy, running_gateway, signed

CHAT = {"model": "m", "messages": [{"role": "user", "content": "keep me"}]}
ODD = b'{ "id":1,\n"choices" : [ ],"\xc3\xa9":"\\u00e9", "n": 1.0e2}\n'  # no writer of JSON would write it so
PARTS = (b"data: {}\n", b"\ndata: \xff\xfe", b"\n\n", b"data: [DONE]\n\n")


class _Upstream:
    """A server that remembers what it was asked, and keeps its turns as `etude serve` does."""

    def __init__(self, version: int = 4, status: int = 200) -> None:
        self.version, self.tokens, self.status = version, tokens_of(spans=[(0, 32, version)]), status
        self.asked: list[tuple[str, bytes, dict[str, str]]] = []
        self.go_on = threading.Event()

    def app(self) -> Starlette:
        posts = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
        return Starlette(
            routes=[
                *(Route(path, self.answer, methods=["POST"]) for path in posts),
                Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [{"id": "own-name"}]})),
                Route("/health", self.health),
                Route("/v1/turns/{name}", self.turn),
            ]
        )

    def health(self, _):
        told = {"version": self.version, "digest": f"digest {self.version}"}
        return JSONResponse(told | {"keeps_turns": True})

    def turn(self, http):
        return Response(self.tokens, media_type="application/msgpack")

    async def answer(self, http):
        body = await http.body()
        self.asked.append((http.url.path, body, dict(http.headers)))
        if b'"stream"' in body:
            return StreamingResponse(self.parts(), media_type="text/event-stream")
        own = {"x-etude-weights": str(self.version), "x-request-id": "r"}
        return Response(ODD, self.status, own, media_type="application/json")

    async def parts(self):
        yield PARTS[0]
        while not self.go_on.is_set():
            await asyncio.sleep(0.005)
        for part in PARTS[1:]:
            yield part


def tokens_of(**change) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(TOKENS, type=ServedTokens), **change))


def rows(config, table) -> list:
    engine = open_log(Path(config.folder), config.database)
    with engine.connect() as connection:
        found = list(connection.execute(sa.select(table)).mappings())
    engine.dispose()
    return found


def until(true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def upstream():
    return _Upstream()


@pytest.fixture
def url(upstream):
    with answering(upstream.app()) as url:
        yield url


def test_answers_pass_byte_for_byte_and_streams_as_they_come(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key = new_key(config)
    body = b'{"model" : "m",  "messages": [], "x": "\\u00e9"}'
    with running_gateway(config) as (gateway, at), client(at, key) as http:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens?beta=true"):
            kinds = {"content-type": "application/json", "anthropic-beta": "b", "cookie": "c", "x-etude-user": "u"}
            answer = http.post(path, content=body, headers=kinds)
            direct = httpx2.post(url + path, content=body, headers=kinds)
            assert answer.content == direct.content == ODD
            assert answer.headers["x-request-id"] == "r"
            asked, sent, headers = upstream.asked[-2]
            assert (asked, sent) == (path.partition("?")[0], body)
            assert headers["anthropic-beta"] == "b"
            assert not {"authorization", "cookie", "x-etude-user", "x-etude-turn"} & headers.keys()
            assert answer.headers["x-etude-recorded"] == "false"
            assert "x-etude-version" not in answer.headers, "no client is told its arm"
            assert len(answer.headers["x-etude-generation"]) == 26
        assert http.get("/v1/models").json()["data"] == [{"id": "own-name"}]
        whole = b""
        with http.stream("POST", "/v1/chat/completions", json={"stream": True}) as stream:
            for part in stream.iter_raw():
                whole += part
                if whole == PARTS[0]:  # the rest has not been sent yet
                    upstream.go_on.set()
        assert whole == b"".join(PARTS)
        until(lambda: not gateway.queue.waiting)
    requests = {row["count"] for row in rows(config, schema.tallies) if row["name"] == "requests"}
    assert requests == {4}, "of the key, whatever users it names: count_tokens is no turn"


def test_without_consent_nothing_of_a_request_is_kept(tmp_path, database, upstream, url):
    config = live_config(tmp_path, url, database=database)
    key, strict = new_key(config), new_key(config, "strict", consent=True, may_grant=False)
    wishes = [
        (key, None, False),
        (key, "none", False),
        (key, "maybe", False),
        (key, "train", True),
        (strict, "none", False),
        (strict, None, True),
        (strict, "train", True),
    ]
    kept = []
    with running_gateway(config) as (_, at):
        for number, (used, wish, recorded) in enumerate(wishes):
            body = CHAT | {
                "user": f"person-{number}",
                "messages": [{"role": "user", "content": f"words {number} said"}],
            }
            headers = {} if wish is None else {"x-etude-consent": wish}
            with client(at, used, **headers) as http:
                answer = http.post("/v1/chat/completions", json=body)
                assert answer.headers["x-etude-recorded"] == str(recorded).lower()
                assert ("x-etude-turn" in upstream.asked[-1][2]) == recorded
                kept += [answer.headers["x-etude-generation"]] * recorded
                signal = {
                    "response_id": answer.headers["x-etude-generation"],
                    "name": "undone",
                    "comment": f"word {number}",
                }
                assert http.post("/v1/feedback", json=signal).json()["results"][0]["status"] == "recorded"
    turns, folder = rows(config, schema.turns), tmp_path / "live"
    assert [row["id"] for row in turns] == kept
    assert {(row["reason"], row["manifest"], row["sampled_tokens"]) for row in turns} == {("", "digest 4", 32)}
    told = msgspec.msgpack.decode(TOKENS, type=ServedTokens)
    engine, accounts, opened = open_log(folder, database), Accounts(folder), b""
    with engine.connect() as connection:
        for row in turns:
            session = journal.of_ids(connection, journal.Session, [row["session"]])[row["session"]]
            secret = unseal(accounts.key(connection, session.account), open_blobs(folder).get(row["blob"]), row["blob"])
            content = msgspec.msgpack.decode(secret, type=TurnContent)
            assert (content.ids, content.logprobs, content.response) == (told.ids, told.logprobs, told.message)
            opened += content.request
    engine.dispose()
    assert sorted(n for n in range(7) if f"words {n} said".encode() in opened) == [3, 5, 6]
    tables = json.dumps([dict(row) for t in schema.metadata.tables.values() for row in rows(config, t)], default=repr)
    everything = bytes_below(folder) + tables.encode()
    assert not [n for n in range(7) if any(f"{w}{n}".encode() in everything for w in ("words ", "word ", "person-"))]
    texts = {row["subject"] for row in rows(config, schema.signals) if row["text"]}
    assert texts == set(kept), "the comment on a turn without consent is not kept"
    assert oct((folder / "keys.json").stat().st_mode)[-3:] == "600"
    assert key.encode() not in everything


def test_signals_may_come_before_their_turn_is_written(tmp_path, upstream, url, monkeypatch):
    """A client knows the turn from the head of the answer, and the log only after its tokens were fetched."""
    config = live_config(tmp_path, url)
    key, kept, go_on = new_key(config), upstream.turn, threading.Event()

    async def turn(http):
        await asyncio.to_thread(go_on.wait)
        return kept(http)

    upstream.turn = turn
    with (
        answering(upstream.app()) as slow,
        running_gateway(live_config(tmp_path, slow)) as (gateway, at),
        client(at, key, **{"x-etude-consent": "train"}) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        headers = http.post("/v1/chat/completions", json=CHAT).headers
        signals = [
            {"response_id": headers["x-etude-generation"], "name": "undone", "event_id": "1"},
            {"response_id": headers["x-etude-session"], "name": "undone", "event_id": "2"},
        ]
        told = [pool.submit(http.post, "/v1/feedback", json=signal) for signal in signals]
        time.sleep(0.3)
        assert not any(future.done() for future in told), "both wait for the turn"
        assert http.post("/v1/feedback", json={"response_id": ulid(), "name": "undone"}).status_code == 404
        go_on.set()
        assert [future.result().json()["results"][0]["status"] for future in told] == ["recorded"] * 2
        assert not gateway.recorder.open
        monkeypatch.setattr("etude.live.gateway.routes.SIGNAL_SECONDS", 0.2)
        with http.stream("POST", "/v1/chat/completions", json={"stream": True}) as stream:
            signal = {"response_id": stream.headers["x-etude-generation"], "name": "undone"}
            assert http.post("/v1/feedback", json=signal).status_code == 503, "the answer has not ended"
            upstream.go_on.set()
            stream.read()
        until(lambda: not gateway.recorder.open)
        assert http.post("/v1/feedback", json=signal).status_code == 200


def test_keys_hosts_and_rates_are_checked_before_anything_else(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key, slow = new_key(config), new_key(config, "slow", requests_per_minute=60)
    with running_gateway(config) as (gateway, at), client(at, key) as http, httpx2.Client(base_url=at) as nobody:
        for method, path in (("POST", "/v1/messages"), ("GET", "/v1/models"), ("POST", "/v1/feedback"), ("GET", "/x")):
            refused = nobody.request(method, path, json={} if method == "POST" else None)
            assert refused.status_code == 401, path
        assert nobody.post("/v1/messages", json={}).json()["type"] == "error", "in Anthropic's shape"
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert http.post("/v1/chat/completions", content=b"{}").status_code == 415
        assert (nobody.get("/health").status_code, nobody.get("/metrics").status_code) == (200, 200)
        with client(at, slow) as limited:
            statuses = [limited.post("/v1/chat/completions", json=CHAT).status_code for _ in range(12)]
            assert statuses == [200] * 10 + [429] * 2
            assert int(limited.post("/v1/chat/completions", json=CHAT).headers["retry-after"]) >= 1
        revoke_key(gateway.engine, "acme", "key-acme")
        until(lambda: http.get("/v1/models").status_code == 401)
    assert len(upstream.asked) == 10


def test_a_key_has_so_many_requests_at_a_time_and_servers_are_told_whose_they_are(tmp_path, upstream, url, monkeypatch):
    monkeypatch.setattr(proxy, "MAX_OPEN", 2)
    config = live_config(tmp_path, url)
    key, other = new_key(config), new_key(config, "other")
    with running_gateway(config) as (_, gateway), client(gateway, key) as http, client(gateway, other) as others:
        with ExitStack() as streams:
            for _ in range(2):
                opened = http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
                assert streams.enter_context(opened).status_code == 200
            refused = http.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            forged = {"x-etude-asker": "key of another/1"}
            assert others.post("/v1/chat/completions", json=CHAT, headers=forged).status_code == 200
            upstream.go_on.set()
        until(lambda: http.post("/v1/chat/completions", json=CHAT).status_code == 200)
    groups, members = zip(*(headers["x-etude-asker"].split("/") for *_, headers in upstream.asked), strict=True)
    assert groups[0] == groups[1] == groups[-1] != groups[2]
    assert members[0] != members[1]
    assert "key of another" not in groups


def test_a_server_that_is_away_is_passed_over(tmp_path, upstream, url):
    with answering(_Upstream(status=503).app()) as busy, answering(Starlette()) as gone_soon:
        gone = gone_soon
    with answering(_Upstream(status=503).app()) as busy:
        clusters = [
            {"name": "a", "urls": [gone, busy], "store": str(tmp_path)},
            {"name": "b", "urls": [url], "store": str(tmp_path)},
        ]
        config = live_config(tmp_path, clusters=clusters, model="house")
        key, secret = new_proxy(config)
        with running_gateway(config) as (_, at), client(at, key) as http:
            for number in range(8):  # accounts, which have servers of their own
                body = {"model": "house", "n": 1, "messages": []}
                answer = http.post("/v1/chat/completions", json=body, headers=signed(secret, str(number)))
                assert (answer.status_code, answer.content) == (200, ODD)
            assert json.loads(upstream.asked[-1][1]) == {"model": "own-name", "n": 1, "messages": []}
            assert http.get("/v1/models").json()["data"][0]["id"] == "house"
            healthy = {s["url"]: s["healthy"] for s in http.get("/health").json()["servers"]}
            assert healthy == {gone: False, busy: True, url: True}
    counted = {row["name"] for row in rows(config, schema.tallies)}
    assert "failovers" in counted
    assert "errors" not in counted
    nobody = live_config(tmp_path / "none", gone)
    with running_gateway(nobody) as (_, at), client(at, new_key(nobody)) as http:
        until(lambda: http.get("/v1/models").status_code != 401)
        away = http.post("/v1/chat/completions", json=CHAT)
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert http.get("/health").status_code == 503


def test_a_waiting_request_leaves_a_server_that_stops(tmp_path, upstream, url, monkeypatch):
    monkeypatch.setattr("etude.live.gateway.upstream._HEALTH_SECONDS", 0.2)
    monkeypatch.setattr("etude.live.gateway.upstream._PAUSE_SECONDS", 0.1)
    stopped = threading.Event()

    async def hang(http):
        while stopped.is_set():
            await asyncio.sleep(0.01)
        return JSONResponse({"version": 1, "digest": "d", "keeps_turns": True})

    async def never(http):
        stopped.set()
        await asyncio.sleep(60)

    app = Starlette(routes=[Route("/health", hang), Route("/v1/chat/completions", never, methods=["POST"])])
    with answering(app) as paused:
        config = live_config(tmp_path, paused, url)
        key, secret = new_proxy(config)
        with running_gateway(config) as (gateway, at), client(at, key) as http:
            first = gateway.clusters.of_arm[Arm.CONTROL][0]
            users = (str(n) for n in range(1000))
            user = next(
                u for u in users if gateway.clusters.order(Arm.CONTROL, gateway.accounts.name("acme", u))[0] is first
            )
            answer = http.post("/v1/chat/completions", json=CHAT, headers=signed(secret, user))
            assert (answer.status_code, answer.content) == (200, ODD)
            assert stopped.is_set(), "the request came to the server that stops"
            stopped.clear()


def test_an_answer_that_breaks_off_is_not_taken_for_whole(tmp_path):
    async def answer(http):
        async def parts():
            yield b"data: 1\n\n"
            raise RuntimeError

        return StreamingResponse(parts())

    app = Starlette(
        routes=[Route("/health", lambda _: JSONResponse({})), Route("/v1/messages", answer, methods=["POST"])]
    )
    with answering(app) as url:
        config = live_config(tmp_path, url)
        with running_gateway(config) as (_, at), client(at, new_key(config)) as http:
            until(lambda: http.get("/v1/models").status_code != 401)
            with pytest.raises(httpx2.RemoteProtocolError):
                http.post("/v1/messages", json=CHAT)
    assert {row["name"] for row in rows(config, schema.tallies)} == {"requests", "seconds", "errors"}


@pytest.mark.parametrize("released", [1, 0])
def test_arms_are_sticky_and_a_rollback_ends_the_canary(tmp_path, upstream, url, released):
    """`released`: number of the control's release; 0 before anything was released."""
    new = _Upstream(version=9)
    with answering(new.app()) as canary:
        clusters = [
            {
                "name": "a",
                "urls": [url],
                "store": str(tmp_path),
                "canary_urls": [canary],
                "canary_store": str(tmp_path / "c"),
            }
        ]
        config = live_config(tmp_path, clusters=clusters, canary={"holdback": 0.0})
        (key, secret), engine = new_proxy(config), open_log(tmp_path / "live", None)

        def stage(release, sequence, stage, share):
            event = ReleaseEvent(
                release=release, sequence=sequence, stage=stage, share=share, reason="", decided_by="t", at=1
            )
            with engine.begin() as connection:
                journal.add(connection, [event])

        with engine.begin() as connection:
            for number, version in ((1, 4), (2, 9)):
                unset = {"parent": None, "anchor": None, "report": None, "window": None}
                journal.add(
                    connection, [Release(number=number, store="s", version=version, manifest="m", at=1, **unset)]
                )
        if released:
            stage(1, 1, ReleaseStage.RELEASED, 1.0)
        stage(2, 1, ReleaseStage.CANARY, 0.5)

        def asked(http):
            turns = {}
            for n in range(12):
                headers = {**signed(secret, f"u{n}"), "x-etude-consent": "train"}
                turns[n] = http.post("/v1/messages", json=CHAT, headers=headers).headers["x-etude-generation"]
            until(lambda: {row["id"] for row in rows(config, schema.turns)} >= set(turns.values()))
            by_turn = {row["id"]: row["release"] for row in rows(config, schema.turns)}
            return {n: by_turn[turn] for n, turn in turns.items()}

        with running_gateway(config) as (_, at), client(at, key) as http:
            first = asked(http)
            assert set(first.values()) == {released, 2}
            assert asked(http) == first
            new.status = 503  # the canary's server is busy: the control's answers, which says nothing of the canary
            assert set(asked(http).values()) == {released}
            new.status = 200
            stage(2, 2, ReleaseStage.ROLLED_BACK, 0.0)
            until(lambda: set(asked(http).values()) == {released}, 5.0)
        engine.dispose()
    counters = rows(config, schema.tallies)
    assert not [row for row in counters if row["name"] in ("errors", "strays")]
    of_canary = [row for row in counters if row["arm"] == "canary" and row["name"] == "requests"]
    of_each = Counter(release for release in first.values() if release == 2)[2]
    by_release = {n: sum(row["count"] for row in of_canary if row["release"] == n) for n in (2, released)}
    assert by_release[2] >= 2 * of_each
    assert by_release[released] == of_each
    assert {row["release"] for row in rows(config, schema.turns)} == {released, 2}
    sessions = rows(config, schema.sessions)
    assert {(row["arm"], row["release"], row["propensity"]) for row in sessions} == {
        ("control", released, 0.5),
        ("canary", 2, 0.5),
        ("control", released, 1.0),
    }


def test_shares_of_the_arms_are_those_that_were_asked_for(tmp_path):
    accounts = Accounts(tmp_path / "live")
    names = [accounts.name("t", str(n)) for n in range(20_000)]
    small, large = ({a: assign(accounts, Stages(1, 2, share), 0.02, a) for a in names} for share in (0.05, 0.25))
    for assigned, share in ((small, 0.05), (large, 0.25)):
        for arm, wanted in ((Arm.HOLDBACK, 0.02), (Arm.CANARY, 0.98 * share), (Arm.CONTROL, 0.98 * (1 - share))):
            found = [a for a in assigned.values() if a.arm == arm]
            assert found[0].propensity == pytest.approx(wanted)
            # Five standard deviations of a binomial share: one such test in a million fails by chance.
            assert abs(len(found) / len(names) - wanted) < 5 * (wanted * (1 - wanted) / len(names)) ** 0.5
    assert all(large[a].arm == small[a].arm for a in names if small[a].arm != Arm.CONTROL), "a later stage only adds"
    other = {a: assign(accounts, Stages(2, 3, 0.25), 0.02, a).arm for a in names}
    both = sum(other[a] == large[a].arm == Arm.CANARY for a in names)
    assert 0.04 < both / len(names) < 0.08, "another release draws anew: 0.06 are in both canaries"


def test_signals_come_in_two_shapes_and_wrong_ones_are_refused_whole(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key, other = new_key(config), new_key(config, "other")
    with running_gateway(config) as (_, at), client(at, key, **{"x-etude-consent": "train"}) as http:
        answer = http.post("/v1/chat/completions", json=CHAT)
        turn, session = answer.headers["x-etude-generation"], answer.headers["x-etude-session"]
        edit = {
            "id": ulid(),
            "path": "src/secret_name.py",
            "base": "b",
            "old_lines": [0, 2],
            "new": "n",
            "characters": 9,
        }
        shown = http.post("/v1/suggestions", json={"turn": turn, "suggestions": [edit]})
        assert (shown.status_code, shown.json()["results"][0]["status"]) == (200, "recorded")
        events = [
            {"response_id": edit["id"], "name": "survived", "value": 0.75, "horizon": 1800, "source": "git"},
            {"response_id": turn, "name": "correction", "comment": "def better(): ...", "source": "explicit"},
            {"response_id": session, "name": "rating", "value": False, "source": "explicit", "event_id": "r1"},
            {
                "name": "gen_ai.evaluation.result",
                "attributes": {
                    "gen_ai.response.id": turn,
                    "gen_ai.evaluation.name": "tests",
                    "gen_ai.evaluation.score.value": -0.5,
                },
            },
        ]
        for again in ("recorded", "duplicate"):
            told = http.post("/v1/feedback", json=events)
            assert [r["status"] for r in told.json()["results"]] == [again] * 4
        for other_one in ({"response_id": turn, "name": "rating"}, {"response_id": session, "name": "ended"}):
            told = http.post("/v1/feedback", json=[other_one | {"value": 1.0, "event_id": "r1"}, events[0]])
            assert (told.status_code, [r["status"] for r in told.json()["results"]]) == (409, ["conflict", "duplicate"])
        with client(at, other) as stranger:
            told = stranger.post("/v1/feedback", json=events[:1])
            assert (told.status_code, told.json()["results"][0]["status"]) == (404, "unknown")
        before = len(rows(config, schema.signals))
        for wrong in (
            {"name": "survived", "value": 2.0, "horizon": 3},
            {"name": "survived", "value": 1},
            {"name": "nonsense"},
            {"response_id": "x", "name": "undone"},
            {"name": "undone", "mood": 1},
            {"name": "rating", "value": 2.0},
            {"inference_id": turn, "metric_name": "undone"},
            {"name": "correction"},
            {"name": "undone", "source": "rumour"},
            {"name": "undone", "horizon": True},
            {"name": "undone", "value": 2},
        ):
            whole = {"response_id": turn} | wrong
            assert (
                http.post("/v1/feedback", json=[{"response_id": turn, "name": "undone"}, whole]).status_code == 400
            ), wrong
        for wrong in ([], ["x"], 3, [{"response_id": turn, "name": "undone"}] * 257):
            assert http.post("/v1/feedback", json=wrong).status_code == 400, wrong
        for wrong in (
            {},
            {"turn": turn, "suggestions": []},
            {"turn": turn, "suggestions": [edit | {"id": "1"}]},
            {"turn": turn, "suggestions": [edit | {"characters": -1}]},
        ):
            assert http.post("/v1/suggestions", json=wrong).status_code == 400, wrong
        assert len(rows(config, schema.signals)) == before
    found = {row["kind"]: (row["subject"], row["value"], row["source"]) for row in rows(config, schema.signals)}
    assert found == {
        SignalKind.SURVIVED: (edit["id"], 0.75, "git"),
        SignalKind.CORRECTION: (turn, 1.0, "explicit"),
        SignalKind.RATING: (session, -1.0, "explicit"),
        SignalKind.TESTS: (turn, -0.5, "judge"),
    }
    assert b"secret_name" not in bytes_below(tmp_path / "live")


def test_the_next_request_tells_what_became_of_an_answer(tmp_path, upstream, url):
    said = json.dumps({"role": "assistant", "content": "Shall I?"}).encode()
    upstream.tokens = tokens_of(message=said)
    config = live_config(tmp_path, url)
    key, first = new_key(config, consent=True), [{"role": "user", "content": "Fix the loop"}]
    second = [
        *first,
        {"role": "assistant", "content": "Shall I?"},
        {"role": "user", "content": "That is wrong, undo it"},
    ]
    with running_gateway(config) as (gateway, at), client(at, key, **{"x-etude-session": "s"}) as http:
        turns = []
        for messages, kind in ((first, "main"), (first, "side"), (second, "main"), (second, "main")):
            answer = http.post("/v1/chat/completions", json={"messages": messages}, headers={"x-etude-kind": kind})
            turns.append(answer.headers["x-etude-generation"])
            until(lambda: not gateway.recorder.open)
    told = {(row["subject"], row["kind"], row["text"] is None) for row in rows(config, schema.signals)}
    assert told == {
        *((turns[n], "question", True) for n in (0, 2, 3)),
        (turns[2], "followup", False),
        (turns[2], "answered", True),
        (turns[3], "retry", True),
    }


def test_who_was_forgotten_consents_to_nothing(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    with running_gateway(config) as (gateway, at), client(at, key, **{"x-etude-user": "ann"}) as http:
        assert http.post("/v1/messages", json=CHAT).headers["x-etude-recorded"] == "true"
        account = gateway.accounts.name("acme", "ann")
        with gateway.engine.begin() as connection:
            journal.add(
                connection, [Tombstone(tenant="acme", account=account, at=journal.stamp(connection), versions=())]
            )
        until(lambda: http.post("/v1/messages", json=CHAT).headers["x-etude-recorded"] == "false", 5.0)
        granted = http.post("/v1/messages", json=CHAT, headers={"x-etude-consent": "train"})
        assert granted.headers["x-etude-recorded"] == "false"


def test_what_is_not_known_exactly_is_recorded_with_a_reason(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    changes = [
        (None, "no_tokens"),
        ({"ids": b"", "logprobs": b""}, "no_tokens"),
        ({"plain": False}, "sampling"),
        ({"choices": 2}, "several_choices"),
        ({}, ""),
    ]
    with running_gateway(config) as (gateway, at), client(at, new_key(config, consent=True)) as http:
        until(lambda: http.get("/v1/models").status_code != 401)
        for change, _ in changes:
            upstream.tokens = b"?" if change is None else tokens_of(**change)
            assert http.post("/v1/chat/completions", json=CHAT).content == ODD
            until(lambda: not gateway.recorder.open)
    told = [(turn["reason"], turn["blob"] is None) for turn in rows(config, schema.turns)]
    assert told == [(reason, reason == "no_tokens") for _, reason in changes]


def test_drained_clusters_are_sent_nothing_and_a_canary_of_all_is_everywhere(tmp_path):
    clusters = [
        {
            "name": name,
            "urls": [f"http://{name}:1"],
            "store": str(tmp_path / name),
            "canary_urls": [f"http://{name}:2"],
            "canary_store": str(tmp_path / f"{name}-canary"),
            "holdback_urls": [f"http://{name}:3"],
            "holdback_store": str(tmp_path / f"{name}-holdback"),
        }
        for name in ("east", "west")
    ]
    servers = Clusters(live_config(tmp_path, clusters=clusters).clusters)

    def asked(arm: Arm, stages: Stages) -> set[str]:
        return {server.url.removeprefix("http://") for server in servers.order(arm, "someone", stages)}

    assert asked(Arm.CONTROL, Stages(1)) == {"east:1", "west:1"}
    assert servers.order(Arm.HOLDBACK, "someone", Stages(1))[0].url.endswith(":3")
    drained = frozenset({("east", "control"), ("west", "canary")})
    assert asked(Arm.CONTROL, Stages(1, drained=drained)) == {"west:1"}
    assert asked(Arm.CANARY, Stages(1, 2, 0.5, drained=drained)) == {"east:2", "west:1"}
    both = frozenset({("east", "control"), ("west", "control")})
    assert asked(Arm.CONTROL, Stages(1, drained=both)) == {"east:1", "west:1"}  # rather than no answer
    first = {servers.order(Arm.CANARY, f"a{n}", Stages(1, 2, 1.0))[0].url[-2:] for n in range(50)}
    assert first == {":1", ":2"}


def test_a_second_header_that_refuses_is_heard_and_a_body_that_cannot_be_read_is_not_kept(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    with running_gateway(config) as (_, at), client(at, key) as http:
        both = [("x-etude-consent", "train"), ("x-etude-consent", "none"), ("content-type", "application/json")]
        empty = {"x-etude-consent": "", "content-type": "application/json"}
        body = json.dumps(CHAT).encode()
        for headers, content in ((both, body), (empty, body), ({"content-type": "application/json"}, b'{"n": NaN}')):
            answer = http.post("/v1/chat/completions", content=content, headers=headers)
            assert (answer.status_code, answer.headers["x-etude-recorded"]) == (200, "false")
        assert http.post("/v1/chat/completions", json=CHAT).headers["x-etude-recorded"] == "true"
        wrong = http.post("/v1/chat/completions", json=CHAT, headers={"x-etude-kind": "sidee"})
        assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, "X-Etude-Kind is main, side or bot")


def test_a_name_is_the_same_in_a_header_and_in_a_body(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    with running_gateway(config) as (gateway, at), client(at, key) as http:
        for user in ("Zoë".encode(), "Zoë".encode("latin-1")):
            http.post("/v1/chat/completions", json=CHAT, headers=[(b"x-etude-user", user)])
        http.post("/v1/chat/completions", json=CHAT | {"user": "Zoë"})
        account = gateway.accounts.name("acme", "Zoë")  # as `etude live forget` names it
    assert {row["account"] for row in rows(config, schema.sessions)} == {account}


def test_background_work_goes_on_after_a_failure_and_says_so_once(tmp_path, upstream, url, monkeypatch, capfd):
    monkeypatch.setattr("etude.live.gateway.gateway.REFRESH_SECONDS", 0.02)
    monkeypatch.setattr("etude.live.gateway.upstream._PAUSE_SECONDS", 0.02)
    config = live_config(tmp_path, url)
    key, failures = new_key(config), []

    def broken(_):
        failures.append(1)
        raise RuntimeError("dictionary changed size")

    with answering(Starlette()) as gone:
        pass
    config = live_config(tmp_path, url, gone)
    with running_gateway(config) as (gateway, at), client(at, key) as http:
        with monkeypatch.context() as patch:
            patch.setattr("etude.live.gateway.view.read_stages", broken)
            until(lambda: len(failures) > 2)
        revoke_key(gateway.engine, "acme", "key-acme")
        until(lambda: http.get("/v1/models").status_code == 401)
    told = capfd.readouterr().err
    assert told.count("the log cannot be read") == 1
    assert told.count(f"the server {gone} of cluster a does not answer") == 1


def test_tools_with_any_schema_cost_no_turn(tmp_path, upstream, url):
    call = {"type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
    upstream.tokens = tokens_of(message=json.dumps({"role": "assistant", "content": "", "tool_calls": [call]}).encode())
    config = live_config(tmp_path, url)
    schemas = [{"properties": {"a": True}}, {"properties": [1]}, {"required": 3}, {"required": [[1]]}, 4]
    key = new_key(config, consent=True)
    with running_gateway(config) as (gateway, at), client(at, key) as http:
        for parameters in schemas:
            tool = {"type": "function", "function": {"name": "run", "parameters": parameters}}
            http.post("/v1/chat/completions", json=CHAT | {"tools": [tool]})
            until(lambda: not gateway.recorder.open)
    assert len(rows(config, schema.turns)) == len(schemas)


def test_a_version_that_came_after_the_last_look_is_known_by_its_digest(tmp_path, upstream, url, monkeypatch):
    monkeypatch.setattr("etude.live.gateway.upstream._PAUSE_SECONDS", 1000.0)
    config = live_config(tmp_path, url)
    key = new_key(config, consent=True)
    with running_gateway(config) as (gateway, at), client(at, key) as http:
        upstream.version, upstream.tokens = 5, tokens_of(spans=[(0, 32, 5)])
        http.post("/v1/chat/completions", json=CHAT)
        until(lambda: not gateway.recorder.open)
    assert [row["manifest"] for row in rows(config, schema.turns)] == ["digest 5"]


def test_numbers_of_any_size_are_refused(tmp_path, upstream, url):
    config = live_config(tmp_path, url)
    key = new_key(config)
    with running_gateway(config) as (_, at), client(at, key) as http:
        for number in ("1" + "0" * 400, "-1" + "0" * 30):
            for field in ("value", "horizon", "observed_at", "confidence"):
                body = f'{{"response_id": "{ulid()}", "name": "undone", "{field}": {number}}}'
                answer = http.post("/v1/feedback", content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 400, (field, answer.text)


def test_names_and_days_of_tenants_are_checked(tmp_path):
    engine = open_log(tmp_path / "live", None)
    with pytest.raises(UserError, match="no name of a key"):
        create_key(engine, "acme", "two words")
    for days in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(UserError, match="days above 0"):
            set_policy(engine, "acme", LivePolicy(raw_days=days))
    with pytest.raises(UserError, match="'aws' is no personal data"):
        set_policy(engine, "acme", LivePolicy(keep=("home", "aws")))
    engine.dispose()


def test_a_log_is_not_opened_with_other_keys(tmp_path, upstream, url):
    """Its accounts would have other names: whoever was forgotten would be recorded again."""
    config = live_config(tmp_path, url)
    with running_gateway(config):
        pass
    with running_gateway(config):
        (tmp_path / "live/keys.json").rename(tmp_path / "kept.json")
    with pytest.raises(UserError, match="restore that file"):
        Gateway(config)


def test_wrong_words_name_their_own_help_and_missing_stores_are_told(tmp_path, capsys):
    for words in (["key", "list", "x.toml", "--bad"], ["serve", "x.toml", "--bad"], ["status", "x.toml", "--bad"]):
        with pytest.raises(SystemExit):
            main(["live", *words])
        action = " ".join(words[: 2 if words[0] == "key" else 1])
        assert f"see `etude live {action} --help`" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    clusters = [
        {"name": name, "urls": ["http://127.0.0.1:1"], "store": str(tmp_path / name)} for name in ("empty", "none")
    ]
    config = live_config(tmp_path, clusters=clusters)
    told = live_gateway.missing_stores(config)
    assert told == {str(tmp_path / "empty"): "holds no version", str(tmp_path / "none"): "is not there"}
    assert not (tmp_path / "none").exists()


# Who is who -----------------------------------------------------------------------------------------------------------


def sessions_of(tmp_path, url, send) -> list[dict[str, Any]]:
    """The sessions that requests leave in the log: `send` makes them with a client of a key, and of a proxy's."""
    config = live_config(tmp_path, url)
    key, (proxy, secret) = new_key(config, consent=True), new_proxy(config, consent=True)
    with running_gateway(config) as (_, at), client(at, key) as own, client(at, proxy) as firm:
        send(own, firm, secret)
    return rows(config, schema.sessions)


def test_names_that_a_key_invents_are_one_account_and_signed_names_are_accounts(tmp_path, url):
    def send(own, firm, secret):
        for n in range(20):
            assert own.post("/v1/messages", json=CHAT | {"user": f"u{n}"}).status_code == 200
            assert firm.post("/v1/messages", json=CHAT, headers=signed(secret, f"u{n}")).status_code == 200
        firm.post("/v1/messages", json=CHAT, headers={"x-etude-user": "unsigned"})
        firm.post("/v1/messages", json=CHAT)

    sessions = sessions_of(tmp_path, url, send)
    names = Counter(row["account"] for row in sessions)
    assert len(names) == 22
    assert sorted(names.values())[-20:] == [2] * 20, "a name is the same user with any key of the tenant"
    counts = Counter(row["voucher"] for row in sessions)
    assert sorted(counts.values()) == [1] * 20 + [2, 20]
    by_voucher = {voucher: {row["arm"] for row in sessions if row["voucher"] == voucher} for voucher in counts}
    assert all(len(arms) == 1 for arms in by_voucher.values())


def test_a_wrong_signature_is_refused_and_a_key_without_a_proxy_signs_nothing(tmp_path, url):
    def send(own, firm, secret):
        right = signed(secret, "ann")
        assert right["x-etude-user-signature"] == hmac.new(secret.encode(), b"ann", "sha256").hexdigest()
        for headers in (right | {"x-etude-user": "bob"}, {"x-etude-user-signature": "0" * 64}, signed("ets_0", "ann")):
            assert firm.post("/v1/messages", json=CHAT, headers=headers).status_code == 401
        assert own.post("/v1/messages", json=CHAT, headers=right).status_code == 401
        assert firm.post("/v1/messages", json=CHAT, headers=right).status_code == 200

    assert len(sessions_of(tmp_path, url, send)) == 1


HASH, SESSIONS = "5dd07c33" * 8, ("d2e70091-3007-41a3-a916-cb8b0d3098de", "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe")


@pytest.mark.parametrize(
    ("user", "person"),
    [
        (f"user_{HASH}_account__session_%s", f"user_{HASH}_account_"),
        (f"user_{HASH}_account_11111111-2222-3333-4444-555555555555_session_%s", None),
        ('{"device_id":"d1","account_uuid":"","session_id":"%s"}', "device d1"),
        ('{"device_id":"d1","account_uuid":"a1","session_id":"%s"}', "account a1, device d1"),
        ('{"session_id":"%s"}', ""),
    ],
)
def test_agents_that_put_their_session_into_the_user_are_known_by_their_person(tmp_path, url, user, person):
    """Claude Code's two forms, and an agent that sends a session alone: one user, and a session for each."""
    assert {person_of(user % session)[1] for session in SESSIONS} == set(SESSIONS)
    if person is not None:
        assert {person_of(user % session)[0] for session in SESSIONS} == {person}

    def send(own, firm, secret):
        for session in (*SESSIONS, SESSIONS[0]):
            own.post("/v1/messages", json=CHAT | {"metadata": {"user_id": user % session}})

    found = sessions_of(tmp_path, url, send)
    assert (len(found), len({row["account"] for row in found})) == (2, 1)


def test_a_user_is_forgotten_by_any_of_the_names_of_its_sessions(tmp_path):
    accounts = Accounts(tmp_path / "live")
    one, other = (accounts.name("acme", f"user_{HASH}_account__session_{session}") for session in SESSIONS)
    assert one == other
    assert accounts.name("acme", '{"session_id": 1}') != accounts.name("acme", "{")
    assert person_of('{"a": 1}') == ('{"a": 1}', "")


def test_a_canary_whose_server_is_away_fails_by_its_strays(tmp_path, upstream, url):
    """The control answers in its place; what it answers is no counter of the release on trial."""
    dead = "http://127.0.0.1:9"
    arms = {"canary_urls": [dead], "canary_store": str(tmp_path / "c")}
    config = live_config(tmp_path, clusters=[{"name": "a", "urls": [url], "store": str(tmp_path), **arms}],
                         canary={"holdback": 0.0})  # fmt: skip
    key, engine = new_key(config), open_log(tmp_path / "live", None)
    unset = {"parent": None, "anchor": None, "report": None, "window": None}
    event = {"sequence": 0, "stage": ReleaseStage.CANARY, "share": 0.99999, "reason": "", "decided_by": "t", "at": 1}
    with engine.begin() as connection:
        journal.add(connection, [Release(number=2, store="s", version=9, manifest="m", at=1, **unset)])
        journal.add(connection, [ReleaseEvent(release=2, **event)])
    engine.dispose()
    with running_gateway(config) as (_, at), client(at, key) as http:
        assert http.post("/v1/messages", json=CHAT).status_code == 200
    counted = {(row["name"], row["release"]) for row in rows(config, schema.tallies) if row["arm"] == "canary"}
    assert {("strays", 2), ("requests", 0), ("seconds", 0)} <= counted
    assert ("requests", 2) not in counted


@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_of_other_servers_are_kept_as_text(tmp_path, is_stream, capfd):
    """Of a server that keeps no turns the text is known, and not the tokens. It needs no `/health`."""
    answer = {"id": "chatcmpl-other", "choices": [{"message": {"content": "use an index"}, "finish_reason": "stop"}]}
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("use ", "an index")]
    events = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)

    async def answered(http):
        if (await http.json()).get("stream"):
            end = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
            return StreamingResponse(iter([events[:30], events[30:], end]), media_type="text/event-stream")
        return JSONResponse(answer)

    models = Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "their-name"}]}))
    other = Starlette(routes=[Route("/v1/chat/completions", answered, methods=["POST"]), models])
    with answering(other) as url:
        config = live_config(tmp_path, url)
        with running_gateway(config) as (gateway, at), client(at, new_key(config, consent=True)) as http:
            until(lambda: http.get("/v1/models").status_code != 401)
            (state,) = http.get("/health").json()["servers"]
            assert (state["healthy"], state["tokens"]) == (True, False)
            assert capfd.readouterr().err.count(f"{url} of cluster a keeps no turns") == 1
            http.post("/v1/chat/completions", json=CHAT | {"stream": is_stream}).raise_for_status()
            until(lambda: not gateway.recorder.open)
    (turn,) = rows(config, schema.turns)
    assert (turn["reason"], turn["stop"], turn["sampled_tokens"]) == ("no_tokens", "stop", 0)
    engine, folder = open_log(Path(config.folder), None), Path(config.folder)
    contents, report = LiveContents(engine, Accounts(folder), open_blobs(folder)), SessionReport()
    (thread,) = consented_threads(engine, contents, report)
    assert thread.messages[-1] == {"role": "assistant", "content": "use an index", "weight": 1}
    exits = cut_window(engine, contents, LabelsConfig(delay_seconds=1e-6, window_seconds=1e-6)).exits
    assert [each.reason for each in exits] == ["no_tokens"]
    engine.dispose()


def test_a_long_answer_of_another_server_passes_and_its_text_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "MAX_COPY", 1000)
    body = msgspec.json.encode({"choices": [{"message": {"content": "x" * 2000}, "finish_reason": "stop"}]})
    answered = lambda _: Response(body, media_type="application/json")  # noqa: E731
    with answering(Starlette(routes=[Route("/v1/chat/completions", answered, methods=["POST"])])) as url:
        config = live_config(tmp_path, url)
        with running_gateway(config) as (gateway, at), client(at, new_key(config, consent=True)) as http:
            until(lambda: http.get("/v1/models").status_code != 401)
            assert http.post("/v1/chat/completions", json=CHAT).content == body
            until(lambda: not gateway.recorder.open)
    (turn,) = rows(config, schema.turns)
    assert (turn["reason"], turn["blob"]) == ("no_tokens", None)
