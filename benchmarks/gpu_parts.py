"""Steps of `make gpu` in one process: kernels against the host's, then a random model of Qwen3-8B's shape with adapters
in the trainer, and the engine. A run of recipes/qwen3-8b-1x80g.toml meets all of it on one GPU. `--small` takes a small
model of the same class.

A step fills `figures` as it goes, so what it has measured is kept when it fails; what should be equal and is not raises
RuntimeError.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.gpu import Setting
from etude.config import EngineConfig, LoraConfig, TrainerConfig
from etude.inference.engine import loading
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.engine.sampling import on_device, on_host, sample, uniform
from etude.models import attention, batch_invariant, experts, gemm
from etude.models.attention import SegmentLayout
from etude.models.lora import merged
from etude.models.segments import Graph, Node
from etude.records import Generation
from etude.store import open_store
from etude.trainer.activations import checkpoint_activations
from etude.trainer.lora import AdapterAdamW, for_adapters
from etude.trainer.rl import execution
from etude.trainer.rl.plan import Execution, TokenRows, plan, shape_of
from etude.trainer.rl.trial import allowed, log_probs
from etude.weights.manifest import manifests
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.ulpd import weights_digest

Figures = dict[str, Any]
LAYERS, HIDDEN, MLP, HEADS, GROUPS, HEAD, VOCABULARY = 36, 4096, 12_288, 32, 8, 128, 151_936
ADAPTED = LAYERS * (HIDDEN * HEAD * (2 * HEADS + 2 * GROUPS) + 3 * HIDDEN * MLP)  # parameters of all linear layers
MICRO_TOKENS, RANK, LONG = 16_384, 32, 12_000
ROUNDS = 2  # timed, after one that compiles


def digests(setting: Setting, figures: Figures) -> None:
    """Digests of tensors of odd sizes against the host's, and bytes per second."""
    noise = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32):
        shapes = {"a.weight": (3000, 257), "b": (5,), "c": (1,)}
        tensors = {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in shapes.items()}
        types = dict.fromkeys(tensors, dtype)
        _equal(weights_digest(tensors, types), weights_digest(_there(setting, tensors), types), f"digests of {dtype}")
    large = {"w": torch.zeros(2**16 if setting.small else 2**28, dtype=torch.bfloat16, device=setting.device)}
    figures["GB_per_s"] = large["w"].nbytes / 1e9 / timed(setting, lambda: weights_digest(large))


def flex(setting: Setting, figures: Figures) -> None:
    """The compiled attention of shared prompts against the host's dense one: outputs and gradients, the largest
    difference by heads and type. Few queries of large heads take another kernel."""
    sizes = ((70, 0, ()), (33, 70, (0,)), (300, 70, (0,)), (5, 370, (0, 2)), (1, 375, (0, 2, 3)))
    forest = Graph(tuple(Node(np.arange(length), start, sees) for length, start, sees in sizes))
    few = Graph((Node(np.arange(38), 0, ()),))
    worst = 0.0
    for name, graph, heads, size, dtype in (
        ("bfloat16", forest, (32, 8), 128, torch.bfloat16), ("few queries", few, (8, 2), 128, torch.bfloat16),
        ("float32", forest, (4, 2), 16, torch.float32), ("odd heads", forest, (3, 1), 16, torch.float32),
    ):  # fmt: skip
        try:
            figures[name] = _flex_difference(setting, graph, heads, size, dtype)
            worst = max(worst, figures[name])
        except Exception as e:
            figures[name], worst = f"{type(e).__name__}: {e}"[:300], float("inf")
    if worst > 4e-2:  # bfloat16, or TF32, of values of size 1 and gradients of size 10
        raise RuntimeError("compiled and dense attention differ")


