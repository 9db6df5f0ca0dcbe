"""The tiny dataset under another name, and with more held-out functions."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from etude.tasks import dataset

TINY = Path(__file__).parents[1] / "tasks/data/tiny"


def renamed(folder: Path, name: str) -> Path:
    """A copy of the tiny dataset whose repository is called `name`."""
    shutil.copytree(TINY, folder)
    manifest = msgspec.json.decode((folder / "dataset.json").read_bytes(), type=dataset.Manifest)
    manifest = msgspec.structs.replace(manifest, name=name)
    own = dataset._own_digest(manifest)  # type: ignore[reportPrivateUsage]
    manifest = msgspec.structs.replace(manifest, digests=manifest.digests | {"dataset.json": own})
    (folder / "dataset.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def widened(folder: Path, functions: int) -> Path:
    """A copy of the tiny dataset whose held-out task stands there `functions` times, each of another function."""
    shutil.copytree(TINY, folder)
    made = dataset.load_dataset(folder)
    (held,) = made.split("heldout")
    path, _, name = held.function.partition("::")
    more = [
        msgspec.structs.replace(held, id=f"{held.id}-{n}", function=f"{path}::{name}_{n}") for n in range(1, functions)
    ]
    shutil.rmtree(folder / "tasks")
    dataset.save(folder, made.manifest, [*made.tasks, *more])
    return folder
