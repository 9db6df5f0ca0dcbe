"""Exact-resume checkpoints: `checkpoints/step_N/trainer.safetensors`, complete once the folder has that name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import UserError


def save(folder: Path, version: int, tensors: dict[str, Tensor], keep: int, protect: Collection[int] = ()) -> Path:
    """Writes the checkpoint of `version` and drops all but the newest `keep` and those of the versions in `protect`.
    Raises UserError if the disk is full."""
    final = _path(folder, version)
    partial = final.with_name(final.name + ".incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, partial / "trainer.safetensors")
        _sync(partial / "trainer.safetensors")
        # A leftover of the same version was never named by a manifest: the run resumed below it.
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        _sync(folder)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        why = e.strerror if isinstance(e, OSError) else str(e)
        raise UserError(f"the checkpoint of version {version} cannot be written to {folder}: {why}") from None
    for old in sorted(_versions(folder))[:-keep]:
        if old not in protect:
            shutil.rmtree(_path(folder, old))
    return final


def load(folder: Path, version: int) -> dict[str, Tensor]:
    """The tensors of `version`. Raises UserError if that checkpoint is not there."""
    path = _path(folder, version) / "trainer.safetensors"
    if not path.exists():
        have = ", ".join(map(str, sorted(_versions(folder)))) or "none"
        raise UserError(f"version {version} was published but {path} is missing (there: {have}); start a new run")
    return load_file(path)


def _path(folder: Path, version: int) -> Path:
    return folder / f"step_{version}"


def _versions(folder: Path) -> list[int]:
    names = [p.name.removeprefix("step_") for p in folder.glob("step_*")]
    return [int(name) for name in names if name.isdigit()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
