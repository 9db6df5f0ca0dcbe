"""Estimates the memory that a run needs on each device, from its configuration alone; no weights are read.

States are counted by parameter. Activations and head are measured: one pass of the configured size goes through the
model on PyTorch's meta device, forward and backward, where tensors have sizes and no memory. Bytes of GiB = 2^30 each.

    weights, gradients (float32), master weights and moments (float32, 12 bytes a parameter); with LoRA the last three
        of adapters alone, and the base of the adapted layers
    activations of the tokens of a pass, the head, keys and values of shared prefixes
    weights and caches of the run's engines, for those on the same device
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from etude.config import RLConfig
from etude.errors import UserError
from etude.models import attention
from etude.models.dtypes import computed_dtype, main_dtype, narrower
from etude.models.head import head_of
from etude.models.key_values import cache_mb, configured, cpu_cache_mb
from etude.models.loading import read_config
from etude.models.lora import one_expert, weight_names
from etude.models.text_models import auto_class, keep_text
from etude.trainer.activations import checkpoint_activations
from etude.trainer.head import token_logprobs
from etude.trainer.lora import Adapters
from etude.trainer.optimizer import BUCKET
from etude.trainer.rl.memory import LiveBytes
from etude.trainer.rl.presets import loss_preset

GIB = 2**30
_CONTEXT = 1.0 * GIB  # of a process on a GPU: driver, libraries, workspaces of products; usually 0.5 to 1
_NARROW, _WIDE, _READS = 989e12, 67e12, 3.35e12  # H100 SXM: products in bfloat16 and float32, bytes read; per second
_USED = 0.4  # usual share of these limits in the training of large models
_CHANGED = 0.03  # share of the elements that a version changes; measured: up to 0.028 at lr 1e-5 (docs/results.md)
_NARROWER = 'set trainer.dtype = "bfloat16"'
_SIZES = "etude-sizes"  # name of an experts function with only the sizes of ours
# The beginnings of the terms' names, and the keys of the configuration that their bytes follow from.
_KEYS = {
    "weights of the trainer": "model.path, trainer.dtype",
    "gradients of the self-check": "trainer.self_check",
    "gradients": "model.path, trainer.lora",
    "master weights": "trainer.lora, trainer.offload_optimizer",
    "a bucket": "trainer.offload_optimizer",
    "published weights": "trainer.lora",
    "checkpoint": "trainer.lora",
    "weights of the KL reference": "loss",
    "self-check": "trainer.self_check",
    "base of the adapted layers": "trainer.lora.targets, trainer.offload_optimizer",
    "adapters": "trainer.lora.rank",
    "base and sums": "trainer.lora, inference.servers",
    "activations": "trainer.micro_tokens, rollout.context, trainer.activation_checkpointing",
    "inputs of layers": "trainer.offload_activations, trainer.micro_tokens",
    "head": "trainer.micro_tokens, rollout.tokens",
    "keys and values": "trainer.execution, trainer.micro_tokens",
    "vLLM, ": "inference.gpu_memory_utilization, trainer.device_memory_gb",
    "held and next version": "inference.servers",
    "changes of a version": "trainer.lr, inference.servers",
    "weights of the engines": "model.path, inference.dtype, inference.servers",
    "cache of the engines": "inference.cache_mb, inference.servers",
    "an engine's pass": "inference.max_batch, inference.prefill_tokens",
    "documents": "inference.documents_mb",
    "driver": "trainer.device, inference.device",
}


@dataclass(frozen=True)
class Term:
    """A part of the memory of a device, and advice that makes it smaller, or ""."""

    device: str
    name: str
    bytes: float
    advice: str = ""

    @property
    def keys(self) -> str:
        """The keys of the configuration that the bytes follow from."""
        return next((keys for name, keys in _KEYS.items() if self.name.startswith(name)), "")


@dataclass(frozen=True)
class MemoryTable:
    """All terms, and the memory of the devices, as far as it is known."""

    terms: tuple[Term, ...]
    limits: dict[str, float]
    time: str = ""  # least time of a step; "" without a GPU
    absent: str = ""  # a device of the run that this machine lacks: the table is of another machine

    def needed(self, device: str) -> float:
        """Bytes of all terms of a device."""
        return sum(term.bytes for term in self.terms if term.device == device)

    def text(self) -> str:
        """The table, a line per term and two per device."""
        devices = list(dict.fromkeys(term.device for term in self.terms))
        lines = ["memory in GB of 2^30 bytes, and the keys that it follows from; docs/memory.md says how"]
        for device in devices:
            terms = [t for t in self.terms if t.device == device and t.bytes]
            lines += [f"{t.name:44}{t.bytes / GIB:9.2f} GB  {t.keys}".rstrip() for t in terms]
            limit = self.limits.get(device)
            of = "" if limit is None else f" of {limit / GIB:.1f}"
            most = max(terms, key=lambda t: t.bytes)
            lines.append(f"{device} needs {self.needed(device) / GIB:.1f}{of} GB, most for {most.name}")
        if self.absent:
            lines.append(f"this machine has no {self.absent}: the table is of another, whose host is not checked")
        return "\n".join([*lines, self.time] if self.time else lines)

    def refusal(self) -> str:
        """A sentence with the device that is too small, its largest term, and advice; "" if all fit."""
        for device, limit in self.limits.items():
            needed = self.needed(device)
            if needed <= limit:
                continue
            terms = [t for t in self.terms if t.device == device]
            fixed = [t for t in terms if not t.advice]
            hopeless = sum(t.bytes for t in fixed) > limit
            largest = max(fixed if hopeless else [t for t in terms if t.advice], key=lambda t: t.bytes)
            return (
                f"{device} needs {needed / GIB:.1f} of {limit / GIB:.1f} GB, {largest.bytes / GIB:.1f} of them for "
                f"{largest.name}: {largest.advice or 'take a smaller model, or a device with more memory'}"
            )
        return ""


def memory_table(config: RLConfig) -> MemoryTable:
    """The table of a run. Raises UserError for a model folder without a configuration that transformers supports."""
    trainer, engines = _device(config.trainer.device), [_device(name) for name in config.inference.devices]
    model = _sizes_of(config.model.path, config.trainer.dtype)
    lora = config.trainer.lora
    adapters = None if lora is None else Adapters(model, lora, dict.fromkeys(model.state_dict(), model.dtype))
    terms = [*_states(config, model, adapters, trainer), *_pass(config, model, trainer), *_engines(config, model)]
    devices = Counter([trainer, *engines])
    for device, count in devices.items():
        if device != "host":
            name = f"driver and libraries of {count} process{'es' * (count > 1)}"
            terms.append(Term(device, name, count * _CONTEXT))
    absent = next((d for d in sorted(devices) if d.startswith("cuda") and not torch.cuda.is_available()), "")
    ordered = sorted(terms, key=lambda t: (t.device == "host", t.device))
    time = "" if trainer == "host" else _time(config, model)
    limits = _limits(set(devices), config.trainer.device_memory_gb)
    if not absent and (here := _host_bytes()):
        limits["host"] = here
    return MemoryTable(tuple(ordered), limits, time, absent)


def _time(config: RLConfig, model: PreTrainedModel) -> str:
    """Time of a step with episodes of full length: products of the trainer, reads of the engines."""
    rollout, trainer, text = config.rollout, config.trainer, model.config.get_text_config()
    tokens, sampled = (rollout.prompts * rollout.group * n for n in (rollout.context, rollout.tokens))
    head = head_of(model).weight_VD.numel()
    share = (getattr(text, "num_experts_per_tok", None) or 1) / (getattr(text, "num_experts", None) or 1)
    layers = cast(Any, model.get_decoder()).layers
    active = sum(p.numel() * (share if p.ndim == 3 else 1) for p in layers.parameters())
    products = 3 + trainer.activation_checkpointing - (trainer.lora is not None)  # frozen weights need one less
    linear = 2 * active * tokens * products / _NARROW
    last = 2 * head * sampled * 4 / _WIDE
    size = _engine_dtype(config).itemsize
    keys = rollout.context / 2 * config.inference.max_batch * configured(text).elements * size
    passes = sampled / (config.inference.max_batch * config.inference.count)
    decoding = passes * ((active + head) * size + keys) / _READS
    return (
        f"a step of at most {tokens:,} tokens, {sampled:,} of them sampled, takes {(linear + last) / _USED:,.0f} s of "
        f"training and {decoding / _USED:,.0f} s of decoding on H100s (989 and 67 TFLOP/s and 3.35 TB/s as stated by "
        f"NVIDIA, {_USED:.0%} of them assumed)"
    )


def _device(name: str) -> str:
    if name == "cpu":
        return "host"
    return name if ":" in name else f"{name}:0"


def _limits(devices: set[str], configured_gb: float | None) -> dict[str, float]:
    """Bytes of each device but the host."""
    limits: dict[str, float] = {}
    for device in sorted(devices - {"host"}):
        if configured_gb is not None:
            limits[device] = configured_gb * GIB
        elif device.startswith("cuda") and torch.cuda.is_available():
            limits[device] = torch.cuda.mem_get_info(device)[1]
    return limits


def _host_bytes() -> float:
    """Memory of this machine, or of the process's control group."""
    machine, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    match = re.search(r"MemTotal:\s+(\d+) kB", machine.read_text()) if machine.exists() else None
    total = int(match[1]) * 1024.0 if match else 0.0
    limit = group.read_text().strip() if group.exists() else "max"
    return min(total, float(limit)) if limit.isdigit() and total else total


