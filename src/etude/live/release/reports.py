"""Reports of the gate: signed, stored beside the version under their digests, and read again before a release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blake3
import msgspec

from etude.errors import UserError
from etude.live.log.records import Release
from etude.records import Record
from etude.store import open_store

DISCORDANT = 0.1
"""The assumed share of tasks that only one of two equal versions passes, with one sample each."""
SPLIT = "heldout"
_DOMAIN = b"etude gate report\0"


class GatePart(Record, frozen=True, kw_only=True):
    """One part of the gate. `reason` is a sentence, for a passed part, too."""

    name: str
    passed: bool
    reason: str
    figures: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class GateReport(Record, frozen=True, kw_only=True):
    """The result of the gate. `signature`: Ed25519 over all other fields, empty without a key."""

    store: str
    version: int
    manifest: str
    incumbent: int | None  # release
    anchor: int | None
    parts: tuple[GatePart, ...]
    at: int
    signature: str = ""

    @property
    def failed(self) -> GatePart | None:
        """The first part that failed, or None."""
        return next((part for part in self.parts if not part.passed), None)


def keep_report(report: GateReport, key: Path | None) -> str:
    """Signs a report with the key, if there is one, stores it beside its version, and returns its digest."""
    if key is not None:
        from etude.weights import read_private_key

        report = msgspec.structs.replace(report, signature=read_private_key(key).sign(signed_bytes(report)).hex())
    data = msgspec.json.encode(report)
    digest = blake3.blake3(data).hexdigest()
    open_store(report.store, durable=True).put(_name(report.version, digest), data)
    return digest


def signed_bytes(report: GateReport) -> bytes:
    """The bytes that a report's signature covers: JSON without spaces, keys sorted, no signature."""
    return _DOMAIN + msgspec.json.encode(msgspec.structs.replace(report, signature=""), order="sorted")


def read_report(release: Release, key: Path | None) -> GateReport:
    """The report of a release. Raises UserError for a report that is missing, altered or of other weights, and, with a
    `key`, for one without its signature."""
    number, digest = release.number, release.report or ""
    try:
        data = open_store(release.store).get(_name(release.version, digest))
    except KeyError:
        raise UserError(f"the report of release {number} is not in {release.store}: run `etude live gate`") from None
    if blake3.blake3(data).hexdigest() != digest:
        raise UserError(f"the report of release {number} was altered: run `etude live gate` again")
    report = msgspec.json.decode(data, type=GateReport)
    of, wanted = (report.manifest, report.incumbent), (release.manifest, release.parent)
    if of != wanted or report.failed is not None:
        raise UserError(f"the report of release {number} is of other weights, or no pass: run `etude live gate` again")
    if key is not None:
        from cryptography.exceptions import InvalidSignature

        from etude.weights import read_private_key

        try:
            read_private_key(key).public_key().verify(bytes.fromhex(report.signature), signed_bytes(report))
        except (InvalidSignature, ValueError):
            raise UserError(f"the report of release {number} is not signed by the key of this loop") from None
    return report


def _name(version: int, digest: str) -> str:
    return f"reports/{version:08d}-{digest}.json"
