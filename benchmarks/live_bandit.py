"""A policy that learns through the gateway: simulated users are its clients, windows are cut from its log.

bandit/oracle-share    gain of hidden utility, as a share of the gain of an oracle that learns from hidden utility
                       itself; mean over seeds. Baseline: the same seeds by `live_simulation`, in memory

`quick` has one kind of request instead of four, for which a window needs fewer; and more windows, as ten do not bring
every seed to the bound. Its size was chosen in memory, on seeds 1-10.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.live_simulation import bandit
from benchmarks.live_simulation.served import ServedRun, run_served
from benchmarks.live_simulation.traffic import CELLS
from benchmarks.live_simulation.windows import LIVE, ORACLE, TURNS, VERSIONS, Setting, run
from benchmarks.table import row

LEAST = 0.85


@dataclass(frozen=True)
class BanditSize:
    """Windows, requests of a window, kinds of requests, and seeds, with which nothing was chosen."""

    versions: int = VERSIONS
    turns: int = TURNS
    cells: int = CELLS
    seeds: Sequence[int] = (51, 52, 53)


WHOLE, QUICK = BanditSize(), BanditSize(versions=16, turns=180, cells=1, seeds=(51,))


def rows(quick: bool) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Rows and checks."""
    size = QUICK if quick else WHOLE
    first_CVA = bandit.first_policy(size.cells)
    runs: list[ServedRun] = []
    for seed in size.seeds:
        with tempfile.TemporaryDirectory(prefix="etude-live-") as folder:
            runs.append(run_served(Path(folder), seed, size.versions, size.turns, first_CVA))
    best, memory = (
        np.mean(
            [run(s, Setting(rewards, versions=size.versions, turns=size.turns), first_CVA).gain for s in size.seeds]
        )
        for rewards in (ORACLE, LIVE)
    )
    share = float(np.mean([each.learning.gain for each in runs]) / best)
    turns, signals = sum(each.answers for each in runs), sum(each.signals for each in runs)
    size_of_it = f"seeds {', '.join(map(str, size.seeds))}; {turns:,} answers, {signals:,} signals"
    baseline = f"{LEAST:.0%} wanted; {memory / best:.1%} in memory; {size_of_it}"
    return [row("bandit/oracle-share", share, "share", baseline)], {"oracle-share": share >= LEAST}
