"""Fingerprints -> numbers: one row per sample, columns that know which probe they come from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.audit.parity.fingerprint import FORMAT
from etude.errors import UserError

MAX_VALUES = 30  # columns of one probe's texts or list entries, the most common ones


@dataclass(frozen=True)
class FingerprintSample:
    """One fingerprint. Samples of one `machine` never stand on both sides of a fold."""

    machine: str
    probes: Mapping[str, Any]

    @property
    def is_request(self) -> bool:
        """It is of what an agent asks of its model, and not of a machine."""
        return "prompt.system" in self.probes


@dataclass(frozen=True)
class Table:
    """`values_NC`: samples by columns; `probes[c]` is where column c comes from, `names[c]` what it says."""

    values_NC: np.ndarray
    probes: tuple[str, ...]
    names: tuple[str, ...]

    def only(self, keep: Sequence[bool]) -> Table:
        """The columns for which `keep` is true."""
        chosen = [c for c, wanted in enumerate(keep) if wanted]
        return Table(
            self.values_NC[:, chosen], tuple(self.probes[c] for c in chosen), tuple(self.names[c] for c in chosen)
        )


def read(paths: Sequence[Path]) -> list[FingerprintSample]:
    """The samples in files that `fingerprint.py` has printed. Raises UserError that names the file and the line."""
    samples: list[FingerprintSample] = []
    for path in paths:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(
                f"{path} cannot be read ({e}); record one with `etude doctor parity --record FILE` in production"
            ) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                samples.append(parse(line, f"{path}, line {number}"))
    if not samples:
        raise UserError("there is no fingerprint in what --against names; record some on your production machines")
    return samples


def parse(line: str, where: str) -> FingerprintSample:
    """One line. Raises UserError."""
    try:
        record = json.loads(line)
        version, name, probes = record["format"], record["machine"], record["probes"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where} is no fingerprint; record it again with this etude's script") from None
    if version != FORMAT or not isinstance(name, str) or not isinstance(probes, dict):
        raise UserError(f"{where} has fingerprint format {version!r}, this etude reads {FORMAT}; record it again")
    return FingerprintSample(name, probes)


def table(samples: Sequence[FingerprintSample]) -> Table:
    """Every probe as columns: numbers by the logarithm of their size, texts and list entries as 0 or 1, and `missing`.

    Columns that are the same everywhere are left out.
    """
    columns: list[np.ndarray] = []
    probes: list[str] = []
    names: list[str] = []
    for probe in sorted({name for sample in samples for name in sample.probes}):
        for name, column in _columns([sample.probes.get(probe) for sample in samples]):
            if (column != column[0]).any():
                columns.append(column)
                probes.append(probe)
                names.append(name)
    values_NC = np.stack(columns, axis=1) if columns else np.zeros((len(samples), 0))
    return Table(values_NC, tuple(probes), tuple(names))


def _columns(values: Sequence[Any]) -> list[tuple[str, np.ndarray]]:
    missing = np.array([float(value is None) for value in values])
    numbers = [float(v) if isinstance(v, (bool, int, float)) else None for v in values]
    entries = [_texts(value) for value in values]
    found: list[tuple[str, np.ndarray]] = [("missing", missing)]
    if any(number is not None for number in numbers):
        sizes = np.array([0.0 if n is None else np.sign(n) * np.log1p(abs(n)) for n in numbers])
        found.append(("size", sizes))
    counts = Counter(text for texts in entries for text in texts)
    for text, _ in sorted(counts.most_common(MAX_VALUES)):
        found.append((text, np.array([float(text in texts) for texts in entries])))
    return found


def _texts(value: Any) -> frozenset[str]:
    if isinstance(value, str):
        return frozenset({value})
    return frozenset(str(item) for item in value) if isinstance(value, list) else frozenset()
