"""The transactions of the log's writer: the rows of one group of entries, their blobs, and counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from etude.errors import UserError
from etude.live.gateway.entries import Entry, ServedEntry, SignalEntry, SuggestionEntry, TurnEntry
from etude.live.gateway.queue import PendingCounts
from etude.live.gateway.subjects import (
    Subject,
    counted_names,
    counter_names,
    edited_turns,
    known_events,
    subjects_of,
    turns_of,
)
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, new_blob, seal
from etude.live.log.records import ServedTurn, Session, Signal, Suggestion
from etude.live.log.withdrawals import withdraw, withdrawn_at
from etude.store import Store

_DAY = 24 * 3600 * 10**9  # nanoseconds
_SERVED = _DAY  # during which signals on a turn without consent are accepted
_COUNTED = 90 * _DAY  # during which counters, and ids in bodies of answers, are kept
_PURGE_SECONDS = 60.0
_PUTS = 4  # blobs at once: their syncs share the disk's

E = TypeVar("E", bound=Entry)


@dataclass
class _WriteGroup:
    """The entries of one transaction, their statuses, and the blobs that it has written."""

    entries: list[Entry]
    counts: PendingCounts
    at: int = 0  # the time of the first entry
    statuses: dict[int, str] = field(default_factory=dict[int, str])
    blobs: list[str] = field(default_factory=list[str])

    def of(self, kind: type[E]) -> list[tuple[int, E]]:
        """The entries of a kind, with their numbers."""
        return [(number, entry) for number, entry in enumerate(self.entries) if isinstance(entry, kind)]


class Transactions:
    """The transactions on the database `engine` and the blob store. `slot` maps a time to its slot; survival is counted
    at the horizon `window_seconds`."""

    def __init__(
        self,
        engine: sa.Engine,
        store: Store,
        accounts: Accounts,
        slot: Callable[[int], int],
        window_seconds: float,
    ) -> None:
        self._engine = engine
        self._store = store
        self._accounts = accounts
        self._slot = slot
        self._window_seconds = window_seconds
        self._insert: Any = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
        self._puts = ThreadPoolExecutor(_PUTS, "blobs")
        self._purged = 0.0  # on the monotonic clock

    def close(self) -> None:
        """Ends the threads that write blobs."""
        self._puts.shutdown(wait=False)

    def write(self, entries: list[Entry], counts: PendingCounts) -> list[str]:
        """Writes a group; returns the status of each entry, as in `RecordQueue.submit`, or "forgotten" for a turn of an
        account without a key, or with a consent that was taken back meanwhile. Raises errors of the database and the
        store, with nothing written."""
        own = PendingCounts()
        own.add(counts)
        group = _WriteGroup(entries, own)
        try:
            with self._engine.begin() as connection:
                group.at = journal.stamp(connection, len(entries) + 1)
                withdraw(connection, self._store, own.withdrawn, group.at)
                self._turns(connection, group)
                self._suggestions(connection, group)
                self._signals(connection, group)
                self._counters(connection, group)
        except BaseException:
            for name in group.blobs:  # as far as the store can be reached
                try:
                    self._store.delete(name)
                except UserError:
                    break
            raise
        return [group.statuses[number] for number in range(len(entries))]

    def _turns(self, connection: sa.Connection, group: _WriteGroup) -> None:
        entries = group.of(TurnEntry)
        owners = {entry.session.account: entry.session.tenant for _, entry in entries}
        keys = self._accounts.keys(connection, owners, group.at)
        refused = withdrawn_at(connection, owners)
        kept = [
            (number, entry)
            for number, entry in entries
            if entry.session.account in keys and entry.session.consent.at > refused.get(entry.session.account, -1)
        ]
        group.statuses |= {number: "forgotten" for number, _ in entries} | {number: "recorded" for number, _ in kept}
        sequences = _last_sequences(connection, {entry.session.id for _, entry in kept})
        sessions, turns, blobs = dict[str, Session](), list[ServedTurn](), dict[str, bytes]()
        for number, entry in kept:
            session, turn, at = entry.session, entry.turn, group.at + number
            sessions.setdefault(session.id, msgspec.structs.replace(session, opened=at))
            name = None
            if entry.content is not None:
                name = new_blob(session.account)
                blobs[name] = seal(keys[session.account], msgspec.msgpack.encode(entry.content), name)
            sequences[session.id] += 1
            turns.append(msgspec.structs.replace(turn, sequence=sequences[session.id], blob=name, at=at))
        self._put(group, blobs)
        self._insert_new(connection, schema.sessions, map(journal.row, sessions.values()))
        if turns:
            journal.add(connection, turns)
        served = group.of(ServedEntry)
        rows = [_served_row(e, group.at + n) for n, e in served]
        self._insert_new(connection, schema.served, rows)
        named = [(e.answer, e.session.tenant, e.turn.id, e.session.account, n) for n, e in kept]
        named += [(e.answer, e.key.tenant, e.turn, e.account, n) for n, e in served]
        self._answers(connection, group, named)
        group.statuses |= {number: "recorded" for number, _ in served}

    def _answers(
        self, connection: sa.Connection, group: _WriteGroup, named: list[tuple[str, str, str, str, int]]
    ) -> None:
        """Rows of (name, tenant, turn, account, number) with a name. An id of several turns is none's."""
        table, rows = schema.answers, dict[tuple[str, str], dict[str, Any]]()
        for name, tenant, turn, account, number in named:
            own = self._digest(tenant, name)  # another server's id may hold anything
            row = {"tenant": tenant, "name": own, "turn": turn, "account": account, "at": group.at + number}
            if name and rows.setdefault((tenant, name), row)["turn"] != turn:
                rows[tenant, name]["turn"] = ""
        if rows:
            insert = self._insert(table)
            one = sa.case((table.c.turn == insert.excluded.turn, table.c.turn), else_="")
            connection.execute(
                insert.on_conflict_do_update(index_elements=["tenant", "name"], set_={"turn": one}), [*rows.values()]
            )

    def _digest(self, tenant: str, name: str) -> str:
        return self._accounts.digest("answer", tenant, name)

    def _put(self, group: _WriteGroup, blobs: dict[str, bytes]) -> None:
        group.blobs += blobs
        puts = [self._puts.submit(self._store.put, *blob) for blob in blobs.items()]
        wait(puts)  # all, so that a failed group can delete its blobs
        for done in puts:
            done.result()

    def _suggestions(self, connection: sa.Connection, group: _WriteGroup) -> None:
        named = turns_of(
            connection, {(e.tenant, e.suggestion.turn) for _, e in group.of(SuggestionEntry)}, self._digest
        )
        entries = [(number, _resolved(entry, named)) for number, entry in group.of(SuggestionEntry)]
        names = {entry.suggestion.turn for _, entry in entries}
        subjects = subjects_of(connection, names)
        known = journal.of_ids(connection, Suggestion, [entry.suggestion.id for _, entry in entries])
        edited = edited_turns(connection, names) | {name for name, subject in subjects.items() if subject.edited}
        rows, marked = dict[str, Suggestion](), list[str]()
        for number, entry in entries:
            suggestion, subject = entry.suggestion, subjects.get(entry.suggestion.turn)
            if subject is None or not _belongs(subject, entry.tenant, entry.account):
                group.statuses[number] = "unknown" if suggestion.turn else "ambiguous"
                continue
            if subject.turn not in edited:
                edited.add(subject.turn)
                marked.append(subject.turn)
                self._count(group, subject, "edits", 1.0)
            if not subject.recorded:
                group.statuses[number] = "unrecorded"
            elif (before := known.get(suggestion.id) or rows.get(suggestion.id)) is not None:
                group.statuses[number] = "duplicate" if before.turn == suggestion.turn else "unknown"
            else:
                rows[suggestion.id] = msgspec.structs.replace(suggestion, shown=group.at + number)
                group.statuses[number] = "recorded"
        if rows:
            journal.add(connection, rows.values())
        if marked:
            connection.execute(sa.update(schema.served).where(schema.served.c.turn.in_(marked)).values(edited=1))

    def _signals(self, connection: sa.Connection, group: _WriteGroup) -> None:
        named = turns_of(
            connection, {(e.signal.tenant, e.signal.subject) for _, e in group.of(SignalEntry)}, self._digest
        )
        entries = [(number, _of_turn(entry, named)) for number, entry in group.of(SignalEntry)]
        subjects = subjects_of(connection, {entry.signal.subject for _, entry in entries})
        known = known_events(connection, [entry.signal for _, entry in entries])
        counted = counted_names(connection, {subject.turn for subject in subjects.values()}, self._window_seconds)
        fresh = list[tuple[int, Signal, Subject, str | None]]()
        for number, entry in entries:
            signal, subject = entry.signal, subjects.get(entry.signal.subject)
            if subject is None or not _belongs(subject, signal.tenant, entry.account):
                group.statuses[number] = "unknown" if signal.subject else "ambiguous"
            elif (before := known.get((signal.tenant, signal.event))) is not None:
                same = before == (signal.subject, signal.kind.value)
                group.statuses[number] = "duplicate" if same else "conflict"
            else:
                known[signal.tenant, signal.event] = signal.subject, signal.kind.value
                group.statuses[number] = "recorded"
                for name in counter_names(signal.kind, signal.horizon, self._window_seconds):
                    if (subject.turn, name) not in counted:
                        counted.add((subject.turn, name))
                        self._count(group, subject, name, signal.value)
                fresh.append((number, signal, subject, entry.comment if subject.recorded else None))
        owners = {subject.account: subject.key.tenant for _, _, subject, text in fresh if text is not None}
        keys = self._accounts.keys(connection, owners, group.at)
        rows, blobs = list[Signal](), dict[str, bytes]()
        for number, signal, subject, text in fresh:
            name = None
            if text is not None and (account := subject.account) in keys:
                name = new_blob(account)
                blobs[name] = seal(keys[account], text.encode("utf-8", "replace"), name)
            rows.append(msgspec.structs.replace(signal, arrived_at=group.at + number, text=name))
        self._put(group, blobs)
        if rows:
            journal.add(connection, rows)

    def _count(self, group: _WriteGroup, subject: Subject, name: str, value: float) -> None:
        total = group.counts.totals[subject.key, self._slot(subject.at), name]
        total.count += 1
        total.total += value

    def _counters(self, connection: sa.Connection, group: _WriteGroup) -> None:
        totals = [
            {**key._asdict(), "slot": slot, "name": name, "count": total.count, "total": total.total}
            for (key, slot, name), total in group.counts.totals.items()
        ]
        self._add_to(connection, schema.tallies, totals, ("count", "total"))
        drops = [{"reason": reason, "hour": hour, "count": n} for (reason, hour), n in group.counts.drops.items()]
        self._add_to(connection, schema.drops, drops, ("count",))
        if time.monotonic() > self._purged + _PURGE_SECONDS:
            old = schema.served.c.at < group.at - _SERVED
            connection.execute(sa.delete(schema.served).where(old))
            connection.execute(sa.delete(schema.answers).where(schema.answers.c.at < group.at - _COUNTED))
            first = self._slot(group.at - _COUNTED)
            connection.execute(sa.delete(schema.tallies).where(schema.tallies.c.slot < first))
            self._purged = time.monotonic()

    def _insert_new(self, connection: sa.Connection, table: sa.Table, rows: Iterable[dict[str, Any]]) -> None:
        """Inserts the rows with new keys."""
        if values := list(rows):
            connection.execute(self._insert(table).on_conflict_do_nothing(), values)

    def _add_to(
        self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]], names: tuple[str, ...]
    ) -> None:
        """Adds the columns `names` to existing rows, and inserts the other rows."""
        if not rows:
            return
        insert = self._insert(table)
        more = {name: table.c[name] + insert.excluded[name] for name in names}
        keys = [column.name for column in table.primary_key]
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=more), rows)


