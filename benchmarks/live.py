"""The live loop: what the gateway adds to an answer and loses when it is killed, policies that learn from simulated
users, how often the gate and the canary are wrong, and how long a rollback takes.

Each part is a module `live_PART` with `rows(quick)`, which gives its rows and checks; all parts with `quick` together
take about 70 seconds on two idle cores.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.table import Table

PARTS = ("gateway", "bandit", "gate", "rollback")


def run(quick: bool) -> dict[str, Any]:
    """Rows of (case, value, unit, baseline)."""
    table = Table("live")
    for part in PARTS:
        rows, checks = importlib.import_module(f"benchmarks.live_{part}").rows(quick)
        table.rows.extend(rows)
        table.checks.update(checks)
    return table.result()
