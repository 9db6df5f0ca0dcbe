"""The log of releases: their stages, as rows, and the target of every store.

    gate -> staged -> canary (shares) -> released         each step is a row of `release_events`; the last row counts;
                                                          a second row in stage GATE is a person's approval
      \\-> refused      \\-> rolled_back, and a new release of the old content, in one transaction

The content of a store follows from the rows alone (`targets`), so a process killed between a row and a store leaves
nothing half-done: the next `etude live release`, `rollback` or `watch-canary` brings the stores to the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from etude.config import LiveConfig
from etude.config.live import ClusterConfig
from etude.errors import UserError
from etude.evals import PastTest
from etude.live.log import journal, schema
from etude.live.log.records import Arm, ClusterEvent, ExitKind, LivePolicy, Release, ReleaseEvent, ReleaseStage

ON_TRIAL = (ReleaseStage.STAGED, ReleaseStage.CANARY)
_MAX_RELEASES = 100_000


@dataclass(frozen=True)
class ReleaseState:
    """A release and its events, in order."""

    release: Release
    events: tuple[ReleaseEvent, ...]

    @property
    def stage(self) -> ReleaseStage:
        """The present stage."""
        return self.events[-1].stage

    @property
    def share(self) -> float:
        """The present share of the accounts."""
        return self.events[-1].share

    @property
    def everywhere(self) -> bool:
        """Whether every account outside the holdback has the release."""
        return self.stage in (ReleaseStage.CANARY, ReleaseStage.RELEASED) and self.share >= 1

    @property
    def approved(self) -> bool:
        """Whether a person has approved it after the gate."""
        return sum(event.stage is ReleaseStage.GATE for event in self.events) > 1

    def since(self, *stages: ReleaseStage, share: float = 0.0) -> int:
        """Time of the first event of these stages with at least this share."""
        return next(event.at for event in self.events if event.stage in stages and event.share >= share)


@dataclass(frozen=True)
class StoreTarget:
    """The target of one weight store: the content of `release`, since the time `since`."""

    cluster: str
    arm: Arm
    store: str
    urls: tuple[str, ...]
    release: Release
    since: int


@dataclass(frozen=True)
class ReleaseLog:
    """All releases by number."""

    states: tuple[ReleaseState, ...]

    @property
    def current(self) -> ReleaseState | None:
        """The release of the control: the newest in stage RELEASED."""
        released = [s for s in self.states if s.stage is ReleaseStage.RELEASED]
        return released[-1] if released else None

    @property
    def trial(self) -> ReleaseState | None:
        """The staged release, or that in canary."""
        return next((s for s in reversed(self.states) if s.stage in ON_TRIAL), None)

    def of(self, number: int) -> ReleaseState:
        """A release by number. Raises UserError."""
        state = next((s for s in self.states if s.release.number == number), None)
        if state is None:
            raise UserError(f"there is no release {number}: `etude live status` lists them")
        return state

    def passed(self, digest: str) -> ReleaseState | None:
        """The newest release of a content in stage GATE, if the gate compared it with the current release."""
        for state in reversed(self.states):
            if state.stage is ReleaseStage.GATE and state.release.manifest == digest:
                current = self.current
                return state if state.release.parent == (current.release.number if current else None) else None
        return None

    @property
    def next_number(self) -> int:
        """The number of the next release."""
        return self.states[-1].release.number + 1 if self.states else 1

    def targets(self, clusters: Sequence[ClusterConfig]) -> list[StoreTarget]:
        """The targets of all stores; none before the first release."""
        current, trial = self.current, self.trial
        if current is None:
            return []
        out: list[StoreTarget] = []
        final = (ReleaseStage.CANARY, ReleaseStage.RELEASED)
        control = trial if trial is not None and trial.everywhere else current
        canary = trial or current
        anchor = self.of(current.release.anchor) if current.release.anchor is not None else current
        for cluster in clusters:
            since = control.since(*final, share=1.0)
            out.append(StoreTarget(cluster.name, Arm.CONTROL, cluster.store, cluster.urls, control.release, since))
            if cluster.canary_store != "none":
                since = canary.since(ReleaseStage.STAGED) if canary is trial else canary.since(ReleaseStage.RELEASED)
                store = cluster.canary_store
                out.append(StoreTarget(cluster.name, Arm.CANARY, store, cluster.canary_urls, canary.release, since))
            if cluster.holdback_store != "none":
                store, since = cluster.holdback_store, anchor.since(*final, share=1.0)
                out.append(StoreTarget(cluster.name, Arm.HOLDBACK, store, cluster.holdback_urls, anchor.release, since))
        return out


def read(engine: sa.Engine) -> ReleaseLog:
    """The releases in the log."""
    releases, events = schema.releases, schema.release_events
    with journal.reading(engine) as connection:
        result = connection.execute(sa.select(releases).order_by(releases.c.number).limit(_MAX_RELEASES)).mappings()
        rows = [journal.record(Release, row) for row in result.all()]
        steps: dict[int, list[ReleaseEvent]] = {release.number: [] for release in rows}
        for row in connection.execute(sa.select(events).order_by(events.c.release, events.c.sequence)).mappings():
            steps[row["release"]].append(journal.record(ReleaseEvent, row))
    return ReleaseLog(tuple(ReleaseState(release, tuple(steps[release.number])) for release in rows))


def append(
    engine: sa.Engine,
    state: ReleaseState,
    stage: ReleaseStage,
    share: float,
    reason: str,
    by: str,
    lift: PastTest | None = None,
) -> None:
    """Appends the next event of a release, with the test of its lift. Raises UserError if another process was
    faster."""
    with _deciding(engine) as connection:
        event = _next(state, stage, share, reason, by, journal.stamp(connection))
        if lift is not None:
            event = msgspec.structs.replace(event, p=lift.p, better=lift.better)
        journal.add(connection, [event])


def past_tests(log: ReleaseLog, before: int) -> list[PastTest]:
    """The tests of the lift of the releases before a number, one for each that was compared: its last look."""
    tested = [[e for e in s.events if e.p is not None] for s in log.states if s.release.number < before]
    return [PastTest(e[-1].p or 0.0, any(each.better for each in e)) for e in tested if e]


def begin(engine: sa.Engine, release: Release, stage: ReleaseStage, reason: str, by: str, share: float = 0.0) -> None:
    """Appends a new release with its first event. Raises UserError if another process was faster."""
    with _deciding(engine) as connection:
        at = journal.stamp(connection)
        release = msgspec.structs.replace(release, at=at)
        event = ReleaseEvent(
            release=release.number, sequence=0, stage=stage, share=share, reason=reason, decided_by=by, at=at
        )
        journal.add(connection, [release, event])


def take_back(engine: sa.Engine, bad: ReleaseState, to: ReleaseState, number: int, reason: str, by: str) -> None:
    """Rolls a release back, and releases the content of another release under a new number, in one transaction. Raises
    UserError if another process was faster."""
    with _deciding(engine) as connection:
        at = journal.stamp(connection)
        again = msgspec.structs.replace(to.release, number=number, parent=bad.release.number, window=None, at=at)
        event = ReleaseEvent(
            release=number,
            sequence=0,
            stage=ReleaseStage.RELEASED,
            share=1.0,
            decided_by=by,
            at=at,
            reason=f"the content of release {to.release.number}, since {bad.release.number} was rolled back",
        )
        journal.add(connection, [_next(bad, ReleaseStage.ROLLED_BACK, 0.0, reason, by, at), again, event])


def _next(state: ReleaseState, stage: ReleaseStage, share: float, reason: str, by: str, at: int) -> ReleaseEvent:
    return ReleaseEvent(
        release=state.release.number,
        sequence=state.events[-1].sequence + 1,
        stage=stage,
        share=share,
        reason=reason,
        decided_by=by,
        at=at,
    )


@contextmanager
def _deciding(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction of a decision; of two concurrent decisions, the primary keys admit one."""
    try:
        with engine.begin() as connection:
            yield connection
    except IntegrityError:
        raise Overtaken() from None


