"""The trainer's side: publish version after version."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import blake3
import numpy as np
import torch

from etude.errors import RunFailed, UserError
from etude.failpoints import visit
from etude.records import Anchor, Part, PolicyVersion
from etude.store import Store
from etude.weights import codec
from etude.weights.codec import Codec, Digests
from etude.weights.digest import digest, written
from etude.weights.manifest import create, read, schema_key
from etude.weights.schema import Bits, Schema, bits, schema_of


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
        self._schema: Schema | None = None
        self._last: dict[str, Bits] = {}
        self._digests: Digests = np.zeros(0, np.uint64)
        self._anchor = Anchor(version=0, parts=())
        self._run = secrets.token_hex(8)
        self._writer = secrets.token_hex(8)

    def resume(self, last: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continues after `last`, whose tensors these are. Raises ValueError if they are not."""
        if digest(tensors) != last.digest:
            raise ValueError(f"the tensors do not have the digest of version {last.version}")
        self._begin(tensors)
        self._parent, self._anchor, self._run = last.version, last.anchor, last.run

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], groups: tuple[int, ...], metrics: dict[str, float]
    ) -> PolicyVersion:
        """Writes the payload, then the manifest: the version exists from then on, or not at all.

        Payload keys carry their digest, so what a crashed attempt left behind is never mistaken for this version's.
        Raises AlreadyPublished, or UserError if a weight is not finite or the store refuses.
        """
        _refuse_non_finite(version, tensors)
        if self._parent is None:
            self._begin(tensors)
        schema = self._fitting(tensors)
        anchor = self._parent is None or version % self._anchor_every == 0
        new = {name: bits(tensor) for name, tensor in tensors.items()}
        lr = metrics.get("optim/lr") or Codec.learning_rate
        records = codec.encode(schema, self._last, new, self._digests, Codec(learning_rate=lr))
        digests = self._digests.copy()
        for record in records:
            digests[record.chunk] = record.target
        elements = sum(spec.elements for spec in schema.tensors)
        changed = elements if anchor else sum(record.changes for record in records)
        if anchor:
            payload = codec.pack("anchor", version, codec.encode_anchor(schema, new, digests))
        else:
            payload = codec.pack("delta", version, records)
        part = self._put(version, payload, len(schema.chunks))
        manifest = PolicyVersion(
            run=self._run,
            writer=self._writer,
            version=version,
            parent=None if anchor else self._parent,
            delta=() if anchor else (part,),
            anchor=Anchor(version=version, parts=(part,)) if anchor else self._anchor,
            schema=schema.id,
            digest=written(codec.model_digest(digests)),
            changed=changed,
            elements=elements,
            groups=groups,
            created=time.time(),
            metrics=metrics,
        )
        if anchor:
            self._store.put(schema_key(schema.id), schema.encode())
        visit("publisher.payload")
        if not create(self._store, manifest):
            raise AlreadyPublished(self._store, read(self._store, version) or manifest)
        self._parent, self._digests, self._anchor = version, digests, manifest.anchor
        for chunk in (schema.chunks[record.chunk] for record in records):
            codec.chunk_bits(schema, self._last, chunk)[:] = codec.chunk_bits(schema, new, chunk)
        return manifest

    def _put(self, version: int, payload: bytes, chunks: int) -> Part:
        digest = blake3.blake3(payload).hexdigest()
        key = f"payloads/{version:08d}-{digest[:32]}"
        self._store.put(key, payload)
        return Part(key=key, bytes=len(payload), digest=digest, first=0, stop=chunks)

    def _begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors as what was published last."""
        self._schema = schema_of(tensors)
        self._last = {name: bits(tensor).copy() for name, tensor in tensors.items()}
        self._digests = codec.digests(self._schema, self._last)

    def _fitting(self, tensors: Mapping[str, torch.Tensor]) -> Schema:
        """The schema of the chain. Raises ValueError if the tensors have another."""
        schema = schema_of(tensors)
        assert self._schema is not None
        if schema != self._schema:
            was, now = ({spec.name: spec for spec in s.tensors} for s in (self._schema, schema))
            name = next(n for n in sorted(was.keys() | now.keys()) if was.get(n) != now.get(n))
            raise ValueError(f"{name} is not what it was in the last version: {was.get(name)}, now {now.get(name)}")
        return schema


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
