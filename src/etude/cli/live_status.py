"""`etude live status CONFIG`: where releases, stores and servers stand."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live_release import opened


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live status`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> None:
    """Prints the newest releases, the evidence on the one on trial, and every cluster. Raises UserError."""
    from etude.live.release.operations import status

    with opened(arguments.config) as loop:
        told = status(loop)
    print("| release | version | stage | accounts | decided by | why |\n|---|---|---|---|---|---|")
    for release in told["releases"]:
        last = release["events"][-1]
        print(f"| {release['number']} | {release['version']} | {release['stage']} | {release['share']:.0%} | "
              f"{last['decided_by']} | {last['reason']} |")  # fmt: skip
    if (decision := told["decision"]) is not None:
        print(f"\nRelease {told['trial']}: {decision['verdict']}, {decision['reason']}\n")
        print("| guardrail | e-value over its bound |\n|---|---|")
        for name, value in decision["evidence"].items():
            print(f"| {name} | {math.exp(min(value, 40.0)):.2g} |")
    if (lift := told["lift"]) is not None:
        print(f"\nSince release {lift['anchor']}, on which the holdback of {lift['accounts'][1]:,} accounts stays, "
              f"{lift['sentence']}")  # fmt: skip
    print("\n| cluster | arm | release | version | servers | |\n|---|---|---|---|---|---|")
    for cluster in told["clusters"]:
        late = f"{len(cluster['lagging'])} lag for {cluster['lagging_seconds']:.0f} s" if cluster["lagging"] else "all"
        notes = " ".join(filter(None, ["drained" if cluster["drained"] else "", cluster["error"]]))
        print(f"| {cluster['cluster']} | {cluster['arm']} | {cluster['release']} | {cluster['version']} | {late} | "
              f"{notes} |")  # fmt: skip
    for taint in told["tainted"]:
        print(f"\nRelease {taint['release']} was rolled back: its window {taint['window']} learned from "
              f"{len(taint['turns'])} turns of {len(taint['accounts'])} accounts (--json lists them)")  # fmt: skip
    if arguments.json:
        print(json.dumps(told))
