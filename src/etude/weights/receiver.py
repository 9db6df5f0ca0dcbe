"""The engine's side: find the newest version, fetch and verify it while serving, then flip.

A host image holds the bits of the version that is live, proven chunk by chunk. The next version is made beside it, so
that nothing unproven comes near the live tensors; what differs is staged as lists of single elements. The flip writes
those between two steps and reads them back; if they do not hold, the image's bits go back in their place. Live tensors
are digested whole when they are first written, damaged chunks when they were repaired, and a scrubber walks over all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import httpx2
import numpy as np
import torch

from etude.errors import UserError
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights.live import ElementChange, LiveTensors, Positions, Tensors, as_tensor
from etude.weights.manifest import key, schema_key, versions
from etude.weights.plan import NoPath, Payload, plan
from etude.weights.repair import Repaired, RepairUnavailable, Rung, mend
from etude.weights.signature import ManifestRefused, Trust
from etude.weights.source import BrokenObject, DamagedVersion, PayloadSource
from etude.weights.ulpd import codec, schema
from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.codec import Digests
from etude.weights.ulpd.digest import digest, written
from etude.weights.ulpd.schema import Bits, Schema

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures
SCRUBBED = 0.01
"""Share of the chunks that are digested again per version: bit rot is found within a hundred versions."""
_PEER_SECONDS = 10.0


@dataclass(frozen=True)
class Content:
    """The bits of a version on the host. Tensors that two contents share are the same arrays, and never written to."""

    schema: Schema
    bits: Mapping[str, Bits]
    digests: Digests

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same memory as tensors."""
        return {spec.name: as_tensor(self.bits[spec.name], spec).view(spec.shape) for spec in self.schema.tensors}


class WeightsMismatch(Exception):
    """The live tensors did not take a version's values; they were put back and the old version goes on."""


