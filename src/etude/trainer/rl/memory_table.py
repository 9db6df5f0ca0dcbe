"""Estimates the memory that a run needs on each device, from its configuration alone; no weights are read.

States are counted by parameter. Activations and head are measured: one pass of the configured size goes through the
model on PyTorch's meta device, forward and backward, where tensors have sizes and no memory. Bytes of GiB = 2^30 each.

    weights, gradients (float32), master weights and moments (float32, 12 bytes a parameter); with LoRA the last three
        of adapters alone, and the base of the adapted layers
    with several ranks a part of these, and gathered layers
    activations of the tokens of a pass, the head, keys and values of shared prefixes
    weights and caches of the run's engines, for those on the same device
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from etude.config import FleetConfig, RLConfig
from etude.errors import UserError
from etude.models.dtypes import computed_dtype, main_dtype, narrower
from etude.models.head import head_of
from etude.models.key_values import cache_mb, configured, cpu_cache_mb
from etude.trainer.activations import checkpoint_activations
from etude.trainer.lora import Adapters
from etude.trainer.optimizer import BUCKET
from etude.trainer.rl.pass_sizes import activation_bytes, head_bytes, sizes_of
from etude.trainer.rl.presets import loss_preset
from etude.weights.ranks import held_rows

GIB = 2**30
_CONTEXT = 1.0 * GIB  # of a process on a GPU: driver, libraries, workspaces of products; usually 0.5 to 1
_COLLECTIVES = 1.0 * GIB  # of NCCL's channels, in groups of all ranks and of parts of them; usually 0.3 to 1
_NARROW, _WIDE, _READS = 989e12, 67e12, 3.35e12  # H100 SXM: products in bfloat16 and float32, bytes read; per second
_USED = 0.4  # usual share of these limits in the training of large models
_CHANGED = 0.03  # share of the elements that a version changes; measured: up to 0.028 at lr 1e-5 (docs/results.md)
_NARROWER = 'set trainer.dtype = "bfloat16"'
# The beginnings of the terms' names, and the keys of the configuration that their bytes follow from.
_KEYS = {
    "weights of the trainer": "model.path, trainer.dtype, trainer.mesh",
    "gradients of the self-check": "trainer.self_check",
    "gradients of a layer": "model.path, trainer.mesh.expert",
    "gradients": "model.path, trainer.lora, trainer.mesh",
    "gathered layers": "model.path, trainer.dtype, trainer.mesh.expert",
    "moments": "trainer.mesh, trainer.offload_optimizer",
    "buffers of collectives": "trainer.mesh",
    "master weights": "trainer.lora, trainer.mesh, trainer.offload_optimizer",
    "a bucket": "trainer.offload_optimizer",
    "published weights": "trainer.lora",
    "checkpoint": "trainer.lora",
    "weights of the KL reference": "loss",
    "self-check": "trainer.self_check",
    "base of the adapted layers": "trainer.lora.targets, trainer.offload_optimizer",
    "adapters": "trainer.lora.rank",
    "base and sums": "trainer.lora, inference.servers",
    "activations": "trainer.micro_tokens, rollout.context, trainer.activation_checkpointing, trainer.mesh.context",
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


def memory_table(config: RLConfig, fleet: FleetConfig | None = None) -> MemoryTable:
    """The table of a run, whose processes are where `fleet` places them. Raises UserError for a model folder without a
    configuration that transformers supports."""
    trainer, engines = _trainer_device(config, fleet), _engine_devices(config, fleet)
    model = sizes_of(config.model.path, config.trainer.dtype)
    lora = config.trainer.lora
    adapters = None if lora is None else Adapters(model, lora, dict.fromkeys(model.state_dict(), model.dtype))
    here = _engines_here(config, fleet)
    terms = [*_states(config, model, adapters, trainer, here), *_pass(config, model, trainer)]
    terms += _engines(config, model, engines)
    devices = Counter([trainer, *engines])
    for device, count in devices.items():
        if device != "host":
            name = f"driver and libraries of {count} process{'es' * (count > 1)}"
            terms.append(Term(device, name, count * _CONTEXT))
            if device == trainer and config.trainer.mesh.ranks > 1:
                terms.append(Term(device, "buffers of collectives", _COLLECTIVES))
    gone = (d.partition(" ")[0] for d in sorted(devices) if d.startswith("cuda") and not torch.cuda.is_available())
    absent = next(gone, "")
    ordered = sorted(terms, key=lambda t: (t.device == "host", t.device))
    time = "" if trainer == "host" else _time(config, model)
    limits = _limits(set(devices), config.trainer.device_memory_gb)
    away = fleet is not None and fleet.trainer is not None and fleet.trainer.placer == "ray"
    if not absent and config.trainer.launcher == "local" and not away and (memory := _host_bytes()):
        limits["host"] = memory
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
    linear = 2 * active * tokens * products / _NARROW / trainer.mesh.ranks
    last = 2 * head * sampled * 4 / _WIDE / trainer.mesh.ranks
    size = _engine_dtype(config).itemsize
    keys = rollout.context / 2 * config.inference.max_batch * configured(text).elements * size
    passes = sampled / (config.inference.max_batch * config.inference.count)
    decoding = passes * ((active + head) * size + keys) / _READS
    return (
        f"a step of at most {tokens:,} tokens, {sampled:,} of them sampled, takes {(linear + last) / _USED:,.0f} s of "
        f"training and {decoding / _USED:,.0f} s of decoding on H100s (989 and 67 TFLOP/s and 3.35 TB/s as stated by "
        f"NVIDIA, {_USED:.0%} of them assumed)"
    )


def _trainer_device(config: RLConfig, fleet: FleetConfig | None) -> str:
    """The device of the trainer, or that of each of its ranks, which may be on other machines."""
    trainer = config.trainer
    away = trainer.launcher == "external" or (fleet is not None and fleet.trainer is not None)
    if trainer.device == "cpu" or (trainer.mesh.ranks == 1 and not away):
        return _device(trainer.device)
    return f"{trainer.device} of each rank"


def _engine_devices(config: RLConfig, fleet: FleetConfig | None) -> list[str]:
    """The device of each worker of the engines, none for those that others have started. The engines of a fleet have
    GPUs that nothing else has: one stands for all."""
    inference = config.inference
    if fleet is None or not fleet.engines:
        return [_device(name) for name in inference.devices]
    if inference.on_cpu:
        return ["host"] * _engines_here(config, fleet)
    placed = any(table.placer != "attach" for table in fleet.engines)
    return [f"{inference.device.partition(':')[0]} of each engine"] if placed else []


def _engines_here(config: RLConfig, fleet: FleetConfig | None) -> int:
    """The number of engines that are started on this machine."""
    if fleet is None or not fleet.engines:
        return 0 if config.inference.urls else config.inference.servers
    return sum(table.count for table in fleet.engines if table.placer == "local")


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
            limits[device] = torch.cuda.mem_get_info(device.partition(" ")[0])[1]
    return limits


def _host_bytes() -> float:
    """Memory of this machine, or of the process's control group."""
    machine, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    match = re.search(r"MemTotal:\s+(\d+) kB", machine.read_text()) if machine.exists() else None
    total = int(match[1]) * 1024.0 if match else 0.0
    limit = group.read_text().strip() if group.exists() else "max"
    return min(total, float(limit)) if limit.isdigit() and total else total


