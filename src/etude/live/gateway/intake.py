"""One writer of the log: turns, suggestions and signals come from a bounded queue and are committed in groups.

    intake.append(TurnEntry(...))        never waits; False: dropped and counted, the answer went out all the same
    intake.submit([SignalEntry(...)])    a future: what became of each, once it is on the disk
    intake.count(key, "requests", 1.0)   content-free counters, with the next commit

Nothing of a content reaches the disk before it is scrubbed and encrypted. If the disk is full or the database is away,
turns are dropped, counted by reason, and futures raise `Unavailable`; counters wait in memory.
"""

from __future__ import annotations

import errno
import queue
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

from etude.errors import UserError
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, new_blob, seal
from etude.live.log.records import Arm, LivePolicy, ServedTurn, Session, Signal, SignalKind, Suggestion, TurnContent
from etude.live.log.scrub import Scrubber, rules_version
from etude.store import Store

_GROUP = 256  # entries of a commit
_GROUP_BYTES = 32 << 20
_QUEUE_BYTES = 256 << 20
_LINGER_SECONDS = 0.03  # for others to come along: a commit costs about the same for one and for many
_COUNT_SECONDS = 0.5  # after which counters are written, also if there is nothing else
_HOUR = 3600 * 10**9
_SERVED = 24 * _HOUR  # nanoseconds for which a turn without consent may be signalled on
_COUNTED = 90 * 24 * _HOUR  # nanoseconds for which counters are kept
_PUTS = 4  # blobs at once: their syncs share the disk's
_MOST_COUNTERS = 100_000  # that wait for the log; what finds no room is in `IntakeCounters.uncounted`


class Unavailable(Exception):
    """The log cannot be written now; try again later."""


class Key(NamedTuple):
    """Under which release, arm and account something is counted; an account has one tenant."""

    release: int
    arm: Arm
    account: str
    tenant: str


@dataclass(frozen=True)
class TurnEntry:
    """A turn with consent. Writing sets `session.opened`; of the turn `sequence`, `blob`, `scrubbed`, `rules` and `at`.
    Without `content` the turn's `reason` says why there is none. `text`: the tokens as text, which is looked through
    beside request and response: a prompt may hold more than its request. What the rules `keep` find in
    the request stays."""

    session: Session
    turn: ServedTurn
    content: TurnContent | None = None
    text: str = ""
    keep: tuple[str, ...] = LivePolicy().keep

    @property
    def bytes(self) -> int:
        """What it holds in memory, about."""
        content = self.content
        if content is None:
            return 1000
        parts = content.request, content.response, content.prompt_ids, content.ids, content.logprobs, self.text
        return 1000 + sum(map(len, parts))


@dataclass(frozen=True)
class ServedEntry:
    """A turn without consent: only what a signal on it is counted under, for a day."""

    turn: str
    key: Key


@dataclass(frozen=True)
class SuggestionEntry:
    """An edit of a turn of `tenant`. Writing sets `shown`."""

    tenant: str
    suggestion: Suggestion


@dataclass(frozen=True)
class SignalEntry:
    """A signal; writing sets `arrived_at` and, if there is a text, `text`."""

    signal: Signal
    comment: str | None = None


OUTCOMES = (
    SignalKind.REJECTED, SignalKind.UNDONE, SignalKind.SURVIVED, SignalKind.REVERTED, SignalKind.OVERWRITTEN,
)  # fmt: skip
"""What became of an edit. The first of them counts it as "labelled"."""

Entry: TypeAlias = TurnEntry | ServedEntry | SuggestionEntry | SignalEntry


@dataclass
class _Job:
    """Entries of one caller, who waits for `future` if there is one."""

    entries: list[Any]
    bytes: int
    future: Future[list[str]] | None = None


class _Subject(NamedTuple):
    """What a signal is on, and the turn (or session) of which it is counted."""

    key: Key
    turn: str
    at: int
    recorded: bool  # with content
    edited: bool = False  # of an unrecorded turn


@dataclass
class _Totals:
    count: int = 0
    total: float = 0.0


