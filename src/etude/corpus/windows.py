"""Windows of packed rows from several sources, mixed by weight.

Documents come from the source that is furthest behind its share of the tokens, until there are enough of them to be
packed with little waste. The rows of a window are in a random order. A window depends on the cursors at its beginning,
its number and the seed alone, so it can be made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from etude import runfolder
from etude.corpus.packing import Encoded, Rows, pack_pieces
from etude.corpus.streams import Cursor, SourceReader, StreamDocument
from etude.errors import UserError

DOCUMENTS = 2048
_ROWS = 128  # a window's last row may be half empty: of so many rows that is less than 0.4 %
_TOKENS = 2**19


class StreamPlace(msgspec.Struct):
    """A place between two windows: the number of the next window, of its first row, and the cursors of the sources."""

    window: int = 0
    row: int = 0
    cursors: list[Cursor] = []


class PackedRows(msgspec.Struct, frozen=True):
    """Rows as bytes, to be sent."""

    length: int
    ids: bytes
    mask: bytes
    starts: bytes

    @classmethod
    def of(cls, rows: Rows) -> PackedRows:
        """These rows."""
        return cls(rows.ids.shape[1], rows.ids.tobytes(), rows.mask.tobytes(), rows.starts.tobytes())

    def rows(self) -> Rows:
        """The rows, read-only."""
        ids, mask, starts = (
            np.frombuffer(data, kind).reshape(-1, self.length)
            for data, kind in ((self.ids, np.uint32), (self.mask, np.uint8), (self.starts, np.uint8))
        )
        return Rows(ids, mask, starts)


class RowWindow(msgspec.Struct, frozen=True, tag="window"):
    """The rows of a window, and the place before it. `begin` and `end` are the shares of the data that are read before
    and after it. `trace` is the line of the run's provenance, `notes` are lines of the log."""

    place: StreamPlace
    packed: PackedRows
    begin: float
    end: float
    trace: str
    notes: list[str]


@dataclass
class WindowMaker:
    """Makes the windows of a run from `place` on. With `together` the data ends where the first of the sources ends,
    otherwise with the last one."""

    readers: Sequence[SourceReader]
    length: int
    pad: int
    separator: int | None
    seed: int
    together: bool
    place: StreamPlace = field(default_factory=StreamPlace)

    @property
    def share(self) -> float:
        """The share of the data that is read."""
        shares = [reader.share for reader in self.readers]
        return max(shares) if self.together else min(shares)

    def window(self) -> RowWindow | None:
        """The next window; None at the end. Raises UserError if a source has no row to learn from."""
        before = StreamPlace(self.place.window, self.place.row, _copied(self.readers))
        begin, notes = self.share, list[str]()
        documents = self._documents(notes)
        if not documents:
            return None
        encoded: list[Encoded] = [(one.ids, one.mask) for one in documents]
        rows, pieces = pack_pieces(
            encoded, self.length, pad=self.pad, separator=self.separator, label_separator=self.separator is not None
        )
        order = np.random.default_rng([self.seed, before.window]).permutation(len(rows.ids))
        mixed = Rows(rows.ids[order], rows.mask[order], rows.starts[order])
        trace = _trace(before, documents, [[n for piece in pieces[row] for n in piece] for row in order.tolist()])
        self.place = StreamPlace(before.window + 1, before.row + len(order))
        return RowWindow(before, PackedRows.of(mixed), begin, self.share, trace, notes)

    def _documents(self, notes: list[str]) -> list[StreamDocument]:
        documents: list[StreamDocument] = []
        tokens = 0
        while live := [reader for reader in self.readers if not reader.ended]:
            if self.together and len(live) < len(self.readers):
                break
            enough = len(documents) >= DOCUMENTS or tokens >= _TOKENS
            if enough and tokens >= _ROWS * self.length:
                break
            reader = min(live, key=lambda reader: reader.cursor.taken / reader.source.weight)
            epoch = reader.cursor.epoch
            some = reader.documents()
            documents += some
            tokens += sum(len(one.ids) for one in some)
            if reader.cursor.epoch > epoch:
                notes += _at_epoch(reader, alone=len(self.readers) == 1 or self.together)
                if len(self.readers) == 1 and documents:
                    break  # a row does not hold a document twice
        return documents


def _at_epoch(reader: SourceReader, *, alone: bool) -> list[str]:
    """The lines of the log at the end of a source's epoch. Raises UserError if it has no row to learn from."""
    at, label, notes = reader.cursor, reader.source.label, list[str]()
    if not at.rows:
        raise UserError(f"no row of {label} can be learned from; data.json of the run folder says why")
    if at.epoch == 1:
        notes.append(f"{label}: {at.rows:,} rows to learn from, {at.tokens:,} tokens, {at.refused:,} refused")
    if reader.ended and not alone:
        notes.append(f"{label} has ended, read {at.epoch} times: its weight goes to the others")
    return notes


def _copied(readers: Sequence[SourceReader]) -> list[Cursor]:
    return [msgspec.structs.replace(reader.cursor) for reader in readers]


def _trace(place: StreamPlace, documents: Sequence[StreamDocument], rows: list[list[int]]) -> str:
    """A line of provenance: `files`, `documents` as [id, source, file, line], and for each row, in order, its pieces:
    document, first token in it, number of tokens, again and again."""
    files = list(dict.fromkeys(one.file for one in documents))
    numbers = {name: number for number, name in enumerate(files)}
    line = {
        "window": place.window,
        "row": place.row,
        "files": files,
        "documents": [[one.id, one.source, numbers[one.file], one.line] for one in documents],
        "rows": rows,
    }
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


def held_out_documents(readers: Sequence[SourceReader], tokens: int) -> list[Encoded]:
    """The first documents of each source, an equal part of `tokens` of each at least."""
    documents: list[Encoded] = []
    for reader in readers:
        while not reader.ended and reader.cursor.taken < tokens / len(readers):
            documents += [(one.ids, one.mask) for one in reader.documents()]
    return documents


class SourceReport(msgspec.Struct):
    """The rows of a source that its first epoch has read."""

    rows: int
    tokens: int
    learned: int
    refused_rows: int
    refused: list[dict[str, str]]

    @classmethod
    def of(cls, reader: SourceReader) -> SourceReport:
        """That of a reader."""
        at = reader.cursor
        named = [{"row": one.name, "why": one.why} for one in reader.named]
        return cls(at.rows, at.tokens, at.learned, at.refused, named)

    @classmethod
    def sum(cls, parts: Iterable[SourceReport]) -> SourceReport:
        """That of several sources."""
        whole = cls(0, 0, 0, 0, [])
        for one in parts:
            counts = (whole.rows + one.rows, whole.tokens + one.tokens, whole.learned + one.learned)
            whole = cls(*counts, whole.refused_rows + one.refused_rows, whole.refused + one.refused)
        return whole


def write_report(path: Path, parts: dict[str, SourceReport]) -> None:
    """Writes the report of all sources, by their labels. Raises UserError if the disk is full."""
    runfolder.write(path, msgspec.json.format(msgspec.json.encode(parts), indent=1))
