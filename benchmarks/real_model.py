"""A pretrained model on the CPU, smollm2 (SmolLM2-135M-Instruct): what the figures of toys say of a real one.

engine-bN   N rows: the engine in bfloat16 and float32 beside transformers' `generate` and, where ETUDE_LLAMA_CPP_PYTHON
            names a Python with the package `xllamacpp`, llama.cpp on the same weights; in turns, prompts of 250 tokens
edits       the model's own greedy rewrites of files with the file as draft; and forced answers (`benchmarks/edits.py`)
documents   seconds to the first token with documents in the cache
start       seconds of a start by part, and memory
mismatch    k3 of the trainer's log-probabilities against the engine's
deltas      weights that one AdamW step changes, and the bytes that travel

`python -m benchmarks.real_model -o docs/figures/real-model.json` records each part when it is done
(`benchmarks/results.py`). Parts that `--only` leaves out stay as they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_model_speed import engine, first_tokens, rewrites
from benchmarks.real_model_start import starts
from benchmarks.real_model_training import deltas, mismatch
from benchmarks.results import record
from etude.config import pretrained
from etude.models.gguf import gguf_folder

MODEL = "smollm2"
Part = Callable[[Path, bool, int], dict[str, Any]]
PARTS: dict[str, Part] = {
    "engine-b1": partial(engine, batch=1),
    "engine-b8": partial(engine, batch=8),
    "engine-b32": partial(engine, batch=32),
    "edits": lambda folder, quick, _: rewrites(folder, quick),
    "documents": lambda folder, quick, _: first_tokens(folder, quick),
    "start": starts,
    "mismatch": lambda folder, quick, _: mismatch(folder, quick),
    "deltas": lambda folder, quick, _: deltas(folder, quick),
}


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks of all parts, for `etude bench real-model`; `quick`: fewer and shorter."""
    return joined({name: _measure(name, quick, 2) for name in PARTS})


def joined(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One benchmark of several parts; cases and checks begin with the part's name."""
    rows = [row | {"case": f"{name}/{row['case']}"} for name, part in parts.items() for row in part["rows"]]
    checks = {f"{name}: {check}": held for name, part in parts.items() for check, held in part["checks"].items()}
    absent = {case: why for part in parts.values() for case, why in part.get("absent", {}).items()}
    return {"bench": "real-model", "rows": rows, "checks": checks, "absent": absent}


def _measure(name: str, quick: bool, threads: int) -> dict[str, Any]:
    known = pretrained(MODEL)
    assert known is not None
    kept, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(threads)
    try:
        result = PARTS[name](gguf_folder(known.folder), quick, threads)
    finally:
        torch.set_num_threads(kept)
    return result | {"threads": threads, "quick": quick, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="smollm2 on the CPU")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts that are measured")
    parser.add_argument("--threads", type=int, default=2, help="of every system")
    parser.add_argument("--beside", default="nothing", help="what else ran on the machine, for the file")
    parser.add_argument("-o", "--output", type=Path, help="data file of docs/results.md")
    arguments = parser.parse_args()
    output: Path | None = arguments.output
    for name in arguments.only:
        part = _measure(name, arguments.quick, arguments.threads)
        for row in part["rows"]:
            print(f"{name + '/' + row['case']:76} {row['value']:>12.5g} {row['unit']:10} {row['baseline']}", flush=True)
        print(name, part["checks"], part.get("absent", {}), f"{part['seconds']} s", flush=True)
        if output is not None:
            quick = ["--quick"] * arguments.quick
            words = ["python -m benchmarks.real_model --only", name, "--threads", str(arguments.threads), *quick]
            record(output, part, " ".join(words), f"{arguments.threads} threads; beside: {arguments.beside}.")


if __name__ == "__main__":
    main()
