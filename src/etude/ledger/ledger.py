"""The run ledger: every admitted episode, the process that plays it, its outcome, and the version that trained on it.

    group     open ──(last member done)──> ready ──(a manifest names it)──> consumed
    episode   pending ──lease──> leased ──finish──> done
                 ^                  │
                 └── infra, expiry ─┘   each time under a new attempt number

The ledger holds metadata only: token arrays are blobs in the store. Every method is one transaction, so a process may
be killed at any point; several processes and threads may share a ledger. Each (group, member) gets exactly one result:
a lease carries its attempt number, and a result under an older number is ignored and counted. The manifests of
published versions decide which groups were consumed (`recover`), not this database.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError

from etude.errors import UserError
from etude.ledger import flagged as flagged_rows
from etude.ledger import representation
from etude.ledger.conservation import Conservation, check, count_outcomes
from etude.ledger.database import persist
from etude.ledger.digests import EPISODE, GROUP, damaged, seal
from etude.ledger.digests import check as check_rows
from etude.ledger.flagged import FlaggedEpisode, ImpossibleCounts
from etude.ledger.group_rows import MIXED, RESULTS_CONSUMED, RESULTS_READY, consume_groups, groups_of_tasks, load_groups
from etude.ledger.leases import ELSEWHERE, LeaseWatch
from etude.ledger.leaving_behind import leaves_in_time
from etude.ledger.membership import Membership
from etude.ledger.schema import RECOVERY, connect, counters, episodes, groups, meta
from etude.ledger.tables import RunTables, persistent
from etude.records import LOST, Episode, EpisodeBlob, Group, Outcome, PolicyVersion, Population

MAX_RETRIES = 2
"""Infrastructure failures of one episode before it is recorded as lost and its group goes on without it."""


@dataclass(frozen=True)
class EpisodeLease:
    """The right to play one episode for a number of seconds, which a renewal starts again. `version` was served when
    the group was admitted: older weights play none of it."""

    group_id: int
    index: int
    task_id: str
    member: int
    attempt: int
    owner: str
    version: int = 0


def blob_key(group: int, member: int, attempt: int) -> str:
    """The key of an episode's blob in the store of rollouts."""
    return f"{group:08d}/{member:04d}-{attempt}.msgpack"


@dataclass(frozen=True)
class GroupResult:
    """A finished group as the curriculum sees it. `mark` is the argument for the next call of `results`."""

    index: int
    task_id: str
    passed: int
    episodes: int  # members with a result, without lost ones
    mark: int


@dataclass(frozen=True)
class Figures:
    """Counts that admission needs, in episodes unless a comment names another unit."""

    groups: int  # groups admitted so far: the next index
    accepted: int  # of finished groups, consumed or not
    reserved: int  # of open groups
    in_flight: int  # admitted and without a result yet, whether leased or waiting for a slot
    open_tasks: tuple[str, ...]  # task ids of the open groups
    consumed_version: int  # newest version that consumed a group; -1 before the first


_e, _g = episodes.c, groups.c

# Frequent statements are built once: building one costs more than SQLite needs to run it.
_MINE = (_e.group_id == bindparam("g"), _e.member == bindparam("m"), _e.attempt == bindparam("a"), _e.state == "leased")
_FINISH = sa.update(episodes).where(*_MINE)
_FAILURES = _e.failures + sa.cast(bindparam("by"), sa.Integer)
_RETRY = (
    sa.update(episodes)
    .where(*_MINE, _FAILURES <= MAX_RETRIES)
    .values(
        state="pending", attempt=_e.attempt + 1, failures=_FAILURES, owner=None, lease=None, reason=bindparam("why")
    )
)
_UNLEASED = {"state": "pending", "attempt": _e.attempt + 1, "owner": None, "lease": None}
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
    sa.select(_e.group_id, _e.member, _e.attempt, _e.state, _e.renewals, _g.task_id, _g.admitted_version)
    .join_from(episodes, groups, _g.id == _e.group_id)
    .order_by(_e.group_id, _e.member)
    .with_for_update(of=episodes, skip_locked=True)
)
_PENDING = _EPISODES.where(_e.state == "pending").limit(bindparam("limit"))
_OTHERS = _PENDING.where(_e.group_id.not_in(bindparam("rather_not", expanding=True)))
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