def _flex_difference(setting: Setting, graph: Graph, heads: tuple[int, int], size: int, dtype: torch.dtype) -> float:
    noise = torch.Generator().manual_seed(0)
    shapes = [(1, count, graph.length, size) for count in (heads[0], heads[1], heads[1], heads[0])]
    query, key, value, weight = (torch.randn(shape, generator=noise).to(dtype) for shape in shapes)
    found: list[list[Tensor]] = []
    for device in (setting.device, "cpu"):
        leaves = [x.to(device).requires_grad_() for x in (query, key, value)]
        out = SegmentLayout(graph, []).attend(0, *leaves, 0.25)
        gradients = torch.autograd.grad((out * weight.to(device)).sum(), leaves)
        found.append([x.detach().float().cpu() for x in (out, *gradients)])
    return max(float((a - b).abs().max() / max(1.0, float(b.abs().max()))) for a, b in zip(*found, strict=True))


def merged_bits(setting: Setting, figures: Figures) -> None:
    """Bits of merged adapters against the host's, and the seconds of all layers of the model."""
    rows, columns = (256, 128) if setting.small else (HIDDEN, HIDDEN)
    noise = torch.Generator().manual_seed(2)
    tensors = {
        "base": torch.randn(rows, columns, generator=noise).bfloat16(),
        "down": torch.randn(RANK, columns, generator=noise) / 64,
        "up": torch.randn(rows, RANK, generator=noise) / 100,
    }
    there = _there(setting, tensors)
    some = {name: x[:512] if name != "down" else x for name, x in tensors.items()}
    host = merged(*some.values(), 2.0, torch.bfloat16)
    ours = merged(*there.values(), 2.0, torch.bfloat16)
    _equal(True, torch.equal(host, ours[:512].cpu()), "merged adapters")
    seconds = timed(setting, lambda: merged(*there.values(), 2.0, torch.bfloat16))
    figures["s_of_the_model"] = seconds * ADAPTED / ours.numel()


def publish_follow(setting: Setting, figures: Figures) -> None:
    """Versions that are published from the device have the digests of the host's (bytes of both payloads); a receiver
    on the device follows to them."""
    rows = 256 if setting.small else 8192
    figures["GB"] = 4 * rows * 4096 * 2 / 1e9
    digests, payloads = list[list[str]](), list[int]()
    for place, count in (("cpu", 64), (setting.device, 64), (setting.device, rows)):
        noise = torch.Generator().manual_seed(3)
        host = {f"{i}.weight": torch.randn(count, 4096, generator=noise).bfloat16() for i in range(4)}
        changes = [(torch.rand(count, 4096, generator=noise) < 0.01).bfloat16() / 64 for _ in host]
        tensors = {name: x.to(place) for name, x in host.items()}
        live = {name: x.clone() for name, x in tensors.items()}
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            store = open_store(folder)
            publisher, receiver = Publisher(store, 8), Receiver(store, live)
            for number in range(2):
                begun = time.perf_counter()
                publisher.publish(number, tensors, (), {})
                published = time.perf_counter()
                receiver.apply(receiver.poll())
                wait(setting)
                if count == rows:
                    figures |= {f"publish{number}_s": published - begun,
                                f"follow{number}_s": time.perf_counter() - published}  # fmt: skip
                _equal(True, all(torch.equal(tensors[n], live[n]) for n in tensors), f"version {number} of a follower")
                tensors = {n: x + c.to(place) * x for (n, x), c in zip(tensors.items(), changes, strict=True)}
            publisher.finish_anchor()
            if count == 64:
                payloads.append(sum(m.payload_bytes for m in manifests(store)))
                digests.append([m.digest for m in manifests(store)])
    figures["payloads"] = payloads
    _equal(digests[0], digests[1], "versions")


def _memory() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def model(setting: Setting, figures: Figures) -> None:
    """The random model, and its adapters."""
    begun = time.perf_counter()
    made = _model(setting)
    figures |= {"model_s": time.perf_counter() - begun, "parameters": sum(p.numel() for p in made.parameters())}
    begun = time.perf_counter()
    _adapters(setting)
    figures |= {"adapters_s": time.perf_counter() - begun, "gib": peak(setting)}


def exact(setting: Setting, figures: Figures) -> None:
    """The trial before the first step, of rows and of shared prompts."""
    for kind in ("rows", "packed"):
        begun = time.perf_counter()
        figures[kind] = allowed(_model(setting).train(), kind)
        figures[f"{kind}_s"] = time.perf_counter() - begun