def _states(
    config: RLConfig, model: PreTrainedModel, adapters: Adapters | None, device: str, engines: int
) -> list[Term]:
    trained = list(model.parameters()) if adapters is None else list(adapters.tensors.values())
    trainer, mesh = config.trainer, config.trainer.mesh
    published = narrower(main_dtype(Path(config.model.path)), model.dtype) if adapters is None else torch.float32
    count, size = sum(t.numel() for t in trained), published.itemsize
    live = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    held = trainer.offload_optimizer or device == "host"
    # Of several ranks each has rows of the tensors; adapters are whole on all. Rows that are rounded when they are
    # gathered are the masters themselves.
    parts, rounded = mesh.shard * mesh.context, mesh.ranks > 1 and model.dtype.itemsize == 2
    states, share = (8 if rounded and adapters is None else 12), 1 if adapters is not None else parts
    each = mesh.ranks if device == "host" else 1
    rows = sum(p.numel() for p in model.parameters()) * (4 if rounded else model.dtype.itemsize) / parts
    rows += sum(t.nbytes for t in model.buffers())
    wider = "raise trainer.mesh.shard" if mesh.ranks > 1 else ""
    terms = [
        Term(
            device,
            "weights of the trainer" + (", the masters" if states == 8 else ""),
            rows * each,
            wider or ("" if model.dtype.itemsize == 2 else _NARROWER),
        ),
        Term(device, "gradients", 4 * count / share * each, wider),
        Term(
            "host" if held else device,
            "moments" if states == 8 else "master weights and moments",
            states * count / share * (mesh.ranks if held else 1),
            "" if held else "set trainer.offload_optimizer = true",
        ),
        Term(
            device,
            "a bucket of the update",
            (16 if trainer.offload_optimizer else 4) * min(BUCKET, count / share) * each,
        ),
        # Copies of the last and of the next version, rows of each rank; on a GPU a third, to find changes there.
        Term("host", "published weights", 2 * size * count),
        # States on the host are written from where they are.
        Term("host", "checkpoint on its way to the disk", ((12 - states) if held else 12) * count),
        *_gathered(config, model, device, each),
    ]
    if device != "host" and not trainer.offload_optimizer:
        advice = "set trainer.offload_optimizer = true"
        terms.append(Term(device, "published weights, to find changes", size * count / share, advice))
    if adapters is not None:
        terms += _beside_adapters(config, adapters, live, device, engines)
    else:
        terms.append(Term("host", "held and next version of the engines", 2 * size * count * engines))
    if loss_preset(config.loss).kl_beta:
        terms.append(Term("host", "weights of the KL reference", live * mesh.replicate))
    if trainer.self_check:
        more = 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers())) - live
        terms.append(Term(device, "self-check of the first step", more / parts * each, "drop trainer.self_check"))
        terms.append(Term("host", "gradients of the self-check", 4 * (2 if more <= 0 else 3) * count))
    return terms


