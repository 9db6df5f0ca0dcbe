"""The trainer's side: publish version after version."""

from __future__ import annotations

import time
from collections.abc import Mapping

import blake3
import torch

from etude.errors import RunFailed, UserError
from etude.failpoints import visit
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights import delta
from etude.weights.digest import digest
from etude.weights.manifest import create, read


class AlreadyPublished(RunFailed):
    """Another writer has published this version; `manifest` is what it published."""

    def __init__(self, store: Store, manifest: PolicyVersion):
        super().__init__(
            f"another trainer has published version {manifest.version} to {store.url}; this one stops: give each run "
            "a store of its own"
        )
        self.manifest = manifest


class Publisher:
    """Remembers the bits it published last, so that the next version is a delta against them.

    Every `anchor_every`-th version, and the first of a process that did not `resume`, is an anchor: all elements.
    """

    def __init__(self, store: Store, anchor_every: int):
        if anchor_every < 1:
            raise ValueError("anchor_every must be at least 1")
        self._store = store
        self._anchor_every = anchor_every
        self._parent: int | None = None
        self._last: dict[str, torch.Tensor] = {}

    def resume(self, last: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continues after `last`, whose tensors these are. Raises ValueError if they are not."""
        if digest(tensors) != last.digest:
            raise ValueError(f"the tensors do not have the digest of version {last.version}")
        self._remember(last.version, tensors)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], groups: tuple[int, ...], metrics: dict[str, float]
    ) -> PolicyVersion:
        """Writes the payload, then the manifest: the version exists from then on, or not at all.

        Payload keys carry their digest, so what a crashed attempt left behind is never mistaken for this version's.
        Raises AlreadyPublished, or UserError if a weight is not finite or the store refuses.
        """
        _refuse_non_finite(version, tensors)
        anchor = self._parent is None or version % self._anchor_every == 0
        payload, changed = delta.encode({} if anchor else self._last, tensors)
        payload_digest = blake3.blake3(payload).hexdigest()
        manifest = PolicyVersion(
            version=version,
            parent=None if anchor else self._parent,
            kind="anchor" if anchor else "delta",
            payload=f"payloads/{version:08d}-{payload_digest[:32]}",
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
        visit("publisher.payload")
        if not create(self._store, manifest):
            raise AlreadyPublished(self._store, read(self._store, version) or manifest)
        self._remember(version, tensors)
        return manifest

    def _remember(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._parent = version
        self._last = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _refuse_non_finite(version: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """NaN and infinities survive the codec, but a policy that holds them must not be served."""
    bad = [name for name, tensor in tensors.items() if tensor.numel() and not _finite(tensor)]
    if bad:
        others = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise UserError(
            f"version {version} is not published: {bad[0]}{others} hold NaN or infinity; lower the learning rate and "
            "resume"
        )


def _finite(tensor: torch.Tensor) -> bool:
    low, high = torch.aminmax(tensor.detach())  # NaN wins in both
    return bool(torch.isfinite(low) & torch.isfinite(high))
