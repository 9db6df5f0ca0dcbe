import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from etude.errors import UserError
from etude.store import Store, open_store
from etude.weights import manifest
from etude.weights.content import load
from etude.weights.payloads import DamagedVersion
from etude.weights.publisher import AlreadyPublished, Publisher
from etude.weights.receiver import LiveTensors, Receiver, WeightsMismatch, materialise
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.small_tensors import copies, nudged, tensors, widened


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "weights"))


def publish(store: Store, count: int, anchor_versions: int, anchor_share: float = 0.5):
    """Versions 0 to count - 1: their manifests and tensors."""
    publisher, made = Publisher(store, anchor_versions, anchor_share), [tensors(0)]
    published = [publisher.publish(0, made[0], (), {})]
    for version in range(1, count):
        made.append(nudged(made[-1], version))
        published.append(publisher.publish(version, made[-1], (), {}))
    return published, made


def anchors_written():
    """Waits for the anchors that are being written."""
    for thread in threading.enumerate():
        if thread.name.startswith("anchor-"):
            thread.join(30)
            assert not thread.is_alive()


def test_an_engine_follows_a_chain_of_versions_exactly(store):
    publisher = Publisher(store, anchor_versions=4)
    current = tensors(0)
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    assert receiver.poll() is None
    for version in range(10):
        published = publisher.publish(version, current, (version,), {"loss": 1.0})
        assert published.kind == ("delta" if version else "anchor")
        assert published.digest == weights_digest(current)
        if version % 3 == 0:  # an engine may skip versions
            before = copies(live)
            update = receiver.poll()
            assert all(torch.equal(before[name], live[name]) for name in live), "staging must not touch live tensors"
            assert receiver.version == version - 3 if version else -1
            receiver.apply(update)
            assert weights_digest(live) == published.digest
            assert receiver.version == version
            assert receiver.manifest == published
            assert receiver.poll() is None
        current = nudged(current, version)
    assert [m.groups for m in manifest.manifests(store)] == [(v,) for v in range(10)]
    assert [m.version for m in manifest.manifests(store, after=6)] == [7, 8, 9]
    assert manifest.newest_manifest(store).version == 9


def test_the_first_version_is_written_where_it_is_not_there_yet(store):
    """An engine that has loaded the folder of the run holds version 0: nothing is copied, and nothing written."""
    publisher, current = Publisher(store, 4), tensors(0)
    published = publisher.publish(0, current, (), {})
    live = widened(current)
    receiver = Receiver(store, live)
    before = {name: tensor._version for name, tensor in live.items()}
    update = receiver.poll()
    assert (dict(update.before), update.changes) == ({}, None)
    receiver.apply(update)
    assert {name: tensor._version for name, tensor in live.items()} == before, "no tensor was written to"
    assert (receiver.version, weights_digest(live)) == (0, published.digest)
    other = widened(current)
    name = sorted(other)[0]
    other[name].view(-1)[-1] += 1
    receiver = Receiver(store, other)
    update = receiver.poll()
    assert list(update.before) == [name]
    receiver.apply(update)
    assert weights_digest(other) == published.digest
    receiver.undo(update)
    assert weights_digest(other) != published.digest


def test_an_update_that_was_not_applied_is_offered_again(store):
    published, _ = publish(store, 2, 8)
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.poll()
    update = receiver.poll()
    assert update.manifest == published[1]
    receiver.apply(update)
    assert weights_digest(live) == published[1].digest


def test_a_receiver_can_be_held_at_a_version(store):
    published, _ = publish(store, 5, 8)
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll(limit=2))
    assert weights_digest(live) == published[2].digest
    assert receiver.poll(limit=2) is None
    receiver.apply(receiver.poll())
    assert receiver.version == 4


