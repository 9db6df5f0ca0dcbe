"""How long an engine takes to start, and how much memory it holds: a process of its own for each type.

`python -m benchmarks.real_model_start FOLDER DTYPE THREADS` prints seconds by part and MB as JSON. Kernels are compiled
once per machine and kept; what that takes is the difference to a start with an empty folder for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Table

SECONDS = 600.0
PARTS = ("import", "load", "engine", "trial")


def starts(folder: Path, quick: bool, threads: int) -> dict[str, Any]:
    """Rows by type."""
    table = Table("real-model/start")
    for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory() as kernels:
            cold = None if quick else _start(folder, dtype, threads, {"NUMBA_CACHE_DIR": kernels})
        _start(folder, dtype, threads, {})  # compiles what was not compiled yet
        warm = _start(folder, dtype, threads, {})
        for part in PARTS:
            table.add(f"{dtype}/{part}", warm["seconds"][part], "s", "kernels compiled before")
        total = sum(warm["seconds"].values())
        table.add(f"{dtype}/ready", total, "s", "all parts")
        if cold is not None:
            table.add(f"{dtype}/compiling", sum(cold["seconds"].values()) - total, "s", "the first start of a machine")
        for when, megabytes in warm["megabytes"].items():
            table.add(f"{dtype}/memory, {when}", megabytes, "MB", f"weights {warm['weights']:.0f} MB")
    return table.result()


def _start(folder: Path, dtype: str, threads: int, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.real_model_start", str(folder), dtype, str(threads)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=True, env={**os.environ, **environment}
    )
    return json.loads(done.stdout.splitlines()[-1])


def memory(status: str) -> dict[str, float]:
    """MB that a process holds and has held at most, from the text of /proc/PID/status."""
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) / 1e3 for name in ("VmRSS", "VmHWM")}


def main() -> None:
    folder, dtype, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    times = [time.perf_counter()]
    import torch

    from etude.config import EngineConfig
    from etude.inference.engine.engine import Engine
    from etude.inference.engine.loading import trial
    from etude.inference.engine.requests import Request
    from etude.models.loading import load_model

    torch.set_num_threads(threads)
    times.append(time.perf_counter())
    model = load_model(folder, dtype=getattr(torch, dtype))
    times.append(time.perf_counter())
    engine = Engine(model, EngineConfig(max_batch=32))
    times.append(time.perf_counter())
    assert not (why := trial(engine)), why
    times.append(time.perf_counter())
    held = {"ready": memory(Path("/proc/self/status").read_text())["VmRSS"]}
    rows = [engine.submit(Request(ids=[100 + i] * 250, max_tokens=32, seed=i)) for i in range(8)]
    while not all(row.future.done() for row in rows):
        engine.step()
    after = memory(Path("/proc/self/status").read_text())
    held |= {"8 rows of 282 tokens": after["VmRSS"], "at most": after["VmHWM"]}
    seconds = {part: b - a for part, a, b in zip(PARTS, times, times[1:], strict=False)}
    weights = sum(p.nbytes for p in model.parameters()) / 1e6
    print(json.dumps({"seconds": seconds, "megabytes": held, "weights": weights}))


if __name__ == "__main__":
    main()