@dataclass
class IntakeCounters:
    """Since the gateway began."""

    turns: int = 0
    signals: int = 0
    duplicates: int = 0
    commits: int = 0
    failed_commits: int = 0
    uncounted: int = 0  # counts that were lost while the log could not be written
    drops: Counter[str] = field(default_factory=Counter[str])


class Intake:
    """The writer's thread and its queue of `most` entries. Counters are kept by slots of `slot_seconds`; survival is
    counted at `window_seconds`. `close` writes what is queued."""

    def __init__(
        self, engine: sa.Engine, store: Store, accounts: Accounts, most: int = 4096, *, slot_seconds: float = 600.0,
        window_seconds: float = 1800.0,
    ) -> None:  # fmt: skip
        self.counters = IntakeCounters()
        self._engine, self._store, self._accounts, self._most = engine, store, accounts, most
        self._insert: Any = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held = self._held_bytes = 0
        self._slot = round(slot_seconds * 10**9)
        self.window_seconds = window_seconds
        self._totals: dict[tuple[Key, int, str], _Totals] = defaultdict(_Totals)
        self._drops: Counter[tuple[str, int]] = Counter()
        self._scrubber = Scrubber()
        self._puts = ThreadPoolExecutor(_PUTS, "blobs")
        self._closed = False
        self._purged = 0.0
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._thread.start()

    # Callers ----------------------------------------------------------------------------------------------------------

    def append(self, entry: TurnEntry | ServedEntry) -> bool:
        """Queues a turn. False if the queue is full: it is dropped."""
        size = entry.bytes if isinstance(entry, TurnEntry) else 200
        if self._enqueue(_Job([entry], size)):
            return True
        self._drop(entry, "queue_full")
        return False

    def submit(self, entries: Sequence[SignalEntry | SuggestionEntry]) -> Future[list[str]]:
        """Queues signals and suggestions. The future tells of each "recorded", "duplicate", "unrecorded" (an edit of a
        turn without consent) or "unknown"; it raises Unavailable if nothing of them was written."""
        future: Future[list[str]] = Future()
        size = sum(500 + len(getattr(entry, "comment", None) or "") for entry in entries)
        if not self._enqueue(_Job(list(entries), size, future)):
            future.set_exception(Unavailable("too many records wait for the disk"))
        return future

    def count(self, key: Key, name: str, value: float = 0.0, count: int = 1) -> None:
        """Adds to a counter of now."""
        slot = self.slot(time.time_ns())
        with self._lock:
            if len(self._totals) >= _MOST_COUNTERS and (key, slot, name) not in self._totals:
                self.counters.uncounted += count
                return
            total = self._totals[key, slot, name]
            total.count += count
            total.total += value

    def slot(self, at: int) -> int:
        """The slot of a time in nanoseconds."""
        return at // self._slot

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts turns that were answered and are not recorded."""
        with self._lock:
            self.counters.drops[reason] += count
            self._drops[reason, _hour()] += count

    def _drop(self, entry: Any, reason: str) -> None:
        self.drop(reason)
        if isinstance(entry, TurnEntry):
            session = entry.session
            self.count(Key(entry.turn.release, session.arm, session.account, session.tenant), "dropped")

    @property
    def waiting(self) -> int:
        """Entries in the queue."""
        return self._held

    def close(self, seconds: float = 30.0) -> None:
        """Writes what is queued, and ends. Nothing may be appended any more."""
        self._closed = True
        self._queue.put(_Job([], 0))
        self._thread.join(seconds)
        self._puts.shutdown(wait=False)
        self._scrubber.close()

    def _enqueue(self, job: _Job) -> bool:
        with self._lock:
            if self._held + len(job.entries) > self._most or self._held_bytes + job.bytes > _QUEUE_BYTES:
                return False
            self._held += len(job.entries)
            self._held_bytes += job.bytes
        self._queue.put(job)
        return True

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            jobs = self._take()
            if jobs or self._totals or self._drops:
                self._commit(jobs)
            if self._closed and self._queue.empty():
                return

    def _take(self) -> list[_Job]:
        jobs, count, size = list[_Job](), 0, 0
        try:
            jobs.append(self._queue.get(timeout=_COUNT_SECONDS))
            if not self._closed:
                time.sleep(_LINGER_SECONDS)
            while count < _GROUP and size < _GROUP_BYTES:
                count, size = count + len(jobs[-1].entries), size + jobs[-1].bytes
                jobs.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        with self._lock:
            self._held -= sum(len(job.entries) for job in jobs)
            self._held_bytes -= sum(job.bytes for job in jobs)
        return [job for job in jobs if job.entries]

    def _commit(self, jobs: list[_Job], again: bool = False) -> None:
        """One transaction. If a record of it is refused, each job gets a transaction of its own (`again`)."""
        ready = [job for job in jobs if self._scrub(job)]
        with self._lock:
            totals, self._totals = self._totals, defaultdict(_Totals)
            drops, self._drops = self._drops, Counter()
        group = _Writing(self, [entry for job in ready for entry in job.entries], totals, drops)
        try:
            results = iter(group.write())
        except Exception as e:  # the thread must live on, whatever a record holds
            self.counters.failed_commits += 1
            self._engine.dispose()
            self._put_back(totals, drops)
            if not isinstance(e, (OperationalError, InterfaceError, UserError, OSError)):
                print(f"the live log refused a group: {type(e).__name__} {e}"[:500], file=sys.stderr, flush=True)
            if len(ready) > 1 and not isinstance(e, (OperationalError, InterfaceError)):  # one of them is at fault
                for job in ready:
                    self._commit([job], again=True)
                return
            self._fail(ready, e)
            if not again:  # what is away is not asked without a pause; signals may be waiting behind these
                time.sleep(0.05 if self._closed else 0.2)
            return
        self.counters.commits += 1
        for job in ready:
            told = [next(results) for _ in job.entries]
            self.counters.turns += sum(isinstance(e, TurnEntry) for e in job.entries)
            self.counters.signals += told.count("recorded") if job.future is not None else 0
            self.counters.duplicates += told.count("duplicate")
            if job.future is not None and job.future.set_running_or_notify_cancel():
                job.future.set_result(told)

    def _put_back(self, totals: dict[tuple[Key, int, str], _Totals], drops: Counter[tuple[str, int]]) -> None:
        with self._lock:
            for key, total in totals.items():
                self._totals[key].count += total.count
                self._totals[key].total += total.total
            self._drops.update(drops)

    def _fail(self, jobs: Iterable[_Job], error: Exception) -> None:
        for job in jobs:
            if job.future is None:
                for entry in job.entries:
                    self._drop(entry, _reason(error))
            elif job.future.set_running_or_notify_cancel():
                job.future.set_exception(Unavailable("the log cannot be written now"))

    def _scrub(self, job: _Job) -> bool:
        """Replaces the entries of a job by scrubbed ones. False if that could not be done: the job has failed."""
        try:
            job.entries = [self._scrubbed(entry) for entry in job.entries]
        except Exception:  # whatever is wrong with it, it is not kept, and the thread lives on
            if job.future is None:
                for entry in job.entries:
                    self._drop(entry, "scrub")
            elif job.future.set_running_or_notify_cancel():
                job.future.set_exception(Unavailable("the texts could not be looked through for secrets"))
            return False
        return True

    def _scrubbed(self, entry: Entry) -> Entry:
        if isinstance(entry, SignalEntry) and entry.comment is not None:
            (text,), _ = self._scrubber.scrub(msgspec.json.encode(entry.comment))
            return replace(entry, comment=msgspec.json.decode(text, type=str))
        if not isinstance(entry, TurnEntry) or entry.content is None:
            return entry
        content, lines = entry.content, msgspec.json.encode(entry.text.splitlines())
        (request, response, _), counts = self._scrubber.scrub(
            content.request, content.response, lines, keep=entry.keep
        )  # fmt: skip
        turn = msgspec.structs.replace(entry.turn, scrubbed=counts, rules=rules_version())
        if counts:  # the tokens hold what was replaced
            turn = msgspec.structs.replace(turn, reason="scrubbed")
            content = msgspec.structs.replace(
                content, request=request, response=response, prompt_ids=b"", ids=b"", logprobs=b""
            )
        return replace(entry, turn=turn, content=content, text="")


class _Writing:
    """What one transaction writes."""

    def __init__(
        self, intake: Intake, entries: list[Entry], totals: dict[tuple[Key, int, str], _Totals],
        drops: Counter[tuple[str, int]],
    ) -> None:  # fmt: skip
        self._i, self._entries, self._drops = intake, entries, drops
        self._totals = {key: _Totals(t.count, t.total) for key, t in totals.items()}
        self._results: dict[int, str] = {}
        self._blobs = list[str]()

    def write(self) -> list[str]:
        """The results of the entries. Raises what the database or the store raises; nothing is written then."""
        try:
            with self._i._engine.begin() as connection:
                self._at = journal.stamp(connection, len(self._entries) + 1)
                self._turns(connection)
                self._suggestions(connection)
                self._signals(connection)
                self._counters(connection)
        except BaseException:
            for name in self._blobs:  # as far as the store can be reached
                try:
                    self._i._store.delete(name)
                except UserError:
                    break
            raise
        return [self._results[number] for number in range(len(self._entries))]

    def _of(self, kind: type[Any]) -> list[tuple[int, Any]]:
        return [(number, entry) for number, entry in enumerate(self._entries) if isinstance(entry, kind)]

    def _turns(self, connection: sa.Connection) -> None:
        entries = self._of(TurnEntry)
        owners = {entry.session.account: entry.session.tenant for _, entry in entries}
        keys = self._i._accounts.keys(connection, owners, self._at)
        kept = [(number, entry) for number, entry in entries if entry.session.account in keys]
        for number, _ in entries:
            self._results[number] = "recorded"
        if gone := len(entries) - len(kept):  # forgotten meanwhile
            self._i.drop("forgotten", gone)
        sequences = self._sequences(connection, {entry.session.id for _, entry in kept})
        sessions, turns, blobs = dict[str, Session](), list[ServedTurn](), dict[str, bytes]()
        for number, entry in kept:
            session, turn, at = entry.session, entry.turn, self._at + number
            sessions.setdefault(session.id, msgspec.structs.replace(session, opened=at))
            name = None
            if entry.content is not None:
                name = new_blob(session.account)
                blobs[name] = seal(keys[session.account], msgspec.msgpack.encode(entry.content), name)
            sequences[session.id] += 1
            turns.append(msgspec.structs.replace(turn, sequence=sequences[session.id], blob=name, at=at))
        self._put(blobs)
        self._insert(connection, schema.sessions, map(journal.row, sessions.values()))
        if turns:
            journal.add(connection, turns)
        served = self._of(ServedEntry)
        rows = [
            {"turn": e.turn, **e.key._asdict(), "edited": 0, "at": self._at + n} for n, e in served
        ]  # fmt: skip
        self._insert(connection, schema.served, rows)
        self._results |= {number: "recorded" for number, _ in served}

    def _put(self, blobs: dict[str, bytes]) -> None:
        self._blobs += blobs
        puts = [self._i._puts.submit(self._i._store.put, *blob) for blob in blobs.items()]
        wait(puts)  # all of them: what is written must be there before it is deleted again
        for done in puts:
            done.result()

    def _sequences(self, connection: sa.Connection, sessions: set[str]) -> dict[str, int]:
        """The last number of each session's turns; 0 of a new one."""
        table = schema.turns
        last = sa.select(table.c.session, sa.func.max(table.c.sequence)).where(table.c.session.in_(sorted(sessions)))
        rows = connection.execute(last.group_by(table.c.session)) if sessions else ()
        return dict.fromkeys(sessions, 0) | {row[0]: row[1] for row in rows}

    def _suggestions(self, connection: sa.Connection) -> None:
        entries = self._of(SuggestionEntry)
        names = {entry.suggestion.turn for _, entry in entries}
        subjects = self._subjects(connection, names)
        known = journal.of_ids(connection, Suggestion, [entry.suggestion.id for _, entry in entries])
        edited = self._edited(connection, names) | {name for name, subject in subjects.items() if subject.edited}
        rows, marked = dict[str, Suggestion](), list[str]()
        for number, entry in entries:
            suggestion, subject = entry.suggestion, subjects.get(entry.suggestion.turn)
            if subject is None or subject.key.tenant != entry.tenant:
                self._results[number] = "unknown"
                continue
            if subject.turn not in edited:
                edited.add(subject.turn)
                marked.append(subject.turn)
                self._add(subject, "edits", 1.0)
            if not subject.recorded:
                self._results[number] = "unrecorded"
            elif (before := known.get(suggestion.id) or rows.get(suggestion.id)) is not None:
                self._results[number] = "duplicate" if before.turn == suggestion.turn else "unknown"
            else:
                rows[suggestion.id] = msgspec.structs.replace(suggestion, shown=self._at + number)
                self._results[number] = "recorded"
        if rows:
            journal.add(connection, rows.values())
        if marked:
            connection.execute(sa.update(schema.served).where(schema.served.c.turn.in_(marked)).values(edited=1))

    def _edited(self, connection: sa.Connection, turns: set[str]) -> set[str]:
        """Those of the turns that have edits."""
        found, names, column = set[str](), sorted(turns), schema.suggestions.c.turn
        for low in range(0, len(names), 500):
            found |= set(connection.scalars(sa.select(column).where(column.in_(names[low : low + 500])).distinct()))
        return found

    def _signals(self, connection: sa.Connection) -> None:
        entries = self._of(SignalEntry)
        subjects = self._subjects(connection, {entry.signal.subject for _, entry in entries})
        known = self._events(connection, [entry.signal for _, entry in entries])
        counted = self._counted(connection, {subject.turn for subject in subjects.values()})
        fresh = list[tuple[int, Signal, _Subject, str | None]]()
        for number, entry in entries:
            signal, subject = entry.signal, subjects.get(entry.signal.subject)
            if subject is None or subject.key.tenant != signal.tenant:
                self._results[number] = "unknown"
            elif (signal.tenant, signal.event) in known:
                self._results[number] = "duplicate"
            else:
                known.add((signal.tenant, signal.event))
                self._results[number] = "recorded"
                for name in self._names(signal.kind, signal.horizon):
                    if (subject.turn, name) not in counted:
                        counted.add((subject.turn, name))
                        self._add(subject, name, signal.value)
                fresh.append((number, signal, subject, entry.comment if subject.recorded else None))
        owners = {subject.key.account: subject.key.tenant for _, _, subject, text in fresh if text is not None}
        keys = self._i._accounts.keys(connection, owners, self._at)
        rows, blobs = list[Signal](), dict[str, bytes]()
        for number, signal, subject, text in fresh:
            name = None
            if text is not None and (account := subject.key.account) in keys:
                name = new_blob(account)
                blobs[name] = seal(keys[account], text.encode("utf-8", "replace"), name)
            rows.append(msgspec.structs.replace(signal, arrived_at=self._at + number, text=name))
        self._put(blobs)
        if rows:
            journal.add(connection, rows)

    def _names(self, kind: SignalKind, horizon: float | None) -> list[str]:
        """The counters that a signal counts for."""
        names = ["labelled"] if kind in OUTCOMES else []
        return names if kind == SignalKind.SURVIVED and horizon != self._i.window_seconds else [*names, kind.value]

    def _counted(self, connection: sa.Connection, turns: set[str]) -> set[tuple[str, str]]:
        """The counters that earlier signals on the turns, or on their edits, counted for."""
        s, g, found, names = schema.signals.c, schema.suggestions.c, set[tuple[str, str]](), sorted(turns)
        for low in range(0, len(names), 500):
            page = names[low : low + 500]
            on_turns = sa.select(s.subject, s.kind, s.horizon).where(s.subject.in_(page))
            joined = schema.signals.join(schema.suggestions, g.id == s.subject)
            on_edits = sa.select(g.turn, s.kind, s.horizon).select_from(joined).where(g.turn.in_(page))
            for query in (on_turns, on_edits):
                for turn, kind, horizon in connection.execute(query.distinct()):
                    found |= {(turn, name) for name in self._names(SignalKind(kind), horizon)}
        return found

    def _events(self, connection: sa.Connection, signals: list[Signal]) -> set[tuple[str, str]]:
        table, found = schema.signals, set[tuple[str, str]]()
        for tenant in {signal.tenant for signal in signals}:
            events = [signal.event for signal in signals if signal.tenant == tenant]
            for low in range(0, len(events), 500):
                chosen = (table.c.tenant == tenant) & table.c.event.in_(events[low : low + 500])
                found |= {(tenant, event) for (event,) in connection.execute(sa.select(table.c.event).where(chosen))}
        return found

    def _subjects(self, connection: sa.Connection, names: set[str]) -> dict[str, _Subject]:
        """Suggestions, turns, sessions and unrecorded turns of these identifiers; none of an account that was
        forgotten."""
        found, left = dict[str, _Subject](), sorted(names)
        s, t, g, u = schema.sessions, schema.turns, schema.suggestions, schema.served
        for low in range(0, len(left), 500):
            page = left[low : low + 500]
            of_turns = t.join(s, s.c.id == t.c.session)
            of_edits = g.join(of_turns, t.c.id == g.c.turn)
            by_turn = (t.c.release, s.c.arm, s.c.account, s.c.tenant, t.c.id, t.c.at)
            by_session = (s.c.release, s.c.arm, s.c.account, s.c.tenant, s.c.id, s.c.opened)
            unrecorded = (u.c.release, u.c.arm, u.c.account, u.c.tenant, u.c.turn, u.c.at)
            queries = (
                sa.select(t.c.id, *by_turn, sa.true(), sa.false()).select_from(of_turns).where(t.c.id.in_(page)),
                sa.select(g.c.id, *by_turn, sa.true(), sa.false()).select_from(of_edits).where(g.c.id.in_(page)),
                sa.select(s.c.id, *by_session, sa.true(), sa.false()).where(s.c.id.in_(page)),
                sa.select(u.c.turn, *unrecorded, sa.false(), u.c.edited == 1).where(u.c.turn.in_(page)),
            )
            for query in queries:
                for name, release, arm, account, tenant, turn, at, recorded, edited in connection.execute(query):
                    key = Key(release, Arm(arm), account, tenant)
                    found[name] = _Subject(key, turn, at, bool(recorded), bool(edited))
        stones, accounts = schema.tombstones.c.account, sorted({subject.key.account for subject in found.values()})
        gone = set[str]()
        for low in range(0, len(accounts), 500):
            gone |= set(connection.scalars(sa.select(stones).where(stones.in_(accounts[low : low + 500]))))
        return {name: subject for name, subject in found.items() if subject.key.account not in gone}

    def _add(self, subject: _Subject, name: str, value: float) -> None:
        total = self._totals.setdefault((subject.key, self._i.slot(subject.at), name), _Totals())
        total.count += 1
        total.total += value

    def _counters(self, connection: sa.Connection) -> None:
        rows = [
            {**key._asdict(), "slot": slot, "name": name, "count": total.count, "total": total.total}
            for (key, slot, name), total in self._totals.items()
        ]  # fmt: skip
        self._sum(connection, schema.tallies, rows, ("count", "total"))
        drops = [{"reason": reason, "hour": hour, "count": n} for (reason, hour), n in self._drops.items()]
        self._sum(connection, schema.drops, drops, ("count",))
        if time.monotonic() > self._i._purged + 60:
            old = schema.served.c.at < self._at - _SERVED
            connection.execute(sa.delete(schema.served).where(old))
            first = self._i.slot(self._at - _COUNTED)
            connection.execute(sa.delete(schema.tallies).where(schema.tallies.c.slot < first))
            self._i._purged = time.monotonic()

    def _insert(self, connection: sa.Connection, table: sa.Table, rows: Iterable[dict[str, Any]]) -> None:
        if values := list(rows):
            connection.execute(self._i._insert(table).on_conflict_do_nothing(), values)

    def _sum(
        self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]], names: tuple[str, ...]
    ) -> None:
        """Adds to the rows that are there, and makes the others."""
        if not rows:
            return
        insert = self._i._insert(table)
        more = {name: table.c[name] + insert.excluded[name] for name in names}
        keys = [column.name for column in table.primary_key]
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=more), rows)


def _hour() -> int:
    """Hours since the epoch."""
    return time.time_ns() // _HOUR


def _reason(error: Exception) -> str:
    """Under what a dropped turn is counted."""
    text = str(error).lower()
    if "full" in text or "no space" in text or "too large" in text or getattr(error, "errno", 0) == errno.ENOSPC:
        return "disk_full"
    return "database" if isinstance(error, SQLAlchemyError) else "disk"
