"""Rows of a user's files, read in a random order and from any place on, in bounded memory.

Files are cut at ends of lines into stretches of about 256 KB. Every epoch of a source reads its stretches in another
order, and a cursor is the place in it. `scan` reads all files once before, for the digests and the stretches.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from etude.corpus.chats import LearnedRow, RefusedRow, RowEncoders, read_row
from etude.errors import UserError
from etude.renderers import one_line

STRETCH_BYTES = 2**18
_NAMED = 1000  # refused rows of a source that are named; all are counted
_REASON = 500  # characters of a reason, which may quote the row


class StreamFile(msgspec.Struct, frozen=True):
    """A file as it was scanned: size in bytes, time of change in nanoseconds, digest of its bytes."""

    path: str
    size: int
    changed: int
    digest: str


@dataclass(frozen=True)
class FileStretch:
    """Whole lines of a file: the bytes from `first` to `last`, from the line number `line` on (0: all of a .json).
    `sizes` are the bytes of the rows of each `source` name, or of all rows under ""."""

    file: StreamFile
    first: int
    last: int
    line: int
    sizes: dict[str, int]


class _NamedSource(msgspec.Struct):
    source: str = ""


_SOURCE = msgspec.json.Decoder(_NamedSource)


def scan(path: Path, *, by_source: bool = False, look: Callable[[bytes], None] | None = None) -> list[FileStretch]:
    """The stretches of a file. With `by_source` sizes are those of each `source` name. `look` sees every line. Raises
    UserError if the file cannot be read."""
    digest, begun = blake3(), list[tuple[int, int, int, Counter[str]]]()
    try:
        with path.open("rb") as file:
            status = path.stat()
            first, line, at = 0, 1, 0
            sizes = Counter[str]()
            for number, text in enumerate(file, 1):
                digest.update(text)
                at += len(text)
                sizes[source_of(text) if by_source else ""] += len(text)
                if look is not None:
                    look(text)
                if at - first >= STRETCH_BYTES and path.suffix == ".jsonl":
                    begun.append((first, at, line, sizes))
                    first, line, sizes = at, number + 1, Counter()
            if at > first:
                begun.append((first, at, line, sizes))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    one = StreamFile(str(path), at, status.st_mtime_ns, digest.hexdigest())
    lines = path.suffix == ".jsonl"
    return [FileStretch(one, first, last, line if lines else 0, dict(sizes)) for first, last, line, sizes in begun]


def source_of(line: bytes) -> str:
    """The `source` name of a row; "" without one."""
    try:
        return _SOURCE.decode(line).source
    except (msgspec.MsgspecError, RecursionError):
        return ""


@dataclass(frozen=True)
class RowSource:
    """A source of rows: its stretches, its weight among the sources, and how often it is read at most. With `only` the
    rows of this `source` name. Without `shuffled` the order is that of the files."""

    label: str
    stretches: Sequence[FileStretch]
    weight: float = 1.0
    epochs: int = 1
    only: str | None = None
    shuffled: bool = True

    @property
    def size(self) -> int:
        """Bytes of its rows."""
        return sum(part.sizes.get(self.only or "", 0) for part in self.stretches)


class Cursor(msgspec.Struct):
    """The next row of a source: the epoch, the place of its stretch in the order of the epoch, its offset in the file
    and its line. `read` are the bytes and `taken` the tokens so far; the counts are those of the first epoch's rows."""

    epoch: int = 0
    place: int = 0
    offset: int = -1
    line: int = 0
    read: int = 0
    taken: int = 0
    rows: int = 0
    tokens: int = 0
    learned: int = 0
    refused: int = 0


@dataclass(frozen=True)
class StreamDocument:
    """A document to learn from, and where it comes from; `line` is 0 in a .json."""

    ids: np.ndarray
    mask: np.ndarray
    id: str
    source: str
    file: str
    line: int


