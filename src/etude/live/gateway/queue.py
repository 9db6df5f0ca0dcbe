"""The bounded queue between the gateway's requests and the log's writer (`writer.py`).

    queue.append(TurnEntry(...))        never waits; False: the record was dropped and counted (not the answer)
    queue.submit([SignalEntry(...)])    a future: the status of each entry, once all are on the disk
    queue.count(key, "requests", 1.0)   content-free counters, written with the next commit

Turns that cannot be written are dropped and counted by reason, and futures raise `Unavailable`; counters wait in
memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from etude.live.gateway.entries import Entry, Key, ServedEntry, SignalEntry, SuggestionEntry, TurnEntry

MAX_COUNTERS = 100_000
"""Counters that wait for the log; a count beyond them is in `QueueCounters.uncounted`."""
_GROUP = 256  # entries of a commit
_GROUP_BYTES = 32 << 20
_QUEUE_BYTES = 256 << 20
_LINGER_SECONDS = 0.03  # for more entries: a commit of one entry costs about as much as a commit of many
_COUNT_SECONDS = 0.5  # after which counters are written, also without entries
_HOUR = 3600 * 10**9


class Unavailable(Exception):
    """The log cannot be written now; try again later."""


@dataclass
class Job:
    """Entries of one caller, and the future of their statuses if the caller waits."""

    entries: list[Entry]
    bytes: int
    future: Future[list[str]] | None = None


@dataclass
class Total:
    """Number and sum of a counter's values."""

    count: int = 0
    total: float = 0.0


@dataclass
class PendingCounts:
    """Unwritten totals by key, slot and name, drops by reason and hour, and tenants of the accounts that withdrew."""

    totals: dict[tuple[Key, int, str], Total] = field(default_factory=lambda: defaultdict(Total))
    drops: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    withdrawn: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, other: PendingCounts) -> None:
        """Adds other counts."""
        for key, total in other.totals.items():
            self.totals[key].count += total.count
            self.totals[key].total += total.total
        self.drops.update(other.drops)
        self.withdrawn |= other.withdrawn


@dataclass
class QueueCounters:
    """Entries since the gateway began."""

    turns: int = 0
    signals: int = 0
    duplicates: int = 0
    uncounted: int = 0  # counts that were lost while the log could not be written
    drops: Counter[str] = field(default_factory=Counter[str])


