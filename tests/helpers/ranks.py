"""Programs that run on several ranks of gloo, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SECONDS = 240.0


def free_port() -> int:
    """A port of the loopback device that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(count: int, module: str, *arguments: str, threads: int = 1) -> list[subprocess.Popen[str]]:
    """Starts `python -m module arguments` on `count` ranks."""
    port = free_port()
    root = str(Path(__file__).parents[2])
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **own, **place, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def run_ranks(count: int, module: str, *arguments: str, seconds: float = SECONDS) -> list[str]:
    """The output of each rank of a program that ends well on all. Raises AssertionError with the errors of a rank."""
    ranks = start_ranks(count, module, *arguments)
    try:
        ends = [rank.communicate(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, ends, strict=True)):
        assert rank.returncode == 0, f"rank {number} ended with {rank.returncode}: {errors[-3000:]}"
    return [output for output, _ in ends]
