"""The steps of a run over rows that are read while it trains.

Rank 0 reads (`reading.py`) and sends every window to the others, so all ranks take the same rows. A checkpoint holds
the place before the window in use and the number of its rows that are taken: a resumed run makes this window again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from etude.corpus import Rows, join_rows
from etude.corpus.windows import RowWindow, StreamPlace
from etude.errors import UserError
from etude.trainer import checkpoint as checkpoints
from etude.trainer.finetune import provenance
from etude.trainer.finetune.passes import TrainingPass
from etude.trainer.finetune.reading import FILE_LIST, Frame, RowReader, StreamOpening
from etude.trainer.world import World

log = logging.getLogger(__name__)


class RowsTaken(msgspec.Struct, frozen=True):
    """The place before the window in use, and the number of its rows that are taken."""

    place: StreamPlace
    rows: int


class StreamedRows:
    """The rows of a run's files, window by window, and the held-out rows. `first` is made before the training begins
    for a run that has no checkpoint: without a row to learn from, the run has not begun."""

    def __init__(self, output: Path, pad: int, world: World) -> None:
        self._output, self._pad, self._world = output, pad, world
        self._reader: RowReader | None = None
        self._ahead: list[Frame] = []
        self.held_out: Rows | None = None
        if world.agree(lambda: not checkpoints.versions(output / "checkpoints")):
            try:
                self.start(StreamPlace())
                self._ahead = [self._shared()]
            except UserError:
                self.close()
                world.only_first(self._forget)
                raise

    def start(self, place: StreamPlace) -> None:
        """Goes to a place, unless this is the beginning, where it is already. Raises UserError if files have
        changed."""
        if self._reader is not None or self._ahead:
            return
        if self._world.first:
            self._reader = RowReader(self._output, self._pad, place)
            provenance.cut(self._output, place.window)
        opening = self._shared()
        assert isinstance(opening, StreamOpening)
        self.held_out = None if opening.held_out is None else opening.held_out.rows()
        self._log(opening.notes)

    def window(self) -> RowWindow | None:
        """The next window; None at the end. Raises UserError for files that have changed meanwhile."""
        frame = self._ahead.pop() if self._ahead else self._shared()
        if not isinstance(frame, RowWindow):
            return None
        self._log(frame.notes)
        if self._world.first:
            provenance.add(self._output, frame.trace)
        return frame

    def close(self) -> None:
        """Ends the reading."""
        if self._reader is not None:
            self._reader.close()

    def _forget(self) -> None:
        """Undoes the beginning of the run, but for the report."""
        for name in (FILE_LIST, "config.json"):
            (self._output / name).unlink(missing_ok=True)

    def _shared(self) -> Frame:
        """The next frame, on all ranks."""
        frames: list[Frame] = []
        self._world.at("the next rows of the data")
        self._world.only_first(lambda: frames.append(self._reader.frame()) if self._reader else None)
        return self._world.agree(lambda: frames[0], Frame)

    def _log(self, notes: Sequence[str]) -> None:
        for note in notes if self._world.first else ():
            log.warning(note) if note.startswith("refused") else log.info(note)


class StreamedSteps:
    """Steps of `batch` rows, fewer in the last one, whose passes `of_step` makes."""

    def __init__(self, rows: StreamedRows, batch: int, of_step: Callable[[Rows], Sequence[TrainingPass]]) -> None:
        self._source, self._batch, self._of_step = rows, batch, of_step
        self._window: RowWindow | None = None
        self._rows: Rows | None = None  # of the window
        self._taken = 0  # rows of the window
        self._ended = False

    def start(self, done: int, state: str) -> None:
        """Goes to the place of a checkpoint."""
        taken = msgspec.json.decode(state, type=RowsTaken) if state else RowsTaken(StreamPlace(), 0)
        self._source.start(taken.place)
        if state:
            self._next()
            self._taken = taken.rows

    def take(self) -> Sequence[TrainingPass] | None:
        """The passes of the next rows."""
        parts: list[Rows] = []
        wanted = self._batch
        while wanted and not self._ended:
            if self._rows is None or self._taken == len(self._rows.ids):
                self._next()
                continue
            some = slice(self._taken, self._taken + wanted)
            parts.append(Rows(self._rows.ids[some], self._rows.mask[some], self._rows.starts[some]))
            self._taken += len(parts[-1].ids)
            wanted -= len(parts[-1].ids)
        return self._of_step(join_rows(parts)) if parts else None

    @property
    def share(self) -> float:
        """The share of the data's bytes whose rows are taken."""
        if self._window is None or self._rows is None:
            return 0.0
        begin, end = self._window.begin, self._window.end
        return 1.0 if self._ended else begin + (end - begin) * (self._taken / len(self._rows.ids))

    def state(self) -> str:
        """The window in use, and the rows of it that are taken."""
        place = StreamPlace() if self._window is None else self._window.place
        return msgspec.json.encode(RowsTaken(place, self._taken)).decode()

    def _next(self) -> None:
        """Goes to the next window; at the end it stays at the last."""
        window = self._source.window()
        if window is None:
            self._ended = True
            return
        self._window, self._rows, self._taken = window, window.packed.rows(), 0
