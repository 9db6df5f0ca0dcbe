"""The settings that affect an engine's numbers, for `/health`: the controller uses them to find engines that differ."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

import blake3
import numba
import torch

from etude.code import lines_of
from etude.inference.engine.engine import Engine
from etude.models import batch_invariant, gemm
from etude.models.kernels import BLOCK

EngineSetting = str | int | float | bool


def configuration(engine: Engine) -> dict[str, EngineSetting]:
    """Settings by name: precision, kernels, cache, scheduling, swaps, speculation, libraries, processor, threads.
    `head` and `log_softmax` are measured on the loaded model, not read from its configuration."""
    model, config, keys = engine.model, engine.config, engine.cache.keys
    on_cpu = keys.device.type == "cpu"
    plain = on_cpu and keys.dtype == torch.float32
    wide = batch_invariant.float32_head(model) and batch_invariant.float32_head(model, gemm.head)
    return {
        "model": type(model).__name__,
        "dtype": _name(model.dtype),
        "keys": _name(keys.dtype),
        "head": "float32" if wide else "narrower than float32",
        "log_softmax": _name(batch_invariant.log_probs(torch.zeros(1, 2, dtype=model.dtype)).dtype),
        "attention": f"paged, blocks of {BLOCK}, {'numba in float32' if plain else 'torch'}",
        "experts": str(getattr(model.config, "_experts_implementation", None) or "none"),
        "matmul": torch.get_float32_matmul_precision(),
        "batch_invariant": engine.batch_invariant,
        "one_at_a_time": engine.serial,
        "prefix_cache": not engine.serial,
        "cache_mb": config.cache_mb or "auto",
        "documents_mb": config.documents_mb,
        "max_length": engine.max_length,
        "max_batch": config.max_batch,
        "prefill_tokens": config.prefill_tokens,
        "speculate": engine.speculate,
        "routes": engine.routes,
        "swap": "between steps, running sequences keep their keys",
        "torch": torch.__version__,
        "numba": numba.__version__,
        "threads": torch.get_num_threads(),
        "device": keys.device.type,
        "processor": _processor(keys.device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def digest_of(settings: Mapping[str, EngineSetting]) -> str:
    """A digest of settings: 32 hexadecimal digits, the same for equal settings."""
    return blake3.blake3(json.dumps(settings, sort_keys=True).encode()).hexdigest(length=16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _processor(device: torch.device) -> str:
    """The name of the processor or GPU; of a CPU on Linux, the kernel's name for it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = lines_of(info.read_text()) if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
