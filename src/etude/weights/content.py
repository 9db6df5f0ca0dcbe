"""The bits of a version on the host, read from payloads and verified by digests chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from etude.errors import UserError
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights.manifest import Trust, key, published_versions, schema_key
from etude.weights.payloads import FOLDER, BrokenObject, DamagedVersion, NoPath, Payload, PayloadSource, plan
from etude.weights.ulpd import chunk_grid, codec
from etude.weights.ulpd import kernels as _typed_kernels
from etude.weights.ulpd.chunk_grid import Bits, Schema, as_tensor, bits
from etude.weights.ulpd.codec import Digests
from etude.weights.ulpd.digest import digest_text

kernels = cast(Any, _typed_kernels)  # compiled functions have no signatures


@dataclass(frozen=True)
class Content:
    """The bits of a version on the host, with the digest of every chunk. Two versions share the arrays of equal
    tensors, so arrays are never written to."""

    schema: Schema
    bits: Mapping[str, Bits]
    digests: Digests

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors on the same memory."""
        return {spec.name: as_tensor(self.bits[spec.name], spec).view(spec.shape) for spec in self.schema.tensors}

    def digest_of_each(self) -> dict[str, int]:
        """The digest of each tensor."""
        sums = [0] * len(self.schema.tensors)
        for chunk, digest in zip(self.schema.chunks, self.digests.tolist(), strict=True):
            sums[chunk.tensor] += digest
        return {spec.name: total for spec, total in zip(self.schema.tensors, sums, strict=True)}

    def chunk(self, number: int) -> Bits:
        """The elements of a chunk; shares memory with its tensor's."""
        return codec.chunk_bits(self.schema, self.bits, self.schema.chunks[number])

    def is_right(self, number: int, part: Bits) -> bool:
        """Whether `part` has the digest of the chunk with this number."""
        chunk = self.schema.chunks[number]
        spec = self.schema.tensors[chunk.tensor]
        actual = int(kernels.digest(part, np.uint64(spec.seed), chunk.start, spec.format.width))
        return actual == int(self.digests[number])


VersionContent = tuple[PolicyVersion, Content]
Tensors = Mapping[str, torch.Tensor]
Folder = Callable[[], Tensors]


def load(store: Store, version: int, folder: Folder | None = None) -> tuple[PolicyVersion, dict[str, torch.Tensor]]:
    """The manifest and the tensors of a published version; see `load_content`. Raises UserError."""
    manifest, content = load_content(store, version, folder=folder)
    return manifest, content.tensors()


def load_content(
    store: Store, version: int, trust: Trust | None = None, folder: Folder | None = None
) -> VersionContent:
    """The manifest and the bits of a published version. `folder` reads the tensors of the model that the run began
    with, for a chain that begins with them. Raises UserError."""
    return content_of(PayloadSource(store, trust=trust, folder=folder), version, -1, None)


def rounded(tensors: Tensors, grid: Schema) -> Content:
    """The content of these tensors in the published types, on memory of its own. Raises ValueError if names or shapes
    differ from the schema's, or if a tensor is narrower than its published type."""
    here, there = {n: tuple(t.shape) for n, t in tensors.items()}, {s.name: s.shape for s in grid.tensors}
    if here != there:
        name = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))[0]
        raise ValueError(f"{name} has shape {there.get(name)}, here {here.get(name)}")
    arrays: dict[str, Bits] = {}
    for spec in grid.tensors:
        tensor, dtype = tensors[spec.name].detach(), getattr(torch, spec.dtype)
        if tensor.dtype != dtype and torch.promote_types(tensor.dtype, dtype) == dtype:
            raise ValueError(
                f"{spec.name} is in {spec.dtype} there, here in {str(tensor.dtype).removeprefix('torch.')}: start the "
                f"engine with dtype {spec.dtype} (inference.dtype of a run, --dtype of `etude serve`)"
            )
        narrow = tensor.to(dtype) if tensor.is_floating_point() else tensor
        arrays[spec.name] = bits(narrow.clone() if narrow is tensor else narrow)
    return Content(grid, arrays, codec.digests(grid, arrays))


def content_of(source: PayloadSource, version: int, held: int, content: Content | None) -> VersionContent:
    """`read_content` that raises UserError instead of DamagedVersion, and for a version that was never published."""
    store = source.store
    if not store.exists(key(version)):
        raise UserError(
            f"{store.url} has no version {version}; the newest is {max(published_versions(store), default=None)}"
        )
    try:
        return read_content(source, version, held, content)
    except DamagedVersion as e:
        raise UserError(f"{store.url}: {e}; choose another version") from None


def read_content(source: PayloadSource, target: int, held: int, content: Content | None) -> VersionContent:
    """Version `target`, from version `held` with this content or from an anchor, by the fewest bytes. If a payload is
    missing or damaged, the next best path is taken. Raises DamagedVersion if no path is left."""
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