@dataclass
class SourceReader:
    """Reads the rows of a source from a cursor on. Rows of more than `length` tokens are refused, unless `cut`, which
    is mid-training: every token is learned, and rows may be cut. `named` are the first refused rows."""

    source: RowSource
    encoders: RowEncoders
    length: int
    cut: bool
    seed: Sequence[int]
    cursor: Cursor = field(default_factory=Cursor)
    named: list[RefusedRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = self._shuffled()
        self._lines: Iterator[bytes] | None = None  # of the stretch at the cursor

    def go_to(self, cursor: Cursor, named: Sequence[RefusedRow]) -> None:
        """Goes on from a cursor, before which the rows `named` were refused, or some after it as well."""
        self.cursor, self._lines = cursor, None
        self.named = list(named[: cursor.refused])
        self._order = self._shuffled()

    @property
    def ended(self) -> bool:
        """Whether the last epoch is read."""
        return self.cursor.epoch >= self.source.epochs or not self.source.stretches

    @property
    def share(self) -> float:
        """The share of all epochs' bytes that is read."""
        return 1.0 if self.ended else min(1.0, self.cursor.read / max(1, self.source.epochs * self.source.size))

    def documents(self) -> list[StreamDocument]:
        """The documents of the next row; none if it is refused, blank, or of another source."""
        at, stretch = self.cursor, self.source.stretches[self._order[self.cursor.place]]
        if self._lines is None:
            if at.offset < 0:
                at.offset, at.line = stretch.first, stretch.line
            self._lines = _lines(stretch, at.offset)
        text, line, first_epoch = next(self._lines), at.line, at.epoch == 0
        own = self.source.only is None or source_of(text) == self.source.only
        at.offset += len(text)
        at.line += 1 if line else 0
        at.read += len(text) if own else 0
        if at.offset >= stretch.last:
            self._leave()
        if not own or not text.strip():
            return []
        path = Path(stretch.file.path)
        name = f"{path.name}:{line}" if line else path.name
        documents: list[StreamDocument] = []
        for row in read_row(name, text, self.encoders):
            if isinstance(row, LearnedRow) and (not self.cut or row.whole) and len(row.tokens[0]) > self.length:
                why = f"it has {len(row.tokens[0]):,} tokens, more than trainer.length = {self.length:,}"
                row = RefusedRow(row.name, why)
            if isinstance(row, LearnedRow):
                ids, mask = row.tokens
                mask = np.ones_like(mask) if self.cut else mask
                documents.append(StreamDocument(ids, mask, row.id or row.name, row.source, stretch.file.path, line))
            if first_epoch:
                self._count(row, documents)
        at.taken += sum(len(document.ids) for document in documents)
        return documents

    def _count(self, row: LearnedRow | RefusedRow, documents: Sequence[StreamDocument]) -> None:
        at = self.cursor
        if isinstance(row, RefusedRow):
            at.refused += 1
            if len(self.named) < _NAMED:
                self.named.append(RefusedRow(row.name, one_line(row.why, _REASON)))
            return
        at.rows += 1
        at.tokens += len(documents[-1].ids)
        at.learned += int(documents[-1].mask.sum())

    def _leave(self) -> None:
        """Goes to the next stretch, perhaps of the next epoch."""
        at = self.cursor
        self._lines = None
        at.place, at.offset = at.place + 1, -1
        if at.place == len(self._order):
            at.epoch, at.place = at.epoch + 1, 0
            at.read = at.epoch * self.source.size
            self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        count = len(self.source.stretches)
        if not self.source.shuffled:
            return list(range(count))
        return np.random.default_rng([*self.seed, self.cursor.epoch]).permutation(count).tolist()


def _lines(stretch: FileStretch, offset: int) -> Iterator[bytes]:
    """The lines of a stretch from an offset on; all of a .json is one. Raises UserError if the file has changed."""
    path = Path(stretch.file.path)
    try:
        with path.open("rb") as file:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (stretch.file.size, stretch.file.changed):
                raise UserError(changed(path))
            file.seek(offset)
            data = file.read(stretch.last - offset)
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    return iter(io.BytesIO(data)) if stretch.line else iter([data])


def changed(path: Path | str) -> str:
    """The sentence about a file that is not as it was."""
    return f"{path} has changed since the run began: put the old file back and resume, or begin a new run"
