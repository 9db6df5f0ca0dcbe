"""The engine's side: finds the newest version, fetches and verifies it while serving, then swaps the weights.

A host image holds the bits of the live version, verified chunk by chunk. The next version is made beside it, so that
unverified bits never reach the live tensors; the differences are staged as lists of single elements. A swap writes
these between two steps and reads them back; if they do not hold, the image's bits are restored. Live tensors are
digested as a whole when they are first written, damaged chunks after their repair, and a scrubber walks over all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NoReturn, cast

import httpx2
import msgspec
import numpy as np
import torch

from etude.errors import UserError
from etude.protocol import bearer, own_token
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights.adapters import Base, base_schema, load_live
from etude.weights.content import Content, Folder, Tensors, content_of, read_content, replay_chunk, rounded
from etude.weights.manifest import ManifestRefused, Trust, key, published_versions
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.repair import Repaired, RepairSource, RepairUnavailable, repair_chunk
from etude.weights.slabs import Positions, Slab, Sliced, Slices, whole
from etude.weights.ulpd import chunk_grid, codec
from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Bits, Schema, Spec, as_tensor, bits
from etude.weights.ulpd.digest import digest_part, digest_text, narrow_lossless

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures

SCRUBBED = 0.01
"""Share of the chunks that are digested again per version: bit rot is detected within a hundred versions."""
_PEER_SECONDS = 10.0

BetweenSteps = Callable[[int, Callable[[], None]], object]
"""Calls a function between two steps of the engine, which goes on as the given version; returns afterwards."""


class WeightsMismatch(Exception):
    """The live tensors did not take a version's values: they hold the version before, whole, with which the engine goes
    on."""


@dataclass(frozen=True)
class ElementChange:
    """New bits for single elements of a tensor; `positions` index the flattened tensor and are distinct, `places` the
    memory of the slab."""

    spec: Spec
    slab: Slab
    positions: Positions
    places: Positions
    values: Bits
    staged: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)  # on devices but the host


class LiveTensors:
    """Named tensors, or slices of tensors, read and written as the published bits; the engine sees the written values
    at once.

    A change names single elements, so writing it costs time per change and copies no tensor. On the host a compiled
    loop does it; another device gets positions and values when the change is staged, so that writing is one indexed
    operation per tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | Sliced]):
        self.slices: Slices = {n: t if isinstance(t, Sliced) else whole(t) for n, t in tensors.items()}

    @property
    def outlines(self) -> dict[str, torch.Tensor]:
        """Shape and type of each whole tensor, without memory."""
        return {n: torch.empty(part.shape, dtype=part.dtype, device="meta") for n, part in self.slices.items()}

    @property
    def devices(self) -> dict[str, torch.device]:
        """The device of each tensor."""
        return {name: part.device for name, part in self.slices.items()}

    def stage(self, spec: Spec, positions: Positions, values: Bits) -> Iterator[ElementChange]:
        """Changes of the held elements among these, ready to be written; their lists are on the device already."""
        part = self.slices[spec.name]
        for slab in part.slabs:
            if part.is_whole:
                yield self.ready(ElementChange(spec, slab, positions, positions, values))
            else:
                inside, places = slab.locate(positions)
                if places.size:
                    yield self.ready(ElementChange(spec, slab, positions[inside], places, values[inside]))

    def ready(self, change: ElementChange) -> ElementChange:
        """The change with its lists on the device."""
        if (host := _host(change.spec, change.slab)) is not None:
            for kernel in (kernels.scatter, kernels.holds):
                kernel(*host, change.places[:0], change.values[:0])  # compiled here, not while the engine is paused
            return change
        memory = change.slab.memory
        there = torch.from_numpy(change.places).to(memory.device)  # pyright: ignore[reportUnknownMemberType]
        return replace(change, staged=(there, as_tensor(change.values, change.spec).to(memory.device, memory.dtype)))

    def write(self, change: ElementChange) -> None:
        """Writes the values of the change."""
        if change.staged is None:
            kernels.scatter(*_on_host(change), change.places, change.values)
        else:
            change.slab.flat.index_copy_(0, *change.staged)

    def holds(self, change: ElementChange) -> bool:
        """Whether the elements have the change's values, bit for bit."""
        if change.staged is None:
            return bool(kernels.holds(*_on_host(change), change.places, change.values))
        places, values = change.staged
        actual = change.slab.flat.index_select(0, places)
        return torch.equal(actual.view(torch.uint8), values.view(torch.uint8))  # as bits: NaN equals itself

    def copies(self, name: str) -> tuple[torch.Tensor, ...]:
        """Copies of a tensor's slabs on the host."""
        return tuple(slab.memory.to("cpu", copy=True) for slab in self.slices[name].slabs)

    def put(self, name: str, copies: Iterable[torch.Tensor]) -> None:
        """Writes the slabs of a tensor as a whole."""
        for slab, values in zip(self.slices[name].slabs, copies, strict=True):
            slab.memory.copy_(values)

    def differing(self, content: Content) -> Iterator[str]:
        """The tensors whose held elements are others than in the content."""
        digests, tensors = content.digest_of_each(), content.tensors()
        for spec in content.schema.tensors:
            part, tensor = self.slices[spec.name], tensors[spec.name]
            try:
                held = sum(slab.digest(spec) for slab in part.slabs)
            except ValueError:
                yield spec.name
                continue
            right = digests[spec.name]
            if not part.is_whole:
                right = sum(slab.digest(spec, slab.of(tensor)) for slab in part.slabs)
            if (held - right) % 2**64:
                yield spec.name

    def digest(self, content: Content) -> int:
        """The digest of the elements that this process counts, modulo 2^64. Raises ValueError for bits that no
        published version can have, and for elements that another process counts and that differ from the content."""
        total, tensors = 0, content.tensors()
        for spec in content.schema.tensors:
            for slab in self.slices[spec.name].slabs:
                if slab.counted:
                    total += slab.digest(spec)
                elif slab.digest(spec) != slab.digest(spec, slab.of(tensors[spec.name])):
                    raise ValueError(f"{spec.name} has other values in one of several copies")
        return total % 2**64

    def digest_run(self, spec: Spec, start: int, stop: int) -> int:
        """The digest of consecutive elements of a whole tensor. Raises ValueError for bits that no published version
        can have."""
        return digest_part(
            spec, narrow_lossless(spec.name, self._flat(spec)[start:stop], getattr(torch, spec.dtype)), start
        )

    def write_run(self, spec: Spec, start: int, values: Bits) -> None:
        """Writes consecutive elements of a whole tensor."""
        self._flat(spec)[start : start + values.size].copy_(as_tensor(values, spec))

    def _flat(self, spec: Spec) -> torch.Tensor:
        part = self.slices[spec.name]
        assert part.is_whole, "chunks are those of whole tensors"
        return part.slabs[0].flat