def _gathered(config: RLConfig, model: PreTrainedModel, device: str, each: int) -> list[Term]:
    """The whole weights that a rank has for a while: FSDP2 gathers a layer while the one before is computed, and sums a
    layer's gradients over the ranks in float32. Of experts that are divided it gathers those that the rank computes."""
    mesh, width = config.trainer.mesh, model.dtype.itemsize
    if mesh.ranks == 1:
        return []
    layers = cast(Any, model.get_decoder()).layers
    largest = max(sum(p.numel() / (mesh.expert if p.ndim == 3 else 1) for p in la.parameters()) for la in layers)
    inside = {id(p) for p in layers.parameters()}
    outside = [p.numel() for p in model.parameters() if id(p) not in inside]
    raised = "raise trainer.mesh.expert" if any(p.ndim == 3 for p in layers.parameters()) else ""
    terms = [Term(device, "gathered layers, embeddings and head", width * (2 * largest + sum(outside)) * each, raised)]
    if config.trainer.lora is None:
        summed = (width + 4) * max(largest, *outside)
        terms.append(Term(device, "gradients of a layer before their sum", summed * each, raised))
    return terms


def _beside_adapters(config: RLConfig, adapters: Adapters, live: int, device: str, engines: int) -> list[Term]:
    """The memory of adapters besides their states: the base, here and in engines that add to it."""
    base, offload = [held_rows(t).nbytes for t in adapters.base().values()], config.trainer.offload_optimizer
    mesh = config.trainer.mesh
    parts, each = mesh.shard * mesh.context, mesh.ranks if offload or device == "host" else 1
    advice = "" if offload or device == "host" else "set trainer.offload_optimizer = true"
    return [
        Term("host" if offload else device, "base of the adapted layers", sum(base) / parts * each, advice),
        Term(
            device,
            "adapters, and a sum with the base",
            (sum(t.nbytes for t in adapters.tensors.values()) + max(base) / parts)
            * (mesh.ranks if device == "host" else 1),
        ),
        # The base, the served sums and the next ones.
        Term("host", "base and sums of the engines", engines * (live + 2 * sum(base))),
    ]


