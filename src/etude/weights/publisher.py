"""The trainer's side: publishes version after version, on a thread of its own.

`start` takes a copy of the tensors and returns; the thread writes the version's objects, then the manifest, at which
the version begins to exist. One version at a time: the next `start` first waits for the previous one and raises its
error. Anchors are written on another thread, from the copy that deltas are computed against.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import blake3
import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from etude.errors import RunFailed, UserError
from etude.failpoints import failpoint
from etude.records import AdaptedBase, Anchor, PayloadPart, PolicyVersion, Skip, StepRecord
from etude.store import Store
from etude.weights.halo import Division, divide, exchange
from etude.weights.manifest import create, manifests, read_manifest, schema_key
from etude.weights.ranks import AnchorFailed, Attempt, Parts, Ranks, Share, held_rows, schema_of_parts
from etude.weights.signature import sign
from etude.weights.snapshots import HeldPart, Snapshots
from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import Bits, Schema, Window
from etude.weights.ulpd.codec import Changes, Codec, Digests, fold
from etude.weights.ulpd.digest import digest_text

SPANS = (8, 64)
"""A version whose number is divisible by a span also has a folded delta from so many versions before. Ascending, each a
multiple of the previous one, so that a longer fold is made of shorter ones."""

ANCHOR_VERSIONS, ANCHOR_SHARE = 200, 0.5
"""Versions, and bytes of deltas over those of the last anchor, after which another anchor is written."""
PUBLISH_SECONDS, SECONDS_A_GB = 900.0, 30.0
"""Deadline of a publication, and more of it for each GB of the tensors."""
ANCHOR_PART = 2**28
"""Bytes of the tensors in one object of an anchor, at least."""
_OTHERS, _FIRST = 0.8, 0.9  # of a publication's time: then rank 0 says who is missing, and the others that it is
_TRIES = 3  # tries to create a manifest, if acknowledgements are lost


class AlreadyPublished(RunFailed):
    """Another writer has published this version; `manifest` is that writer's."""

    def __init__(self, store: Store, manifest: PolicyVersion):
        super().__init__(
            f"another trainer has published version {manifest.version} to {store.url}; this one stops: give each run "
            "a store of its own"
        )
        self.manifest = manifest


@dataclass
class Fold:
    """The changes since version `base`, kept for the next folded delta only."""

    base: int
    changes: Changes = field(default_factory=dict[int, Any])


@dataclass(frozen=True)
class Published:
    """The version that was published last, and its bits."""

    manifest: PolicyVersion
    division: Division
    bits: Mapping[str, Window]  # never written to: an anchor may still be made from them
    digests: Digests

    @property
    def schema(self) -> Schema:
        """The schema of the whole tensors."""
        return self.division.schema


class Publication:
    """A version that is being written on a thread."""

    def __init__(self, version: int, work: Callable[[float], PolicyVersion], limit: float):
        self.version, self._limit = version, limit
        self._began = time.monotonic()
        self._deadline = self._began + limit
        self.seconds = 0.0  # duration, once it is done
        self._future: Future[PolicyVersion] = Future()
        self.raised = False
        # The end of the process does not wait for it: the order of writes makes this as safe as a crash.
        threading.Thread(target=self._run, args=(work,), name=f"publish-{version}", daemon=True).start()

    def _run(self, work: Callable[[float], PolicyVersion]) -> None:
        try:
            manifest = work(self._deadline)
        except BaseException as e:  # `result` raises it
            self._future.set_exception(e)
            return
        self.seconds = time.monotonic() - self._began
        self._future.set_result(manifest)

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def result(self) -> PolicyVersion:
        """The manifest, once it is durable. Raises the error of the thread, RunFailed after the deadline."""
        try:
            return self._future.result(max(0.0, self._deadline - time.monotonic()))
        except FutureTimeout:
            raise RunFailed(
                f"version {self.version} was not published within {self._limit:.0f} seconds; check the store, or raise "
                "weights.seconds, and resume"
            ) from None
        finally:
            self.raised = True


