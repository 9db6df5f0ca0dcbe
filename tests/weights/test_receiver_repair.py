"""What is live is what was published: flips write in place, and bits that rot are found and repaired."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.store import open_store
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.repair import TRIES, RepairSource, RepairUnavailable, Unrepairable, repair_chunk
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.http_apps import answering
from tests.helpers.small_tensors import copies, nudged, tensors, widened

COUNT = 4


@pytest.fixture
def chain(tmp_path: Path):
    """A store with versions 0 (an anchor) to 3, and their tensors."""
    store, made = open_store(str(tmp_path / "weights")), [tensors(0)]
    publisher = Publisher(store, 8)
    publisher.publish(0, made[0], (), {})
    for version in range(1, COUNT):
        made.append(nudged(made[-1], version))
        publisher.publish(version, made[-1], (), {})
    return store, made


def at(store, version, live, **options):
    receiver = Receiver(store, live, **options)
    receiver.apply(receiver.poll(version))
    return receiver


@pytest.mark.parametrize("wide", [False, True])
def test_a_swap_writes_what_changed_and_nothing_else(chain, wide):
    store, made = chain
    live = widened(tensors(9)) if wide else tensors(9)
    receiver = at(store, 0, live)
    update = receiver.poll()
    changed = {change.spec.name: change.positions.size for change in update.changes}
    expected = {n: int((made[0][n].view(torch.int16) != made[3][n].view(torch.int16)).sum()) for n in made[0]}
    assert changed == {name: count for name, count in expected.items() if count}
    # An element that is the same in both versions keeps whatever is there: nothing is copied whole.
    same = torch.nonzero((made[0]["b"] == made[3]["b"]).flatten())[0].item()
    live["b"].view(-1)[same] = 77.0
    receiver.apply(update)
    assert live["b"].view(-1)[same] == 77.0
    live["b"].view(-1)[same] = made[3]["b"].view(-1)[same].to(live["b"].dtype)
    assert weights_digest(live) == receiver.manifest.digest


def test_a_type_that_no_loop_reaches_is_written_by_index(chain):
    store, made = chain
    live = {name: tensor.double() for name, tensor in tensors(9).items()}
    receiver = at(store, 0, live)
    update = receiver.poll()
    assert all(change.staged is not None for change in update.changes)
    receiver.apply(update)
    assert all(torch.equal(live[name], made[3][name].double()) for name in live)
    live["a"][0] += 1e-9
    assert receiver.scrub(1.0) == [0]


def test_a_swap_can_be_taken_back_and_made_again(chain):
    store, _ = chain
    live = widened(tensors(9))
    receiver = at(store, 0, live)
    before = copies(live)
    update = receiver.poll()
    for _ in range(2):
        receiver.swap(update)
        receiver.swap(update)  # a duplicate: the values are absolute
        assert weights_digest(live) == update.manifest.digest
        receiver.undo(update)
        assert all(torch.equal(live[name], before[name]) for name in live)
    assert receiver.version == 0
    receiver.apply(update)
    assert (receiver.version, weights_digest(live)) == (3, update.manifest.digest)


def test_an_update_of_another_version_is_refused(chain):
    """Late, replayed and reordered updates: they were staged for a version that is not live any more."""
    store, _ = chain
    live = widened(tensors(9))
    receiver = at(store, 0, live)
    first, last = receiver.poll(1), receiver.poll(3)
    receiver.apply(last)
    for late in (first, last):
        with pytest.raises(ValueError, match="was staged for another version"):
            receiver.apply(late)
    assert (receiver.version, weights_digest(live)) == (3, last.manifest.digest)


def test_a_swap_torn_anywhere_is_undone(chain):
    """As if the device failed after any number of elements."""
    store, _ = chain
    live = widened(tensors(9))
    receiver = at(store, 0, live)
    before = weights_digest(live)
    update = receiver.poll()
    last = update.changes[-1]
    for count in range(0, last.positions.size, 7):
        for change in update.changes[:-1]:
            receiver._live.write(change)
        receiver._live.write(replace(last, positions=last.positions[:count], values=last.values[:count]))
        receiver.undo(update)
        assert weights_digest(live) == before
    receiver.apply(update)
    assert weights_digest(live) == update.manifest.digest


@pytest.mark.parametrize("wide", [False, True])
def test_the_scrubber_finds_any_flipped_bit_of_untouched_weights(chain, wide):
    store, _ = chain
    live = widened(tensors(9)) if wide else tensors(9)
    receiver = at(store, 3, live)
    chunks = len(receiver._held.schema.chunks)
    assert receiver.scrub(1.0) == []
    integers = live["b"].view(torch.int32 if wide else torch.int16).view(-1)
    bits = 32 if wide else 16
    rng = np.random.default_rng(0)
    for element, bit in zip(rng.integers(0, integers.numel(), 40).tolist(), [*range(bits)] * 3, strict=False):
        flip = -(1 << bit) if bit == bits - 1 else 1 << bit
        integers[element] ^= flip
        found = [number for _ in range(chunks) for number in receiver.scrub(1e-9)]  # one chunk at a time
        assert found == [1], f"bit {bit} of element {element}"
        integers[element] ^= flip
    assert receiver.scrub(1.0) == []


def peer(receiver: Receiver) -> Starlette:
    def chunk(http: Request) -> Response:
        data = receiver.chunk(http.path_params["number"], int(http.query_params["version"]))
        return Response(data) if data is not None else Response(status_code=404)

    return Starlette(routes=[Route("/weights/chunks/{number:int}", chunk)])


def rot(receiver: Receiver, live, *, image: bool) -> None:
    """Damages tensor b, which is chunk 1, in the live tensors and on demand in the host image."""
    live["b"][3, 4] += 1.0
    if image:
        receiver._held.bits["b"].flags.writeable = True
        receiver._held.bits["b"][100] ^= 1


@pytest.mark.parametrize("source", ["host image", "peer", "anchor chunk and deltas", "whole anchor from the store"])
def test_every_repair_source_repairs(chain, source):
    store, _ = chain
    live, other = widened(tensors(9)), tensors(8)
    with answering(peer(at(store, 3 if source == "peer" else 2, other))) as url:
        receiver = at(store, 3, live, peers=[url])
        good = weights_digest(live)
        rot(receiver, live, image=source != "host image")
        assert receiver.scrub(1.0) == [1]
        if source.startswith("whole"):  # the relay, say, has nothing; the store itself does
            receiver._source.get = lambda version, part: (_ for _ in ()).throw(RepairUnavailable("nothing here"))
        repaired = receiver.find_repair([1])
        assert weights_digest(live) != good, "a repair is found, not yet live"
        receiver.write_repair(repaired)
    assert repaired[0].source.startswith(source)
    assert weights_digest(live) == good
    assert receiver.scrub(1.0) == []


def test_what_nobody_has_is_not_repaired(chain):
    store, _ = chain
    live = widened(tensors(9))
    receiver = at(store, 3, live, peers=["http://127.0.0.1:9"])
    rot(receiver, live, image=True)
    for name in store.list("payloads"):
        store.put(name, b"damaged")
    with pytest.raises(Unrepairable, match=r"chunk 1 .*host image: its bits .*peer .*ConnectError.*was altered"):
        receiver.find_repair([1])
    assert receiver.chunk(1, 3) is None, "a damaged chunk is given to no peer"
    assert receiver.chunk(0, 3) is not None
    assert receiver.chunk(0, 2) is None


def test_a_repair_source_is_tried_three_times_and_believed_only_by_digest():
    asked = []

    def flaky(number):
        asked.append(number)
        if len(asked) < TRIES:
            raise RepairUnavailable("not now")
        return np.array([1], np.uint16)

    def wrong(number):
        return np.array([2], np.uint16)

    repaired = repair_chunk(5, lambda part: part[0] == 1, [RepairSource("wrong", wrong), RepairSource("flaky", flaky)])
    assert (repaired.source, asked) == ("flaky", [5] * TRIES)
    with pytest.raises(Unrepairable, match=r"chunk 5 .*wrong: its bits have another digest"):
        repair_chunk(5, lambda part: part[0] == 1, [RepairSource("wrong", wrong)])
