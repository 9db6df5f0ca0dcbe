"""Checks every byte of a store's versions against the digests in the manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from etude.errors import UserError
from etude.records import PayloadPart, PolicyVersion
from etude.store import Store
from etude.weights import retention
from etude.weights.content import Folder, load
from etude.weights.manifest import Trust, published_versions, read_manifest, schema_key
from etude.weights.payloads import intact
from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import decode


@dataclass(frozen=True)
class StoreAudit:
    """The result of an audit: `problems` are sentences; `pruned` counts missing objects that no version needs;
    `rebuilt` says whether the newest version was made from them."""

    versions: int
    objects: int
    bytes: int
    pruned: int
    rebuilt: bool
    problems: tuple[str, ...]


def audit(
    store: Store,
    trust: Trust,
    only: int | None = None,
    folder: Folder | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> StoreAudit:
    """Reads every manifest and object, or those of version `only`, and then rebuilds the newest version, or that one.
    Each object is parsed and compared with its BLAKE3 digest, which reveals every flipped bit. A version whose chain
    begins with the weights of the model folder is rebuilt only with `folder`, which reads them. Raises UserError if
    there is no such version."""
    numbers = published_versions(store)
    if not numbers or (only is not None and only not in numbers):
        raise UserError(f"{store.url} has no version {'at all' if only is None else only}; publish one first")
    problems: list[str] = []
    published: list[PolicyVersion] = []
    for number in numbers:
        try:
            manifest = read_manifest(store, number, trust)
        except ValueError as e:
            problems += [str(e)] if only in (None, number) else []
            continue
        if manifest is None:
            problems.append(f"the manifest of version {number} is gone")
            continue
        published.append(manifest)
    needed = retention.needed(published)
    chosen = [m for m in published if only in (None, m.version)]
    objects = {part.key: (kind, number, part, m.schema) for m in chosen for kind, number, part in _objects(m)}
    chunks = {schema: _chunks(store, schema, problems) for schema in {m.schema for m in chosen}}
    for schema in {m.adapted.schema for m in chosen if not isinstance(m.adapted, msgspec.UnsetType)}:
        _chunks(store, schema, problems)
    checked = pruned = size = 0
    for done, (kind, number, part, schema) in enumerate(objects.values()):
        progress("verify", done, len(objects))
        try:
            data = store.get(part.key)
        except KeyError:
            if part.key in needed:
                problems.append(f"version {number}: {part.key} is gone")
            pruned += part.key not in needed
            continue
        checked, size = checked + 1, size + len(data)
        why = _fault(data, kind, number, part, chunks[schema])
        problems += [f"version {number}: {part.key} {why}"] if why else []
    rebuilt = bool(chosen) and not problems and (folder is not None or bool(chosen[-1].anchor.parts))
    if rebuilt:
        try:
            load(store, chosen[-1].version, folder)
        except UserError as e:
            problems.append(str(e))
    return StoreAudit(len(numbers) if only is None else 1, checked, size, pruned, rebuilt, tuple(problems))


def _objects(manifest: PolicyVersion) -> Iterator[tuple[str, int, PayloadPart]]:
    yield from (("delta", manifest.version, part) for part in manifest.delta)
    yield from (("skip", manifest.version, part) for skip in manifest.skips for part in skip.parts)
    yield from (("anchor", manifest.anchor.version, part) for part in manifest.anchor.parts)


def _chunks(store: Store, schema_id: str, problems: list[str]) -> int:
    try:
        schema = decode(store.get(schema_key(schema_id)))
        if schema.id == schema_id:
            return len(schema.chunks)
        problems.append(f"the schema {schema_id} was altered")
    except KeyError:
        problems.append(f"the schema {schema_id} is gone")
    except ValueError as e:
        problems.append(f"the schema {schema_id}: {e}")
    return 0


def _fault(data: bytes, kind: str, version: int, part: PayloadPart, chunks: int) -> str:
    """The fault of an object; empty if it has none."""
    if len(data) != part.bytes or not intact(data, part.digest):
        return "was altered"
    try:
        unpacked, number, _ = codec.unpack(data, chunks)
    except codec.Damaged as e:
        return f"is damaged: {e}"
    return "" if (unpacked, number) == (kind, version) else f"is the {unpacked} of version {number}"