def _follow(source: PayloadSource, target: int, path: list[Payload], content: Content | None) -> VersionContent:
    manifest = source.manifest(target)
    assert manifest is not None, "the path ends at its manifest"
    if path and path[0].is_folder:
        content = _of_folder(source, load_schema(source.store, manifest), path.pop(0).version)
    elif content is None or (path and path[0].base is None):
        grid = load_schema(source.store, manifest)
        zeros = {spec.name: np.zeros(spec.elements, spec.format.unsigned) for spec in grid.tensors}
        content = Content(grid, zeros, codec.digests(grid, zeros))  # for an anchor to write over
    if manifest.schema != content.schema.id:
        raise DamagedVersion(f"version {target} is of another model than the one before it")
    for payload in path:
        try:
            content = _applied(source, content, payload)
        except ValueError as e:
            raise DamagedVersion(f"version {payload.version}: {e}") from None
    if digest_text(codec.model_digest(content.digests)) != manifest.digest:
        raise DamagedVersion(f"version {target}: the tensors do not have the digest that was published")
    return manifest, content


def _of_folder(source: PayloadSource, grid: Schema, version: int) -> Content:
    """The weights of the model folder, which are those of `version`. Raises BrokenObject."""
    weights = "is the weights of the model folder that the run began with"
    if source.folder is None:
        raise BrokenObject(version, FOLDER, f"{weights}, which are not at hand here: name that folder")
    first = source.manifest(version)
    try:
        content = rounded(source.folder(), grid)
    except ValueError as e:
        raise BrokenObject(version, FOLDER, f"{weights}, and the weights here are others: {e}") from None
    if first is None or digest_text(codec.model_digest(content.digests)) != first.digest:
        raise BrokenObject(version, FOLDER, f"{weights}, and the weights here are others: give that folder")
    return content


def load_schema(store: Store, manifest: PolicyVersion, of: str | None = None) -> Schema:
    """Names, types and shapes of a version's tensors, or of those with the id `of`. Raises DamagedVersion."""
    wanted = of or manifest.schema
    try:
        return chunk_grid.decode(store.get(schema_key(wanted)))
    except KeyError:
        raise DamagedVersion(f"version {manifest.version}: its schema {wanted} is gone") from None
    except ValueError as e:
        raise DamagedVersion(f"version {manifest.version}: {e}") from None


def _applied(source: PayloadSource, content: Content, payload: Payload) -> Content:
    """The content after a payload, whose objects are read one by one. Raises ValueError, and BrokenObject."""
    grid, after, digests, done, own = content.schema, dict(content.bits), content.digests, set[int](), set[str]()
    for part in payload.parts:
        kind, version, records = codec.unpack(source.get(payload.version, part), len(grid.chunks))
        if (kind, version) != (payload.kind, payload.version):
            raise ValueError(f"its payload is the {kind} of version {version}")
        numbers = {record.chunk for record in records}
        if any(not part.first <= number < part.stop for number in numbers):
            raise ValueError(f"{part.key} holds chunks of another part")
        if len(numbers) < len(records) or numbers & done:
            raise ValueError("two parts of its payload hold the same chunk")
        for name in {grid.tensors[grid.chunks[number].tensor].name for number in numbers} - own:
            after[name] = after[name].copy()
            own.add(name)
        digests = codec.apply(grid, after, digests, records)
        done |= numbers
    return Content(grid, after, digests)


def replay_chunk(source: PayloadSource, version: int, held: Content, number: int) -> Bits:
    """One chunk of a version from an anchor and the payloads after it. Raises DamagedVersion."""
    chunk = held.schema.chunks[number]
    spec = held.schema.tensors[chunk.tensor]
    arrays = {spec.name: np.zeros(spec.elements, spec.format.unsigned)}
    digests = np.zeros(len(held.schema.chunks), np.uint64)
    try:
        path = plan(source.manifest, None, version)
    except NoPath as e:
        raise DamagedVersion(str(e)) from None
    if path[0].is_folder:
        first = _of_folder(source, held.schema, path.pop(0).version)
        arrays, digests = {spec.name: first.bits[spec.name]}, first.digests
    for payload in path:
        try:
            for part in payload.parts:
                if not part.first <= number < part.stop:
                    continue
                _, _, records = codec.unpack(source.get(payload.version, part), len(held.schema.chunks))
                of_chunk = [record for record in records if record.chunk == number]
                digests = codec.apply(held.schema, arrays, digests, of_chunk)
                if of_chunk:
                    break  # the chunk is in no other object
        except ValueError as e:
            raise DamagedVersion(f"version {payload.version}: {e}") from None
    return codec.chunk_bits(held.schema, arrays, chunk)
