"""The types in which the files of a Hugging Face folder store tensors, and in which a run publishes them.

A version is published in the types of its checkpoint: bfloat16 matrices, and float32 for the tensors that their makers
store so, such as the router biases of GLM, DeepSeek and MiniMax. A trainer that computes in bfloat16 has rounded a
float32 matrix at loading; that matrix is published in bfloat16, the type it was trained in.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from etude.models.files import headers, shards

Types = Mapping[str, torch.dtype]
_COMPUTES = "etude_computes"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, with its name there. `dtype` is None for a type that no weights are computed in."""

    file: Path
    name: str
    dtype: torch.dtype | None
    elements: int


def stored(root: Path) -> list[StoredTensor]:
    """The tensors of a folder's files, which must be complete (`files.check_folder`)."""
    return [
        StoredTensor(file, name, _FLOATS.get(about["dtype"]), prod(about["shape"]))
        for file, name, about in headers(root)
    ]


def main_dtype(root: Path) -> torch.dtype:
    """The most frequent type of a folder's weights; without weights the type in its configuration, or bfloat16."""
    if not all(file.is_file() for file in shards(root)):
        config = json.loads((root / "config.json").read_text())
        named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
        return named if isinstance(named, torch.dtype) else torch.bfloat16
    counts: Counter[torch.dtype] = Counter()
    for tensor in stored(root):
        if tensor.dtype is not None:
            counts[tensor.dtype] += tensor.elements
    return max(counts, key=lambda dtype: counts[dtype], default=torch.bfloat16)


def exact_dtype(root: Path) -> torch.dtype:
    """The narrowest type that represents all weights of a folder."""
    types = {tensor.dtype for tensor in stored(root) if tensor.dtype is not None}
    return reduce(torch.promote_types, types or {torch.bfloat16})


def computed_dtype(dtype: str, device: str, root: Path) -> torch.dtype:
    """The type that an engine computes in: `dtype` by name, or for "auto" the checkpoint's. On the CPU, "auto" means
    float32, for which the kernels are made; bfloat16 is slower there without special instructions."""
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.float32 if torch.device(device).type == "cpu" else main_dtype(root)


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type that a model computes in. Of one that is divided over ranks it may be narrower than that of its rows."""
    return getattr(model, _COMPUTES, None) or max(model.parameters(), key=lambda parameter: parameter.numel()).dtype


def set_computing_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Says that a model computes in another type than its parameters have."""
    setattr(model, _COMPUTES, dtype)


def published_dtypes(root: Path, model: PreTrainedModel, computed: torch.dtype) -> dict[str, torch.dtype]:
    """The type in which each saved tensor of `model`, loaded from `root`, is published by a trainer that computes in
    `computed`. Trainer and engine get the same result, whatever type they loaded the model in."""
    files, main = _by_live_name(root, model), main_dtype(root)
    buffers = {name for name, _ in model.named_buffers()}
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    types: dict[str, torch.dtype] = {}
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            types[name] = tensor.dtype
            continue
        kept = files[name].dtype if name in files else None
        wide = name in buffers or any(pattern in name for pattern in strict)
        types[name] = narrower(kept or main, torch.float32 if wide else computed)
    return types


def narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """`a` if `b` can represent all its values, else `b`."""
    return a if a == b or torch.promote_types(a, b) == b else b


@torch.no_grad()
def round_to(model: PreTrainedModel, types: Types) -> None:
    """Rounds the weights of `model` to their published types, in place."""
    for name, tensor in model.state_dict().items():
        if narrower(tensor.dtype, types[name]) != tensor.dtype:
            tensor.copy_(tensor.to(types[name]))


@torch.no_grad()
def restore_buffers(root: Path, model: PreTrainedModel) -> None:
    """Restores the stored values of buffers that loading has rounded: small differences of a router's bias decide
    between experts."""
    narrow = {name: b for name, b in model.named_buffers() if b.dtype in (torch.bfloat16, torch.float16)}
    files = _by_live_name(root, model) if narrow else {}
    for name, buffer in narrow.items():
        tensor = files.get(name)
        if tensor is not None and tensor.dtype == torch.float32:
            with safe_open(tensor.file, "pt") as f:
                buffer.data = f.get_tensor(tensor.name).view(buffer.shape).to(buffer.device)


def live_names(root: Path, model: PreTrainedModel) -> Iterator[tuple[StoredTensor, str]]:
    """Each stored tensor of a folder, with its name in the loaded model; its own name if the model lacks it."""
    live: dict[str, Any] = model.state_dict()
    transforms: list[Any] = getattr(model, "_weight_conversions", None) or []
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    for tensor in stored(root):
        name = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, live)[0]
        yield tensor, name if name in live else tensor.name


def _by_live_name(root: Path, model: PreTrainedModel) -> dict[str, StoredTensor]:
    """The stored tensor for each of the model's tensors, by transformers' names after loading. If several become one
    tensor, the one of the widest type."""
    sources: dict[str, StoredTensor] = {}
    for tensor, name in live_names(root, model):
        other = sources.get(name)
        if tensor.dtype is not None and (other is None or other.dtype != torch.float32):
            sources[name] = tensor
    return sources
