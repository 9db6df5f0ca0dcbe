"""The simulated loop by the command line: `python -m benchmarks.live_simulation SCENARIO --seeds A-B [--json]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.live_simulation.habits import HABITS, plant
from benchmarks.live_simulation.judge import TREATMENTS, simulate
from benchmarks.live_simulation.scenarios import SCENARIOS, digest
from etude.code import extras
from etude.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of the scenarios; 2 for words that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_simulation", description=__doc__)
    parser.add_argument(
        "scenario", metavar="SCENARIO", help="name of a scenario, `clean`, `habits`, or `all`; `list` names them"
    )
    parser.add_argument("--seeds", default="1-3", metavar="A-B", help="seeds of the runs (default: 1-3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    try:
        return _print(arguments.scenario, arguments.seeds, arguments.json)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2


def _print(scenario: str, range_of_seeds: str, as_json: bool) -> int:
    known = ["clean", "habits", *(each.name for each in SCENARIOS)]
    if scenario == "list":
        print("\n".join(known))
        return 0
    if scenario not in (*known, "all"):
        raise UserError(f"no scenario is named {scenario!r}: give {', '.join(known)}, or all")
    seeds = _seeds(range_of_seeds)
    extras.need("the simulation", "live")
    names = [name for name in known if scenario in (name, "all")]
    figures: dict[str, Any] = {"scenarios": digest(), "seeds": range_of_seeds}
    if "habits" in names:
        names.remove("habits")
        figures["habits"] = _print_habits(seeds)
    clean, rows = simulate(names, seeds)
    if clean is not None:
        figures["clean"] = _print_clean(clean)
    if rows:
        print(
            "\n| planted | stopped by | figure | with it | stopped in | without it | shows in |"
            "\n|---|---|---|---|---|---|---|"
        )
        figures["faults"] = {row.scenario.name: _print_row(row, len(seeds)) for row in rows}
    if as_json:
        print(json.dumps(figures))
    return 0


def _seeds(text: str) -> list[int]:
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last < first + 1000:
        raise UserError(f"--seeds {text}: give a range such as 11-30, of at most 1000 seeds")
    return list(range(first, last + 1))


def _print_clean(clean: Any) -> dict[str, float]:
    print(
        f"Hidden utility before: {np.mean(clean.start):.3f}.\n\n| learned from | hidden utility after | share of the "
        "oracle's gain |\n|---|---|---|"
    )
    names = {"live": "the live loop's labels", "oracle": "hidden utility (oracle)", "null": "shuffled rewards (null)"}
    shares = {rewards: clean.share(rewards) for rewards in clean.end}
    for rewards, share in shares.items():
        name = names.get(rewards) or f"votes, {TREATMENTS[rewards]}"
        print(f"| {name} | {np.mean(clean.end[rewards]):.3f} | {share:.1%} |")
    return {"before": float(np.mean(clean.start)), **{f"{name}/share": share for name, share in shares.items()}}


def _print_habits(seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """Means over the seeds, but of the errors the least and of the share that is left the most."""
    print("| habit | signal without | with it | standard errors, at least | planted in | left in, at most |")
    print("|---|---|---|---|---|---|")
    figures: dict[str, dict[str, float]] = {}
    for name in HABITS:
        seen = [plant(name, seed) for seed in seeds]
        usual, planted = np.mean([s.usual for s in seen]), np.mean([s.planted for s in seen])
        errors, before, after = min(s.errors for s in seen), seen[0].before, max(s.after for s in seen)
        print(f"| {name} | {usual:.3f} | {planted:.3f} | {errors:.1f} | {before:.1%} | {after:.1%} |")
        figures[name] = {"errors": errors, "before": before, "after": after}
    return figures


def _print_row(row: Any, seeds: int) -> dict[str, float]:
    scenario, on, off = row.scenario, float(np.mean(row.on)), float(np.mean(row.off))
    print(
        f"| {scenario.name}: {scenario.plants} | {scenario.stage} | {scenario.figure} | {on:.3f} | "
        f"{row.stopped} of {seeds} | {off:.3f} | {row.shown} of {seeds} |"
    )
    return {"with": on, "without": off, "stopped": row.stopped, "shown": row.shown}


if __name__ == "__main__":
    sys.exit(main())
