"""Copies of a version between stores, a few tensors at a time: memory is that of those tensors, not of the model.

`prepare_copy` writes the objects of the copy, a delta against the newest version there; the function that it returns
creates the manifest, at which the copy begins to exist. Adapters (LoRA) are added to their base on the way, so the copy
holds whole weights. Memory of adapters, or of a chain that begins with the model folder: those tensors, too.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from etude.errors import UserError
from etude.failpoints import failpoint
from etude.models.lora import DOWN, UP, merged, weight_name
from etude.records import Anchor, PayloadPart, PolicyVersion
from etude.store import Store
from etude.weights.adapters import base_schema
from etude.weights.content import Content, Folder, Tensors, load, load_schema, rounded
from etude.weights.manifest import manifests, read_manifest, schema_key
from etude.weights.payloads import BrokenObject, DamagedVersion, NoPath, Payload, PayloadSource, plan
from etude.weights.publisher import ANCHOR_SHARE, ANCHOR_VERSIONS, commit, put_part
from etude.weights.signature import read_private_key, sign
from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import Schema, Spec, as_tensor, bits
from etude.weights.ulpd.codec import ChunkRecord, Codec
from etude.weights.ulpd.digest import digest_text

GROUP = 2**26
"""Bytes of the tensors that are in memory at a time, unless one tensor is larger."""
PART = 2**26
"""Bytes of an object of a copy, at least, unless it is the last."""


def prepare_copy(
    source: Store, version: int, live: str, to: Store, last: PolicyVersion | None, key: Path | None, base: Folder | None
) -> Callable[[], PolicyVersion]:
    """Writes the objects of a copy of `version`, whose live tensors have the digest `live`, to the store `to`, whose
    newest version is `last`; returns the function that creates the manifest, or raises AlreadyPublished. `base` reads
    the model folder that the versions began with. Raises UserError, also for other or damaged content."""
    broken: set[str] = set()
    while True:
        try:
            new = _Reader(source, version, base, broken)
            if new.manifest.live != live:
                raise UserError(f"version {version} of {source.url} has not the content of that release")
            old = None if last is None else _Reader(to, last.version, base, broken)
            manifest = _written(new, old, to, -1 if last is None else last.version)
            if key is not None:
                manifest = sign(manifest, read_private_key(key))
            return lambda: commit(to, manifest)
        except BrokenObject as e:
            broken.add(e.key)  # another path may lead there
        except DamagedVersion as e:
            raise UserError(f"from {source.url} to {to.url}: {e}; choose another version") from None


def _written(new: _Reader, old: _Reader | None, to: Store, before: int) -> PolicyVersion:
    """The manifest of the copy, whose objects are written. Without an old version of the same tensors, and where an
    anchor is due, all of it is written."""
    grid, session, number = new.grid, secrets.token_hex(8), before + 1
    parent = old.manifest if old is not None and old.grid == grid else None
    whole = parent is None or _anchor_is_due(to, parent, grid, number)
    if parent is None:
        to.put(schema_key(grid.id), grid.encode())
    sums, changed = [0, 0], 0
    delta, anchor = _Parts(to, "delta", number, session), _Parts(to, "anchor", number, session)
    for own, offset in _groups(grid):
        now = new.content(own, offset)
        sums[1] += codec.model_digest(now.digests)
        if parent is not None and old is not None:
            past = old.content(own, offset)
            sums[0] += codec.model_digest(past.digests)
            records, _ = codec.encode_changes(own, past.bits, now.bits, past.digests, Codec())
            changed += sum(record.changes for record in records)
            delta.add(records, offset)
        if whole:
            anchor.add(codec.encode_anchor(own, now.bits, now.digests), offset)
    for reader, total in ((old if parent is not None else None, sums[0]), (new, sums[1])):
        if reader is not None and digest_text(total % codec.MODULUS) != reader.manifest.live:
            raise DamagedVersion(f"version {reader.manifest.version} has not the tensors that were published")
    delta.end()
    anchor.end()
    failpoint("publisher.payload")
    elements = sum(spec.elements for spec in grid.tensors)
    return PolicyVersion(
        run=session if old is None else old.manifest.run,
        writer=session,
        version=number,
        parent=None if parent is None else parent.version,
        delta=tuple(delta.parts),
        skips=(),
        anchor=Anchor(version=number, parts=tuple(anchor.parts)) if whole or parent is None else parent.anchor,
        schema=grid.id,
        model=new.manifest.model,
        digest=new.manifest.live,
        changed=elements if parent is None else changed,
        elements=elements,
        groups=(),
        created=time.time(),
        metrics={},
    )


def _anchor_is_due(store: Store, last: PolicyVersion, grid: Schema, number: int) -> bool:
    """As `publisher.Publisher` decides; also after a damaged manifest."""
    if number - last.anchor.version >= ANCHOR_VERSIONS:
        return True
    try:
        since = sum(manifest.payload_bytes for manifest in manifests(store, after=last.anchor.version))
    except ValueError:
        return True
    return since > ANCHOR_SHARE * (sum(part.bytes for part in last.anchor.parts) or grid.nbytes)


def _groups(grid: Schema) -> Iterator[tuple[Schema, int]]:
    """Grids of tensors of about GROUP bytes, in order, each with the number of its first chunk in the whole grid."""
    some, size, offset = list[Spec](), 0, 0
    for number, spec in enumerate(grid.tensors, 1):
        some.append(spec)
        size += spec.elements * spec.format.width // 8
        if size >= GROUP or number == len(grid.tensors):
            yield (own := Schema(tuple(some))), offset
            some, size, offset = [], 0, offset + len(own.chunks)


class _Parts:
    """Objects of one payload, written as soon as they are large enough."""

    def __init__(self, store: Store, kind: str, version: int, session: str) -> None:
        self.parts: list[PayloadPart] = []
        self._about, self._session, self._size = (store, kind, version), session, 0
        self._records: list[ChunkRecord] = []

    def add(self, records: Iterable[ChunkRecord], offset: int) -> None:
        """Adds records of a group whose first chunk is number `offset`."""
        for record in records:
            self._records.append(replace(record, chunk=record.chunk + offset))
            self._size += len(record.payload)
        if self._size >= PART:
            self.end()

    def end(self) -> None:
        """Writes what is left."""
        self.parts += put_part(*self._about, self._records, self._session)
        self._records, self._size = [], 0


class _Reader:
    """The live tensors of a version, a few at a time; objects that were read last are kept, to PART bytes."""

    def __init__(self, store: Store, version: int, base: Folder | None, broken: set[str]) -> None:
        manifest = read_manifest(store, version)
        if manifest is None:
            raise UserError(f"{store.url} has no version {version}")
        self.manifest = manifest
        self._source, self._tensors = PayloadSource(store, folder=base), None
        self._base, self._cache = base, OrderedDict[str, list[ChunkRecord]]()
        self._adapters: Tensors | None = None
        self._path: list[Payload] = []
        self.grid = base_schema(store, manifest)
        if not isinstance(manifest.adapted, msgspec.UnsetType):
            if base is None:
                raise UserError(f"version {version} of {store.url} holds adapters, and their base is not at hand here")
            self._adapters = load(store, version)[1]
            return
        try:
            self._path = plan(lambda number: read_manifest(store, number), None, version, broken)
        except NoPath as e:
            raise DamagedVersion(str(e)) from None
        if self.grid != load_schema(store, manifest):
            raise DamagedVersion(f"version {version} has another schema")

    def content(self, grid: Schema, offset: int) -> Content:
        """The content of the tensors of `grid`, a part whose first chunk is number `offset`. Raises DamagedVersion."""
        path = self._path
        if self._adapters is not None or (path and path[0].is_folder):
            content, path = self._of_base(grid), path[1:]
        else:
            zeros = {spec.name: np.zeros(spec.elements, spec.format.unsigned) for spec in grid.tensors}
            content = Content(grid, zeros, codec.digests(grid, zeros))
        digests = content.digests
        for payload in path:
            for part in payload.parts:
                if part.first < offset + len(grid.chunks) and offset < part.stop:
                    records = [
                        replace(record, chunk=record.chunk - offset)
                        for record in self._records(payload, part)
                        if offset <= record.chunk < offset + len(grid.chunks)
                    ]
                    try:
                        digests = codec.apply(grid, content.bits, digests, records)
                    except ValueError as e:
                        raise DamagedVersion(f"version {payload.version}: {e}") from None
        return Content(grid, content.bits, digests)

    def _records(self, payload: Payload, part: PayloadPart) -> list[ChunkRecord]:
        if part.key not in self._cache:
            held = sum(len(r.payload) for records in self._cache.values() for r in records)
            while self._cache and held + part.bytes > PART:
                held -= sum(len(r.payload) for r in self._cache.popitem(last=False)[1])
            kind, version, records = codec.unpack(self._source.get(payload.version, part), len(self.grid.chunks))
            if (kind, version) != (payload.kind, payload.version):
                raise DamagedVersion(f"version {payload.version}: its payload is the {kind} of version {version}")
            self._cache[part.key] = records
        self._cache.move_to_end(part.key)
        return self._cache[part.key]

    def _of_base(self, grid: Schema) -> Content:
        """These tensors of the model folder, with the adapters added to them."""
        if self._tensors is None:
            if self._base is None:
                raise DamagedVersion("its chain begins with a model folder that is not at hand here")
            self._tensors = self._base()
        try:
            content = rounded({spec.name: self._tensors[spec.name] for spec in grid.tensors}, grid)
        except (KeyError, ValueError) as e:
            raise DamagedVersion(f"version {self.manifest.version} is of another model: {e}") from None
        adapted, own = self.manifest.adapted, self._adapters
        if own is None or isinstance(adapted, msgspec.UnsetType):
            return content
        arrays, specs = dict(content.bits), {spec.name: spec for spec in self.grid.tensors}
        for layer in sorted(name.removesuffix(DOWN) for name in own if name.endswith(DOWN)):
            if (name := weight_name(layer, specs)) in arrays:
                weight = as_tensor(arrays[name], specs[name]).view(specs[name].shape)
                total = merged(weight, own[layer + DOWN], own[layer + UP], adapted.scale, self.grid.types[name])
                arrays[name] = bits(total)
        return Content(grid, arrays, codec.digests(grid, arrays))
