"""Runs where `xllamacpp` is installed: options as the first line of stdin, then one line per round, one line of answer
to each.

options   model (a GGUF file), rows (at most so many at once), length (tokens of a row), threads
round     prompts (ids) and tokens: all are submitted at once, each answer has just so many tokens, temperature 1
answer    seconds of all, decode (seconds after the last first token), tokens that were sampled
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

WARM = list(range(100, 140))


def server(options: dict[str, Any]) -> Any:
    """llama.cpp's own server, continuous batching, without its HTTP."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.n_parallel = options["rows"]
    params.n_ctx = options["rows"] * options["length"]
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    return xllamacpp.Server(params)


def answered(llama: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Every prompt in a thread of its own: the server's calls wait for their answers."""

    def ask(ids: list[int]) -> tuple[float, dict[str, Any]]:
        request = {
            "prompt": ids, "max_tokens": tokens, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False,
            "temperature": 1.0, "samplers": ["temperature"],
        }  # fmt: skip
        answer = llama.handle_completions(request)
        return time.perf_counter(), answer["timings"] | {"sampled": answer["usage"]["completion_tokens"]}

    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        ended = list(pool.map(ask, prompts))
    end = max(when for when, _ in ended)
    first = max(when - timings["predicted_ms"] / 1e3 for when, timings in ended)
    return {
        "seconds": end - start,
        "decode": end - first,
        "sampled": sum(timings["sampled"] for _, timings in ended),
    }


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may log to stdout
    llama = server(json.loads(sys.stdin.readline()))
    answered(llama, [WARM], 2)
    import xllamacpp

    print(json.dumps({"version": version("xllamacpp"), "system": xllamacpp.get_system_info()}), file=out, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps(answered(llama, message["prompts"], message["tokens"])), file=out, flush=True)


if __name__ == "__main__":
    main()
