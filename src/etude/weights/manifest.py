"""Version manifests: `versions/NNNNNNNN.json`, immutable, created if absent. A version exists once its manifest does.

Manifests are small and never deleted, so there is no gap in the numbers. Payloads lie apart, under their own digests.
"""

from __future__ import annotations

import msgspec

from etude.records import PolicyVersion
from etude.store import Store

FOLDER = "versions"


def key(version: int) -> str:
    """Zero-padded, so that keys sort like numbers."""
    return f"{FOLDER}/{version:08d}.json"


def schema_key(schema_id: str) -> str:
    """Names, types and shapes; immutable, shared by the versions of a chain."""
    return f"schemas/{schema_id}.json"


def create(store: Store, manifest: PolicyVersion) -> bool:
    """The commit point of a version. False if another writer was first."""
    return store.create(key(manifest.version), msgspec.json.encode(manifest))


def read(store: Store, version: int) -> PolicyVersion | None:
    """The manifest of a version, None if it is not published. Raises ValueError if it is damaged."""
    try:
        data = store.get(key(version))
    except KeyError:
        return None
    try:
        return msgspec.json.decode(data, type=PolicyVersion)
    except msgspec.MsgspecError as e:
        raise ValueError(f"the manifest of version {version} in {store.url} is damaged: {e}") from None


def versions(store: Store, after: int = -1) -> list[int]:
    """Published version numbers greater than `after`, ascending."""
    keys = store.list(FOLDER, after=key(after) if after >= 0 else None)
    return [int(name.rsplit("/", 1)[1].removesuffix(".json")) for name in keys]


def manifests(store: Store, after: int = -1) -> list[PolicyVersion]:
    """The manifests of `versions`."""
    found = [read(store, version) for version in versions(store, after)]
    return [manifest for manifest in found if manifest is not None]


def newest(store: Store) -> PolicyVersion | None:
    """The manifest with the highest number, None before the first version."""
    numbers = versions(store)
    return read(store, numbers[-1]) if numbers else None