class Receiver:
    """Brings the live tensors of an engine from version to version. Not for several threads at a time.

    The live tensors may be wider than the published ones (float32 for bfloat16) and on any device.
    `peers` are the URLs of servers that may hold the same version.
    """

    def __init__(self, store: Store, live: Tensors, source: PayloadSource | None = None, peers: Sequence[str] = ()):
        self._store = store
        self._source = source or PayloadSource(store)
        self._live = LiveTensors(live)
        self._held: Content | None = None
        self._peers = tuple(peers)
        self._scrubbed = 0
        self.version = -1
        self.manifest: PolicyVersion | None = None

    def behind(self) -> bool:
        """Whether there may be a newer version; one look-up."""
        return self.version < 0 or self._store.exists(key(self.version + 1))

    def poll(self, limit: int | None = None) -> WeightUpdate | None:
        """The newest version (up to `limit`), downloaded and verified; None if it is live already.

        One look-up when there is nothing new. Raises DamagedVersion if the version cannot be had whole: the engine
        goes on serving what it has and may ask again; the next anchor bridges a hole in the chain.
        """
        if not self.behind():
            return None
        numbers = [n for n in versions(self._store, after=self.version) if limit is None or n <= limit]
        if not numbers:
            return None
        manifest, staged = _load(self._source, numbers[-1], self.version, self._held)
        try:
            self._source.trust.accept(manifest)
        except ManifestRefused as e:
            raise DamagedVersion(str(e)) from None
        _check_fit(manifest.version, staged.schema, self._live.tensors)
        held = self._held
        if held is None or held.schema != staged.schema:
            before = {name: tensor.clone() for name, tensor in self._live.tensors.items()}
            return WeightUpdate(self, manifest, staged, held, None, before)
        return WeightUpdate(self, manifest, staged, held, tuple(_differences(self._live, held, staged)), {})

    # --- the two phases ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _flip(self, update: WeightUpdate, whole: bool) -> None:
        if self._held is not update.base:
            raise ValueError(f"version {update.manifest.version} was staged for another version than is live now")
        for change in update.changes or ():
            self._live.write(change)
        if update.changes is None:
            for name, tensor in update.staged.tensors().items():
                self._live.tensors[name].copy_(tensor)
        wrong = [change.spec.name for change in update.changes or () if not self._live.holds(change)]
        why = f"{wrong[0]} does not hold what was written" if wrong else None
        if why is None and (whole or update.changes is None):
            why = _difference(self._live.tensors, update.manifest)
        if why is not None:
            self._undo(update)
            raise WeightsMismatch(f"version {update.manifest.version} did not arrive in the live tensors: {why}")

    def _commit(self, update: WeightUpdate) -> None:
        self._held, self.version, self.manifest = update.staged, update.manifest.version, update.manifest

    @torch.no_grad()
    def _undo(self, update: WeightUpdate) -> None:
        """The image's bits in place of the update's, whatever the live tensors hold there now."""
        for name, tensor in update.before.items():
            self._live.tensors[name].copy_(tensor)
        for change in update.changes or ():
            assert self._held is not None
            back = self._live.stage(change.spec, change.positions, self._held.bits[change.spec.name][change.positions])
            self._live.write(back)
            if not self._live.holds(back):
                raise RuntimeError(f"{change.spec.name} does not take values any more; its device is broken")

    # --- scrubbing and repair ---------------------------------------------------------------------------------------

    def scrub(self, share: float = SCRUBBED) -> list[int]:
        """Digests the next chunks, live and in the host image; the numbers of those that are damaged in either."""
        if self._held is None:
            return []
        total = len(self._held.schema.chunks)
        count = min(math.ceil(share * total), total)
        numbers = [(self._scrubbed + i) % total for i in range(count)]
        self._scrubbed = (self._scrubbed + count) % total
        return [number for number in numbers if self._damaged(self._held, number)]

    def repair(self, chunks: Sequence[int]) -> Repair:
        """The right bits of damaged chunks, not yet live. Raises Unrepairable, or UserError if the store fails."""
        assert self._held is not None
        held, rungs = self._held, self._rungs(self._held)
        return Repair(self, [mend(c, lambda part, c=c: _right(held, c, part), rungs) for c in chunks])

    def chunk(self, number: int, version: int) -> bytes | None:
        """The bytes of a chunk for a peer that repairs itself; None if another version is held or the chunk is bad."""
        held = self._held
        if held is None or version != self.version or not 0 <= number < len(held.schema.chunks):
            return None
        part = codec.chunk_bits(held.schema, held.bits, held.schema.chunks[number])
        return part.tobytes() if _right(held, number, part) else None

    def _damaged(self, held: Content, number: int) -> bool:
        chunk = held.schema.chunks[number]
        try:
            live = self._live.digest_run(held.schema.tensors[chunk.tensor], chunk.start, chunk.stop)
        except ValueError:
            return True
        image = codec.chunk_bits(held.schema, held.bits, chunk)
        return live != int(held.digests[number]) or not _right(held, number, image)

    @torch.no_grad()
    def _mend(self, mended: Sequence[Repaired]) -> None:
        held = self._held
        assert held is not None
        arrays = dict(held.bits)
        for item in mended:
            chunk = held.schema.chunks[item.chunk]
            spec = held.schema.tensors[chunk.tensor]
            self._live.write_run(spec, chunk.start, item.bits)
            if not _right(held, item.chunk, codec.chunk_bits(held.schema, arrays, chunk)):
                arrays[spec.name] = arrays[spec.name].copy()
                arrays[spec.name][chunk.start : chunk.stop] = item.bits
        self._held = held = replace(held, bits=arrays)
        wrong = [item.chunk for item in mended if self._damaged(held, item.chunk)]
        if wrong:
            raise WeightsMismatch(f"chunk {wrong[0]} does not take its values back; its device is broken")

    def _rungs(self, held: Content) -> list[Rung]:
        version = self.version

        def image(number: int) -> Bits:
            return codec.chunk_bits(held.schema, held.bits, held.schema.chunks[number])

        def peer(url: str, number: int) -> Bits:
            try:
                found = httpx2.get(
                    f"{url}/weights/chunks/{number}",
                    params={"version": version},
                    timeout=_PEER_SECONDS,
                    trust_env=False,
                )
            except httpx2.HTTPError as e:
                raise RepairUnavailable(f"{type(e).__name__} {e}") from None
            chunk = held.schema.chunks[number]
            form = held.schema.tensors[chunk.tensor].format
            if found.status_code != 200 or len(found.content) != (chunk.stop - chunk.start) * form.width // 8:
                raise RepairUnavailable(f"it answered {found.status_code} with {len(found.content)} bytes")
            return np.frombuffer(found.content, form.unsigned).copy()

        def replayed(number: int) -> Bits:
            try:
                return _replay_chunk(self._source, version, held, number)
            except DamagedVersion as e:
                raise RepairUnavailable(str(e)) from None

        def loaded(number: int) -> Bits:
            try:
                whole = _load(PayloadSource(self._store), version, -1, None)[1]
            except DamagedVersion as e:
                raise RepairUnavailable(str(e)) from None
            return codec.chunk_bits(whole.schema, whole.bits, whole.schema.chunks[number])

        peers = [Rung(f"peer {url}", lambda number, url=url: peer(url, number)) for url in self._peers]
        last = [Rung("anchor chunk and deltas", replayed), Rung("whole anchor from the store", loaded)]
        return [Rung("host image", image), *peers, *last]


