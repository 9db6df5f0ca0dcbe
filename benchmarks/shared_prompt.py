"""Forward and backward of rows that share tokens, one thread, float32, against separate rows in the same run.

Pxxxx-Cxx-Gxx    G rows of one prompt of P tokens, completions of C, loss on every completion token
turns-12         episodes of 12 turns; the tree holds a row per turn (its tokens trained, full history before it)
speedup          seconds of rows / seconds of the execution that the cost model picks; rows compute only needed logits
of-ideal         speedup / R, the ratio of all multiplications: linear layers, attention, logits
peak             memory over that before, of one forward and backward
grad             relative L2 distance from the gradients of rows; the worse of a dense and a mixture-of-experts model

Seconds are processor time, so that other work on the machine counts less; medians. The allocator holds what earlier
passes freed, as it does in a run: memory is measured apart, since pages that are fetched anew cost a tenth of a pass.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.table import Table
from benchmarks.threads import one_thread
from etude.models import attention, experts
from etude.processes import resident_bytes
from etude.trainer.rl.execution import run as execute
from etude.trainer.rl.memory import peak_bytes, reset_peak
from etude.trainer.rl.plan import ExecutionPlan, ForwardPass, Shape, TokenRows, plan, shape_of

PROMPT, COMPLETION, BUDGET, VOCABULARY = 1024, 64, 8192, 2048
LIMIT = 2e-6  # of the gradients' distance, in float32


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks; several minutes. `quick`: a smaller model, once, and rows timed on a part of them, scaled up."""
    with one_thread():
        return _run(quick)


def _run(quick: bool) -> dict[str, Any]:
    table = Table("shared-prompt")
    add, checks = table.add, table.checks
    model = _dense(512 if quick else 1024)
    shape, repeats = shape_of(model), 1 if quick else 3
    alone = f"rows, needed logits only{', a quarter of them timed, times 4' if quick else ''}"
    for group in (8, 16):
        name, tokens = f"P{PROMPT}-C{COMPLETION}-G{group}", _group(group)
        ideal = _ideal(shape, group)
        seconds, peaks = _measure(model, tokens, repeats, share=4 if quick else 1)
        add(f"{name}/ideal", ideal, "x", "R of this model: all multiplications of rows over those of the tree")
        add(f"{name}/speedup", seconds["rows"] / seconds["auto"], "x", alone)
        add(f"{name}/speedup-streaming", seconds["rows"] / seconds["streaming"], "x", alone)
        add(f"{name}/of-ideal", seconds["rows"] / seconds["auto"] / ideal, "x", f"R = {ideal:.2f}")
        for execution, peak in peaks.items():
            add(f"{name}/peak-{execution}", peak / 2**20, "MiB", "resident memory before")
        checks[f"{name}: at least 90 % of the ideal"] = seconds["rows"] / seconds["auto"] >= 0.9 * ideal
    per_turn, per_episode = _turns(model, repeats, *((2, 128, 32) if quick else (4, 512, 64)))
    add("turns-12/speedup-per-turn-rows", per_turn, "x", "a row per turn with its whole history")
    add("turns-12/speedup-per-episode-rows", per_episode, "x", "a row per episode: already without repeated turns")
    for execution in ("packed", "streaming"):
        distance = max(_distance(small, execution) for small in (_dense(128), _mixture(128)))
        add(f"grad/{execution}", distance, "relative L2", "rows, float32; dense and mixture of experts, the worse")
        checks[f"gradients of {execution} execution are those of rows"] = distance <= LIMIT
    return table.result()


def _dense(width: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return _ours(Qwen3ForCausalLM(Qwen3Config(**_sizes(width))))


def _mixture(width: int) -> PreTrainedModel:
    torch.manual_seed(0)
    sparse = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": width, "norm_topk_prob": True}
    return _ours(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_sizes(width), **sparse)))


