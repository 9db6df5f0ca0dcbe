"""The thread that writes the log: it scrubs the entries of the queue and commits them in groups.

Every text of a client passes `LogWriter._scrubbed` on its way to the disk: content is scrubbed, and encrypted then;
identifiers that clients choose become keyed hashes; of the client's name stays what looks like one. If the disk is full
or the database is away, turns are dropped by reason, futures fail, and counters go back to the queue.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from dataclasses import replace

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

from etude.code import lines_of
from etude.errors import UserError
from etude.live.gateway.entries import Entry, SignalEntry, SuggestionEntry, TurnEntry
from etude.live.gateway.queue import Job, RecordQueue
from etude.live.gateway.transaction import Transactions
from etude.live.log.accounts import Accounts
from etude.live.log.scrub import Scrubber, known_client, rules_version
from etude.store import Store


class LogWriter:
    """The writer of a queue's entries. Survival is counted at the horizon `window_seconds`."""

    def __init__(
        self,
        queue: RecordQueue,
        engine: sa.Engine,
        store: Store,
        accounts: Accounts,
        *,
        window_seconds: float = 1800.0,
    ) -> None:
        self.commits = 0
        self.failed_commits = 0
        self._queue = queue
        self._engine = engine
        self._accounts = accounts
        self._transactions = Transactions(engine, store, accounts, queue.slot, window_seconds)
        self._scrubber = Scrubber()
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 30.0) -> None:
        """Closes the queue, writes its rest, and ends the thread."""
        self._queue.close()
        self._thread.join(seconds)
        self._transactions.close()
        self._scrubber.close()

    def _run(self) -> None:
        while True:
            jobs = self._queue.take()
            if jobs or self._queue.has_counts:
                self._commit(jobs)
            if self._queue.ended:
                return

    def _commit(self, jobs: list[Job], again: bool = False) -> None:
        """Writes jobs in one transaction. If a record is refused, each job gets its own transaction (`again`)."""
        ready = jobs if again else [job for job in jobs if self._scrub(job)]
        counts = self._queue.take_counts()
        try:
            statuses = iter(self._transactions.write([entry for job in ready for entry in job.entries], counts))
        except Exception as e:  # the thread must live on, whatever a record holds
            self.failed_commits += 1
            self._engine.dispose()
            self._queue.return_counts(counts)
            self._refused(ready, e, again)
            return
        self.commits += 1
        for job in ready:
            self._queue.resolve(job, [next(statuses) for _ in job.entries])

    def _refused(self, jobs: list[Job], error: Exception, again: bool) -> None:
        """Tries each job of a refused group alone, or fails all."""
        if not isinstance(error, (OperationalError, InterfaceError, UserError, OSError)):
            why = getattr(error, "orig", None) or error  # without the values of the statement
            print(f"the live log refused a group: {type(error).__name__} {why}"[:500], file=sys.stderr, flush=True)
        if len(jobs) > 1 and not isinstance(error, (OperationalError, InterfaceError)):  # one of them is at fault
            for job in jobs:
                self._commit([job], again=True)
            return
        for job in jobs:
            self._queue.fail(job, _drop_reason(error), "the log cannot be written now")
        if not again:  # a pause before the next attempt; signals may be waiting behind these
            time.sleep(0.05 if self._queue.closed else 0.2)

    def _scrub(self, job: Job) -> bool:
        """Replaces the entries of a job by scrubbed entries. False if scrubbing, and so the job, has failed."""
        try:
            job.entries = [self._scrubbed(entry) for entry in job.entries]
        except Exception:  # an entry that cannot be scrubbed is not kept, and the thread must live on
            self._queue.fail(job, "scrub", "the texts could not be looked through for secrets")
            return False
        return True

    def _scrubbed(self, entry: Entry) -> Entry:
        digest = self._accounts.digest
        if isinstance(entry, SignalEntry):
            event, comment = digest("event", entry.signal.tenant, entry.signal.event), entry.comment
            if comment is not None:
                (text,), _ = self._scrubber.scrub(msgspec.json.encode(comment))
                comment = msgspec.json.decode(text, type=str)
            return replace(entry, signal=msgspec.structs.replace(entry.signal, event=event), comment=comment)
        if isinstance(entry, SuggestionEntry):
            edit = entry.suggestion
            base, new = (digest("lines", entry.tenant, text) for text in (edit.base, edit.new))
            return replace(entry, suggestion=msgspec.structs.replace(edit, base=base, new=new))
        if isinstance(entry, TurnEntry):
            session = entry.session
            client = known_client(session.client, digest("client", session.tenant, session.client))
            entry = replace(entry, session=msgspec.structs.replace(session, client=client))
        if not isinstance(entry, TurnEntry) or entry.content is None:
            return entry
        content, lines = entry.content, msgspec.json.encode(lines_of(entry.text))
        texts, counts = self._scrubber.scrub(content.request, content.response, lines, keep=entry.keep)
        turn = msgspec.structs.replace(entry.turn, scrubbed=counts, rules=rules_version())
        if counts:  # the tokens hold the replaced text
            turn = msgspec.structs.replace(turn, reason="scrubbed")
            content = msgspec.structs.replace(
                content, request=texts[0], response=texts[1], prompt_ids=b"", ids=b"", logprobs=b""
            )
        return replace(entry, turn=turn, content=content, text="")


def _drop_reason(error: Exception) -> str:
    """The reason under which a turn is dropped after `error`."""
    text = str(error).lower()
    if "full" in text or "no space" in text or "too large" in text or getattr(error, "errno", 0) == errno.ENOSPC:
        return "disk_full"
    return "database" if isinstance(error, SQLAlchemyError) else "disk"
