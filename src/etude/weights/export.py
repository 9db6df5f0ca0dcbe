"""Exports published versions as Hugging Face folders, which any tool can load, and publishes folders as versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import UserError
from etude.models import check_folder
from etude.models.dtypes import exact_dtype, main_dtype
from etude.models.loading import load_model, model_id, named_tensors
from etude.models.lora import DOWN, UP, fused_weights, is_transposed, weight_name
from etude.models.text_models import is_multimodal, tensors_beside
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights.adapters import base_schema, load_live
from etude.weights.content import Folder, load
from etude.weights.manifest import Trust, newest_manifest, published_versions, read_manifest
from etude.weights.publisher import Publisher
from etude.weights.receiver import materialise, update_to
from etude.weights.ulpd.chunk_grid import schema_of
from etude.weights.ulpd.digest import weights_digest

# Names that PEFT, in a sparse model, takes for those of experts; layers with them are named as parameters.
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
Progress = Callable[[str, int, int], None]


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """The exact tensors of a model folder by the names of a version's. Raises UserError."""
    return named_tensors(load_model(folder, dtype=exact_dtype(folder)))


def export(store: Store, version: int, base: Path, out: Path, trust: Trust | None = None) -> PolicyVersion:
    """Writes `out`: the version's weights in safetensors, with the configuration and tokenizer of `base`, the model
    folder that the run began with. `out` appears complete or not at all, with the bytes that the trainer's own model
    would write. Raises UserError if it exists, or if the version is missing, damaged, not trusted or of another
    model."""
    _refuse_existing(out)
    exact = exact_dtype(base)
    model = load_model(base, dtype=exact)
    manifest = materialise(store, version, named_tensors(model), trust)
    if exact != main_dtype(base):  # several types: each tensor in its published one
        published = base_schema(store, manifest).types
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in published:
                tensor.data = tensor.data.to(published[name])
    _write(model, base, out)
    return manifest


def export_adapters(store: Store, version: int, base: Path, out: Path, trust: Trust | None = None) -> PolicyVersion:
    """Writes `out`: the adapters of a version in float32, in PEFT's format (`PeftModel.from_pretrained`; those of
    experts from PEFT 0.19 on). `base` is the model folder that the run began with. Raises UserError as `export` does,
    or if the version holds whole weights."""
    _refuse_existing(out)
    model = load_model(base, dtype=exact_dtype(base))
    manifest, _ = load_live(store, version, named_tensors(model), trust)
    if isinstance(manifest.adapted, msgspec.UnsetType):
        raise UserError(f"version {version} of {store.url} holds whole weights, no adapters: fetch those")
    _, tensors = load(store, version)  # adapters: no chain of these begins with a folder
    layers = sorted(name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN))
    rank = tensors[layers[0] + DOWN].shape[-2]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": manifest.adapted.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        **_targets(model, layers),
    }
    partial = out.with_name(f".{out.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(_in_peft(model, layers, tensors), partial / "adapter_model.safetensors", {"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2))
        partial.rename(out)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{out} cannot be written: {getattr(e, 'strerror', None) or e}; check the disk") from None
    return manifest


def _targets(model: PreTrainedModel, layers: list[str]) -> dict[str, list[str]]:
    """PEFT's targets: linear layers are modules, fused weights parameters. Short names if these select no others, else
    full ones."""
    weights, fused = dict(model.named_parameters()), fused_weights(model)
    modules = [name for name in layers if name not in fused and not (fused and name.rpartition(".")[2] in _OF_EXPERTS)]
    parameters = [weight_name(name, weights) for name in layers if name not in modules]
    if not is_multimodal(model.config):  # its other parts have layers of the same names
        modules = _short(modules, [name for name, _ in cast(Any, model).named_modules()], 1)
        parameters = _short(parameters, weights, 2)
    return {"target_modules": modules} | ({"target_parameters": parameters} if parameters else {})


def _short(names: list[str], every: Collection[str], parts: int) -> list[str]:
    """The last parts of the names if no other name of `every` ends so, else the names."""
    ends = {".".join(name.split(".")[-parts:]) for name in names}
    chosen = {name for name in every if any(name.endswith(f".{end}") for end in ends)}
    return sorted(ends) if chosen == set(names) else names


