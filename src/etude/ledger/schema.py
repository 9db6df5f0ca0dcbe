"""Tables of the run ledger: one schema for SQLite and PostgreSQL."""

from __future__ import annotations

from typing import Literal, get_args

import sqlalchemy as sa

from etude.errors import UserError
from etude.ledger.database import open_database

VERSION = "6"
"""The version of the tables; a ledger of another version is refused."""

metadata = sa.MetaData()

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),  # see META
    sa.Column("value", sa.String, nullable=False),
)

RunStage = Literal["training", "ended"]
STAGES: tuple[RunStage, ...] = get_args(RunStage)
META = {"schema": VERSION, "run": "", "stage": "ended", "beat": "0"}
"""Version of the tables, name of the run, stage of the run for its players, and the controller's count of beats."""

counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.String, primary_key=True),  # see COUNTERS
    sa.Column("value", sa.BigInteger, nullable=False),
)

RECOVERY = ("continued", "recovered_tokens", "recovered_commands", "begun_anew", "dropped_tokens")
"""Of finished episodes that had a journal: those that went on from it, the tokens and commands that were therefore not
repeated, those that could not, and their recorded tokens."""

COUNTERS = ("admitted", "late", "ready", "retried", *RECOVERY)
"""Episodes admitted, results that came after their lease had expired, groups completed, infrastructure retries, and
RECOVERY."""

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),  # its index in the run's task order
    sa.Column("task_id", sa.String, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("admitted_version", sa.Integer, nullable=False),
    sa.Column("state", sa.String, sa.CheckConstraint("state IN ('open', 'ready', 'consumed')"), nullable=False),
    sa.Column("unfinished", sa.Integer, nullable=False),  # members without a result
    sa.Column("ready_order", sa.BigInteger),  # 1, 2, ... in order of completion
    sa.Column("consumed_version", sa.Integer),
    sa.Column("seal", sa.String, nullable=False),  # see digests.py
    sa.Index("groups_state", "state", "id"),
    sa.Index("groups_ready_order", "ready_order"),
    sa.Index("groups_consumed_version", "consumed_version", "id"),
)

episodes = sa.Table(
    "episodes",
    metadata,
    sa.Column("group_id", sa.BigInteger, sa.ForeignKey("groups.id"), primary_key=True, autoincrement=False),
    sa.Column("member", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, nullable=False),  # counts leases, which identifies late results
    sa.Column("failures", sa.Integer, nullable=False),  # infrastructure failures
    sa.Column("state", sa.String, sa.CheckConstraint("state IN ('pending', 'leased', 'done')"), nullable=False),
    sa.Column("owner", sa.String),
    sa.Column("lease", sa.String),  # a random name of the call of `lease`, different for every call
    sa.Column("lease_seconds", sa.Double),  # duration of the lease, from the last renewal
    sa.Column("renewals", sa.BigInteger),
    sa.Column("outcome", sa.String),
    sa.Column("reward", sa.Double),
    sa.Column("passed", sa.Boolean),
    sa.Column("blob", sa.String),
    sa.Column("digest", sa.String),  # of the blob's bytes
    sa.Column("tokens", sa.BigInteger),
    sa.Column("min_version", sa.Integer),
    sa.Column("metrics", sa.Text),  # JSON object of numbers
    sa.Column("flags", sa.String),  # separated by spaces; empty: none
    sa.Column("reason", sa.String),  # of the last failure, for an episode that infrastructure or a bug in etude lost
    sa.Column("finished", sa.Double),  # seconds since the epoch, for people
    sa.Column("seal", sa.String),  # of a finished episode, see digests.py
    sa.Index("episodes_state", "state", "group_id", "member"),
)

impossible = sa.Table(
    "impossible",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("task_id", sa.String, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),  # the oldest version that sampled one of its tokens
    sa.Column("outcome", sa.String, nullable=False),
    sa.Column("passed", sa.Boolean, nullable=False),
    sa.Column("flags", sa.String, nullable=False),  # separated by spaces
    sa.Column("blob", sa.String, nullable=False),
    sa.Column("digest", sa.String, nullable=False),  # of the blob's bytes
    sa.Column("finished", sa.Double, nullable=False),  # seconds since the epoch, for people
    sa.Column("seal", sa.String, nullable=False),  # see digests.py
)
"""Episodes of impossible tasks, which are played beside the groups and never trained on."""

engines = sa.Table(
    "engines",
    metadata,
    sa.Column("url", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),  # of the engine in its fleet
    sa.Column(
        "state", sa.String, sa.CheckConstraint("state IN ('joining', 'serving', 'draining', 'gone')"), nullable=False
    ),
    sa.Column("why", sa.String, nullable=False),  # it gets no turns
    sa.Column("version", sa.Integer, nullable=False),  # of its weights, by its last report; -1 before the first
    sa.Column("leaving", sa.String, nullable=False),  # why it was asked to leave; empty: it was not
)
"""The inference servers of the run, those that have left included (`membership.py`)."""

players = sa.Table(
    "players",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),  # of its leases
    sa.Column("episodes", sa.Integer, nullable=False),  # that it plays at a time now, at most
    sa.Column("why", sa.String, nullable=False),  # it plays fewer than it was started for; empty: it does not
    sa.Column("beat", sa.BigInteger, nullable=False),  # grows while it lives
)
"""The processes that play episodes beside the controller (`membership.py`)."""


def connect(url: str) -> sa.Engine:
    """An engine on the ledger at `url`; missing tables are made. Raises UserError."""
    return open_database(url, _create, "ledger")


def _create(connection: sa.Connection) -> None:
    """Makes the tables, or checks the version of existing ones."""
    metadata.create_all(connection)
    values = {row.key: row.value for row in connection.execute(sa.select(meta))}
    if not values:
        connection.execute(sa.insert(meta), [{"key": key, "value": value} for key, value in META.items()])
        connection.execute(sa.insert(counters), [{"name": name, "value": 0} for name in COUNTERS])
    elif values.get("schema") != VERSION:
        raise UserError(
            f"the ledger {connection.engine.url} has schema {values.get('schema')}, this etude reads {VERSION}; "
            "finish that run with the etude that began it"
        )
    elif values.keys() != META.keys() or values["stage"] not in STAGES or not values["beat"].isdecimal():
        raise UserError(f"the ledger {connection.engine.url} is damaged: restore it from a copy, or start a new run")
