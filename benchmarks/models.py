"""What a real model costs the trainer: memory in tensors without memory, so of any size; time against the plain path.

head-peak/share      peak of the head, forward and backward, over 8,192 positions of Qwen3-0.6B / of the whole softmax
activations/share    bytes that the layers keep for the backward pass with activation checkpointing / without
lora/states-share    master weights and moments of adapters of rank 32 in all layers of Qwen3-0.6B / of all parameters
grad/...             relative L2 distance of the gradients from plain rows in float32; the worse of a dense and a
                     mixture-of-experts model
world-1/overhead     processor time of a pass with the head in chunks and float32 gradients / with the whole softmax and
                     autograd's own, less 1; one process
vllm-run/vs-etude    episodes per second of a run on vLLM / on etude's engine; not run without ETUDE_VLLM_PYTHON
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from benchmarks import asynchrony
from benchmarks.table import Table
from benchmarks.threads import one_thread
from etude.config import LoraConfig, RLConfig
from etude.models import attention, experts
from etude.models.head import Head
from etude.run import launch
from etude.trainer import head
from etude.trainer.activations import checkpoint_activations
from etude.trainer.lora import Adapters
from etude.trainer.optimizer import AdamWSettings, MasterAdamW
from etude.trainer.rl import execution
from etude.trainer.rl.memory import LiveBytes
from etude.trainer.rl.pass_sizes import activation_bytes, on_meta
from etude.trainer.rl.plan import TokenRows, rows

POSITIONS, SHARE, KEPT, STATES, LIMIT, OVERHEAD = 8192, 1.2, 0.2, 0.05, 1e-6, 0.02
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096, "initializer_range": 0.05}  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks, in a minute; `quick` times fewer passes. `not_run` says why a row is missing."""
    table = Table("models")
    not_run: dict[str, str] = {}
    with one_thread():
        _memory(table)
        _gradients(table)
        overhead = _overhead(8 if quick else 32)
        table.add("world-1/overhead", overhead, "x - 1", "the whole softmax and gradients as autograd adds them up")
        table.checks[f"overhead of at most {OVERHEAD:.0%}"] = overhead <= OVERHEAD
    if os.environ.get("ETUDE_VLLM_PYTHON"):
        speeds = {engine: _episodes_per_second(engine) for engine in ("etude", "vllm")}
        table.add("vllm-run/vs-etude", speeds["vllm"] / speeds["etude"], "x", f"etude {speeds['etude']:.2f}/s")
    else:
        not_run["vllm-run/vs-etude"] = "ETUDE_VLLM_PYTHON names no Python with vLLM"
    return table.result() | {"not_run": not_run}


def qwen3_600m() -> Qwen3Config:
    """The shape of Qwen3-0.6B."""
    return Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=40_960,
    )  # fmt: skip


def _memory(table: Table) -> None:
    config = qwen3_600m()
    plain, chunked = (_head_peak(config, whole) for whole in (True, False))
    target = head.CHUNK / POSITIONS
    what = f"whole softmax, {plain / 2**30:.1f} GiB; chunk/S is {target:.3f}"
    table.add("head-peak/share", chunked / plain, "x", what)
    table.checks[f"the head's peak is at most {SHARE} x chunk/S of before"] = chunked <= SHARE * target * plain
    model = on_meta(config, torch.bfloat16)
    before, _ = activation_bytes(model, POSITIONS)
    checkpoint_activations(model)
    after, _ = activation_bytes(model, POSITIONS)
    table.add("activations/share", after / before, "x", f"all kept, {before / 2**30:.1f} GiB of {POSITIONS} tokens")
    table.checks[f"checkpointing keeps at most {KEPT} of the activations"] = after <= KEPT * before
    whole, parts = _states(model.named_parameters()), _states(Adapters(model, LoraConfig(rank=32)).tensors.items())
    table.add("lora/states-share", parts / whole, "x", f"of all parameters, {whole / 2**30:.1f} GiB")
    table.checks[f"states of adapters are at most {STATES} of all"] = parts <= STATES * whole


def _states(trained: Iterable[tuple[str, Tensor]]) -> int:
    optimizer = MasterAdamW(dict(trained), AdamWSettings((0.9, 0.95), 0.0, 1.0))
    return sum(t.nbytes for t in optimizer.state().values() if t.ndim)


