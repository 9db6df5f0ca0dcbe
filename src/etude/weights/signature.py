"""Ed25519 signatures of manifests (RFC 8032), and the rules by which a reader refuses manifests.

A manifest names the digests of its objects, so a signature over it covers the weights. Keys are PEM files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from etude.errors import UserError
from etude.records import PolicyVersion
from etude.store import write_durably

if TYPE_CHECKING:  # the core is installed without cryptography, and reads unsigned manifests
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_DOMAIN = b"etude weights manifest\0"


class ManifestRefused(ValueError):
    """A manifest of another model or run, unsigned, forged, or older than an accepted one."""


def generate_key(path: Path) -> Path:
    """Writes a private key to `path`, readable by its owner alone, and the public key beside it. Returns the path of
    the public key. Raises UserError if either exists or cannot be written."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    public = path.with_name(path.name + ".pub")
    key = Ed25519PrivateKey.generate()
    private_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public_pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    if public.exists():
        raise UserError(f"{public} exists already; name a new file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private_pem)
        public.write_bytes(public_pem)
    except FileExistsError:
        raise UserError(f"{path} exists already; name a new file") from None
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}; check the folder") from None
    return public


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The key for signatures. Raises UserError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is not an Ed25519 private key; make one with `etude weights keygen`")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The key for checks. Raises UserError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{path} is not an Ed25519 public key; `etude weights keygen` writes it with the ending .pub")
    return key


def sign(manifest: PolicyVersion, key: Ed25519PrivateKey) -> PolicyVersion:
    """The manifest with a signature over all its other fields."""
    return msgspec.structs.replace(manifest, signature=key.sign(_signed(manifest)).hex())


def _signed(manifest: PolicyVersion) -> bytes:
    """Canonical bytes: JSON without spaces, keys sorted, no signature."""
    return _DOMAIN + msgspec.json.encode(msgspec.structs.replace(manifest, signature=""), order="sorted")


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
        from cryptography.exceptions import InvalidSignature

        try:
            self.key.verify(bytes.fromhex(manifest.signature), _signed(manifest))
        except (InvalidSignature, ValueError):
            raise ManifestRefused(f"the signature of version {number} is not by the key that is trusted") from None
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
