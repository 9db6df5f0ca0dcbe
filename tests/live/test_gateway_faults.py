"""Kills, full disks, databases that are away, and load."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import time

import pytest
import sqlalchemy as sa
from benchmarks.live_gateway import ask, kill_rounds, live_folder, load, process, start, wait_for
from benchmarks.live_stub import stub

from etude.live.gateway.upstream import Server
from etude.live.log import schema
from etude.live.log.accounts import open_log
from etude.live.log.records import ulid
from tests.helpers.http_apps import answering
from tests.helpers.live import client, live_config, new_key, running_gateway
from tests.helpers.postgres import INSTALLED, PostgresServer

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def column(folder, database, of) -> list:
    engine = open_log(folder, database)
    with engine.connect() as connection:
        found = list(connection.scalars(sa.select(of)))
    engine.dispose()
    return found


@pytest.mark.slow
@pytest.mark.smoke
def test_a_killed_gateway_keeps_every_acknowledged_signal(tmp_path, database):
    with answering(stub()) as url:
        lost, told = kill_rounds(tmp_path, url, kills=2, seed=5, database=database)
    assert lost == 0
    assert told > 0


@pytest.mark.release
def test_twelve_kills_lose_no_acknowledged_signal(tmp_path, database):
    with answering(stub()) as url:
        lost, told = kill_rounds(tmp_path, url, kills=12, seed=6, database=database)
    assert lost == 0
    assert told > 100


@pytest.mark.slow
def test_a_full_disk_costs_records_and_never_an_answer(tmp_path):
    """Files of this gateway hold at most 400 KiB: first a large content finds no room, then the database does not."""
    with answering(stub()) as url:
        config, key = live_folder(tmp_path, url)
        serve = shlex.join([sys.executable, "-m", "etude.cli.main", "live", "serve", str(config), "--ready-file"])
        child, ready = start(tmp_path, "full", ["bash", "-c", f'ulimit -f 400; exec {serve} "$0"'])
        acknowledged = set()
        try:
            with client(wait_for(ready, child), key) as http:
                turn = http.post("/v1/chat/completions", json=CHAT).headers["x-etude-generation"]
                deadline = time.monotonic() + 60
                while "etude_live_turns_total 1" not in http.get("/metrics").text:
                    assert time.monotonic() < deadline
                large = {"messages": [{"role": "user", "content": "word " * 100_000}]}
                assert http.post("/v1/chat/completions", json=large).status_code == 200
                while (answer := _told(http, turn, acknowledged)).status_code != 503:
                    assert time.monotonic() < deadline
                assert int(answer.headers["retry-after"]) >= 1
                assert acknowledged
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
                drops = http.get("/health").json()["drops"]
                assert drops["disk_full"] >= 1
                assert f'drops_total{{reason="disk_full"}} {drops["disk_full"]}' in http.get("/metrics").text
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    held = set(column(tmp_path / "live", None, schema.signals.c.event))
    assert acknowledged <= held


def _told(http, turn, acknowledged):
    events = [{"response_id": turn, "name": "undone", "event_id": ulid()} for _ in range(100)]
    answer = http.post("/v1/feedback", json=events)
    if answer.status_code == 200:
        acknowledged.update(event["event_id"] for event in events)
    return answer


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="no PostgreSQL server is installed")
def test_a_database_that_is_away_costs_records_and_never_an_answer(tmp_path):
    server = PostgresServer()
    try:
        with answering(stub()) as url:
            config = live_config(tmp_path, url, database=server.url)
            key = new_key(config, consent=True)
            with running_gateway(config) as (gateway, at), client(at, key) as http:
                turn = http.post("/v1/chat/completions", json=CHAT).headers["x-etude-generation"]
                while not gateway.queue.counters.turns:
                    time.sleep(0.01)
                early, late = ({"response_id": turn, "name": "undone", "event_id": ulid()} for _ in range(2))
                assert http.post("/v1/feedback", json=early).status_code == 200
                server.stop("immediate")
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
                refused = http.post("/v1/feedback", json=late)
                assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
                deadline = time.monotonic() + 60
                while not gateway.queue.counters.drops:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                server.start()
                while http.post("/v1/feedback", json=late).status_code != 200:
                    assert time.monotonic() < deadline
                assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        events = set(column(tmp_path / "live", server.url, schema.signals.c.event))
        # The gateway itself sees that the same question is asked again, which it tells where the log can be reached.
        assert {e for e in events if not e.startswith("gateway ")} == {e["event_id"] for e in (early, late)}
        assert column(tmp_path / "live", server.url, schema.drops.c.reason) == ["database"]
        assert len(column(tmp_path / "live", server.url, schema.turns.c.id)) == 2
    finally:
        server.close()


@pytest.mark.release
def test_two_hundred_requests_a_second_are_all_answered_and_recorded(tmp_path, database, monkeypatch):
    """With a signal on every tenth turn. Answers are checked; how long they took is the benchmark's."""
    monkeypatch.setattr(
        "etude.live.gateway.upstream._CONNECT_SECONDS", 30.0
    )  # this process asks, on a machine that is busy
    with process(tmp_path, "stub", "benchmarks.live_stub", "stub") as url:
        config, key = live_folder(tmp_path, url, database)
        command = [sys.executable, "-m", "etude.cli.main", "live", "serve", str(config), "--ready-file"]
        child, ready = start(tmp_path, "gateway", command)
        try:
            server = Server(wait_for(ready, child), "gateway", key)
            times = asyncio.run(_used(server))
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(60)
    assert len(times) == 4000
    assert len(column(tmp_path / "live", database, schema.turns.c.id)) == 4001
    events = column(tmp_path / "live", database, schema.signals.c.event)
    assert sum(not event.startswith("gateway ") for event in events) == 400
    assert column(tmp_path / "live", database, schema.drops.c.reason) == []


async def _used(server: Server) -> list[float]:
    turns: list[str] = []

    async def signals() -> None:
        for _ in range(400):
            while not turns:
                await asyncio.sleep(0.01)
            _, body = await ask(
                server,
                "/v1/feedback",
                json.dumps({"response_id": turns[0], "name": "retry", "event_id": ulid()}).encode(),
            )
            assert json.loads(body)["results"][0]["status"] == "recorded"
            await asyncio.sleep(0.02)

    first, _ = await ask(server)
    await asyncio.sleep(2)  # until it is in the log
    turns.append(first)
    times, _ = await asyncio.gather(load(server, 200, 20.0), signals())
    return times
