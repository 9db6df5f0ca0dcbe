"""Who takes consent back, or asks to be forgotten, by whatever name: on no disk, and in no later window."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config import LiveConfig
from etude.config.live import LabelsConfig
from etude.live.learn.window import LiveContents, cut_window, window_samples
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.tenants import create_key
from tests.helpers.http_apps import answering
from tests.helpers.live import EchoServer, client, live_config, new_key, readable_bytes, running_gateway
from tests.live.test_gateway import rows, until

LABELS = LabelsConfig(least_batch=1, delay_seconds=0.02, window_seconds=0.02, coverage=1)
NAMES = ("header", "body", "metadata", "key", "organisation")
"""The ways by which an account is named; each says so in its words."""


class _People:
    """One account for each way, which speaks to a gateway, and `bob`, who stays."""

    def __init__(self, gateway, at: str, config: LiveConfig, tenant: str = "acme") -> None:
        engine = open_log(Path(config.folder), config.database)
        self.keys = {way: create_key(engine, tenant, f"{way}-key") for way in (*NAMES, "bob")}
        engine.dispose()
        self.gateway, self.at = gateway, at
        until(lambda: gateway.view.directory.find(self.keys["bob"]) is not None)

    def say(self, way: str, words: str, consent: str | None = "train") -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": f"Fix {way} {words} now"}]}
        headers = {} if consent is None else {"x-etude-consent": consent}
        if way in ("header", "organisation", "bob"):
            headers["x-etude-user"] = f"{way}-person"
        if way == "organisation":
            headers["x-etude-organisation"] = "platform"
        body |= {"user": "body-person"} if way == "body" else {}
        body |= {"metadata": {"user_id": "metadata-person"}} if way == "metadata" else {}
        with client(self.at, self.keys[way], **headers) as http:
            turn = http.post("/v1/chat/completions", json=body).headers["x-etude-generation"]
            sent = {"response_id": turn, "name": "correction", "comment": f"I wanted {way} {words} done"}
            assert http.post("/v1/feedback", json=sent).status_code == 200
        until(lambda: not self.gateway.recorder.open)
        return turn


@pytest.fixture
def config(tmp_path: Path) -> Iterator[LiveConfig]:
    with answering(EchoServer().app()) as url:
        made = live_config(tmp_path, url)
        (tmp_path / "live.toml").write_text(
            f'stage = "live"\nfolder = "{made.folder}"\n[[clusters]]\nname = "a"\nurls = ["{url}"]\n'
            f'store = "{tmp_path}/s"\n'
        )
        new_key(made)
        yield made


def batch(config: LiveConfig) -> set[str]:
    """The turns of the batch of the next window."""
    folder = Path(config.folder)
    engine = open_log(folder, config.database)
    time.sleep(2 * LABELS.window_seconds)
    contents = LiveContents(engine, Accounts(folder), open_blobs(folder))
    number = cut_window(engine, contents, LABELS).number
    turns = {sample.turn for sample in window_samples(engine, contents, LABELS, number)}
    engine.dispose()
    return turns


def command(config: LiveConfig, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["live", words[0], str(Path(config.folder).parent / "live.toml"), *words[1:]])
    return int(ended.value.code or 0)


def test_an_account_is_forgotten_by_each_of_its_names(config: LiveConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with running_gateway(config) as (gateway, at):
        people = _People(gateway, at, config)
        turns = {way: people.say(way, "zebra") for way in (*NAMES, "bob")}
    assert all(f"{way} zebra".encode() in readable_bytes(config) for way in turns), "the search finds what is there"
    assert command(config, "forget", "acme", "header") == 2
    assert "nothing is known of a user or key 'header'" in capsys.readouterr().err
    named = [("header-person",), ("body-person",), ("metadata-person",), ("key-key",), ("--organisation", "platform")]
    for way, words in zip(NAMES, named, strict=True):
        assert command(config, "forget", "acme", *words) == 0
        assert f"{way} zebra".encode() not in readable_bytes(config), way
        assert command(config, "forget", "acme", *words) == (2 if way == "organisation" else 0), "it may be repeated"
    assert batch(config) == {turns["bob"]}
    assert command(config, "forget", "acme", "--everyone") == 0
    assert b"zebra" not in readable_bytes(config)
    assert batch(config) == set()


def test_who_refuses_by_a_header_withdraws_what_was_given(config: LiveConfig) -> None:
    with running_gateway(config) as (gateway, at):
        people = _People(gateway, at, config)
        turns = {way: [people.say(way, f"zebra {n}") for n in range(2)] for way in (*NAMES, "bob")}
        for way in NAMES:
            people.say(way, "lantern", "none")
        until(lambda: len(rows(config, schema.withdrawals)) == len(NAMES))
        again = people.say("header", "quarry")
    kept = readable_bytes(config)
    assert not [way for way in NAMES if f"{way} zebra".encode() in kept or f"{way} lantern".encode() in kept]
    assert b"bob zebra 1" in kept
    assert b"header quarry" in kept, "a new consent counts from then on"
    reasons = {row["id"]: (row["blob"] is None, row["reason"]) for row in rows(config, schema.turns)}
    assert {reasons[turn] for way in NAMES for turn in turns[way]} == {(True, "withdrawn")}
    assert batch(config) == {*turns["bob"], again}
    assert {e["reason"] for e in rows(config, schema.exits) if e["turn"] in turns["key"]} == {"withdrawn"}


def test_a_tenant_withdraws_by_its_policy(config: LiveConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """What its clients granted themselves stays, unless they may not grant any more."""
    assert command(config, "tenant", "acme", "--consent") == 0
    with running_gateway(config) as (gateway, at):
        people = _People(gateway, at, config)
        for way in ("body", "key"):
            people.say(way, "zebra", None)
        people.say("bob", "zebra")
    capsys.readouterr()
    assert command(config, "tenant", "acme", "--no-consent") == 0
    assert "4 contents that this no longer allows are deleted" in capsys.readouterr().err
    kept = readable_bytes(config)
    assert (b"body zebra" in kept, b"key zebra" in kept, b"bob zebra" in kept) == (False, False, True)
    assert command(config, "tenant", "acme", "--no-may-grant") == 0
    assert b"zebra" not in readable_bytes(config)
    assert batch(config) == set()


def test_a_withdrawal_after_the_cut_leaves_its_window(config: LiveConfig) -> None:
    """The window is computed again without it before it is trained on."""
    folder = Path(config.folder)
    with running_gateway(config) as (gateway, at):
        people = _People(gateway, at, config)
        turns = {way: people.say(way, "zebra") for way in ("header", "bob")}
        assert batch(config) == set(turns.values())
        people.say("header", "lantern", "none")
        until(lambda: len(rows(config, schema.withdrawals)) == 1)
    engine = open_log(folder, config.database)
    contents = LiveContents(engine, Accounts(folder), open_blobs(folder))
    assert [sample.turn for sample in window_samples(engine, contents, LABELS, 1)] == [turns["bob"]]
    with journal.reading(engine) as connection:
        (row,) = journal.withdrawals(connection, time.time_ns())
    assert (row.account, row.policy) == (Accounts(folder).name("acme", "header-person"), "")
    engine.dispose()
