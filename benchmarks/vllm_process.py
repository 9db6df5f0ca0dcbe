"""A vLLM in its own environment, as a child process that answers one round of requests per line (`vllm_side.py`). It
computes on one thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.side_process import SideProcess

START_SECONDS = float(os.environ.get("ETUDE_VLLM_START_SECONDS", "900"))
ROUND_SECONDS = 1800.0


def missing() -> str:
    """Why vLLM cannot be run, or nothing."""
    python = os.environ.get("ETUDE_VLLM_PYTHON")
    if python is None:
        return "ETUDE_VLLM_PYTHON names no Python with vLLM (docs/weights.md)"
    return "" if Path(python).is_file() else f"ETUDE_VLLM_PYTHON names {python}, which is no file"


class Vllm(SideProcess):
    """`options` are those of `vllm_side.py`."""

    def __init__(self, **options: Any) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all in one process, as etude's engine is
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__("vLLM", os.environ["ETUDE_VLLM_PYTHON"], "benchmarks.vllm_side", environment)
        self.about = self.exchange(options, START_SECONDS)

    def ask(self, prompts: list[list[int]], tokens: list[int], **more: Any) -> dict[str, Any]:
        """One round: a request per prompt, all submitted at once, each for just so many tokens."""
        return self.exchange({"prompts": prompts, "tokens": tokens, **more}, ROUND_SECONDS)
