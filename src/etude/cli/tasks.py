"""`etude tasks build` and `etude tasks check`: the library functions with a progress bar and a summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.cli.progress import bar
from etude.tasks import check as checking
from etude.tasks import synthesis
from etude.tasks.build import build as build_dataset
from etude.tasks.options import BuildOptions

SHOWN_FAILURES = 20


def build(repository: Path, output: Path, write_tests: str | None, **options: Any) -> int:
    """Makes the dataset and says what came of it; `write_tests` is the command of a writer of tests."""
    writer = None if write_tests is None else synthesis.by_command(write_tests)
    with bar() as progress:
        dataset = build_dataset(repository, output, BuildOptions(**options), progress, writer)
    counts = dataset.manifest.counts
    print(f"{counts['train']} train and {counts['heldout']} held-out tasks in {output}; see {output / 'DATACARD.md'}")
    return 0


def check(folder: Path) -> int:
    """Runs the gates again; 1 if one does not hold."""
    with bar() as progress:
        report = checking.check(folder, progress)
    found = [*report.problems, *(f"{task}: {why}" for task, why in sorted(report.failures.items()))]
    for line in found[:SHOWN_FAILURES]:
        print(line)
    if len(found) > SHOWN_FAILURES:
        print(f"and {len(found) - SHOWN_FAILURES} more")
    print(f"{report.tasks} tasks checked: {'all gates hold' if report.ok else f'{len(found)} problems'}")
    return 0 if report.ok else 1
