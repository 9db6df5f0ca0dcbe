"""Items of the attack suite and their results."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.audit.attacks import fingerprints

ITEMS = (
    *(f"A{n}" for n in range(1, 12)),
    *(f"B{n}" for n in range(1, 17)),
    *(f"C{n}" for n in range(1, 16)),
    *(f"D{n}" for n in range(1, 11)),
    *fingerprints.ITEMS,
    *(f"F{n}" for n in range(1, 6)),
    *(f"J{n}" for n in range(1, 7)),
)
OUTSIDE, INSIDE = "outside", "inside"  # how the namespace backend grades
CONTROLS = {"gold", "no-op"}


@dataclass(frozen=True)
class AttackResult:
    """One attack on one grader or box. `problem` is empty if it was stopped."""

    item: str
    name: str
    where: str
    verdict: str
    problem: str = ""
    host: str = ""  # changes of the host's state


@dataclass
class AttackReport:
    """Results of the suite. `skipped`: item -> reason; `absent`: grader -> why it was not compared."""

    results: list[AttackResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def of(self, item: str, *where: str) -> list[AttackResult]:
        """The results of an item, in these places or in all."""
        return [r for r in self.results if r.item == item and (not where or r.where in where)]

    @property
    def summary(self) -> dict[str, object]:
        """Counts on the default backend: an item is stopped if every attack of it was, in both graders."""
        ours = [r for r in self.results if r.where in (OUTSIDE, INSIDE, "box")]
        tried = {r.item for r in ours} & set(ITEMS)
        missed = {r.item for r in ours if r.problem} & tried
        return {
            "items": len(ITEMS),
            "stopped": len(tried - missed),
            "missed": len(missed),
            "host_effects": len([r for r in ours if r.host]),
            "skipped": self.skipped,
        }

    @property
    def problems(self) -> list[AttackResult]:
        """Results on the default backend that were missed, or changed the host."""
        return [r for r in self.results if (r.problem or r.host) and r.where in (OUTSIDE, INSIDE, "box")]

    @property
    def passed(self) -> bool:
        """Whether nothing was missed, nothing changed the host, and honest submissions were graded as they should."""
        controls = [r for r in self.results if r.item in CONTROLS and r.where in (OUTSIDE, INSIDE) and r.problem]
        return not (self.summary["missed"] or self.summary["host_effects"] or controls)
