"""What the ledger says is what was written: damage, outages, lost answers and clocks that jump."""

import random
import shutil
import threading
import time
from collections import Counter
from contextlib import contextmanager

import msgspec
import pytest
import sqlalchemy as sa

from etude.errors import UserError
from etude.ledger import database, digests, flagged, leases
from etude.ledger import ledger as ledger_module
from etude.ledger.database import Outage
from etude.ledger.ledger import Ledger
from etude.records import EpisodeBlob, Outcome, encode
from etude.store import open_store
from tests.helpers.clocks import set_clock
from tests.ledger.test_ledger import LONG, finish, manifest
from tests.rollout.test_group_audit import member

BLOB = EpisodeBlob(key="k", digest="d")


def filled(ledger):
    """Two groups trained on, one ready, one open, an impossible episode."""
    for index in range(4):
        ledger.admit(index, f"task {index}", 3, 0)
    for lease in ledger.lease("a", 11, LONG):
        finish(ledger, lease, passed=lease.member == 1)
    ledger.consume([0, 1], 1)
    ledger.add_impossible(0, member(0, False), BLOB)
    return [manifest(0), manifest(1, [0, 1])]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE episodes SET reward = 1.0 WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET passed = (1 = 1) WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET outcome = 'timeout' WHERE group_id = 0 AND member = 0",
        "UPDATE episodes SET blob = 'other' WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET digest = 'other' WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET flags = 'decoy' WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET metrics = '{}' WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET tokens = 11 WHERE group_id = 2 AND member = 0",
        "UPDATE episodes SET member = 7 WHERE group_id = 3 AND member = 0",
        "UPDATE groups SET task_id = 'other' WHERE id = 3",
        "UPDATE groups SET admitted_version = 1 WHERE id = 3",
        "UPDATE impossible SET passed = (1 = 1)",
        "DELETE FROM episodes WHERE group_id = 3 AND member = 2",
        "UPDATE counters SET value = 13 WHERE name = 'admitted'",
    ],
)
def test_an_altered_row_is_refused_at_the_start(ledger, url, damage):
    published = filled(ledger)
    ledger.recover(published)
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        assert connection.execute(sa.text(damage)).rowcount == 1
    engine.dispose()
    with pytest.raises(UserError, match=r"the ledger .* is damaged: .*restore it from a copy"):
        ledger.recover(published)


def test_flipped_bytes_of_an_sqlite_file_are_found_or_change_nothing(tmp_path):
    path = tmp_path / "ledger.db"
    ledger = Ledger.open(f"sqlite:///{path}", "run")
    published = filled(ledger)
    ledger.recover(published)
    ledger.close()
    whole, want = path.read_bytes(), shown(path, published)
    used = [i for i, byte in enumerate(whole) if byte]  # most of the file is empty
    found = 0
    for place in random.Random(7).sample(used, 60):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        copy = tmp_path / "copy" / "ledger.db"
        copy.parent.mkdir()
        copy.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            got = shown(copy, published)
        except UserError:
            found += 1
        else:
            assert got == want, f"byte {place} was accepted"
    assert found > 30


def shown(path, published):
    """All that a run takes from its ledger."""
    ledger = Ledger.open(f"sqlite:///{path}", "run")
    try:
        ledger.recover(published)
        results = [msgspec.to_builtins(vars(r)) for r in ledger.results(0, consumed_only=True)]
        return [
            results, ledger.figures(), ledger.untrained(), ledger.blobs(), ledger.flagged(), ledger.impossible(),
            ledger.ready_groups(9, in_order=True), ledger.counts(), ledger.represented(),
            [(x.group_id, x.member, x.task_id) for x in ledger.lease("a", 99, LONG)],
        ]  # fmt: skip
    finally:
        ledger.close()


# Blobs


def test_an_altered_episode_is_refused_by_name_and_played_again(ledger, tmp_path):
    store = open_store(str(tmp_path / "rollouts"))
    honest = member(0, False)
    ledger.admit(0, "t", 1, 0)
    (lease,) = ledger.lease("a", 1, LONG)
    blob = digests.put_blob(store, "00000000/0000-0.msgpack", honest)
    assert ledger.finish(
        lease, outcome=Outcome.SCORED, reward=0.0, passed=False, blob=blob, tokens=1, min_version=0, metrics={}
    )
    assert digests.get_blob(store, blob) == honest
    for lie in (msgspec.structs.replace(honest, reward=5.0), msgspec.structs.replace(honest, passed=True)):
        store.put(blob.key, encode(lie))
        with pytest.raises(digests.BlobDamaged, match=r"the episode 00000000/0000-0\.msgpack in .* is damaged"):
            digests.get_blob(store, blob)
    store.delete(blob.key)
    with pytest.raises(UserError, match=r"the episode 00000000/0000-0\.msgpack is gone"):
        digests.get_blob(store, blob)
    assert ledger.untrained() == [(0, 0, blob)]
    ledger.play_again(0, 0)
    assert ledger.ready_groups(1, in_order=True) == []
    ledger.recover([])
    (again,) = ledger.lease("a", 1, LONG)
    assert again.attempt == 1
    assert finish(ledger, again)
    assert ledger.conservation([]).ok
    ledger.consume([0], 1)
    with pytest.raises(ValueError, match="was trained on"):
        ledger.play_again(0, 0)


# Outages


