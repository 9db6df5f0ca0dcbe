"""Examples of applied edits and the table that holds them: file, sketch and result, with where they come from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from etude.corpus.edits import snippets
from etude.corpus.edits.repositories import FileChange, Repository, Text
from etude.corpus.edits.synthetic import edit
from etude.edits import sketch
from etude.errors import UserError

BINS = (0.02, 0.08, 0.25)  # upper ends of the shares of a file that an edit changes; the last bin is open
_SIZES = (12, 20, 30, 40, 80, 160, 400)  # lines; each example draws the most that it may have
_SHORT = 100  # files of fewer lines weigh a quarter
_TITLE = 60  # characters of a line that an instruction quotes


@dataclass(frozen=True)
class Example:
    """One edit. `kind` is real (made by people), synthetic or no-op; `origin` is commits, releases or files.

    `merges` tells whether the deterministic merge of the sketch gives the result; `fraction` is the share of the
    file's characters that the edit changes; `weight` is relative to the mean of its table.
    """

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


def real(repository: Repository, change: FileChange, most: int, rng: random.Random) -> Example | None:
    """An edit that people made, or the part of it that fits `most` lines."""
    sizes = [size for size in _SIZES if size <= most] or [most]
    found = snippets.parts(change.before, change.after, change.language, rng.choice(sizes), rng)
    return found and pair(repository, change.path, change.language, "real", *found, change.subject, rng)


def synthetic(
    repository: Repository, text: Text, others: Sequence[str], most: int, rng: random.Random
) -> Example | None:
    """An invented edit of a file or of a part of it."""
    part = snippets.part(text.text, text.language, _most(most, rng), rng)
    if part is None or not part.endswith("\n"):
        return None
    result = edit(part, others, rng.choices((1, 2, 3, 5), (5, 3, 2, 1))[0], rng)
    if result is None or not snippets.parses(result, text.language):
        return None
    return pair(repository, text.path, text.language, "synthetic", part, result, "", rng)


def unchanged(repository: Repository, text: Text, most: int, rng: random.Random) -> Example | None:
    """A sketch that changes nothing."""
    part = snippets.part(text.text, text.language, _most(most, rng), rng)
    drawn = part and sketch.no_op(part, text.language, rng)
    return _row(repository, text.path, text.language, "no-op", part, part, drawn, "") if part and drawn else None


def _most(most: int, rng: random.Random) -> int:
    return rng.choice([size for size in _SIZES if size <= most] or [most])


def pair(
    repository: Repository, path: str, language: str, kind: str, before: str, after: str, subject: str,
    rng: random.Random,
) -> Example | None:  # fmt: skip
    """An edit with a sketch drawn for it; None if no sketch determines it."""
    if not after.strip() or not before.strip():
        return None
    drawn = sketch.draw(before, after, language, rng)
    if drawn is None or len(drawn.text) > 2 * len(after) + 400:
        return None
    which = rng.choice(("subject", "template", "empty"))
    instruction = subject if which == "subject" else _template(before, after, rng) if which == "template" else ""
    return _row(repository, path, language, kind, before, after, drawn, instruction)


def _row(
    repository: Repository, path: str, language: str, kind: str, before: str, after: str, drawn: sketch.Sketch,
    instruction: str,
) -> Example:  # fmt: skip
    lines = max(before.count("\n"), after.count("\n"))
    return Example(
        id=hashlib.blake2b("\0".join((before, drawn.text, after)).encode(), digest_size=8).hexdigest(),
        repository=repository.name, licence=repository.licence, origin=repository.origin, path=path, language=language,
        kind=kind, noise=drawn.noise, merges=drawn.merges, instruction=instruction, file=before, sketch=drawn.text,
        result=after, lines=lines, fraction=changed_fraction(before, after),
    )  # fmt: skip


def changed_fraction(before: str, after: str) -> float:
    """Share of the characters that lie in changed lines, of the longer text."""
    file, result = before.splitlines(), after.splitlines()
    changed = sum(
        max(sum(map(len, file[h.start : h.end])), sum(map(len, result[h.low : h.high])))
        for h in sketch.hunks(file, result)
    )
    return min(1.0, changed / max(1, max(sum(map(len, file)), sum(map(len, result)))))


def _template(before: str, after: str, rng: random.Random) -> str:
    """What the first hunk does, in words."""
    file, result = before.splitlines(), after.splitlines()
    hunk = sketch.hunks(file, result)[0]
    old = next((line.strip() for line in file[hunk.start : hunk.end] if line.strip()), "")[:_TITLE]
    new = next((line.strip() for line in result[hunk.low : hunk.high] if line.strip()), "")[:_TITLE]
    if old and new:
        return rng.choice((f"Change `{old}` to `{new}`.", f"Replace `{old}`.", f"Use `{new}`."))
    if new:
        return rng.choice((f"Add `{new}`.", f"Insert `{new}`."))
    return rng.choice((f"Remove `{old}`.", f"Delete `{old}`.")) if old else "Tidy up."


def weighted(examples: Sequence[Example]) -> list[Example]:
    """The examples with weights: a quarter for short files, equal mass for every edit-fraction bin, mean 1."""
    short = [0.25 if e.lines < _SHORT else 1.0 for e in examples]
    mass = [0.0] * (len(BINS) + 1)
    for example, weight in zip(examples, short, strict=True):
        mass[example.size] += weight
    raw = [weight / mass[e.size] for e, weight in zip(examples, short, strict=True)]
    mean = sum(raw) / max(len(raw), 1)
    return [Example(**{**_shallow(e), "weight": w / mean}) for e, w in zip(examples, raw, strict=True)]


def _shallow(example: Example) -> dict[str, Any]:
    return {field.name: getattr(example, field.name) for field in fields(example)}


def write(examples: Sequence[Example], path: Path) -> None:
    """The examples as a Parquet file. Raises UserError if pyarrow is not installed."""
    arrow, parquet = _pyarrow()
    table = arrow.Table.from_pylist([asdict(e) | {"noise": list(e.noise)} for e in examples])
    parquet.write_table(table, path, compression="zstd", compression_level=15)


def load(path: Path) -> list[Example]:
    """The examples of a file that `write` made. Raises UserError if it is none."""
    arrow, parquet = _pyarrow()
    if not path.is_file():
        raise UserError(f"{path} does not exist: make it with `etude tasks fast-apply REPO... -o DIR`")
    try:
        rows = parquet.read_table(path).to_pylist()
        return [Example(**{**row, "noise": tuple(row["noise"])}) for row in rows]
    except (arrow.ArrowInvalid, TypeError, KeyError):
        raise UserError(f"{path} is no table of edits: make it with `etude tasks fast-apply REPO... -o DIR`") from None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("tables of edits need pyarrow: install etude with the extra `apply`") from None
    return pyarrow, parquet