class Ledger(RunTables):
    """One run's ledger. Methods raise UserError when the database cannot be reached, is full or is damaged."""

    def __init__(self, engine: sa.Engine):
        super().__init__(engine)
        self._watch = LeaseWatch()
        self.members = Membership(engine)

    @classmethod
    def open(cls, url: str, run: str | None = None) -> Ledger:
        """The ledger at `sqlite:///PATH` or `postgresql://...`; its tables are made if they are missing. With `run`,
        the ledger is bound to that name: another run that opens it later gets a UserError."""
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
        """Opens group `index` with `size` pending episodes, unless the ledger has it already. Returns its id. Indices
        count from 0 without gaps; `version` is the version that the engines serve now."""
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

    def lease(self, owner: str, limit: int, seconds: float, rather_not: Collection[int] = ()) -> list[EpisodeLease]:
        """Leases up to `limit` episodes to `owner`, the oldest groups first: pending episodes and those of expired
        leases; of the groups `rather_not` only where nothing else is pending."""
        call = secrets.token_hex(8)
        return persist(lambda again: self._lease(owner, limit, seconds, rather_not, call, again))

    def _lease(
        self, owner: str, limit: int, seconds: float, rather_not: Collection[int], call: str, again: bool
    ) -> list[EpisodeLease]:
        with self._write() as c:
            if again and (rows := c.execute(_GRANTED, {"lease": call}).all()):
                return [_lease_of(row, row.attempt, owner) for row in rows]
            rows = list(c.execute(_OTHERS, {"limit": limit, "rather_not": [*rather_not]}).all()) if rather_not else []
            rows = rows or list(c.execute(_PENDING, {"limit": limit}).all())
            if self._watch.due() and (over := self._watch.over(c.execute(_LEASED).all())):
                expired = c.execute(_OVER, {"ids": [lease[:2] for lease in over]}).all()
                rows += [row for row in expired if (row.group_id, row.member, row.attempt, row.renewals) in over]
                rows = sorted(rows, key=lambda row: (row.group_id, row.member))[:limit]
            leases = [_lease_of(row, row.attempt + (row.state == "leased"), owner) for row in rows]
            if leases:
                held = {"state": "leased", "owner": owner, "lease": call, "lease_seconds": seconds, "renewals": 0}
                c.execute(_LEASE, [{"g": x.group_id, "m": x.member, "attempt": x.attempt} | held for x in leases])
        return leases

    @persistent
    def renew(self, owner: str, seconds: float) -> int:
        """Prolongs every lease of `owner` to `seconds` from now. Returns the number of these leases."""
        mine = sa.update(episodes).where(_e.state == "leased", _e.owner == owner)
        with self._write() as c:
            return c.execute(mine.values(lease_seconds=seconds, renewals=_e.renewals + 1)).rowcount

    @persistent
    def release(self, owner: str) -> None:
        """Sends the leased episodes of `owner` back to pending, under new attempt numbers."""
        mine = sa.update(episodes).where(_e.state == "leased", _e.owner == owner)
        with self._write() as c:
            c.execute(mine.values(_UNLEASED))

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
        recovered: Mapping[str, int] | None = None,
        blamed: bool = True,
    ) -> bool:
        """Records the result of a leased episode. Returns False if the result came late and was ignored. An
        infrastructure failure sends the episode back to pending, twice at most, and without end if it is not
        `blamed`; after that, or in quarantine, it is done without a blob. `reason` says why it was lost. `recovered`
        is added to the counters of `RECOVERY`. The group is ready once its last member is done."""
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
        counts = {} if outcome.lost else {name: count for name, count in (recovered or {}).items() if count}
        return persist(lambda again: self._finish(lease, values, counts, blamed, again))

    def _finish(
        self, lease: EpisodeLease, values: dict[str, Any], counts: Mapping[str, int], blamed: bool, again: bool
    ) -> bool:
        key = {"g": lease.group_id, "m": lease.member, "a": lease.attempt}
        with self._write() as c:
            if again and _finished(c, lease, values):
                return True
            infra = values["outcome"] == Outcome.INFRA.value
            if infra and c.execute(_RETRY, key | {"why": values["reason"], "by": int(blamed)}).rowcount:
                c.execute(_COUNT, {"counter": "retried", "by": 1})
                return True
            if c.execute(_FINISH, key | values).rowcount == 0:
                c.execute(_COUNT, {"counter": "late", "by": 1})
                return False
            for name, count in counts.items():
                c.execute(_COUNT, {"counter": name, "by": count})
            if c.execute(_MEMBER_DONE, {"g": lease.group_id}).scalar_one() == 0:
                order = c.execute(_COUNT, {"counter": "ready", "by": 1}).scalar_one()
                c.execute(sa.update(groups).where(_g.id == lease.group_id).values(state="ready", ready_order=order))
        return True

    # Training ---------------------------------------------------------------------------------------------------------

    @persistent
    def ready_groups(
        self, limit: int, in_order: bool, due: int | None = None, without: Collection[int] = ()
    ) -> list[Group]:
        """Up to `limit` groups to train on next, oldest first. A group is empty if infrastructure lost all its
        episodes. Groups in `without` are left out: a version that was trained on them will be published soon.

        With `in_order` the result stops at the first group that is still open; otherwise younger groups overtake open
        ones. `due` (the trainer's version minus the staleness bound O) limits this overtaking: every group must be
        trained on within O versions of its admission. The result is empty if `limit` groups are ready but would leave
        one too late.
        """
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
            return load_groups(c, ids)

    @persistent
    def groups(self, ids: Sequence[int]) -> list[Group]:
        """The groups with these ids, in this order. Raises KeyError if one was never admitted."""
        with self._read() as c:
            return load_groups(c, ids)

    @persistent
    def admitted(self, task_ids: Sequence[str]) -> dict[str, tuple[int, int | None]]:
        """Group id and consuming version (None: not yet consumed) of each of these tasks that has a group."""
        with self._read() as c:
            return groups_of_tasks(c, task_ids)

    @persistent
    def consume(self, group_ids: Collection[int], version: int) -> None:
        """Marks groups as trained on by `version`. May be repeated. Raises ValueError if another version consumed
        one."""
        with self._write() as c:
            consume_groups(c, group_ids, version)
        if self._engine.dialect.name == "sqlite":
            # A checkpoint may fsync. Here the trainer pays for it, not a commit of the controller that fills the log.
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                connection.close()

    @persistent
    def recover(self, manifests: Sequence[PolicyVersion]) -> None:
        """Makes the ledger follow the published versions; call it on resume, before any process leases or trains.
        Groups that a manifest names become consumed by it, and consumed groups that none names become ready again.
        The leases of processes that ended with the controller go back to pending under a new attempt number, so a late
        result is ignored; those of players `ELSEWHERE` expire if the players are gone. Raises
        UserError if a manifest names a group that was never admitted here, or if the database is damaged."""
        with self._write() as c:
            if c.dialect.name == "postgresql":  # players play on: no row may change between two of the counts below
                c.execute(sa.text("LOCK TABLE episodes, groups IN EXCLUSIVE MODE"))
            check_rows(c)
            c.execute(sa.update(groups).where(_g.state == "consumed").values(state="ready", consumed_version=None))
            for manifest in manifests:
                try:
                    consume_groups(c, manifest.groups, manifest.version)
                except ValueError as e:
                    why = f"the ledger does not belong to the published versions: {e}; start a new run"
                    raise UserError(why) from e
            here = ~_e.owner.startswith(ELSEWHERE, autoescape=True)
            c.execute(sa.update(episodes).where(_e.state == "leased", here).values(_UNLEASED))
            proof = check(c, manifests)
            if not proof.ok:
                raise damaged(c, proof.sentence)

    @persistent
    def untrained(self) -> list[tuple[int, int, EpisodeBlob]]:
        """(group, member, blob) of every finished episode that was not lost and is not trained on yet."""
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
        """Sends a finished episode back to pending, under a new attempt number. Raises ValueError if its group was
        trained on."""
        mine = (_e.group_id == group, _e.member == member, _e.state == "done")
        with self._write() as c:
            if c.execute(sa.select(_g.state).where(_g.id == group)).scalar_one() == "consumed":
                raise ValueError(f"group {group} was trained on")
            again = {"state": "pending", "attempt": _e.attempt + 1, "outcome": None, "blob": None, "digest": None}
            if c.execute(sa.update(episodes).where(*mine).values(again)).rowcount:
                opened = {"state": "open", "unfinished": _g.unfinished + 1, "ready_order": None}
                c.execute(sa.update(groups).where(_g.id == group).values(opened))

    # Journals ---------------------------------------------------------------------------------------------------------

    @persistent
    def unfinished(self) -> set[tuple[int, int]]:
        """(group, member) of every episode without a result."""
        with self._read() as c:
            rows = c.execute(sa.select(_e.group_id, _e.member).where(_e.state != "done")).all()
        return {(row.group_id, row.member) for row in rows}

    @persistent
    def recovered(self) -> dict[str, int]:
        """The counters of `RECOVERY`."""
        with self._read() as c:
            values = dict(c.execute(sa.select(counters.c.name, counters.c.value)).all())
        return {name: values.get(name, 0) for name in RECOVERY}

    # Cheating ---------------------------------------------------------------------------------------------------------

    @persistent
    def flag(self, episode: Episode) -> None:
        """Writes the flags, metrics and reward that the audit of its group gave the episode into its row."""
        with self._write() as c:
            flagged_rows.flag(c, episode)

    @persistent
    def flagged(self) -> list[FlaggedEpisode]:
        """The rows of all flagged episodes. A full scan, for reports."""
        with self._read() as c:
            return flagged_rows.flagged(c)

    @persistent
    def add_impossible(self, number: int, episode: Episode, blob: EpisodeBlob) -> None:
        """Records the result of impossible episode `number`. May be repeated."""
        with self._write() as c:
            flagged_rows.add_impossible(c, number, episode, blob)

    @persistent
    def impossible(self) -> ImpossibleCounts:
        """The counts over all impossible episodes."""
        with self._read() as c:
            return flagged_rows.count_impossible(c)

    @persistent
    def next_impossible(self) -> int:
        """The number for the next impossible episode."""
        with self._read() as c:
            return flagged_rows.next_impossible(c)

    # Figures ----------------------------------------------------------------------------------------------------------

    @persistent
    def figures(self) -> Figures:
        """The counts that admission needs. Cheap enough for a call after every episode."""
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
        """Finished groups beyond the mark `after` (0 at first), each exactly once. They come in order of completion, or
        with `consumed_only` those trained on, by version and index, an order that does not depend on timing. A mark is
        valid only for calls with the same `consumed_only`."""
        query = RESULTS_CONSUMED if consumed_only else RESULTS_READY
        with self._read() as c:
            rows = c.execute(query, {"after": after}).all()
        return [GroupResult(row.id, row.task_id, int(row.passed), int(row.episodes), row.mark) for row in rows]

    @persistent
    def mixed_groups(self, count: int) -> list[Group]:
        """The last `count` consumed groups in which some members passed and some failed, newest first."""
        with self._read() as c:
            return load_groups(c, list(c.execute(MIXED, {"count": count}).scalars()))

    @persistent
    def blobs(self) -> list[EpisodeBlob]:
        """The blobs of all finished episodes that were not lost, by group and member."""
        ended = (_e.state == "done", _e.blob.is_not(None))
        query = sa.select(_e.blob, _e.digest).where(*ended).order_by(_e.group_id, _e.member)
        with self._read() as c:
            return [EpisodeBlob(key=row.blob, digest=row.digest) for row in c.execute(query)]

    @persistent
    def counts(self) -> dict[str, int]:
        """Number of finished episodes by outcome."""
        with self._read() as c:
            return count_outcomes(c)

    @persistent
    def lost(self) -> dict[str, int]:
        """Number of episodes lost for good by infrastructure or a bug in etude, by reason. A full scan, for reports."""
        query = sa.select(_e.reason, sa.func.count()).where(_e.outcome.in_(LOST)).group_by(_e.reason)
        with self._read() as c:
            return dict(c.execute(query).all())

    @persistent
    def left_behind(self, without: Collection[int] = ()) -> dict[str, float]:
        """Metrics of the finished episodes that are not trained on yet; see `representation.py`."""
        with self._read() as c:
            return representation.left_behind(c, without)

    @persistent
    def represented(self) -> tuple[Population, Population]:
        """The lengths and outcomes of the episodes that were trained on, and of all finished ones. A full scan, for
        reports."""
        with self._read() as c:
            return representation.compare(c)

    @persistent
    def conservation(self, manifests: Sequence[PolicyVersion]) -> Conservation:
        """The proof that no episode is lost and no group was trained on twice. A full scan, for reports."""
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


def _lease_of(row: Any, attempt: int, owner: str) -> EpisodeLease:
    return EpisodeLease(row.group_id, row.group_id, row.task_id, row.member, attempt, owner, row.admitted_version)


def _finished(c: sa.Connection, lease: EpisodeLease, values: Mapping[str, Any]) -> bool:
    """Whether an earlier try committed this result and only its reply was lost."""
    where = (_e.group_id == lease.group_id, _e.member == lease.member)
    row = c.execute(sa.select(_e.state, _e.attempt, _e.seal, _e.reason).where(*where)).one()
    if row.state == "done":
        return row.attempt == lease.attempt and row.seal == values["seal"]
    retried = values["outcome"] == Outcome.INFRA.value and row.reason == values["reason"]
    return retried and row.state == "pending" and row.attempt == lease.attempt + 1
