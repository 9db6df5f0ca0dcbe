"""The engine's side: find the newest version, fetch and verify it while serving, then flip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import blake3
import numpy as np
import torch

from etude.errors import UserError
from etude.records import Part, PolicyVersion
from etude.store import Store
from etude.weights import codec, schema
from etude.weights.codec import Digests
from etude.weights.digest import digest, written
from etude.weights.manifest import key, read, schema_key, versions
from etude.weights.plan import NoPath, Payload, plan
from etude.weights.schema import Bits, Schema

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Content:
    """The bits of a version on the host. Tensors that two contents share are the same arrays, and never written to."""

    schema: Schema
    bits: Mapping[str, Bits]
    digests: Digests

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same memory as tensors."""
        return {spec.name: _tensor(self.bits[spec.name], spec) for spec in self.schema.tensors}


class DamagedVersion(Exception):
    """A version that cannot be had whole: a payload is missing, altered, or not what its manifest says."""


class WeightsMismatch(Exception):
    """The live tensors did not take a version's values; they were put back and the old version goes on."""


class Receiver:
    """Brings the live tensors of an engine from version to version.

    It keeps a host copy of the bits it has, so that a delta never touches the live tensors before it is proven. The
    live ones may be wider (float32 for bfloat16) and on any device.
    """

    def __init__(self, store: Store, live: Tensors):
        self._store = store
        self._live = live
        self._held: Content | None = None
        self.version = -1
        self.manifest: PolicyVersion | None = None

    def poll(self, limit: int | None = None) -> Update | None:
        """The newest version (up to `limit`), downloaded and verified; None if it is live already.

        One look-up when there is nothing new. Raises DamagedVersion if the version cannot be had whole: the engine
        goes on serving what it has and may ask again; the next anchor bridges a hole in the chain.
        """
        if self.version >= 0 and not self._store.exists(key(self.version + 1)):
            return None
        numbers = [n for n in versions(self._store, after=self.version) if limit is None or n <= limit]
        if not numbers:
            return None
        manifest, staged = _load(self._store, numbers[-1], self.version, self._held)
        _check_fit(manifest.version, staged.schema, self._live)
        return Update(self, manifest, staged)

    @torch.no_grad()
    def _flip(self, update: Update) -> None:
        held = self._held
        before = held.tensors() if held else {name: tensor.clone() for name, tensor in self._live.items()}
        for name, tensor in update.staged.tensors().items():
            if held is None or held.bits[name] is not update.staged.bits[name]:
                self._live[name].copy_(tensor)
        why = _difference(self._live, update.manifest)
        if why is None:
            self._held, self.version, self.manifest = update.staged, update.manifest.version, update.manifest
            return
        for name, tensor in before.items():
            self._live[name].copy_(tensor)
        raise WeightsMismatch(f"version {update.manifest.version} did not arrive in the live tensors: {why}")


@dataclass(frozen=True)
class Update:
    """A verified version, not yet live."""

    receiver: Receiver
    manifest: PolicyVersion
    staged: Content

    def apply(self) -> None:
        """Makes it live and proves the digest of the live tensors; call it between two steps of the engine.

        Raises WeightsMismatch if they do not have it; the old values are back then.
        """
        self.receiver._flip(self)  # pyright: ignore[reportPrivateUsage]


def materialise(store: Store, version: int, tensors: Tensors) -> PolicyVersion:
    """Writes a published version into `tensors`, e.g. a model's own, which may be wider.

    Raises UserError if the version is not there, is damaged or does not fit.
    """
    manifest, staged = _load_whole(store, version)
    try:
        _check_fit(version, staged.schema, tensors)
        Update(Receiver(store, tensors), manifest, staged).apply()
    except (DamagedVersion, WeightsMismatch) as e:
        raise UserError(f"{store.url}: {e}; give the folder of the model that the run began with") from None
    return manifest


def load(store: Store, version: int) -> tuple[PolicyVersion, dict[str, torch.Tensor]]:
    """The manifest and the tensors of a published version, as published. Raises UserError."""
    manifest, content = _load_whole(store, version)
    return manifest, content.tensors()


def _load_whole(store: Store, version: int) -> tuple[PolicyVersion, Content]:
    if read(store, version) is None:
        raise UserError(f"{store.url} has no version {version}; the newest is {max(versions(store), default=None)}")
    try:
        return _load(store, version, -1, None)
    except DamagedVersion as e:
        raise UserError(f"{store.url}: {e}; choose another version") from None


