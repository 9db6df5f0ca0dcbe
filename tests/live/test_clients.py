"""Simulated users of the nano model: what they ask, how a change is judged, and what they tell the gateway."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.live.log import schema
from etude.live.log.accounts import open_log
from etude.live.simulate import clients
from etude.live.simulate.users import draw_population
from tests.helpers.http_apps import answering
from tests.helpers.live import live_config, new_proxy, running_gateway

SOURCE = '''
def clamp(x, low, high):
    """The nearest number within bounds."""
    if x < low:
        return low
    return high if x > high else x


def total(items):
    result = 0
    for item in items:
        if item:
            result = result + item
    return result
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/numbers.py").write_text(SOURCE)
    return tmp_path


def edit(old: str, new: str) -> SimpleNamespace:
    return SimpleNamespace(function=SimpleNamespace(name="edit", arguments=json.dumps({"old": old, "new": new})))


def test_requests_show_broken_functions_and_hold_some_functions_out(library: Path) -> None:
    asked, heldout = clients.requests(library, 1, 0.5)
    assert {r.function for r in asked}.isdisjoint({r.function for r in heldout})
    assert {r.name for r in asked + heldout} == {"clamp", "total"}
    for request in asked + heldout:
        assert request.source != request.right
        assert request.prompt.startswith(f"Fix `{request.name}` in src/numbers.py\ndef {request.name}(")
        assert '"""' not in request.source, "as the nano model sees functions"
    assert clients.requests(library, 1, 0.5) == (asked, heldout)


def test_a_change_is_judged_by_what_it_did() -> None:
    right = "def f(x):\n    if x > 1:\n        return x\n    return 1"
    request = clients.FunctionRequest("m.py::f", "f", "m.py", right.replace(">", "<"), right)
    mended = clients.judged(request, [edit("    if x < 1:", "    if x > 1:")])
    assert (mended.right, mended.house) == (True, True)
    other = clients.judged(request, [edit("    return 1", "    return 2")])
    assert (other.right, other.house, other.source is None) == (False, False, False)
    assert not clients.judged(request, [edit("    if x < 1:", "    if x <")]).house, "it does not parse"
    for call in (edit("nowhere", "x"), edit("", ""), SimpleNamespace(function=SimpleNamespace(name="test"))):
        assert clients.judged(request, [call]).source is None
    negated = clients.judged(request, [edit("    if x < 1:", "    if not x < 1:")])
    assert [clients.worth(found, 0.6) for found in (mended, negated, other)] == [1.0, 0.6, 0.0]


def mending(asked: list[clients.FunctionRequest]) -> Starlette:
    """A server that mends every function, which no model is needed for."""
    right = {request.prompt: request for request in asked}

    async def answer(http: Request) -> JSONResponse:
        request = right[(await http.json())["messages"][0]["content"]]
        arguments = json.dumps({"old": request.source, "new": request.right})
        call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        told = {"id": "c", "object": "chat.completion", "created": 1, "model": "nano", "choices": [choice]}
        return JSONResponse(told)

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


def test_users_tell_the_gateway_what_became_of_their_edits(tmp_path: Path, library: Path) -> None:
    asked, _ = clients.requests(library, 1, 0.5)
    with answering(mending(asked)) as url:
        config = live_config(tmp_path, url)
        key, secret = new_proxy(config)
        people = draw_population(np.random.default_rng(1), 20)
        with running_gateway(config) as (_, at):
            model, kept = clients.UserModel("nano", 160, at_once=4), tmp_path / "turns.jsonl"
            users = clients.Users(at, key, secret, model, people, asked, 0.2, 2, kept)
            users.use(30)
    assert [turn.error for turn in users.turns if turn.error] == []
    assert users.lost == 0
    assert all(turn.utility > 0 for turn in users.turns)
    engine = open_log(tmp_path / "live", None)
    with engine.connect() as connection:
        edits = list(connection.scalars(sa.select(schema.suggestions.c.turn)))
        told = Counter(connection.scalars(sa.select(schema.signals.c.kind).where(schema.signals.c.source == "client")))
        counted = {
            row[0]: row[1]
            for row in connection.execute(
                sa.select(schema.tallies.c.name, sa.func.sum(schema.tallies.c.count)).group_by(schema.tallies.c.name)
            )
        }
    engine.dispose()
    consented = sum(bool(people.consent_A[turn.account]) for turn in users.turns)
    assert len(edits) == consented < len(users.turns)
    assert told["applied"] + told["rejected"] == len(users.turns)
    assert told["survived"] + told["undone"] + told["gone"] == told["applied"]
    assert told["survived"] > 0
    assert counted["edits"] == len(users.turns), "of accounts without consent, too"


def test_users_of_a_gateway_that_is_away_end(tmp_path: Path, library: Path) -> None:
    asked, _ = clients.requests(library, 1, 0.5)
    people = draw_population(np.random.default_rng(1), 20)
    model, kept = clients.UserModel("nano", 160, at_once=2), tmp_path / "turns.jsonl"
    users = clients.Users("http://127.0.0.1:9", "key", "secret", model, people, asked, 0.2, 2, kept)
    users.use(4)
    assert all(turn.turn == "" and turn.error.startswith("APIConnectionError") for turn in users.turns)
