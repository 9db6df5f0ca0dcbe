"""Prints why trainer and engine disagree in a run, for `etude doctor mismatch`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from etude.audit.mismatch import diagnose


def show_mismatch(run: Path, *, as_json: bool) -> int:
    """Print the diagnosis; exit code 0 if the run is healthy or only stale, else 1. Raises UserError."""
    diagnosis = diagnose(run)
    if as_json:
        print(json.dumps(asdict(diagnosis)))
    else:
        print(f"{diagnosis.cause}: {diagnosis.sentence}\n  {diagnosis.action}")
        if diagnosis.tokens:
            print(f"  {diagnosis.tokens} tokens, {diagnosis.wrong_draws:.1%} of them not what their seeds draw")
        for name, share in diagnosis.shares.items():
            print(f"  {share:6.1%} of the difference in training: {name}")
        if diagnosis.flips is not None:
            print(f"  {diagnosis.flips:.1%} of tokens change experts in bfloat16")
        for s in diagnosis.suppositions:
            print(f"  k2 {s.k2:8.2g} if {s.what} ({s.cause})")
    return 0 if diagnosis.cause in ("healthy", "staleness") else 1
