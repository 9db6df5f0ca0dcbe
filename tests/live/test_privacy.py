"""Forgetting, exporting and expiring accounts: what is on the disk afterwards, byte by byte, on both databases."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from etude.cli.main import main
from etude.config.live import ClusterConfig, LabelsConfig, LiveConfig
from etude.errors import UserError
from etude.ledger.ledger import Ledger, blob_key
from etude.live.gateway.entries import SignalEntry, SuggestionEntry, TurnEntry
from etude.live.gateway.gateway import Gateway
from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.writer import LogWriter
from etude.live.learn.window import LiveContents, cut_window, window_samples
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.privacy import DAY, AccountName, expire, export, forget, plant, planted
from etude.live.log.records import LivePolicy, Signal, SignalKind, Suggestion, TurnContent, VersionSpan, ulid
from etude.live.log.tenants import set_policy
from etude.records import EpisodeBlob, Outcome
from etude.store import Store, open_store
from tests.helpers.live_story import new_session, new_turn
from tests.helpers.postgres import INSTALLED, PostgresServer

MARK = "zebra lantern quarry"  # in everything that the forgotten account wrote
LABELS = LabelsConfig(least_batch=1, delay_seconds=0.02, window_seconds=0.02, coverage=1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    server = PostgresServer()
    yield server.url
    server.close()


@dataclass
class Loop:
    """A live loop on the disk, with a queue."""

    folder: Path
    database: str | None = None
    count: Iterator[int] = field(default_factory=itertools.count)
    accounts: Accounts = field(init=False)
    engine: sa.Engine = field(init=False)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700)
        self.accounts, self.store = Accounts(self.folder), open_blobs(self.folder)
        self.engine = open_log(self.folder, self.database)
        set_policy(self.engine, "acme", LivePolicy(consent=True))

    def use(self, user: str, said: str, turns: int = 3, told: str = "recorded") -> list[str]:
        """Turns of a user with an edit each that survived, and a correction. Returns their ids."""
        queue = RecordQueue()
        writer = LogWriter(queue, self.engine, self.store, self.accounts)
        account = self.accounts.name("acme", user)
        session = new_session(account=account, organisation=f"{said} org", client=f"{said} client", release=0)
        names = [ulid() for _ in range(turns)]
        message = {"role": "assistant", "content": f"```\n{said}\n```"}
        for name in names:
            body = {"model": "m", "messages": [{"role": "user", "content": f"Fix {name} of {said}"}]}
            turn = new_turn(session.id, id=name, release=0, spans=(VersionSpan(low=0, high=4, version=0),))
            ids = np.array([0, 1, 2, next(self.count)], dtype="<i4").tobytes()  # the same ones are trained on once
            logs = np.zeros(4, "<f4").tobytes()
            content = TurnContent(
                dialect="chat",
                request=msgspec.json.encode(body),
                response=msgspec.json.encode(message),
                prompt_ids=ids,
                ids=ids,
                logprobs=logs,
                temperature=1.0,
                top_p=1.0,
            )
            assert queue.append(TurnEntry(session, turn, content, said))
            edit = Suggestion(
                id=ulid(),
                turn=name,
                path=self.accounts.digest("path", "acme", said),
                base=f"b-{said[:5]}",
                old_lines=(0, 0),
                new="n",
                characters=10,
                shown=0,
            )
            entries: list[Any] = [SuggestionEntry("acme", edit)]
            for kind, subject, text in (
                (SignalKind.APPLIED, edit.id, None),
                (SignalKind.SURVIVED, edit.id, None),
                (SignalKind.CORRECTION, name, f"I wanted {said}"),
            ):
                signal = Signal(
                    event=f"{said} {ulid()}",
                    tenant="acme",
                    subject=subject,
                    kind=kind,
                    value=1.0,
                    horizon=LABELS.window_seconds if kind is SignalKind.SURVIVED else None,
                    observed_at=1,
                    arrived_at=0,
                    source="client",
                )
                entries.append(SignalEntry(signal, text))
            assert set(queue.submit(entries[:2]).result(60)) == {told}
            time.sleep(LABELS.window_seconds)
            assert set(queue.submit(entries[2:]).result(60)) == {told}
        writer.close()
        return names

    def window(self) -> tuple[int, list[str]]:
        """The next window: its number, and the turns of its batch."""
        time.sleep(2 * LABELS.window_seconds)
        contents = LiveContents(self.engine, self.accounts, self.store)
        number = cut_window(self.engine, contents, LABELS).number
        return number, [sample.turn for sample in window_samples(self.engine, contents, LABELS, number)]

    def holds(self, text: str) -> list[str]:
        """Files, and tables of PostgreSQL, that hold a text in plain bytes."""
        found = [str(p) for p in self.folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]
        if self.database is not None:
            with self.engine.connect() as connection:
                for table in schema.metadata.sorted_tables:
                    rows = connection.execute(sa.select(table)).all()
                    found += [table.name] if any(text in str(row) for row in rows) else []
        return found


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loop]:
    database = None
    if request.param == "postgresql":
        if not INSTALLED:
            pytest.skip("PostgreSQL is not installed")
        database = request.getfixturevalue("postgres")
    made = Loop(tmp_path / "live", database)
    yield made
    with made.engine.begin() as connection:
        for table in reversed(schema.metadata.sorted_tables):
            connection.execute(sa.delete(table).where(sa.true() if table is not schema.meta else sa.false()))
    made.engine.dispose()


def trained(loop: Loop, number: int, version: int) -> None:
    with loop.engine.begin() as connection:
        of = schema.windows.c.number == number
        connection.execute(sa.update(schema.windows).where(of).values(version=version))


def test_a_forgotten_account_is_on_no_disk_and_in_no_later_batch(loop: Loop) -> None:
    bob = loop.use("bob", "plain words")
    ann = loop.use("ann", MARK)
    assert loop.holds(f"{MARK} org"), "the search finds what is there"
    number, batch = loop.window()
    assert set(batch) == set(ann + bob)
    trained(loop, number, 7)
    later = loop.use("ann", MARK)
    account = loop.accounts.name("acme", "ann")
    copies = {name: loop.store.get(name) for name in loop.store.list(f"{account[:2]}/{account}")}
    assert len(copies) == 12
    next_number, batch = loop.window()
    assert set(batch) == set(later)

    done = forget(loop.engine, loop.store, loop.accounts, loop.folder, AccountName("acme", "ann"))
    assert (done.accounts, done.turns, done.contents, done.versions) == ((account,), 6, 12, (7,))
    assert bool(done.remains) == (loop.database is not None)
    assert loop.holds(MARK) == []
    assert loop.holds("plain words org") != []
    assert loop.store.list(f"{account[:2]}/{account}") == []
    with journal.reading(loop.engine) as connection:
        assert loop.accounts.key(connection, account) is None
        (stone,) = journal.tombstones(connection, time.time_ns())
    assert (stone.account, stone.versions) == (account, (7,))
    for name, data in copies.items():  # an old backup, put back
        loop.store.put(name, data)
    contents = LiveContents(loop.engine, loop.accounts, loop.store)
    assert window_samples(loop.engine, contents, LABELS, next_number) == [], (
        "consent was withdrawn between collect and train"
    )
    loop.use("ann", MARK, told="unknown")
    assert loop.holds(MARK) == [], "what comes afterwards is not kept"
    fresh = loop.use("bob", "plain words")
    assert set(loop.window()[1]) == set(fresh)
    assert forget(loop.engine, loop.store, loop.accounts, loop.folder, AccountName("acme", "ann")).contents == 12
    assert loop.store.list(f"{account[:2]}/{account}") == []


def test_a_kill_within_forget_leaves_nothing_readable(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.use("ann", MARK, turns=1)
    account = loop.accounts.name("acme", "ann")
    monkeypatch.setattr(Store, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        forget(loop.engine, loop.store, loop.accounts, loop.folder, AccountName("acme", "ann"))
    monkeypatch.undo()
    with journal.reading(loop.engine) as connection:
        assert loop.accounts.key(connection, account) is None
    assert loop.window()[1] == []
    assert forget(loop.engine, loop.store, loop.accounts, loop.folder, AccountName("acme", "ann")).contents == 2
    assert loop.holds(MARK) == []


def test_tokens_that_wait_for_a_trainer_go_as_well(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "live")
    ann, bob = loop.use("ann", MARK, 1), loop.use("bob", "plain words", 1)
    run = loop.folder / "train"
    run.mkdir()
    ledger, rollouts = Ledger.open(f"sqlite:///{run}/ledger.db", "run"), open_store(str(run / "rollouts"))
    for index, turn in enumerate(ann + bob):
        ledger.admit(index, turn, 1, 0)
    for lease in ledger.lease("live", 9, 60.0):
        key = blob_key(lease.group_id, lease.member, lease.attempt)
        rollouts.put(key, MARK.encode() if lease.task_id in ann else b"plain")
        blob = EpisodeBlob(key=key, digest="d")
        ledger.finish(
            lease, outcome=Outcome.SCORED, reward=1.0, passed=True, blob=blob, tokens=4, min_version=0, metrics={}
        )
    assert forget(loop.engine, loop.store, loop.accounts, loop.folder, AccountName("acme", "ann")).waiting == 1
    assert loop.holds(MARK) == []
    ((group, _, _),) = ledger.untrained()
    assert ledger.groups([group])[0].task_id == bob[0]
    assert ledger.figures().in_flight == 0
    ledger.close()


def test_export_has_everything_decrypted(loop: Loop, tmp_path: Path) -> None:
    names = loop.use("ann", MARK, 2)
    loop.use("bob", "plain words")
    loop.window()
    out = tmp_path / "out"
    counts = export(loop.engine, loop.store, loop.accounts, AccountName("acme", "ann"), out)
    kept = {name: counts[name] for name in ("sessions", "turns", "suggestions", "signals", "labels", "exits", "files")}
    assert kept == {"sessions": 1, "turns": 2, "suggestions": 2, "signals": 6, "labels": 2, "exits": 2, "files": 4}
    told = json.loads((out / "account.json").read_text())
    assert {turn["id"] for turn in told["turns"]} == set(names)
    for name in names:
        assert MARK in (out / "turns" / name / "request.json").read_text()
        assert MARK in (out / "turns" / name / "response.json").read_text()
        assert np.fromfile(out / "turns" / name / "ids.bin", "<i4").tolist()[:3] == [0, 1, 2]
    texts = [(out / s["file"]).read_text() for s in told["signals"] if s["text"]]
    assert texts == [f"I wanted {MARK}"] * 2
    assert "plain words" not in (out / "account.json").read_text()
    with pytest.raises(UserError, match="exists already"):
        export(loop.engine, loop.store, loop.accounts, AccountName("acme", "ann"), out)
    with pytest.raises(UserError, match="nothing is known of a user or key 'eve'"):
        export(loop.engine, loop.store, loop.accounts, AccountName("acme", "eve"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_retention_by_class(loop: Loop) -> None:
    used = loop.use("ann", MARK, 1)
    number, batch = loop.window()
    assert batch == used
    trained(loop, number, 1)
    loop.use("bob", "plain words", 1)
    now = time.time_ns()
    assert expire(loop.engine, loop.store, loop.folder, now + 29 * DAY) == 0
    assert expire(loop.engine, loop.store, loop.folder, now + 31 * DAY) == 2, (
        "a turn and its text, on which nothing was trained"
    )
    assert expire(loop.engine, loop.store, loop.folder, now + 31 * DAY) == 0
    with journal.reading(loop.engine) as connection:
        kept = {turn.id: turn for turn in journal.turns(connection, time.time_ns())}
    assert [turn.id for turn in kept.values() if turn.blob is not None] == used
    set_policy(loop.engine, "acme", LivePolicy(trained_days=60.0))
    assert expire(loop.engine, loop.store, loop.folder, now + 61 * DAY) == 2
    assert loop.store.list() == []


def test_the_gateway_expires_what_is_old(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "live")
    loop.use("ann", MARK, 1)
    set_policy(loop.engine, "acme", LivePolicy(consent=True, raw_days=1e-9))
    cluster = ClusterConfig(name="a", urls=("http://127.0.0.1:1",), store=str(tmp_path / "store"))
    gateway = Gateway(LiveConfig(folder=str(loop.folder), clusters=(cluster,)))

    async def run() -> None:
        async with gateway.running(), asyncio.timeout(60):
            while loop.store.list():
                await asyncio.sleep(0.05)

    assert loop.store.list()
    asyncio.run(run())


def test_planted_strings_and_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path / "live")
    loop.use("ann", MARK, 1)
    config = tmp_path / "live.toml"
    (tmp_path / "store").mkdir()
    config.write_text(
        f'stage = "live"\nfolder = "{loop.folder}"\n[[clusters]]\nname = "a"\nurls = ["http://127.0.0.1:1"]\n'
        f'store = "{tmp_path / "store"}"\n'
    )

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["live", words[0], str(config), *words[1:]])
        assert ended.value.code == 0
        return capsys.readouterr().out

    told = run("plant", "--count", "2")
    strings = planted(loop.folder)
    assert len(strings) == 2
    assert all(string.text in told for string in strings)
    assert (loop.folder / "planted.json").stat().st_mode & 0o077 == 0
    assert len(planted(loop.folder)) == len(plant(loop.folder, 1)) + 1
    first, second = strings
    assert first.is_known(f"Sure: {first.secret.upper().replace(' ', '  ')}.")
    assert not first.is_known(second.secret)
    assert "1 turns" in run("export", "acme", "ann", "-o", str(tmp_path / "out"))
    assert run("expire").startswith("0 contents")
    assert "is forgotten" in run("forget", "acme", "ann")
    for words in (("anne",), ("--organisation", "nobody"), (), ("ann", "--everyone")):
        with pytest.raises(SystemExit, match="2"):
            main(["live", "forget", str(config), "acme", *words])
    assert "nothing is known of a user or key 'anne'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["live", "forget", str(config), "acmee", "ann"])
    assert "no tenant acmee" in capsys.readouterr().err
    assert loop.holds(MARK) == []
    loop.engine.dispose()
    tables = sqlite3.connect(loop.folder / "live.db")
    assert tables.execute("SELECT COUNT(*) FROM signals").fetchone() == (0,)
    tables.close()
