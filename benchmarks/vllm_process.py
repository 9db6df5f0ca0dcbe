"""A vLLM in its own environment, as a child process that answers one round of requests per line (`vllm_side.py`).

Several may live at once and be asked in turn, so that what disturbs the machine disturbs all of them. Each computes on
one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]
START_SECONDS = float(os.environ.get("ETUDE_VLLM_START_SECONDS", "900"))
ROUND_SECONDS = 1800.0


def missing() -> str:
    """Why vLLM cannot be run, or nothing."""
    python = os.environ.get("ETUDE_VLLM_PYTHON")
    if python is None:
        return "ETUDE_VLLM_PYTHON names no Python with vLLM (docs/weights.md)"
    return "" if Path(python).is_file() else f"ETUDE_VLLM_PYTHON names {python}, which is no file"


class Vllm:
    """`options` are those of `vllm_side.py`. Raises RuntimeError, with the end of its log, where it dies or hangs."""

    def __init__(self, **options: Any) -> None:
        python = Path(os.environ["ETUDE_VLLM_PYTHON"])
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all in one process, as etude's engine is
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.vllm_side"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.about = self._exchange(options, START_SECONDS)

    def ask(self, prompts: list[list[int]], tokens: list[int], **more: Any) -> dict[str, Any]:
        """One round: a request per prompt, all submitted at once, each for just so many tokens."""
        return self._exchange({"prompts": prompts, "tokens": tokens, **more}, ROUND_SECONDS)

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self._log.seek(0)
            end = self._log.read()[-4000:]
            raise RuntimeError(f"vLLM ended or took more than {seconds:.0f} s; its log ends: {end}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the child ends
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()
        self._log.close()