def _host(spec: Spec, slab: Slab) -> tuple[Bits, int] | None:
    """The slab's memory as unsigned integers, and the shift of the published bits in them, for a type that a shift
    widens."""
    memory = slab.memory
    same = str(memory.dtype) == f"torch.{spec.dtype}"
    if memory.device.type != "cpu" or not (same or (spec.dtype == "bfloat16" and memory.dtype == torch.float32)):
        return None
    return bits(slab.flat), 0 if same else 16


def _on_host(change: ElementChange) -> tuple[Bits, int]:
    host = _host(change.spec, change.slab)
    assert host is not None, "the change was staged for another device"
    return host


@dataclass(frozen=True)
class WeightUpdate:
    """A verified version in host memory, not yet live: `Receiver.swap`, then `commit` or `undo`."""

    manifest: PolicyVersion
    staged: Content  # for the live tensors
    base: Content | None  # live content that the changes apply to
    changes: tuple[ElementChange, ...] | None  # None: the tensors of `before` are written as a whole
    before: Mapping[str, Sequence[torch.Tensor]]  # host copies of tensors that are written as a whole, slab by slab
    published: Content | None = None  # its published tensors; None if no update follows this one


class Receiver:
    """Brings the live tensors of an engine from version to version. Not thread-safe. The live tensors may be wider than
    the published ones (float32 for bfloat16) and on any device. `peers` are the URLs of servers that may hold the same
    version. For versions of adapters, the live tensors are the base until the first version is live, and hold the sum
    from then on. A process that holds slices alone reads the tensors that it began with by `source.folder`."""

    def __init__(
        self,
        store: Store,
        live: Mapping[str, torch.Tensor | Sliced],
        source: PayloadSource | None = None,
        peers: Sequence[str] = (),
    ):
        self._store = store
        self._source = source or PayloadSource(store)
        self._live = LiveTensors(live)
        self._held: Content | None = None  # the content of the live tensors
        self._published: Content | None = None  # its published tensors: the same, or adapters
        self._base: Base | None = None  # the base of adapters
        self._peers = tuple(peers)
        self._scrubbed = 0
        self.version = -1
        self.manifest: PolicyVersion | None = None

    @property
    def types(self) -> dict[str, torch.dtype]:
        """The types in which the held version was published. Raises AssertionError without a version."""
        assert self._held is not None
        return self._held.schema.types

    @property
    def held(self) -> tuple[PolicyVersion, Content] | None:
        """The manifest of the held version, and the bits that an engine of it computes with."""
        return None if self._held is None or self.manifest is None else (self.manifest, self._held)

    def behind(self) -> bool:
        """Whether there may be a newer version, by one look-up."""
        return self.version < 0 or self._store.exists(key(self.version + 1))

    def poll(self, limit: int | None = None) -> WeightUpdate | None:
        """The newest version (up to `limit`), downloaded and verified; None if it is live already. Takes one look-up if
        nothing is new. Raises DamagedVersion if the version cannot be read completely: the engine goes on serving the
        old one and may call again; the next anchor ends a gap in the chain."""
        if not self.behind():
            return None
        numbers = [n for n in published_versions(self._store, after=self.version) if limit is None or n <= limit]
        if not numbers:
            return None
        source = self._source.beginning_with(self._beginning()) if self._held is None else self._source
        manifest, published = read_content(source, numbers[-1], self.version, self._published)
        try:
            self._source.trust.accept(manifest)
        except ManifestRefused as e:
            raise DamagedVersion(str(e)) from None
        staged = self._staged(manifest, published)
        held = self._held
        if held is None or held.schema != staged.schema:
            # An engine that has loaded the folder of the run holds version 0 already, and needs no copies for an undo.
            before = {name: self._live.copies(name) for name in self._live.differing(staged)}
            return WeightUpdate(manifest, staged, held, None, before, published)
        return WeightUpdate(manifest, staged, held, tuple(_differences(self._live, held, staged)), {}, published)

    def advance(self, between_steps: BetweenSteps, limit: int | None = None) -> bool:
        """Swaps in the newest version (up to `limit`); false if there is none. Raises DamagedVersion, UserError or
        WeightsMismatch; then the old version is live and complete."""
        update = self.poll(limit)
        if update is not None:
            between_steps(update.manifest.version, lambda: self.apply(update))
        return update is not None

    def _beginning(self) -> Folder | None:
        """Reads the tensors before the first version: those of the folder that the engine has loaded."""
        if not all(part.is_whole for part in self._live.slices.values()):
            return self._source.folder
        return lambda: {
            name: part.slabs[0].memory.view(part.shape) if part.slabs else torch.empty(part.shape, dtype=part.dtype)
            for name, part in self._live.slices.items()
        }

    def _staged(self, manifest: PolicyVersion, published: Content) -> Content:
        """The content for the live tensors: the published one, or the base with the adapters. Raises DamagedVersion."""
        if isinstance(manifest.adapted, msgspec.UnsetType):
            _check_fit(manifest.version, published.schema, self._live.outlines)
            if self._base is not None:
                raise DamagedVersion(f"version {manifest.version} holds whole weights, the one before it adapters")
            return published
        grid = base_schema(self._store, manifest)
        _check_fit(manifest.version, grid, self._live.outlines)
        if self._base is None or self._base.digest != manifest.adapted.base:
            if self._held is not None:
                raise DamagedVersion(f"version {manifest.version} holds adapters of another base than those before it")
            beginning = self._beginning()
            assert beginning is not None, "slices come with the folder that they were read from"
            self._base = Base(beginning(), grid, manifest.version, manifest.adapted)
        return self._base.merge(manifest, published, self._live.devices)

    # --- swaps ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(self, update: WeightUpdate) -> None:
        """Writes a version into the live tensors and reads its changes back; call it between two steps of the engine.
        Raises WeightsMismatch, with the old values restored, if the tensors do not hold them. Raises ValueError, and
        writes nothing, if another version went live since the update was staged. Afterwards compare the digest, where
        several processes hold the tensors the sum of theirs, and call either `commit` or `undo`."""
        if self._held is not update.base:
            raise ValueError(f"version {update.manifest.version} was staged for another version than is live now")
        for change in update.changes or ():
            self._live.write(change)
        tensors = update.staged.tensors() if update.before else {}
        for name in update.before:
            self._live.put(name, (slab.of(tensors[name]) for slab in self._live.slices[name].slabs))
        wrong = [change.spec.name for change in update.changes or () if not self._live.holds(change)]
        if wrong:
            self._refuse(update, f"{wrong[0]} does not hold the written values")

    def digest(self, content: Content) -> int:
        """The digest of the live elements that this process counts, modulo 2^64. Raises ValueError for values that no
        version can have, and for those that another process counts if they are not the content's."""
        return self._live.digest(content)

    def swap(self, update: WeightUpdate) -> None:
        """`write`, and the digest of all live tensors if whole tensors were written. Raises WeightsMismatch and
        ValueError as it does. Afterwards call either `commit` or `undo`."""
        self.write(update)
        if update.changes is None and (why := _difference(self._live, update)):
            self._refuse(update, why)

    def _refuse(self, update: WeightUpdate, why: str) -> NoReturn:
        self.undo(update)
        raise WeightsMismatch(f"version {update.manifest.version} did not arrive in the live tensors: {why}")

    def commit(self, update: WeightUpdate) -> None:
        """Makes the swapped version the held one."""
        self._held, self.version, self.manifest = update.staged, update.manifest.version, update.manifest
        self._published = update.published

    @torch.no_grad()
    def undo(self, update: WeightUpdate) -> None:
        """Takes a swap back: the image's bits replace the update's, whatever the live tensors hold there now. Raises
        RuntimeError if the live tensors do not take them."""
        for name, copies in update.before.items():
            self._live.put(name, copies)
        for change in update.changes or ():
            assert self._held is not None
            old = self._held.bits[change.spec.name][change.positions]
            back = self._live.ready(replace(change, values=old))
            self._live.write(back)
            if not self._live.holds(back):
                raise RuntimeError(f"{change.spec.name} does not take values any more; its device is broken")

    def apply(self, update: WeightUpdate) -> None:
        """Swaps and commits. Raises WeightsMismatch."""
        self.swap(update)
        self.commit(update)

    # --- scrubbing and repair ---------------------------------------------------------------------------------------

    def scrub(self, share: float = SCRUBBED) -> list[int]:
        """Digests the next chunks, live and in the host image. Returns the numbers of those that are damaged in
        either."""
        if self._held is None:
            return []
        total = len(self._held.schema.chunks)
        count = min(math.ceil(share * total), total)
        numbers = [(self._scrubbed + i) % total for i in range(count)]
        self._scrubbed = (self._scrubbed + count) % total
        return [number for number in numbers if self._damaged(self._held, number)]

    def find_repair(self, chunks: Sequence[int]) -> list[Repaired]:
        """The right bits of damaged chunks, not yet live. Raises Unrepairable, or UserError if the store fails."""
        assert self._held is not None
        held, sources = self._held, self._repair_sources(self._held)
        return [repair_chunk(c, lambda part, c=c: held.is_right(c, part), sources) for c in chunks]

    @torch.no_grad()
    def write_repair(self, repaired: Sequence[Repaired]) -> None:
        """Writes the right bits of chunks to the live tensors and the image; call it between two steps of the engine.
        Raises RuntimeError if the live tensors do not take them."""
        held = self._held
        assert held is not None
        arrays = dict(held.bits)
        for item in repaired:
            chunk = held.schema.chunks[item.chunk]
            spec = held.schema.tensors[chunk.tensor]
            self._live.write_run(spec, chunk.start, item.bits)
            if not held.is_right(item.chunk, codec.chunk_bits(held.schema, arrays, chunk)):
                arrays[spec.name] = arrays[spec.name].copy()
                arrays[spec.name][chunk.start : chunk.stop] = item.bits
        self._held = held = replace(held, bits=arrays)
        wrong = [item.chunk for item in repaired if self._damaged(held, item.chunk)]
        if wrong:
            raise RuntimeError(f"chunk {wrong[0]} does not take its values back; its device is broken")

    def chunk(self, number: int, version: int) -> bytes | None:
        """The bytes of a chunk for a peer's repair; None if another version is held or the chunk is damaged."""
        held = self._held
        if held is None or version != self.version or not 0 <= number < len(held.schema.chunks):
            return None
        part = held.chunk(number)
        return part.tobytes() if held.is_right(number, part) else None

    def _holds(self, content: Content, number: int) -> bool:
        """Whether the live tensors hold this chunk of the content."""
        chunk = content.schema.chunks[number]
        try:
            live = self._live.digest_run(content.schema.tensors[chunk.tensor], chunk.start, chunk.stop)
        except ValueError:
            return False
        return live == int(content.digests[number])

    def _damaged(self, held: Content, number: int) -> bool:
        return not self._holds(held, number) or not held.is_right(number, held.chunk(number))

    def _repair_sources(self, held: Content) -> list[RepairSource]:
        version, folder = self.version, self._source.folder
        source = self._source.beginning_with(folder and cache(folder))  # read once for all chunks

        def peer(url: str, number: int) -> Bits:
            try:
                where = f"{url}/weights/chunks/{number}?version={version}"
                reply = httpx2.get(where, timeout=_PEER_SECONDS, trust_env=False, headers=bearer(own_token()))
            except httpx2.HTTPError as e:
                raise RepairUnavailable(f"{type(e).__name__} {e}") from None
            chunk = held.schema.chunks[number]
            form = held.schema.tensors[chunk.tensor].format
            if reply.status_code != 200 or len(reply.content) != (chunk.stop - chunk.start) * form.width // 8:
                raise RepairUnavailable(f"it answered {reply.status_code} with {len(reply.content)} bytes")
            return np.frombuffer(reply.content, form.unsigned).copy()

        def replayed(number: int) -> Bits:
            try:
                return replay_chunk(source, version, held, number)
            except DamagedVersion as e:
                raise RepairUnavailable(str(e)) from None

        def loaded(number: int) -> Bits:
            try:
                whole = PayloadSource(self._store, folder=source.folder)
                return read_content(whole, version, -1, None)[1].chunk(number)
            except DamagedVersion as e:
                raise RepairUnavailable(str(e)) from None

        def merged_again(number: int) -> Bits:
            if self._base is None or self._published is None or self.manifest is None:
                raise RepairUnavailable("there is no base")
            try:
                return self._base.merge(self.manifest, self._published, self._live.devices).chunk(number)
            except DamagedVersion as e:
                raise RepairUnavailable(str(e)) from None

        peers = [RepairSource(f"peer {url}", lambda number, url=url: peer(url, number)) for url in self._peers]
        last = [RepairSource("anchor chunk and deltas", replayed), RepairSource("whole anchor from the store", loaded)]
        if self._base is not None:
            last = [RepairSource("base and adapters", merged_again)]
        return [RepairSource("host image", held.chunk), *peers, *last]


