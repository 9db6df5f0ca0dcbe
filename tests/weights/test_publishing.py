"""Publishing: in the background, folded, anchored, onto stores that fail."""

import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from etude.errors import RunFailed, UserError
from etude.store import Store, open_store
from etude.weights import manifest, publisher
from etude.weights.content import load
from etude.weights.payloads import plan
from etude.weights.publisher import AlreadyPublished, Publisher
from etude.weights.receiver import Receiver, update_to
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.faulty import Faulty
from tests.helpers.small_tensors import copies, nudged, tensors, widened


@pytest.fixture
def store(tmp_path: Path) -> Faulty:
    return Faulty(open_store(str(tmp_path / "weights")))


def chain(seed: int, count: int):
    made = [tensors(seed)]
    for version in range(1, count):
        made.append(nudged(made[-1], version))
    return made


def joined(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(30)
            assert not thread.is_alive()


def held(store: Store, version: int):
    return load(store, version)[1]


def equal(a, b) -> bool:
    return all(torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a)


# The thread ---------------------------------------------------------------------------------------------------------


def test_a_step_goes_on_while_a_version_is_on_its_way(store):
    made = chain(0, 3)
    writer = Publisher(store)
    writer.publish(0, made[0], (), {})
    store.stall = lambda key: True
    moving = copies(made[1])
    on_its_way = writer.start(1, moving, (7,), {})
    assert store.stalled.wait(120)  # kernels may compile first
    for tensor in moving.values():
        tensor.zero_()  # the next step writes over the weights
    assert not on_its_way.done()
    assert manifest.newest_manifest(store).version == 0, "nothing is visible before the payload is"
    store.released.set()
    assert on_its_way.result().digest == weights_digest(made[1])
    assert writer.publish(2, made[2], (), {}).parent == 1
    assert equal(held(store, 1), made[1])


def test_one_version_is_in_flight_and_its_error_comes_up_at_the_next(store):
    made = chain(0, 3)
    writer = Publisher(store)
    writer.publish(0, made[0], (), {})
    store.refuse = lambda key: key.startswith("versions/")
    writer.start(1, made[1], (), {})
    with pytest.raises(UserError, match="500 internal server error"):
        writer.start(2, made[2], (), {})
    failed = writer.start(1, made[1], (), {})
    with pytest.raises(UserError, match="500"):
        writer.close()
    assert failed.done()
    store.refuse = lambda key: False
    published = writer.publish(1, made[2], (), {})  # as a resumed trainer would: other bits under the same number
    assert (published.kind, published.parent) == ("delta", 0)
    assert equal(held(store, 1), made[2])
    writer.close()


def test_a_store_that_stalls_for_ever_is_given_up(store, monkeypatch):
    made = chain(0, 2)
    writer = Publisher(store)
    writer.publish(0, made[0], (), {})
    monkeypatch.setattr(publisher, "PUBLISH_SECONDS", 0.1)
    store.stall = lambda key: True
    with pytest.raises(RunFailed, match="version 1 was not published within"):
        writer.publish(1, made[1], (), {})
    store.released.set()
    joined("publish-")


def test_an_anchor_holds_up_nothing_and_is_named_once_it_is_whole(store):
    made = chain(0, 6)
    writer = Publisher(store, anchor_versions=2, anchor_share=1e9)
    store.stall = lambda key: "00000002-anchor" in key
    published = [writer.publish(v, made[v], (), {}) for v in range(5)]
    assert store.stalled.wait(120), "the anchor of version 2 is being written"
    assert [m.anchor.version for m in published] == [0] * 5
    store.released.set()
    joined("anchor-")
    last = writer.publish(5, made[5], (), {})
    assert last.anchor.version == 2
    first = plan(lambda v: manifest.read_manifest(store, v), None, 5)[0]
    assert (first.kind, first.version) == ("anchor", 2)
    assert equal(held(store, 5), made[5])


def test_a_failed_anchor_is_said_and_made_again(store):
    made = chain(0, 5)
    writer = Publisher(store, anchor_versions=1, anchor_share=1e9)
    writer.publish(0, made[0], (), {})
    store.refuse = lambda key: "anchor" in key
    writer.publish(1, made[1], (), {})
    joined("anchor-")
    with pytest.raises(UserError, match="500"):
        writer.publish(2, made[2], (), {})
    store.refuse = lambda key: False
    for version in (2, 3, 4):
        last = writer.publish(version, made[version], (), {})
        joined("anchor-")
    assert last.anchor.version == 3
    assert equal(held(store, 4), made[4])


def test_anchors_follow_the_budget_of_bytes(store):
    writer = Publisher(store, anchor_share=0.5)
    published = []
    for version, made in enumerate(chain(0, 30)):
        published.append(writer.publish(version, made, (), {}))
        joined("anchor-")
    anchors = sorted({m.anchor.version for m in published})
    assert len(anchors) > 2
    for a, b in pairwise(anchors):
        budget = [0.5 * sum(part.bytes for part in m.anchor.parts) for m in published]
        since = [sum(m.payload_bytes for m in published[a + 1 : v + 1]) for v in range(b + 1)]
        assert since[b] > budget[b]
        assert all(since[v] <= budget[v] for v in range(a + 1, b))


def test_other_shapes_begin_a_chain_and_versions_may_be_empty(store):
    writer = Publisher(store)
    writer.publish(0, tensors(0), (), {})
    empty = writer.publish(1, tensors(0), (), {})
    assert (empty.delta, empty.changed, empty.kind, empty.payload_bytes) == ((), 0, "delta", 0)
    grown = tensors(0) | {"more": torch.ones(3, dtype=torch.bfloat16)}
    first = writer.publish(2, grown, (), {})
    assert (first.kind, first.parent, first.anchor.version) == ("anchor", None, 2)
    assert equal(held(store, 1), tensors(0))
    assert equal(held(store, 2), grown)


def test_figures_that_are_not_finite_do_not_spoil_a_manifest(store):
    Publisher(store).publish(0, tensors(0), (), {"loss": float("nan"), "lr": 1.0})
    assert manifest.read_manifest(store, 0).metrics == {"lr": 1.0}


# Folds --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_versions_are_equal_at_each_and_by_every_path(store):
    writer = Publisher(store, anchor_share=8.0)
    current, live = tensors(0), widened(tensors(9))
    receiver, kept, read = Receiver(store, live), {}, {}
    for version in range(1001):
        current = nudged(current, version) if version else current
        read[version] = writer.publish(version, current, (), {})
        assert read[version].digest == weights_digest(current)
        receiver.apply(receiver.poll())
        assert receiver.version == version
        if version % 64 in (0, 3, 8) or version == 1000:
            kept[version] = copies(current)
    assert weights_digest(live) == weights_digest(current)
    assert len({m.anchor.version for m in read.values()}) > 2
    assert {v - s.base for v, m in read.items() for s in m.skips} == {8, 64}
    kinds = set()
    for start, target in ((0, 64), (64, 72), (3, 640), (0, 1000), (579, 968), (960, 1000)):
        kinds |= {p.kind for p in plan(read.get, start, target)}
        brought = copies(kept[start])
        update_to(store, start, target, brought)
        assert equal(brought, kept[target])
        assert equal(held(store, target), kept[target])
    assert {"delta", "skip"} <= kinds
    folds = [(sum(p.bytes for p in s.parts), s.base, v) for v, m in read.items() for s in m.skips]
    saved = [size < sum(read[v].payload_bytes for v in range(base + 1, target + 1)) for size, base, target in folds]
    assert all(saved), "a fold is smaller than the deltas it stands for"


def test_a_resumed_publisher_writes_no_fold_that_it_cannot_know(store):
    made = chain(0, 18)
    writer = Publisher(store)
    published = [writer.publish(v, made[v], (), {}) for v in range(5)]
    resumed = Publisher(store)
    resumed.resume(published[4], made[4])
    published += [resumed.publish(v, made[v], (), {}) for v in range(5, 18)]
    assert {m.version: [s.base for s in m.skips] for m in published if m.skips} == {16: [8]}
    assert {m.run for m in published} == {published[0].run}
    brought = copies(made[8])
    update_to(store, 8, 17, brought)
    assert equal(brought, made[17])


# Stores that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retry", [False, True])
def test_a_lost_acknowledgement_of_a_manifest_is_no_failure(store, retry):
    made = chain(0, 3)
    writer = Publisher(store)
    writer.publish(0, made[0], (), {})
    store.lose, store.retry = (lambda key: key.startswith("versions/")), retry
    assert writer.publish(1, made[1], (), {}).version == 1
    store.lose = lambda key: False
    assert writer.publish(2, made[2], (), {}).parent == 1
    assert equal(held(store, 2), made[2])


def test_another_writer_is_not_taken_for_a_lost_acknowledgement(store):
    made = chain(0, 2)
    first, second = Publisher(store), Publisher(Faulty(store))
    second.resume(first.publish(0, made[0], (), {}), made[0])
    first.publish(1, made[1], (), {})
    with pytest.raises(AlreadyPublished, match="another trainer has published version 1"):
        second.publish(1, made[1], (), {})


def test_a_stale_listing_hides_no_version(store):
    made = chain(0, 4)
    writer = Publisher(store)
    published = [writer.publish(v, made[v], (), {}) for v in range(4)]
    for known in (0, 1, 3):
        store.stale = [manifest.key(v) for v in range(known)]
        assert manifest.newest_manifest(store) == published[3]
        assert manifest.published_versions(store, after=0) == [1, 2, 3]
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    assert weights_digest(live) == published[3].digest


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_stops_a_version_and_room_lets_it_through(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "etude-test", str(disk)], check=True)
    try:
        store = open_store(str(disk / "weights"))
        made = chain(0, 2)
        writer = Publisher(store)
        writer.publish(0, made[0], (), {})
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(65536))
        with pytest.raises(UserError, match="No space left"):
            writer.publish(1, made[1], (), {})
        assert manifest.newest_manifest(store).version == 0
        assert equal(held(store, 0), made[0])
        filler.unlink()
        writer.publish(1, made[1], (), {})
        assert equal(held(store, 1), made[1])
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


