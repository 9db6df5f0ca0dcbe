"""A process that reads, encodes and packs a run's rows ahead of the training, so that neither waits for the other.

`python -m etude.trainer.finetune.reading RUN DESCRIPTOR PAD PLACE` writes frames into a pipe: held-out rows, then
windows, then the end. A window is made while the one before it waits in the pipe. `RowReader` is the other end. No
torch here.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from etude.corpus import RefusedRow, pack_rows
from etude.corpus.streams import SourceReader
from etude.corpus.windows import (
    PackedRows,
    RowWindow,
    SourceReport,
    StreamPlace,
    WindowMaker,
    held_out_documents,
    write_report,
)
from etude.errors import RunFailed, UserError
from etude.processes import Child, start
from etude.trainer.finetune import data
from etude.trainer.finetune.config import MidtrainConfig, SftConfig

FILE_LIST, REPORT = "files.json", "data.json"
WAIT_SECONDS = 1800.0
"""Deadline of a window."""
NAMED = 10  # refused rows in the log; the report names more
_SIZE = struct.Struct("<Q")
_STOP_SECONDS = 5.0


class StreamOpening(msgspec.Struct, frozen=True, tag="opening"):
    """The first frame: the held-out rows, and lines of the log."""

    held_out: PackedRows | None
    notes: list[str]


class StreamEnd(msgspec.Struct, frozen=True, tag="end"):
    """The last frame; with the sentence of an error if the rows could not be read."""

    error: str = ""


Frame = StreamOpening | RowWindow | StreamEnd


class RowReader:
    """The frames of a run's rows from a place on."""

    def __init__(self, output: Path, pad: int, place: StreamPlace) -> None:
        self._from, into = os.pipe()
        arguments = [str(output.absolute()), str(into), str(pad), msgspec.json.encode(place).decode()]
        try:
            self._child: Child = start("reader", [__spec__.name, *arguments], None, holds=[into], apart=True)
        finally:
            os.close(into)

    @property
    def pid(self) -> int:
        """The process that reads."""
        return self._child.popen.pid

    def frame(self) -> Frame:
        """The next frame. Raises UserError for the reader's, RunFailed if it has ended without one, or after
        `WAIT_SECONDS`."""
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        frame = msgspec.msgpack.decode(self._read(size), type=Frame)
        if isinstance(frame, StreamEnd) and frame.error:
            raise UserError(frame.error)
        return frame

    def _read(self, size: int) -> bytes:
        data, until = bytearray(), time.monotonic() + WAIT_SECONDS
        while len(data) < size:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise RunFailed(f"the reader of the data gave no rows in {WAIT_SECONDS:.0f} seconds; resume the run")
            part = os.read(self._from, min(size - len(data), 2**20))
            if not part:
                if not self._child.ends(_STOP_SECONDS):
                    self._child.stop(_STOP_SECONDS)
                raise RunFailed(f"{self._child.end()}; resume the run")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Ends the process."""
        self._child.stop(_STOP_SECONDS)
        os.close(self._from)


def main(output: Path, into: int, pad: int, place: StreamPlace) -> None:
    """Writes the frames of a run."""
    with os.fdopen(into, "wb") as pipe:

        def send(frame: Frame) -> None:
            body = msgspec.msgpack.encode(frame)
            pipe.write(_SIZE.pack(len(body)))
            pipe.write(body)
            pipe.flush()

        try:
            _read_all(output, pad, place, send)
        except UserError as e:
            send(StreamEnd(str(e)))
        except BrokenPipeError:  # the training has ended
            os._exit(0)


def _read_all(output: Path, pad: int, place: StreamPlace, send: Callable[[Frame], None]) -> None:
    """Sends the held-out rows, then the windows from `place` on. Raises UserError for files that have changed or hold
    no row to learn from."""
    values = json.loads((output / "config.json").read_text(encoding="utf-8"))
    kinds = {"midtrain": MidtrainConfig, "sft": SftConfig}
    config = kinds[values["stage"]].model_validate(values)
    stream = data.StreamData.of(config)
    data.keep_files(stream.files, output / FILE_LIST)
    tests, readers = stream.readers(held_out=True), stream.readers()
    _restore(readers, place, output / REPORT)
    held_out = held_out_documents(tests, data.HELD_OUT_TOKENS)
    packing = {"pad": pad, "separator": stream.separator}
    packed = None
    if held_out:
        label = stream.separator is not None
        packed = PackedRows.of(pack_rows(held_out, stream.length, **packing, label_separator=label))
    send(StreamOpening(packed, _notes(tests)))
    together = config.trainer.tokens is None
    maker = WindowMaker(readers, stream.length, seed=stream.seed, together=together, place=place, **packing)
    named = sum(len(reader.named) for reader in readers)
    while True:
        try:
            window = maker.window()
        finally:  # the report says why there is no row
            write_report(output / REPORT, report_of(readers, tests))
        if window is None:
            break
        if (now := sum(len(reader.named) for reader in readers)) > named:
            window = msgspec.structs.replace(window, notes=[*_refused(readers, named), *window.notes])
            named = now
        send(window)
    if not maker.place.row:
        raise UserError(f"no row of {readers[0].source.label} can be learned from")
    send(StreamEnd())


def _restore(readers: Sequence[SourceReader], place: StreamPlace, report: Path) -> None:
    """Sets readers to a place; the names of refused rows before it are those of the report."""
    before = msgspec.json.decode(report.read_bytes(), type=dict[str, SourceReport]) if place.cursors else {}
    for reader, cursor in zip(readers, place.cursors, strict=False):
        reader.go_to(cursor, [RefusedRow(one["row"], one["why"]) for one in before[_key(reader)].refused])


def _key(reader: SourceReader) -> str:
    return reader.source.label.removeprefix("data.")


def report_of(readers: Sequence[SourceReader], tests: Sequence[SourceReader]) -> dict[str, SourceReport]:
    """The rows of sources that were read, and of the held-out ones."""
    parts = {_key(reader): SourceReport.of(reader) for reader in readers}
    return parts | {data.HELD_OUT: SourceReport.sum(map(SourceReport.of, tests))}


def _refused(readers: Sequence[SourceReader], before: int) -> list[str]:
    """Lines of the log about the first refused rows of a run, `before` of which are in the log."""
    named = [one for reader in readers for one in reader.named]
    lines = [f"refused: {one.name}: {one.why}" for one in named[before:NAMED]]
    return [*lines, "further refused rows are in data.json"] if before < NAMED < len(named) else lines


def _notes(tests: Sequence[SourceReader]) -> list[str]:
    if not tests:
        return []
    whole = SourceReport.sum(map(SourceReport.of, tests))
    return [f"data.held_out: {whole.rows:,} rows, {whole.tokens:,} tokens, {whole.refused_rows:,} refused"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), msgspec.json.decode(sys.argv[4], type=StreamPlace))
