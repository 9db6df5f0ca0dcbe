"""Copies of versions between stores: exact content, a few tensors at a time, as deltas against what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.errors import UserError
from etude.store import open_store
from etude.weights import copies, newest_manifest, read_manifest
from etude.weights.content import load
from etude.weights.manifest import Trust
from etude.weights.publisher import Publisher
from etude.weights.signature import generate_key, read_private_key


def weights(seed: int, like: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of several groups, or those with some elements moved."""
    generator = torch.Generator().manual_seed(seed)
    if like is not None:
        return {n: torch.where(torch.rand(t.shape, generator=generator) < 0.05, t * 1.01, t) for n, t in like.items()}
    made = {f"layer{n}.w": torch.randn(300, 40, generator=generator).bfloat16() for n in range(9)}
    return made | {"big": torch.randn(3000, 200, generator=generator).bfloat16(), "empty": torch.zeros(0, 3)}


@pytest.fixture
def stores(tmp_path: Path, monkeypatch):
    """A store with three versions, and an empty one; groups are smaller than most tensors."""
    monkeypatch.setattr(copies, "GROUP", 50_000)
    monkeypatch.setattr(copies, "PART", 20_000)
    monkeypatch.setattr("etude.weights.publisher.ANCHOR_PART", 60_000)
    source, publisher = open_store(str(tmp_path / "source")), Publisher(open_store(str(tmp_path / "source")))
    versions = [weights(1)]
    versions += [weights(2, versions[0])]
    versions += [weights(3, versions[1])]
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors, (), {}, last=True)
    return source, open_store(str(tmp_path / "copy")), versions


def copied(source, to, version: int, key: Path | None = None, live: str | None = None):
    manifest = read_manifest(source, version)
    create = copies.prepare_copy(source, version, live or manifest.live, to, newest_manifest(to), key, None)
    before = newest_manifest(to)
    made = create()
    assert made.parent == (None if before is None else before.version)
    return made


def assert_holds(store, version: int, tensors) -> None:
    held = load(store, version)[1]
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)


def test_forth_and_back_the_content_is_exact_and_only_changes_are_written(stores) -> None:
    source, to, versions = stores
    sizes = []
    for number, version in enumerate((0, 2, 0, 1)):
        made = copied(source, to, version)
        assert (made.version, made.digest) == (number, read_manifest(source, version).digest)
        assert made.run == newest_manifest(to).run
        assert_holds(to, number, versions[version])
        sizes.append(made.payload_bytes)
    assert len(read_manifest(to, 0).anchor.parts) > 3, "no object holds all of it"
    assert max(sizes[1:]) < sizes[0] / 4
    assert made.anchor == read_manifest(to, 0).anchor


def test_a_new_anchor_is_written_where_the_chain_is_long(stores, monkeypatch) -> None:
    source, to, versions = stores
    monkeypatch.setattr(copies, "ANCHOR_VERSIONS", 2)
    for number in range(4):
        copied(source, to, number % 2)
        assert_holds(to, number, versions[number % 2])
    assert [read_manifest(to, number).anchor.version for number in range(4)] == [0, 0, 2, 2]
    for part in read_manifest(to, 0).anchor.parts:
        to.delete(part.key)
    assert_holds(to, 3, versions[1])


def test_nothing_exists_before_the_manifest_and_other_content_is_refused(stores) -> None:
    source, to, versions = stores
    manifest = read_manifest(source, 0)
    create = copies.prepare_copy(source, 0, manifest.live, to, None, None, None)
    assert newest_manifest(to) is None
    create()
    with pytest.raises(UserError, match="has not the content of that release"):
        copied(source, to, 1, live="0" * 32)
    part = read_manifest(source, 2).delta[0]
    source.put(part.key, source.get(part.key)[:-8] + b"elephant")
    with pytest.raises(UserError, match="choose another version"):
        copied(source, to, 2)
    assert newest_manifest(to).version == 0
    assert_holds(to, 0, versions[0])


def test_a_copy_is_signed(stores, tmp_path: Path) -> None:
    source, to, _ = stores
    generate_key(tmp_path / "key")
    made = copied(source, to, 0, tmp_path / "key")
    assert read_manifest(to, 0, Trust(read_private_key(tmp_path / "key").public_key())) == made
