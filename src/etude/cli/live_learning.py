"""`etude live window | train | demo`: learning from the turns of users, real or simulated."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.demo import set_aside
from etude.cli.live import LiveAction, add_config, add_json, opened, read_config
from etude.errors import UserError

if TYPE_CHECKING:
    from etude.live.learn import WindowResult
    from etude.live.simulate.figures import LiveDemo

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DEMO_FOLDER = Path("outputs/live-demo")

# calibrate ------------------------------------------------------------------------------------------------------------


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live calibrate`."""
    add_config(parser)
    add_json(parser)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Prints how often the judge and the English word list agree with labelled follow-ups, and keeps the judge's
    agreement for `status`. Code 1 for a judge that agrees less often than the list. Raises UserError."""
    from etude.live.gateway import calibrated

    with opened(arguments.config, make=True) as loop:
        readers = calibrated(loop.config.judge, loop.folder)
    print("| reader | examples | right | no verdict | by language |\n|---|---|---|---|---|")
    for each in readers:
        languages = ", ".join(f"{name} {share:.0%}" for name, share in each.languages.items())
        print(f"| {each.reader} | {each.examples} | {each.right:.0%} | {each.failed} | {languages} |")
    if arguments.json:
        print(json.dumps({each.reader: asdict(each) for each in readers}))
    return int(readers[-1].right < readers[0].right)


# window ---------------------------------------------------------------------------------------------------------------


def add_window(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live window`."""
    add_config(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cut", help="what came before this counts, e.g. 2026-11-23T10:00:00Z (default: now)")
    replay = "compute this window again and compare; code 1 if it is not the same"
    which.add_argument("--replay", type=int, metavar="NUMBER", help=replay)
    add_json(parser)


def run_window(arguments: argparse.Namespace) -> int:
    """Prints the turns of a window by exit and reason, and the shares dropped by reason and version; or computes a
    window again and compares. Raises UserError."""
    from etude.live.learn import LiveContents, cut_window, replay_window, signal_calibration

    config = read_config(arguments.config)
    cut = None if arguments.cut is None else _nanoseconds(arguments.cut)
    with opened(config) as loop:
        contents = LiveContents(loop.engine, loop.accounts, loop.contents)
        if arguments.replay is None:
            result = cut_window(loop.engine, contents, config.labels, cut)
            figures = _print_window(result)
            figures["calibration"] = later = signal_calibration(loop.engine, config.labels, result.number)
            for kind, (count, correlation) in later.items():
                known = "unknown, one of them is always the same" if correlation is None else f"{correlation:.2f}"
                print(f"\nCorrelation of the rewards of {count:,} turns with what came later ({kind}): {known}.")
            same = True
        else:
            again = replay_window(loop.engine, contents, config.labels, arguments.replay)
            parts = {"labels": again.labels, "exits": again.exits, "batch": again.batch}
            figures = {"window": arguments.replay, **parts}
            same = all(parts.values())
            differ = [name for name, equal in parts.items() if not equal]
            print(f"Window {arguments.replay}: {'the same bits' if same else ' and '.join(differ) + ' differ'}.")
    if arguments.json:
        print(json.dumps(figures))
    return int(not same)


def _print_window(result: WindowResult) -> dict[str, Any]:
    from etude.live.learn import drop_rates, suspicious

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
        names = " | ".join(f"version {version}" if version >= 0 else "no version" for version in versions)
        print(f"\n| share dropped | {names} |\n|{'---|' * (len(versions) + 1)}")
        for reason, by in rates.items():
            shares = (f"{by[v][0] / by[v][1]:.1%} of {by[v][1]:,}" for v in versions)
            print(f"| {reason} | {' | '.join(shares)} |")
    warned = suspicious(rates)
    for reason in warned:
        print(
            f"\nWarning: versions differ in how often their turns are dropped for {reason!r}; what is dropped is not "
            "learned from, so look at those turns before you train."
        )
    return {
        "window": result.number,
        "cut": result.cut,
        "rules": result.rules,
        "batch": result.batch,
        "exits": exits,
        "drops": {reason: {str(v): list(n) for v, n in by.items()} for reason, by in rates.items()},
        "warned": warned,
    }


def _nanoseconds(text: str) -> int:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"--cut {text}: give a time with its zone, e.g. 2026-11-23T10:00:00Z") from None
    if at.tzinfo is None:
        raise UserError(f"--cut {text} has no zone: add Z for UTC, or +01:00")
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000


# train ----------------------------------------------------------------------------------------------------------------


