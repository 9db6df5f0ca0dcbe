"""The documents in a run's rows: provenance.jsonl of the run folder, a line for each window of rows.

Each row is a list of pieces: a document, its first token in the row and the number of tokens, the separator included.
So every token of a row but padding is in one piece, and a step's rows are known by their numbers. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from etude.errors import UserError

NAME = "provenance.jsonl"


class WindowTrace(msgspec.Struct, frozen=True):
    """A window's line: its number, the number of its first row in the run, files, documents (id, source, number of the
    file, line), and the pieces of each row: document, first token, number of tokens, again and again."""

    window: int
    row: int
    files: list[str]
    documents: list[tuple[str, str, int, int]]
    rows: list[list[int]]


class _WindowNumber(msgspec.Struct):
    window: int


@dataclass(frozen=True)
class TracedPiece:
    """Tokens `first` to `first + count` of a document, which are a part of a row of the run; `line` is 0 in a .json.
    The last one may be the separator behind the document."""

    row: int
    id: str
    source: str
    file: str
    line: int
    first: int
    count: int


def add(run: Path, line: str) -> None:
    """Appends the line of a window. Raises UserError if the disk is full."""
    try:
        with (run / NAME).open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as e:
        raise UserError(f"{run / NAME} cannot be written: {e.strerror}; check the disk") from None


def cut(run: Path, window: int) -> None:
    """Drops the lines from a window on, which a killed run has written, and a half-written one."""
    path, end = run / NAME, 0
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or msgspec.json.decode(line, type=_WindowNumber).window >= window:
                break
            end += len(line)
    os.truncate(path, end)


def trace(run: Path, step: int) -> Iterator[TracedPiece]:
    """The pieces of the rows of an optimizer step, counted from 1. Raises UserError if the run has no such step, or
    none of a user's files."""
    path = run / NAME
    if not path.is_file():
        raise UserError(f"{run} has no {NAME}: it is no run of stage midtrain or sft on [data], or has not begun")
    batch = _batch(run)
    rows = range((step - 1) * batch, step * batch)
    traced = False
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):  # is being written
                break
            window = msgspec.json.decode(line, type=WindowTrace)
            for number in range(max(rows.start, window.row), min(rows.stop, window.row + len(window.rows))):
                traced = True
                yield from _pieces(window, number)
            if window.row + len(window.rows) >= rows.stop:
                return
    if not traced:
        raise UserError(f"{run} has no step {step} yet")


def _pieces(window: WindowTrace, number: int) -> Iterator[TracedPiece]:
    pieces = window.rows[number - window.row]
    for document, first, count in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        name, source, file, line = window.documents[document]
        yield TracedPiece(number, name, source, window.files[file], line, first, count)


class _StepShape(msgspec.Struct):
    batch: int


class _Configuration(msgspec.Struct):
    trainer: _StepShape


def _batch(run: Path) -> int:
    try:
        return msgspec.json.decode((run / "config.json").read_bytes(), type=_Configuration).trainer.batch
    except (OSError, msgspec.MsgspecError):
        raise UserError(f"{run} is no run folder of stage midtrain or sft: config.json is missing or damaged") from None