def _sizes_of(path: str, dtype: str) -> PreTrainedModel:
    """The model of a folder's config.json on the meta device."""
    return on_meta(read_config(Path(path)), getattr(torch, dtype))


def on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a configuration on the meta device, for `activation_bytes`."""
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention.NAME, experts_implementation=_SIZES
        )
    keep_text(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model.eval()


def _states(config: RLConfig, model: PreTrainedModel, adapters: Adapters | None, device: str) -> list[Term]:
    trained = list(model.parameters()) if adapters is None else list(adapters.tensors.values())
    trainer = config.trainer
    published = narrower(main_dtype(Path(config.model.path)), model.dtype) if adapters is None else torch.float32
    count, size = sum(t.numel() for t in trained), published.itemsize
    live = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    held = trainer.offload_optimizer or device == "host"
    terms = [
        Term(device, "weights of the trainer", live, "" if model.dtype.itemsize == 2 else _NARROWER),
        Term(device, "gradients", 4 * count),
        Term(
            "host" if held else device,
            "master weights and moments",
            12 * count,
            "" if held else "set trainer.offload_optimizer = true",
        ),
        Term(device, "a bucket of the update", (16 if trainer.offload_optimizer else 4) * min(BUCKET, count)),
        # Copies of the last and of the next version; on a GPU a third, to find changes there.
        Term("host", "published weights", 2 * size * count),
        # States on the host are written from where they are.
        Term("host", "checkpoint on its way to the disk", 0 if held else 12 * count),
    ]
    if device != "host" and not trainer.offload_optimizer:
        terms.append(
            Term(device, "published weights, to find changes", size * count, "set trainer.offload_optimizer = true")
        )
    engines = 0 if config.inference.urls else config.inference.servers
    if adapters is not None:
        terms += _beside_adapters(config, adapters, live, device)
    else:
        terms.append(Term("host", "held and next version of the engines", 2 * size * count * engines))
    if loss_preset(config.loss).kl_beta:
        terms.append(Term("host", "weights of the KL reference", live))
    if trainer.self_check:
        wider = 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers())) - live
        terms.append(Term(device, "self-check of the first step", wider, "drop trainer.self_check"))
        terms.append(Term("host", "gradients of the self-check", 4 * (2 if wider <= 0 else 3) * count))
    return terms


def _beside_adapters(config: RLConfig, adapters: Adapters, live: int, device: str) -> list[Term]:
    """The memory of adapters besides their states: the base, here and in engines that add to it."""
    base, offload = [t.nbytes for t in adapters.base().values()], config.trainer.offload_optimizer
    advice = "" if offload or device == "host" else "set trainer.offload_optimizer = true"
    engines = 0 if config.inference.urls else config.inference.servers
    return [
        Term("host" if offload else device, "base of the adapted layers", sum(base), advice),
        Term(device, "adapters, and a sum with the base", sum(t.nbytes for t in adapters.tensors.values()) + max(base)),
        # The base, the served sums and the next ones.
        Term("host", "base and sums of the engines", engines * (live + 2 * sum(base))),
    ]


def pass_tokens(config: RLConfig) -> int:
    """Tokens of the largest pass: the budget, or a whole row that exceeds it, but at most those of a batch."""
    rollout = config.rollout
    rows = 1 if config.deterministic or config.trainer.execution == "rows" else rollout.prompts * rollout.group
    return max(rollout.context, min(config.trainer.micro_tokens, rows * rollout.context))


def _pass(config: RLConfig, model: PreTrainedModel, device: str) -> list[Term]:
    """Activations, head and kept keys of the largest pass. If the model's own code cannot run without memory, only the
    inputs of its layers are counted, and the name says so."""
    trainer, text = config.trainer, model.config.get_text_config()
    tokens = pass_tokens(config)
    lower = f"lower trainer.micro_tokens = {trainer.micro_tokens} or rollout.context = {config.rollout.context}"
    advice = lower if trainer.activation_checkpointing else "set trainer.activation_checkpointing = true"
    if trainer.activation_checkpointing:
        checkpoint_activations(model)
    inputs = text.num_hidden_layers * tokens * text.hidden_size * model.dtype.itemsize
    head = head_bytes(model, min(tokens, config.rollout.prompts * config.rollout.group * config.rollout.tokens))
    try:
        kept, peak = activation_bytes(model, tokens, narrow=device != "host")
        name = f"activations of {tokens:,} tokens"
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, NotImplementedError):
        kept = peak = inputs
        name = f"activations of {tokens:,} tokens, inputs of layers alone"
    away = inputs if trainer.offload_activations else 0
    if trainer.activation_checkpointing and not trainer.offload_activations and device != "host":
        advice = f"set trainer.offload_activations = true, or {lower}"
    terms = [
        Term(device, name, kept - away, advice),
        Term("host", "inputs of layers", away),
        # The head's memory is free again when the layers' backward pass begins.
        Term(device, "head, or a layer's backward pass", max(head, peak - kept), lower),
    ]
    if not config.deterministic and trainer.execution not in ("rows", "packed"):
        # As computed, and in float32 with their gradients.
        streamed = tokens * configured(text).elements * (model.dtype.itemsize + 2 * 4)
        what = 'set trainer.execution = "packed", or ' + lower
        terms.append(Term(device, "keys and values of shared prefixes", streamed, what))
    return terms


def activation_bytes(model: PreTrainedModel, tokens: int, *, narrow: bool = True) -> tuple[int, int]:
    """Bytes that the decoder's forward pass over a row of so many tokens keeps for the backward pass, and the peak of
    either, including the weight gradient that is being computed but no other. Of equal layers one is measured. `model`
    is on the meta device; `narrow`: attention computes in the model's type, as on a GPU."""
    decoder = cast(Any, model.get_decoder())
    layers = decoder.layers
    kinds: dict[Any, list[torch.nn.Module]] = defaultdict(list)
    for layer in layers:
        kinds[type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())].append(layer)
    try:
        kept, most = 0, 0
        for alike in kinds.values():
            decoder.layers = torch.nn.ModuleList(alike[:1])
            once, peak = _measured(model, tokens, narrow)
            decoder.layers = torch.nn.ModuleList(alike[:1] * 2)
            of_layer = _measured(model, tokens, narrow)[0] - once
            # The first kind's pass measures what is kept outside of layers.
            kept += len(alike) * of_layer + (0 if kept else once - of_layer)
            most = max(most, peak - once)
        return kept, kept + most
    finally:
        decoder.layers = layers


