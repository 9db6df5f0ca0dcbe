"""Tables of the live log: one schema for SQLite and PostgreSQL. Rows are appended; only keys are ever destroyed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.event import listen

from etude.errors import UserError
from etude.ledger import open_database

VERSION = "2"
"""The version of the tables; a log of another version is refused."""

metadata = sa.MetaData()


def _table(name: str, *columns: sa.Column[object] | sa.Index) -> sa.Table:
    return sa.Table(name, metadata, *columns)


def _text(name: str, *, key: bool = False, null: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.String, primary_key=key, nullable=null)


def _integer(name: str, *, key: bool = False, null: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.BigInteger, primary_key=key, nullable=null, autoincrement=False)


def _real(name: str, *, null: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.Double, nullable=null)


meta = _table("live_meta", _text("key", key=True), _text("value"))

tenants = _table("tenants", _text("name", key=True), _text("policy"), _integer("at"))  # policy: JSON of LivePolicy
api_keys = _table(
    "api_keys",
    _text("digest", key=True),
    _text("tenant"),
    _text("name"),
    _integer("created"),
    _integer("revoked", null=True),
    sa.Column("proxy", sa.Boolean, nullable=False),
    sa.Index("api_keys_tenant", "tenant"),
)
"""API keys by their BLAKE2b digests; a key, 256 random bits, is shown once and not kept. `proxy`: it signs names."""

account_keys = _table(
    "account_keys",
    _text("account", key=True),
    _text("tenant"),
    sa.Column("secret", sa.LargeBinary),
    _integer("at"),
    _integer("destroyed", null=True),
)
"""AES-256-GCM keys of the blobs of accounts, encrypted with the key of the folder (`accounts.py`); `secret` is NULL for
a destroyed key."""

served = _table(
    "served",
    _text("turn", key=True),
    _text("tenant"),
    _text("account"),
    _text("voucher"),
    _integer("release"),
    _text("arm"),
    _integer("edited"),
    _integer("at"),
    sa.Index("served_at", "at"),
)
"""Turns without consent, for a day: the keys of the counters of their signals, without content. `edited`: 1 once the
turn has shown an edit."""

answers = _table(
    "answers",
    _text("tenant", key=True),
    _text("name", key=True),
    _text("turn"),
    _text("account"),
    _integer("at"),
    sa.Index("answers_at", "at"),
)
"""The turns of ids in the bodies of answers that do not name them, for 90 days: `name` is a keyed hash of the id, and
`turn` "" if several answers of the tenant have it."""

tombstones = _table("tombstones", _text("account", key=True), _text("tenant"), _integer("at"), _text("versions"))

withdrawals = _table(
    "withdrawals", _text("account", key=True), _integer("at", key=True), _text("tenant"), _text("policy")
)

sessions = _table(
    "sessions",
    _text("id", key=True),
    _text("tenant"),
    _text("account"),
    _text("voucher"),
    _text("organisation"),
    _text("client"),
    _text("consent"),
    _text("arm"),
    _integer("release"),
    _real("propensity"),
    _integer("opened"),
    sa.Index("sessions_account", "account"),
    sa.Index("sessions_voucher", "voucher"),
    sa.Index("sessions_opened", "opened"),
)
turns = _table(
    "turns",
    _text("id", key=True),
    _text("session"),
    _integer("sequence"),
    _text("kind"),
    _integer("release"),
    _text("manifest"),
    _text("spans"),
    _integer("prompt_tokens"),
    _integer("sampled_tokens"),
    _text("blob", null=True),
    _text("reason"),
    _text("scrubbed"),
    _text("rules"),
    _text("stop"),
    _real("seconds"),
    _text("cluster"),
    _integer("at"),
    sa.Index("turns_session", "session"),
    sa.Index("turns_at", "at"),
)
suggestions = _table(
    "suggestions",
    _text("id", key=True),
    _text("turn"),
    _text("path"),
    _text("base"),
    _integer("old_first"),
    _integer("old_count"),
    _text("new"),
    _integer("characters"),
    _integer("shown"),
    sa.Index("suggestions_turn", "turn"),
)
signals = _table(
    "signals",
    _text("tenant", key=True),
    _text("event", key=True),
    _text("subject"),
    _text("kind"),
    _real("value"),
    _real("horizon", null=True),
    _text("text", null=True),
    _integer("observed_at"),
    _integer("arrived_at"),
    _text("source"),
    _integer("client_sequence", null=True),
    _real("confidence"),
    _text("reader"),
    sa.Index("signals_subject", "subject"),
    sa.Index("signals_arrived", "arrived_at"),
)

tallies = _table(
    "tallies",
    _integer("release", key=True),
    _text("arm", key=True),
    _text("account", key=True),
    _integer("slot", key=True),
    _text("name", key=True),
    _text("tenant"),
    _integer("count"),
    _real("total"),
    sa.Index("tallies_slot", "slot"),
)
"""Content-free counters of every account that a key vouches for, with or without consent, which the canary compares;
`account` is a session's `voucher`. `release` is the release that answered; `slot` is the time, for a signal the time of
its turn, over `canary.slot_minutes`; `total` is the sum of the values. Names, which `release/canary.py` reads:

    requests, errors, seconds (total), dropped       of turns, when they end; `dropped` were answered and not recorded
    strays                                           of turns that the control answered, since the arm's servers failed
    failovers, disconnected                          of turns: another server answered; the client went before the end
    edits, invalid_call, stopped                     turns that proposed an edit, made an invalid call, were stopped
    applied, undone, followup (total), survived (total), labelled       signals; `labelled`: turns with edits that have
                                                     any outcome, `survived`: the share alive at the end of the window

