"""The live loop by itself: cut, learn, gate, release, watch, on a clock. This table is the loop.

| leg     | begins when                                        | waits for         | ends with                         |
|---------|----------------------------------------------------|-------------------|-----------------------------------|
| cut     | `loop.hours` have passed since the last cut        | -                 | a row of `windows`                |
| train   | the newest window has a batch and no version       | the trainer       | the window's version              |
| gate    | that version (at first the control's) has not been | suites, engines   | a release in stage gate, refused  |
|         | compared with the current release                  |                   |                                   |
| approve | it passed, `loop.approval`, and nobody decided     | a person          | an event with the person's name   |
| release | it passed, and was approved if it has to be        | stores            | an event: staged, or released     |
| watch   | a release is on trial                              | canary's accounts | an event: released or rolled_back |
| wait    | none of these                                      | the next cut      | -                                 |

The leg follows from the rows of the log, so a process killed in any leg goes on with it, and does none twice. One
window is on its way at a time; a batch that is too small is held for the next, which begins with the control's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from etude import runfolder
from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.live.learn.train import live_run, train_window
from etude.live.learn.window import LiveContents, cut_window, exits_of, window_samples
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_blobs
from etude.live.log.records import ExitKind, ReleaseStage
from etude.live.release import operations
from etude.live.release.gate import play_gate, refuse_weak
from etude.live.release.operations import ReleaseCandidate, ReleaseSite, candidate
from etude.live.release.player import player_of
from etude.live.release.releases import ReleaseLog
from etude.live.release.reports import GateReport

LegKind = StrEnum("LegKind", ["CUT", "TRAIN", "GATE", "APPROVE", "RELEASE", "WATCH", "WAIT"])
AGAIN_SECONDS = 3600.0  # the longest pause before a leg that failed is tried again


@dataclass(frozen=True)
class Leg:
    """The leg of a loop; `why` in words. `due`: time of the next cut, None while a version is on its way."""

    kind: LegKind
    why: str
    window: int = 0
    version: ReleaseCandidate | None = None
    due: int | None = None


def leg_of(site: ReleaseSite) -> Leg:
    """The leg that is to be done, from the rows of the log and the manifests of stores. Raises UserError."""
    log, table, own = site.read(), schema.windows, site.config.clusters[0].store
    if (trial := log.trial) is not None:
        return Leg(LegKind.WATCH, f"release {trial.release.number} is on trial")
    if log.current is None:
        refused = Leg(LegKind.WAIT, f"the gate refused what {own} holds: publish another version there")
        return _of_version(site, log, candidate(site, own, None)) or refused
    with journal.reading(site.engine) as connection:
        window = connection.execute(sa.select(table).order_by(table.c.number.desc()).limit(1)).first()
    if window is not None and window.version is not None:
        if leg := _of_version(site, log, candidate(site, f"{window.run}/weights", window.version)):
            return leg
    elif window is not None and any(each.kind == ExitKind.TRAINED for each in exits_of(site.engine, window.number)):
        return Leg(LegKind.TRAIN, f"window {window.number} is learned from", window.number)
    began = min(event.at for state in log.states for event in state.events if event.stage is ReleaseStage.RELEASED)
    due = (began if window is None else window.cut) + round(site.config.loop.hours * 3600e9)
    if journal.now() >= due:
        return Leg(LegKind.CUT, "the next window is due", due=due)
    return Leg(LegKind.WAIT, f"the next window is cut at {datetime.fromtimestamp(due / 1e9, UTC):%F %T} UTC", due=due)


def _of_version(site: ReleaseSite, log: ReleaseLog, version: ReleaseCandidate) -> Leg | None:
    """The leg of a version; None if it was decided on, or has the weights of the current release."""
    digest, current = version.manifest.live, log.current
    of = f" of window {version.window}" if version.window is not None else ""
    what = f"version {version.manifest.version}{of}"
    own = [s for s in log.states if (s.release.manifest, s.release.window) == (digest, version.window)]
    if own and own[-1].stage is ReleaseStage.GATE and log.passed(digest) is own[-1]:
        if site.config.loop.approval and not own[-1].approved:
            return Leg(LegKind.APPROVE, f"{what} passed the gate and waits for a person: `etude live approve`")
        return Leg(LegKind.RELEASE, f"{what} passed the gate", version=version)
    if (current is not None and current.release.manifest == digest) or (own and own[-1].stage != ReleaseStage.GATE):
        return None
    return Leg(LegKind.GATE, f"{what} goes through the gate", version=version)


def step(site: ReleaseSite, say: Callable[[str], None]) -> Leg:
    """Brings the stores to the rows and does one leg. Raises UserError, RunFailed or DBAPIError."""
    leg, config, folder = leg_of(site), site.config, Path(site.config.folder)
    line = operations.tick(site).text
    contents, version = LiveContents(site.engine, Accounts(folder), open_blobs(folder)), leg.version
    if leg.kind is LegKind.CUT:
        made = cut_window(site.engine, contents, config.labels)
        batch = sum(each.kind == ExitKind.TRAINED for each in made.exits)
        few = "" if batch else "; too few, they join the next window"
        say(f"window {made.number}: {batch:,} of {len(made.exits):,} turns are learned from{few}")
    elif leg.kind is LegKind.TRAIN:
        samples = window_samples(site.engine, contents, config.labels, leg.window)
        done = train_window(config, site.engine, leg.window, samples, seconds=60 * config.loop.minutes)
        say(f"window {leg.window}: version {done.version} learned from {done.turns:,} turns ({done.action})")
    elif leg.kind is LegKind.GATE and version is not None:
        gate(site, version, say)
    elif leg.kind is LegKind.RELEASE and version is not None:
        out = operations.start(site, version.manifest.live, version.manifest.version)
        say(f"release {out.release.number}: {out.stage}, {out.events[-1].reason}")
    else:
        say(line if leg.kind is LegKind.WATCH else leg.why)
    failpoint(f"loop.{leg.kind}")
    return leg


def gate(
    site: ReleaseSite, version: ReleaseCandidate, say: Callable[[str], None], new_anchor: bool = False
) -> GateReport:
    """The report of the gate on a version, with real boxes and engines. Raises UserError."""
    with player_of(site) as player:
        report = play_gate(site, version, player.measure, player.replay, say, new_anchor)
    failed = "" if report.failed is None else f" refused it, {report.failed.name}: {report.failed.reason}"
    say(f"version {report.version}: the gate{failed or ' let it pass'}")
    return report


def run(site: ReleaseSite, ended: Callable[[float], bool], say: Callable[[str], None]) -> None:
    """Does one leg after the other until `ended`, which waits for so many seconds, is true. A leg that fails is tried
    again, after ever longer pauses. Raises UserError for a loop that cannot run, or runs already."""
    live_run(site.config)
    refuse_weak(site.config.gate, lambda _: None)
    lines, failures = [""], 0

    def once(line: str) -> None:
        if line != lines[-1]:
            say(f"{datetime.fromtimestamp(journal.now() / 1e9, UTC):%F %T} {line}")
        lines[:] = [line]

    with runfolder.lock(Path(site.config.folder)):
        while True:
            try:
                waits = step(site, once).kind in (LegKind.APPROVE, LegKind.WATCH, LegKind.WAIT)
                failures, pause = 0, operations.TICK_SECONDS * waits
            except (UserError, RunFailed, DBAPIError) as e:
                once(f"not now: {e}")
                pause, failures = min(AGAIN_SECONDS, operations.TICK_SECONDS * 2.0**failures), failures + 1
            if ended(pause):
                return
