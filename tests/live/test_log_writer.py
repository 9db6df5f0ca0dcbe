"""Queue and writer of the log: what is written, once, and what never is."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from etude.live.gateway import writer
from etude.live.gateway.entries import Key, ServedEntry, SignalEntry, SuggestionEntry, TurnEntry
from etude.live.gateway.queue import RecordQueue, Unavailable
from etude.live.gateway.writer import LogWriter
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_blobs, open_log, unseal
from etude.live.log.records import (
    Arm,
    Consent,
    Signal,
    SignalKind,
    Suggestion,
    Tombstone,
    TurnContent,
    VersionSpan,
    ulid,
)
from etude.store import Store
from tests.helpers.clocks import set_clock
from tests.helpers.live import bytes_below
from tests.helpers.live_story import new_session, new_turn

CONSENT = Consent(granted=True, scope="train", policy="tenant", at=1)


@dataclass
class _Log:
    folder: Path
    engine: sa.Engine
    accounts: Accounts
    queue: RecordQueue
    writer: LogWriter
    store: Store

    def turn(self, user: str = "ann", session: str = "", request: bytes = b'{"messages":[]}', **more) -> TurnEntry:
        account = self.accounts.name("acme", user)
        where = new_session(
            id=session or ulid(), account=account, consent=CONSENT, arm=Arm.CANARY, release=3, propensity=0.05
        )
        turn = new_turn(where.id, release=3, spans=(VersionSpan(low=0, high=2, version=7),), sampled_tokens=2)
        content = TurnContent(
            dialect="chat",
            request=request,
            response=b'{"content":"fine"}',
            prompt_ids=b"PPPP",
            ids=b"IIIIJJJJ",
            logprobs=b"LLLLMMMM",
            temperature=1.0,
            top_p=1.0,
        )
        return TurnEntry(where, turn, content, more.get("text", ""))

    def signal(self, subject: str, kind: SignalKind = SignalKind.UNDONE, tenant: str = "acme", event: str = "", **more):
        comment = more.pop("comment", None)
        values = {"value": 1.0, "observed_at": 5, "arrived_at": 0, "source": "client"} | more
        return SignalEntry(Signal(event=event or ulid(), tenant=tenant, subject=subject, kind=kind, **values), comment)

    def told(self, *entries) -> list[str]:
        return self.queue.submit(entries).result(60)

    def rows(self, table: sa.Table) -> list:
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(table)).mappings())

    def tallies(self) -> dict[str, tuple[int, float]]:
        return {row["name"]: (row["count"], row["total"]) for row in self.rows(schema.tallies)}


@pytest.fixture
def live(tmp_path, database):
    folder = tmp_path / "live"
    engine, accounts = open_log(folder, database), Accounts(folder)
    queue, store = RecordQueue(), open_blobs(folder)
    writer = LogWriter(queue, engine, store, accounts)
    yield _Log(folder, engine, accounts, queue, writer, store)
    writer.close()
    engine.dispose()


def test_turns_suggestions_and_signals_are_written_once_and_read_in_order(live):
    session = ulid()
    turns = [live.turn(session=session) for _ in range(3)]
    assert all(live.queue.append(turn) for turn in turns)
    first = turns[0].turn.id
    edit = Suggestion(id=ulid(), turn=first, path="p", base="b", old_lines=(2, 1), new="n", characters=9, shown=0)
    undone = live.signal(edit.id)
    assert live.told(SuggestionEntry("acme", edit), undone, undone) == ["recorded", "recorded", "duplicate"]
    assert live.told(SuggestionEntry("acme", edit), undone) == ["duplicate", "duplicate"]
    other = live.signal(first, tenant="other"), SuggestionEntry("other", edit), live.signal(ulid())
    assert live.told(*other) == ["unknown"] * 3, "another tenant's turns are as unknown as those that are not there"
    live.writer.close()
    with live.engine.begin() as connection:
        cut = journal.stamp(connection)
    with journal.reading(live.engine) as connection:
        read = list(journal.turns(connection, cut))
        (opened,), (shown,), (signal,) = (
            list(reader(connection, cut)) for reader in (journal.sessions, journal.suggestions, journal.signals)
        )
        key = live.accounts.key(connection, opened.account)
        assert list(journal.turns(connection, read[1].at)) == read[:1]
        assert journal.of_ids(connection, Suggestion, [edit.id, "none"]) == {edit.id: shown}
    assert [turn.id for turn in read] == [entry.turn.id for entry in turns]
    assert [turn.sequence for turn in read] == [1, 2, 3]
    times = [opened.opened, *(turn.at for turn in read), shown.shown, signal.arrived_at, cut]
    assert sorted(times) == times
    assert len(set(times[1:])) == 6
    assert (opened.consent, shown.old_lines, signal.subject) == (CONSENT, (2, 1), edit.id)
    held = unseal(key, open_blobs(live.folder).get(read[0].blob), read[0].blob)
    assert msgspec.msgpack.decode(held, type=TurnContent) == turns[0].content
    with pytest.raises(ValueError, match="not what was encrypted"):
        unseal(key, open_blobs(live.folder).get(read[0].blob), read[1].blob)


def test_counters_count_a_turn_once_under_its_own_arm(live):
    entry, unrecorded = live.turn(), ulid()
    account = live.accounts.name("acme", "silent")
    live.queue.append(entry)
    live.queue.append(ServedEntry(unrecorded, Key(3, Arm.CONTROL, "voucher", "acme"), account))
    edits = [
        SuggestionEntry(
            "acme",
            Suggestion(id=ulid(), turn=turn, path="p", base="b", old_lines=(0, 1), new="n", characters=1, shown=0),
        )
        for turn in (entry.turn.id, entry.turn.id, unrecorded)
    ]
    assert live.told(*edits) == ["recorded", "recorded", "unrecorded"]
    assert live.told(edits[2]) == ["unrecorded"]
    survived = {"kind": SignalKind.SURVIVED, "value": 0.5}
    signals = [live.signal(edits[0].suggestion.id, horizon=seconds, **survived) for seconds in (120.0, 1800.0)]
    signals += [live.signal(edits[1].suggestion.id, horizon=1800.0, **survived), live.signal(unrecorded, comment="no")]
    assert live.told(*signals) == ["recorded"] * 4
    assert live.told(live.signal(unrecorded, SignalKind.UNDONE)) == ["recorded"]
    live.queue.count(Key(3, Arm.CONTROL, account, "acme"), "seconds", 0.25)
    live.writer.close()
    assert live.tallies() == {
        "edits": (1, 1.0),
        "labelled": (1, 1.0),
        "survived": (1, 0.5),
        "undone": (1, 1.0),
        "seconds": (1, 0.25),
    }
    assert {(row["name"], row["arm"]) for row in live.rows(schema.tallies)} == {
        *((name, "canary") for name in ("edits", "labelled", "survived")),
        *((name, "control") for name in ("edits", "labelled", "undone", "seconds")),
    }
    assert [row["text"] for row in live.rows(schema.signals)] == [None] * 5


def test_what_names_people_or_opens_doors_never_reaches_the_disk(live):
    planted = [f"{name}.{n}@corp-{n}.io" for n, name in enumerate(["ann", "bob", "cem", "dora"] * 5)]
    planted += [f"AKIA{n:02d}QWERTYUIOPAS{n % 7}X"[:20] for n in range(20)]
    planted += [f"ghp_{n:02d}{'aB3dE5gH7j' * 4}"[:40] for n in range(20)]
    planted += [f"hunter{n:02d}-Xy9!" for n in range(20)]
    planted += [f"+49 170 {n:02d}3{n:02d}67" for n in range(10)]
    planted += [f"8.{n}.4.{n + 3}" for n in range(10)]
    assert len(planted) == 100
    futures = []
    for n, secret in enumerate(planted):
        said = f'export DB_PASSWORD="{secret}"' if "hunter" in secret else f"value {secret} here"
        body = json.dumps({"messages": [{"role": "user", "content": said}]}).encode()
        # Every fourth stands only in the tokens, as after `previous_response_id`.
        entry = live.turn(request=b"{}", text=f"a\n{said}\nb") if n % 4 == 0 else live.turn(request=body)
        live.queue.append(entry)
        futures.append(live.queue.submit([live.signal(entry.turn.id, SignalKind.CORRECTION, comment=said)]))
    assert live.told(live.signal(entry.turn.id, SignalKind.CORRECTION, comment="harmless")) == ["recorded"]
    assert [future.result(60) for future in futures] == [["recorded"]] * 100
    live.writer.close()
    turns = live.rows(schema.turns)
    assert [row["reason"] for row in turns] == ["scrubbed"] * 100
    with live.engine.connect() as connection:
        key = live.accounts.key(connection, live.accounts.name("acme", "ann"))
    store = open_blobs(live.folder)
    names = [row["blob"] for row in turns] + [row["text"] for row in live.rows(schema.signals)]
    opened = b"\n".join(unseal(key, store.get(name), name) for name in names)
    assert b"harmless" in opened
    tables = json.dumps([dict(row) for t in schema.metadata.tables.values() for row in live.rows(t)], default=repr)
    everything = opened + bytes_below(live.folder) + tables.encode()
    assert not [secret for secret in planted if secret.encode() in everything]
    assert b"IIIIJJJJ" not in opened
    assert b"PPPP" not in opened


def test_a_forgotten_account_is_not_written_again(live):
    account = live.accounts.name("acme", "ann")
    live.queue.append(live.turn())
    live.told(live.signal(ulid()))
    with live.engine.begin() as connection:
        live.accounts.destroy(connection, account, "acme", journal.stamp(connection))
    live.queue.append(live.turn())
    live.queue.append(live.turn(user="bob"))
    live.writer.close()
    assert len(live.rows(schema.turns)) == 2
    assert {row["account"]: row["secret"] is None for row in live.rows(schema.account_keys)}[account]
    assert live.queue.counters.drops == {"forgotten": 1}
    with live.engine.connect() as connection:
        assert live.accounts.key(connection, account) is None


def test_a_record_that_is_refused_takes_no_other_with_it(live):
    good, broken = live.turn(request=b'{"messages":["ann.lee@bigfirm.com"]}'), live.turn()
    twice = TurnEntry(broken.session, msgspec.structs.replace(broken.turn, id=good.turn.id), broken.content)
    held = live.queue.submit([live.signal(ulid(), comment="until all is queued")])
    live.queue.append(good)
    live.queue.append(twice)
    again = live.queue.submit([live.signal(good.turn.id)])
    assert (held.result(60), again.result(60)) == (["unknown"], ["recorded"])
    assert live.queue.counters.drops == {"database": 1}
    (row,) = live.rows(schema.turns)
    assert (row["reason"], row["scrubbed"]) == ("scrubbed", '{"email":1}'), "it was looked through once, and says so"
    assert len(list((live.folder / "blobs").rglob("01*"))) == 1, "no blob is left of it"


def test_what_finds_no_room_is_dropped_and_counted(live):
    live.queue.max_entries = 0
    assert not live.queue.append(live.turn())
    with pytest.raises(Unavailable):
        live.told(live.signal(ulid()))
    live.writer.close()
    assert live.rows(schema.drops)[0]["reason"] == "queue_full"
    assert live.tallies() == {"dropped": (1, 0.0)}


def test_counters_that_find_no_room_are_themselves_counted(live, monkeypatch):
    monkeypatch.setattr("etude.live.gateway.queue.MAX_COUNTERS", 0)
    live.queue.count(Key(3, Arm.CANARY, "a", "acme"), "requests", count=2)
    assert live.queue.counters.uncounted == 2
    live.writer.close()
    assert not live.tallies()


def test_old_counters_are_deleted_and_those_of_a_canary_that_stands_are_kept(live):
    key, day = Key(3, Arm.CANARY, "a", "acme")._asdict(), 86400 * 10**9
    slots = [live.queue.slot(time.time_ns() - days * day) for days in (89, 91)]
    with live.engine.begin() as connection:
        rows = [{**key, "slot": slot, "name": "requests", "count": 1, "total": 0.0} for slot in slots]
        connection.execute(sa.insert(schema.tallies), rows)
    live.told(live.signal(ulid()))
    assert [row["slot"] for row in live.rows(schema.tallies)] == slots[:1]


def test_times_rise_though_the_clock_is_set_back(live, monkeypatch):
    with live.engine.begin() as connection:
        first = journal.stamp(connection, 10)
    set_clock(monkeypatch, journal, time_ns=lambda: 5)
    with live.engine.begin() as connection:
        assert journal.stamp(connection) == first + 10


def test_a_signal_on_a_forgotten_account_is_on_nothing(live):
    entry = live.turn()
    live.queue.append(entry)
    assert live.told(live.signal(entry.turn.id)) == ["recorded"]
    with live.engine.begin() as connection:
        stone = Tombstone(tenant="acme", account=entry.session.account, at=journal.stamp(connection), versions=())
        journal.add(connection, [stone])
    assert live.told(live.signal(entry.turn.id), live.signal(entry.session.id)) == ["unknown"] * 2
    assert len(live.rows(schema.signals)) == 1


def test_a_store_that_is_full_delays_no_signal_by_each_of_its_turns(live, monkeypatch):
    pauses = []

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    held = live.queue.submit([live.signal(ulid(), comment="until all is queued")])
    monkeypatch.setattr(live.store, "put", full)
    set_clock(monkeypatch, writer, sleep=pauses.append)
    for _ in range(20):
        live.queue.append(live.turn())
    assert held.result(60) == live.told(live.signal(ulid())) == ["unknown"]
    live.writer.close()
    assert live.queue.counters.drops == {"disk_full": 20}
    assert sum(seconds == 0.2 for seconds in pauses) < 5, "one for a group, not for a record"


def test_a_home_folder_leaves_a_turn_whole_if_its_tenant_wants_so(live):
    body = json.dumps({"messages": [{"role": "user", "content": "In /home/ann/shop: fix it"}]}).encode()
    for keep in (("home",), ()):
        entry = live.turn(request=body, text="In /home/ann/shop: fix it")
        live.queue.append(replace(entry, keep=keep))
    live.writer.close()
    told = [(row["reason"], row["scrubbed"]) for row in live.rows(schema.turns)]
    assert told == [("", "{}"), ("scrubbed", '{"home":2}')]
