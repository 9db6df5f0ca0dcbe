"""The run ledger: every admitted episode exactly once. Metadata only; token arrays are blobs in the store.

    group     open ──(all members done)──> ready ──(named by a manifest)──> consumed
    episode   pending ──(lease)──> leased ──(result)──> done
                 ^                   │ lease ran out, or infrastructure failed and retries are left
                 └───────────────────┘

One schema for SQLite and PostgreSQL. A version's manifest, not this database, says what was trained on: `recover`
brings the ledger in line with the manifests after a crash.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.event import listen
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from etude.errors import UserError
from etude.records import Group, Outcome, PolicyVersion

INFRA_RETRIES = 2
"""How often an episode lost to infrastructure is played again before its group goes on without it."""

_schema = sa.MetaData()
_groups: sa.Table = sa.Table(
    "groups",
    _schema,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("idx", sa.Integer, nullable=False, unique=True),
    sa.Column("task_id", sa.Text, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("admitted_version", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("consumed_version", sa.Integer),
)
_episodes: sa.Table = sa.Table(
    "episodes",
    _schema,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("group_id", sa.ForeignKey("groups.id"), nullable=False),
    sa.Column("member", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, default=0),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text),
    sa.Column("deadline", sa.Float),
    sa.Column("outcome", sa.Text),
    sa.Column("reward", sa.Float),
    sa.Column("passed", sa.Boolean),
    sa.Column("blob", sa.Text),
    sa.Column("tokens", sa.Integer),
    sa.Column("min_version", sa.Integer),
    sa.Column("metrics", sa.JSON),
    sa.Column("finished", sa.Float),
    sa.UniqueConstraint("group_id", "member"),
)


@dataclass(frozen=True)
class EpisodeLease:
    """The right to play one episode until `deadline` (seconds since the epoch)."""

    episode_id: int
    group_id: int
    index: int
    task_id: str
    member: int
    attempt: int
    owner: str
    deadline: float


@dataclass(frozen=True)
class Figures:
    """What admission needs: episodes done (`accepted`), admitted and not done (`reserved`), and groups so far."""

    accepted: int
    reserved: int
    groups: int
    open_tasks: tuple[str, ...]


@dataclass(frozen=True)
class GroupResult:
    """How the finished group `index` went; members lost to infrastructure are not counted."""

    index: int
    task_id: str
    passed: int
    episodes: int


@dataclass(frozen=True)
class Conservation:
    """Whether every admitted episode is accounted for; `sentence` says how, or what is wrong."""

    ok: bool
    sentence: str


class Ledger:
    """Opened by URL. Methods are transactions; any number of processes may use one ledger at the same time."""

    def __init__(self, engine: sa.Engine):
        self._engine = engine

    @staticmethod
    def open(url: str) -> Ledger:
        """The ledger at a SQLAlchemy URL, created if it is not there. Raises UserError if it cannot be opened."""
        try:
            parsed = sa.make_url(url)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            engine = sa.create_engine(parsed, connect_args={"timeout": 30} if _is_sqlite(parsed) else {})
            if _is_sqlite(parsed):
                listen(engine, "connect", _set_pragmas)
                listen(engine, "begin", _begin_immediate)
            with engine.begin() as connection:
                if not _is_sqlite(parsed):  # two processes may create the schema at once
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(7226)"))
                _schema.create_all(connection)
        except (SQLAlchemyError, ImportError) as e:
            raise UserError(f"the ledger {url} cannot be opened: {str(e).splitlines()[0]}") from None
        return Ledger(engine)

    def admit(self, index: int, task_id: str, size: int, version: int) -> int:
        """Adds group `index` with its episodes, once; returns its id. A repeated call changes nothing."""
        with self._begin() as connection:
            known = connection.execute(sa.select(_groups.c.id).where(_groups.c.idx == index)).scalar()
            if known is not None:
                return known
            row = {"idx": index, "task_id": task_id, "size": size, "admitted_version": version, "state": "open"}
            group_id = connection.execute(sa.insert(_groups).values(row).returning(_groups.c.id)).scalar_one()
            members = [{"group_id": group_id, "member": m, "attempt": 0, "state": "pending"} for m in range(size)]
            connection.execute(sa.insert(_episodes), members)
            return group_id

    def lease(self, owner: str, limit: int, seconds: float) -> list[EpisodeLease]:
        """At most `limit` episodes to play, oldest group first: pending ones and those whose lease ran out."""
        now = time.time()
        free = sa.or_(
            _episodes.c.state == "pending", sa.and_(_episodes.c.state == "leased", _episodes.c.deadline < now)
        )
        with self._begin() as connection:
            rows = connection.execute(
                sa.select(_episodes, _groups.c.idx, _groups.c.task_id)
                .join(_groups)
                .where(free)
                .order_by(_groups.c.idx, _episodes.c.member)
                .limit(limit)
                .with_for_update(skip_locked=True, of=_episodes)
            ).all()
            leases = [
                EpisodeLease(r.id, r.group_id, r.idx, r.task_id, r.member, r.attempt, owner, now + seconds)
                for r in rows
            ]
            if leases:
                connection.execute(
                    sa.update(_episodes)
                    .where(_episodes.c.id.in_([lease.episode_id for lease in leases]))
                    .values(state="leased", owner=owner, deadline=now + seconds)
                )
        return leases

    def renew(self, owner: str, seconds: float) -> int:
        """Extends every live lease of `owner`; returns how many."""
        with self._begin() as connection:
            mine = sa.and_(_episodes.c.state == "leased", _episodes.c.owner == owner)
            values = {"deadline": time.time() + seconds}
            return connection.execute(sa.update(_episodes).where(mine).values(values)).rowcount

    def release(self, owner: str) -> int:
        """Gives back every lease of `owner`, who is gone or starts again; returns how many."""
        with self._begin() as connection:
            mine = sa.and_(_episodes.c.state == "leased", _episodes.c.owner == owner)
            values = {"state": "pending", "owner": None, "deadline": None}
            return connection.execute(sa.update(_episodes).where(mine).values(values)).rowcount

    def finish(
        self,
        lease: EpisodeLease,
        *,
        outcome: Outcome,
        reward: float,
        passed: bool,
        blob: str,
        tokens: int,
        min_version: int,
        metrics: dict[str, float],
    ) -> bool:
        """Records a result; False if it came too late: another attempt has the episode, or it is done.

        An episode lost to infrastructure goes back to pending while retries are left.
        """
        retry = outcome is Outcome.INFRA and lease.attempt < INFRA_RETRIES
        values: dict[str, object] = {"state": "pending", "attempt": lease.attempt + 1, "owner": None, "deadline": None}
        if not retry:
            values = {
                "state": "done",
                "outcome": outcome.value,
                "reward": reward,
                "passed": passed,
                "blob": blob,
                "tokens": tokens,
                "min_version": min_version,
                "metrics": metrics,
                "finished": time.time(),
            }
        with self._begin() as connection:
            held = sa.and_(
                _episodes.c.id == lease.episode_id,
                _episodes.c.state == "leased",
                _episodes.c.attempt == lease.attempt,
                _episodes.c.owner == lease.owner,
            )
            if connection.execute(sa.update(_episodes).where(held).values(values)).rowcount == 0:
                return False
            unfinished = sa.exists().where(_episodes.c.group_id == lease.group_id, _episodes.c.state != "done")
            connection.execute(
                sa.update(_groups).where(_groups.c.id == lease.group_id, ~unfinished).values(state="ready")
            )
        return True

    def ready_groups(self, limit: int) -> list[Group]:
        """The next `limit` groups in order of admission, if all of them are ready; else nothing.

        Strict order is what makes the admission bound a bound: a straggler is waited for, never overtaken and then
        trained on too late.
        """
        with self._begin() as connection:
            rows = connection.execute(
                sa.select(_groups).where(_groups.c.state != "consumed").order_by(_groups.c.idx).limit(limit)
            ).all()
            if len(rows) < limit or any(row.state != "ready" for row in rows):
                return []
            return self._load(connection, rows)

    def consume(self, groups: Collection[int], version: int) -> None:
        """Notes that the manifest of `version` names these groups."""
        with self._begin() as connection:
            values = {"state": "consumed", "consumed_version": version}
            connection.execute(sa.update(_groups).where(_groups.c.id.in_(groups)).values(values))

    def recover(self, manifests: Sequence[PolicyVersion]) -> None:
        """Makes the consumed groups exactly those that the manifests name."""
        with self._begin() as connection:
            connection.execute(
                sa.update(_groups).where(_groups.c.state == "consumed").values(state="ready", consumed_version=None)
            )
            for manifest in manifests:
                named = sa.update(_groups).where(_groups.c.id.in_(manifest.groups))
                connection.execute(named.values(state="consumed", consumed_version=manifest.version))

    def figures(self) -> Figures:
        """The numbers that admission needs."""
        with self._begin() as connection:
            done = _count(connection, _episodes, _episodes.c.state == "done")
            rest = _count(connection, _episodes, _episodes.c.state != "done")
            groups = connection.execute(sa.select(sa.func.coalesce(sa.func.max(_groups.c.idx) + 1, 0))).scalar_one()
            tasks = connection.execute(sa.select(_groups.c.task_id).where(_groups.c.state != "consumed")).scalars()
            return Figures(done, rest, groups, tuple(tasks))

    def results(self, before: int | None = None, after: int = -1) -> list[GroupResult]:
        """Finished groups with after < index < before, without gaps: up to the first one that is still open."""
        with self._begin() as connection:
            first_open = connection.execute(
                sa.select(sa.func.min(_groups.c.idx)).where(_groups.c.state == "open")
            ).scalar()
            counted = sa.and_(_episodes.c.outcome != Outcome.INFRA.value)
            query = (
                sa.select(
                    _groups.c.idx,
                    _groups.c.task_id,
                    sa.func.sum(sa.case((sa.and_(counted, _episodes.c.passed), 1), else_=0)).label("passed"),
                    sa.func.sum(sa.case((counted, 1), else_=0)).label("episodes"),
                )
                .join(_episodes)
                .where(_groups.c.state != "open", _groups.c.idx > after)
                .group_by(_groups.c.idx, _groups.c.task_id)
                .order_by(_groups.c.idx)
            )
            for bound in (first_open, before):
                if bound is not None:
                    query = query.where(_groups.c.idx < bound)
            rows = connection.execute(query).all()
        return [GroupResult(r.idx, r.task_id, int(r.passed), int(r.episodes)) for r in rows]

    def mixed_groups(self, limit: int) -> list[Group]:
        """The last consumed groups in which some members passed and some failed."""
        with self._begin() as connection:
            share = sa.func.avg(sa.case((_episodes.c.passed, 1.0), else_=0.0))
            mixed = (
                sa.select(_episodes.c.group_id)
                .group_by(_episodes.c.group_id)
                .having(sa.and_(share > 0.01, share < 0.99))
            )
            rows = connection.execute(
                sa.select(_groups)
                .where(_groups.c.state == "consumed", _groups.c.id.in_(mixed))
                .order_by(_groups.c.idx.desc())
                .limit(limit)
            ).all()
            return self._load(connection, rows)

    def counts(self) -> dict[str, int]:
        """Finished episodes by outcome."""
        with self._begin() as connection:
            query = sa.select(_episodes.c.outcome, sa.func.count().label("n")).where(_episodes.c.state == "done")
            return {str(row.outcome): int(row.n) for row in connection.execute(query.group_by(_episodes.c.outcome))}

    def conservation(self, manifests: Sequence[PolicyVersion]) -> Conservation:
        """Proves that no episode is lost and none was trained on twice."""
        with self._begin() as connection:
            admitted = connection.execute(sa.select(sa.func.coalesce(sa.func.sum(_groups.c.size), 0))).scalar_one()
            states = sa.select(_episodes.c.state, sa.func.count().label("n")).group_by(_episodes.c.state)
            by_state = {str(row.state): int(row.n) for row in connection.execute(states)}
            consumed = {
                row.id: row.consumed_version
                for row in connection.execute(sa.select(_groups).where(_groups.c.state == "consumed")).all()
            }
        if admitted != sum(by_state.values()):
            return Conservation(False, f"{admitted} episodes were admitted, {sum(by_state.values())} are in the ledger")
        named: dict[int, int] = {}
        for manifest in manifests:
            for group in manifest.groups:
                if group in named:
                    both = f"{named[group]} and {manifest.version}"
                    return Conservation(False, f"group {group} was trained on twice, by versions {both}")
                named[group] = manifest.version
        if named != consumed:
            odd = sorted(set(named.items()) ^ set(consumed.items()))[0]
            return Conservation(False, f"ledger and manifests disagree on group {odd[0]} and version {odd[1]}")
        parts = ", ".join(f"{n} {state}" for state, n in sorted(by_state.items()))
        return Conservation(True, f"{admitted} episodes admitted: {parts}; {len(named)} groups trained on once")

    def _load(self, connection: sa.Connection, rows: Sequence[sa.Row[tuple[object, ...]]]) -> list[Group]:
        ids = [row.id for row in rows]
        query = (
            sa.select(_episodes.c.group_id, _episodes.c.blob)
            .where(_episodes.c.group_id.in_(ids), _episodes.c.outcome != Outcome.INFRA.value)
            .order_by(_episodes.c.member)
        )
        blobs: dict[int, list[str]] = {i: [] for i in ids}
        for group_id, blob in connection.execute(query).all():
            blobs[group_id].append(blob)
        return [
            Group(
                id=row.id,
                index=row.idx,
                task_id=row.task_id,
                admitted_version=row.admitted_version,
                episodes=tuple(blobs[row.id]),
            )
            for row in rows
        ]

    @contextmanager
    def _begin(self) -> Generator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except OperationalError as e:
            raise UserError(f"the ledger {self._engine.url} failed: {str(e.orig).splitlines()[0]}") from None


def _is_sqlite(url: sa.URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _set_pragmas(connection: sqlite3.Connection, _record: object) -> None:
    """WAL lets the trainer read while the controller writes. NORMAL survives `kill -9` of any process; only a power
    failure may lose the last transactions, and then the manifests bring the ledger back (`recover`)."""
    connection.isolation_level = None  # the driver opens no transaction of its own: `_begin_immediate` does
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediate(connection: sa.Connection) -> None:
    """Takes the write lock at once: a transaction that read first could otherwise not be upgraded, and would fail."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _count(connection: sa.Connection, table: sa.Table, condition: sa.ColumnElement[bool]) -> int:
    return connection.execute(sa.select(sa.func.count()).select_from(table).where(condition)).scalar_one()