def pass_tokens(config: RLConfig) -> int:
    """Tokens of a rank's largest pass: the budget, or a whole row that exceeds it, but at most those of its part of a
    batch; ranks that share rows have a slice of each."""
    rollout, mesh = config.rollout, config.trainer.mesh
    alone = config.deterministic or config.trainer.execution == "rows"
    rows = 1 if alone else -(-rollout.prompts * rollout.group // mesh.data_ranks)
    return -(-max(rollout.context, min(config.trainer.micro_tokens, rows * rollout.context)) // mesh.context)


def _pass(config: RLConfig, model: PreTrainedModel, device: str) -> list[Term]:
    """Activations, head and kept keys of the largest pass. If the model's own code cannot run without memory, only the
    inputs of its layers are counted, and the name says so."""
    trainer, text = config.trainer, model.config.get_text_config()
    tokens, ranks = pass_tokens(config), trainer.mesh.ranks
    each = ranks if device == "host" else 1
    lower = f"lower trainer.micro_tokens = {trainer.micro_tokens} or rollout.context = {config.rollout.context}"
    lower += ", or raise trainer.mesh.context" if ranks > 1 else ""
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
        Term(device, name, (kept - away) * each, advice),
        Term("host", "inputs of layers", away * ranks),
        # The head's memory is free again when the layers' backward pass begins.
        Term(device, "head, or a layer's backward pass", max(head, peak - kept) * each, lower),
    ]
    if ranks == 1 and not config.deterministic and trainer.execution not in ("rows", "packed"):
        # As computed, and in float32 with their gradients.
        streamed = tokens * configured(text).elements * (model.dtype.itemsize + 2 * 4)
        what = 'set trainer.execution = "packed", or ' + lower
        terms.append(Term(device, "keys and values of shared prefixes", streamed, what))
    return terms


def _engine_dtype(config: RLConfig) -> torch.dtype:
    return computed_dtype(config.inference.dtype, config.inference.device, Path(config.model.path))


def _engines(config: RLConfig, model: PreTrainedModel, devices: Sequence[str]) -> list[Term]:
    inference, text = config.inference, model.config.get_text_config()
    servers = len(devices)  # of etude's engine
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
        Term(device, "weights of the engines", servers * count * size, "give them another inference.device"),
        Term(device, cached, servers * cache, other),
        Term(device, "an engine's pass", servers * work, "lower inference.max_batch"),
    ]
    if device != "host":
        terms.append(_staged(device, servers * count))
    if config.rollout.documents:
        documents = servers * inference.documents_mb * 2**20
        terms.append(Term(device, "documents of the engines", documents, "lower inference.documents_mb"))
    return terms


def _vllm(config: RLConfig, model: PreTrainedModel, devices: Sequence[str], parameters: int) -> list[Term]:
    """vLLM on a GPU takes its share: weights, passes, graphs, and for keys and values what is left. Raises UserError
    for a share that leaves less than one context."""
    inference, context, terms = config.inference, config.rollout.context, list[Term]()
    share, limits = inference.gpu_memory_utilization, _limits(set(devices), config.trainer.device_memory_gb)
    workers, per_token = inference.workers, 2 * configured(model.config.get_text_config()).elements
    weights = 2 * parameters // (1 if inference.on_cpu else workers)  # slices on each of several GPUs
    for device in devices:
        if device == "host":
            cache = inference.vllm_cache_mb * 2**20
            terms.append(Term(device, "weights of the engines", weights))
            terms.append(Term(device, "cache of the engines", cache, "lower inference.cache_mb"))
            continue
        taken, name = share * limits.get(device, 0.0), f"vLLM, {share:.0%} of the device"
        if taken:
            tokens = int((taken - weights) * workers // per_token)
            name += f", <= {tokens:,} tokens"
            if tokens < context:
                raise UserError(
                    f"inference.gpu_memory_utilization = {share:g} is {taken / GIB:.1f} GB of {device}: beside "
                    f"{weights / GIB:.1f} GB of weights, not one context of {context:,} tokens fits; raise it"
                )
        advice = "lower inference.gpu_memory_utilization, or give it another inference.device"
        terms += [Term(device, name, taken, advice), _staged(device, parameters // workers)]
    return terms


def _staged(device: str, parameters: int) -> Term:
    """A version that an engine on a GPU is about to take: position and value of each changed element."""
    return Term(device, "changes of a version", _CHANGED * (8 + 2) * parameters)
