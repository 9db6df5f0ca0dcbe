"""Runs in vLLM's environment, for `benchmarks.gpu`: prints tokens per second of answers, by batch, as JSON.

python gpu_vllm.py FOLDER VOCABULARY PROMPT ANSWER BATCH...
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np


def main() -> None:
    """Two rounds of each batch, of which the second counts."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    vocabulary, prompt, answer, *batches = map(int, sys.argv[2:])
    llm = LLM(
        model=sys.argv[1], dtype="bfloat16", max_model_len=prompt + answer, gpu_memory_utilization=0.5,
        enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    params = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False)
    figures: dict[str, float] = {}
    for batch in batches:
        for turn in range(2):
            ids = np.random.default_rng(turn).integers(1, vocabulary, (batch, prompt)).tolist()
            begun = time.perf_counter()
            llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
            figures[f"vllm/b{batch}"] = batch * answer / (time.perf_counter() - begun)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