@dataclass(frozen=True)
class WeightUpdate:
    """A verified version in host memory, not yet live. `changes` is None where all tensors are written whole."""

    receiver: Receiver
    manifest: PolicyVersion
    staged: Content
    base: Content | None  # what was live then; the changes are right on nothing else
    changes: tuple[ElementChange, ...] | None
    before: Mapping[str, torch.Tensor]  # where they are

    def flip(self, whole: bool = False) -> None:
        """Writes it into the live tensors and proves that they hold it; call it between two steps of the engine.

        With `whole`, the digest of all live tensors is taken also where only single elements are written.
        Raises WeightsMismatch if they do not; the old values are back then. Raises ValueError, and writes nothing, if
        another version went live since it was staged. After this either `commit` or `undo`.
        """
        self.receiver._flip(self, whole)  # pyright: ignore[reportPrivateUsage]

    def commit(self) -> None:
        """From here on the receiver holds this version."""
        self.receiver._commit(self)  # pyright: ignore[reportPrivateUsage]

    def undo(self) -> None:
        """Takes a flip back."""
        self.receiver._undo(self)  # pyright: ignore[reportPrivateUsage]

    def apply(self) -> None:
        """Flips and commits. Raises WeightsMismatch."""
        self.flip()
        self.commit()


@dataclass(frozen=True)
class Repair:
    """Right bits for damaged chunks, not yet live."""

    receiver: Receiver
    mended: Sequence[Repaired]

    def apply(self) -> None:
        """Writes them; call it between two steps of the engine. Raises WeightsMismatch if they do not stay."""
        self.receiver._mend(self.mended)  # pyright: ignore[reportPrivateUsage]


def materialise(store: Store, version: int, tensors: Tensors, trust: Trust | None = None) -> PolicyVersion:
    """Writes a published version into `tensors`, e.g. a model's own, which may be wider.

    Raises UserError if the version is not there, is damaged, not trusted or does not fit.
    """
    manifest, staged = load_content(store, version, trust)
    _put(store, manifest, staged, tensors)
    return manifest


def bring(store: Store, held: int, version: int, tensors: Tensors, trust: Trust | None = None) -> PolicyVersion:
    """Brings `tensors`, which are those of version `held`, to another by the cheapest path. Raises UserError."""
    grid = schema.schema_of(tensors)
    taken = {name: schema.bits(tensor).copy() for name, tensor in tensors.items()}
    content = Content(grid, taken, codec.digests(grid, taken))
    manifest, staged = _whole(PayloadSource(store, trust=trust), version, held, content)
    _put(store, manifest, staged, tensors)
    return manifest


def load(store: Store, version: int) -> tuple[PolicyVersion, dict[str, torch.Tensor]]:
    """The manifest and the tensors of a published version, as published. Raises UserError."""
    manifest, content = load_content(store, version)
    return manifest, content.tensors()


def load_content(store: Store, version: int, trust: Trust | None = None) -> tuple[PolicyVersion, Content]:
    """The manifest and the bits of a published version. Raises UserError."""
    return _whole(PayloadSource(store, trust=trust), version, -1, None)


def _put(store: Store, manifest: PolicyVersion, staged: Content, tensors: Tensors) -> None:
    try:
        _check_fit(manifest.version, staged.schema, tensors)
        WeightUpdate(
            Receiver(store, tensors), manifest, staged, None, None, {n: t.clone() for n, t in tensors.items()}
        ).apply()
    except (DamagedVersion, WeightsMismatch) as e:
        raise UserError(f"{store.url}: {e}; give the folder of the model that the run began with") from None


def _whole(source: PayloadSource, version: int, held: int, content: Content | None) -> tuple[PolicyVersion, Content]:
    store = source.store
    if not store.exists(key(version)):
        raise UserError(f"{store.url} has no version {version}; the newest is {max(versions(store), default=None)}")
    try:
        return _load(source, version, held, content)
    except DamagedVersion as e:
        raise UserError(f"{store.url}: {e}; choose another version") from None


