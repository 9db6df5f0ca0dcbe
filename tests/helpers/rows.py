"""The rows of files, encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from etude.corpus import LearnedRow, RefusedRow, RowEncoders, chat_files
from etude.corpus.chats import read_row
from etude.renderers import Renderer


def chat_rows(
    paths: Sequence[Path], renderer: Callable[[], Renderer], min_reward: float | None = None
) -> Iterator[LearnedRow | RefusedRow]:
    """Every row of files and folders, in order, as SFT reads them."""
    encoders = RowEncoders(renderer, min_reward=min_reward)
    for path in (file for some in paths for file in chat_files(some)):
        lines = path.read_bytes().split(b"\n") if path.suffix == ".jsonl" else [path.read_bytes()]
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from read_row(f"{path.name}:{number}" if len(lines) > 1 else path.name, line, encoders)