class Publisher:
    """Publishes versions as deltas against the bits that it published last.

    A chain begins with an anchor, which holds all elements: at the first version, and when names, types or shapes
    change. With `of_folder`, the first version is that of the model folder, which all readers have: nothing but its
    manifest is written. Another is written when the deltas since the last one exceed `anchor_share` of its size, or
    after `anchor_versions`. With `key`, manifests are signed; `model` is its `etude.models.loading.model_id`. With
    `ranks`, this process holds a part of the tensors and writes a part of each version; `resume` and `start` are then
    called on all ranks, on the thread of their collectives. With `base`, the schema of a base, the tensors are
    adapters. A publication may take `seconds`; by default more for large models. Host memory: the weights as published
    last, those being written, and those of an anchor that is being written; of a rank its part and the ends of chunks.
    Device memory: the last copies of tensors on a GPU, so that only changes come to the host.
    """

    def __init__(
        self,
        store: Store,
        anchor_versions: int = ANCHOR_VERSIONS,
        anchor_share: float = ANCHOR_SHARE,
        key: Ed25519PrivateKey | None = None,
        ranks: Ranks | None = None,
        model: str = "",
        base: Schema | None = None,
        of_folder: bool = False,
        seconds: float | None = None,
    ):
        if anchor_versions < 1:
            raise ValueError("anchor_versions must be at least 1")
        self._store = store
        self._anchor_versions, self._anchor_share = anchor_versions, anchor_share
        self._key, self._model, self._base, self._of_folder = key, model, base, of_folder
        self._seconds = seconds
        self._ranks = ranks or Ranks(0, 1, secrets.token_hex(8))
        self._snapshots = Snapshots()
        self._division: Division | None = None
        self._attempts = 0
        self._run = ""
        self._last: Published | None = None
        self._folds: dict[int, Fold] = {}
        self._since = 0.0  # bytes of deltas since the start of the last anchor
        self._flight: Publication | None = None
        self._anchor: tuple[int, Future[tuple[PayloadPart, ...]]] | None = None

    def resume(self, last: PolicyVersion, tensors: Parts) -> None:
        """Continues after `last`, whose tensors these are, whatever ranks wrote it. Raises ValueError, on all ranks, if
        their digest differs."""
        division, taken = self._take(tensors)
        bits = taken()
        digests = codec.digests(division.schema, bits, chunks=division.chunks)
        if digest_text(self._ranks.sum(codec.model_digest(digests))) != last.digest:
            raise ValueError(f"the tensors do not have the digest of version {last.version}")
        self._last = Published(last, division, bits, digests)
        self._run = last.run
        try:
            self._since = sum(m.payload_bytes for m in manifests(self._store, after=last.anchor.version))
        except ValueError:  # a damaged one: the next version gets an anchor
            self._since = math.inf
        self._folds = {span: Fold(last.version) for span in SPANS}
        self._begin_anchor_if_due(self._last)

    def publish(
        self,
        version: int,
        tensors: Parts,
        groups: tuple[int, ...],
        metrics: dict[str, float],
        *,
        lr: float | None = None,
        step: StepRecord | None = None,
        last: bool = False,
        adapted: AdaptedBase | None = None,
    ) -> PolicyVersion:
        """Calls `start` and waits for the manifest."""
        started = self.start(version, tensors, groups, metrics, lr=lr, step=step, last=last, adapted=adapted)
        return started.result()

    def start(
        self,
        version: int,
        tensors: Parts,
        groups: tuple[int, ...],
        metrics: dict[str, float],
        *,
        lr: float | None = None,
        step: StepRecord | None = None,
        last: bool = False,
        adapted: AdaptedBase | None = None,
    ) -> Publication:
        """Begins to publish a copy of the tensors. A rank gives its shards, and on the meta device what other ranks
        hold as a whole: each row is on one rank.

        `lr` is the learning rate of the step before, which sets the size of changes that the codec expects; it does not
        affect the weights. `metrics`, `step` and `adapted` go into the manifest, without metrics that are not finite.
        At the `last` version no anchor is begun, since no later version would name it.

        Waits for the previous publication, and raises its error if no `result` has. The result raises AlreadyPublished,
        or UserError if a weight is not finite or the store refuses; `start` may then be repeated.
        """
        self.close()
        division, taken = self._take(tensors)
        if self._last is not None and not self._last.division.may_precede(division):
            raise ValueError("the rows have moved to other ranks since the last version: resume with them")
        self._attempts += 1
        finite = {k: float(v) for k, v in metrics.items() if math.isfinite(v)}  # a manifest is JSON, which has no NaN
        about = _About(version, division, groups, finite, lr or Codec.learning_rate, step, last, adapted)
        attempt = Attempt(self._store, self._ranks, version, self._attempts)
        limit = self._limit(division.schema)
        self._flight = Publication(version, lambda deadline: self._publish(about, taken, attempt, deadline), limit)
        return self._flight

    def close(self) -> None:
        """Waits for the version in flight. Raises its error if no `result` has."""
        flight = self._flight
        if flight is not None and not (flight.raised and flight.done()):
            flight.result()
        self._flight = None

    def finish_anchor(self) -> None:
        """Waits for an anchor that is being written, so that the next version names it; RunFailed after the deadline.
        Only a process that ends soon needs this, because its thread would end with it."""
        if self._anchor is not None:
            try:
                self._anchor[1].exception(PUBLISH_SECONDS if self._last is None else self._limit(self._last.schema))
            except FutureTimeout:
                raise RunFailed(f"the anchor of version {self._anchor[0]} was not written in time") from None

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _publish(
        self, about: _About, taken: Callable[[], dict[str, Window]], attempt: Attempt, deadline: float
    ) -> PolicyVersion:
        """Publishes with the other ranks; if one fails, all fail for its reason."""
        try:
            return self._publish_part(about, taken(), attempt, deadline)
        except BaseException as e:
            if isinstance(e, AnchorFailed):
                self._anchor = None  # begun again after the next version, by all ranks
            if self._ranks.count > 1 and not isinstance(e, AlreadyPublished):  # which all see by themselves
                with suppress(UserError):
                    attempt.announce_failure(e)
            raise

    def _publish_part(
        self, about: _About, new: Mapping[str, Window], attempt: Attempt, deadline: float
    ) -> PolicyVersion:
        schema, last = about.schema, self._last
        _refuse_non_finite(about.version, schema, new)
        if last is not None and last.schema != schema:
            last = None
        if last is None and self._ranks.rank == 0:
            for grid in (schema, self._base) if self._base is not None else (schema,):
                self._store.put(schema_key(grid.id), grid.encode())
        own, changes, digests = self._write(about, new, last)
        failpoint("publisher.payload")
        if self._ranks.rank == 0:
            shares = attempt.gather(own, deadline - (1 - _OTHERS) * self._limit(schema))
            manifest = commit(self._store, self._manifest(about, last, shares))
            if self._ranks.count > 1:
                with suppress(UserError):  # the version is published; leftovers are removed later
                    attempt.clear()
        else:
            attempt.announce(own)
            manifest = self._follow(attempt, deadline - (1 - _FIRST) * self._limit(schema))
        failpoint("publisher.manifest")
        self._remember(Published(manifest, about.division, new, digests), changes, about.last)
        return manifest

    def _write(
        self, about: _About, new: Mapping[str, Window], last: Published | None
    ) -> tuple[Share, Changes, Digests]:
        """Writes this rank's objects of a version."""
        version, schema, chunks = about.version, about.schema, about.division.chunks
        if last is None:
            digests = codec.digests(schema, new, chunks=chunks)
            whole, elements = (), 0
            if not (self._of_folder and self._last is None):
                whole = self._put_anchor(version, about.division, new, digests)
                elements = sum(schema.chunks[i].stop - schema.chunks[i].start for i in chunks)
            total = codec.model_digest(digests)
            share = Share(delta=(), skips={}, own_anchor=whole, anchor=None, base=total, target=total, changed=elements)
            return share, {}, digests
        rules = Codec(learning_rate=about.lr)
        records, changes = codec.encode_changes(schema, last.bits, new, last.digests, rules, chunks=chunks)
        digests = last.digests.copy()
        for record in records:
            digests[record.chunk] = record.target
        skips = self._write_skips(about, new, digests, changes, rules)
        share = Share(
            delta=self._put("delta", version, records),
            skips=skips,
            own_anchor=(),
            anchor=self._complete_anchor(),
            base=codec.model_digest(last.digests),
            target=codec.model_digest(digests),
            changed=sum(record.changes for record in records),
        )
        return share, changes, digests

    def _write_skips(
        self, about: _About, new: Mapping[str, Window], digests: Digests, changes: Changes, rules: Codec
    ) -> dict[int, tuple[PayloadPart, ...]]:
        """The folded deltas that are due, from the changes before this version and the latest ones."""
        skips: dict[int, tuple[PayloadPart, ...]] = {}
        pending = [changes]
        for span in SPANS:
            pending = [self._folds[span].changes, *pending]
            if about.version % span:
                break
            base = about.version - span
            if self._folds[span].base == base:
                own = about.division.chunks
                records = codec.encode_fold(about.schema, new, digests, pending, rules, chunks=own)
                skips[base] = self._put(f"skip-{span}", about.version, records)
        return skips

    def _manifest(self, about: _About, last: Published | None, shares: list[Share]) -> PolicyVersion:
        if last is not None and sum(share.base for share in shares) % codec.MODULUS != int(last.manifest.digest, 16):
            raise ValueError(f"the ranks together do not hold version {last.manifest.version}")
        if last is None:
            anchor = Anchor(version=about.version, parts=_joined(share.own_anchor for share in shares))
        else:
            anchor = last.manifest.anchor
            complete = [share.anchor for share in shares if share.anchor is not None]
            if len(complete) == len(shares) and len({own.version for own in complete}) == 1:
                anchor = Anchor(version=complete[0].version, parts=_joined(own.parts for own in complete))
        bases = sorted(shares[0].skips, reverse=True)
        manifest = PolicyVersion(
            run=self._run or self._ranks.session,
            writer=self._ranks.session,
            version=about.version,
            parent=None if last is None else last.manifest.version,
            delta=_joined(share.delta for share in shares),
            skips=tuple(Skip(base=b, parts=_joined(share.skips[b] for share in shares)) for b in bases),
            anchor=anchor,
            schema=about.schema.id,
            model=self._model,
            digest=digest_text(sum(share.target for share in shares)),
            adapted=about.adapted or msgspec.UNSET,
            changed=sum(share.changed for share in shares),
            elements=sum(spec.elements for spec in about.schema.tensors),
            groups=about.groups,
            created=time.time(),
            metrics=about.metrics,
            step=about.step or msgspec.UNSET,
        )
        return manifest if self._key is None else sign(manifest, self._key)

    def _follow(self, attempt: Attempt, deadline: float) -> PolicyVersion:
        """The manifest that rank 0 writes. Raises the error of a rank that failed."""
        while (manifest := read_manifest(self._store, attempt.version)) is None:
            if time.monotonic() > deadline:
                raise RunFailed(f"rank 0 did not publish version {attempt.version} in time; start the trainer again")
            attempt.wait()
        if manifest.writer != self._ranks.session:
            raise AlreadyPublished(self._store, manifest)
        return manifest

    def _remember(self, published: Published, changes: Changes, last: bool) -> None:
        """Moves on to a durable version, and begins an anchor of it if one is due."""
        manifest, schema, before = published.manifest, published.schema, self._last
        self._last, self._run = published, manifest.run
        if manifest.parent is None:
            self._since, self._anchor = 0.0, None
            self._folds = {span: Fold(manifest.version) for span in SPANS}
            return
        assert before is not None
        if manifest.anchor != before.manifest.anchor:
            self._anchor = None
        pending = changes
        for span in SPANS:  # a complete shorter fold is added to the longer ones
            own = self._folds[span]
            own.changes = fold(schema, [own.changes, pending])
            if manifest.version % span:
                break
            pending, self._folds[span] = own.changes, Fold(manifest.version)
        self._since += manifest.payload_bytes
        if not last:
            self._begin_anchor_if_due(published)

    def _begin_anchor_if_due(self, of: Published) -> None:
        manifest = of.manifest
        size = sum(part.bytes for part in manifest.anchor.parts) or of.schema.nbytes
        old = manifest.version - manifest.anchor.version >= self._anchor_versions
        if self._anchor is None and (old or self._since > self._anchor_share * size):
            self._begin_anchor(of)

    def _complete_anchor(self) -> Anchor | None:
        """This rank's part of the last anchor, None until it is complete. Raises the error of its thread, AnchorFailed
        for a UserError."""
        if self._anchor is None or not self._anchor[1].done():
            return None
        version, future = self._anchor
        if isinstance(error := future.exception(), UserError):
            raise AnchorFailed(str(error)) from error
        return Anchor(version=version, parts=future.result())

    def _begin_anchor(self, of: Published) -> None:
        version = of.manifest.version
        future: Future[tuple[PayloadPart, ...]] = Future()
        self._anchor, self._since = (version, future), 0.0

        def work() -> None:
            try:
                future.set_result(self._put_anchor(version, of.division, of.bits, of.digests))
                failpoint("publisher.anchor")
            except BaseException as e:
                future.set_exception(e)  # the next version raises it

        threading.Thread(target=work, name=f"anchor-{version}", daemon=True).start()

    def _put_anchor(
        self, version: int, division: Division, new: Mapping[str, Window], digests: Digests
    ) -> tuple[PayloadPart, ...]:
        """Writes an anchor object by object, so that neither side holds it whole beside the tensors."""
        parts, begin, size, schema, owned = list[PayloadPart](), 0, 0, division.schema, division.chunks
        for number, index in enumerate(owned, 1):
            chunk = schema.chunks[index]
            size += (chunk.stop - chunk.start) * schema.tensors[chunk.tensor].format.width // 8
            if size >= ANCHOR_PART or number == len(owned):
                some = owned[begin:number]
                parts += self._put("anchor", version, codec.encode_anchor(schema, new, digests, chunks=some))
                begin, size = number, 0
        return tuple(parts)

    def _put(self, kind: str, version: int, records: list[codec.ChunkRecord]) -> tuple[PayloadPart, ...]:
        return put_part(self._store, kind, version, records, self._ranks.session)

    # ----------------------------------------------------------------------------------------------------------------

    def _limit(self, schema: Schema) -> float:
        """The seconds that a publication may take."""
        return self._seconds or PUBLISH_SECONDS + SECONDS_A_GB * schema.nbytes / 1e9

    def _take(self, tensors: Parts) -> tuple[Division, Callable[[], dict[str, Window]]]:
        """The division over the ranks, and a copy of the tensors that this rank has chunks of, with the halos of
        others; the second result returns their bits."""
        self._division = division = divide(self._ranks, schema_of_parts(tensors), tensors, self._division)
        halos = exchange(self._ranks, division, tensors)
        parts: list[HeldPart] = []
        for number in sorted({division.schema.chunks[i].tensor for i in division.chunks}):
            spec = division.schema.tensors[number]
            rows, first = held_rows(tensors[spec.name]), int(division.first_T[number])
            parts.append(HeldPart(spec, rows, first, halos.get(spec.name)))
        return division, self._snapshots.take(parts)