def _load(store: Store, target: int, held: int, content: Content | None) -> tuple[PolicyVersion, Content]:
    """Version `target`, from version `held` with this content or from an anchor, by the fewest bytes.

    A payload that is gone or altered is left out and the next best path is taken.
    """
    broken: set[str] = set()
    damage: DamagedVersion | None = None
    while True:
        try:
            path = plan(lambda version: read(store, version), None if content is None else held, target, broken)
        except NoPath as e:
            raise damage or DamagedVersion(str(e)) from None
        try:
            return _follow(store, target, path, content)
        except _BrokenObject as e:
            damage = DamagedVersion(str(e))
            broken.add(e.key)


class _BrokenObject(Exception):
    def __init__(self, payload: Payload, part: Part, why: str):
        super().__init__(f"version {payload.version}: its {payload.kind} {part.key} {why}")
        self.key = part.key


def _follow(store: Store, target: int, path: list[Payload], content: Content | None) -> tuple[PolicyVersion, Content]:
    manifest = read(store, target)
    assert manifest is not None, "the path ends at its manifest"
    if content is None or path[0].base is None:
        content = _blank(store, manifest)
    if manifest.schema != content.schema.id:
        raise DamagedVersion(f"version {target} is of another model than the one before it")
    for payload in path:
        parts = [_object(store, payload, part) for part in payload.parts]
        try:
            content = _applied(content, payload, parts)
        except ValueError as e:
            raise DamagedVersion(f"version {payload.version}: {e}") from None
    if written(codec.model_digest(content.digests)) != manifest.digest:
        raise DamagedVersion(f"version {target}: the tensors do not have the digest that was published")
    return manifest, content


def _blank(store: Store, manifest: PolicyVersion) -> Content:
    """Zeros, for an anchor to write over."""
    try:
        found = schema.decode(store.get(schema_key(manifest.schema)))
    except KeyError:
        raise DamagedVersion(f"version {manifest.version}: its schema {manifest.schema} is gone") from None
    except ValueError as e:
        raise DamagedVersion(f"version {manifest.version}: {e}") from None
    zeros = {spec.name: np.zeros(spec.elements, spec.format.unsigned) for spec in found.tensors}
    return Content(found, zeros, codec.digests(found, zeros))


def _applied(content: Content, payload: Payload, objects: list[bytes]) -> Content:
    """The content after a payload. Raises ValueError."""
    grid = content.schema
    records: list[codec.Record] = []
    for part, data in zip(payload.parts, objects, strict=True):
        kind, version, found = codec.unpack(data, len(grid.chunks))
        if (kind, version) != (payload.kind, payload.version):
            raise ValueError(f"its payload is the {kind} of version {version}")
        if any(not part.first <= record.chunk < part.stop for record in found):
            raise ValueError(f"{part.key} holds chunks of another part")
        records += found
    if len({record.chunk for record in records}) < len(records):
        raise ValueError("two parts of its payload hold the same chunk")
    touched = {grid.tensors[grid.chunks[record.chunk].tensor].name for record in records}
    after = {name: array.copy() if name in touched else array for name, array in content.bits.items()}
    return Content(grid, after, codec.apply(grid, after, content.digests, records))


def _tensor(array: Bits, spec: schema.Spec) -> torch.Tensor:
    whole = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return whole.view(getattr(torch, spec.dtype)).view(spec.shape)


def _object(store: Store, payload: Payload, part: Part) -> bytes:
    try:
        data = store.get(part.key)
    except KeyError:
        raise _BrokenObject(payload, part, "is gone") from None
    if len(data) != part.bytes or blake3.blake3(data).hexdigest() != part.digest:
        raise _BrokenObject(payload, part, "was altered")
    return data


def _check_fit(version: int, published: Schema, live: Tensors) -> None:
    there = {spec.name: spec.shape for spec in published.tensors}
    here = {name: tuple(tensor.shape) for name, tensor in live.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise DamagedVersion(
                f"version {version} is of another model: {name} has shape {there.get(name)}, here {here.get(name)}"
            )


def _difference(live: Tensors, manifest: PolicyVersion) -> str | None:
    """Why the live tensors are not the manifest's; None if they are."""
    try:
        found = digest(live)
    except ValueError as e:
        return str(e)
    if found == manifest.digest:
        return None
    return f"their digest is {found[:12]}, published was {manifest.digest[:12]}"