def materialise(store: Store, version: int, tensors: Tensors, trust: Trust | None = None) -> PolicyVersion:
    """Writes a published version into `tensors`, e.g. a model's own, which may be wider; adapters are added to their
    values. Raises UserError if the version is missing, damaged, not trusted or does not fit."""
    manifest, staged = load_live(store, version, tensors, trust)
    _put(store, manifest, staged, tensors)
    return manifest


def update_to(
    store: Store,
    held: int,
    version: int,
    tensors: Tensors,
    trust: Trust | None = None,
    folder: Folder | None = None,
) -> PolicyVersion:
    """Brings `tensors`, which hold version `held`, to another version by the cheapest path; see `load_content`. Raises
    UserError."""
    grid = chunk_grid.schema_of(tensors)
    content = rounded(tensors, grid)
    manifest, staged = content_of(PayloadSource(store, trust=trust, folder=folder), version, held, content)
    _put(store, manifest, staged, tensors)
    return manifest


def _put(store: Store, manifest: PolicyVersion, staged: Content, tensors: Tensors) -> None:
    before = {name: (tensor.detach().reshape(-1).clone(),) for name, tensor in tensors.items() if tensor.numel()}
    try:
        _check_fit(manifest.version, staged.schema, tensors)
        Receiver(store, tensors).apply(WeightUpdate(manifest, staged, None, None, before))
    except (DamagedVersion, WeightsMismatch) as e:
        raise UserError(f"{store.url}: {e}; give the folder of the model that the run began with") from None