def put_part(
    store: Store, kind: str, version: int, records: list[codec.ChunkRecord], session: str
) -> tuple[PayloadPart, ...]:
    """Writes an object under its digest and this writer's name, so that no other attempt uses the same key."""
    if not records:
        return ()
    payload = codec.pack(kind.split("-")[0], version, records)
    digest = blake3.blake3(payload).hexdigest()
    key = f"payloads/{version:08d}-{kind}-{digest[:32]}-{session[:16]}"
    store.put(key, payload)
    failpoint("publisher.part")
    first, stop = records[0].chunk, records[-1].chunk + 1
    return (PayloadPart(key=key, bytes=len(payload), digest=digest, first=first, stop=stop),)


def commit(store: Store, manifest: PolicyVersion) -> PolicyVersion:
    """Creates the manifest. If the reply is lost, the manifest is read back, and created again if it is missing, which
    is harmless. Raises AlreadyPublished."""
    lost: UserError | None = None
    for _ in range(_TRIES):
        try:
            if create(store, manifest):
                return manifest
        except UserError as error:
            lost = error
        try:
            stored = read_manifest(store, manifest.version)
        except (UserError, ValueError) as error:
            raise lost or error from None
        if stored == manifest:
            return manifest
        if stored is not None:
            raise AlreadyPublished(store, stored)
    raise lost or AlreadyPublished(store, manifest)


