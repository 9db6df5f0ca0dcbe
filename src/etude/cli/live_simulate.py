"""`etude live simulate SCENARIO`: simulated users with known preferences, and planted faults."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live simulate`."""
    parser.add_argument("scenario", metavar="SCENARIO", help="name of a scenario, `clean`, or `all`; `list` names them")
    parser.add_argument("--seeds", default="1-3", metavar="A-B", help="seeds of the runs (default: 1-3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints the table. Raises UserError."""
    from etude.live.simulate.scenarios import SCENARIOS, digest

    known = ["clean", *(scenario.name for scenario in SCENARIOS)]
    if arguments.scenario == "list":
        print("\n".join(known))
        return
    if arguments.scenario not in (*known, "all"):
        raise UserError(f"no scenario is named {arguments.scenario!r}: give {', '.join(known)}, or all")
    names = known if arguments.scenario == "all" else [arguments.scenario]
    seeds = _seeds(arguments.seeds)
    from etude.live.simulate.judge import simulate

    clean, rows = simulate(names, seeds)
    figures: dict[str, Any] = {"scenarios": digest(), "seeds": arguments.seeds}
    if clean is not None:
        figures["clean"] = _print_clean(clean)
    if rows:
        print("\n| planted | stopped by | figure | with it | stopped in | without it | shows in |"
              "\n|---|---|---|---|---|---|---|")  # fmt: skip
        figures["faults"] = {row.scenario.name: _print_row(row, len(seeds)) for row in rows}
    if arguments.json:
        print(json.dumps(figures))


def _seeds(text: str) -> list[int]:
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < first + 1000:
        raise UserError(f"--seeds {text}: give a range such as 11-30, of at most 1000 seeds")
    return list(range(first, last + 1))


def _print_clean(clean: Any) -> dict[str, float]:
    from etude.live.simulate.judge import TREATMENTS

    print(f"Hidden utility before: {np.mean(clean.start):.3f}.\n\n| learned from | hidden utility after | share of the "
          "oracle's gain |\n|---|---|---|")  # fmt: skip
    names = {"live": "the live loop's labels", "oracle": "hidden utility (oracle)", "null": "shuffled rewards (null)"}
    shares = {rewards: clean.share(rewards) for rewards in clean.end}
    for rewards, share in shares.items():
        what = names.get(rewards) or f"votes, {TREATMENTS[rewards]}"
        print(f"| {what} | {np.mean(clean.end[rewards]):.3f} | {share:.1%} |")
    return {"before": float(np.mean(clean.start)), **{f"{name}/share": share for name, share in shares.items()}}


def _print_row(row: Any, seeds: int) -> dict[str, float]:
    scenario, on, off = row.scenario, float(np.mean(row.on)), float(np.mean(row.off))
    print(f"| {scenario.name}: {scenario.plants} | {scenario.stage} | {scenario.figure} | {on:.3f} | "
          f"{row.stopped} of {seeds} | {off:.3f} | {row.shown} of {seeds} |")  # fmt: skip
    return {"with": on, "without": off, "stopped": row.stopped, "shown": row.shown}
