"""Opens databases: SQLite by path, PostgreSQL by URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.event import listens_for
from sqlalchemy.exc import ArgumentError, DBAPIError

from etude.code import need
from etude.errors import UserError
from etude.ledger.outages import OPEN_SECONDS, Outage, is_outage, persist

BUSY_SECONDS = 30.0
"""How long a connection waits for another process's write; a write takes well under a millisecond. On PostgreSQL,
which waits for locks without end by itself, how long any statement may take."""


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
    except DBAPIError as e:
        engine.dispose()
        kind = Outage if is_outage(e) else UserError
        advice = "set PGPASSWORD" if "password" in reason(e) else "check the path or the URL"
        raise kind(f"the {what} {engine.url} cannot be opened: {reason(e)}; {advice}") from e
    return engine


def reason(error: DBAPIError) -> str:
    """The database's error message, in one line."""
    return (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]


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
