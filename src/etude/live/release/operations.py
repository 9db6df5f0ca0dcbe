"""Releases: what brings a version to users step by step, and takes it back.

    release    a version that has passed the gate goes to the canary's stores; `watch` does the rest
    watch      each tick: stores follow the rows, clusters that lag are drained, the canary decides
    rollback   a new release of an old content, in the rows first, then in every store
    drill      a rollback and back on stores that no user's request goes to, timed
    status     where everything stands

A decision is a row first; stores and servers follow it. Everything can be killed at any time and started again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude.config.live import CanaryConfig, LiveConfig
from etude.errors import UserError
from etude.failpoints import failpoint
from etude.live.log import accounts, journal, schema
from etude.live.log.records import Arm, Release, ReleaseStage
from etude.live.release import releases
from etude.live.release.canary import CanaryDecision, CanaryTrial, TallyRow, Verdict, decide, holdback_lift, tallies_of
from etude.live.release.releases import Pointer, ReleaseLog, Standing
from etude.live.release.stores import PointerState, bring, prepare, states
from etude.records import PolicyVersion
from etude.store import open_store
from etude.weights.manifest import newest
from etude.weights.manifest import read as read_manifest

DEADLINE = 60.0
"""Seconds in which a cluster's servers must serve a new pointer; those that don't are sent nothing."""
TICK_SECONDS = 60.0
_POLL_SECONDS = 0.2
_MOST_ROWS = 3_000_000  # of tallies that one decision reads
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loop:
    """The live loop whose releases are decided on."""

    config: LiveConfig
    engine: sa.Engine

    @property
    def key(self) -> Path | None:
        """Of reports and manifests."""
        return Path(self.config.signing_key) if self.config.signing_key else None

    @property
    def canary(self) -> CanaryConfig:
        """Its options; without servers of a holdback nobody is in it."""
        held = any(cluster.holdback_urls for cluster in self.config.clusters)
        return self.config.canary if held else self.config.canary.model_copy(update={"holdback": 0.0})

    @property
    def has_canary(self) -> bool:
        """Whether any cluster has servers for a canary."""
        return any(cluster.canary_urls for cluster in self.config.clusters)

    def read(self) -> ReleaseLog:
        """The releases."""
        return releases.read(self.engine)

    def pointers(self) -> list[Pointer]:
        """What every store should hold."""
        return self.read().pointers(self.config.clusters)


def open_loop(config: LiveConfig) -> Loop:
    """The loop of a configuration, its log made if it is missing. Raises UserError."""
    return Loop(config, accounts.open_log(Path(config.folder), config.database))


@dataclass(frozen=True)
class ReleaseCandidate:
    """A version that may be released: of the weight store at `store`, trained on `window`."""

    store: str
    manifest: PolicyVersion
    window: int | None


def candidate(loop: Loop, store: str | None, version: int | None) -> ReleaseCandidate:
    """A version of a store; by default the newest, of the run that learned from the newest window. Raises UserError."""
    windows = schema.windows
    if store is None:
        query = sa.select(windows.c.run).where(windows.c.version.is_not(None)).order_by(windows.c.number.desc())
        with loop.engine.connect() as connection:
            run = connection.execute(query.limit(1)).scalar()
        if run is None:
            raise UserError("no window was trained on yet: name the weight store with --store")
        store = str(Path(run) / "weights")
    if "://" not in store:
        store = str(Path(store).absolute())
        if not Path(store).is_dir():
            raise UserError(f"{store} is no folder: give the weight store of a run, such as outputs/RUN/weights")
    try:
        manifest = newest(open_store(store)) if version is None else read_manifest(open_store(store), version)
    except ValueError as e:
        raise UserError(str(e)) from None
    if manifest is None:
        raise UserError(f"{store} has no version {'at all' if version is None else version}")
    query = sa.select(windows.c.number).where(windows.c.version == manifest.version)
    query = query.where(windows.c.run == str(Path(store).parent))
    with loop.engine.connect() as connection:
        return ReleaseCandidate(store, manifest, connection.execute(query).scalar())


# --- forward ----------------------------------------------------------------------------------------------------------


def start(loop: Loop, digest: str, version: int) -> Standing:
    """Begins the canary of content that has passed the gate, or goes on with it. Without a current release, or without
    servers for a canary, it is released at once. Raises UserError."""
    found = loop.read()
    trial = found.trial
    if trial is not None and trial.release.manifest != digest:
        raise UserError(f"release {trial.release.number} (version {trial.release.version}) is in its "
                        f"{trial.stage} stage: wait for it, or roll it back")  # fmt: skip
    current = found.current
    if trial is None and current is not None and current.release.manifest == digest:
        _follow(loop)
        return current
    if trial is None:
        trial = found.passed(digest)
        if trial is None:
            raise UserError(f"version {version} has not passed the gate beside the current release: run `etude live "
                            f"gate` first")  # fmt: skip
        if current is None or not loop.has_canary:
            why = "the first release" if current is None else "no cluster has servers for a canary"
            releases.append(loop.engine, trial, ReleaseStage.RELEASED, 1.0, why, "gate")
        else:
            releases.append(loop.engine, trial, ReleaseStage.SHADOW, 0.0, "passed the gate", "gate")
        failpoint("release.event")
    _follow(loop)
    return loop.read().of(trial.release.number)


def approve(loop: Loop, name: str) -> Standing:
    """A person lets the canary go on to its next stage, if nothing else keeps it. Raises UserError."""
    found = loop.read()
    trial = found.trial
    if trial is None or trial.stage is not ReleaseStage.CANARY:
        raise UserError("no release waits for an approval: see `etude live status`")
    decision = decision_of(loop, trial, time.time_ns())
    if decision.verdict not in (Verdict.GO_ON, Verdict.DONE):
        raise UserError(f"release {trial.release.number} cannot go on yet: {decision.reason}")
    _advance(loop, trial, decision, name)
    _follow(loop)
    return loop.read().of(trial.release.number)


def tick(loop: Loop) -> str:
    """One look: stores are brought to the rows, lagging clusters drained, and the release on trial is decided on. A
    line that says what was done."""
    _follow(loop)
    found = loop.read()
    there = states(found.pointers(loop.config.clusters))
    drain_lagging(loop, there)
    trial = found.trial
    if trial is None:
        return "no release is on trial"
    name = f"release {trial.release.number}"
    if trial.stage is ReleaseStage.SHADOW:
        return f"{name}: {_leave_shadow(loop, trial, there)}"
    decision = decision_of(loop, trial, time.time_ns())
    if decision.verdict is Verdict.ROLL_BACK:
        rollback(loop, decision.reason, "canary")
    elif decision.verdict is not Verdict.HOLD:
        if releases.needs_approval(loop.engine, loop.config):
            return f"{name} at {trial.share:.0%} waits for a person: `etude live release --approve NAME`"
        _advance(loop, trial, decision, "canary")
        _follow(loop)
    return f"{name} at {trial.share:.0%}: {decision.verdict}, {decision.reason}"


def watch(
    loop: Loop, ended: Callable[[float], bool], say: Callable[[str], None], seconds: float = TICK_SECONDS
) -> None:
    """Ticks until `ended`, which waits for so many seconds, is true. An error of a database, a store or another decider
    is said, and the next tick tries again."""
    last = ""
    while True:
        try:
            told = tick(loop)
        except (UserError, DBAPIError) as e:
            told = f"not now: {e}"
        if told != last:
            say(told)
        last = told
        if ended(seconds):
            return


def decision_of(loop: Loop, trial: Standing, now: int) -> CanaryDecision:
    """What the counters say of a release in its canary stage."""
    began = trial.since(ReleaseStage.CANARY)
    here = CanaryTrial(trial.release.number, trial.share, began, trial.events[-1].at)
    tallies = tallies_of(_tallies(loop, began))
    return decide(loop.canary, loop.config.labels.delay_seconds, here, tallies, now)


def _tallies(loop: Loop, began: int) -> list[TallyRow]:
    """Counters since a release began, with the tenant of each account as its cell. Raises UserError if they are more
    than a decision reads."""
    table = schema.tallies
    first = began // round(loop.config.canary.slot_minutes * 60e9)
    names = ("arm", "account", "slot", "name", "count", "total", "tenant")
    query = sa.select(*(table.c[name] for name in names)).where(table.c.slot >= first).limit(_MOST_ROWS + 1)
    with journal.reading(loop.engine) as connection:
        rows = [TallyRow(*row) for row in connection.execute(query)]
    if len(rows) > _MOST_ROWS:
        raise UserError(f"more than {_MOST_ROWS:,} counters since the release began: make canary.slot_minutes longer")
    return rows


def _leave_shadow(loop: Loop, trial: Standing, there: Sequence[PointerState]) -> str:
    """The canary begins when its servers serve it; those that don't in time are drained, and if none does the release
    is rolled back."""
    canaries = [state for state in there if state.pointer.arm is Arm.CANARY]
    lagging = [state for state in canaries if state.lagging]
    late = time.time_ns() - trial.events[-1].at > DEADLINE * 1e9
    if lagging and not late:
        return f"the canary's servers of {_names(lagging)} do not serve it yet"
    if len(lagging) == len(canaries):
        rollback(loop, f"no canary server served it within {DEADLINE:.0f} seconds: {_names(lagging)}", "canary")
        return "rolled back: no canary server serves it"
    share = loop.canary.stages[0]
    without = f", without {_names(lagging)}" if lagging else ""
    releases.append(loop.engine, trial, ReleaseStage.CANARY, share, f"the canary's servers serve it{without}", "canary")
    failpoint("release.event")
    return f"goes to {share:.0%} of the accounts{without}"


def _advance(loop: Loop, trial: Standing, decision: CanaryDecision, by: str) -> None:
    if decision.verdict is Verdict.DONE:
        releases.append(loop.engine, trial, ReleaseStage.RELEASED, 1.0, decision.reason, by)
    else:
        share = next(share for share in loop.canary.stages if share > trial.share)
        releases.append(loop.engine, trial, ReleaseStage.CANARY, share, _said(decision), by)
    failpoint("release.event")


def _said(decision: CanaryDecision) -> str:
    return decision.reason + (f"; {decision.lift.sentence}" if decision.lift else "")


def _follow(loop: Loop) -> None:
    """Brings every store to the rows; what cannot be is left to the next tick."""
    for pointer, why in bring(loop.pointers(), loop.key).items():
        _log.warning("the %s store of cluster %s does not follow: %s", pointer.arm, pointer.cluster, why)


def drain_lagging(loop: Loop, there: Sequence[PointerState]) -> None:
    """Clusters that lag for more than a minute are sent nothing; those that follow again are."""
    for state in there:
        pointer, lagging = state.pointer, state.lagging
        if not lagging:
            releases.drain(loop.engine, pointer, False, f"it serves release {pointer.release.number}")
        elif time.time_ns() - pointer.since > DEADLINE * 1e9:
            late = f"{lagging[0].url} does not serve release {pointer.release.number} after {DEADLINE:.0f} seconds"
            releases.drain(loop.engine, pointer, True, late)


def _names(there: Sequence[PointerState]) -> str:
    return ", ".join(dict.fromkeys(state.pointer.cluster for state in there))


# --- back -------------------------------------------------------------------------------------------------------------


def rollback(loop: Loop, reason: str, by: str, to: int | None = None) -> Standing:
    """Takes back the release on trial, else the current one: the content of release `to`, by default of the one before,
    is released under a new number. What the stores need is read first, so that they follow the row at once; a store
    that is away follows at a later tick. Raises UserError."""
    found = loop.read()
    bad = found.trial or found.current
    if bad is None:
        raise UserError("nothing was released yet, so there is nothing to roll back")
    if to is not None:
        good = found.of(to)
        if good.stage in (ReleaseStage.REFUSED, ReleaseStage.GATE, ReleaseStage.ROLLED_BACK):
            raise UserError(f"release {to} is {good.stage}: roll back to one that was released")
    else:
        good = _before(found, bad)
    number = found.next_number
    ready = _prepared(loop, _after(found, bad, good, number).pointers(loop.config.clusters))
    releases.take_back(loop.engine, bad, good, number, reason, by)
    failpoint("release.rolled_back")
    with ThreadPoolExecutor(max(1, len(ready))) as pool:
        for failed in pool.map(_attempt, ready):
            if failed:
                _log.warning("%s", failed)
    _follow(loop)  # what could not be prepared
    return loop.read().of(number)


def _before(found: ReleaseLog, bad: Standing) -> Standing:
    """The newest release before one that has other content and was not taken back. Raises UserError."""
    good = bad
    while good.stage is ReleaseStage.ROLLED_BACK or good.release.manifest == bad.release.manifest:
        if good.release.parent is None:
            raise UserError(f"no release before {bad.release.number} has other content, so there is none to go back to")
        good = found.of(good.release.parent)
    return good


def _after(found: ReleaseLog, bad: Standing, good: Standing, number: int) -> ReleaseLog:
    """The log as it will be."""
    event = bad.events[-1]
    gone = msgspec.structs.replace(event, stage=ReleaseStage.ROLLED_BACK, share=0.0)
    again = msgspec.structs.replace(event, release=number, sequence=0, stage=ReleaseStage.RELEASED, share=1.0)
    new = Standing(msgspec.structs.replace(good.release, number=number, parent=bad.release.number), (again,))
    rest = [Standing(s.release, (*s.events, gone)) if s is bad else s for s in found.standings]
    return ReleaseLog((*rest, new))


def _prepared(loop: Loop, pointers: Sequence[Pointer]) -> list[Callable[[], int]]:
    def one(pointer: Pointer) -> Callable[[], int] | None:
        try:
            return prepare(pointer, loop.key)
        except UserError as e:
            _log.warning("the %s store of cluster %s is away: %s", pointer.arm, pointer.cluster, e)
            return None

    with ThreadPoolExecutor(max(1, len(pointers))) as pool:
        return [ready for ready in pool.map(one, pointers) if ready is not None]


def _attempt(write: Callable[[], int]) -> str:
    try:
        write()
    except Exception as e:  # `_follow` tries again, and says what is wrong
        return f"a store did not follow at once: {e}"
    return ""


def wait(loop: Loop, seconds: float = DEADLINE) -> list[PointerState]:
    """Waits until every server serves what the rows say, at most so long; the states at the end."""
    deadline = time.monotonic() + seconds
    while True:
        there = states(loop.pointers())
        if not any(state.lagging for state in there) or time.monotonic() > deadline:
            return there
        time.sleep(_POLL_SECONDS)


# --- drill ------------------------------------------------------------------------------------------------------------


def drill(loop: Loop, say: Callable[[str], None]) -> list[tuple[str, float]]:
    """Rolls the canary's stores back to the content before and forward again while no release is on trial, and says how
    many seconds each cluster's servers took for the first; clusters without a canary are left out. Raises UserError if
    one takes longer than a minute: then a rollback would, too."""
    found = loop.read()
    if found.trial is not None:
        raise UserError(f"release {found.trial.release.number} is on trial: the drill waits until it has ended")
    current = found.current
    pointers = [p for p in found.pointers(loop.config.clusters) if p.arm is Arm.CANARY]
    if current is None or not pointers:
        raise UserError("a drill needs a release, and a cluster with servers for a canary")
    before = next((s.release for s in reversed(found.standings) if s.release.manifest != current.release.manifest
                   and s.stage is not ReleaseStage.REFUSED), None)  # fmt: skip
    if before is None:
        raise UserError("a drill goes back to another content, and there was only one release")
    there = bring(pointers, loop.key)
    back = [_with(pointer, before) for pointer in pointers]
    took: list[tuple[str, float]] = []
    try:
        ready = [prepare(pointer, loop.key) for pointer in back]
        began = time.monotonic()
        with ThreadPoolExecutor(len(ready)) as pool:
            list(pool.map(lambda write: write(), ready))
        left = dict.fromkeys(pointer.cluster for pointer in back)
        while left and time.monotonic() - began < DEADLINE:
            for state in states(back):
                if state.pointer.cluster in left and not state.lagging:
                    del left[state.pointer.cluster]
                    took.append((state.pointer.cluster, time.monotonic() - began))
                    say(f"{state.pointer.cluster}: {took[-1][1]:.1f} seconds")
            time.sleep(_POLL_SECONDS)
    finally:
        there = bring(pointers, loop.key)
    late = [*left, *(pointer.cluster for pointer in there)]
    done = f"drill: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in took) or 'no cluster in time'}"
    failed = f"; late or away: {', '.join(dict.fromkeys(late))}" if late else ""
    releases.append(loop.engine, current, ReleaseStage.RELEASED, 1.0, done + failed, "drill")
    if late:
        raise UserError(f"{done}{failed}: a rollback would not reach them within {DEADLINE:.0f} seconds")
    return took


def _with(pointer: Pointer, release: Release) -> Pointer:
    return Pointer(pointer.cluster, pointer.arm, pointer.store, pointer.urls, release, pointer.since)


# --- status -----------------------------------------------------------------------------------------------------------


def status(loop: Loop) -> dict[str, Any]:
    """Where releases, stores and servers stand, as JSON."""
    found = loop.read()
    there = states(found.pointers(loop.config.clusters))
    drained = releases.drained(loop.engine)
    now = time.time_ns()
    trial = found.trial
    decision = None
    if trial is not None and trial.stage is ReleaseStage.CANARY:
        decision = decision_of(loop, trial, now)
    return {
        "current": found.current.release.number if found.current else None,
        "trial": trial.release.number if trial else None,
        "releases": [
            {
                **msgspec.to_builtins(standing.release),
                "stage": str(standing.stage), "share": standing.share, "events": msgspec.to_builtins(standing.events),
            }
            for standing in found.standings[-20:]
        ],
        "decision": None if decision is None else _as_json(decision),
        "lift": _lift_since_anchor(loop, found, now),
        "clusters": [
            {
                "cluster": state.pointer.cluster, "arm": str(state.pointer.arm), "store": state.pointer.store,
                "release": state.pointer.release.number, "version": state.version, "error": state.error,
                "servers": [{"url": s.url, "version": s.version, "digest": s.digest, "error": s.error}
                            for s in state.servers],
                "lagging": [server.url for server in state.lagging],
                "lagging_seconds": (now - state.pointer.since) / 1e9 if state.lagging else 0.0,
                "drained": bool((event := drained.get((state.pointer.cluster, state.pointer.arm))) and event.drained),
            }
            for state in there
        ],
        "tainted": [msgspec.to_builtins(taint) for taint in releases.taints(loop.engine)],
    }  # fmt: skip


def _lift_since_anchor(loop: Loop, found: ReleaseLog, now: int) -> dict[str, Any] | None:
    """Matured outcomes of the control since the first release after the anchor, against those of the holdback, which
    stays on the anchor; None without a holdback, or with fewer than two accounts in one of the arms."""
    current = found.current
    if current is None or current.release.anchor is None or not loop.canary.holdback:
        return None
    anchor = current.release.anchor
    began = min(
        event.at
        for standing in found.standings
        for event in standing.events
        if standing.release.anchor == anchor and event.stage is ReleaseStage.RELEASED
    )
    slot, table = round(loop.canary.slot_minutes * 60e9), schema.tallies
    matured = (now - round(loop.config.labels.delay_seconds * 1e9)) // slot
    keys = (table.c.arm, table.c.account, table.c.name)
    query = sa.select(*keys, sa.func.sum(table.c.count), sa.func.sum(table.c.total)).group_by(*keys).where(
        table.c.slot >= -(-began // slot), table.c.slot < matured,
        table.c.arm.in_([str(Arm.CONTROL), str(Arm.HOLDBACK)]),
        table.c.name.in_(["edits", "invalid_call", "survived"]),
    )  # fmt: skip
    with journal.reading(loop.engine) as connection:
        rows = [TallyRow(arm, account, 0, name, int(count), float(total))
                for arm, account, name, count, total in connection.execute(query)]  # fmt: skip
    lift = holdback_lift(tallies_of(rows))
    return None if lift is None else {"anchor": anchor, "sentence": lift.sentence, **msgspec.to_builtins(lift)}


def _as_json(decision: CanaryDecision) -> dict[str, Any]:
    told = msgspec.to_builtins(decision)
    return told | {"evidence": dict(sorted(decision.evidence.items(), key=lambda item: -item[1]))}
