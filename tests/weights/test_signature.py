"""What a reader with a public key believes."""

import stat

import msgspec
import pytest

from etude.errors import UserError
from etude.store import open_store
from etude.weights import manifest
from etude.weights.manifest import ManifestRefused, Trust
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.signature import generate_key, read_private_key, read_public_key, sign
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.small_tensors import nudged, tensors, widened


@pytest.fixture
def keys(tmp_path):
    """(private, public) of the trainer."""
    public = generate_key(tmp_path / "run.key")
    return read_private_key(tmp_path / "run.key"), read_public_key(public)


@pytest.fixture
def store(tmp_path, keys):
    """Versions 0 to 3, signed."""
    store = open_store(str(tmp_path / "weights"))
    writer, current = Publisher(store, key=keys[0]), tensors(0)
    for version in range(4):
        writer.publish(version, current, (), {"loss": 0.1 + version, "tiny": 1e-300, "tokens": 3})
        current = nudged(current, version)
    return store


def test_a_signed_chain_is_served(store, keys):
    live = widened(tensors(9))
    receiver = Receiver(store, live, PayloadSource(store, trust=Trust(keys[1])))
    receiver.apply(receiver.poll())
    assert weights_digest(live) == manifest.read_manifest(store, 3).digest


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("forgery", ["unsigned", "other key", "changed", "other run", "renumbered"])
def test_a_forged_manifest_is_never_served(store, keys, tmp_path, forgery, number):
    honest = manifest.read_manifest(store, number)
    if forgery == "unsigned":
        lie = msgspec.structs.replace(honest, signature="")
    elif forgery == "other key":
        generate_key(tmp_path / "other.key")
        lie = sign(honest, read_private_key(tmp_path / "other.key"))
    elif forgery == "changed":
        lie = msgspec.structs.replace(honest, created=honest.created + 1)
    elif forgery == "other run":
        lie = sign(msgspec.structs.replace(honest, run="another"), keys[0])
    else:
        lie = manifest.read_manifest(store, number - 1)
    live = widened(tensors(9))
    receiver = Receiver(store, live, PayloadSource(store, trust=Trust(keys[1])))
    receiver.apply(receiver.poll(limit=0))
    store.put(manifest.key(number), manifest.encode(lie))
    with pytest.raises(DamagedVersion):
        receiver.poll(limit=number)
    assert receiver.version == 0
    assert weights_digest(live) == manifest.read_manifest(store, 0).digest
    if number == 1:  # no path leads through a manifest that is not trusted: the fold or the anchor would have to
        with pytest.raises(DamagedVersion, match="version 1"):
            receiver.poll(limit=3)


def test_every_bit_of_a_signature_and_every_field_counts(store, keys):
    trust, honest = Trust(keys[1]), manifest.read_manifest(store, 2)
    trust.check(honest)
    for at in range(0, 128, 8):
        digit = "0" if honest.signature[at] != "0" else "1"
        with pytest.raises(ManifestRefused):
            trust.check(
                msgspec.structs.replace(honest, signature=honest.signature[:at] + digit + honest.signature[at + 1 :])
            )
    for name, value in msgspec.structs.asdict(honest).items():
        if name != "signature":
            other = {str: "x", int: 77, float: 0.5, dict: {}, tuple: (), type(None): 4}.get(type(value), honest.anchor)
            changed = msgspec.structs.replace(honest, **{name: other})
            if changed != honest:
                with pytest.raises(ManifestRefused):
                    trust.check(changed)


def test_there_is_no_way_back_also_not_after_a_restart(store, keys, tmp_path):
    memory = tmp_path / "accepted.json"
    trust = Trust(keys[1], memory=memory)
    trust.accept(manifest.read_manifest(store, 2))
    for again in (trust, Trust(keys[1], memory=memory)):
        with pytest.raises(ManifestRefused, match="version 1 is older than version 2"):
            again.accept(manifest.read_manifest(store, 1))
        again.accept(manifest.read_manifest(store, 2))
    other = open_store(str(tmp_path / "other"))
    Publisher(other, key=keys[0]).publish(0, tensors(0), (), {})
    with pytest.raises(ManifestRefused, match="of another run"):
        Trust(keys[1], memory=memory).accept(manifest.read_manifest(other, 0))
    memory.write_text("{")
    with pytest.raises(UserError, match="remove it to trust the store anew"):
        Trust(keys[1], memory=memory)


def test_a_manifest_of_another_format_is_refused(store):
    honest = manifest.read_manifest(store, 3)
    older = msgspec.json.encode(msgspec.structs.replace(honest, format=2))  # without a digest
    for form, data in ((2, older), (9, manifest.encode(msgspec.structs.replace(honest, format=9)))):
        store.put(manifest.key(3), data)
        with pytest.raises(manifest.ManifestDamaged, match=f"has format {form}, not {honest.format}"):
            manifest.read_manifest(store, 3)


def test_every_byte_of_a_manifest_counts_without_a_signature(store):
    whole = store.get(manifest.key(3))
    for place in range(len(whole)):
        store.put(manifest.key(3), whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(manifest.ManifestDamaged, match="manifest of version 3"):
            manifest.read_manifest(store, 3)


def test_a_private_key_is_its_owner_s_alone(tmp_path):
    public = generate_key(tmp_path / "folder" / "key")
    assert stat.S_IMODE((tmp_path / "folder" / "key").stat().st_mode) == 0o600
    with pytest.raises(UserError, match="exists already"):
        generate_key(tmp_path / "folder" / "key")
    with pytest.raises(UserError, match="not an Ed25519 private key"):
        read_private_key(public)
    with pytest.raises(UserError, match="not an Ed25519 public key"):
        read_public_key(tmp_path / "folder" / "key")
