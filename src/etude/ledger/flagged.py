"""The ledger's rows about cheating: the flags of episodes, and the episodes of impossible tasks.

Episodes of impossible tasks belong to no group: they are played beside the groups, graded, and never trained on.
"""

from __future__ import annotations

import time

import msgspec
import sqlalchemy as sa

from etude.ledger.digests import EPISODE, IMPOSSIBLE, seal
from etude.ledger.schema import episodes, groups, impossible
from etude.records import Episode, EpisodeBlob, Record

_e, _g, _i = episodes.c, groups.c, impossible.c


class FlaggedEpisode(Record, frozen=True, kw_only=True):
    """A row of the ledger whose episode has flags."""

    group: int
    member: int
    task: str
    flags: tuple[str, ...]
    reward: float
    passed: bool
    blob: str  # empty for a lost episode
    digest: str = ""


class ImpossibleCounts(Record, frozen=True, kw_only=True):
    """Numbers of finished episodes of impossible tasks: all, those that passed, and those that tampered with the
    grading."""

    played: int
    passed: int
    tampered: int


def flag(c: sa.Connection, episode: Episode) -> None:
    """Writes the flags, metrics and reward of the episode into its row. May be repeated."""
    same = (_e.group_id == episode.group_id, _e.member == episode.member)
    metrics = msgspec.json.encode(episode.metrics).decode()
    values = {"flags": " ".join(episode.flags), "metrics": metrics, "reward": episode.reward}
    row = c.execute(sa.select(*(_e[name] for name in EPISODE)).where(*same)).mappings().one()
    c.execute(sa.update(episodes).where(*same).values(values | {"seal": seal(EPISODE, dict(row) | values)}))


def flagged(c: sa.Connection) -> list[FlaggedEpisode]:
    """The rows of all flagged episodes, by group and member. A full scan, for reports."""
    query = (
        sa.select(_e.group_id, _e.member, _g.task_id, _e.flags, _e.reward, _e.passed, _e.blob, _e.digest)
        .join_from(episodes, groups, _g.id == _e.group_id)
        .where(_e.state == "done", _e.flags != "")
        .order_by(_e.group_id, _e.member)
    )
    return [
        FlaggedEpisode(
            group=row.group_id,
            member=row.member,
            task=row.task_id,
            flags=tuple(row.flags.split()),
            reward=row.reward,
            passed=bool(row.passed),
            blob=row.blob or "",
            digest=row.digest or "",
        )
        for row in c.execute(query)
    ]


def add_impossible(c: sa.Connection, number: int, episode: Episode, blob: EpisodeBlob) -> None:
    """Records the impossible episode `number`, unless the ledger has it already."""
    if c.execute(sa.select(_i.number).where(_i.number == number)).first() is not None:
        return
    values = {
        "number": number,
        "task_id": episode.task_id,
        "version": episode.min_version,
        "outcome": episode.outcome.value,
        "passed": episode.passed,
        "flags": " ".join(episode.flags),
        "blob": blob.key,
        "digest": blob.digest,
    }
    sealed = {"seal": seal(IMPOSSIBLE, values), "finished": time.time()}
    c.execute(sa.insert(impossible).values(values | sealed))


def count_impossible(c: sa.Connection) -> ImpossibleCounts:
    """The counts over all impossible episodes."""
    rows = c.execute(sa.select(_i.passed, _i.outcome, sa.func.count().label("n")).group_by(_i.passed, _i.outcome)).all()
    return ImpossibleCounts(
        played=sum(row.n for row in rows),
        passed=sum(row.n for row in rows if row.passed),
        tampered=sum(row.n for row in rows if row.outcome == "tampered"),
    )


def next_impossible(c: sa.Connection) -> int:
    """The lowest number that no impossible episode has yet: one above the highest."""
    last = c.execute(sa.select(sa.func.max(_i.number))).scalar()
    return 0 if last is None else int(last) + 1