def add_train(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live train`."""
    add_config(parser)
    parser.add_argument("--window", type=int, required=True, metavar="NUMBER", help="as `etude live window` printed it")
    parser.add_argument("--minutes", type=float, default=60.0, help="that the trainer may take (default: 60)")
    add_json(parser)


def run_train(arguments: argparse.Namespace) -> None:
    """Trains on a window, unless it has been trained on, and prints the version. Raises UserError or RunFailed."""
    from etude.live.learn import LiveContents, train_window, window_samples

    with opened(arguments.config) as loop:
        if arguments.minutes <= 0:
            raise UserError(f"--minutes {arguments.minutes:g}: give a time above 0")
        arguments.interrupted = "the same command goes on"
        contents = LiveContents(loop.engine, loop.accounts, loop.contents)
        batch = window_samples(loop.engine, contents, loop.config.labels, arguments.window)
        done = train_window(loop.config, loop.engine, arguments.window, batch, seconds=60 * arguments.minutes)
        folder = loop.folder
    print(
        f"Window {done.window}: version {done.version} of {folder}/train/weights, from {done.turns:,} turns on "
        f"version {done.base}, {done.hints:,} of them with a correction."
    )
    for reason, count in done.refused.items():
        print(f"{count:,} turns were dropped: {reason}.")
    if done.action != "go":
        print(f"Warning: the guards did not train on it ({done.action}): see {folder}/train/logs/latest/trainer.log.")
    if arguments.json:
        print(json.dumps(asdict(done)))


# demo -----------------------------------------------------------------------------------------------------------------


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live demo`."""
    parser.add_argument("--seed", type=int, help="of users, requests and the planted version (default: 1)")
    parser.add_argument("--windows", type=int, metavar="N", help="windows to learn from (default: 3)")
    parser.add_argument("--resume", action="store_true", help="continue the last demo where it stopped")
    add_json(parser)


def run_demo(arguments: argparse.Namespace) -> int:
    """Writes outputs/live-demo/report.md; 1 if no version was released, or the planted one was. Raises UserError or
    RunFailed."""
    if importlib.util.find_spec("openai") is None:
        raise UserError("the users of the demo ask with OpenAI's client library: pip install openai")
    from etude.live.simulate import figures
    from etude.live.simulate.demo import run as run_live_demo

    folder = _DEMO_FOLDER.absolute()
    begun = figures.load(folder) if arguments.resume else None
    if begun is not None and (arguments.seed, arguments.windows) != (None, None):
        raise UserError("a resumed demo keeps its seed and windows: give --resume alone")
    if begun is None:
        seed, windows = arguments.seed, arguments.windows
        begun = _begin_demo(folder, 1 if seed is None else seed, 3 if windows is None else windows)
    arguments.interrupted = "`etude live demo --resume` goes on"
    done = run_live_demo(folder, begun, lambda text: print(text, flush=True))
    text = figures.report(done)
    (folder / "report.md").write_text(text, "utf-8")
    print(f"\n{text}\n{folder}/report.md")
    if arguments.json:
        print(json.dumps(figures.as_json(done)))
    return int(not (done.released and done.planted_stopped))


def _begin_demo(folder: Path, seed: int, windows: int) -> LiveDemo:
    """The figures of a new demo, in a new folder; an earlier demo, which must not be running, is moved. Raises
    UserError."""
    from etude import runfolder
    from etude.live.simulate import figures

    if not 1 <= windows <= 100:
        raise UserError(f"--windows {windows}: give a number from 1 to 100")
    if seed < 0:
        raise UserError(f"--seed {seed}: give a number from 0")
    if folder.exists():
        with runfolder.lock(folder):
            print(f"the earlier demo was moved to {set_aside(folder)}")
    folder.mkdir(parents=True, mode=0o700)
    begun = figures.LiveDemo("nano", seed, windows)
    figures.keep(folder, begun)
    return begun


# requests -------------------------------------------------------------------------------------------------------------


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live requests`."""
    add_config(parser)
    where = "clone in which `etude live watch` traced the edits"
    parser.add_argument("--repository", type=Path, required=True, metavar="CLONE", help=where)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".jsonl to write; must be new")


def run_requests(arguments: argparse.Namespace) -> None:
    """Writes the requests. Raises UserError."""
    from etude import runfolder
    from etude.corpus.sessions import SessionReport
    from etude.live.learn import LiveContents, committed_requests

    output = arguments.output
    if output.exists():
        raise UserError(f"{output} exists: name another file, or remove it")
    report = SessionReport()
    with opened(read_config(arguments.config)) as loop:
        contents = LiveContents(loop.engine, loop.accounts, loop.contents)
        rows = list(committed_requests(loop.engine, contents, arguments.repository, report))
    if not rows:
        raise UserError(
            f"no commit of {arguments.repository} is traced to a turn with consent: `etude live watch` writes the "
            "traces while people work"
        )
    runfolder.make(output.parent)
    runfolder.write(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    print(f"{len(rows):,} requests in {output}, for `etude tasks build --kinds commit --requests {output}`")


ACTIONS: dict[str, LiveAction] = {
    "requests": (add_requests, run_requests),
    "calibrate": (add_calibrate, run_calibrate),
    "window": (add_window, run_window),
    "train": (add_train, run_train),
    "demo": (add_demo, run_demo),
}
