"""Where payloads come from: the cluster's relay if there is one, and the store when the relay cannot help."""

from __future__ import annotations

import logging

import blake3
import httpx2

from etude.records import PolicyVersion
from etude.store import Store

PIECE = 8 * 2**20
"""Bytes of one request to a relay: a link that breaks costs one piece."""
_CONNECT_SECONDS, _READ_SECONDS = 2.0, 30.0
_log = logging.getLogger(__name__)


class DamagedVersion(Exception):
    """A version that cannot be had whole: a payload is missing, altered, or not what its manifest says."""


class Source:
    """Payloads by manifest, each checked against its BLAKE3 digest. Manifests are small and always the store's."""

    def __init__(self, store: Store, relay: str | None = None):
        self.store = store
        self._relay = relay.rstrip("/") if relay else None

    def payload(self, manifest: PolicyVersion) -> bytes:
        """The payload of a version. Raises DamagedVersion, or UserError if the store cannot be reached."""
        if self._relay is not None:
            try:
                return self._from_relay(manifest)
            except (httpx2.HTTPError, ValueError) as e:
                why = f"{type(e).__name__} {e}".strip()
                _log.warning("version %d comes from the store: relay %s: %s", manifest.version, self._relay, why)
        try:
            payload = self.store.get(manifest.payload)
        except KeyError:
            raise DamagedVersion(f"version {manifest.version}: its payload {manifest.payload} is gone") from None
        if not intact(payload, manifest.payload_digest):
            raise DamagedVersion(f"version {manifest.version}: its payload was altered")
        return payload

    def _from_relay(self, manifest: PolicyVersion) -> bytes:
        """Raises httpx2.HTTPError, or ValueError for bytes that are not the payload's."""
        url, query = f"{self._relay}/{manifest.payload}", {"blake3": manifest.payload_digest}
        timeout = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        pieces: list[bytes] = []
        with httpx2.Client(timeout=timeout, trust_env=False) as http:
            for start in range(0, manifest.payload_bytes, PIECE):
                stop = min(start + PIECE, manifest.payload_bytes)
                answer = http.get(url, params=query, headers={"range": f"bytes={start}-{stop - 1}"})
                if answer.status_code != 206 or len(answer.content) != stop - start:
                    why = answer.text[:200] if answer.status_code >= 400 else "not the range that was asked for"
                    raise ValueError(f"{answer.status_code} with {len(answer.content)} bytes: {why}")
                pieces.append(answer.content)
        payload = b"".join(pieces)
        if not intact(payload, manifest.payload_digest):
            raise ValueError("it sent bytes that are not the payload's")
        return payload


def intact(payload: bytes, digest: str) -> bool:
    """Whether the bytes have this BLAKE3 digest, in hexadecimal."""
    return blake3.blake3(payload).hexdigest() == digest
