"""Tables of applied edits: file, sketch and result of each edit, with its source, licence and weight."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from etude.errors import UserError

BINS = (0.02, 0.08, 0.25)  # upper ends of the shares of a file that an edit changes; the last bin is open
_SHORT = 100  # files of fewer lines have a quarter of the weight


@dataclass(frozen=True)
class Example:
    """One edit. `kind` is real (made by people), synthetic or no-op; `origin` is commits, releases or files. `merges`
    is whether the deterministic merge of the sketch gives the result; `fraction` is the share of the file's characters
    that the edit changes; `weight` is relative to the mean of its table."""

    id: str
    repository: str
    licence: str
    origin: str
    path: str
    language: str
    kind: str
    noise: tuple[str, ...]
    merges: bool
    instruction: str
    file: str
    sketch: str
    result: str
    lines: int
    fraction: float
    weight: float = 1.0

    @property
    def size(self) -> int:
        """Index of the edit-fraction bin."""
        return sum(self.fraction > edge for edge in BINS)


def weighted_examples(examples: Sequence[Example]) -> list[Example]:
    """The examples with weights: a quarter for short files, equal mass for every edit-fraction bin, mean 1."""
    short = [0.25 if e.lines < _SHORT else 1.0 for e in examples]
    mass = [0.0] * (len(BINS) + 1)
    for example, weight in zip(examples, short, strict=True):
        mass[example.size] += weight
    raw = [weight / mass[e.size] for e, weight in zip(examples, short, strict=True)]
    mean = sum(raw) / max(len(raw), 1)
    return [replace(e, weight=w / mean) for e, w in zip(examples, raw, strict=True)]


def write_examples(examples: Sequence[Example], path: Path) -> None:
    """Write the examples as a Parquet file. Raises UserError if pyarrow is not installed."""
    arrow, parquet = _pyarrow()
    table = arrow.Table.from_pylist([asdict(e) | {"noise": list(e.noise)} for e in examples])
    parquet.write_table(table, path, compression="zstd", compression_level=15)


def load_examples(path: Path) -> list[Example]:
    """Read the examples of a file that `write_examples` made. Raises UserError for any other file."""
    arrow, parquet = _pyarrow()
    if not path.is_file():
        raise UserError(f"{path} does not exist: make it with `etude tasks fast-apply REPO... -o DIR`")
    try:
        rows = parquet.read_table(path).to_pylist()
        return [Example(**{**row, "noise": tuple(row["noise"])}) for row in rows]
    except (arrow.ArrowInvalid, TypeError, KeyError):
        raise UserError(f"{path} is not a table of edits: make one with `etude tasks fast-apply`") from None


def _pyarrow() -> tuple[Any, Any]:
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet
