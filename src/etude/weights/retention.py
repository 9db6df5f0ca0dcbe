"""The objects that the versions of a store need, and the removal of all others.

Manifests and schemas stay for ever; objects of payloads are removed when no reader can need them. Pruning keeps the two
newest anchors with everything since the older one, and the payloads that lead to and on from every version in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from etude.errors import UserError
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights.manifest import manifests
from etude.weights.payloads import NoPath, plan

GRACE_SECONDS = 3600.0
"""Younger objects are never removed: a version that is being published has objects before it has a manifest."""
ANCHORS = 2


@dataclass(frozen=True)
class Collected:
    """The objects that `collect_garbage` removed, or would remove."""

    keys: tuple[str, ...]
    bytes: int
    kept: int
    kept_bytes: int


def floor(published: Sequence[PolicyVersion]) -> int:
    """The oldest version that stays reachable, -1 without versions: the first that names the older anchor that stays.
    An anchor is written in the background, so its own version was published before that."""
    anchor = _oldest_anchor(published)
    return min((manifest.version for manifest in published if manifest.anchor.version == anchor), default=-1)


def _oldest_anchor(published: Sequence[PolicyVersion]) -> int:
    """The version of the older of the two newest anchors, -1 without versions."""
    anchors = sorted({manifest.anchor.version for manifest in published})
    return anchors[-ANCHORS:][0] if anchors else -1


def needed(published: Sequence[PolicyVersion], in_use: Collection[int] = (), gone: Collection[str] = ()) -> set[str]:
    """Keys of the objects that must stay. `gone` are keys that an earlier pruning removed. Raises UserError if a
    version in use cannot be reached even with all present objects."""
    oldest = _oldest_anchor(published)
    kept: set[str] = set()
    for manifest in published:
        if manifest.anchor.version >= oldest:
            kept |= {part.key for part in manifest.anchor.parts}
        if manifest.version > oldest:
            kept |= {part.key for part in manifest.delta}
            kept |= {part.key for skip in manifest.skips if skip.base >= oldest for part in skip.parts}
    by_number = {manifest.version: manifest for manifest in published}
    for held in in_use:
        try:
            for start, target in ((None, held), (held, published[-1].version if published else held)):
                for payload in plan(by_number.get, start, target, gone):
                    kept |= {part.key for part in payload.parts}
        except NoPath as e:
            raise UserError(f"version {held} is listed as in use, but {e}; leave it out") from None
    return kept


def collect_garbage(
    store: Store,
    *,
    prune: bool = False,
    in_use: Collection[int] = (),
    grace: float = GRACE_SECONDS,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Collected:
    """Removes objects older than `grace` seconds that no manifest names; with `prune` also those not `needed`. Raises
    UserError, and removes nothing, if a manifest is damaged, since the objects that it names are unknown."""
    # Objects first, manifests second, so that a version published meanwhile has no objects on the list. Every writer
    # gives its objects new names, so an unnamed object older than the grace will never be named.
    entries = [entry for folder in ("payloads", "shares") for entry in store.entries(folder)]
    try:
        published = manifests(store)
    except ValueError as e:
        raise UserError(f"{e}; nothing was removed") from None
    keep = {part.key for manifest in published for part in (*manifest.delta, *manifest.anchor.parts)}
    keep |= {part.key for manifest in published for skip in manifest.skips for part in skip.parts}
    if prune:
        keep &= needed(published, in_use, keep - {entry.key for entry in entries})
    now = time.time()
    rest = [entry for entry in entries if entry.key not in keep and now - entry.modified >= grace]
    for number, entry in enumerate(rest):
        progress("remove", number, len(rest))
        if not dry_run:
            store.delete(entry.key)
    taken = {entry.key for entry in rest}
    kept = [entry for entry in entries if entry.key not in taken]
    size, kept_size = (sum(entry.bytes for entry in some) for some in (rest, kept))
    return Collected(tuple(entry.key for entry in rest), size, len(kept), kept_size)
