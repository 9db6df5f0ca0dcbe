"""The statements of the ledger that read groups, and those that mark groups as consumed; each runs on a connection."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from etude.ledger.schema import episodes, groups
from etude.records import LOST, EpisodeBlob, Group

_AT_A_TIME = 500  # SQLite bounds the parameters of a statement
_e, _g = episodes.c, groups.c
_MEMBERS = (
    sa.select(_e.group_id, _e.blob, _e.digest)
    .where(_e.group_id.in_(bindparam("ids", expanding=True)), _e.blob.is_not(None))
    .order_by(_e.group_id, _e.member)
)
_ADMITTED = sa.select(_g.id, _g.task_id, _g.admitted_version).where(_g.id.in_(bindparam("ids", expanding=True)))
_OF_TASKS = (
    sa.select(_g.task_id, _g.id, _g.consumed_version)
    .where(_g.task_id.in_(bindparam("tasks", expanding=True)))
    .order_by(_g.id)
)
_PASSED = sa.func.sum(sa.case((_e.passed, 1), else_=0))
MIXED = (
    sa.select(_g.id)
    .join_from(groups, episodes, _g.id == _e.group_id)
    .where(_g.state == "consumed", _e.outcome.not_in(LOST))
    .group_by(_g.id, _g.consumed_version)
    .having(_PASSED > 0, sa.func.count() > _PASSED)
    .order_by(_g.consumed_version.desc(), _g.id.desc())
    .limit(bindparam("count"))
)
"""Ids of the last `count` consumed groups in which some members passed and some did not, newest first."""


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


RESULTS_READY = _finished_groups(_g.ready_order)
RESULTS_CONSUMED = _finished_groups(_g.consumed_version)


def load_groups(c: sa.Connection, ids: Sequence[int]) -> list[Group]:
    """The groups with these ids, in this order, with the blobs of their members."""
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


def consume_groups(c: sa.Connection, ids: Collection[int], version: int) -> None:
    """Marks groups as consumed by `version`. Raises ValueError for a group that is unknown, open or consumed by another
    version; this rolls the transaction back."""
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


def groups_of_tasks(c: sa.Connection, task_ids: Sequence[str]) -> dict[str, tuple[int, int | None]]:
    """Id and consuming version of the group of each task that has a group. A task of several groups gets its last."""
    group_of: dict[str, tuple[int, int | None]] = {}
    for first in range(0, len(task_ids), _AT_A_TIME):
        rows = c.execute(_OF_TASKS, {"tasks": list(task_ids[first : first + _AT_A_TIME])})
        group_of |= {row.task_id: (row.id, row.consumed_version) for row in rows}
    return group_of