def _head_peak(config: PretrainedConfig, whole: bool) -> int:
    at_S = np.arange(POSITIONS)
    with FakeTensorMode():
        weight_VD = torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight_VD.grad_dtype = torch.float32
        hidden_SD = torch.zeros(POSITIONS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as live:
            predict = _whole if whole else head.token_logprobs
            predict(Head(weight_VD), hidden_SD, at_S, at_S)[0].sum().backward()
    return live.peak


def _whole(
    of: Head, hidden_SD: Tensor, of_M: np.ndarray, target_M: np.ndarray, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities as before there were chunks."""
    logprobs_SV = torch.log_softmax(of.logits(hidden_SD) / temperature, dim=-1)
    at_M = torch.from_numpy(of_M * logprobs_SV.shape[1] + target_M).to(hidden_SD.device)
    chosen_M = logprobs_SV.flatten().index_select(0, at_M)
    some_EV = logprobs_SV.detach()[:: head.ENTROPY_STRIDE]
    return chosen_M, -(some_EV.exp() * some_EV).sum(-1)


def _model(mixture: bool, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**SMALL, **sparse) if mixture else Qwen3Config(**SMALL)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, experts_implementation=experts.NAME
    ).train()


def tokens_of(count: int, length: int, vocabulary: int = SMALL["vocab_size"]) -> TokenRows:
    """Rows of random tokens, of which the last three quarters are predicted."""
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(0, vocabulary, length) for _ in range(count))
    return TokenRows(ids, tuple(np.arange(length // 4, length) for _ in range(count)))


def pass_of(model: PreTrainedModel, tokens: TokenRows) -> list[Tensor]:
    """Gradients of a weighted sum of log-probabilities."""
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(0)).to(model.device)
    model.zero_grad()
    execution.run(model, rows(tokens), tokens.count, lambda l_M, at_M: (weight_N[at_M] * l_M).sum())
    return [p.grad for p in model.parameters() if p.grad is not None]


def _gradients(table: Table) -> None:
    tokens = tokens_of(2, 200)
    small_chunks = patch.object(execution, "token_logprobs", _in_chunks_of(16))
    checked = {"chunked": False, "checkpointed": True}
    for name, again in checked.items():
        distance = 0.0
        for mixture in (False, True):
            with patch.object(execution, "token_logprobs", _whole):
                truth = pass_of(_model(mixture), tokens)
            model = _model(mixture)
            if again:
                checkpoint_activations(model)
            with small_chunks:
                distance = max(distance, _distance(pass_of(model, tokens), truth))
        table.add(f"grad/{name}", distance, "relative L2", "plain rows, float32")
        table.checks[f"gradients, {name}, are those of plain rows"] = distance <= LIMIT


def _in_chunks_of(size: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def predict(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return head.token_logprobs(*arguments, **options, chunk=size)

    return predict


def _distance(ours: list[Tensor], truth: list[Tensor]) -> float:
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(ours, truth, strict=True))
    return (apart / sum(float(b.double().square().sum()) for b in truth)) ** 0.5


def _overhead(repeats: int) -> float:
    """Alternately, so that other work on the machine meets both alike; medians."""
    model, tokens = _model(False).bfloat16(), tokens_of(4, 512)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * repeats + 2):
        whole = turn % 2 == 0
        for parameter in model.parameters():
            parameter.grad = None
            parameter.grad_dtype = torch.bfloat16 if whole else torch.float32
        with patch.object(execution, "token_logprobs", _whole) if whole else contextlib.nullcontext():
            began = time.process_time()
            pass_of(model, tokens)
            seconds[whole].append(time.process_time() - began)
    old, new = (statistics.median(seconds[whole][1:]) for whole in (True, False))
    return new / old - 1


def _episodes_per_second(engine: str) -> float:
    """Of a whole run of six steps of 2 x 4 episodes, from the first group to the last version."""
    size = replace(asynchrony.QUICK, median=0.0)
    config = asynchrony.config_of("run", size, 1).model_dump(exclude_unset=True)
    inference = {"engine": engine} if engine == "etude" else {"engine": engine, "dtype": "bfloat16"}
    config["inference"] = inference
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder, contextlib.redirect_stdout(sys.stderr):
        where = Path(folder) / "run"
        launch.train_rl(RLConfig.model_validate(config), where, resume=False, toml=None)
        return asynchrony.measured(where, size, 1).rate