def test_of_two_publishers_of_a_version_one_wins_and_the_other_learns_what_it_published(store):
    barrier, results = threading.Barrier(2), {}

    def run(seed: int) -> None:
        publisher = Publisher(store, 8)
        barrier.wait(20)
        try:
            results[seed] = publisher.publish(0, tensors(seed), (seed,), {})
        except AlreadyPublished as e:
            results[seed] = e

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    winner = manifest.read_manifest(store, 0).groups[0]
    assert results[winner].digest == weights_digest(tensors(winner))
    lost = results[3 - winner]
    assert isinstance(lost, AlreadyPublished)
    assert lost.manifest == results[winner]
    assert "another trainer has published version 0" in str(lost)
    live = tensors(9)
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    assert weights_digest(live) == weights_digest(tensors(winner))


KILLED = """
import sys
from tests.helpers.small_tensors import tensors
from etude.store import open_store
from etude.weights.manifest import newest_manifest
from etude.weights.publisher import Publisher
store = open_store(sys.argv[1])
publisher = Publisher(store, 8)
publisher.resume(newest_manifest(store), tensors(0))
publisher.publish(1, tensors(1), (7,), {})
"""


def test_a_trainer_killed_between_payload_and_manifest_leaves_no_version(store):
    Publisher(store, 8).publish(0, tensors(0), (), {})
    command = [sys.executable, "-c", KILLED, store.url]
    environment = os.environ | {"ETUDE_FAILPOINT": "publisher.payload:1"}
    assert subprocess.run(command, env=environment, timeout=120).returncode == -signal.SIGKILL
    assert len(store.list("payloads")) == 2, "the payload was written"
    assert manifest.newest_manifest(store).version == 0
    resumed = Publisher(store, 8)
    resumed.resume(manifest.newest_manifest(store), tensors(0))
    resumed.publish(1, tensors(2), (), {})  # not bit-identical to the killed attempt: its payload must not be taken
    live = tensors(9)
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    assert weights_digest(live) == weights_digest(tensors(2))


def test_a_failed_publish_can_be_repeated(store, monkeypatch):
    publisher = Publisher(store, 8)
    publisher.publish(0, tensors(0), (), {})
    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", lambda *_: (_ for _ in ()).throw(UserError("no space left")))
        with pytest.raises(UserError, match="no space left"):
            publisher.publish(1, nudged(tensors(0), 1), (), {})
    published = publisher.publish(1, nudged(tensors(0), 1), (), {})
    assert (published.kind, published.parent) == ("delta", 0)
    live = tensors(9)
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    assert weights_digest(live) == published.digest


def test_resuming_from_other_tensors_is_refused(store):
    published, _ = publish(store, 1, 8)
    with pytest.raises(ValueError, match="do not have the digest of version 0"):
        Publisher(store, 8).resume(published[0], tensors(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_published(store, value):
    broken = tensors(0)
    broken["b"][3, 3] = value
    with pytest.raises(UserError, match="version 0 is not published: b hold"):
        Publisher(store, 8).publish(0, broken, (), {})
    assert store.list() == []


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_payload_is_never_served_and_a_repaired_one_is(store, damage):
    published, _ = publish(store, 2, 8)
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll(limit=0))
    payload = store.get(published[1].payload[0].key)
    if damage == "gone":
        store.delete(published[1].payload[0].key)
    else:
        middle = len(payload) // 2
        flipped = payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]
        store.put(published[1].payload[0].key, {"flip": flipped, "cut": payload[:-1]}[damage])
    with pytest.raises(DamagedVersion, match="version 1: its payload"):
        receiver.poll()
    assert receiver.version == 0
    assert weights_digest(live) == published[0].digest
    store.put(published[1].payload[0].key, payload)
    receiver.apply(receiver.poll())
    assert weights_digest(live) == published[1].digest


