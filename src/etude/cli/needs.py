"""The extras that a command line needs: `main` checks them first, so that no command stops half-way."""

from __future__ import annotations

import argparse
from pathlib import Path

# Extras of commands and actions; an action's row precedes its command's. `extras_of` has the commands whose extras
# depend on their arguments.
_ALWAYS: dict[str, tuple[str, ...]] = {
    "demo": ("train",),
    "serve": ("serve",),
    "bench": ("train",),
    "export": ("play",),
    "corpus sessions": ("play",),
    "corpus pull-requests": ("play",),
    "tasks fast-apply": ("apply",),
    "doctor mismatch": ("serve",),
    "doctor model": ("serve",),
    "doctor replay": ("serve",),
    "doctor sandbox": ("serve",),
    "weights": ("serve",),
    "weights feed": (),  # it runs in vLLM's environment, beside a part of the packages
    "weights inspect": (),
    "weights keygen": (),  # of `live`, too
    "live": ("live",),
    "live demo": ("train", "live"),
    "live train": ("train", "live"),
    "live run": ("train", "live"),
    "live approve": ("serve", "live"),
    "live refuse": ("serve", "live"),
    "live gate": ("serve", "live"),
    "live release": ("serve", "live"),
    "live rollback": ("serve", "live"),
    "live drill": ("serve", "live"),
    "live watch-canary": ("serve", "live"),
    "live plan": ("live",),
    "live watch": (),  # of developers, who have no part of the loop
    "live hook": (),
}


def name_of(arguments: argparse.Namespace) -> str:
    """The command with its action, as in "tasks build"."""
    match arguments.command:  # "live serve" and its like hold the action already
        case "tasks" | "weights" | "fleet" | "corpus" as command:
            return f"{command} {arguments.action}"
        case "doctor" if arguments.check is not None:
            return f"doctor {arguments.check}"
        case command:
            return command


def extras_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The extras that a parsed command line needs."""
    match name := name_of(arguments):
        case "train":
            return () if arguments.dry_run else ("train",)
        case "apply":
            return ("serve",) if arguments.model is not None else ()
        case "corpus sessions" if arguments.live is not None:
            return "play", "live"
        case "eval":
            return _of_evaluation(arguments)
    return _ALWAYS.get(name, _ALWAYS.get(name.partition(" ")[0], ()))


def _of_evaluation(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The extras of `etude eval`: models behind chat APIs alone need no engine."""
    models = [model for model in (arguments.model, arguments.against) if model]
    suites: list[Path] = arguments.suite
    edits = any(str(suite) == "fast-apply" or suite.suffix == ".parquet" for suite in suites)
    engine = any("://" not in model for model in models)
    return (*(("serve",) if engine else ()), *(("apply",) if edits else ()))
