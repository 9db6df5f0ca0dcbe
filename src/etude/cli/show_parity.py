"""Prints the parity audit and the comparison of two runs, for `etude doctor parity`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs

from etude.audit.parity import audit, pairs
from etude.audit.parity.audit import GATE, ParityAudit, ParityComparison
from etude.evals.stats import Estimate

SHOWN = 10  # probes that tell boxes apart


def show_record(path: Path, samples: int) -> int:
    """Append fingerprints of this machine to a file, and say so. Raises UserError."""
    audit.record(path, samples)
    print(f"{samples} fingerprints appended to {path}; read them before you hand them on")
    return 0


def show_parity(
    files: Sequence[Path], boxes: int, *, as_json: bool, dataset: Path | None = None,
    machine_profiles: Path | None = None,
) -> int:  # fmt: skip
    """Print the audit; 1 if treated boxes are told apart more often than the gate allows. Raises UserError."""
    comparison = audit.against(files, boxes, dataset=dataset, machine_profiles=machine_profiles)
    if as_json:
        print(json.dumps(_summary(comparison)))
    else:
        _print(comparison)
    return 0 if comparison.passed else 1


def show_pairs(runs: Sequence[Path], prefix: str, *, as_json: bool) -> int:
    """Print the comparison of two runs; 1 if hacks or remarks on a test differ. Raises UserError."""
    first, second = (pairs.read(run, prefix) for run in runs)
    compared = pairs.compare(first, second)
    if as_json:
        rows = [asdict(pair) | {"difference": structs.asdict(pair.difference)} for pair in compared]
        print(json.dumps({"pairs": rows}))
    else:
        print(f"{'':32} {'first':>9} {'second':>9}  difference, 95 %   ({len(first)} and {len(second)} episodes)")
        for pair in compared:
            d, mark = pair.difference, " *" if pair.differs else ""
            means = f"{pair.name:32} {pair.first:9.3f} {pair.second:9.3f}"
            print(f"{means}  {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]{mark}")
    return int(pairs.telling(compared))


def _summary(comparison: ParityComparison) -> dict[str, Any]:
    def part(audit: ParityAudit) -> dict[str, Any]:
        return {
            "gated": _rounded(audit.gated),
            "whole": _rounded(audit.whole),
            "telling": audit.telling,
            "tells": [asdict(tell) for tell in audit.tells],
        }

    return {
        "ok": comparison.passed,
        "gate": GATE,
        "machines": comparison.machines,
        "production": comparison.samples,
        "boxes": comparison.boxes,
        "treated": part(comparison.treated),
        "untreated": part(comparison.untreated),
        "notes": comparison.notes,
    }


def _rounded(estimate: Estimate) -> dict[str, float]:
    return {"auc": round(estimate.mean, 4), "low": round(estimate.low, 4), "high": round(estimate.high, 4)}


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _print(comparison: ParityComparison) -> None:
    print(f"{'AUC, 95 %':24} {'without exceptions':24} {'all probes':24} telling")
    sides = {"without machine profile": comparison.untreated, "with machine profile": comparison.treated}
    for name, side in sides.items():
        print(f"{name:24} {_interval(side.gated):24} {_interval(side.whole):24} {side.telling:>6}")
    print(f"gate: at most {GATE:.2f} without exceptions: {'held' if comparison.passed else 'NOT held'}\n")
    tells = comparison.treated.tells
    counted = [tell for tell in tells if not tell.exception and tell.auc > GATE]
    for tell in counted[:SHOWN]:
        print(f"{tell.group} {tell.probe:20} {tell.auc:.2f}  {tell.seen}\n   cure: {tell.cure}")
    print("\ndeclared exceptions (docs/sandbox.md):")
    reasons: dict[str, list[str]] = {}
    for tell in tells:
        if tell.exception and tell.auc > GATE:
            reasons.setdefault(tell.exception, []).append(f"{tell.probe} {tell.auc:.2f}")
    for reason, names in reasons.items():
        print(f"   {', '.join(names)}: {reason}")
    for note in comparison.notes:
        print(note)
