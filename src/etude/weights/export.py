"""A published version as a plain Hugging Face folder, for any tool that loads one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from etude.errors import UserError
from etude.models.loading import load_model, named_tensors
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights.receiver import materialise


def export(store: Store, version: int, base: Path, out: Path) -> PolicyVersion:
    """Writes `out`: the version's weights in safetensors, with the configuration and tokenizer of `base`.

    `base` is the model folder that the run began with. `out` appears whole or not at all. Raises UserError if it
    exists, or if the version is missing, damaged or of another model.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    model = load_model(base, dtype=torch.bfloat16)
    manifest = materialise(store, version, named_tensors(model))
    partial = out.with_name(f".{out.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)  # pyright: ignore[reportUnknownMemberType]
        for file in base.iterdir():
            if file.is_file() and not _is_weights(file) and not (partial / file.name).exists():
                shutil.copyfile(file, partial / file.name)
        partial.rename(out)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{out} cannot be written: {e.strerror or e}; check the disk") from None
    return manifest


def _is_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")