def rows(setting: Setting, figures: Figures) -> None:
    """A pass, forward and backward, over a group of eight: each row alone."""
    _passes(setting, figures, "rows")


def packed(setting: Setting, figures: Figures) -> None:
    """The same with the shared quarter once; gradients against those of rows."""
    _passes(setting, figures, "packed")


def streaming(setting: Setting, figures: Figures) -> None:
    """The same in several passes below the shared quarter."""
    _passes(setting, figures, "streaming")


def _passes(setting: Setting, figures: Figures, kind: Execution) -> None:
    length = 64 if setting.small else 4096
    tokens = _group(setting, 8, length)
    reset_peak(setting)
    seconds, gradient = _pass(setting, tokens, kind, MICRO_TOKENS)
    figures |= {"s": seconds, "tokens_per_s": 8 * length / seconds, "peak_gib": peak(setting)}
    if kind == "rows":
        _of_rows[setting] = gradient
    elif setting in _of_rows:
        figures["distance"] = _distance(gradient, _of_rows[setting])


def update(setting: Setting, figures: Figures) -> None:
    """Of adapters and of the weights that follow them; the digest of the model."""
    optimizer = _adapters(setting)
    _pass(setting, _group(setting, 2, 64), "rows", MICRO_TOKENS, rounds=1)
    optimizer.collect()
    begun = time.perf_counter()
    optimizer.apply(1e-5)
    wait(setting)
    figures["update_s"] = time.perf_counter() - begun
    figures["digest_s"] = timed(setting, optimizer.adapted, 1)


def activations(setting: Setting, figures: Figures) -> None:
    """Two rows with all activations kept, with layers computed again, and with their inputs in the host's memory:
    seconds, peak, and the distance of gradients."""
    trained, tokens, first = _model(setting).train(), _group(setting, 2, 64 if setting.small else 2048), None
    _adapters(setting)
    layers = [module for module in trained.modules() if isinstance(module, GradientCheckpointingLayer)]
    for name in ("host", "again", "kept"):  # the largest last: it may not fit
        checkpoint_activations(trained, offload=name == "host")
        for layer in layers:
            layer.gradient_checkpointing = name != "kept"
        reset_peak(setting)
        try:
            seconds, gradient = _pass(setting, tokens, "rows", MICRO_TOKENS)
            first = gradient if first is None else first
            figures |= {f"{name}_s": seconds, f"{name}_peak_gib": peak(setting),
                        f"{name}_distance": _distance(gradient, first)}  # fmt: skip
        finally:
            checkpoint_activations(trained)


def engine_exact(setting: Setting, figures: Figures) -> None:
    """The engine's trial, against transformers' own forward pass."""
    figures["trial"] = loading.trial(_engine(setting)) or "exact"


def engine_1(setting: Setting, figures: Figures) -> None:
    """A row of 512 tokens: milliseconds of a step that decodes, seconds of the slowest, peak."""
    _decode(setting, figures, [512])


def engine_16(setting: Setting, figures: Figures) -> None:
    """16 rows."""
    _decode(setting, figures, [512] * 16)


def engine_64(setting: Setting, figures: Figures) -> None:
    """64 rows."""
    _decode(setting, figures, [512] * 64)


def engine_64_one_long(setting: Setting, figures: Figures) -> None:
    """63 rows beside one of 12,000 tokens: attention pads all to the longest."""
    _decode(setting, figures, [LONG] + [512] * 63)


