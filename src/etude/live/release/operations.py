"""The operations on releases: to users step by step, and back.

    release    a version that has passed the gate goes to the canary's stores; `watch` does the rest
    watch      each tick: stores follow the rows, clusters that lag are drained, the canary decides
    rollback   a new release of an old content, in the rows first, then in every store
    drill      a timed rollback and return, on the canary's stores while no release is on trial

A decision is a row first; stores and servers follow the row. Every operation can be killed at any time and repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude.config import LiveConfig
from etude.config.live import CanaryConfig
from etude.errors import UserError
from etude.evals import PastTest, level_of
from etude.failpoints import failpoint
from etude.live.log import accounts, journal, schema
from etude.live.log.records import Arm, Release, ReleaseStage
from etude.live.release import releases
from etude.live.release.canary import CanaryDecision, CanaryTrial, TallyRow, Verdict, decide, tallies_of
from etude.live.release.releases import ReleaseLog, ReleaseState, StoreTarget
from etude.live.release.reports import read_report
from etude.live.release.stores import COPIES, StoreState, bring, prepare, store_states
from etude.records import PolicyVersion
from etude.store import open_store
from etude.weights import newest_manifest, read_manifest

DEADLINE = 60.0
"""Seconds in which a cluster's servers must serve a new target; later they get no requests."""
TICK_SECONDS = 60.0
_POLL_SECONDS = 0.2
_MAX_ROWS = 3_000_000  # of tallies for one decision
_DAY = 24 * 3600 * 10**9
_WEEK = 7 * _DAY
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReleaseSite:
    """Configuration and log of a live loop, for decisions on its releases."""

    config: LiveConfig
    engine: sa.Engine

    @property
    def key(self) -> Path | None:
        """The key that signs reports and manifests."""
        return Path(self.config.signing_key) if self.config.signing_key else None

    @property
    def canary(self) -> CanaryConfig:
        """The canary's options; without servers of a holdback its share is 0."""
        held = any(cluster.holdback_urls for cluster in self.config.clusters)
        return self.config.canary if held else self.config.canary.model_copy(update={"holdback": 0.0})

    @property
    def has_canary(self) -> bool:
        """Whether any cluster has servers for a canary."""
        return any(cluster.canary_urls for cluster in self.config.clusters)

    def base_folder(self, store: str) -> Path:
        """The model folder that the versions of a store begin with: that of the run whose store it is, else
        `gate.base`. Raises UserError."""
        from etude.runfolder import load_config
        from etude.weights import model_folder

        weights = Path(store.removeprefix("file://"))
        run = weights.parent
        own = weights.name == "weights" and (run / "config.json").is_file()
        return model_folder(load_config(run).model.path if own else self.config.gate.base)

    def base(self, store: str) -> Mapping[str, Any]:
        """The tensors of that folder. Raises UserError."""
        from etude.weights.export import folder_tensors

        return folder_tensors(self.base_folder(store))

    def read(self) -> ReleaseLog:
        """The log of releases."""
        return releases.read(self.engine)

    def targets(self) -> list[StoreTarget]:
        """The targets of all stores."""
        return self.read().targets(self.config.clusters)


def open_site(config: LiveConfig) -> ReleaseSite:
    """The site of a configuration; a missing log is made. Raises UserError."""
    return ReleaseSite(config, accounts.open_log(Path(config.folder), config.database))


@dataclass(frozen=True)
class ReleaseCandidate:
    """A version that may be released, of the weight store at `store`, trained on `window`."""

    store: str
    manifest: PolicyVersion
    window: int | None


