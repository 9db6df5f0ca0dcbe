"""A chain that begins with the weights of the model folder: version 0 is not written, and readers load the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude.errors import UserError
from etude.models.dtypes import published_dtypes
from etude.models.loading import load_model, named_tensors
from etude.store import Store, open_store
from etude.weights import Trust, manifests, publisher
from etude.weights.audit import audit
from etude.weights.content import load
from etude.weights.export import advance, export, folder_tensors, publish_folder
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.retention import collect_garbage
from tests.helpers.tiny_models import save_random_model

STEPS = 9  # a skip of eight versions among them


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model") / "model", "qwen3", dtype=torch.bfloat16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "weights"))


def published(store: Store, folder: Path, steps: int = STEPS, anchors: int = 200) -> list[dict[str, torch.Tensor]]:
    """The tensors of versions 0 to `steps`."""
    publisher, tensors, versions = Publisher(store, anchors, of_folder=True), folder_tensors(folder), []
    for version in range(steps + 1):
        if version:
            tensors = {name: tensor + (torch.rand_like(tensor) < 0.01) * tensor / 8 for name, tensor in tensors.items()}
        publisher.publish(version, tensors, (), {}, last=version == steps)
        publisher.finish_anchor()
        versions.append(tensors)
    return versions


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def live(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return named_tensors(load_model(folder, dtype=dtype))


def test_nothing_but_manifest_and_schema_is_written(store: Store, folder: Path) -> None:
    published(store, folder, steps=0)
    (manifest,) = manifests(store)
    assert (manifest.kind, manifest.payload_bytes, manifest.changed, manifest.anchor.parts) == ("folder", 0, 0, ())
    assert not list(store.list("payloads/"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_that_has_loaded_the_folder_holds_version_0(store: Store, folder: Path, dtype: torch.dtype) -> None:
    made = published(store, folder)
    tensors = live(folder, dtype)
    receiver = Receiver(store, tensors)
    for version in (0, 1, STEPS):
        update = receiver.poll(version)
        assert update is not None
        assert bool(update.before) is False
        receiver.apply(update)
        assert same({name: t.to(torch.bfloat16) for name, t in tensors.items()}, made[version])


def test_one_that_comes_late_takes_the_deltas_alone(store: Store, folder: Path) -> None:
    made, tensors = published(store, folder), live(folder)
    receiver = Receiver(store, tensors)
    receiver.advance(lambda version, apply: apply())
    assert (receiver.version, same(tensors, made[STEPS])) == (STEPS, True)


def test_another_folder_is_refused(store: Store, folder: Path, tmp_path: Path) -> None:
    published(store, folder)
    other = live(folder)
    other["model.norm.weight"] += 0.125
    with pytest.raises(DamagedVersion, match=r"version 0: its payload is the weights of the model folder .* others"):
        Receiver(store, other).poll()
    with pytest.raises(UserError, match="not at hand here: name that folder"):
        load(store, STEPS)


def test_a_full_copy_ends_the_need_of_the_folder(store: Store, folder: Path) -> None:
    """An anchor is due by the size of the deltas, or their number, as after any other."""
    made = published(store, folder, anchors=3)
    assert manifests(store)[-1].anchor.version > 0
    assert same(load(store, STEPS)[1], made[STEPS])
    receiver, tensors = None, live(folder)
    tensors["model.norm.weight"] += 0.125  # other weights follow the full copy
    receiver = Receiver(store, tensors)
    receiver.advance(lambda version, apply: apply())
    assert same(tensors, made[STEPS])


def test_damaged_tensors_are_read_again_from_the_folder(store: Store, folder: Path) -> None:
    made, tensors = published(store, folder), live(folder)
    reads: list[Path] = []
    source = PayloadSource(store, folder=lambda: reads.append(folder) or folder_tensors(folder))
    receiver = Receiver(store, tensors, source)
    receiver.advance(lambda version, apply: apply())
    held = receiver._held
    assert held is not None
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        tensors[name][3] += 1
        held.bits[name].setflags(write=True)
        held.bits[name][3] ^= 1  # the image, too
    damaged = receiver.scrub(1.0)
    assert len(damaged) == 2
    receiver.write_repair(receiver.find_repair(damaged))
    assert len(reads) == 1, "once for all chunks"
    assert same(tensors, made[STEPS])


def test_readers_name_the_folder(store: Store, folder: Path, tmp_path: Path) -> None:
    made = published(store, folder)
    assert same(load(store, STEPS, lambda: folder_tensors(folder))[1], made[STEPS])
    export(store, STEPS, folder, tmp_path / "out")
    assert same(folder_tensors(tmp_path / "out"), made[STEPS])
    assert (audit(store, Trust()).rebuilt, audit(store, Trust()).problems) == (False, ())
    whole = audit(store, Trust(), folder=lambda: folder_tensors(folder))
    assert (whole.rebuilt, whole.problems) == (True, ())
    assert advance(store, tmp_path / "out", 3, tmp_path / "back", began=lambda: folder_tensors(folder)) == STEPS
    assert same(folder_tensors(tmp_path / "back"), made[3])
    assert collect_garbage(store, prune=True, grace=0).keys == ()
    again = Publisher(store, of_folder=True)
    last = manifests(store)[-1]
    again.resume(last, made[STEPS])
    again.publish(STEPS + 1, made[0], (), {}, last=True)
    assert same(load(store, STEPS + 1, lambda: folder_tensors(folder))[1], made[0])
    publish_folder(store, tmp_path / "back", base=lambda: folder_tensors(folder))
    assert same(load(store, STEPS + 2, lambda: folder_tensors(folder))[1], made[3])


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_folders_of_several_types_are_read_exactly(folder: Path, tmp_path: Path, computed: torch.dtype) -> None:
    """Norms in float32 beside matrices in bfloat16: a run in float32 publishes both as they are."""
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    file = mixed / "model.safetensors"
    wide = {name: t.float() + 1e-3 if "norm" in name else t for name, t in load_file(file).items()}
    save_file(wide, file, {"format": "pt"})
    model, store = load_model(mixed, dtype=computed), open_store(str(tmp_path / "weights"))
    types = published_dtypes(mixed, model, computed)
    tensors = {name: tensor.to(types[name]) for name, tensor in named_tensors(model).items()}
    Publisher(store, of_folder=True).publish(0, tensors, (), {}, last=True)
    assert same(load(store, 0, lambda: folder_tensors(mixed))[1], tensors)
    export(store, 0, mixed, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert same({name: t.to(types[name]) for name, t in folder_tensors(tmp_path / "out").items()}, tensors)
    if computed == torch.float32:
        with pytest.raises(DamagedVersion, match="in float32 there, here in bfloat16: start the engine with dtype"):
            Receiver(store, live(mixed)).poll()


def test_an_anchor_is_several_objects(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is in one of them; a reader puts them together, and names the one that is missing."""
    monkeypatch.setattr(publisher, "ANCHOR_PART", 100_000)
    tensors = folder_tensors(folder)
    Publisher(store).publish(0, tensors, (), {})
    (manifest,) = manifests(store)
    parts = manifest.anchor.parts
    assert len(parts) > 2
    assert [part.first for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert same(load(store, 0)[1], tensors)
    assert audit(store, Trust()).problems == ()
    store.delete(parts[1].key)
    assert (audit(store, Trust()).rebuilt, len(audit(store, Trust()).problems)) == (False, 1)
    with pytest.raises(UserError, match=f"{parts[1].key} is gone"):
        load(store, 0)