def _decode(setting: Setting, figures: Figures, lengths: list[int]) -> None:
    answer = 8 if setting.small else 48
    draw = partial(np.random.default_rng(1).integers, 5, shape(setting).vocab_size)
    prompts = [draw(min(n, 200) if setting.small else n).tolist() for n in lengths]
    reset_peak(setting)
    steps: list[float] = []
    made = _played(setting, prompts, answer, steps)
    figures |= {"step_ms": 1e3 * statistics.median(steps[-answer // 2 :]), "slowest_s": max(steps),
                "peak_gib": peak(setting), "steps": len(steps), "failed": sum(g is None for g in made)}  # fmt: skip
    if figures["failed"]:
        raise RuntimeError(f"{figures['failed']} of {len(made)} requests failed")


def sampling(setting: Setting, figures: Figures) -> None:
    """64 rows: milliseconds, plain and with top-p, and the host's tokens from the same log-probabilities."""
    width = shape(setting).vocab_size
    logits_NV = 3 * torch.randn(64, width, device=setting.device)
    one_N, seed_N = np.ones(64), np.arange(64)
    for name, top_p_N in (("plain", one_N), ("top_p", 0.95 * one_N)):
        figures[f"{name}_ms"] = 1e3 * timed(setting, partial(sample, logits_NV, one_N, top_p_N, seed_N, seed_N))
        log_probs_NV, wrong = batch_invariant.log_probs(logits_NV), 0
        for turn in range(4 if setting.small else 2):
            given = (one_N, top_p_N, uniform(seed_N, seed_N + turn), {})
            ours, theirs = on_device(log_probs_NV, *given), on_host(log_probs_NV.cpu(), *given)
            # exp of two devices differs in the last digit: draws at the end of an interval may differ
            wrong += int(((ours.ids_N != theirs.ids_N) & (theirs.margin_N > 1e-5)).sum())
        figures[f"{name}_wrong"] = wrong
    _equal([0, 0], [figures["plain_wrong"], figures["top_p_wrong"]], "draws")


def k2(setting: Setting, figures: Figures) -> None:
    """Mean squared difference of the engine's log-probabilities from the trainer's on one answer, and the largest."""
    prompt = np.random.default_rng(2).integers(5, shape(setting).vocab_size, 64).tolist()
    (generation,) = _played(setting, [prompt], 8 if setting.small else 48, [])
    if generation is None:
        raise RuntimeError("the request failed")
    row = np.array([*prompt, *generation.ids])
    trained = log_probs(_model(setting).eval(), "rows", [row])[0][-len(generation.ids) :]
    difference = np.array(generation.logprobs) - trained
    figures |= {"k2": float((difference**2).mean()), "most": float(np.abs(difference).max())}


def head(setting: Setting, figures: Figures) -> None:
    """Logits of 64 rows: with the head widened to float32 as a whole, as the engine does it, and as a product of
    bfloat16 factors with float32 sums; milliseconds, peak, and the error against float64 of the largest logit."""
    weight_VD = torch.randn(shape(setting).vocab_size, shape(setting).hidden_size, device=setting.device).bfloat16() / 8
    hidden_SD = torch.randn(64, weight_VD.shape[1], device=setting.device).bfloat16()
    true_SV = hidden_SD.double() @ weight_VD[:4096].double().T
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "whole": batch_invariant.head, "engine": gemm.head,
        "narrow": lambda h, w: torch.mm(h, w.T, out_dtype=torch.float32),
    }  # fmt: skip
    for name, way in ways.items():
        if name == "narrow" and not setting.on_gpu:
            continue  # PyTorch has it for CUDA alone
        reset_peak(setting)
        figures[f"{name}_ms"] = 1e3 * timed(setting, partial(way, hidden_SD, weight_VD))
        error = (way(hidden_SD, weight_VD[:4096]).double() - true_SV).abs().max() / true_SV.abs().max()
        figures |= {f"{name}_peak_gib": peak(setting), f"{name}_error": float(error)}


# What steps share -------------------------------------------------------------------------------------------------


def clean() -> None:
    """Drops the engine, which a step that was cut may have left with its requests."""
    _engine.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def shape(setting: Setting) -> Qwen3Config:
    """Qwen3-8B's, or a small one of the same class."""
    if setting.small:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2000}  # fmt: skip
    else:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
                 "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD,
                 "vocab_size": VOCABULARY}  # fmt: skip
    return Qwen3Config(**sizes, max_position_embeddings=40_960, tie_word_embeddings=False)