def candidate(site: ReleaseSite, store: str | None, version: int | None) -> ReleaseCandidate:
    """A version of a store; by default the newest version of the run of the newest window. Raises UserError."""
    windows = schema.windows
    if store is None:
        query = sa.select(windows.c.run).where(windows.c.version.is_not(None)).order_by(windows.c.number.desc())
        with site.engine.connect() as connection:
            run = connection.execute(query.limit(1)).scalar()
        if run is None:
            raise UserError("no window was trained on yet: name the weight store with --store")
        store = str(Path(run) / "weights")
    if "://" not in store:
        store = str(Path(store).absolute())
        if not Path(store).is_dir():
            raise UserError(f"{store} is no folder: give the weight store of a run, such as outputs/RUN/weights")
    try:
        manifest = newest_manifest(open_store(store)) if version is None else read_manifest(open_store(store), version)
    except ValueError as e:
        raise UserError(str(e)) from None
    if manifest is None:
        raise UserError(f"{store} has no version {'at all' if version is None else version}")
    query = sa.select(windows.c.number).where(windows.c.version == manifest.version)
    query = query.where(windows.c.run == str(Path(store).parent))
    with site.engine.connect() as connection:
        return ReleaseCandidate(store, manifest, connection.execute(query).scalar())


# --- forward ----------------------------------------------------------------------------------------------------------


def start(site: ReleaseSite, digest: str, version: int) -> ReleaseState:
    """Begins or continues the canary of content that has passed the gate. Without a current release, or without servers
    for a canary, the content is released at once. Raises UserError."""
    log = site.read()
    trial = log.trial
    if trial is not None and trial.release.manifest != digest:
        raise UserError(
            f"release {trial.release.number} (version {trial.release.version}) is in its "
            f"{trial.stage} stage: wait for it, or roll it back"
        )
    current = log.current
    if trial is None and current is not None and current.release.manifest == digest:
        _follow(site)
        return current
    if trial is None:
        trial = log.passed(digest)
        if trial is None:
            raise UserError(
                f"version {version} has not passed the gate beside the current release: run `etude live gate` first"
            )
        read_report(trial.release, site.key)
        if site.config.loop.approval and not trial.approved:
            raise UserError(f"release {trial.release.number} waits for a person: `etude live approve` or `refuse`")
        if current is None or not site.has_canary:
            why = "the first release" if current is None else "no cluster has servers for a canary"
            releases.append(site.engine, trial, ReleaseStage.RELEASED, 1.0, why, "gate")
        else:
            releases.append(site.engine, trial, ReleaseStage.STAGED, 0.0, "passed the gate", "gate")
        failpoint("release.event")
    _follow(site)
    return site.read().of(trial.release.number)


def approve(site: ReleaseSite, name: str) -> ReleaseState:
    """The approval of the person `name`: a version that has passed the gate may go to the canary, or the canary goes to
    its next stage. Raises UserError if nothing waits, or if the decision is not to go on."""
    log = site.read()
    trial = log.trial
    if trial is None:
        waiting = _waiting(log)
        releases.append(site.engine, waiting, ReleaseStage.GATE, 0.0, "approved", name)
        failpoint("release.approved")
        return site.read().of(waiting.release.number)
    if trial.stage is not ReleaseStage.CANARY:
        raise UserError("no release waits for an approval: see `etude live status`")
    decision = decision_of(site, trial, journal.now())
    if decision.verdict not in (Verdict.GO_ON, Verdict.DONE, Verdict.OFFER):
        raise UserError(f"release {trial.release.number} cannot go on yet: {decision.reason}")
    _advance(site, trial, decision, name)
    _follow(site)
    return site.read().of(trial.release.number)


def refuse(site: ReleaseSite, name: str, reason: str) -> ReleaseState:
    """The refusal of the person `name`: a version that has passed the gate is not released; the release on trial is
    rolled back. Raises UserError if there is neither."""
    log = site.read()
    if log.trial is not None:
        rollback(site, reason, name)
        return site.read().of(log.trial.release.number)
    waiting = _waiting(log)
    releases.append(site.engine, waiting, ReleaseStage.REFUSED, 0.0, reason, name)
    return site.read().of(waiting.release.number)


def _waiting(log: ReleaseLog) -> ReleaseState:
    """The newest release, if it has passed the gate beside the current one and nobody has approved it."""
    last = log.states[-1] if log.states else None
    if last is None or log.passed(last.release.manifest) is not last or last.approved:
        raise UserError("no release waits for an approval: see `etude live status`")
    return last


@dataclass(frozen=True)
class Tick:
    """The result of one tick: a line for people, and the canary's decision, if there was one."""

    text: str
    decision: CanaryDecision | None = None


