"""Where payloads come from: the cluster's relay if there is one, and the store when the relay cannot help."""

from __future__ import annotations

import logging

import blake3
import httpx2

from etude.records import PayloadPart, PolicyVersion
from etude.store import Store
from etude.weights.manifest import read
from etude.weights.signature import Trust

PIECE = 8 * 2**20
"""Bytes of one request to a relay: a link that breaks costs one piece."""
_CONNECT_SECONDS, _READ_SECONDS = 2.0, 30.0
_log = logging.getLogger(__name__)


class DamagedVersion(Exception):
    """A version that cannot be had whole: a payload is missing, altered, or not what its manifest says."""


class BrokenObject(DamagedVersion):
    """An object of a payload is missing or altered; `key` is its name in the store."""

    def __init__(self, version: int, part: PayloadPart, why: str):
        super().__init__(f"version {version}: its payload {why}")
        self.key = part.key


class PayloadSource:
    """Objects of payloads, each checked against its BLAKE3 digest. Manifests are small and always the store's; `trust`
    says which of them to believe."""

    def __init__(self, store: Store, relay: str | None = None, trust: Trust | None = None):
        self.store = store
        self.trust = trust or Trust()
        self._relay = relay.rstrip("/") if relay else None

    def manifest(self, version: int) -> PolicyVersion | None:
        """As `etude.weights.manifest.read`, of those that are trusted. Raises ValueError for any other."""
        return read(self.store, version, self.trust)

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
            raise BrokenObject(version, part, f"{part.key} is gone") from None
        if not intact(data, part.digest):
            raise BrokenObject(version, part, "was altered")
        return data

    def _from_relay(self, part: PayloadPart) -> bytes:
        """Raises httpx2.HTTPError, or ValueError for bytes that are not the payload's."""
        url, query = f"{self._relay}/{part.key}", {"blake3": part.digest}
        timeout = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        pieces: list[bytes] = []
        with httpx2.Client(timeout=timeout, trust_env=False) as http:
            for start in range(0, part.bytes, PIECE):
                stop = min(start + PIECE, part.bytes)
                answer = http.get(url, params=query, headers={"range": f"bytes={start}-{stop - 1}"})
                if answer.status_code != 206 or len(answer.content) != stop - start:
                    why = answer.text[:200] if answer.status_code >= 400 else "not the range that was asked for"
                    raise ValueError(f"{answer.status_code} with {len(answer.content)} bytes: {why}")
                pieces.append(answer.content)
        payload = b"".join(pieces)
        if not intact(payload, part.digest):
            raise ValueError("it sent bytes that are not the payload's")
        return payload


def intact(payload: bytes, digest: str) -> bool:
    """Whether the bytes have this BLAKE3 digest, in hexadecimal."""
    return blake3.blake3(payload).hexdigest() == digest
