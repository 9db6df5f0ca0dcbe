import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import RunFailed, UserError
from etude.store import open_store
from etude.weights import delta, manifest
from etude.weights.digest import bits, digest
from etude.weights.publisher import Publisher
from etude.weights.receiver import DamagedVersion, Receiver, materialise

DTYPES = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}


def tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn(7, 5, generator=generator).to(dtype),
        "a": torch.randn(11, generator=generator).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.randn((), generator=generator).to(dtype),
    }


def copies(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in of.items()}


def nudged(of: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """About a third of the elements move."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < 0.3, t * 1.1 + 0.01, t).to(t.dtype)
        for name, t in of.items()
    }


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "weights"))


# delta


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_delta_restores_every_bit(data):
    """Any bit pattern of any type: NaN payloads, both zeros, infinities, denormals; any shape."""
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    unsigned = DTYPES[dtype]
    shape = data.draw(st.sampled_from([(), (0,), (1,), (3, 5), (2, 1, 7)]))
    size = int(np.prod(shape))
    words = st.lists(st.integers(0, int(np.iinfo(unsigned).max)), min_size=size, max_size=size)
    old_bits, new_bits = (np.array(data.draw(words), unsigned) for _ in range(2))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    new_bits = np.where(keep, old_bits, new_bits).astype(unsigned)
    old, new = ({"x": torch.from_numpy(b.copy()).view(dtype).reshape(shape)} for b in (old_bits, new_bits))
    payload, changed = delta.encode(old, new)
    assert changed == int((old_bits != new_bits).sum())
    delta.apply(delta.decode(payload), old)
    assert np.array_equal(bits(old["x"]), new_bits)


def test_an_anchor_holds_everything():
    new = tensors(1)
    payload, changed = delta.encode(None, new)
    blank = {name: torch.zeros_like(t) for name, t in new.items()}
    delta.apply(delta.decode(payload), blank)
    assert digest(blank) == digest(new)
    assert changed == sum(t.numel() for t in new.values())


def test_versions_that_do_not_fit_are_refused_before_anything_is_written():
    old, new = tensors(1), nudged(tensors(1), 2)
    payload, _ = delta.encode(old, new)
    with pytest.raises(ValueError, match="is in one of them only"):
        delta.encode({k: v for k, v in old.items() if k != "a"}, new)
    other = copies(old) | {"b": torch.zeros(5, 7, dtype=torch.bfloat16)}
    before = digest(other)
    with pytest.raises(ValueError, match=r"holds b as bfloat16 \(7, 5\)"):
        delta.apply(delta.decode(payload), other)
    assert digest(other) == before
    with pytest.raises(ValueError, match="damaged weight payload"):
        delta.decode(payload[:-3])


# digest


def test_the_digest_does_not_depend_on_order_or_on_an_exact_wider_type():
    original = tensors(3)
    assert digest(dict(reversed(original.items()))) == digest(original)
    assert digest({name: t.float() for name, t in original.items()}) == digest(original)


def test_the_digest_sees_one_bit_one_name_and_one_shape():
    original = tensors(3)
    flipped = copies(original)
    bits(flipped["a"])[4] ^= 1
    renamed = {("c" if name == "b" else name): t for name, t in original.items()}
    reshaped = original | {"b": original["b"].reshape(5, 7)}
    assert len({digest(original), digest(flipped), digest(renamed), digest(reshaped)}) == 4


def test_a_live_weight_that_left_the_grid_is_named():
    live = {name: t.float() for name, t in tensors(3).items()}
    live["b"][2, 2] += 1e-6
    with pytest.raises(ValueError, match="b holds values that bfloat16 cannot"):
        digest(live)


# publishing and receiving


def test_an_engine_follows_a_chain_of_versions_exactly(store):
    publisher = Publisher(store, anchor_every=4)
    current = tensors(0)
    live = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in current.items()}
    receiver = Receiver(store, live)
    assert receiver.poll() is None
    for version in range(10):
        published = publisher.publish(version, current, (version,), {"loss": 1.0})
        assert published.kind == ("anchor" if version % 4 == 0 else "delta")
        if version % 3 == 0:  # an engine may skip versions
            before = {name: t.clone() for name, t in live.items()}
            update = receiver.poll()
            assert all(torch.equal(before[name], live[name]) for name in live), "staging must not touch live tensors"
            update.apply()
            assert digest(live) == published.digest
            assert receiver.version == version
        current = nudged(current, version)
    assert [m.groups for m in manifest.manifests(store)] == [(v,) for v in range(10)]
    assert manifest.newest(store).version == 9


def test_of_two_publishers_of_a_version_one_stops(store):
    first, second = (Publisher(store, 8) for _ in range(2))
    first.publish(0, tensors(0), (), {})
    with pytest.raises(RunFailed, match="another trainer has published version 0"):
        second.publish(0, tensors(1), (), {})
    assert manifest.read(store, 0).digest == digest(tensors(0))


def test_a_crash_between_payload_and_manifest_leaves_no_version(store, monkeypatch):
    publisher = Publisher(store, 8)
    publisher.publish(0, tensors(0), (), {})
    with monkeypatch.context() as patch:
        patch.setattr("etude.weights.publisher.create", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(1, tensors(1), (), {})
    assert manifest.newest(store).version == 0
    resumed = Publisher(store, 8)
    resumed.resume(manifest.newest(store), tensors(0))
    resumed.publish(1, tensors(2), (), {})
    live = tensors(9)
    Receiver(store, live).poll().apply()
    assert digest(live) == digest(tensors(2))


def test_resuming_from_other_tensors_is_refused(store):
    Publisher(store, 8).publish(0, tensors(0), (), {})
    with pytest.raises(ValueError, match="do not have the digest of version 0"):
        Publisher(store, 8).resume(manifest.newest(store), tensors(1))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "other"])
def test_a_damaged_version_is_never_served_and_a_repaired_one_is(store, damage):
    publisher = Publisher(store, 8)
    publisher.publish(0, tensors(0), (), {})
    live = {name: t.float() for name, t in tensors(5).items()}
    receiver = Receiver(store, live)
    receiver.poll().apply()
    published = publisher.publish(1, nudged(tensors(0), 1), (), {})
    payload = store.get(published.payload)
    if damage == "gone":
        store.delete(published.payload)
    else:
        wrong = {"flip": bytes([payload[0] ^ 1]) + payload[1:], "cut": payload[:-1], "other": b"x" * len(payload)}
        store.put(published.payload, wrong[damage])
    with pytest.raises(DamagedVersion, match="version 1: its payload"):
        receiver.poll()
    assert receiver.version == 0
    assert digest(live) == manifest.read(store, 0).digest
    store.put(published.payload, payload)
    receiver.poll().apply()
    assert digest(live) == published.digest


def test_a_long_absent_engine_catches_up_from_the_nearest_anchor(store):
    publisher = Publisher(store, anchor_every=4)
    current = tensors(0)
    for version in range(7):
        last = publisher.publish(version, current, (), {})
        current = nudged(current, version)
    for version in (1, 2, 3):  # pruned: only the anchor at 4 and what follows is needed
        store.delete(manifest.key(version))
    live = tensors(8)
    Receiver(store, live).poll().apply()
    assert digest(live) == last.digest


def test_any_version_can_be_had_again(store):
    publisher = Publisher(store, 3)
    made = [tensors(0)]
    for version in range(5):
        publisher.publish(version, made[-1], (), {})
        made.append(nudged(made[-1], version))
    target = tensors(7)
    materialise(store, 2, target)
    assert digest(target) == digest(made[2])
    with pytest.raises(UserError, match="has no version 9"):
        materialise(store, 9, target)
