"""The engine on the bundled model, one thread, against transformers' `generate` on the same prompts in the same run.

decode at batch N      N rows of 8 per prompt, 250 prompt tokens; seconds from the first to the last decode step
generate/bN            from submission to the last token, prefill included: our speed over that of `generate`
vllm/bN                the same against vLLM on the CPU, same weights, if ETUDE_VLLM_PYTHON is set; both keep prefixes
.../bN@SIZE            the same on larger models with random weights, not with `quick`
a group's prompt       seconds to the first tokens of 8 rows with prompts of their own / of 8 rows with one prompt; and
                       how many prompt tokens the engine computed for the latter, over those of one prompt
next turn              a second turn of the same rows, whose first turn is in the prefix cache, against a cold engine

All systems answer in turn, several rounds with new prompts each; a figure is the median of its rounds, and what is
compared with another system is the median of the rounds' ratios: what disturbs one round decides nothing.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.random_models import describe, save
from benchmarks.table import Table
from benchmarks.threads import one_thread
from benchmarks.vllm_process import Vllm, missing
from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request, RunningSequence
from etude.models.loading import load_model

MODEL = Path(__file__).parent.parent / "models" / "nano"
GROUP, PROMPT = 8, 250
VLLM_BATCHES = (1, 8, 32)
VLLM = {"max_model_len": 1024, "max_num_seqs": 32, "prefix_caching": True, "eager": False, "speculative": None}
LARGER = (("60M", torch.float32), ("300M", torch.float32), ("300M", torch.bfloat16))
LARGER_TOKENS = 24


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks; `quick` samples fewer tokens and takes the bundled model only. On an idle core some two minutes
    with vLLM, or some ten with the larger models."""
    table = Table("engine")
    absent = {}
    with one_thread():
        _bundled(table, 24 if quick else 100)
        for size, dtype in () if quick else LARGER:
            _larger(table, size, dtype)
        if missing():
            names = ["", *(f"@{_name(size, dtype)}" for size, dtype in (() if quick else LARGER))]
            absent = {f"vllm/b{batch}{name}": missing() for name in names for batch in VLLM_BATCHES}
    return table.result() | {"absent": absent}


def _bundled(table: Table, tokens: int) -> None:
    model = load_model(MODEL)
    engine = Engine(model, EngineConfig(max_batch=128))
    with ExitStack() as stack:
        vllm = None if missing() else stack.enter_context(Vllm(**VLLM, model=str(MODEL), dtype="float32"))
        prefill = _compare(table, engine, vllm, (1, 8, 32, 64), tokens)
    table.add("prefill", prefill, "tokens/s", f"{64 // GROUP} prompts of {PROMPT} tokens, 1 thread")
    once, computed = _group_prompt(engine)
    table.add("a group's prompt", once, "x", f"{GROUP} prompts of {PROMPT} tokens, against {GROUP} rows of one prompt")
    table.add("a group's prompt, tokens computed", computed / PROMPT, "x", f"one prompt of {PROMPT} tokens")
    warm, cold, agree = _next_turn(model, engine, tokens)
    table.add("next turn, prefix cache / cold", cold / warm, "x", f"64 rows, 30 new tokens after {PROMPT + tokens}")
    table.checks["cached and cold log-probabilities agree"] = agree
    # Each other member computes its last token, to sample.
    table.checks["a group computes one prompt"] = computed == PROMPT + GROUP - 1


def _larger(table: Table, size: str, dtype: torch.dtype) -> None:
    """A larger model with random weights, the same ones for every system."""
    gc.collect()  # an engine that is done with holds itself, and its model
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save(size, dtype, Path(folder))
        model = load_model(folder, dtype=dtype)
        engine = Engine(model, EngineConfig(max_batch=max(VLLM_BATCHES)))
        vllm = None if missing() else stack.enter_context(Vllm(**VLLM, model=folder, dtype=_text(dtype)))
        _compare(table, engine, vllm, VLLM_BATCHES, LARGER_TOKENS, f"@{_name(size, dtype)}", f", {describe(model)}")


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(size: str, dtype: torch.dtype) -> str:
    return size if dtype == torch.float32 else f"{size}-bf16"


@dataclass(frozen=True)
class Round:
    """What each system took for the same rows."""

    decode: float  # our tokens per second of decode steps
    prefill: float  # and of prompts
    total: float  # our seconds for everything
    generate: float  # seconds
    vllm: float | None


def _compare(
    table: Table, engine: Engine, vllm: Vllm | None, batches: Sequence[int], tokens: int, name: str = "", what: str = ""
) -> float:
    """Adds the rows of every batch; returns the prefill tokens/s of the last."""
    model = engine.model
    _finish(engine, _submit(engine, GROUP, 4, seed=99))  # compiles the kernels, measures the costs
    if vllm is not None:
        _vllm(vllm, model, GROUP, 4, seed=98)  # compiles its own
    rounds: list[Round] = []
    for batch in batches:
        with_vllm = vllm if batch in VLLM_BATCHES else None
        rounds = [_round(engine, with_vllm, batch, tokens, seed=1000 * batch + i) for i in range(_rounds(batch))]
        count = f"median of {len(rounds)} rounds{what}"
        decode = statistics.median(r.decode for r in rounds)
        baseline = f"sampled tokens per second of decode steps, 1 thread, {count}"
        table.add(f"decode at batch {batch}{name}", decode, "tokens/s", baseline)
        ratios = [r.generate / r.total for r in rounds]
        baseline = f"transformers generate, {batch} rows, sdpa, grouped_mm, KV cache, {count}{_span(ratios)}"
        table.add(f"generate/b{batch}{name}", statistics.median(ratios), "x", baseline)
        if with_vllm is not None:
            ratios = [r.vllm / r.total for r in rounds if r.vllm is not None]
            which = f"vLLM {with_vllm.about['vllm']} on the CPU, {_text(model.dtype)}, {batch} rows"
            baseline = f"{which}, submission to last token, {count}{_span(ratios)}"
            table.add(f"vllm/b{batch}{name}", statistics.median(ratios), "x", baseline)
    return statistics.median(r.prefill for r in rounds)


