"""`etude tasks fast-apply`: the library function with a progress bar and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.cli.progress import bar
from etude.corpus.edits.build import EditTableOptions, build


def make(training: Sequence[str], evaluation: Sequence[str], output: Path, **options: Any) -> int:
    """Makes the tables and says what came of it; `options` are those of `EditTableOptions`."""
    settings = EditTableOptions(**options)
    with bar() as progress:
        train, tested = build(training, evaluation, output, settings, progress)
    print(f"{len(train)} edits to train on and {len(tested)} held-out ones in {output}; see {output / 'DATACARD.md'}")
    return 0