@pytest.mark.parametrize("part", ["payload", "manifest"])
def test_the_next_anchor_bridges_a_hole_in_the_chain(store, part):
    published, made = publish(store, 4, 4)
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll(limit=1))
    if part == "payload":
        store.delete(published[2].payload[0].key)
    else:
        store.put(manifest.key(2), b"{")
    with pytest.raises(DamagedVersion, match="version 2"):
        receiver.poll()
    current = tensors(5)
    resumed = Publisher(store, 1)
    resumed.resume(published[3], made[3])
    resumed.publish(4, current, (), {})
    anchors_written()
    last = resumed.publish(5, nudged(current, 6), (), {})
    assert last.anchor.version >= 3
    receiver.apply(receiver.poll())
    assert weights_digest(live) == last.digest


def test_a_manifest_that_promises_other_tensors_is_not_served(store):
    published, _ = publish(store, 1, 8)
    lie = msgspec.structs.replace(published[0], digest="0" * 16)
    store.put(manifest.key(0), manifest.encode(lie))
    with pytest.raises(DamagedVersion, match="do not have the digest that was published"):
        Receiver(store, tensors(9)).poll()


def test_a_manifest_with_the_payload_of_another_version_is_refused(store):
    published, _ = publish(store, 3, 8)
    other = {name: getattr(published[1], name) for name in ("delta",)}
    store.put(manifest.key(2), manifest.encode(msgspec.structs.replace(published[2], **other)))
    with pytest.raises(DamagedVersion, match="version 2: its payload is the delta of version 1"):
        Receiver(store, tensors(9)).poll()


def test_another_model_is_refused_before_it_is_touched(store):
    publish(store, 1, 8)
    live = tensors(9) | {"b": torch.zeros(25, 40)}
    with pytest.raises(DamagedVersion, match=r"of another model: b has shape \(40, 25\), here \(25, 40\)"):
        Receiver(store, live).poll()
    with pytest.raises(DamagedVersion, match="c has shape None"):
        Receiver(store, tensors(9) | {"c": torch.zeros(1)}).poll()


@pytest.mark.parametrize("applied", [0, 1])
def test_live_tensors_that_did_not_take_the_values_are_put_back(store, applied, monkeypatch):
    publish(store, applied + 1, 8)
    live = tensors(9)
    receiver = Receiver(store, live)
    if applied:
        receiver.apply(receiver.poll(limit=0))
    before = weights_digest(live)
    update = receiver.poll()
    wrong = update.staged.bits["b"].copy()
    wrong[0] += 1  # as if the copy to the device had gone wrong
    write = LiveTensors.write

    def half(self, change):  # the first write of a change loses its last element
        monkeypatch.setattr(LiveTensors, "write", write)
        write(self, replace(change, places=change.places[:-1], values=change.values[:-1]))

    monkeypatch.setattr(LiveTensors, "write", half)
    object.__setattr__(update, "staged", replace(update.staged, bits=update.staged.bits | {"b": wrong}))
    with pytest.raises(WeightsMismatch, match=f"version {applied} did not arrive in the live tensors:"):
        receiver.apply(update)
    monkeypatch.setattr(LiveTensors, "write", write)
    assert weights_digest(live) == before
    assert receiver.version == applied - 1
    receiver.apply(receiver.poll())
    assert receiver.version == applied


def test_any_version_can_be_had_again_in_any_wider_type(store):
    published, made = publish(store, 5, 200, anchor_share=1e9)
    for version in (0, 2, 4):
        target = widened(tensors(7))
        assert materialise(store, version, target) == published[version]
        assert weights_digest(target) == weights_digest(made[version])
    _, loaded = load(store, 3)
    assert all(loaded[name].dtype == torch.bfloat16 for name in loaded)
    with pytest.raises(UserError, match="has no version 9; the newest is 4"):
        materialise(store, 9, tensors(7))
    with pytest.raises(UserError, match="of another model"):
        materialise(store, 1, {"x": torch.zeros(1)})
    store.delete(published[3].payload[0].key)
    with pytest.raises(UserError, match=r"version 3: its payload .* is gone; choose another version"):
        load(store, 4)