def _rounds(batch: int) -> int:
    """Short rounds are the easiest to disturb."""
    return 9 if batch < GROUP else 3


def _span(ratios: list[float]) -> str:
    return f", from {min(ratios):.2f} to {max(ratios):.2f}"


def _round(engine: Engine, vllm: Vllm | None, batch: int, tokens: int, seed: int) -> Round:
    decode, prefill, total = _measure(engine, batch, tokens, seed)
    plain = _generate(engine.model, batch, tokens, seed)
    other = None if vllm is None else _vllm(vllm, engine.model, batch, tokens, seed)
    return Round(decode, prefill, total, plain, other)


def _vllm(vllm: Vllm, model: PreTrainedModel, batch: int, tokens: int, seed: int) -> float:
    """vLLM's seconds for the same rows."""
    return vllm.ask(_prompts(model, batch, seed), [tokens] * batch, temperature=1.0)["seconds"]


def _prompts(model: PreTrainedModel, batch: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    groups = rng.integers(32, model.config.vocab_size, (max(1, batch // GROUP), PROMPT)).tolist()
    return [groups[i // GROUP] for i in range(batch)]


def _submit(engine: Engine, batch: int, tokens: int, seed: int) -> list[RunningSequence]:
    prompts = _prompts(engine.model, batch, seed)
    return [engine.submit(Request(ids=ids, max_tokens=tokens, seed=i)) for i, ids in enumerate(prompts)]


def _finish(engine: Engine, rows: list[RunningSequence]) -> float:
    start = time.perf_counter()
    while not all(row.future.done() for row in rows):
        engine.step()
    return time.perf_counter() - start


def _measure(engine: Engine, batch: int, tokens: int, seed: int) -> tuple[float, float, float]:
    """Decode tokens/s, prefill tokens/s, and seconds for everything."""
    rows = _submit(engine, batch, tokens, seed)
    start = time.perf_counter()
    engine.step()  # the prompts; their siblings wait for them
    first = time.perf_counter()
    while any(row.fed < PROMPT for row in rows):
        engine.step()
    decoding = time.perf_counter()
    sampled = engine.counters.sampled_tokens
    _finish(engine, rows)
    end = time.perf_counter()
    prefilled = PROMPT * max(1, batch // GROUP)
    return (engine.counters.sampled_tokens - sampled) / (end - decoding), prefilled / (first - start), end - start


def _group_prompt(engine: Engine) -> tuple[float, int]:
    """Seconds to the first tokens of rows with prompts of their own over those of a group, and what the group cost."""
    own = np.random.default_rng(7).integers(32, engine.vocab_size, (GROUP + 1, PROMPT)).tolist()
    seconds, computed = [], 0
    for prompts in (own[:GROUP], own[GROUP:] * GROUP):
        before = engine.counters.prefilled_tokens
        rows = [engine.submit(Request(ids=ids, max_tokens=1, seed=i)) for i, ids in enumerate(prompts)]
        seconds.append(_finish(engine, rows))
        computed = engine.counters.prefilled_tokens - before
    return seconds[0] / seconds[1], computed


@torch.inference_mode()
def _generate(model: PreTrainedModel, batch: int, tokens: int, seed: int) -> float:
    """Seconds of transformers' generate for the same rows."""
    ids = torch.tensor(_prompts(model, batch, seed))
    ours = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("grouped_mm")
    try:
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True,
            top_k=0, pad_token_id=1,
        )  # fmt: skip
        return time.perf_counter() - start
    finally:
        model.set_attn_implementation(ours[0])
        model.set_experts_implementation(ours[1])


def _next_turn(model: PreTrainedModel, engine: Engine, tokens: int) -> tuple[float, float, bool]:
    """Seconds of a second turn with and without the first one's keys and values, and whether both agree."""
    first = _submit(engine, 64, tokens, seed=5)
    _finish(engine, first)
    result = np.random.default_rng(6).integers(32, model.config.vocab_size, 30).tolist()
    turns = [row.request.ids + row.future.result().ids + result for row in first]
    seconds, generations = [], []
    for instance in (engine, Engine(model)):
        rows = [instance.submit(Request(ids=ids, max_tokens=1, temperature=0.0)) for ids in turns]
        seconds.append(_finish(instance, rows))
        generations.append([row.future.result() for row in rows])
    pairs = zip(*generations, strict=True)
    agree = all(abs(a.logprobs[0] - b.logprobs[0]) < 1e-3 for a, b in pairs)
    return seconds[0], seconds[1], agree