class RecordQueue:
    """A queue of at most `max_entries` entries, with counters by slots of `slot_seconds`. Any thread may add entries;
    one writer takes them."""

    def __init__(self, max_entries: int = 4096, *, slot_seconds: float = 600.0) -> None:
        self.max_entries = max_entries
        self.counters = QueueCounters()
        self.closed = False
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._entries = self._bytes = 0
        self._slot = round(slot_seconds * 10**9)
        self._pending = PendingCounts()

    # Callers ----------------------------------------------------------------------------------------------------------

    def append(self, entry: TurnEntry | ServedEntry) -> bool:
        """Queues a turn. False if the queue is full and the turn is dropped."""
        size = entry.bytes if isinstance(entry, TurnEntry) else 200
        if self._enqueue(Job([entry], size)):
            return True
        self._drop(entry, "queue_full")
        return False

    def submit(self, entries: Sequence[SignalEntry | SuggestionEntry]) -> Future[list[str]]:
        """Queues signals and suggestions. The future holds for each "recorded", "duplicate", "unrecorded" (an edit of a
        turn without consent) or "unknown"; it raises Unavailable if none was written."""
        future: Future[list[str]] = Future()
        size = sum(500 + len(getattr(entry, "comment", None) or "") for entry in entries)
        if not self._enqueue(Job(list(entries), size, future)):
            future.set_exception(Unavailable("too many records wait for the disk"))
        return future

    def count(self, key: Key, name: str, value: float = 0.0, count: int = 1) -> None:
        """Adds to a counter of the present slot."""
        slot = self.slot(time.time_ns())
        with self._lock:
            totals = self._pending.totals
            if len(totals) >= MAX_COUNTERS and (key, slot, name) not in totals:
                self.counters.uncounted += count
                return
            total = totals[key, slot, name]
            total.count += count
            total.total += value

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts answered turns that are not recorded."""
        with self._lock:
            self.counters.drops[reason] += count
            self._pending.drops[reason, time.time_ns() // _HOUR] += count

    def withdraw(self, account: str, tenant: str) -> None:
        """Notes that an account refuses to be trained on, from now on and for what it gave before. Never lost while the
        gateway lives."""
        with self._lock:
            self._pending.withdrawn[account] = tenant

    def slot(self, at: int) -> int:
        """The slot of a time in nanoseconds."""
        return at // self._slot

    @property
    def waiting(self) -> int:
        """Entries in the queue."""
        return self._entries

    def close(self) -> None:
        """Closes the queue to new entries, and wakes the writer for the last time."""
        self.closed = True
        self._jobs.put(Job([], 0))

    # The writer -------------------------------------------------------------------------------------------------------

    def take(self) -> list[Job]:
        """The jobs of the next group; empty if none comes within `_COUNT_SECONDS`."""
        jobs, count, size = list[Job](), 0, 0
        try:
            jobs.append(self._jobs.get(timeout=_COUNT_SECONDS))
            if not self.closed:
                time.sleep(_LINGER_SECONDS)
            while count < _GROUP and size < _GROUP_BYTES:
                count, size = count + len(jobs[-1].entries), size + jobs[-1].bytes
                jobs.append(self._jobs.get_nowait())
        except queue.Empty:
            pass
        with self._lock:
            self._entries -= sum(len(job.entries) for job in jobs)
            self._bytes -= sum(job.bytes for job in jobs)
        return [job for job in jobs if job.entries]

    def take_counts(self) -> PendingCounts:
        """Takes the unwritten counts, for the next transaction."""
        with self._lock:
            taken, self._pending = self._pending, PendingCounts()
        return taken

    def return_counts(self, counts: PendingCounts) -> None:
        """Puts counts back that were taken and not written."""
        with self._lock:
            self._pending.add(counts)

    @property
    def has_counts(self) -> bool:
        """Whether counts wait."""
        return bool(self._pending.totals or self._pending.drops or self._pending.withdrawn)

    @property
    def ended(self) -> bool:
        """Whether the queue is closed and empty."""
        return self.closed and self._jobs.empty()

    def resolve(self, job: Job, statuses: list[str]) -> None:
        """Counts the entries of a written job, and completes its future."""
        self.counters.turns += sum(isinstance(entry, TurnEntry) for entry in job.entries)
        self.counters.signals += statuses.count("recorded") if job.future is not None else 0
        self.counters.duplicates += statuses.count("duplicate")
        if forgotten := statuses.count("forgotten"):
            self.drop("forgotten", forgotten)
        if job.future is not None and job.future.set_running_or_notify_cancel():
            job.future.set_result(statuses)

    def fail(self, job: Job, reason: str, message: str) -> None:
        """Drops the turns of a job for `reason`, or fails its future with `message`."""
        if job.future is None:
            for entry in job.entries:
                self._drop(entry, reason)
        elif job.future.set_running_or_notify_cancel():
            job.future.set_exception(Unavailable(message))

    def _drop(self, entry: Entry, reason: str) -> None:
        self.drop(reason)
        if isinstance(entry, TurnEntry):
            session = entry.session
            self.count(Key(entry.turn.release, session.arm, session.voucher, session.tenant), "dropped")

    def _enqueue(self, job: Job) -> bool:
        with self._lock:
            if self._entries + len(job.entries) > self.max_entries or self._bytes + job.bytes > _QUEUE_BYTES:
                return False
            self._entries += len(job.entries)
            self._bytes += job.bytes
        self._jobs.put(job)
        return True
