"""Opens databases, SQLite by path and PostgreSQL by URL, and repeats transactions while a database server is away:
restarted, failed over, or cut off."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.event import listens_for
from sqlalchemy.exc import ArgumentError, DBAPIError

from etude.code import need
from etude.errors import UserError, first_line

BUSY_SECONDS = 30.0
"""How long a connection waits for another process's write; a write takes well under a millisecond. On PostgreSQL,
which waits for locks without end by itself, how long any statement may take."""
OUTAGE_SECONDS = 120.0
"""For which a transaction is tried again while the server is away."""
OPEN_SECONDS = 10.0
"""The same for the first connection of a process, whose URL may be wrong."""
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_LASTING = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "not permitted")
_outages = [-math.inf]  # when this process last could not reach a server, on the monotonic clock
T = TypeVar("T")


class Outage(UserError):
    """The database server is away."""


def open_database(url: str, create: Callable[[sa.Connection], None], what: str) -> sa.Engine:
    """An engine on the database at `url`. `create` makes or checks its tables first, in a transaction that no other
    process shares. `what` names the database in messages. Raises UserError."""
    parsed = parse_database_url(url, what)
    engine = _sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _postgresql(parsed)
    return persist(lambda _: _connected(engine, create, what), OPEN_SECONDS)


def _connected(engine: sa.Engine, create: Callable[[sa.Connection], None], what: str) -> sa.Engine:
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":  # CREATE TABLE IF NOT EXISTS is not safe against itself there
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(0x657475646)))
            create(connection)
    except UserError:
        engine.dispose()
        raise
    except UnicodeDecodeError as e:
        engine.dispose()
        raise unreadable(what, engine) from e
    except DBAPIError as e:
        engine.dispose()
        kind = Outage if is_outage(e) else UserError
        advice = "set PGPASSWORD" if "password" in reason(e) else "check the path or the URL"
        raise kind(f"the {what} {engine.url} cannot be opened: {reason(e)}; {advice}") from e
    return engine


def unreadable(what: str, engine: sa.Engine) -> UserError:
    """The error of a damaged file of which even SQLite's own message cannot be decoded."""
    return UserError(f"the {what} {engine.url} is damaged: restore it from a copy")


def reason(error: DBAPIError) -> str:
    """The database's error message, in one line."""
    return first_line(error.orig)


def parse_database_url(url: str, what: str) -> URL:
    """The parsed URL of a supported database. Raises UserError, also if the URL's driver is not installed."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise UserError(f"{url!r} is not a {what} URL; give sqlite:///PATH or postgresql://HOST/DATABASE") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise UserError(f"a {what} cannot live in {parsed.drivername}; give sqlite:///PATH or postgresql://...")
    if parsed.drivername == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UserError(f"a {what} in memory would be lost with its process; give sqlite:///PATH")
    if parsed.drivername != "sqlite":
        need(f"a {what} in PostgreSQL", "postgres")
    return parsed


def _sqlite(url: URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.isolation_level = None  # the driver's own BEGIN would take the write lock too late, see below
        connection.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing under NORMAL: the log is in the page cache after each commit. FULL would add
        # an fsync (5-100 ms on a busy disk) to each finished episode to survive a power cut as well; after one, lost
        # results are played again and consumed groups follow from the manifests.
        connection.execute("PRAGMA synchronous = NORMAL")
        # `Ledger.consume` moves the log into the database once per step; this is for runs without a trainer.
        connection.execute("PRAGMA wal_autocheckpoint = 10000")

    @listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # Waiting for the write lock works only at BEGIN: a reader that turns writer fails at once if another wrote.
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _postgresql(url: URL) -> sa.Engine:
    milliseconds = int(BUSY_SECONDS * 1000)
    limits = {"connect_timeout": 10, "options": f"-c statement_timeout={milliseconds}"}
    return sa.create_engine(url, pool_pre_ping=True, connect_args=limits)


def is_outage(error: DBAPIError) -> bool:
    """Whether the same transaction may succeed later. PostgreSQL's codes: 08 connection, 57P01 to 57P03 shutdown, crash
    and start, 40P01 a deadlock that this transaction was ended for; a refused connection has no code."""
    code = getattr(error.orig, "sqlstate", "none")
    if code == "none":  # SQLite, which has no server
        return False
    if code is None:
        return not any(reason in str(error.orig) for reason in _LASTING)
    return code.startswith("08") or code in ("57P01", "57P02", "57P03", "40P01")


def persist(work: Callable[[bool], T], seconds: float = OUTAGE_SECONDS) -> T:
    """The result of `work(again)`, repeated while it raises Outage; `again` is False at the first call only. After
    `seconds` the Outage is raised. A call may have been committed although it raised, so `work` must have the same
    effect if it is repeated."""
    deadline, pause, again = time.monotonic() + seconds, _PAUSE, False
    while True:
        try:
            result = work(again)
        except Outage as e:
            _outages[0] = time.monotonic()
            if time.monotonic() + pause > deadline:
                raise
            if not again and seconds == OUTAGE_SECONDS:
                print(f"note: {e}; tried again for {seconds:.0f} s", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause, again = min(2 * pause, _LONGEST_PAUSE), True
        else:
            return result


def last_outage() -> float:
    """When this process last could not reach a database server, on the monotonic clock."""
    return _outages[0]