def _measured(model: PreTrainedModel, tokens: int, narrow: bool) -> tuple[int, int]:
    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [p for p in model.get_decoder().parameters() if p.requires_grad]
    hooks: list[Any] = [p.register_post_accumulate_grad_hook(drop) for p in trained]
    # As behind a layer with adapters: one without them keeps its activations there, too.
    embedding = cast(torch.nn.Module, model.get_input_embeddings())
    hooks.append(embedding.register_forward_hook(lambda module, args, out: out.requires_grad_()))
    ids_1T = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    try:
        with LiveBytes() as live:
            options = {"position_ids": ids_1T, "layout": _Sizes(narrow), "use_cache": False}
            hidden_1TD = cast(Any, model.get_decoder())(input_ids=ids_1T, **options).last_hidden_state
            kept = live.now
            hidden_1TD.backward(torch.empty_like(hidden_1TD))
        return kept, live.peak
    finally:
        for hook in hooks:
            hook.remove()


def head_bytes(model: PreTrainedModel, positions: int) -> int:
    """Peak bytes of the head's forward and backward passes over so many positions, of a model on the meta device."""
    head = head_of(model)
    hidden_SD = torch.empty(
        positions, head.weight_VD.shape[1], dtype=head.weight_VD.dtype, device="meta", requires_grad=True
    )
    at_S = np.arange(positions)
    with LiveBytes() as live:
        logprobs_S, _ = token_logprobs(head, hidden_SD, at_S, np.zeros_like(at_S))
        logprobs_S.backward(torch.empty_like(logprobs_S))
    head.weight_VD.grad = None
    return live.peak