def _differences(live: LiveTensors, old: Content, new: Content) -> Iterator[ElementChange]:
    """The changes from live `old` to `new`, tensor by tensor. Reads only chunks whose digests differ."""
    places: dict[int, list[Positions]] = {}
    for number in np.flatnonzero(old.digests != new.digests).tolist():
        chunk = new.schema.chunks[number]
        before, after = old.chunk(number), new.chunk(number)
        places.setdefault(chunk.tensor, []).append(np.flatnonzero(before != after) + chunk.start)
    for tensor, positions in places.items():
        spec, flat = new.schema.tensors[tensor], np.concatenate(positions)
        yield from live.stage(spec, flat, new.bits[spec.name][flat])


def _check_fit(version: int, published: Schema, live: Tensors) -> None:
    there = {spec.name: spec.shape for spec in published.tensors}
    here = {name: tuple(tensor.shape) for name, tensor in live.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise DamagedVersion(
                f"version {version} is of another model: {name} has shape {there.get(name)}, here {here.get(name)}"
            )
    for name, dtype in published.types.items():
        if dtype.is_floating_point and torch.promote_types(dtype, live[name].dtype) != live[name].dtype:
            wide, narrow = (str(kind).removeprefix("torch.") for kind in (dtype, live[name].dtype))
            raise DamagedVersion(
                f"version {version} has {name} in {wide}, which this engine would round to {narrow}: start it with "
                f"dtype {wide} (inference.dtype of a run, --dtype of `etude serve`)"
            )


def _difference(live: LiveTensors, update: WeightUpdate) -> str | None:
    """The first difference between the live tensors and the update; None without one."""
    try:
        actual = digest_text(live.digest(update.staged))
    except ValueError as e:
        return str(e)
    if actual == update.manifest.live:
        return None
    return f"their digest is {actual}, published was {update.manifest.live}"
