"""Steps of `make gpu` on random weights in Qwen3-8B's shape, bfloat16: adapters in the trainer, and the engine.

A run of recipes/qwen3-8b-1x80g.toml meets both on one GPU. `--small` takes a small model of the same class.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

from benchmarks.gpu import Setting, peak, reset_peak, timed
from etude.config import EngineConfig, LoraConfig, TrainerConfig
from etude.inference.engine import loading
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Generation, Request
from etude.inference.engine.sampling import sample
from etude.models import attention, experts
from etude.models.lora import merged
from etude.trainer.activations import checkpoint_activations
from etude.trainer.lora import for_adapters
from etude.trainer.rl import execution
from etude.trainer.rl.plan import Execution, TokenRows, plan, shape_of
from etude.trainer.rl.trial import allowed, log_probs

LAYERS, HIDDEN, MLP, HEADS, GROUPS, HEAD, VOCABULARY = 36, 4096, 12_288, 32, 8, 128, 151_936
ADAPTED = LAYERS * (HIDDEN * HEAD * (2 * HEADS + 2 * GROUPS) + 3 * HIDDEN * MLP)  # parameters of all linear layers
EXECUTIONS: tuple[Execution, ...] = ("rows", "packed", "streaming")
MICRO_TOKENS, RANK, LONG = 16_384, 32, 12_000
STEPS_AT_MOST = 4000  # of the engine, for answers of one case


def adapters(setting: Setting) -> dict[str, Any]:
    """Bits of merged adapters on the device against the host's; then, for each way to compute a group of eight that
    share a quarter of their tokens: seconds, tokens per second, peak memory, and the relative L2 distance of its
    gradients from those of plain rows."""
    figures: dict[str, Any] = _merged(setting)
    model = _model(setting).train()
    for execution_ in ("packed", "rows"):
        figures[f"trial/{execution_}"] = allowed(model, execution_)
    checkpoint_activations(model)
    on_gpu = setting.device.startswith("cuda")
    config = TrainerConfig(device=setting.device, offload_optimizer=on_gpu)
    types = dict.fromkeys(model.state_dict(), torch.bfloat16)
    optimizer = for_adapters(model, config, LoraConfig(rank=RANK, alpha=2.0 * RANK), types)
    tokens = _group(setting, 8, 64 if setting.small else 4096)
    weight_N = torch.randn(tokens.count, device=setting.device)
    count = 8 * (64 if setting.small else 4096)
    gradients: dict[str, torch.Tensor] = {}
    for name in EXECUTIONS:
        parts = plan(tokens, name, MICRO_TOKENS, shape_of(model)).parts

        def work(parts: Any = parts) -> None:
            for tensor in optimizer.adapters.tensors.values():
                tensor.grad = None
            execution.run(model, parts, tokens.count, lambda logprobs_N, at: (weight_N[at] * logprobs_N).sum())

        reset_peak(setting)
        seconds = timed(setting, work, 2)
        figures |= {f"{name}/s": seconds, f"{name}/tokens_per_s": count / seconds, f"{name}/peak_gib": peak(setting)}
        gradients[name] = torch.cat(
            [x.grad.flatten() for x in optimizer.adapters.tensors.values() if x.grad is not None]
        )
        distance = (gradients[name] - gradients["rows"]).norm() / gradients["rows"].norm()
        figures[f"{name}/distance"] = float(distance)
    optimizer.collect()
    begun = time.perf_counter()
    optimizer.apply(1e-5)
    _wait(setting)
    figures["update_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    optimizer.adapted()
    return figures | {"digest_s": time.perf_counter() - begun}


def decode(setting: Setting) -> dict[str, Any]:
    """Milliseconds of a decode step at 1, 16 and 64 rows and with one long row among 64, with peak memory; sampling
    of 64 rows; and the mean squared difference of the engine's logprobs from the trainer's on one answer."""
    model, answer = _model(setting).eval(), 8 if setting.small else 48
    cache_mb, longest = (64, 512) if setting.small else (16_384, 16_384)
    config = EngineConfig(
        device=setting.device, dtype="bfloat16", cache_mb=cache_mb, max_batch=64, speculate=False
    )  # fmt: skip
    engine = Engine(model, config, max_length=longest)
    figures: dict[str, Any] = {"trial": loading.trial(engine) or "exact"}
    rng = np.random.default_rng(1)
    draw = partial(rng.integers, 5, setting.eight.vocab_size)
    cases = {"b1": [512], "b16": [512] * 16, "b64": [512] * 64, "b64-one-long": [LONG] + [512] * 63}
    for name, lengths in cases.items():
        reset_peak(setting)
        prompts = [draw(min(n, 200) if setting.small else n).tolist() for n in lengths]
        _, steps = _played(setting, engine, prompts, answer)
        figures |= {f"{name}/step_ms": 1e3 * statistics.median(steps[-answer // 2 :]), f"{name}/slowest_s": max(steps)}
        figures[f"{name}/peak_gib"] = peak(setting)
    logits_BV, one_B, seed_B = (
        torch.randn(64, setting.eight.vocab_size, device=setting.device),
        np.ones(64),
        np.arange(64),
    )
    figures["sample64_ms"] = 1e3 * timed(setting, lambda: sample(logits_BV, one_B, one_B, seed_B, seed_B), 3)
    prompt = draw(64).tolist()
    (generation,), _ = _played(setting, engine, [prompt], answer)
    row = np.array([*prompt, *generation.ids])
    trained = log_probs(model, "rows", [row])[0][-len(generation.ids) :]
    difference = np.array(generation.logprobs) - trained
    return figures | {"k2": float((difference**2).mean()), "most": float(np.abs(difference).max())}


def _merged(setting: Setting) -> dict[str, Any]:
    rows, columns = (256, 128) if setting.small else (HIDDEN, HIDDEN)
    rng = torch.Generator().manual_seed(2)
    base_OI = torch.randn(rows, columns, generator=rng).bfloat16()
    down_RI = torch.randn(RANK, columns, generator=rng) / 64
    up_OR = torch.randn(rows, RANK, generator=rng) / 100
    there = [tensor.to(setting.device) for tensor in (base_OI, down_RI, up_OR)]
    host = merged(base_OI, down_RI, up_OR, 2.0, torch.bfloat16)
    if not torch.equal(host, merged(*there, 2.0, torch.bfloat16).cpu()):
        raise RuntimeError("merged adapters on the device differ from the host's in their bits")
    seconds = timed(setting, lambda: merged(*there, 2.0, torch.bfloat16), 3)
    return {"merge_s": seconds * ADAPTED / base_OI.numel()}


def _model(setting: Setting) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(setting.device):
        return AutoModelForCausalLM.from_config(
            setting.eight, dtype=torch.bfloat16, attn_implementation=attention.NAME,
            experts_implementation=experts.NAME,
        )  # fmt: skip


def shape(small: bool) -> PretrainedConfig:
    """Qwen3-8B's, or a small one of the same class."""
    if small:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2000}  # fmt: skip
    else:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
                 "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD,
                 "vocab_size": VOCABULARY}  # fmt: skip
    return Qwen3Config(**sizes, max_position_embeddings=40_960, tie_word_embeddings=False)


def _group(setting: Setting, count: int, length: int) -> TokenRows:
    """Rows that share a quarter of their tokens; all others are learned."""
    shared = length // 4
    ids_BT = np.random.default_rng(0).integers(5, setting.eight.vocab_size, (count, length))
    ids_BT[:, :shared] = ids_BT[0, :shared]
    return TokenRows(tuple(ids_BT), tuple(np.arange(shared, length) for _ in range(count)))


def _played(
    setting: Setting, engine: Engine, prompts: Sequence[list[int]], answer: int
) -> tuple[list[Generation], list[float]]:
    """The answers, and the seconds of each step of the engine."""
    rows = [engine.submit(Request(ids=ids, max_tokens=answer, seed=i, stop=())) for i, ids in enumerate(prompts)]
    steps: list[float] = []
    while not all(row.future.done() for row in rows) and len(steps) < STEPS_AT_MOST:
        begun = time.perf_counter()
        engine.step()
        _wait(setting)
        steps.append(time.perf_counter() - begun)
    return [row.future.result(0) for row in rows], steps


def _wait(setting: Setting) -> None:
    if setting.device.startswith("cuda"):
        torch.cuda.synchronize()
