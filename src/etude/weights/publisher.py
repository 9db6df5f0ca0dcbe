"""The trainer's side: publish version after version."""

from __future__ import annotations

import time
from collections.abc import Mapping

import blake3
import torch

from etude.errors import RunFailed
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights import delta
from etude.weights.digest import digest
from etude.weights.manifest import create


class Publisher:
    """Remembers the bits it published last, so that the next version is a delta against them."""

    def __init__(self, store: Store, anchor_every: int):
        if anchor_every < 1:
            raise ValueError("anchor_every must be at least 1")
        self._store = store
        self._anchor_every = anchor_every
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None

    def resume(self, last: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continues after `last`, whose tensors these are. Raises ValueError if they are not."""
        if digest(tensors) != last.digest:
            raise ValueError(f"the tensors do not have the digest of version {last.version}")
        self._last = (last.version, _copies(tensors))

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], groups: tuple[int, ...], metrics: dict[str, float]
    ) -> PolicyVersion:
        """Writes the payload, then the manifest: the version exists from then on, or not at all.

        Payload keys carry their digest, so what a crashed attempt left behind is never mistaken for this version's.
        Raises RunFailed if another writer has published `version`.
        """
        anchor = self._last is None or version % self._anchor_every == 0
        payload, changed = delta.encode(None if anchor else self._last[1], tensors)
        payload_digest = blake3.blake3(payload).hexdigest()
        manifest = PolicyVersion(
            version=version,
            parent=None if anchor else self._last[0],
            kind="anchor" if anchor else "delta",
            payload=f"payloads/{version:08d}-{payload_digest[:16]}",
            payload_bytes=len(payload),
            payload_digest=payload_digest,
            digest=digest(tensors),
            changed=changed,
            elements=sum(t.numel() for t in tensors.values()),
            groups=groups,
            created=time.time(),
            metrics=metrics,
        )
        self._store.put(manifest.payload, payload)
        if not create(self._store, manifest):
            raise RunFailed(f"another trainer has published version {version} to {self._store.url}; this one stops")
        self._last = (version, _copies(tensors))
        return manifest


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
