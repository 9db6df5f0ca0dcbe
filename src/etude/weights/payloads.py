"""Payloads: the choice of those that lead from one version to another, and the sources of their bytes.

The path has the fewest bytes over deltas, skips and anchors. The bytes come from the cluster's relay if there is one,
and from the store if the relay fails.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import blake3
import httpx2

from etude.protocol import bearer, own_token
from etude.records import PayloadPart, PolicyVersion
from etude.store import Store
from etude.weights.manifest import Trust, read_manifest

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "the model folder"
PIECE = 8 * 2**20
"""Bytes of one request to a relay: a broken connection costs one piece."""
_CONNECT_SECONDS, _READ_SECONDS = 2.0, 30.0
_log = logging.getLogger(__name__)


class NoPath(ValueError):
    """No complete chain of payloads leads to the version; the message is the reason, in one clause."""


@dataclass(frozen=True)
class Payload:
    """Objects that lead from the content of version `base` (None: no content needed) to that of `version`."""

    kind: str  # "delta" | "skip" | "anchor"
    base: int | None
    version: int
    parts: tuple[PayloadPart, ...]

    @property
    def is_folder(self) -> bool:
        """Whether the chain begins with the weights of the model folder, which readers have: no object holds them."""
        return self.base is None and not self.parts

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the objects; `FOLDER` in place of the model folder."""
        return (FOLDER,) if self.is_folder else tuple(part.key for part in self.parts)

    @property
    def bytes(self) -> int:
        """Size of all objects."""
        return sum(part.bytes for part in self.parts)


def plan(
    read: Callable[[int], PolicyVersion | None], held: int | None, target: int, broken: Collection[str] = ()
) -> list[Payload]:
    """The payloads to apply in this order, from the content of version `held` (None: nothing) to version `target`.

    The sum of their bytes is the least, and among equal sums their number; empty if `target` is held. The search
    considers the anchors that manifests on the way name. `read` returns the manifest of a version, or None, or raises
    ValueError; no path goes through a version without a manifest. Payloads with an object whose key is in `broken` are
    not used. Raises NoPath rather than returning a partial chain. The search is Dijkstra's from the target backward, so
    only manifests that can matter are read.
    """
    best: dict[int, tuple[int, int, Payload | None]] = {target: (0, 0, None)}
    queue: list[tuple[int, int, int]] = [(0, 0, target)]
    anchors: dict[int, Payload] = {}
    whole: tuple[int, int, int] | None = None  # (bytes, payloads, version) of the cheapest path from an anchor
    done: set[int] = set()
    faults: list[str] = []

    def from_anchor(version: int) -> None:
        nonlocal whole
        if version in anchors and version in best:
            cost = (best[version][0] + anchors[version].bytes, best[version][1] + 1, version)
            whole = cost if whole is None else min(whole, cost)

    while queue:
        spent, count, version = heapq.heappop(queue)
        if version in done:
            continue
        if whole is not None and (spent, count) >= whole[:2]:
            break
        if version == held:
            return _path(best, version)
        done.add(version)
        try:
            manifest = read(version)
        except ValueError as e:
            faults.append(str(e))
            continue
        if manifest is None:
            faults.append(f"the manifest of version {version} is gone")
            continue
        for payload in _payloads(manifest):
            if any(key in broken for key in payload.keys):
                faults.append(f"the {payload.kind} of version {payload.version} is missing or damaged")
            elif payload.base is None:
                if payload.version <= target:
                    anchors[payload.version] = payload
                    from_anchor(payload.version)
            else:
                cost = (spent + payload.bytes, count + 1)
                if payload.base not in best or cost < best[payload.base][:2]:
                    best[payload.base] = (*cost, payload)
                    heapq.heappush(queue, (*cost, payload.base))
                    from_anchor(payload.base)
    if whole is None:
        raise NoPath(f"no whole chain leads to version {target}: {faults[0] if faults else 'there is no anchor'}")
    return [anchors[whole[2]], *_path(best, whole[2])]


