"""The run ledger: every admitted episode, the process that plays it, its end, and the version that trained on it.

    group     open ──(last member done)──> ready ──(a manifest names it)──> consumed
    episode   pending ──lease──> leased ──finish──> done
                 ^                  │
                 └── infra, expiry ─┘   each time under a new attempt number

Metadata only: token arrays are blobs in the store. Every method is one transaction, so a process may be killed at any
point; several processes and threads may share a ledger. Each (group, member) gets exactly one result: a lease carries
its attempt number, and a result under an older number is ignored and counted. The manifests of published versions
decide what was consumed (`recover`), not this database.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from etude.errors import UserError
from etude.ledger import flagged as flagged_rows
from etude.ledger import representation
from etude.ledger.conservation import Conservation, check, count_outcomes
from etude.ledger.database import reason
from etude.ledger.flagged import FlaggedEpisode, ImpossibleCounts
from etude.ledger.given import groups_of_tasks
from etude.ledger.leases import LeaseWatch
from etude.ledger.leaving_behind import leaves_in_time
from etude.ledger.outages import Outage, is_outage, persist
from etude.ledger.schema import connect, counters, episodes, groups, meta
from etude.ledger.seals import EPISODE, GROUP, damaged, seal
from etude.ledger.seals import check as check_rows
from etude.records import LOST, Episode, EpisodeBlob, Group, Outcome, PolicyVersion, Population

MAX_RETRIES = 2
"""Infrastructure failures of one episode before it is recorded as lost and its group goes on without it."""


@dataclass(frozen=True)
class EpisodeLease:
    """The right to play one episode for some seconds, unless renewed."""

    group_id: int
    index: int
    task_id: str
    member: int
    attempt: int
    owner: str


def blob_key(group: int, member: int, attempt: int) -> str:
    """Where the tokens of an episode lie in the store of rollouts."""
    return f"{group:08d}/{member:04d}-{attempt}.msgpack"


@dataclass(frozen=True)
class GroupResult:
    """A finished group as the curriculum sees it. `mark` is what to pass to the next `results`."""

    index: int
    task_id: str
    passed: int
    episodes: int  # members with a result, those that were lost left out
    mark: int


@dataclass(frozen=True)
class Figures:
    """The figures that admission needs, in episodes unless a comment names another unit."""

    groups: int  # groups admitted so far: the next index
    accepted: int  # of finished groups, consumed or not
    reserved: int  # of open groups
    in_flight: int  # admitted and without a result yet, whether leased or waiting for a slot
    open_tasks: tuple[str, ...]  # task ids of the open groups
    consumed_version: int  # newest version that consumed a group; -1 before the first


_Row = sa.Row[Any, Any, Any, Any, Any, Any]
P = ParamSpec("P")
T = TypeVar("T")
_e, _g = episodes.c, groups.c

# Statements of the hot path are built once: building one costs more than SQLite needs to run it.
_MINE = (_e.group_id == bindparam("g"), _e.member == bindparam("m"), _e.attempt == bindparam("a"), _e.state == "leased")
_FINISH = sa.update(episodes).where(*_MINE)
_RETRY = (
    sa.update(episodes)
    .where(*_MINE, _e.failures < MAX_RETRIES)
    .values(
        state="pending", attempt=_e.attempt + 1, failures=_e.failures + 1, owner=None, lease=None,
        reason=bindparam("why"),
    )
)  # fmt: skip
_MEMBER_DONE = (
    sa.update(groups).where(_g.id == bindparam("g")).values(unfinished=_g.unfinished - 1).returning(_g.unfinished)
)
_COUNT = (
    sa.update(counters)
    .where(counters.c.name == bindparam("counter"))
    .values(value=counters.c.value + bindparam("by"))
    .returning(counters.c.value)
)
_LEASED = sa.select(_e.group_id, _e.member, _e.attempt, _e.renewals, _e.lease_seconds).where(_e.state == "leased")
_EPISODES = (
    sa.select(_e.group_id, _e.member, _e.attempt, _e.state, _e.renewals, _g.task_id)
    .join_from(episodes, groups, _g.id == _e.group_id)
    .order_by(_e.group_id, _e.member)
    .with_for_update(of=episodes, skip_locked=True)
)
_PENDING = _EPISODES.where(_e.state == "pending").limit(bindparam("limit"))
_OVER = _EPISODES.where(sa.tuple_(_e.group_id, _e.member).in_(bindparam("ids", expanding=True)))
_GRANTED = _EPISODES.where(_e.state == "leased", _e.lease == bindparam("lease"))
_LEASE = sa.update(episodes).where(_e.group_id == bindparam("g"), _e.member == bindparam("m"))
_OPEN = sa.select(_g.task_id, _g.size, _g.unfinished).where(_g.state == "open").order_by(_g.id)
_TOTALS = sa.select(
    sa.select(sa.func.max(_g.id)).scalar_subquery().label("last"),
    sa.select(sa.func.max(_g.consumed_version)).scalar_subquery().label("consumed"),
    sa.select(counters.c.value).where(counters.c.name == "admitted").scalar_subquery().label("admitted"),
)
_WAITING = sa.select(_g.id, _g.state, _g.admitted_version).where(_g.state != "consumed").order_by(_g.id)
_MEMBERS = (
    sa.select(_e.group_id, _e.blob, _e.digest)
    .where(_e.group_id.in_(bindparam("ids", expanding=True)), _e.blob.is_not(None))
    .order_by(_e.group_id, _e.member)
)
_ADMITTED = sa.select(_g.id, _g.task_id, _g.admitted_version).where(_g.id.in_(bindparam("ids", expanding=True)))
_PASSED = sa.func.sum(sa.case((_e.passed, 1), else_=0))


def _finished_groups(mark: sa.ColumnElement[int | None]) -> sa.Select[Any, Any, int | None, Any, Any]:
    return (
        sa.select(
            _g.id,
            _g.task_id,
            mark.label("mark"),
            _PASSED.label("passed"),
            sa.func.sum(sa.case((_e.outcome.not_in(LOST), 1), else_=0)).label("episodes"),
        )
        .join_from(groups, episodes, _g.id == _e.group_id)
        .where(mark > bindparam("after"))
        .group_by(_g.id, _g.task_id, mark)
        .order_by(mark, _g.id)
    )


_RESULTS_READY = _finished_groups(_g.ready_order)
_RESULTS_CONSUMED = _finished_groups(_g.consumed_version)


def persistent(method: Callable[Concatenate[Ledger, P], T]) -> Callable[Concatenate[Ledger, P], T]:
    """The method, tried again while the database server is away; it makes no difference whether an earlier try was
    committed."""

    @wraps(method)
    def tried(self: Ledger, *args: P.args, **kwargs: P.kwargs) -> T:
        return persist(lambda _: method(self, *args, **kwargs))

    return tried


class Ledger:
    """One run's ledger. Methods raise UserError when the database cannot be reached, is full or is damaged."""

    def __init__(self, engine: sa.Engine):
        self._engine = engine
        self._watch = LeaseWatch()
        self._reader = engine.execution_options(read_only=True)

    @classmethod
    def open(cls, url: str, run: str | None = None) -> Ledger:
        """The ledger at `sqlite:///PATH` or `postgresql://...`, made if missing. With `run`, the ledger is bound to
        that name: another run that opens it later gets a UserError."""
        ledger = cls(connect(url))
        if run is not None:
            try:
                ledger._bind(run)
            except UserError:
                ledger.close()
                raise
        return ledger

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    # Admission and play -----------------------------------------------------------------------------------------------

    @persistent
    def admit(self, index: int, task_id: str, size: int, version: int) -> int:
        """Opens group `index` with `size` pending episodes, unless it is there already. Returns its id. Indices count
        from 0 without gaps; `version` is what the engines serve now."""
        group = {"id": index, "task_id": task_id, "size": size, "admitted_version": version}
        group |= {"seal": seal(GROUP, group), "state": "open", "unfinished": size}
        pending = {"group_id": index, "attempt": 0, "failures": 0, "state": "pending"}
        try:
            with self._write() as c:
                c.execute(sa.insert(groups), group)
                c.execute(sa.insert(episodes), [pending | {"member": m} for m in range(size)])
                c.execute(_COUNT, {"counter": "admitted", "by": size})
        except IntegrityError:
            pass  # admitted before
        return index

    def lease(self, owner: str, limit: int, seconds: float) -> list[EpisodeLease]:
        """Up to `limit` episodes for `owner`, of the oldest groups first: pending ones and those of expired leases."""
        call = secrets.token_hex(8)
        return persist(lambda again: self._lease(owner, limit, seconds, call, again))

    def _lease(self, owner: str, limit: int, seconds: float, call: str, again: bool) -> list[EpisodeLease]:
        with self._write() as c:
            if again and (rows := c.execute(_GRANTED, {"lease": call}).all()):
                return [EpisodeLease(r.group_id, r.group_id, r.task_id, r.member, r.attempt, owner) for r in rows]
            rows = list(c.execute(_PENDING, {"limit": limit}).all())
            if over := self._watch.over(c.execute(_LEASED).all()):
                found = c.execute(_OVER, {"ids": [lease[:2] for lease in over]}).all()
                rows += [row for row in found if (row.group_id, row.member, row.attempt, row.renewals) in over]
                rows = sorted(rows, key=lambda row: (row.group_id, row.member))[:limit]
            leases = [
                EpisodeLease(
                    group_id=row.group_id,
                    index=row.group_id,
                    task_id=row.task_id,
                    member=row.member,
                    attempt=row.attempt + (row.state == "leased"),
                    owner=owner,
                )
                for row in rows
            ]
            if leases:
                held = {"state": "leased", "owner": owner, "lease": call, "lease_seconds": seconds, "renewals": 0}
                c.execute(_LEASE, [{"g": x.group_id, "m": x.member, "attempt": x.attempt} | held for x in leases])
        return leases

    @persistent
    def renew(self, owner: str, seconds: float) -> int:
        """Prolongs every lease of `owner` to `seconds` from now. Returns how many there are."""
        mine = sa.update(episodes).where(_e.state == "leased", _e.owner == owner)
        with self._write() as c:
            return c.execute(mine.values(lease_seconds=seconds, renewals=_e.renewals + 1)).rowcount

    def finish(
        self,
        lease: EpisodeLease,
        *,
        outcome: Outcome,
        reward: float,
        passed: bool,
        blob: EpisodeBlob | None,
        tokens: int,
        min_version: int,
        metrics: Mapping[str, float],
        flags: tuple[str, ...] = (),
        reason: str = "",
    ) -> bool:
        """Records how a leased episode ended. False if the result came late and was ignored. An infrastructure failure
        sends the episode back to pending, twice at most; after that, or in quarantine, it is done without a blob.
        `reason` is why it was lost. The group is ready once its last member is done."""
        kept = None if outcome.lost else blob
        values = {
            "group_id": lease.group_id,
            "member": lease.member,
            "attempt": lease.attempt,
            "outcome": outcome.value,
            "reward": float(reward),
            "passed": passed,
            "blob": kept and kept.key,
            "digest": kept and kept.digest,
            "tokens": tokens,
            "min_version": min_version,
            "metrics": msgspec.json.encode(metrics).decode(),
            "flags": " ".join(flags),
            "reason": reason,
        }
        values |= {"state": "done", "seal": seal(EPISODE, values), "finished": time.time()}
        return persist(lambda again: self._finish(lease, values, again))

    def _finish(self, lease: EpisodeLease, values: dict[str, Any], again: bool) -> bool:
        key = {"g": lease.group_id, "m": lease.member, "a": lease.attempt}
        with self._write() as c:
            if again and _finished(c, lease, values):
                return True
            infra = values["outcome"] == Outcome.INFRA.value
            if infra and c.execute(_RETRY, key | {"why": values["reason"]}).rowcount:
                c.execute(_COUNT, {"counter": "retried", "by": 1})
                return True
            if c.execute(_FINISH, key | values).rowcount == 0:
                c.execute(_COUNT, {"counter": "late", "by": 1})
                return False
            if c.execute(_MEMBER_DONE, {"g": lease.group_id}).scalar_one() == 0:
                order = c.execute(_COUNT, {"counter": "ready", "by": 1}).scalar_one()
                c.execute(sa.update(groups).where(_g.id == lease.group_id).values(state="ready", ready_order=order))
        return True

    # Training ---------------------------------------------------------------------------------------------------------

    @persistent
    def ready_groups(
        self, limit: int, in_order: bool, due: int | None = None, without: Collection[int] = ()
    ) -> list[Group]:
        """Up to `limit` groups to train on next, oldest first; those lost to infrastructure as a whole are empty. Those
        in `without` are left out: a version that was trained on them is on its way. `in_order` stops at the first group
        that is still open. Otherwise younger groups overtake open ones; with `due` (the trainer's version minus the
        staleness bound O) only as far as every group is still trained on within O versions of its admission: where
        `limit` groups are ready but taking them would leave a straggler too late, the answer is empty."""
        with self._read() as c:
            waiting = [row for row in c.execute(_WAITING).all() if row.id not in without]
            ids: list[int] = []
            for row in waiting:
                if row.state == "ready":
                    ids.append(row.id)
                elif in_order:
                    break
            ids = ids[:limit]
            if due is not None and len(ids) == limit:
                left = [row.admitted_version for row in waiting if row.id not in ids]
                if not leaves_in_time(left, version=due, staleness=0, prompts=limit):
                    return []
            return _groups(c, ids)

    @persistent
    def groups(self, ids: Sequence[int]) -> list[Group]:
        """Groups that a version was trained on, in this order. Raises KeyError if one was never admitted."""
        with self._read() as c:
            return _groups(c, ids)

    @persistent
    def admitted(self, task_ids: Sequence[str]) -> dict[str, tuple[int, int | None]]:
        """Of these tasks those that have a group: its id, and the version that was trained on it (None: none yet)."""
        with self._read() as c:
            return groups_of_tasks(c, task_ids)

    @persistent
    def consume(self, group_ids: Collection[int], version: int) -> None:
        """Marks groups as trained on by `version`; again is fine. Raises ValueError if another version did."""
        with self._write() as c:
            _consume(c, group_ids, version)
        if self._engine.dialect.name == "sqlite":
            # Here, in the trainer, rather than in whichever commit of the controller fills the log: this may fsync.
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                connection.close()

    @persistent
    def recover(self, manifests: Sequence[PolicyVersion]) -> None:
        """Makes the ledger follow the published versions; call it on resume, before any process leases or trains.
        Groups that a manifest names are consumed by it, groups that none names are ready again, and every lease goes
        back to pending under a new attempt number, so that nothing its owner may still do counts. Raises UserError if a
        manifest names a group that was never admitted here, or if the database is not as it was written."""
        with self._write() as c:
            check_rows(c)
            c.execute(sa.update(groups).where(_g.state == "consumed").values(state="ready", consumed_version=None))
            for manifest in manifests:
                try:
                    _consume(c, manifest.groups, manifest.version)
                except ValueError as e:
                    why = f"the ledger does not belong to the published versions: {e}; start a new run"
                    raise UserError(why) from e
            again = {"state": "pending", "attempt": _e.attempt + 1, "owner": None, "lease": None}
            c.execute(sa.update(episodes).where(_e.state == "leased").values(again))
            proof = check(c, manifests)
            if not proof.ok:
                raise damaged(c, proof.sentence)

    @persistent
    def untrained(self) -> list[tuple[int, int, EpisodeBlob]]:
        """(group, member, blob) of every episode that has ended, was not lost, and is not trained on yet."""
        query = (
            sa.select(_e.group_id, _e.member, _e.blob, _e.digest)
            .join_from(episodes, groups, _g.id == _e.group_id)
            .where(_e.state == "done", _e.blob.is_not(None), _g.state != "consumed")
            .order_by(_e.group_id, _e.member)
        )
        with self._read() as c:
            return [(r.group_id, r.member, EpisodeBlob(key=r.blob, digest=r.digest)) for r in c.execute(query)]

    @persistent
    def play_again(self, group: int, member: int) -> None:
        """Sends an episode that has ended back to pending, under a new attempt number. Raises ValueError if its group
        was trained on."""
        mine = (_e.group_id == group, _e.member == member, _e.state == "done")
        with self._write() as c:
            if c.execute(sa.select(_g.state).where(_g.id == group)).scalar_one() == "consumed":
                raise ValueError(f"group {group} was trained on")
            again = {"state": "pending", "attempt": _e.attempt + 1, "outcome": None, "blob": None, "digest": None}
            if c.execute(sa.update(episodes).where(*mine).values(again)).rowcount:
                opened = {"state": "open", "unfinished": _g.unfinished + 1, "ready_order": None}
                c.execute(sa.update(groups).where(_g.id == group).values(opened))

    # Cheating ---------------------------------------------------------------------------------------------------------

    @persistent
    def flag(self, episode: Episode) -> None:
        """Replaces the flags, metrics and reward of an episode's row by what the audit of its group found."""
        with self._write() as c:
            flagged_rows.flag(c, episode)

    @persistent
    def flagged(self) -> list[FlaggedEpisode]:
        """Every flagged episode; a full scan, for reports."""
        with self._read() as c:
            return flagged_rows.flagged(c)

    @persistent
    def add_impossible(self, number: int, episode: Episode, blob: EpisodeBlob) -> None:
        """Records how impossible episode `number` ended; again is fine."""
        with self._write() as c:
            flagged_rows.add_impossible(c, number, episode, blob)

    @persistent
    def impossible(self) -> ImpossibleCounts:
        """How the impossible episodes ended."""
        with self._read() as c:
            return flagged_rows.count_impossible(c)

    @persistent
    def next_impossible(self) -> int:
        """The number of the next impossible episode."""
        with self._read() as c:
            return flagged_rows.next_impossible(c)

    # Figures ----------------------------------------------------------------------------------------------------------

    @persistent
    def figures(self) -> Figures:
        """What admission needs; cheap enough to ask for after every episode."""
        with self._read() as c:
            totals = c.execute(_TOTALS).one()
            rows = c.execute(_OPEN).all()
        reserved = sum(row.size for row in rows)
        return Figures(
            groups=0 if totals.last is None else totals.last + 1,
            accepted=totals.admitted - reserved,
            reserved=reserved,
            in_flight=sum(row.unfinished for row in rows),
            open_tasks=tuple(row.task_id for row in rows),
            consumed_version=-1 if totals.consumed is None else totals.consumed,
        )

    @persistent
    def results(self, after: int, *, consumed_only: bool) -> list[GroupResult]:
        """Finished groups beyond the mark `after` (0 at first), none twice and none left out. In order of completion,
        or with `consumed_only` those trained on, by version and index: an order that does not depend on timing. A mark
        is good for the same `consumed_only` only."""
        query = _RESULTS_CONSUMED if consumed_only else _RESULTS_READY
        with self._read() as c:
            rows = c.execute(query, {"after": after}).all()
        return [GroupResult(row.id, row.task_id, int(row.passed), int(row.episodes), row.mark) for row in rows]

    @persistent
    def mixed_groups(self, count: int) -> list[Group]:
        """The last `count` consumed groups in which some members passed and some did not, newest first."""
        query = (
            sa.select(_g.id)
            .join_from(groups, episodes, _g.id == _e.group_id)
            .where(_g.state == "consumed", _e.outcome.not_in(LOST))
            .group_by(_g.id, _g.consumed_version)
            .having(_PASSED > 0, sa.func.count() > _PASSED)
            .order_by(_g.consumed_version.desc(), _g.id.desc())
            .limit(count)
        )
        with self._read() as c:
            return _groups(c, list(c.execute(query).scalars()))

    @persistent
    def blobs(self) -> list[EpisodeBlob]:
        """The bytes of every episode that has ended and was not lost, by group and member."""
        ended = (_e.state == "done", _e.blob.is_not(None))
        query = sa.select(_e.blob, _e.digest).where(*ended).order_by(_e.group_id, _e.member)
        with self._read() as c:
            return [EpisodeBlob(key=row.blob, digest=row.digest) for row in c.execute(query)]

    @persistent
    def counts(self) -> dict[str, int]:
        """Episodes that are done, by outcome."""
        with self._read() as c:
            return count_outcomes(c)

    @persistent
    def lost(self) -> dict[str, int]:
        """Episodes that infrastructure or a mistake in etude has lost for good, by reason; a full scan, for reports."""
        query = sa.select(_e.reason, sa.func.count()).where(_e.outcome.in_(LOST)).group_by(_e.reason)
        with self._read() as c:
            return dict(c.execute(query).all())

    @persistent
    def left_behind(self, without: Collection[int] = ()) -> dict[str, float]:
        """Metrics of the episodes that have ended and are not trained on yet; see `representation.py`."""
        with self._read() as c:
            return representation.left_behind(c, without)

    @persistent
    def represented(self) -> tuple[Population, Population]:
        """The episodes that were trained on, and all that have ended; a full scan, for reports."""
        with self._read() as c:
            return representation.compare(c)

    @persistent
    def conservation(self, manifests: Sequence[PolicyVersion]) -> Conservation:
        """Proves from the rows that no episode is lost and no group was trained on twice; a full scan, for reports."""
        with self._read() as c:
            return check(c, manifests)

    # ------------------------------------------------------------------------------------------------------------------

    @persistent
    def _bind(self, run: str) -> None:
        with self._write() as c:
            if c.execute(sa.update(meta).where(meta.c.key == "run", meta.c.value == "").values(value=run)).rowcount:
                return
            bound = c.execute(sa.select(meta.c.value).where(meta.c.key == "run")).scalar_one()
        if bound != run:
            where = f"the ledger {self._engine.url} belongs to run {bound!r}"
            raise UserError(f"{where}; give this run a database of its own")

    @contextmanager
    def _write(self) -> Generator[sa.Connection]:
        with self._errors(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Generator[sa.Connection]:
        with self._errors(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except (IntegrityError, ProgrammingError):
            raise
        except DBAPIError as e:
            kind = Outage if is_outage(e) else UserError
            why = f"the ledger {self._engine.url} failed: {reason(e)}; check the disk or the server, then --resume"
            raise kind(why) from e


def _finished(c: sa.Connection, lease: EpisodeLease, values: Mapping[str, Any]) -> bool:
    """Whether this very result is there already: it was committed, and the answer was lost."""
    where = (_e.group_id == lease.group_id, _e.member == lease.member)
    row = c.execute(sa.select(_e.state, _e.attempt, _e.seal, _e.reason).where(*where)).one()
    if row.state == "done":
        return row.attempt == lease.attempt and row.seal == values["seal"]
    retried = values["outcome"] == Outcome.INFRA.value and row.reason == values["reason"]
    return retried and row.state == "pending" and row.attempt == lease.attempt + 1


def _groups(c: sa.Connection, ids: Sequence[int]) -> list[Group]:
    """The groups with these ids, in this order, and the blobs of their members."""
    if not ids:
        return []
    blobs: dict[int, list[EpisodeBlob]] = {group: [] for group in ids}
    for row in c.execute(_MEMBERS, {"ids": ids}):
        blobs[row.group_id].append(EpisodeBlob(key=row.blob, digest=row.digest))
    rows = {row.id: row for row in c.execute(_ADMITTED, {"ids": ids})}
    return [
        Group(id=i, index=i, task_id=task_id, admitted_version=admitted, episodes=tuple(blobs[i]))
        for i, task_id, admitted in (rows[group] for group in ids)
    ]


def _consume(c: sa.Connection, ids: Collection[int], version: int) -> None:
    """Marks groups as consumed. Raises ValueError, which rolls the transaction back, if one cannot be."""
    if not ids:
        return
    states = {row.id: row for row in c.execute(sa.select(_g.id, _g.state, _g.consumed_version).where(_g.id.in_(ids)))}
    for group in sorted(ids):
        row = states.get(group)
        if row is None:
            raise ValueError(f"group {group} of version {version} was never admitted")
        if row.state == "open":
            raise ValueError(f"group {group} of version {version} has episodes without a result")
        if row.state == "consumed" and row.consumed_version != version:
            raise ValueError(f"group {group} of version {version} was consumed by version {row.consumed_version}")
    c.execute(sa.update(groups).where(_g.id.in_(ids)).values(state="consumed", consumed_version=version))
