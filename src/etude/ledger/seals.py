"""Digests of rows, which reveal a database that has changed on the disk before a run goes on with it.

A row is sealed when its values are final. SQLite checks the structure of its pages and PostgreSQL, if configured, their
checksums, but neither detects a reward that was altered after it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import blake3
import msgspec
import sqlalchemy as sa

from etude.errors import UserError
from etude.ledger.schema import episodes, groups, impossible

GROUP = ("id", "task_id", "size", "admitted_version")
EPISODE = (
    "group_id", "member", "attempt", "outcome", "reward", "passed", "blob", "digest", "tokens", "min_version",
    "metrics", "flags", "reason",
)  # fmt: skip
IMPOSSIBLE = ("number", "task_id", "version", "outcome", "passed", "flags", "blob", "digest")


def seal(names: tuple[str, ...], row: Mapping[Any, Any]) -> str:
    """The digest of these columns of a row."""
    return blake3.blake3(msgspec.msgpack.encode([row[name] for name in names])).hexdigest(length=16)


def check(c: sa.Connection) -> None:
    """Raises UserError for a database whose pages or rows have changed since they were written. A full scan."""
    if c.dialect.name == "sqlite":
        integrity = str(c.exec_driver_sql("PRAGMA integrity_check(1)").scalar())
        if integrity != "ok":
            raise damaged(c, integrity.splitlines()[-1])
    if (row := next(_broken(c), None)) is not None:
        raise damaged(c, f"{row} is not as it was written")


def damaged(c: sa.Connection, why: str) -> UserError:
    """The error for a damaged ledger."""
    return UserError(f"the ledger {c.engine.url} is damaged: {why}; restore it from a copy, or start a new run")


def _broken(c: sa.Connection) -> Iterator[str]:
    """Names of the rows whose values do not have the digest in their seal."""
    for table, names, where in (
        (groups, GROUP, sa.true()),
        (episodes, EPISODE, episodes.c.state == "done"),
        (impossible, IMPOSSIBLE, sa.true()),
    ):
        for row in c.execute(sa.select(*(table.c[name] for name in names), table.c.seal).where(where)).mappings():
            if row["seal"] != seal(names, row):
                keys = ", ".join(f"{column.name} {row[column.name]}" for column in table.primary_key)
                yield f"the row ({keys}) of {table.name}"
