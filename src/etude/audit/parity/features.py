"""Fingerprints as numbers: one row per sample, and columns with the name of the probe that they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.sandbox import FingerprintSample

MAX_VALUES = 30  # columns of one probe's texts or list entries, the most common ones


@dataclass(frozen=True)
class Table:
    """`values_NC`: samples by columns. `probes[c]` is the probe of column c, `names[c]` a value or kind."""

    values_NC: np.ndarray
    probes: tuple[str, ...]
    names: tuple[str, ...]

    def only(self, keep: Sequence[bool]) -> Table:
        """The columns for which `keep` is true."""
        chosen = [c for c, wanted in enumerate(keep) if wanted]
        return Table(
            self.values_NC[:, chosen], tuple(self.probes[c] for c in chosen), tuple(self.names[c] for c in chosen)
        )


def table(samples: Sequence[FingerprintSample]) -> Table:
    """Probes as columns, where they differ: logarithms of numbers, texts and list entries as 0 or 1, and `missing`."""
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
    columns: list[tuple[str, np.ndarray]] = [("missing", missing)]
    if any(number is not None for number in numbers):
        sizes = np.array([0.0 if n is None else np.sign(n) * np.log1p(abs(n)) for n in numbers])
        columns.append(("size", sizes))
    counts = Counter(text for texts in entries for text in texts)
    for text, _ in sorted(counts.most_common(MAX_VALUES)):
        columns.append((text, np.array([float(text in texts) for texts in entries])))
    return columns


def _texts(value: Any) -> frozenset[str]:
    if isinstance(value, str):
        return frozenset({value})
    return frozenset(str(item) for item in value) if isinstance(value, list) else frozenset()
