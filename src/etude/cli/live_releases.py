"""`etude live run | plan | gate | approve | refuse | release | rollback | status | drill | watch-canary`: the loop, and
the release of a version to users step by step."""

from __future__ import annotations

import argparse
import getpass
import json
import math
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.live import LiveAction, add_config, add_json, opened
from etude.errors import UserError

if TYPE_CHECKING:
    from etude.live.release.operations import ReleaseSite, ReleaseState

# plan -----------------------------------------------------------------------------------------------------------------


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live plan`."""
    add_config(parser)
    base = "share of edits that users keep now (default: that of the log's last week)"
    parser.add_argument("--base", type=float, metavar="SHARE", help=base)
    parser.add_argument("--power", type=float, default=0.8, help="probability to find a true lift (default: 0.8)")
    add_json(parser)


def run_plan(arguments: argparse.Namespace) -> None:
    """Prints what the configuration can show in what time, with the accounts of the last week. Raises UserError."""
    from etude.live.release.overview import plan

    if arguments.base is not None and not 0 < arguments.base < 1:
        raise UserError(f"--base {arguments.base:g}: a share of edits lies between 0 and 1")
    if not 0 < arguments.power < 1:
        raise UserError(f"--power {arguments.power:g}: a probability lies between 0 and 1")
    with opened(arguments.config, make=True) as loop:
        ahead = plan(loop.site, arguments.base, arguments.power)
        config = loop.config
    print("| tenant | accounts in the last week |\n|---|---|")
    for tenant, count in sorted(ahead.tenants.items()):
        print(f"| {tenant} | {count:,} |")
    print("\n| suite | held-out tasks | margin that it defends | `gate.margin` |\n|---|---|---|---|")
    for name, tasks, margin in ahead.margins:
        print(f"| {name} | {tasks} | {100 * margin:.1f} points | {100 * config.gate.margin:.1f} points |")
    if not ahead.margins:
        print("| none: nothing is released; name one in `gate.suites` | | | |")
    print("\n| stage | accounts that it waits for | hours until these have matured |\n|---|---|---|")
    for stage in ahead.stages:
        late = stage.hours is None or stage.hours > config.canary.hours
        back = f": rolled back after {config.canary.hours:g}" if late else ""
        shown = "more than a week" if stage.hours is None else f"{stage.hours:.1f}"
        print(f"| {stage.share:.0%} | {stage.accounts} | {shown}{back} |")
    if ahead.kept is None:
        print("\nNo edit was seen in the last week: give --base for the lifts that can be shown.")
    else:
        print(f"\n| days at the last stage before all | lift of {ahead.kept:.1%} kept edits that is found |\n|---|---|")
        for days, lift in ahead.lifts.items():
            print(f"| {days} | {'none' if lift is None else f'{100 * lift:+.1f} points'} |")
    if arguments.json:
        print(json.dumps(asdict(ahead)))


# gate -----------------------------------------------------------------------------------------------------------------


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", type=int, metavar="V", help="version of the store (default: the newest)")
    store = "weight store of the versions to release (default: that of the run of the newest window)"
    parser.add_argument("--store", metavar="URL", help=store)


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live gate`."""
    add_config(parser)
    _add_version(parser)
    anchor = "the current release is the anchor from now on, which versions are compared with at twice the margin"
    parser.add_argument("--new-anchor", action="store_true", help=anchor)
    parser.add_argument("--json", action="store_true", help="print the report as the last line")


def run_gate(arguments: argparse.Namespace) -> int:
    """Prints every part of the gate; 1 for a version that fails. Budget, engine, dialect and [sandbox] are those of the
    recipe `train`. Raises UserError."""
    import msgspec

    from etude.live.legs import gate
    from etude.live.release.operations import candidate

    with opened(arguments.config, make=True) as loop:
        version = candidate(loop.site, arguments.store, arguments.version)
        report = gate(loop.site, version, print, arguments.new_anchor)
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    return int(report.failed is not None)


# release and rollback -------------------------------------------------------------------------------------------------


def add_release(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live release`."""
    add_config(parser)
    _add_version(parser)
    add_json(parser)