def _served_row(entry: ServedEntry, at: int) -> dict[str, Any]:
    key = entry.key
    owner = {"tenant": key.tenant, "account": entry.account, "voucher": key.account}
    return {"turn": entry.turn, **owner, "release": key.release, "arm": key.arm, "edited": 0, "at": at}


def _belongs(subject: Subject, tenant: str, account: str) -> bool:
    return subject.key.tenant == tenant and account in ("", subject.account)


def _of_turn(entry: SignalEntry, named: Mapping[tuple[str, str], str]) -> SignalEntry:
    """The signal with its turn as subject in place of the id of a body."""
    signal = entry.signal
    turn = named.get((signal.tenant, signal.subject), signal.subject)
    return replace(entry, signal=msgspec.structs.replace(signal, subject=turn))


def _resolved(entry: SuggestionEntry, named: Mapping[tuple[str, str], str]) -> SuggestionEntry:
    """The same of a suggestion."""
    turn = named.get((entry.tenant, entry.suggestion.turn), entry.suggestion.turn)
    return replace(entry, suggestion=msgspec.structs.replace(entry.suggestion, turn=turn))


def _last_sequences(connection: sa.Connection, sessions: set[str]) -> dict[str, int]:
    """The last number of each session's turns; 0 for a new session."""
    table = schema.turns
    last = sa.select(table.c.session, sa.func.max(table.c.sequence)).where(table.c.session.in_(sorted(sessions)))
    rows = connection.execute(last.group_by(table.c.session)) if sessions else ()
    return dict.fromkeys(sessions, 0) | {row[0]: row[1] for row in rows}
