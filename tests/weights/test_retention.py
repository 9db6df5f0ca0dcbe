"""What pruning keeps, and that what remains can be had."""

import os
import threading

import pytest
import torch

from etude.errors import UserError
from etude.store import open_store
from etude.weights import manifest, retention
from etude.weights.audit import audit
from etude.weights.content import load
from etude.weights.manifest import Trust
from etude.weights.publisher import Publisher
from etude.weights.receiver import update_to
from tests.helpers.small_tensors import copies, nudged, tensors

VERSIONS = 40


@pytest.fixture
def chain(tmp_path):
    """A store with anchors every ten versions or so, and the tensors of every version."""
    store = open_store(str(tmp_path / "weights"))
    writer, made = Publisher(store, anchor_versions=10, anchor_share=1e9), [tensors(0)]
    for version in range(VERSIONS):
        writer.publish(version, made[-1], (), {})
        for thread in threading.enumerate():
            if thread.name.startswith("anchor-"):
                thread.join(30)
        made.append(nudged(made[-1], version))
    return store, made


def same(a, b) -> bool:
    return all(torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a)


def test_every_version_that_pruning_leaves_is_reachable_from_every_other(chain):
    store, made = chain
    before = sum(entry.bytes for entry in store.entries("payloads"))
    done = retention.collect_garbage(store, prune=True, grace=0)
    assert done.keys
    assert done.bytes + done.kept_bytes == before == done.bytes + sum(e.bytes for e in store.entries("payloads"))
    oldest = retention.floor(manifest.manifests(store))
    assert 0 < oldest < VERSIONS - 10
    for version in range(oldest, VERSIONS):
        assert same(load(store, version)[1], made[version])
    for held in range(oldest, VERSIONS, 7):
        for target in range(held + 1, VERSIONS, 5):
            brought = copies(made[held])
            update_to(store, held, target, brought)
            assert same(brought, made[target])
    with pytest.raises(UserError, match="is gone; choose another version"):
        load(store, oldest - 1)
    assert retention.collect_garbage(store, prune=True, grace=0).keys == ()
    found = audit(store, Trust())
    assert found.problems == ()
    assert found.pruned == len(done.keys)


def test_a_version_in_use_stays_and_can_catch_up(chain):
    store, made = chain
    retention.collect_garbage(store, prune=True, in_use=[3], grace=0)
    assert same(load(store, 3)[1], made[3])
    brought = copies(made[3])
    update_to(store, 3, VERSIONS - 1, brought)
    assert same(brought, made[VERSIONS - 1])
    retention.collect_garbage(store, prune=True, in_use=[3], grace=0)
    assert same(load(store, 3)[1], made[3])
    assert retention.collect_garbage(store, prune=True, grace=0).keys, "let go, it goes"
    with pytest.raises(UserError, match="version 3 is listed as in use, but"):
        retention.collect_garbage(store, prune=True, in_use=[3], grace=0)
    assert same(load(store, VERSIONS - 1)[1], made[VERSIONS - 1])


def test_only_old_objects_that_nobody_names_are_garbage(chain, tmp_path):
    store, _ = chain
    whole = store.list()
    for name in ("payloads/old", "payloads/young", "shares/00000009/attempt-0001.json"):
        store.put(name, bytes(100))
    for name in ("payloads/old", "shares/00000009/attempt-0001.json"):
        os.utime(tmp_path / "weights" / name, (1e9, 1e9))
    dry = retention.collect_garbage(store, dry_run=True)
    assert (dry.keys, dry.bytes) == (("payloads/old", "shares/00000009/attempt-0001.json"), 200)
    assert "payloads/old" in store.list()
    assert retention.collect_garbage(store) == dry
    assert store.list() == sorted([*whole, "payloads/young"])


def test_nothing_is_taken_when_a_manifest_cannot_be_read(chain):
    store, _ = chain
    store.put(manifest.key(7), b"{")
    before = store.list()
    with pytest.raises(UserError, match=r"version 7 .* is damaged.*; nothing was removed"):
        retention.collect_garbage(store, prune=True, grace=0)
    assert store.list() == before
