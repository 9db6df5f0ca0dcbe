"""`etude live rollback CONFIG`: takes a release back, in every cluster."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live_release import opened


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live rollback`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    parser.add_argument("--to", type=int, metavar="RELEASE", help="number of the release whose content comes back "
                                                                  "(default: the one before)")  # fmt: skip
    parser.add_argument("--by", default="a person", metavar="NAME", help="who decides, for the log")
    parser.add_argument("--reason", default="by hand", help="why, for the log")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Rolls back, and waits at most a minute until every server follows; 1 if one does not. Raises UserError."""
    from etude.live.release.operations import DEADLINE, drain_lagging, rollback, wait

    with opened(arguments.config) as loop:
        standing = rollback(loop, arguments.reason, arguments.by, arguments.to)
        there = wait(loop)
        drain_lagging(loop, there)
        seconds = (time.time_ns() - standing.events[0].at) / 1e9
    number = standing.release.number
    lagging = [f"{state.pointer.cluster} ({state.pointer.arm})" for state in there if state.lagging]
    if lagging:
        print(f"release {number}: {', '.join(lagging)} did not follow within {DEADLINE:.0f} seconds, and gets no "
              f"requests until it does")  # fmt: skip
    else:
        print(f"release {number}: every server serves it, {seconds:.1f} seconds after the decision")
    if arguments.json:
        print(json.dumps({"release": number, "seconds": seconds, "lagging": lagging}))
    return int(bool(lagging))
