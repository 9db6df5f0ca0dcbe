"""Several ranks of one trainer publish one chain: each writes its own chunks, rank 0 the manifest.

They meet in the store alone. A rank announces what it wrote in `shares/VERSION/SESSION-RANK.json`; rank 0 waits for all
announcements, writes the manifest and takes them away. The session, drawn anew at every start of the trainer and the
same on all its ranks, keeps what a killed attempt left behind apart from this one's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from etude.errors import RunFailed
from etude.records import PayloadPart, Record
from etude.store import Store
from etude.weights.ulpd.schema import Schema

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ranks:
    """This process among those that publish together."""

    rank: int
    count: int
    session: str  # letters and digits


class Share(Record, frozen=True, kw_only=True):
    """What one rank wrote of a version."""

    delta: tuple[PayloadPart, ...]
    skips: dict[int, tuple[PayloadPart, ...]]  # by the version that they build on
    own_anchor: tuple[PayloadPart, ...]  # of this version, where a chain begins
    anchor: tuple[PayloadPart, ...] | None  # of the earlier version whose anchor was begun last; None: not complete yet
    base: int  # sums of the digests of this rank's chunks, modulo 2^64
    target: int
    changed: int


def owned(schema: Schema, rank: int, count: int) -> range:
    """The chunks of a rank: consecutive, every chunk with one owner, about the same number of elements each."""
    total = sum(chunk.stop - chunk.start for chunk in schema.chunks)
    bounds = [total * r // count for r in (rank, rank + 1)]
    edges: list[int] = []
    before = 0
    for index, chunk in enumerate(schema.chunks):
        while len(edges) < 2 and before >= bounds[len(edges)]:
            edges.append(index)
        before += chunk.stop - chunk.start
    edges += [len(schema.chunks)] * (2 - len(edges))
    return range(*edges)


def announce(store: Store, ranks: Ranks, version: int, share: Share) -> None:
    """Tells rank 0 what this rank has written."""
    store.put(_key(ranks.session, ranks.rank, version), msgspec.json.encode(share))


def gather(store: Store, ranks: Ranks, version: int, own: Share, deadline: float) -> list[Share]:
    """The shares of all ranks in order; on rank 0. `deadline` is a time of `time.monotonic`. Raises RunFailed."""
    of_ranks: list[Share] = [own]
    while len(of_ranks) < ranks.count:
        try:
            data = store.get(_key(ranks.session, len(of_ranks), version))
        except KeyError:
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"rank {len(of_ranks)} did not write its part of version {version} in time; start the trainer again"
                ) from None
            time.sleep(_POLL_SECONDS)
            continue
        of_ranks.append(msgspec.json.decode(data, type=Share))
    return of_ranks


def clear(store: Store, ranks: Ranks, version: int) -> None:
    """Takes the announcements of a version away."""
    for rank in range(1, ranks.count):
        store.delete(_key(ranks.session, rank, version))


def _key(session: str, rank: int, version: int) -> str:
    return f"shares/{version:08d}/{session}-{rank:04d}.json"