def tick(site: ReleaseSite) -> Tick:
    """Brings stores to the rows, drains lagging clusters, and decides on the release on trial."""
    _follow(site)
    log = site.read()
    stores = store_states(log.targets(site.config.clusters))
    drain_lagging(site, stores)
    trial = log.trial
    if trial is None:
        return Tick("no release is on trial")
    name = f"release {trial.release.number}"
    if trial.stage is ReleaseStage.STAGED:
        return Tick(f"{name}: {_leave_staged(site, trial, stores)}")
    decision = decision_of(site, trial, journal.now())
    if decision.verdict is Verdict.ROLL_BACK:
        rollback(site, decision.reason, "canary")
    elif decision.verdict is not Verdict.HOLD:
        if decision.verdict is Verdict.OFFER or releases.needs_approval(site.engine, site.config):
            why = f" ({decision.reason})" if decision.verdict is Verdict.OFFER else ""
            waits = f"{name} at {trial.share:.0%} waits for a person{why}: `etude live approve` or `refuse`"
            return Tick(waits, decision)
        _advance(site, trial, decision, "canary")
        _follow(site)
    return Tick(f"{name} at {trial.share:.0%}: {decision.verdict}, {decision.reason}", decision)


def watch(
    site: ReleaseSite, ended: Callable[[float], bool], say: Callable[[str], None], seconds: float = TICK_SECONDS
) -> None:
    """Ticks until `ended`, which waits for `seconds`, is true. An error of a database or a store, or a concurrent
    decision, is reported by `say`, and the next tick tries again."""
    last = ""
    while True:
        try:
            line = tick(site).text
        except (UserError, DBAPIError) as e:
            line = f"not now: {e}"
        if line != last:
            say(line)
        last = line
        if ended(seconds):
            return


def decision_of(site: ReleaseSite, trial: ReleaseState, now: int) -> CanaryDecision:
    """The canary's decision on a release, from the counters so far."""
    began = trial.since(ReleaseStage.CANARY)
    number, delay = trial.release.number, site.config.labels.delay_seconds
    alpha = level_of(releases.past_tests(site.read(), number), site.canary.lift_alpha)
    here = CanaryTrial(trial.share, began, trial.events[-1].at, alpha, _active(site, began))
    tallies = tallies_of(_tallies(site, number, began))
    return decide(site.canary, delay, here, tallies, now)


