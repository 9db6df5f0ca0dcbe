"""Several ranks of one trainer publish one chain: each writes its own chunks, rank 0 the manifest.

The ranks communicate through the store alone. A rank announces its objects in `shares/VERSION/SESSION-RANK.json`; rank
0 waits for all announcements, writes the manifest and deletes them. The session, a new random name at every start of
the trainer, the same on all its ranks, separates announcements from those of a killed attempt.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from torch import Tensor

from etude.errors import RunFailed
from etude.records import PayloadPart, Record
from etude.store import Store
from etude.weights.ulpd.chunk_grid import Schema

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor with `total` rows, from row `first` on. A tensor without dimensions is one row."""

    rows: Tensor
    first: int
    total: int


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that publish together."""

    rank: int
    count: int
    session: str  # letters and digits


class Share(Record, frozen=True, kw_only=True):
    """The objects that one rank wrote for a version."""

    delta: tuple[PayloadPart, ...]
    skips: dict[int, tuple[PayloadPart, ...]]  # by base version
    own_anchor: tuple[PayloadPart, ...]  # of this version, at the beginning of a chain
    anchor: tuple[PayloadPart, ...] | None  # of the last anchor, an earlier version; None: not yet complete
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
    """Announces this rank's objects to rank 0."""
    store.put(_key(ranks.session, ranks.rank, version), msgspec.json.encode(share))


def gather(store: Store, ranks: Ranks, version: int, own: Share, deadline: float) -> list[Share]:
    """The shares of all ranks in order; called on rank 0. `deadline` is a time of `time.monotonic`. Raises
    RunFailed."""
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
    """Deletes the announcements of a version."""
    for rank in range(1, ranks.count):
        store.delete(_key(ranks.session, rank, version))


def _key(session: str, rank: int, version: int) -> str:
    return f"shares/{version:08d}/{session}-{rank:04d}.json"