def run_release(arguments: argparse.Namespace) -> None:
    """Begins the canary of a version that has passed the gate, or continues it. Raises UserError."""
    from etude.live.release.operations import candidate, start

    with opened(arguments.config, make=True) as loop:
        manifest = candidate(loop.site, arguments.store, arguments.version).manifest
        state = start(loop.site, manifest.live, manifest.version)
    _print_state(arguments, state)


def _print_state(arguments: argparse.Namespace, state: ReleaseState) -> None:
    event, release = state.events[-1], state.release
    print(f"release {release.number} (version {release.version}): {event.stage} at {event.share:.0%}, {event.reason}")
    if arguments.json:
        figures = {"release": release.number, "stage": str(event.stage), "share": event.share, "reason": event.reason}
        print(json.dumps(figures))


def add_approve(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live approve`."""
    add_config(parser)
    parser.add_argument(
        "--by", default=getpass.getuser(), metavar="NAME", help="who decides, for the log (default: you)"
    )
    add_json(parser)


def run_approve(arguments: argparse.Namespace) -> None:
    """Approves what waits for a person: a version after the gate, or the canary's next stage. Raises UserError."""
    from etude.live.release.operations import approve

    with opened(arguments.config) as loop:
        state = approve(loop.site, arguments.by)
    _print_state(arguments, state)


def add_refuse(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live refuse`."""
    add_approve(parser)
    parser.add_argument("--reason", default="refused by hand", help="why, for the log")


def run_refuse(arguments: argparse.Namespace) -> None:
    """Refuses a version after the gate, or rolls the release on trial back. Raises UserError."""
    from etude.live.release.operations import refuse

    with opened(arguments.config) as loop:
        state = refuse(loop.site, arguments.by, arguments.reason)
    _print_state(arguments, state)


def add_rollback(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live rollback`."""
    add_config(parser)
    to = "number of the release whose content comes back (default: the one before)"
    parser.add_argument("--to", type=int, metavar="RELEASE", help=to)
    parser.add_argument("--by", default="a person", metavar="NAME", help="who decides, for the log")
    parser.add_argument("--reason", default="by hand", help="why, for the log")
    add_json(parser)


def run_rollback(arguments: argparse.Namespace) -> int:
    """Takes a release back in every cluster, and waits at most a minute until every server follows; 1 if a server lags.
    Raises UserError."""
    from etude.live.release.operations import DEADLINE, drain_lagging, rollback, wait

    with opened(arguments.config, make=True) as loop:
        state = rollback(loop.site, arguments.reason, arguments.by, arguments.to)
        stores = wait(loop.site)
        drain_lagging(loop.site, stores)
        seconds = (time.time_ns() - state.events[0].at) / 1e9
    number = state.release.number
    lagging = [f"{store.target.cluster} ({store.target.arm})" for store in stores if store.lagging]
    if lagging:
        print(
            f"release {number}: {', '.join(lagging)} did not follow within {DEADLINE:.0f} seconds, and gets no "
            f"requests until it does"
        )
    else:
        print(f"release {number}: every server serves it, {seconds:.1f} seconds after the decision")
    if arguments.json:
        print(json.dumps({"release": number, "seconds": seconds, "lagging": lagging}))
    return int(bool(lagging))


# status, drill and watch-canary ---------------------------------------------------------------------------------------


def add_status(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live status` and `etude live drill`."""
    add_config(parser)
    add_json(parser)


def run_status(arguments: argparse.Namespace) -> None:
    """Prints the newest releases, the evidence on the release on trial, every cluster, and who reads follow-ups. Raises
    UserError."""
    from etude.live.release.overview import status

    with opened(arguments.config, make=True) as loop:
        state = status(loop.site)
        state["loop"] = _loop_state(loop.site)
    print(
        f"Loop: {state['loop']['why']}"
        + ("" if state["loop"]["running"] else "; `etude live run` is not running")
        + ".\n"
    )
    print("| release | version | stage | accounts | decided by | why |\n|---|---|---|---|---|---|")
    for release in state["releases"]:
        last = release["events"][-1]
        print(
            f"| {release['number']} | {release['version']} | {release['stage']} | {release['share']:.0%} | "
            f"{last['decided_by']} | {last['reason']} |"
        )
    if (decision := state["decision"]) is not None:
        print(f"\nRelease {state['trial']}: {decision['verdict']}, {decision['reason']}\n")
        print("| guardrail | e-value over its bound |\n|---|---|")
        for name, value in decision["evidence"].items():
            print(f"| {name} | {math.exp(min(value, 40.0)):.2g} |")
    if (lift := state["lift"]) is not None:
        print(
            f"\nSince release {lift['anchor']}, on which the holdback of {lift['accounts'][1]:,} accounts stays, "
            f"{lift['sentence']}"
        )
    print("\n| cluster | arm | release | version | servers | |\n|---|---|---|---|---|---|")
    for cluster in state["clusters"]:
        late = f"{len(cluster['lagging'])} lag for {cluster['lagging_seconds']:.0f} s" if cluster["lagging"] else "all"
        notes = " ".join(filter(None, ["drained" if cluster["drained"] else "", cluster["error"]]))
        print(
            f"| {cluster['cluster']} | {cluster['arm']} | {cluster['release']} | {cluster['version']} | {late} | "
            f"{notes} |"
        )
    for taint in state["tainted"]:
        print(
            f"\nRelease {taint['release']} was rolled back: its window {taint['window']} learned from "
            f"{len(taint['turns'])} turns of {len(taint['accounts'])} accounts (--json lists them)"
        )
    print(f"\n{state['followups']['sentence']}")
    if arguments.json:
        print(json.dumps(state))


def _loop_state(site: ReleaseSite) -> dict[str, Any]:
    """The leg of the loop, what it waits for, and the time of the next cut (nanoseconds)."""
    from etude.live.legs import leg_of
    from etude.runfolder import is_running

    running = is_running(Path(site.config.folder))
    try:
        leg = leg_of(site)
    except UserError as e:
        return {"leg": None, "why": str(e), "next_cut": None, "running": running}
    return {"leg": str(leg.kind), "why": leg.why, "next_cut": leg.due, "running": running}


def run_drill(arguments: argparse.Namespace) -> None:
    """Rolls the canary's servers back and forward again, and prints the seconds of each cluster. Raises UserError for a
    cluster that takes longer than a minute."""
    from etude.live.release.operations import drill

    with opened(arguments.config, make=True) as loop:
        took = drill(loop.site, print)
    if arguments.json:
        print(json.dumps({"seconds": dict(took)}))


def add_watch_canary(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live watch-canary`."""
    add_config(parser)
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="between two looks (default: 60)")


def run_watch_canary(arguments: argparse.Namespace) -> None:
    """Decides on the release on trial until a signal comes, and prints a line for each change. Raises UserError."""
    from etude.live.release.operations import watch

    if not arguments.every > 0:
        raise UserError(f"--every {arguments.every}: a look takes time, give seconds above 0")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with opened(arguments.config, make=True) as loop:
        watch(loop.site, stop.wait, lambda text: print(text, flush=True), arguments.every)


def run_run(arguments: argparse.Namespace) -> None:
    """Runs the loop until SIGTERM or Ctrl-C, which end it within seconds: the leg is done again by the next run. Raises
    UserError."""
    from etude.live.legs import run

    def end(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # one is enough; children are being stopped
        raise KeyboardInterrupt

    with opened(arguments.config, make=True) as loop:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        try:
            run(loop.site, threading.Event().wait, lambda text: print(text, flush=True))
        except KeyboardInterrupt:
            print("ended; the same command goes on", flush=True)


ACTIONS: dict[str, LiveAction] = {
    "plan": (add_plan, run_plan),
    "run": (add_config, run_run),
    "approve": (add_approve, run_approve),
    "refuse": (add_refuse, run_refuse),
    "gate": (add_gate, run_gate),
    "release": (add_release, run_release),
    "rollback": (add_rollback, run_rollback),
    "status": (add_status, run_status),
    "drill": (add_status, run_drill),
    "watch-canary": (add_watch_canary, run_watch_canary),
}