def _active(site: ReleaseSite, began: int) -> int:
    """The number of accounts that were active in the week before a release began."""
    table, slot = schema.tallies.c, round(site.config.canary.slot_minutes * 60e9)
    query = sa.select(sa.func.count(sa.distinct(table.account)))
    query = query.where(table.slot >= (began - _WEEK) // slot, table.slot <= began // slot)
    with journal.reading(site.engine) as connection:
        return int(connection.execute(query).scalar_one())


def _tallies(site: ReleaseSite, number: int, began: int) -> list[TallyRow]:
    """The counters since release `number` began, with the tenant of each account as its cell; of the canary those of
    the release alone, without what the control answered in its place. Raises UserError for more than `_MAX_ROWS`."""
    table = schema.tallies
    first = began // round(site.config.canary.slot_minutes * 60e9)
    names = ("arm", "account", "slot", "name", "count", "total", "tenant")
    query = sa.select(*(table.c[name] for name in names)).where(table.c.slot >= first)
    query = query.where((table.c.arm != Arm.CANARY) | (table.c.release == number)).limit(_MAX_ROWS + 1)
    with journal.reading(site.engine) as connection:
        rows = [TallyRow(*row) for row in connection.execute(query)]
    if len(rows) > _MAX_ROWS:
        raise UserError(f"more than {_MAX_ROWS:,} counters since the release began: make canary.slot_minutes longer")
    return rows


def _leave_staged(site: ReleaseSite, trial: ReleaseState, stores: Sequence[StoreState]) -> str:
    """Begins the canary once its servers serve the release. After the deadline the canary begins without late clusters;
    if all are late, the release is rolled back. Returns a phrase for people."""
    canaries = [store for store in stores if store.target.arm is Arm.CANARY]
    lagging = [store for store in canaries if store.lagging]
    late = journal.now() - trial.events[-1].at > DEADLINE * 1e9
    if lagging and not late:
        return f"the canary's servers of {_names(lagging)} do not serve it yet"
    if len(lagging) == len(canaries):
        rollback(site, f"no canary server served it within {DEADLINE:.0f} seconds: {_names(lagging)}", "canary")
        return "rolled back: no canary server serves it"
    share = site.canary.stages[0]
    without = f", without {_names(lagging)}" if lagging else ""
    releases.append(site.engine, trial, ReleaseStage.CANARY, share, f"the canary's servers serve it{without}", "canary")
    failpoint("release.event")
    return f"goes to {share:.0%} of the accounts{without}"


def _advance(site: ReleaseSite, trial: ReleaseState, decision: CanaryDecision, by: str) -> None:
    if decision.verdict is Verdict.DONE:
        releases.append(site.engine, trial, ReleaseStage.RELEASED, 1.0, decision.reason, by)
    else:
        share = next(share for share in site.canary.stages if share > trial.share)
        lift = decision.lift and PastTest(decision.lift.p, decision.lift.better)
        releases.append(site.engine, trial, ReleaseStage.CANARY, share, _stage_reason(decision), by, lift)
    failpoint("release.event")


def _stage_reason(decision: CanaryDecision) -> str:
    return decision.reason + (f"; {decision.lift.sentence}" if decision.lift else "")


def _follow(site: ReleaseSite) -> None:
    """Brings every store to its target by the rows; failed stores are left to the next tick."""
    for target, why in bring(site.targets(), site.key, site.base).items():
        _log.warning("the %s store of cluster %s does not follow: %s", target.arm, target.cluster, why)


def drain_lagging(site: ReleaseSite, stores: Sequence[StoreState]) -> None:
    """Drains clusters that lag for more than `DEADLINE`, and returns requests to those that have caught up."""
    for store in stores:
        target, lagging = store.target, store.lagging
        if not lagging:
            releases.drain(site.engine, target, False, f"it serves release {target.release.number}")
        elif journal.now() - target.since > DEADLINE * 1e9:
            late = f"{lagging[0].url} does not serve release {target.release.number} after {DEADLINE:.0f} seconds"
            releases.drain(site.engine, target, True, late)


def _names(stores: Sequence[StoreState]) -> str:
    return ", ".join(dict.fromkeys(store.target.cluster for store in stores))


# --- back -------------------------------------------------------------------------------------------------------------


def rollback(site: ReleaseSite, reason: str, by: str, to: int | None = None) -> ReleaseState:
    """Takes back the release on trial, else the current release: the content of release `to`, by default of the release
    before, is released under a new number. The content is read before the row is written, so that the stores follow at
    once; a store that is away follows at a later tick. Raises UserError."""
    log = site.read()
    bad = log.trial or log.current
    if bad is None:
        raise UserError("nothing was released yet, so there is nothing to roll back")
    if to is not None:
        good = log.of(to)
        if good.stage in (ReleaseStage.REFUSED, ReleaseStage.GATE, ReleaseStage.ROLLED_BACK):
            raise UserError(f"release {to} is {good.stage}: roll back to one that was released")
    else:
        good = _before(log, bad)
    number = log.next_number
    ready = _prepared(site, _after(log, bad, good, number).targets(site.config.clusters))
    releases.take_back(site.engine, bad, good, number, reason, by)
    failpoint("release.rolled_back")
    with ThreadPoolExecutor(max(1, len(ready))) as pool:
        for failed in pool.map(_attempt, ready):
            if failed:
                _log.warning("%s", failed)
    _follow(site)  # what could not be prepared
    return site.read().of(number)


def _before(log: ReleaseLog, bad: ReleaseState) -> ReleaseState:
    """The newest release before `bad` with other content that was not rolled back. Raises UserError."""
    good = bad
    while good.stage is ReleaseStage.ROLLED_BACK or good.release.manifest == bad.release.manifest:
        if good.release.parent is None:
            raise UserError(f"no release before {bad.release.number} has other content, so there is none to go back to")
        good = log.of(good.release.parent)
    return good


def _after(log: ReleaseLog, bad: ReleaseState, good: ReleaseState, number: int) -> ReleaseLog:
    """The log after the rollback."""
    event = bad.events[-1]
    gone = msgspec.structs.replace(event, stage=ReleaseStage.ROLLED_BACK, share=0.0)
    again = msgspec.structs.replace(event, release=number, sequence=0, stage=ReleaseStage.RELEASED, share=1.0)
    new = ReleaseState(msgspec.structs.replace(good.release, number=number, parent=bad.release.number), (again,))
    rest = [ReleaseState(s.release, (*s.events, gone)) if s is bad else s for s in log.states]
    return ReleaseLog((*rest, new))


def _prepared(site: ReleaseSite, targets: Sequence[StoreTarget]) -> list[Callable[[], int]]:
    def one(target: StoreTarget) -> Callable[[], int] | None:
        try:
            return prepare(target, site.key, site.base)
        except UserError as e:
            _log.warning("the %s store of cluster %s is away: %s", target.arm, target.cluster, e)
            return None

    with ThreadPoolExecutor(COPIES) as pool:
        return [ready for ready in pool.map(one, targets) if ready is not None]


def _attempt(write: Callable[[], int]) -> str:
    try:
        write()
    except Exception as e:  # `_follow` tries again, and says what is wrong
        return f"a store did not follow at once: {e}"
    return ""


def wait(site: ReleaseSite, seconds: float = DEADLINE) -> list[StoreState]:
    """Waits, at most `seconds`, until every server serves its target; returns the states of the stores."""
    deadline = time.monotonic() + seconds
    while True:
        stores = store_states(site.targets())
        if not any(store.lagging for store in stores) or time.monotonic() > deadline:
            return stores
        time.sleep(_POLL_SECONDS)


# --- drill ------------------------------------------------------------------------------------------------------------


def drill(site: ReleaseSite, say: Callable[[str], None]) -> list[tuple[str, float]]:
    """Rolls the canary's stores back to the content before and forward again, while no release is on trial; returns the
    seconds that each cluster's servers took back. Clusters without a canary are left out. Raises UserError for a
    cluster that takes longer than `DEADLINE`: then a rollback would, too."""
    log = site.read()
    if log.trial is not None:
        raise UserError(f"release {log.trial.release.number} is on trial: the drill waits until it has ended")
    current = log.current
    targets = [p for p in log.targets(site.config.clusters) if p.arm is Arm.CANARY]
    if current is None or not targets:
        raise UserError("a drill needs a release, and a cluster with servers for a canary")
    before = next(
        (
            s.release
            for s in reversed(log.states)
            if s.release.manifest != current.release.manifest and s.stage is not ReleaseStage.REFUSED
        ),
        None,
    )
    if before is None:
        raise UserError("a drill goes back to another content, and there was only one release")
    away = bring(targets, site.key, site.base)
    back = [_with(target, before) for target in targets]
    took: list[tuple[str, float]] = []
    began = time.monotonic()
    try:
        ready = [prepare(target, site.key, site.base) for target in back]
        with ThreadPoolExecutor(len(ready)) as pool:
            list(pool.map(lambda write: write(), ready))
        left = dict.fromkeys(target.cluster for target in back)
        while left and time.monotonic() - began < DEADLINE:
            for store in store_states(back):
                if store.target.cluster in left and not store.lagging:
                    del left[store.target.cluster]
                    took.append((store.target.cluster, time.monotonic() - began))
                    say(f"{store.target.cluster}: {took[-1][1]:.1f} seconds")
            time.sleep(_POLL_SECONDS)
    finally:
        away = bring(targets, site.key, site.base)
    late = [*left, *(target.cluster for target in away)]
    done = f"drill: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in took) or 'no cluster in time'}"
    failed = f"; late or away: {', '.join(dict.fromkeys(late))}" if late else ""
    releases.append(site.engine, current, ReleaseStage.RELEASED, 1.0, done + failed, "drill")
    if late:
        raise UserError(f"{done}{failed}: a rollback would not reach them within {DEADLINE:.0f} seconds")
    return took


def _with(target: StoreTarget, release: Release) -> StoreTarget:
    return StoreTarget(target.cluster, target.arm, target.store, target.urls, release, target.since)


# --- plan and status --------------------------------------------------------------------------------------------------