@dataclass(frozen=True)
class _About:
    """The arguments of `start` besides the tensors."""

    version: int
    division: Division
    groups: tuple[int, ...]
    metrics: dict[str, float]
    lr: float
    step: StepRecord | None
    last: bool
    adapted: AdaptedBase | None

    @property
    def schema(self) -> Schema:
        """The schema of the whole tensors."""
        return self.division.schema


def _joined(parts: Any) -> tuple[PayloadPart, ...]:
    return tuple(part for some in parts for part in some)


def _refuse_non_finite(version: int, schema: Schema, taken: Mapping[str, Window]) -> None:
    """Raises UserError for NaN and infinities. The codec keeps them, but such a policy must not be served."""
    bad = [
        spec.name for spec in schema.tensors if spec.name in taken and not _finite(spec.dtype, taken[spec.name].bits)
    ]
    if bad:
        others = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise UserError(
            f"version {version} is not published: {bad[0]}{others} hold NaN or infinity; lower the learning rate and "
            "resume"
        )


def _finite(dtype: str, values: Bits) -> bool:
    kind = getattr(torch, dtype)
    if not kind.is_floating_point or not values.size:
        return True
    tensor = torch.from_numpy(values).view(kind)  # pyright: ignore[reportUnknownMemberType]
    if kind.itemsize == 1:
        tensor = tensor.to(torch.bfloat16)
    low, high = torch.aminmax(tensor)  # NaN wins in both
    return bool(torch.isfinite(low) & torch.isfinite(high))