def _engine_dtype(config: RLConfig) -> torch.dtype:
    return computed_dtype(config.inference.dtype, config.inference.device, Path(config.model.path))


def _engines(config: RLConfig, model: PreTrainedModel) -> list[Term]:
    inference, text = config.inference, model.config.get_text_config()
    devices = [_device(name) for name in inference.devices]
    if not devices:  # others have started them, on other devices
        return []
    count = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if inference.engine == "vllm":
        return _vllm(config, model, devices, count)
    size, device = _engine_dtype(config).itemsize, devices[0]
    shape, context = configured(text), config.rollout.context
    per_token = shape.elements * (4 if inference.on_cpu else size)  # the CPU's kernel keeps float32
    least = cpu_cache_mb(shape, context) if inference.on_cpu else cache_mb(shape, context, size)
    cache = (inference.cache_mb or least) * 2**20
    cached = f"cache of the engines, {int(cache // per_token):,} tokens each"
    other = "lower inference.cache_mb, or give the engines another inference.device"
    # A pass over a chunk of a prompt, and the logits of a batch with their softmax.
    work = inference.prefill_tokens * 8 * text.hidden_size * size + 3 * 4 * inference.max_batch * text.vocab_size
    terms = [
        Term(device, "weights of the engines", inference.servers * count * size, "give them another inference.device"),
        Term(device, cached, inference.servers * cache, other),
        Term(device, "an engine's pass", inference.servers * work, "lower inference.max_batch"),
    ]
    if device != "host":
        terms.append(_staged(device, inference.servers * count))
    if config.rollout.documents:
        documents = inference.servers * inference.documents_mb * 2**20
        terms.append(Term(device, "documents of the engines", documents, "lower inference.documents_mb"))
    return terms


