"""The lines of a file of rows that is not finished: a command that was stopped goes on with them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude import runfolder
from etude.errors import UserError

Progress = Callable[[str, int, int], None]


@contextmanager
def partial_rows(output: Path, header: Mapping[str, Any], of: str) -> Iterator[Path]:
    """The file OUTPUT.partial of lines with a name, held by this process alone; its first line is `header`, with an
    empty name. Raises UserError if another process has it, or if it is of other settings, which `of` names."""
    runfolder.make(output.parent)
    partial = output.with_name(f"{output.name}.partial")
    header = {"name": ""} | dict(header)
    with _held(partial.with_name(f"{output.name}.lock")):
        first = runfolder.read_jsonl(partial, texts=("name",))[:1]
        if first and first[0] != header:
            raise UserError(f"{partial} is of other {of}: remove it, or name another file with -o")
        if not first:
            runfolder.append_json(partial, header)
        yield partial


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Holds the lock of an output file. Raises UserError if another process has it."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes {lock.with_suffix('')}: wait for its end") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
