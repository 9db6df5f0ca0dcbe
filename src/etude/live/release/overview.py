"""The view that people have of releases, stores and servers: the state now, and what can be shown in what time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from etude.live.log import journal, schema
from etude.live.log.followups import reader_of, reading
from etude.live.log.records import Arm, ReleaseStage
from etude.live.release import operations, releases
from etude.live.release.canary import CanaryDecision, TallyRow, tallies_of
from etude.live.release.contrast import holdback_lift
from etude.live.release.forecast import Forecast, forecast
from etude.live.release.operations import ReleaseSite
from etude.live.release.releases import ReleaseLog
from etude.live.release.stores import store_states

_DAY = 24 * 3600 * 10**9


def plan(site: ReleaseSite, base: float | None, power: float) -> Forecast:
    """The forecast of what can be shown in what time. Raises UserError."""
    return forecast(site.config, site.engine, bool(site.canary.holdback), base, power)


def status(site: ReleaseSite) -> dict[str, Any]:
    """The state of releases, stores and servers, as JSON."""
    log = site.read()
    stores = store_states(log.targets(site.config.clusters))
    drained = releases.drained(site.engine)
    now = journal.now()
    trial = log.trial
    decision = None
    if trial is not None and trial.stage is ReleaseStage.CANARY:
        decision = operations.decision_of(site, trial, now)
    return {
        "current": log.current.release.number if log.current else None,
        "trial": trial.release.number if trial else None,
        "releases": [
            {
                **msgspec.to_builtins(state.release),
                "stage": str(state.stage),
                "share": state.share,
                "events": msgspec.to_builtins(state.events),
            }
            for state in log.states[-20:]
        ],
        "decision": None if decision is None else _as_json(decision),
        "lift": _lift_since_anchor(site, log, now),
        "clusters": [
            {
                "cluster": store.target.cluster,
                "arm": str(store.target.arm),
                "store": store.target.store,
                "release": store.target.release.number,
                "version": store.version,
                "error": store.error,
                "servers": [
                    {"url": s.url, "version": s.version, "digest": s.digest, "error": s.error} for s in store.servers
                ],
                "lagging": [server.url for server in store.lagging],
                "lagging_seconds": (now - store.target.since) / 1e9 if store.lagging else 0.0,
                "drained": bool((event := drained.get((store.target.cluster, store.target.arm))) and event.drained),
            }
            for store in stores
        ],
        "followups": reading(site.engine, Path(site.config.folder), reader_of(site.config.judge)),
        "tainted": [msgspec.to_builtins(taint) for taint in releases.taints(site.engine)],
    }


def _lift_since_anchor(site: ReleaseSite, log: ReleaseLog, now: int) -> dict[str, Any] | None:
    """The lift of the control over the holdback, which stays on the anchor, by matured outcomes since the first release
    after the anchor, within the same days; None without a holdback, or with fewer than two accounts in an arm."""
    current = log.current
    if current is None or current.release.anchor is None or not site.canary.holdback:
        return None
    anchor = current.release.anchor
    began = min(
        event.at
        for state in log.states
        for event in state.events
        if state.release.anchor == anchor and event.stage is ReleaseStage.RELEASED
    )
    slot, table = round(site.canary.slot_minutes * 60e9), schema.tallies
    day = (table.c.slot // max(1, round(_DAY / slot))).label("day")
    matured = (now - round(site.config.labels.delay_seconds * 1e9)) // slot
    keys = (table.c.arm, table.c.account, day, table.c.name)
    query = (
        sa.select(*keys, sa.func.sum(table.c.count), sa.func.sum(table.c.total))
        .group_by(*keys)
        .where(
            table.c.slot >= -(-began // slot),
            table.c.slot < matured,
            (table.c.arm == Arm.CONTROL) | ((table.c.arm == Arm.HOLDBACK) & (table.c.release == anchor)),
            table.c.name.in_(["edits", "invalid_call", "survived"]),
        )
    )
    with journal.reading(site.engine) as connection:
        rows = [
            TallyRow(arm, account, int(number), name, int(count), float(total))
            for arm, account, number, name, count, total in connection.execute(query)
        ]
    lift = holdback_lift(tallies_of(rows))
    return None if lift is None else {"anchor": anchor, "sentence": lift.sentence, **msgspec.to_builtins(lift)}


def _as_json(decision: CanaryDecision) -> dict[str, Any]:
    fields = msgspec.to_builtins(decision)
    return fields | {"evidence": dict(sorted(decision.evidence.items(), key=lambda item: -item[1]))}