def _load(source: PayloadSource, target: int, held: int, content: Content | None) -> tuple[PolicyVersion, Content]:
    """Version `target`, from version `held` with this content or from an anchor, by the fewest bytes.

    A payload that is gone or altered is left out and the next best path is taken.
    """
    broken: set[str] = set()
    damage: DamagedVersion | None = None
    while True:
        try:
            path = plan(source.manifest, None if content is None else held, target, broken)
        except NoPath as e:
            raise damage or DamagedVersion(str(e)) from None
        try:
            return _follow(source, target, path, content)
        except BrokenObject as e:
            damage = damage or e
            broken.add(e.key)


def _follow(
    source: PayloadSource, target: int, path: list[Payload], content: Content | None
) -> tuple[PolicyVersion, Content]:
    manifest = source.manifest(target)
    assert manifest is not None, "the path ends at its manifest"
    if content is None or (path and path[0].base is None):
        content = _blank(source.store, manifest)
    if manifest.schema != content.schema.id:
        raise DamagedVersion(f"version {target} is of another model than the one before it")
    for payload in path:
        objects = [source.get(payload.version, part) for part in payload.parts]
        try:
            content = _applied(content, payload, objects)
        except ValueError as e:
            raise DamagedVersion(f"version {payload.version}: {e}") from None
    if written(codec.model_digest(content.digests)) != manifest.digest:
        raise DamagedVersion(f"version {target}: the tensors do not have the digest that was published")
    return manifest, content


def load_schema(store: Store, manifest: PolicyVersion) -> Schema:
    """Names, types and shapes of a version's tensors. Raises DamagedVersion."""
    try:
        return schema.decode(store.get(schema_key(manifest.schema)))
    except KeyError:
        raise DamagedVersion(f"version {manifest.version}: its schema {manifest.schema} is gone") from None
    except ValueError as e:
        raise DamagedVersion(f"version {manifest.version}: {e}") from None


def _blank(store: Store, manifest: PolicyVersion) -> Content:
    """Zeros, for an anchor to write over."""
    found = load_schema(store, manifest)
    zeros = {spec.name: np.zeros(spec.elements, spec.format.unsigned) for spec in found.tensors}
    return Content(found, zeros, codec.digests(found, zeros))


def _applied(content: Content, payload: Payload, objects: list[bytes]) -> Content:
    """The content after a payload. Raises ValueError."""
    grid = content.schema
    records: list[codec.ChunkRecord] = []
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


def _replay_chunk(source: PayloadSource, version: int, held: Content, number: int) -> Bits:
    """One chunk of a version from an anchor and what follows it. Raises DamagedVersion."""
    chunk = held.schema.chunks[number]
    spec = held.schema.tensors[chunk.tensor]
    arrays = {spec.name: np.zeros(spec.elements, spec.format.unsigned)}
    digests = np.zeros(len(held.schema.chunks), np.uint64)
    try:
        path = plan(source.manifest, None, version)
    except NoPath as e:
        raise DamagedVersion(str(e)) from None
    for payload in path:
        objects = [source.get(payload.version, p) for p in payload.parts if p.first <= number < p.stop]
        try:
            for data in objects:
                _, _, records = codec.unpack(data, len(held.schema.chunks))
                found = [record for record in records if record.chunk == number]
                digests = codec.apply(held.schema, arrays, digests, found)
        except ValueError as e:
            raise DamagedVersion(f"version {payload.version}: {e}") from None
    return codec.chunk_bits(held.schema, arrays, chunk)


def _differences(live: LiveTensors, old: Content, new: Content) -> Iterator[ElementChange]:
    """What to write for `new` where `old` is live, tensor by tensor. Reads only chunks whose digests differ."""
    places: dict[int, list[Positions]] = {}
    for number in np.flatnonzero(old.digests != new.digests).tolist():
        chunk = new.schema.chunks[number]
        before, after = (codec.chunk_bits(content.schema, content.bits, chunk) for content in (old, new))
        places.setdefault(chunk.tensor, []).append(np.flatnonzero(before != after) + chunk.start)
    for tensor, positions in places.items():
        spec, flat = new.schema.tensors[tensor], np.concatenate(positions)
        yield live.stage(spec, flat, new.bits[spec.name][flat])


def _right(content: Content, number: int, part: Bits) -> bool:
    """Whether these are the bits of a chunk."""
    chunk = content.schema.chunks[number]
    spec = content.schema.tensors[chunk.tensor]
    found = int(kernels.digest(part, np.uint64(spec.seed), chunk.start, spec.format.width))
    return found == int(content.digests[number])


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
