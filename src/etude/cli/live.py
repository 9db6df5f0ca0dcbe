"""`etude live ACTION`: the table of actions. Each is a module `live_ACTION` of this package with the two functions of a
command; all are imported for their flags, so each imports what it works with in `run`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from etude.cli.overlays import read_toml
from etude.config import LiveConfig, validate

ACTIONS = {
    "serve": "serve a gateway before clusters of inference servers",
    "key": "create, list and revoke the API keys of tenants",
    "tenant": "show or change the policy of a tenant",
    "watch": "tell the gateway what becomes of edits in a git repository",
    "hook": "let git tell of commits at once",
    "forget": "destroy the key of an account and delete what is known of it",
    "export": "write all that is known of an account to a folder",
    "expire": "delete contents older than their tenants keep them",
    "plant": "make strings that no version may know, which the gate asks for",
    "plan": "tell how many accounts show that a version is better, and what a suite can defend",
    "gate": "play a version against the current release, and refuse it if it is worse",
    "release": "bring a version that has passed the gate to the canary, and step by step to all",
    "rollback": "take a release back in every cluster",
    "status": "tell where releases, stores and servers stand",
    "drill": "roll the canary's servers back and forward again, and tell how long that takes",
    "watch-canary": "decide on the release on trial each minute, until it is interrupted",
    "demo": "let simulated users teach the nano model through all of it, on two CPU cores",
    "simulate": "let simulated users teach a small policy, plant a fault, and tell which stage stops it",
    "window": "compute what is learned from, or compute an earlier window again",
    "train": "learn from a window: the next version, a candidate for the gate",
}


def read_config(path: Path) -> LiveConfig:
    """The configuration of a live loop. Raises UserError, also for a database that cannot be opened here."""
    config = validate(LiveConfig, read_toml(path), str(path))
    if config.database is not None:
        from etude.ledger.database import parse

        parse(config.database, "live log")
    return config


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude live`, one sub-command per action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(command=f"live {name}")
        importlib.import_module(f"etude.cli.live_{name.replace('-', '_')}").add(action)


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int | None:
    """Does what the action says. Raises UserError."""
    name = arguments.action.replace("-", "_")
    return importlib.import_module(f"etude.cli.live_{name}").run(arguments, rest)