@cache
def _model(setting: Setting) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(setting.device):
        return AutoModelForCausalLM.from_config(
            shape(setting), dtype=torch.bfloat16, attn_implementation=attention.NAME,
            experts_implementation=experts.NAME,
        )  # fmt: skip


@cache
def _adapters(setting: Setting) -> AdapterAdamW:
    trained = _model(setting).train()
    checkpoint_activations(trained)
    config = TrainerConfig(device=setting.device, offload_optimizer=setting.on_gpu)
    types = dict.fromkeys(trained.state_dict(), torch.bfloat16)
    return for_adapters(trained, config, LoraConfig(rank=RANK, alpha=2.0 * RANK), types)


@cache
def _engine(setting: Setting) -> Engine:
    cache_mb, longest = (64, 512) if setting.small else (16_384, 16_384)
    config = EngineConfig(
        device=setting.device, dtype="bfloat16", cache_mb=cache_mb, max_batch=64, speculate=False
    )  # fmt: skip
    return Engine(_model(setting).eval(), config, max_length=longest)


_of_rows: dict[Setting, Tensor] = {}  # gradients of plain rows


def _group(setting: Setting, count: int, length: int) -> TokenRows:
    """Rows that share a quarter of their tokens; all others are learned."""
    shared = length // 4
    ids_BT = np.random.default_rng(0).integers(5, shape(setting).vocab_size, (count, length))
    ids_BT[:, :shared] = ids_BT[0, :shared]
    return TokenRows(tuple(ids_BT), tuple(np.arange(shared, length) for _ in range(count)))


def _pass(
    setting: Setting, tokens: TokenRows, kind: Execution, micro_tokens: int, rounds: int = ROUNDS
) -> tuple[float, Tensor]:
    """Seconds of a pass, forward and backward, and the gradient of all adapters."""
    trained, optimizer = _model(setting).train(), _adapters(setting)
    parts = plan(tokens, kind, micro_tokens, shape_of(trained)).parts
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(4)).to(setting.device)

    def work() -> None:
        for tensor in optimizer.adapters.tensors.values():
            tensor.grad = None
        execution.run(trained, parts, tokens.count, lambda logprobs_N, at: (weight_N[at] * logprobs_N).sum())

    seconds = timed(setting, work, rounds)
    found = [x.grad.flatten() for x in optimizer.adapters.tensors.values() if x.grad is not None]
    return seconds, torch.cat(found)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2 distance."""
    return float((ours - theirs).norm() / theirs.norm())


def _played(setting: Setting, prompts: Sequence[list[int]], answer: int, steps: list[float]) -> list[Generation | None]:
    """The answers, None for those that failed; adds the seconds of each step of the engine."""
    engine = _engine(setting)
    rows = [engine.submit(Request(ids=ids, max_tokens=answer, seed=i, stop=())) for i, ids in enumerate(prompts)]
    while not all(row.future.done() for row in rows):
        begun = time.perf_counter()
        engine.step()
        wait(setting)
        steps.append(time.perf_counter() - begun)
    return [None if row.future.exception() else row.future.result(0) for row in rows]


def _there(setting: Setting, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(setting.device) for name, tensor in tensors.items()}


def _equal(wanted: object, found: object, what: str) -> None:
    if wanted != found:
        raise RuntimeError(f"{what} on the device differ: {found} in place of {wanted}")


def timed(setting: Setting, work: Callable[[], Any], rounds: int = 3) -> float:
    """Seconds of `work`, the median after one try."""
    seconds: list[float] = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        work()
        wait(setting)
        seconds.append(time.perf_counter() - begun)
    return max(statistics.median(seconds[1:]), 1e-9)


def wait(setting: Setting) -> None:
    """Until the device has done its work."""
    if setting.on_gpu:
        torch.cuda.synchronize()


def reset_peak(setting: Setting) -> None:
    """Begins a period of `peak`."""
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()


def peak(setting: Setting) -> float:
    """GiB on the device at most; 0 elsewhere."""
    return torch.cuda.max_memory_allocated() / 2**30 if setting.on_gpu else 0.0
