"""The benchmark of the delta codec runs, and finds every bit again; its figures are nobody's to assert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_weights() -> None:
    command = [sys.executable, "-m", "etude.cli", "bench", "weights", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["bench"] == "weights"
    assert all(result["checks"].values())
    assert {"case", "value", "unit", "baseline"} == set(result["rows"][0])
