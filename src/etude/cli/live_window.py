"""`etude live window CONFIG`: the next window of a live loop, or an earlier one computed again."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError

if TYPE_CHECKING:
    from etude.live.learn.window import WindowResult

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live window`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cut", help="what came before this counts, e.g. 2026-11-23T10:00:00Z (default: now)")
    which.add_argument("--replay", type=int, metavar="NUMBER", help="compute this window again and compare; code 1 if "
                                                                    "it is not the same")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int | None:
    """Prints counts by exit and reason, and the share that was dropped by reason and version. Raises UserError."""
    from etude.cli.live import read_config
    from etude.live.learn.window import LiveContents, calibration, cut_window, replay
    from etude.live.log.accounts import Accounts, open_blobs, open_log

    config = read_config(arguments.config)
    cut = None if arguments.cut is None else _nanoseconds(arguments.cut)
    folder = Path(config.folder)
    if not folder.is_dir():
        raise UserError(f"{folder} holds no live loop yet: `etude live serve` makes it")
    engine = open_log(folder, config.database)
    try:
        contents = LiveContents(engine, Accounts(folder).check(engine), open_blobs(folder))
        if arguments.replay is None:
            result = cut_window(engine, contents, config.labels, cut)
            figures = _print(result)
            figures["calibration"] = later = calibration(engine, config.labels, result.number)
            for kind, (count, correlation) in later.items():
                known = "unknown, one of them is always the same" if correlation is None else f"{correlation:.2f}"
                print(f"\nCorrelation of the rewards of {count:,} turns with what came later ({kind}): {known}.")
        else:
            found = replay(engine, contents, config.labels, arguments.replay)
            figures = {"window": arguments.replay, "labels": found.labels, "exits": found.exits, "batch": found.batch}
            differ = [name for name, same in figures.items() if name != "window" and not same]
            print(
                f"Window {arguments.replay}: " + (f"{' and '.join(differ)} differ" if differ else "the same bits") + "."
            )
    finally:
        engine.dispose()
    if arguments.json:
        print(json.dumps(figures))
    return int(arguments.replay is not None and not all(figures.values()))


def _print(result: WindowResult) -> dict[str, Any]:
    from etude.live.learn.filters import drop_rates, suspicious

    counts = Counter((str(e.kind), e.reason) for e in result.exits)
    exits: dict[str, dict[str, int]] = {}
    for (kind, reason), count in sorted(counts.items()):
        exits.setdefault(kind, {})[reason] = count
    rates = drop_rates(result.turns, result.exits)
    trained = sum(exits.get("trained", {}).values())
    print(f"Window {result.number}: {len(result.exits):,} turns, {trained:,} in the batch {result.batch[:16]}.")
    print("\n| exit | reason | turns |\n|---|---|---|")
    for kind, by in exits.items():
        for reason, count in by.items():
            print(f"| {kind} | {reason or '-'} | {count:,} |")
    if rates:
        versions = sorted({version for by in rates.values() for version in by})
        print(f"\n| share dropped | {' | '.join(f'version {v}' for v in versions)} |\n|{'---|' * (len(versions) + 1)}")
        for reason, by in rates.items():
            shares = (f"{by[v][0] / by[v][1]:.1%} of {by[v][1]:,}" for v in versions)
            print(f"| {reason} | {' | '.join(shares)} |")
    warned = suspicious(rates)
    for reason in warned:
        print(f"\nWarning: versions differ in how often their turns are dropped for {reason!r}; what is dropped is not "
              "learned from, so look at those turns before you train.")  # fmt: skip
    return {
        "window": result.number, "cut": result.cut, "rules": result.rules, "batch": result.batch, "exits": exits,
        "drops": {reason: {str(v): list(n) for v, n in by.items()} for reason, by in rates.items()}, "warned": warned,
    }  # fmt: skip


def _nanoseconds(text: str) -> int:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"--cut {text}: give a time with its zone, e.g. 2026-11-23T10:00:00Z") from None
    if at.tzinfo is None:
        raise UserError(f"--cut {text} has no zone: add Z for UTC, or +01:00")
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000
