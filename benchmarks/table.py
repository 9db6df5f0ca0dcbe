"""What a benchmark gives back: rows that a reader compares, and checks that must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def row(case: str, value: float, unit: str, baseline: str = "") -> dict[str, Any]:
    """One figure, and what it is measured against."""
    return {"case": case, "value": value, "unit": unit, "baseline": baseline}


@dataclass(frozen=True)
class Table:
    """The result of the benchmark `bench` in the making."""

    bench: str
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    checks: dict[str, bool] = field(default_factory=dict[str, bool])

    def add(self, case: str, value: float, unit: str, baseline: str = "") -> None:
        """Appends a row."""
        self.rows.append(row(case, value, unit, baseline))

    def result(self) -> dict[str, Any]:
        """What `etude bench` prints as JSON."""
        return {"bench": self.bench, "rows": self.rows, "checks": self.checks}