def _sizes(width: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": max(2, width // 128),
        "num_key_value_heads": 2,
        "head_dim": min(128, width // 2),
        "tie_word_embeddings": True,
    }


def _ours(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation(attention.NAME)
    if isinstance(model, Qwen3MoeForCausalLM):
        model.set_experts_implementation(experts.NAME)
    return model


def _group(group: int) -> TokenRows:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, PROMPT)
    rows = tuple(np.concatenate([prompt, rng.integers(0, VOCABULARY, COMPLETION)]) for _ in range(group))
    return TokenRows(rows, tuple(np.arange(PROMPT, PROMPT + COMPLETION) for _ in rows))


def _ideal(shape: Shape, group: int) -> float:
    """R: linear work, attention pairs and logits of separate rows, over those of the tree."""
    p, c = PROMPT, COMPLETION
    rows = group * (p + c + shape.pair * (p + c) ** 2 / 2 + shape.head * c)
    pairs = p**2 / 2 + group * (p * c + c**2 / 2)
    return rows / (p + group * c + shape.pair * pairs + shape.head * group * c)


def _measure(
    model: PreTrainedModel, tokens: TokenRows, repeats: int, share: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and peak bytes by execution, measured in turns; of rows only every `share`-th is run."""
    some = TokenRows(tokens.rows[::share], tokens.sampled[::share])
    shape = shape_of(model)
    plans = {"auto": plan(tokens, "auto", BUDGET, shape), "streaming": plan(tokens, "streaming", PROMPT + 256, shape)}
    seconds: dict[str, list[float]] = {"auto": [], "streaming": [], "rows": []}
    peaks: dict[str, float] = {}
    _forward_backward(model, plan(_group(1), "rows", BUDGET, shape), tokens.count)  # gradients exist, kernels are warm
    plans["rows"] = plan(some, "rows", BUDGET, shape)
    for name, passes in plans.items():
        peaks[name] = _peak(lambda passes=passes: _forward_backward(model, passes, tokens.count))
    for _ in range(repeats):
        for name, passes in plans.items():
            time_ = _seconds(lambda passes=passes: _forward_backward(model, passes, tokens.count))
            seconds[name].append(time_ * (len(tokens.rows) / len(some.rows) if name == "rows" else 1))
    return {name: statistics.median(values) for name, values in seconds.items()}, peaks


def _turns(model: PreTrainedModel, repeats: int, episodes: int, prompt: int, turn: int) -> tuple[float, float]:
    """Seconds of a row per turn, and of a row per episode, over those of their tree."""
    rng = np.random.default_rng(1)
    start = rng.integers(0, VOCABULARY, prompt)
    whole = [np.concatenate([start, rng.integers(0, VOCABULARY, 12 * turn)]) for _ in range(episodes)]
    ends = [prompt + turn * n for n in range(1, 13)]
    per_turn = TokenRows(
        tuple(row[:end] for row in whole for end in ends),
        tuple(np.arange(end - turn, end) for _ in whole for end in ends),
    )
    per_episode = TokenRows(tuple(whole), tuple(np.arange(prompt, len(row)) for row in whole))
    shape = shape_of(model)
    tree = plan(per_turn, "auto", BUDGET, shape)
    baselines = [plan(tokens, "rows", BUDGET, shape) for tokens in (per_turn, per_episode)]
    seconds: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        for measured, passes in zip(seconds, (tree, *baselines), strict=True):
            measured.append(_seconds(lambda passes=passes: _forward_backward(model, passes, per_turn.count)))
    ours, turns, whole_rows = (statistics.median(measured) for measured in seconds)
    return turns / ours, whole_rows / ours


def _distance(model: PreTrainedModel, execution: Any) -> float:
    """Of the gradients from those of rows, on a group in which two members also share a turn."""
    rng = np.random.default_rng(2)
    prompt, turn = rng.integers(0, VOCABULARY, 150), rng.integers(0, VOCABULARY, 40)
    starts = [prompt, np.concatenate([prompt, turn])]
    rows = tuple(np.concatenate([starts[i % 2], rng.integers(0, VOCABULARY, 20 + 7 * i)]) for i in range(6))
    tokens = TokenRows(rows, tuple(np.arange(len(row) - 15, len(row)) for row in rows))
    gradients = []
    for name in (execution, "rows"):
        parts = plan(tokens, name, 256, shape_of(model)).parts
        gradients.append(_gradient(model, parts, tokens.count))
    ours, truth = gradients
    return float((ours - truth).norm() / truth.norm())


def _gradient(model: PreTrainedModel, parts: tuple[ForwardPass, ...], count: int) -> torch.Tensor:
    weight_N = torch.randn(count, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    execute(model, parts, count, lambda logprobs_M, item_M: (weight_N[item_M] * logprobs_M).sum() / count)
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def _forward_backward(model: PreTrainedModel, passes: ExecutionPlan, count: int) -> None:
    execute(model, passes.parts, count, lambda logprobs_M, _: logprobs_M.sum() / count)


def _seconds(work: Callable[[], None]) -> float:
    """Of processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak(work: Callable[[], None]) -> float:
    """Bytes over what was resident before."""
    _give_back()
    reset_peak("cpu")
    before = resident_bytes(os.getpid()) or 0
    work()
    return peak_bytes("cpu") - before


def _give_back() -> None:
    """Freed memory that the allocator still holds would count as resident before, and hide what is taken."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