def _vllm(config: RLConfig, model: PreTrainedModel, devices: Sequence[str], parameters: int) -> list[Term]:
    """vLLM on a GPU takes its share: weights, passes, graphs, and for keys and values what is left. Raises UserError
    for a share that leaves less than one context."""
    inference, context, terms = config.inference, config.rollout.context, list[Term]()
    share, limits = inference.gpu_memory_utilization, _limits(set(devices), config.trainer.device_memory_gb)
    weights, per_token = 2 * parameters, 2 * configured(model.config.get_text_config()).elements
    for device in devices:
        if device == "host":
            cache = inference.vllm_cache_mb * 2**20
            terms.append(Term(device, "weights of the engines", weights))
            terms.append(Term(device, "cache of the engines", cache, "lower inference.cache_mb"))
            continue
        taken, name = share * limits.get(device, 0.0), f"vLLM, {share:.0%} of the device"
        if taken:
            tokens = int((taken - weights) // per_token)
            name += f", <= {tokens:,} tokens"
            if tokens < context:
                raise UserError(
                    f"inference.gpu_memory_utilization = {share:g} is {taken / GIB:.1f} GB of {device}: beside "
                    f"{weights / GIB:.1f} GB of weights, not one context of {context:,} tokens fits; raise it"
                )
        advice = "lower inference.gpu_memory_utilization, or give it another inference.device"
        terms += [Term(device, name, taken, advice), _staged(device, parameters)]
    return terms


def _staged(device: str, parameters: int) -> Term:
    """A version that an engine on a GPU is about to take: position and value of each changed element."""
    return Term(device, "changes of a version", _CHANGED * (8 + 2) * parameters)


class _Sizes:
    """A layout whose attention keeps the tensors of a flash kernel: queries, keys, values, outputs, log-sum-exps."""

    kept = None

    def __init__(self, narrow: bool) -> None:
        self._narrow = narrow

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
        """Attention output, [B, H, T, value size]."""
        parts = (query_BHTD, key_BKTD.clone(), value_BKTD.clone())
        wide = parts if self._narrow else tuple(x.float() for x in parts)
        return _SizedAttention.apply(*wide).to(query_BHTD.dtype)


class _SizedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _sized_experts(module: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The sizes of `etude.models.experts.etude_experts`, which do not depend on the choice of experts."""
    K = index_TK.shape[1]
    first, second = (one_expert(module, name) for name in weight_names(module))
    made = first(0, hidden_TD.repeat_interleave(K, dim=0))
    out = second(0, module._apply_gate(made) if module.has_gate else module.act_fn(made))
    return (out.view(len(hidden_TD), K, -1) * weight_TK.unsqueeze(-1)).sum(dim=1).to(hidden_TD.dtype)


ExpertsInterface.register(_SIZES, _sized_experts)
