"""Version manifests: `versions/NNNNNNNN.json`, immutable, created if absent. A version exists once its manifest does.

Manifests are small and never deleted, so there is no gap in the numbers. Payloads are stored apart, under their own
digests. A file holds the manifest and the BLAKE3 digest of its bytes, so that an altered manifest is detected even
without a signature. `Trust` holds the rules by which a reader refuses manifests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
import msgspec

from etude.errors import UserError
from etude.records import MANIFEST_FORMAT, PolicyVersion
from etude.store import Store, write_durably
from etude.weights.signature import signed_by

if TYPE_CHECKING:  # the core is installed without cryptography, and reads unsigned manifests
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FOLDER = "versions"
_ADVICE = "restore the file from a copy, or start a new run"


class ManifestDamaged(UserError, ValueError):
    """A manifest has changed since it was written."""


class ManifestRefused(ValueError):
    """A manifest of another model or run, unsigned, forged, or older than an accepted one."""


class _ManifestFile(msgspec.Struct):
    digest: str = ""
    manifest: msgspec.Raw = msgspec.Raw(b"")


class _ManifestHead(msgspec.Struct):
    format: int = 1


@dataclass
class Trust:
    """The rules of one reader: without `key` all manifests are accepted, else only the signed ones of one run, in
    order. With `model` (`etude.models.loading.model_id`) only versions of that model, or of an unnamed one. `run` and
    `version` are those of the newest accepted manifest; with `memory` they outlive the process."""

    key: Ed25519PublicKey | None = None
    run: str = ""
    version: int = -1
    memory: Path | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory.exists():
            try:
                self.run, self.version = msgspec.json.decode(self.memory.read_bytes(), type=tuple[str, int])
            except (OSError, msgspec.MsgspecError):
                raise UserError(f"{self.memory} cannot be read; remove it to trust the store anew") from None

    def check(self, manifest: PolicyVersion) -> None:
        """Raises ManifestRefused if the manifest is of another model or run, or if the signature is not the key's."""
        number = manifest.version
        if self.model and manifest.model not in ("", self.model):
            raise ManifestRefused(
                f"version {number} is of a model with another config.json or tokenizer.json; use the model folder that "
                "its run began with"
            )
        if self.key is None:
            return
        if not manifest.signature:
            raise ManifestRefused(f"version {number} is not signed")
        if not signed_by(manifest, self.key):
            raise ManifestRefused(f"the signature of version {number} is not by the key that is trusted")
        if self.run and manifest.run != self.run:
            raise ManifestRefused(
                f"version {number} is of another run ({manifest.run}) than those before it ({self.run})"
            )

    def accept(self, manifest: PolicyVersion) -> None:
        """Calls `check`, and remembers the manifest. Raises ManifestRefused also for a manifest older than an accepted
        one."""
        self.check(manifest)
        if self.key is None:
            return
        if manifest.version < self.version:
            raise ManifestRefused(
                f"version {manifest.version} is older than version {self.version}, which was accepted before"
            )
        self.run, self.version = manifest.run, manifest.version
        if self.memory is not None:
            write_durably(self.memory, msgspec.json.encode((self.run, self.version)))


def key(version: int) -> str:
    """The key of a manifest, zero-padded so that keys sort like numbers."""
    return f"{FOLDER}/{version:08d}.json"


def schema_key(schema_id: str) -> str:
    """The key of a schema (names, types and shapes); immutable, shared by the versions of a chain."""
    return f"schemas/{schema_id}.json"


def create(store: Store, manifest: PolicyVersion) -> bool:
    """Creates the manifest, the commit point of a version. Returns False if another writer was first."""
    return store.create(key(manifest.version), encode(manifest))


def encode(manifest: PolicyVersion) -> bytes:
    """The file of a manifest."""
    data = msgspec.json.encode(manifest)
    return msgspec.json.encode(_ManifestFile(blake3.blake3(data).hexdigest(), msgspec.Raw(data)))


def decode(data: bytes) -> PolicyVersion:
    """The manifest in a file from `encode`. Raises ValueError."""
    file = msgspec.json.decode(data, type=_ManifestFile)
    body = bytes(file.manifest) or data  # before format 3 the file was the manifest
    form = msgspec.json.decode(body, type=_ManifestHead).format
    if form != MANIFEST_FORMAT:
        raise ValueError(f"has format {form}, not {MANIFEST_FORMAT}")
    if blake3.blake3(body).hexdigest() != file.digest:
        raise ValueError("is damaged: its digest is that of other bytes")
    return msgspec.json.decode(body, type=PolicyVersion)


def read_manifest(store: Store, version: int, trust: Trust | None = None) -> PolicyVersion | None:
    """The manifest of a version, None if it is not published. Raises ManifestDamaged if it is damaged, of another
    format or of another version; ManifestRefused if it is not trusted."""
    try:
        data = store.get(key(version))
    except KeyError:
        return None
    where = f"the manifest of version {version} in {store.url}"
    try:
        manifest = decode(data)
    except msgspec.MsgspecError as e:
        raise ManifestDamaged(f"{where} is damaged: {e}; {_ADVICE}") from None
    except ValueError as e:
        raise ManifestDamaged(f"{where} {e}; {_ADVICE}") from None
    if manifest.version != version:
        raise ManifestDamaged(f"{where} is that of version {manifest.version}; {_ADVICE}")
    if trust is not None:
        trust.check(manifest)
    return manifest


def published_versions(store: Store, after: int = -1) -> list[int]:
    """Published version numbers greater than `after`, ascending. A listing may be stale although reading a key is not,
    so the numbers after the last listed one are looked up by key."""
    keys = store.list(FOLDER, after=key(after) if after >= 0 else None)
    numbers = [int(name.rsplit("/", 1)[1].removesuffix(".json")) for name in keys]
    following = (numbers[-1] if numbers else after) + 1
    while store.exists(key(following)):
        numbers.append(following)
        following += 1
    return numbers


def manifests(store: Store, after: int = -1) -> list[PolicyVersion]:
    """The manifests of `published_versions`. Raises ManifestDamaged."""
    read_in_order = [read_manifest(store, version) for version in published_versions(store, after)]
    return [manifest for manifest in read_in_order if manifest is not None]


def newest_manifest(store: Store) -> PolicyVersion | None:
    """The manifest with the highest number, None before the first version. Raises ManifestDamaged."""
    numbers = published_versions(store)
    return read_manifest(store, numbers[-1]) if numbers else None
