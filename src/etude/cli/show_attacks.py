"""Plays the attack suite and prints its report, for `etude doctor sandbox`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from etude.audit.attacks import suite
from etude.audit.attacks.fingerprints import Against
from etude.audit.attacks.report import DEFAULT, IN_PROCESS, ITEMS, AttackReport, AttackResult
from etude.config import SandboxConfig


def table(report: AttackReport) -> str:
    """The report as a table of items, one column per place."""
    places = [
        w for w in (DEFAULT, IN_PROCESS, "box", "subprocess", "bwrap") if any(r.where == w for r in report.results)
    ]
    shown = Table("item", *places, "host", title="attacks", expand=False)
    for item in ("gold", "no-op", *ITEMS):
        if item in report.skipped:
            shown.add_row(item, *["-"] * len(places), f"skipped: {report.skipped[item]}")
            continue
        cells = [_cell(report.of(item, place)) for place in places]
        hosts = {r.host for r in report.of(item, DEFAULT, IN_PROCESS, "box") if r.host}
        shown.add_row(item, *cells, "[red]" + "; ".join(hosts) if hosts else "unchanged")
    console = Console(width=int(os.environ.get("COLUMNS", "140")))
    with console.capture() as text:
        console.print(shown)
        for name, reason in report.absent.items():
            console.print(f"{name}: skipped, {reason}")
    return text.get()


def _cell(results: Sequence[AttackResult]) -> str:
    if not results:
        return ""
    bad = [r for r in results if r.problem]
    if bad:
        return f"[red]{len(bad)} of {len(results)} missed: {bad[0].name}"
    words = [r.verdict.split(" ")[0].rstrip(":") for r in results]
    return ", ".join(f"{words.count(w)} {w}" if len(words) > 1 else w for w in dict.fromkeys(words))


def show_attacks(config: SandboxConfig, against: Against | None = None, *, as_json: bool, quick: bool) -> int:
    """Print the table, or the summary on one line; 1 if an attack was missed or had an effect on the host."""
    with Console(stderr=True).status("attacks") as status:
        report = asyncio.run(suite.run(config, against, quick=quick, progress=status.update))
    if not as_json:
        print(table(report), end="")
    for result in report.problems:
        line = f"{result.item} {result.name} ({result.where}): {result.problem or result.host}"
        print(line, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(report.summary))
    else:
        counts = "{stopped} of {items} stopped, {missed} missed".format(**report.summary)
        print(counts, f"and {len(report.skipped)} skipped")
    return 0 if report.passed else 1