The gateway counts each name at most once for a turn; of several edits of a turn the first signal counts."""

drops = _table("drops", _text("reason", key=True), _integer("hour", key=True), _integer("count"))
"""Turns that were answered and not recorded, e.g. "disk_full", "queue_full", "database"."""

labels = _table(
    "labels",
    _text("turn", key=True),
    _integer("cut", key=True),
    _text("rules", key=True),
    _text("state"),
    _text("reason"),
    _real("reward"),
    _text("components"),
    _real("weight"),
    _text("correction", null=True),
    _text("reader"),
)
exits = _table(
    "exits",
    _text("turn", key=True),
    _integer("window", key=True),
    _text("kind"),
    _text("reason"),
    _real("weight"),
    _real("advantage"),
    sa.Index("exits_window", "window"),
)
windows = _table(
    "windows",
    _integer("number", key=True),
    _integer("cut"),
    _text("rules"),
    _text("batch"),
    _text("run"),
    _integer("base_version"),
    _integer("version", null=True),
    _integer("at"),
)
"""`batch`: digest of the episodes in their order; `run`: folder of the run that trained on them."""

releases = _table(
    "releases",
    _integer("number", key=True),
    _text("store"),
    _integer("version"),
    _text("manifest"),
    _integer("parent", null=True),
    _integer("anchor", null=True),
    _text("report", null=True),
    _integer("window", null=True),
    _integer("at"),
)
release_events = _table(
    "release_events",
    _integer("release", key=True),
    _integer("sequence", key=True),
    _text("stage"),
    _real("share"),
    _text("reason"),
    _text("decided_by"),
    _integer("at"),
    _real("p", null=True),
    sa.Column("better", sa.Boolean, nullable=False),
)
cluster_events = _table(
    "cluster_events",
    _text("cluster", key=True),
    _text("arm", key=True),
    _integer("sequence", key=True),
    sa.Column("drained", sa.Boolean, nullable=False),
    _text("reason"),
    _integer("at"),
)
"""Drained clusters: the gateway sends no requests to a cluster and arm whose last row is `drained`."""


def connect(url: str) -> sa.Engine:
    """An engine on the log at `url`, its tables made if they are missing. Raises UserError."""
    engine = open_database(url, _create, "live log")
    if engine.dialect.name == "sqlite":
        listen(engine, "connect", _keep)
        engine.dispose()  # the connection that made the tables
    return engine


def _keep(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous = FULL")  # an acknowledged signal survives a power cut, too
    connection.execute("PRAGMA secure_delete = ON")  # a destroyed key is overwritten


def _create(connection: sa.Connection) -> None:
    """Makes missing tables, and checks the version of the schema."""
    metadata.create_all(connection)
    version = connection.execute(sa.select(meta.c.value).where(meta.c.key == "schema")).scalar()
    if version is None:
        connection.execute(sa.insert(meta), [{"key": "schema", "value": VERSION}, {"key": "clock", "value": "0"}])
    elif version != VERSION:
        raise UserError(
            f"the live log {connection.engine.url} has schema {version}, this etude reads {VERSION}; "
            "keep it with the etude that began it, and start a new folder"
        )
