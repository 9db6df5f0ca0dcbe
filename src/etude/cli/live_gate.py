"""`etude live gate CONFIG`: what a version must pass before any user meets it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.cli.live_release import add_version, opened
from etude.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live gate`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML of stage live")
    add_version(parser)
    anchor = "the current release is the anchor from now on, which versions are compared with at twice the margin"
    parser.add_argument("--new-anchor", action="store_true", help=anchor)
    parser.add_argument("--json", action="store_true", help="print the report as the last line")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints every part; 1 if one was not passed. Budget, engine and dialect are those of the recipe `train`. Raises
    UserError."""
    import msgspec

    from etude.cli.overlays import read_toml
    from etude.config import InferenceConfig, RLConfig, RolloutConfig, validate
    from etude.live.release.gate import gate
    from etude.live.release.operations import candidate
    from etude.live.release.replay import Player

    with opened(arguments.config) as loop:
        budget, engine, dialect = RolloutConfig().budget(), InferenceConfig(), "auto"
        if loop.config.train is not None:
            recipe = validate(RLConfig, read_toml(Path(loop.config.train)), loop.config.train)
            if recipe.sandbox.type != "namespace":
                kind = recipe.sandbox.type
                raise UserError(f'{loop.config.train}: sandbox.type = "{kind}", and the gate plays in namespaces alone')
            if recipe.sandbox.egress or recipe.sandbox.index is not None:
                print(f"boxes of the gate reach nothing, whatever {loop.config.train} says", file=sys.stderr)
            budget, engine, dialect = recipe.rollout.budget(), recipe.inference, recipe.model.dialect
        found = candidate(loop, arguments.store, arguments.version)
        with Player(loop, budget, engine, dialect) as player:
            report = gate(loop, found, player.measure, player.replay, print, arguments.new_anchor)
    failed = report.failed
    print(f"version {report.version}: " + ("passed" if failed is None else f"refused, {failed.name}: {failed.reason}"))
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    return int(failed is not None)
