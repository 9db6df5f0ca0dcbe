"""Ed25519 signatures of manifests (RFC 8032), and their keys.

A manifest names the digests of its objects, so a signature over it covers the weights. Keys are PEM files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from etude.errors import UserError
from etude.records import PolicyVersion

if TYPE_CHECKING:  # the core is installed without cryptography, and reads unsigned manifests
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_DOMAIN = b"etude weights manifest\0"


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
    except FileNotFoundError:
        raise UserError(f"there is no key {path}; make one with `etude weights keygen`") from None
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
    except FileNotFoundError:
        raise UserError(f"there is no key {path}; `etude weights keygen` writes it with the ending .pub") from None
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{path} is not an Ed25519 public key; `etude weights keygen` writes it with the ending .pub")
    return key


def sign(manifest: PolicyVersion, key: Ed25519PrivateKey) -> PolicyVersion:
    """The manifest with a signature over all its other fields."""
    return msgspec.structs.replace(manifest, signature=key.sign(_signed(manifest)).hex())


def signed_by(manifest: PolicyVersion, key: Ed25519PublicKey) -> bool:
    """Whether the signature of the manifest is the key's."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(manifest.signature), _signed(manifest))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(manifest: PolicyVersion) -> bytes:
    """Canonical bytes: JSON without spaces, keys sorted, no signature."""
    return _DOMAIN + msgspec.json.encode(msgspec.structs.replace(manifest, signature=""), order="sorted")