KILLED = """
import sys
import threading
from tests.helpers.small_tensors import nudged, tensors
from etude.store import open_store
from etude.weights.publisher import Publisher
publisher, current = Publisher(open_store(sys.argv[1]), anchor_versions=1), tensors(0)
for version in range(4):
    publisher.publish(version, current, (version,), {})
    [t.join(30) for t in threading.enumerate() if t.name.startswith("anchor-")]
    current = nudged(current, version + 1)
"""


@pytest.mark.parametrize(
    ("failpoint", "newest"),
    [("publisher.part:3", 1), ("publisher.payload:3", 1), ("publisher.manifest:3", 2), ("publisher.anchor:2", 2)],
)
def test_a_trainer_killed_anywhere_leaves_whole_versions_and_the_chain_goes_on(store, failpoint, newest):
    command = [sys.executable, "-c", KILLED, store.url]
    killed = subprocess.run(command, env=os.environ | {"ETUDE_FAILPOINT": failpoint}, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    made = chain(0, 5)
    last = manifest.newest_manifest(store)
    assert last.version == newest
    for version in range(newest + 1):
        assert equal(held(store, version), made[version])
    resumed = Publisher(store)
    resumed.resume(last, made[newest])
    for version in range(newest + 1, 5):
        resumed.publish(version, made[version], (), {})
        assert equal(held(store, version), made[version])
