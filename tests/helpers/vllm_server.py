"""A real vLLM server for tests. Needs an environment with vLLM 0.32 (`make vllm`); takes minutes to start."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

import etude

PYTHON = os.environ.get("ETUDE_VLLM_PYTHON")
MODEL = Path("models/nano").absolute()
TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""For --tensor-parallel-size 2: vLLM finds cores by itself only for one worker per NUMA node."""
START_SECONDS = float(os.environ.get("ETUDE_VLLM_START_SECONDS", "900"))

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.release,
    pytest.mark.skipif(PYTHON is None, reason="ETUDE_VLLM_PYTHON names no Python with vLLM (make vllm)"),
]


def on_vllm(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs vLLM."""
    for mark in needs_vllm:
        test = mark(test)
    return test


@contextmanager
def serving(model: Path, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """The URL of a vLLM server of `model`, called "m"; one that keeps turns may still wait for its first version."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = f"serve {model} --served-model-name m --host 127.0.0.1 --port {port}"
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(etude.__file__).parents[1]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    module = ["-m", "etude.processes", str(os.getpid()), "vllm.entrypoints.cli.main"]
    command = [str(PYTHON), *module, *words.split(), "--enforce-eager", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)
        try:
            end = time.monotonic() + START_SECONDS
            while not _healthy(url):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.5)
            yield url
        finally:
            with suppress(ProcessLookupError):  # a test has killed it
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _healthy(url: str) -> bool:
    try:
        answer = httpx2.get(f"{url}/health", timeout=10, trust_env=False)
        return answer.status_code == 200 or b"waiting" in answer.content
    except httpx2.HTTPError:
        return False
