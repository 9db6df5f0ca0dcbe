"""Runs in vLLM's environment: options as the first line of stdin, then one line per round, one line of answer to each.

options   model, dtype, max_model_len, max_num_seqs, prefix_caching, eager, speculative (vLLM's speculative_config),
          force (whether rounds have answers)
round     prompts and tokens, one each per request; temperature (0); answers, tokens that each request shall sample
answer    ids per request, seconds of all, decode (seconds after the last first token), passes, drafted, accepted

A forced answer is what benchmarks/edits.py forces: behind the last norm the right token's embedding is added, at the
full cost of the model. vLLM refuses logits processors where it speculates, and a hook it does not see.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

FORCE = 100.0  # logits; a random model's own are of size 1


class Forced:
    """A hook on the model of an engine in this process. Requests are known by their prompts; no table, no effect."""

    def __init__(self, llm: Any, folder: Path) -> None:
        self._runner = llm.llm_engine.model_executor.driver_worker.model_runner
        self.answers: dict[bytes, np.ndarray] = {}
        with safe_open(str(folder / "model.safetensors"), "pt") as file:
            weight_VD = file.get_tensor("model.embed_tokens.weight").float()  # tied to the head
        self._push_VD = FORCE * weight_VD / weight_VD.square().sum(-1, keepdim=True)
        self._runner.model.register_forward_hook(self._after, with_kwargs=True)

    def force(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        pairs = zip(prompts, answers, strict=True)
        self.answers = {np.array(p, np.int32).tobytes(): np.array(a, np.int64) for p, a in pairs}

    def _after(self, _: Any, args: Any, kwargs: dict[str, Any], hidden_TD: torch.Tensor) -> torch.Tensor:
        if not self.answers:
            return hidden_TD
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        positions_T = kwargs["positions"].numpy()
        pushed_TD = hidden_TD.clone()
        for r in range(batch.num_reqs):
            prompt = int(batch.num_prompt_tokens[r])
            answer = self.answers[batch.token_ids_cpu[r, :prompt].astype(np.int32).tobytes()]
            start, end = int(starts[r]), int(starts[r + 1])
            # At position p the model chooses token p + 1.
            at = np.clip(positions_T[start:end] + 1 - prompt, 0, len(answer) - 1)
            pushed_TD[start:end] += self._push_VD[torch.from_numpy(answer[at])].to(hidden_TD.dtype)
        return pushed_TD


def engine(options: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=8192,
        enable_prefix_caching=options["prefix_caching"],
        enforce_eager=options["eager"],
        speculative_config=options["speculative"],
        disable_log_stats=False,
        seed=0,
    )


def counted(llm: Any) -> dict[str, int]:
    """vLLM's own counters of speculation so far."""
    names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    counts = {"drafted": 0, "accepted": 0}
    for metric in llm.get_metrics():
        if metric.name in names:
            counts[names[metric.name]] += int(metric.value)
    return counts


def answered(llm: Any, forced: Forced | None, steps: list[int], message: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    prompts, tokens = message["prompts"], message["tokens"]
    if forced is not None:
        forced.force(prompts, message["answers"])
    temperature = message.get("temperature", 0.0)
    parameters = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in tokens
    ]
    before, begun = counted(llm), len(steps)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    after = counted(llm)
    first = max(output.metrics.first_token_ts for output in outputs)
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "decode": max(output.metrics.last_token_ts for output in outputs) - first,
        "passes": len(steps) - begun,
        **{name: after[name] - before[name] for name in after},
    }


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    options = json.loads(sys.stdin.readline())
    if options.get("force"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the hook knows the tables of the runner that drafts on the host
    llm = engine(options)
    forced = Forced(llm, Path(options["model"])) if options.get("force") else None
    steps: list[int] = []  # tokens per pass
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    runner.model.register_forward_hook(lambda _m, _a, hidden_TD: steps.append(len(hidden_TD)))
    import vllm

    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answered(llm, forced, steps, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
