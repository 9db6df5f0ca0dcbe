"""The simulated loop without a fault.

bandit/oracle-share    gain of hidden utility over ten versions, as a share of the gain of an oracle that learns from
                       hidden utility itself; mean over seeds
"""

from __future__ import annotations

from typing import Any

from benchmarks.live_simulation.judge import simulate
from benchmarks.live_simulation.windows import LIVE, NULL
from benchmarks.table import row


def rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Rows and checks."""
    seeds = range(11, 13) if quick else range(11, 31)
    clean, _ = simulate(["clean"], list(seeds), turns=500 if quick else 0)
    assert clean is not None
    share, null = clean.share(LIVE), clean.share(NULL)
    shown = [
        row("bandit/oracle-share", share, "share", "0.85 wanted"),
        row("bandit/null-share", null, "share", "0 wanted"),
    ]
    return shown, {} if quick else {"oracle-share": share >= 0.85, "null-share": abs(null) <= 0.02}