@contextmanager
def losing_answers(ledger, monkeypatch):
    """Every transaction that writes is committed, and its first answer lost."""
    write, lost = ledger._write, Counter()

    @contextmanager
    def losing():
        with write() as c:
            yield c
        lost["answers"] += 1
        if lost["answers"] % 2:
            raise Outage("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "_write", losing)
        yield lost


def test_a_lost_answer_changes_nothing(ledger, monkeypatch):
    with losing_answers(ledger, monkeypatch) as lost:
        for index in range(2):
            ledger.admit(index, "t", 2, 0)
        leases = ledger.lease("a", 3, LONG)
        assert [(x.group_id, x.member, x.attempt) for x in leases] == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
        assert ledger.renew("a", LONG) == 3
        assert all(finish(ledger, lease) for lease in leases[:2])
        assert finish(ledger, leases[2], outcome=Outcome.INFRA)
        (again, other) = ledger.lease("a", 9, LONG)
        assert (again.member, again.attempt, other.member, other.attempt) == (0, 1, 1, 0)
        assert all(finish(ledger, lease) for lease in (again, other))
        ledger.consume([0], 1)
        ledger.add_impossible(0, member(0, False), BLOB)
        ledger.recover([manifest(1, [0])])
    assert lost["answers"] > 20
    found = ledger.conservation([manifest(1, [0])])
    assert found.ok, found.sentence
    assert (found.admitted, found.late, found.retried) == (4, 0, 1)
    assert ledger.impossible().played == 1


@pytest.mark.parametrize(("away", "crash"), [(0.0, False), (0.0, True), (2.0, False)])
def test_a_postgresql_server_that_restarts_loses_and_doubles_nothing(postgres_server, away, crash):
    engine = sa.create_engine(postgres_server.url.replace("postgresql:", "postgresql+psycopg:"))
    player, trainer = Ledger.open(postgres_server.url), Ledger.open(postgres_server.url)
    stop, errors, played, published = threading.Event(), [], Counter(), []

    def plays():
        index = 0
        while not stop.is_set():
            player.admit(index, "t", 2, 0)
            index += 1
            for lease in player.lease("player", 4, LONG):
                played[finish(player, lease)] += 1

    def trains():
        while not stop.is_set():
            if groups := trainer.ready_groups(1, in_order=True):
                published.append(manifest(len(published) + 1, [groups[0].id]))
                trainer.consume(published[-1].groups, published[-1].version)

    def caught(work):
        try:
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=caught, args=(work,)) for work in (plays, trains)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    before = len(published)
    postgres_server.restart(away, crash=crash)
    deadline = time.monotonic() + 30
    while len(published) < before + 5 and time.monotonic() < deadline and not errors:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(published) >= before + 5, "nothing went on after the restart"
    found = player.conservation(published)
    assert found.ok, found.sentence
    assert (found.late, found.retried, found.leased) == (0, 0, 0)
    assert played == {True: sum(found.done.values())}
    player.close()
    trainer.close()
    with engine.begin() as connection:
        for name in ("episodes", "groups", "impossible", "counters", "meta", "engines", "players"):
            connection.execute(sa.text(f"DROP TABLE {name}"))
    engine.dispose()


def test_a_server_that_stays_away_is_one_sentence_after_the_deadline(monkeypatch):
    monkeypatch.setattr(database, "_PAUSE", 0.01)
    began = time.monotonic()
    with pytest.raises(UserError, match="it is away"):
        database.persist(away, 0.3)
    assert time.monotonic() - began < 60


def away(again):
    raise Outage("it is away")


# Clocks


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_clock_that_jumps_ends_no_lease_and_keeps_none(ledger, monkeypatch, jump):
    ledger.admit(0, "t", 2, 0)
    (mine, other) = ledger.lease("alive", 2, 30.0)
    for module in (leases, database, ledger_module, flagged):
        set_clock(monkeypatch, module, time=lambda: time.time() + jump)
    assert ledger.lease("another", 9, 30.0) == [], "nothing is over"
    assert finish(ledger, mine)
    set_clock(monkeypatch, leases, monotonic=lambda: time.monotonic() + 31.0)
    (taken,) = ledger.lease("another", 9, 30.0)
    assert (taken.member, taken.attempt) == (other.member, 1), "nobody has renewed it for 31 seconds"
    assert not finish(ledger, other)
    assert finish(ledger, taken)
    assert ledger.conservation([]).ok


def test_a_renewed_lease_is_seen_to_live(ledger, monkeypatch):
    ledger.admit(0, "t", 1, 0)
    ledger.lease("alive", 1, 30.0)
    for passed in (0.0, 20.0, 40.0, 60.0):
        set_clock(monkeypatch, leases, monotonic=lambda: time.monotonic() + passed)  # noqa: B023
        assert ledger.lease("another", 1, 30.0) == []
        ledger.renew("alive", 30.0)


def test_the_time_of_an_outage_ends_no_lease(ledger, monkeypatch):
    ledger.admit(0, "t", 1, 0)
    ledger.lease("alive", 1, 30.0)
    assert ledger.lease("another", 1, 30.0) == []
    set_clock(monkeypatch, leases, monotonic=lambda: time.monotonic() + 100.0)
    monkeypatch.setattr(leases, "last_outage", lambda: time.monotonic() + 80.0)
    assert ledger.lease("another", 1, 30.0) == [], "its holder has had 20 seconds to renew it"
    set_clock(monkeypatch, leases, monotonic=lambda: time.monotonic() + 111.0)
    assert len(ledger.lease("another", 1, 30.0)) == 1