def _payloads(manifest: PolicyVersion) -> list[Payload]:
    """The payloads in a manifest; its anchor may be that of an earlier version."""
    payloads = [Payload("anchor", None, manifest.anchor.version, manifest.anchor.parts)]
    if manifest.parent is not None:
        payloads.append(Payload("delta", manifest.parent, manifest.version, manifest.delta))
    payloads += [Payload("skip", skip.base, manifest.version, skip.parts) for skip in manifest.skips]
    return payloads


def _path(best: dict[int, tuple[int, int, Payload | None]], start: int) -> list[Payload]:
    path: list[Payload] = []
    payload = best[start][2]
    while payload is not None:
        path.append(payload)
        payload = best[payload.version][2]
    return path


class DamagedVersion(Exception):
    """A version that cannot be read completely: a payload is missing, altered, or differs from its manifest."""


class BrokenObject(DamagedVersion):
    """An object of a payload is missing or altered; `key` is its name in the store."""

    def __init__(self, version: int, key: str, why: str):
        super().__init__(f"version {version}: its payload {why}")
        self.key = key


class PayloadSource:
    """Objects of payloads, each checked against its BLAKE3 digest. Manifests are small and always read from the store;
    `trust` decides which of them are accepted. `folder` reads the tensors of the model that the run began with: a chain
    may begin with them."""

    def __init__(
        self,
        store: Store,
        relay: str | None = None,
        trust: Trust | None = None,
        folder: Callable[[], Mapping[str, Tensor]] | None = None,
    ):
        self.store = store
        self.trust = trust or Trust()
        self.folder = folder
        self._relay = relay.rstrip("/") if relay else None

    def beginning_with(self, folder: Callable[[], Mapping[str, Tensor]] | None) -> PayloadSource:
        """The same source with another reader of the model folder."""
        other = copy(self)
        other.folder = folder
        return other

    def manifest(self, version: int) -> PolicyVersion | None:
        """The trusted manifest of a version, as `etude.weights.read_manifest` returns it. Raises ValueError for any
        other."""
        return read_manifest(self.store, version, self.trust)

    def get(self, version: int, part: PayloadPart) -> bytes:
        """An object of a version's payload. Raises BrokenObject, or UserError if the store cannot be reached."""
        if self._relay is not None:
            try:
                return self._from_relay(part)
            except (httpx2.HTTPError, ValueError) as e:
                why = f"{type(e).__name__} {e}".strip()
                _log.warning("version %d comes from the store: relay %s: %s", version, self._relay, why)
        try:
            data = self.store.get(part.key)
        except KeyError:
            raise BrokenObject(version, part.key, f"{part.key} is gone") from None
        if not intact(data, part.digest):
            raise BrokenObject(version, part.key, "was altered")
        return data

    def _from_relay(self, part: PayloadPart) -> bytes:
        """The object from the relay. Raises httpx2.HTTPError, or ValueError for bytes with another digest."""
        url, query = f"{self._relay}/{part.key}", {"blake3": part.digest}
        timeout = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        pieces: list[bytes] = []
        with httpx2.Client(timeout=timeout, trust_env=False, headers=bearer(own_token())) as http:
            for start in range(0, part.bytes, PIECE):
                stop = min(start + PIECE, part.bytes)
                answer = http.get(url, params=query, headers={"range": f"bytes={start}-{stop - 1}"})
                if answer.status_code != 206 or len(answer.content) != stop - start:
                    why = answer.text[:200] if answer.status_code >= 400 else "not the requested range"
                    raise ValueError(f"{answer.status_code} with {len(answer.content)} bytes: {why}")
                pieces.append(answer.content)
        payload = b"".join(pieces)
        if not intact(payload, part.digest):
            raise ValueError("it sent bytes that are not the payload's")
        return payload


def intact(payload: bytes, digest: str) -> bool:
    """Whether the bytes have this BLAKE3 digest, in hexadecimal."""
    return blake3.blake3(payload).hexdigest() == digest
