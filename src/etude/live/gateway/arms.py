"""The arm and the release of an account, and the arm's probability: by a keyed hash, so an account stays in its arm.

holdback   the same accounts in every release, `share` of all
canary     other accounts whose hash for this release lies below the stage's share; a later stage only adds accounts
control    the rest
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from etude.live.log import schema
from etude.live.log.accounts import Accounts
from etude.live.log.records import Arm, ReleaseStage


@dataclass(frozen=True)
class Stages:
    """The numbers of the release that is out (0: none yet), of the release in the canary, with its share of the
    accounts, and of the holdback's release. Clusters and arms in `drained` get no requests."""

    released: int = 0
    canary: int | None = None
    share: float = 0.0
    held: int | None = None
    drained: frozenset[tuple[str, str]] = frozenset()

    @property
    def without_canary(self) -> Stages:
        """The stages with the canary's accounts on the released number."""
        return Stages(self.released, held=self.held, drained=self.drained)


@dataclass(frozen=True)
class Assignment:
    """The arm of an account, its release, and the probability that an account gets this arm."""

    arm: Arm
    release: int
    propensity: float


def read_stages(connection: sa.Connection) -> Stages:
    """The present stages, from the log."""
    table = schema.release_events
    last = sa.select(table.c.release, sa.func.max(table.c.sequence).label("last")).group_by(table.c.release).subquery()
    on = (table.c.release == last.c.release) & (table.c.sequence == last.c.last)
    rows = connection.execute(sa.select(table.c.release, table.c.stage, table.c.share).join(last, on)).all()
    released = max((row.release for row in rows if row.stage == ReleaseStage.RELEASED), default=0)
    anchor = sa.select(schema.releases.c.anchor).where(schema.releases.c.number == released)
    held = connection.execute(anchor).scalar()
    clusters = schema.cluster_events
    events = connection.execute(sa.select(clusters).order_by(clusters.c.sequence)).all()
    last_events = {(row.cluster, row.arm): row.drained for row in events}
    drained = frozenset(place for place, is_drained in last_events.items() if is_drained)
    canaries = [row for row in rows if row.stage == ReleaseStage.CANARY and row.release > released]
    if not canaries:
        return Stages(released, held=held, drained=drained)
    newest = max(canaries, key=lambda row: row.release)
    return Stages(released, newest.release, newest.share, held, drained)


def assign(accounts: Accounts, stages: Stages, holdback: float, account: str) -> Assignment:
    """The arm of an account."""
    if _draw(accounts, "holdback", account) < holdback:
        return Assignment(Arm.HOLDBACK, stages.held or stages.released, holdback)
    if stages.canary is not None and _draw(accounts, f"release {stages.canary}", account) < stages.share:
        return Assignment(Arm.CANARY, stages.canary, (1 - holdback) * stages.share)
    return Assignment(Arm.CONTROL, stages.released, (1 - holdback) * (1 - stages.share))


def _draw(accounts: Accounts, purpose: str, account: str) -> float:
    """Uniform in [0, 1), the same for the same purpose and account."""
    return int(accounts.digest(purpose, account)[:13], 16) / 16**13
