"""Groups by the task that they are of: in a run whose batches are given, every task has one."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from etude.ledger.schema import groups

_AT_A_TIME = 500  # SQLite bounds the parameters of a statement
_g = groups.c
_OF_TASKS = (
    sa.select(_g.task_id, _g.id, _g.consumed_version)
    .where(_g.task_id.in_(sa.bindparam("tasks", expanding=True)))
    .order_by(_g.id)
)


def groups_of_tasks(c: sa.Connection, task_ids: Sequence[str]) -> dict[str, tuple[int, int | None]]:
    """Id and version of the group of each task that has one; of several groups, the last."""
    found: dict[str, tuple[int, int | None]] = {}
    for first in range(0, len(task_ids), _AT_A_TIME):
        rows = c.execute(_OF_TASKS, {"tasks": list(task_ids[first : first + _AT_A_TIME])})
        found |= {row.task_id: (row.id, row.consumed_version) for row in rows}
    return found
