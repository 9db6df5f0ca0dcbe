"""Digests in the ledger, which reveal an episode or a row that has changed since it was written.

Episodes lie in the store, and the ledger keeps the digest of an episode's bytes, which proves them when they are read.

A row is sealed when its values are final; the seals are checked before a run goes on with its ledger. SQLite checks the
structure of its pages and PostgreSQL, if configured, their checksums, but neither detects a reward that was altered
after it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import blake3
import msgspec
import sqlalchemy as sa

from etude.errors import UserError, last_line
from etude.ledger.schema import episodes, groups, impossible
from etude.records import Episode, EpisodeBlob, decode, encode
from etude.store import ObjectMissing, Store

GROUP = ("id", "task_id", "size", "admitted_version")
EPISODE = (
    "group_id", "member", "attempt", "outcome", "reward", "passed", "blob", "digest", "tokens", "min_version",
    "metrics", "flags", "reason",
)  # fmt: skip
IMPOSSIBLE = ("number", "task_id", "version", "outcome", "passed", "flags", "blob", "digest")


class BlobDamaged(UserError):
    """The bytes of an episode are missing, or do not have the digest that the ledger keeps."""


def put_blob(store: Store, key: str, episode: Episode) -> EpisodeBlob:
    """Stores the episode. Returns its key and digest, which the ledger keeps."""
    data = encode(episode)
    store.put(key, data)
    return EpisodeBlob(key=key, digest=blake3.blake3(data).hexdigest())


def get_blob(store: Store, blob: EpisodeBlob) -> Episode:
    """The stored episode. Raises BlobDamaged."""
    advice = "`--resume` plays it again, if it was not trained on"
    try:
        data = store.get(blob.key)
    except ObjectMissing:
        raise BlobDamaged(f"the episode {blob.key} is gone from {store.url}; {advice}") from None
    if blake3.blake3(data).hexdigest() != blob.digest:
        why = "does not have the digest that the ledger keeps"
        raise BlobDamaged(f"the episode {blob.key} in {store.url} is damaged: it {why}; {advice}")
    return decode(data, Episode)


def seal(names: tuple[str, ...], row: Mapping[Any, Any]) -> str:
    """The digest of these columns of a row."""
    return blake3.blake3(msgspec.msgpack.encode([row[name] for name in names])).hexdigest(length=16)


def check(c: sa.Connection) -> None:
    """Raises UserError for a database whose pages or rows have changed since they were written. A full scan."""
    if c.dialect.name == "sqlite":
        integrity = str(c.exec_driver_sql("PRAGMA integrity_check(1)").scalar())
        if integrity != "ok":
            raise damaged(c, last_line(integrity))
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
