"""Times and records of the log, written and read in one order.

    with engine.begin() as connection:
        at = stamp(connection, count)        # times of the rows that this transaction writes
        add(connection, [session, turn])

    with engine.begin() as connection:
        cut = stamp(connection)              # every row of the log is older than `cut`, for ever
    with reading(engine) as connection:
        for turn in turns(connection, cut): ...

A row's time is set within the transaction that writes the row, under a lock that all writers take, and is greater than
every time before. So all reads up to a cut return the same rows, also if the clock is set back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from etude.live.log import schema
from etude.live.log.records import (
    ClusterEvent,
    Release,
    ReleaseEvent,
    ServedTurn,
    Session,
    Signal,
    Suggestion,
    Tombstone,
    Withdrawal,
)
from etude.records import Record

R = TypeVar("R", bound=Record)

_CLOCK = "clock"
_PAGE = 1000  # rows that a reader holds
_TABLES: dict[type[Record], sa.Table] = {
    Session: schema.sessions, ServedTurn: schema.turns, Suggestion: schema.suggestions, Signal: schema.signals,
    Release: schema.releases, ReleaseEvent: schema.release_events, ClusterEvent: schema.cluster_events,
    Tombstone: schema.tombstones, Withdrawal: schema.withdrawals,
}  # fmt: skip
_AS_JSON = ("consent", "spans", "scrubbed", "versions")  # fields whose column holds JSON


def now() -> int:
    """The time of all decisions, in nanoseconds since the epoch: the clock of the log."""
    return time.time_ns()


def stamp(connection: sa.Connection, count: int = 1) -> int:
    """The first of `count` consecutive times, in nanoseconds since the epoch, all later than every earlier time. Other
    writers wait until the transaction ends."""
    clock = schema.meta.c.key == _CLOCK
    last = connection.execute(sa.select(schema.meta.c.value).where(clock).with_for_update()).scalar_one()
    first = max(now(), int(last) + 1)
    connection.execute(sa.update(schema.meta).where(clock).values(value=str(first + count - 1)))
    return first


def row(record: Record) -> dict[str, Any]:
    """The columns of a record."""
    values = msgspec.to_builtins(record)
    for name in _AS_JSON:
        if name in values:
            values[name] = msgspec.json.encode(values[name]).decode()
    if isinstance(record, Suggestion):
        values["old_first"], values["old_count"] = values.pop("old_lines")
    return values


def record(kind: type[R], row_: sa.RowMapping) -> R:
    """The record of a row."""
    columns: dict[str, Any] = {f"{name}": value for name, value in row_.items()}  # SQLAlchemy's names are no plain str
    for name in _AS_JSON:
        if name in columns:
            columns[name] = msgspec.json.decode(columns[name])
    if kind is Suggestion:
        columns["old_lines"] = columns.pop("old_first"), columns.pop("old_count")
    return msgspec.convert(columns, kind)


def add(connection: sa.Connection, records: Iterable[Record]) -> None:
    """Appends records with the times that they carry. Raises IntegrityError for a record that exists."""
    rows: dict[type[Record], list[dict[str, Any]]] = {}
    for each in records:
        rows.setdefault(type(each), []).append(row(each))
    for kind, values in rows.items():
        connection.execute(sa.insert(_TABLES[kind]), values)


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A read-only connection to one state of the log, whatever is written meanwhile."""
    options: dict[str, Any] = {"read_only": True}
    if engine.dialect.name == "postgresql":
        options["isolation_level"] = "REPEATABLE READ"
    with engine.connect().execution_options(**options) as connection, connection.begin():
        yield connection


def sessions(connection: sa.Connection, cut: int, since: int = 0) -> Iterator[Session]:
    """Sessions, by `opened`. This reader and the next yield records from `since` to before `cut`, in order of time."""
    return _read(connection, Session, "opened", "id", cut, since)


def turns(connection: sa.Connection, cut: int, since: int = 0) -> Iterator[ServedTurn]:
    """Turns, by `at`."""
    return _read(connection, ServedTurn, "at", "id", cut, since)


def suggestions(connection: sa.Connection, cut: int, since: int = 0) -> Iterator[Suggestion]:
    """Suggestions, by `shown`."""
    return _read(connection, Suggestion, "shown", "id", cut, since)


def signals(connection: sa.Connection, cut: int, since: int = 0) -> Iterator[Signal]:
    """Signals, by `arrived_at`."""
    return _read(connection, Signal, "arrived_at", "event", cut, since)


def tombstones(connection: sa.Connection, cut: int, since: int = 0) -> Iterator[Tombstone]:
    """Forgotten accounts, by `at`."""
    return _read(connection, Tombstone, "at", "account", cut, since)


def withdrawals(connection: sa.Connection, cut: int, since: int = 0) -> Iterator[Withdrawal]:
    """Consents that were taken back, by `at`."""
    return _read(connection, Withdrawal, "at", "account", cut, since)


def of_ids(connection: sa.Connection, kind: type[R], ids: Sequence[str]) -> dict[str, R]:
    """Sessions, turns or suggestions by identifier; those that the log lacks are left out."""
    table, records = _TABLES[kind], dict[str, R]()
    for low in range(0, len(ids), 500):  # the databases bound the parameters of a statement
        chosen = sa.select(table).where(table.c.id.in_(ids[low : low + 500]))
        records |= {each.id: record(kind, each) for each in connection.execute(chosen).mappings()}
    return records


def _read(connection: sa.Connection, kind: type[R], time_: str, name: str, cut: int, since: int) -> Iterator[R]:
    """Records in pages by key, so that no database holds a cursor open and no table is held in memory."""
    table = _TABLES[kind]
    order = (table.c[time_], table.c[name])
    last: tuple[Any, ...] = (since, "")
    while True:
        after = sa.tuple_(*order) > sa.tuple_(*last)
        page = sa.select(table).where(table.c[time_] < cut, after).order_by(*order).limit(_PAGE)
        rows = connection.execute(page).mappings().all()
        for each in rows:
            last = each[time_], each[name]
            yield record(kind, each)
        if len(rows) < _PAGE:
            return