class Overtaken(UserError):
    """Another process has decided meanwhile."""

    def __init__(self) -> None:
        super().__init__("another process has decided on this release meanwhile: see `etude live status`")


# --- clusters ---------------------------------------------------------------------------------------------------------


def drained(engine: sa.Engine) -> dict[tuple[str, str], ClusterEvent]:
    """The last event of each cluster and arm with events."""
    table = schema.cluster_events
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table).order_by(table.c.cluster, table.c.arm, table.c.sequence)).mappings()
        events = [journal.record(ClusterEvent, row) for row in rows]
    return {(event.cluster, event.arm): event for event in events}


def drain(engine: sa.Engine, target: StoreTarget, wanted: bool, reason: str) -> None:
    """Writes that a cluster is drained (`wanted`) or gets requests again; does nothing without a change."""
    last = drained(engine).get((target.cluster, target.arm))
    if (last is not None and last.drained) == wanted:
        return
    with _deciding(engine) as connection:
        event = ClusterEvent(
            cluster=target.cluster,
            arm=target.arm,
            sequence=last.sequence + 1 if last else 0,
            drained=wanted,
            reason=reason,
            at=journal.stamp(connection),
        )
        journal.add(connection, [event])


# --- what a release touched -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taint:
    """A window whose release was rolled back, the turns of its batch, and their accounts."""

    release: int
    window: int
    turns: tuple[str, ...]
    accounts: tuple[str, ...]


def taints(engine: sa.Engine) -> list[Taint]:
    """The windows of releases that were rolled back, for training again without the harmful turns."""
    exits, turns, sessions = schema.exits, schema.turns, schema.sessions
    bad = [s.release for s in read(engine).states if s.stage is ReleaseStage.ROLLED_BACK]
    out: list[Taint] = []
    with journal.reading(engine) as connection:
        for release in bad:
            if release.window is None:
                continue
            trained = (exits.c.window == release.window) & (exits.c.kind == ExitKind.TRAINED)
            query = sa.select(exits.c.turn, sessions.c.account).where(trained)
            query = query.join(turns, turns.c.id == exits.c.turn).join(sessions, sessions.c.id == turns.c.session)
            rows = connection.execute(query.order_by(exits.c.turn)).all()
            accounts = tuple(sorted({account for _, account in rows}))
            out.append(Taint(release.number, release.window, tuple(turn for turn, _ in rows), accounts))
    return out


def needs_approval(engine: sa.Engine, config: LiveConfig) -> bool:
    """Whether a person must approve each stage: the configuration or a tenant's policy says so."""
    with engine.connect() as connection:
        policies = connection.execute(sa.select(schema.tenants.c.policy)).scalars().all()
    return config.canary.approval or any(msgspec.json.decode(text, type=LivePolicy).approval for text in policies)
