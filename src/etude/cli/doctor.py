"""`etude doctor [CHECK]`: what this machine can do; and checks of a run, of the sandbox, and of boxes' realism."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.config import SANDBOX_TYPES, validate_sandbox
from etude.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude doctor` and of its checks."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    checks = parser.add_subparsers(dest="check", metavar="CHECK")
    _add_run_checks(checks)
    _add_sandbox(checks)
    _add_parity(checks)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Prints what was found; 0 if everything holds. Raises UserError."""
    if arguments.check is not None:
        return arguments.run_check(arguments)
    from etude.cli.show_machine import show_machine

    return show_machine(as_json=arguments.json)


def _check(checks: argparse._SubParsersAction, name: str, run_check: object, text: str) -> argparse.ArgumentParser:
    parser = checks.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run_check=run_check)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_run_checks(checks: argparse._SubParsersAction) -> None:
    mismatch = _check(checks, "mismatch", _mismatch, "why trainer and engine disagree in a run")
    mismatch.add_argument("folder", type=Path, help="run folder")
    replay = _check(checks, "replay", _replay, "repeat the episodes of a run, and compare them token by token")
    replay.add_argument("folder", type=Path, help="run folder")
    replay.add_argument("episode", nargs="*", help="as GROUP-MEMBER-ATTEMPT, e.g. 3-1-0; default: all in the ledger")


def _mismatch(arguments: argparse.Namespace) -> int:
    from etude.cli.show_mismatch import show_mismatch

    return show_mismatch(arguments.folder, as_json=arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    from etude.cli.show_replay import show_replay

    return show_replay(arguments.folder, arguments.episode, as_json=arguments.json)


def _add_sandbox(checks: argparse._SubParsersAction) -> None:
    attacks = _check(checks, "sandbox", _sandbox, "run the attack suite on this machine")
    attacks.add_argument("--quick", action="store_true", help="leave out repetitions and comparisons")
    boxes = attacks.add_argument_group("boxes", "as in [sandbox]")
    boxes.add_argument("--type", choices=SANDBOX_TYPES, default="namespace", help="who makes the boxes")
    for name in ("image", "runtime", "namespace"):
        boxes.add_argument(f"--{name}", default=argparse.SUPPRESS)
    against = attacks.add_argument_group("comparison with production machines", "items E; see the check parity")
    against.add_argument("--against", type=Path, nargs="+", metavar="FILE", help="fingerprints of such machines")
    against.add_argument("--machine-profiles", type=Path, metavar="FILE", help="as rollout.machine_profiles")
    against.add_argument(
        "--dataset", type=Path, metavar="DIR", help="tasks whose boxes are compared; else made-up ones"
    )
    against.add_argument("--boxes", type=int, default=200, help="boxes to compare with")


def _sandbox(arguments: argparse.Namespace) -> int:
    from etude.audit.attacks import fingerprints
    from etude.cli.show_attacks import show_attacks

    names = ("type", "image", "runtime", "namespace")
    table = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    config = validate_sandbox(table, "etude doctor sandbox")
    against = None
    if arguments.against is not None:
        if arguments.type != "namespace":
            raise UserError("--against needs boxes with machine profiles, which only --type namespace makes.")
        against = fingerprints.against(
            arguments.against, arguments.boxes, dataset=arguments.dataset, machine_profiles=arguments.machine_profiles
        )
    elif arguments.dataset is not None or arguments.machine_profiles is not None:
        raise UserError("--dataset and --machine-profiles describe boxes that are compared: give --against, too.")
    return show_attacks(as_json=arguments.json, quick=arguments.quick, config=config, against=against)


def _add_parity(checks: argparse._SubParsersAction) -> None:
    parity = _check(checks, "parity", _parity, "whether boxes can be told from production machines")
    task = parity.add_mutually_exclusive_group(required=True)
    task.add_argument("--against", type=Path, nargs="+", metavar="FILE", help="fingerprints of production machines")
    task.add_argument("--record", type=Path, metavar="FILE", help="append fingerprints of this machine")
    task.add_argument("--episodes", type=Path, nargs=2, metavar="RUN", help="two runs of the same tasks, compared")
    task.add_argument("--script", action="store_true", help="print the script that takes fingerprints elsewhere")
    parity.add_argument("--samples", type=int, default=20, help="fingerprints to record")
    parity.add_argument("--boxes", type=int, default=200, help="boxes to compare with")
    parity.add_argument("--of", default="eval-before", metavar="PREFIX", help="which episodes of the runs")
    parity.add_argument(
        "--dataset", type=Path, metavar="DIR", help="tasks whose boxes are compared; else a made-up one"
    )
    parity.add_argument(
        "--machine-profiles", type=Path, metavar="FILE", help="as rollout.machine_profiles; else half of the machines"
    )


def _parity(arguments: argparse.Namespace) -> int:
    from etude.audit.parity import audit
    from etude.cli.show_parity import show_pairs, show_parity, show_record

    if arguments.script:
        print(audit.SCRIPT.read_text("utf-8"), end="")
        return 0
    if arguments.episodes is not None:
        return show_pairs(arguments.episodes, arguments.of, arguments.json)
    if arguments.record is not None:
        return show_record(arguments.record, arguments.samples)
    return show_parity(
        arguments.against, arguments.boxes, arguments.json, dataset=arguments.dataset,
        machine_profiles=arguments.machine_profiles,
    )  # fmt: skip
