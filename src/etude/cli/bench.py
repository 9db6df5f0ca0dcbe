"""`etude bench NAME`: a benchmark of the package `benchmarks`, which is no part of the package etude."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

from etude.config import bundled
from etude.errors import UserError

# Name of the command line -> module.
BENCHMARKS = {
    "async": "asynchrony",
    "corpus": "corpus",
    "documents": "documents",
    "edits": "edits",
    "engine": "engine",
    "fleet": "fleet",
    "floods": "floods",
    "live": "live",
    "mismatch": "mismatch",
    "models": "models",
    "ranks": "ranks",
    "real-model": "real_model",
    "sandbox": "sandbox",
    "shared-prompt": "shared_prompt",
    "weights": "weights",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude bench`."""
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--record", type=Path, metavar="FILE", help="data file of docs/results.md that gets the result")
    parser.add_argument("--conditions", help="what the record says of them, instead of the machine's load before")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Prints the benchmark's rows and its result as JSON; 1 if a check of it failed. Raises UserError."""
    package = bundled("benchmarks")
    if package is None:
        raise UserError("this installation has no benchmarks: install etude's wheel, or work in its repository")
    if arguments.record is not None and not arguments.record.parent.is_dir():
        raise UserError(f"--record {arguments.record}: there is no folder {arguments.record.parent}; make it first")
    if arguments.record is not None and arguments.record.is_dir():
        raise UserError(f"--record {arguments.record} is a folder: give a file in it")
    sys.path.insert(0, str(package.parent))
    conditions = arguments.conditions or f"Load {os.getloadavg()[0]:.1f} before."
    result = importlib.import_module(f"benchmarks.{BENCHMARKS[arguments.name]}").run(quick=arguments.quick)
    if not arguments.json:
        for row in result["rows"]:
            print(f"{row['case']:40} {row['value']:>12.4g} {row['unit']:10} {row['baseline']}")
    print(json.dumps(result))
    if arguments.record is not None:
        command = " ".join(["etude bench", arguments.name, *["--quick"] * arguments.quick, "--json"])
        importlib.import_module("benchmarks.results").record(arguments.record, result, command, conditions)
    failed = [name for name, ok in result["checks"].items() if not ok]
    if failed:
        few = "; with --quick a check may fail by chance, so repeat without it" if arguments.quick else ""
        print(f"etude: {arguments.name} fails its checks: {', '.join(failed)}{few}", file=sys.stderr)
    return 1 if failed else 0
