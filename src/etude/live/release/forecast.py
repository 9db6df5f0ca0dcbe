"""A forecast of what a configuration can show in what time, from the accounts that its log saw in the last week."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from etude.config import LiveConfig
from etude.evals import LookPlan, accounts_per_arm, defended_margin, plan_looks
from etude.live.log import journal, schema
from etude.live.log.records import Arm
from etude.live.release.canary import accounts_wanted
from etude.live.release.reports import DISCORDANT, SPLIT
from etude.tasks import load_dataset

DAYS = (1, 7, 28)
_WEEK = 7 * 86_400e9
_HOUR = 3600e9


@dataclass(frozen=True)
class StageForecast:
    """A stage of the canary. It waits for so many `accounts`; `hours` until it may end: None if a week's accounts are
    too few."""

    share: float
    accounts: int
    hours: float | None


@dataclass(frozen=True)
class Forecast:
    """`tenants`: accounts of each in the last week. `kept`: their share of kept edits, None without edits. `margins`:
    name, held-out tasks and defended margin of each suite. `lifts`: the smallest lift of `kept` that is shown in so
    many days, None for none."""

    tenants: dict[str, int]
    kept: float | None
    margins: list[tuple[str, int, float]]
    stages: list[StageForecast]
    lifts: dict[int, float | None]


def forecast(config: LiveConfig, engine: sa.Engine, held: bool, base: float | None, power: float = 0.8) -> Forecast:
    """The forecast. `held`: whether there are servers of a holdback; `base` replaces the share of kept edits. Raises
    UserError for a missing suite, ValueError for a base or a power that is no probability."""
    canary, gate = config.canary, config.gate
    slot = round(canary.slot_minutes * 60e9)
    now = journal.now()
    table = schema.tallies
    first = sa.func.min(table.c.slot)
    seen = sa.select(table.c.tenant, table.c.account, first).where(table.c.slot >= (now - _WEEK) // slot)
    sums = sa.select(table.c.name, sa.func.sum(table.c.count), sa.func.sum(table.c.total))
    sums = sums.where(table.c.slot >= (now - _WEEK) // slot, table.c.arm == str(Arm.CONTROL)).group_by(table.c.name)
    with journal.reading(engine) as connection:
        rows = connection.execute(seen.group_by(table.c.tenant, table.c.account)).all()
        totals = {name: (int(count), float(total)) for name, count, total in connection.execute(sums)}
    tenants: dict[str, int] = {}
    for tenant, _, _ in rows:
        tenants[tenant] = tenants.get(tenant, 0) + 1
    tries = totals.get("edits", (0, 0.0))[0] + totals.get("invalid_call", (0, 0.0))[0]
    kept = base if base is not None else totals.get("survived", (0, 0.0))[1] / tries if tries else None
    came_N = np.sort(np.array([place for _, _, place in rows], float)) * slot
    hours_N = (came_N - came_N[0]) / _HOUR if len(came_N) else came_N
    rest = 1 - (canary.holdback if held else 0.0)
    ripe = config.labels.delay_seconds / 3600
    stages: list[StageForecast] = []
    for share in canary.stages:
        wanted, hours = accounts_wanted(canary, share, len(hours_N)), canary.minutes / 60
        needed = int(np.ceil(wanted / (share * rest)))  # accounts of all arms
        if needed > len(hours_N):
            stages.append(StageForecast(share, wanted, None))
            continue
        came = max(hours, float(hours_N[needed - 1]) + ripe) if needed else hours
        stages.append(StageForecast(share, wanted, came))
    margins: list[tuple[str, int, float]] = []
    for suite in map(Path, gate.suites):
        sizes = Counter(task.cluster for task in load_dataset(suite).tasks if task.split == SPLIT)
        margin = defended_margin(list(sizes.values()), DISCORDANT / gate.samples, gate.alpha)
        margins.append((suite.name, sizes.total(), margin))
    controlled = [share for share in canary.stages if share < 1]
    lifts: dict[int, float | None] = dict.fromkeys(DAYS)
    if kept is not None and controlled and 0 < kept < 1:
        plan = plan_looks([share / controlled[-1] for share in controlled], canary.lift_alpha, power)
        smaller = min(controlled[-1], 1 - controlled[-1]) * rest
        lifts = {days: _smallest_lift(kept, _accounts(hours_N, days) * smaller, plan) for days in DAYS}
    return Forecast(tenants, kept, margins, stages, lifts)


def _accounts(hours_N: Sequence[float] | np.ndarray, days: int) -> int:
    """Accounts in so many days: as many as came in the first days of the week; beyond it, those of the week."""
    return int(np.sum(np.asarray(hours_N) <= 24 * days))


def _smallest_lift(base: float, accounts: float, plan: LookPlan) -> float | None:
    """The smallest lift, to a tenth of a point, that so many accounts of each arm show."""
    for tenths in range(1, int((1 - base) * 1000)):
        if accounts_per_arm(base, tenths / 1000, plan) <= accounts:
            return tenths / 1000
    return None