def _in_peft(model: PreTrainedModel, layers: list[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters by PEFT's names. Those of experts are matrices there, A [E R, I] and B [O, R E], and of several weights
    of a module the earlier ones lie deeper."""
    named: dict[str, Tensor] = {}
    for layer in layers:
        down, up, place = tensors[layer + DOWN], tensors[layer + UP], layer
        if down.ndim == 3:
            down_ERI, up_EOR = (up.mT, down.mT) if is_transposed(model, layer) else (down, up)
            down, up = down_ERI.flatten(0, 1), up_EOR.permute(1, 2, 0).flatten(1)
            holder, _, own = layer.rpartition(".")
            order = [name for name, _ in model.get_submodule(holder).named_parameters(recurse=False)]
            after = [name for name in order[order.index(own) + 1 :] if f"{holder}.{name}" in layers]
            place = holder + ".base_layer" * len(after)
        named |= {
            f"base_model.model.{place}{DOWN}": down.contiguous(),
            f"base_model.model.{place}{UP}": up.contiguous(),
        }
    return named


def advance(
    store: Store,
    base: Path,
    version: int,
    out: Path,
    trust: Trust | None = None,
    progress: Progress = lambda stage, done, total: None,
    began: Folder | None = None,
) -> int:
    """Writes `out`: the weights of the folder `base`, which holds some version, brought to `version`. Returns the
    version in `base`. Reads only the payloads between the two, or an anchor if that is less; an earlier version may
    need the model folder that the run began with, which `began` reads. Raises UserError if `base` holds no published
    version."""
    _refuse_existing(out)
    if (manifest := read_manifest(store, version)) is not None and not isinstance(manifest.adapted, msgspec.UnsetType):
        raise UserError(
            f"version {version} of {store.url} holds adapters, which are added to the model that the run began with: "
            "use `etude weights fetch` with that folder as the base"
        )
    model = load_model(base, dtype=main_dtype(base))
    tensors = named_tensors(model)
    held = _held(store, weights_digest(tensors, schema_of(tensors).types), progress)
    update_to(store, held, version, tensors, trust, began)
    _write(model, base, out)
    return held


def publish_folder(
    store: Store, folder: Path, key: Ed25519PrivateKey | None = None, base: Folder | None = None
) -> PolicyVersion:
    """Publishes the weights of a Hugging Face folder as the next version, as a delta if a version exists. `base` reads
    the model folder that a run's versions begin with. Raises UserError if the newest version is damaged,
    AlreadyPublished if another writer is faster."""
    check_folder(folder)
    tensors = named_tensors(load_model(folder, dtype=main_dtype(folder)))
    try:
        last = newest_manifest(store)
    except ValueError as e:
        raise UserError(f"{e}; publish to another store") from None
    publisher = Publisher(store, key=key, model=model_id(folder))
    if last is not None and not isinstance(last.adapted, msgspec.UnsetType):
        raise UserError(
            f"{store.url} holds versions of adapters, after which no whole weights come: name another store"
        )
    if last is not None:
        publisher.resume(last, load(store, last.version, base)[1])
        publisher.finish_anchor()
    return publisher.publish(last.version + 1 if last else 0, tensors, (), {}, last=True)


def _held(store: Store, wanted: str, progress: Progress) -> int:
    """The newest version with a digest."""
    numbers = published_versions(store)[::-1]
    for done, number in enumerate(numbers):
        progress("find the folder's version", done, len(numbers))
        try:
            manifest = read_manifest(store, number)
        except ValueError:
            continue
        if manifest is not None and manifest.digest == wanted:
            return number
    raise UserError(f"the folder holds no version of {store.url}; use `etude weights fetch` instead")


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")


def _write(model: PreTrainedModel, base: Path, out: Path) -> None:
    partial = out.with_name(f".{out.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        state = model.state_dict() | tensors_beside(base, model)
        model.save_pretrained(partial, state_dict=state)  # pyright: ignore[reportUnknownMemberType]
        for file in base.iterdir():
            weights = file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")
            history = file.name in ("README.md", "corpus.json") or file.suffix == ".jsonl"  # of the base
            if file.is_file() and not weights and not history and not (partial / file.name).exists():
                shutil.copyfile(file, partial / file.name)
        partial.rename(out)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        why = (e.strerror if isinstance(e, OSError) else None) or str(e)
        raise UserError(f"{out} cannot be written: {why}; check the disk") from None
