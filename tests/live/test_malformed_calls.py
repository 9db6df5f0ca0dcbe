"""Calls that the server could not read, as signals, for all three APIs and streams (`SampledTurn` counts them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.live.gateway import observed
from etude.live.log import schema
from etude.live.log.records import SignalKind
from tests.helpers.http_apps import answering
from tests.helpers.live import EchoServer, client, live_config, new_key, running_gateway
from tests.live.test_gateway import rows, until


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_gateway_tells_of_them_in_each_api(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers and streams, and a request that is too long to be read."""
    monkeypatch.setattr(observed, "_MAX_BYTES", 2000)
    server, place = EchoServer(), "input" if path.endswith("responses") else "messages"
    server.malformed = 1
    with answering(server.app()) as url:
        config = live_config(tmp_path, url)
        key = new_key(config, consent=True)
        with running_gateway(config) as (gateway, at), client(at, key) as http:
            for words, more in (("Fix it", {}), ("Fix it now", {"stream": True}), ("x " * 1500, {})):
                body = {"model": "m", place: [{"role": "user", "content": words}], "max_tokens": 9} | more
                assert http.post(path, json=body).status_code == 200
                until(lambda: not gateway.recorder.open)
            server.malformed = 0
            http.post(path, json={"model": "m", place: [{"role": "user", "content": "Fix it well"}]})
            until(lambda: not gateway.recorder.open)
    turns = [row["id"] for row in sorted(rows(config, schema.turns), key=lambda row: row["at"])]
    told = {row["subject"] for row in rows(config, schema.signals) if row["kind"] == SignalKind.INVALID_CALL}
    assert (len(turns), told) == (4, set(turns[:3]))
    counted = [row for row in rows(config, schema.tallies) if row["name"] == "invalid_call"]
    assert sum(row["count"] for row in counted) == 3, "the canary's guardrail reads these"


def test_a_client_that_sends_the_new_items_alone_is_followed(tmp_path: Path) -> None:
    """OpenAI's responses with `previous_response_id`."""
    with answering(EchoServer().app()) as url:
        config = live_config(tmp_path, url)
        key = new_key(config, consent=True)
        with running_gateway(config) as (gateway, at), client(at, key) as http:
            first = http.post("/v1/responses", json={"model": "m", "input": "Fix the loop"})
            until(lambda: not gateway.recorder.open)
            before = first.headers["x-etude-generation"]
            result = {"type": "function_call_output", "call_id": "c", "output": "that is wrong"}
            words = {"role": "user", "content": "That is wrong, undo it"}
            turns = []
            for previous, items in ((f"resp_{before}", [result]), ("", [words])):
                name = previous or f"resp_{turns[-1]}"
                sent = {"model": "m", "input": items, "previous_response_id": name}
                turns.append(http.post("/v1/responses", json=sent).headers["x-etude-generation"])
                until(lambda: not gateway.recorder.open)
    told = [row["subject"] for row in rows(config, schema.signals) if row["kind"] == SignalKind.FOLLOWUP]
    assert told == [turns[1]]
