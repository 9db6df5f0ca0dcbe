"""Several ranks of one trainer publish one chain: each writes its own chunks, rank 0 the manifest.

On their threads the ranks communicate through the store alone. A rank announces its objects, or why it failed, in
`shares/VERSION/SESSION-ATTEMPT-RANK.json`; rank 0 waits for all announcements, writes the manifest and deletes them. If
rank 0 fails, its announcement says so to the others, which wait for the manifest. The session, a new random name at
every start of the trainer, the same on all its ranks, separates announcements from those of a killed attempt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch
import torch.distributed as _typed_dist
from torch import Tensor

from etude.errors import RunFailed, UserError, first_line
from etude.records import Anchor, PayloadPart, Record
from etude.store import Store
from etude.weights.ulpd.chunk_grid import Schema, schema_of
from etude.weights.ulpd.digest import digest_part, narrow_lossless

dist = cast(Any, _typed_dist)  # its functions have no types
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor with `total` rows, from row `first` on. A tensor without dimensions is one row."""

    rows: Tensor
    first: int
    total: int


Parts = Mapping[str, Tensor | Shard]
"""What this process holds of each tensor: all of it, rows of it, or nothing, if it is on the meta device."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that publish together. `group` is their torch.distributed group for the host's
    memory, None for the default one."""

    rank: int
    count: int
    session: str  # letters and digits
    group: Any = None

    def sum(self, number: int) -> int:
        """The sum of the ranks' numbers, modulo 2^64."""
        if self.count == 1:
            return number % 2**64
        of_all = torch.tensor([(number + 2**63) % 2**64 - 2**63])
        dist.all_reduce(of_all, group=self.group)  # wraps around, as two's complement does
        return int(of_all) % 2**64


def held_rows(part: Tensor | Shard) -> Tensor:
    """The rows that this process holds."""
    return part.rows if isinstance(part, Shard) else part


def schema_of_parts(parts: Parts) -> Schema:
    """The schema of the whole tensors. Raises ValueError for an unsupported type."""
    return schema_of({name: _outline(part) for name, part in parts.items()})


def digest_of_parts(parts: Parts, types: Mapping[str, torch.dtype]) -> int:
    """The digest of the elements that this process holds, modulo 2^64; over all ranks the sum of these is the number of
    which `weights_digest` is the text. Tensors of a wider type are digested as in `types`. Raises ValueError for values
    that this would round."""
    total = 0
    for name, part in parts.items():
        rows = held_rows(part)
        if rows.is_meta or not rows.numel():
            continue
        narrow = narrow_lossless(name, rows, types[name])
        (spec,) = schema_of({name: _outline(part).to(narrow.dtype)}).tensors
        first = part.first * rows[0].numel() if isinstance(part, Shard) and rows.ndim else 0
        total += digest_part(spec, narrow, first)
    return total % 2**64


def _outline(part: Tensor | Shard) -> Tensor:
    """A tensor of the whole's type and shape."""
    if not isinstance(part, Shard) or not part.rows.ndim:
        return held_rows(part)
    return part.rows.new_empty((part.total, *part.rows.shape[1:]), device="meta")


class AnchorFailed(UserError):
    """An anchor could not be written; each rank begins another."""


class Share(Record, frozen=True, kw_only=True, tag=True):
    """The objects that one rank wrote for a version."""

    delta: tuple[PayloadPart, ...]
    skips: dict[int, tuple[PayloadPart, ...]]  # by base version
    own_anchor: tuple[PayloadPart, ...]  # of this version, at the beginning of a chain
    anchor: Anchor | None  # the last one, of an earlier version; None: not yet complete
    base: int  # sums of the digests of this rank's chunks, modulo 2^64
    target: int
    changed: int


class RankFailure(Record, frozen=True, kw_only=True, tag=True):
    """Why a rank wrote no part of a version."""

    kind: str
    sentence: str

    def error(self) -> Exception:
        """The error, for the other ranks to raise."""
        return _KINDS[self.kind](self.sentence)


_KINDS = {kind.__name__: kind for kind in (AnchorFailed, UserError, RunFailed)}  # derived ones first


@dataclass(frozen=True)
class Attempt:
    """An attempt of the ranks to publish a version, the `number`-th of this session at any."""

    store: Store
    ranks: Ranks
    version: int
    number: int

    def announce(self, own: Share) -> None:
        """Announces this rank's objects to rank 0."""
        self._put(own)

    def announce_failure(self, error: BaseException) -> None:
        """Announces that this rank has failed: to rank 0, which raises it, or by rank 0 to all."""
        kind, why = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), ""), str(error)
        if not kind:
            kind = RunFailed.__name__
            why = f"rank {self.ranks.rank} failed at version {self.version}: {first_line(error)}; see its log"
        self._put(RankFailure(kind=kind, sentence=why))

    def gather(self, own: Share, deadline: float) -> list[Share]:
        """The shares of all ranks in order; called on rank 0. `deadline` is a time of `time.monotonic`. Raises the
        error of a rank that failed, RunFailed if one is missing."""
        shares = {0: own}
        while missing := [rank for rank in range(self.ranks.count) if rank not in shares]:
            late = time.monotonic() > deadline
            for rank in missing:
                word = self._get(rank)
                if isinstance(word, RankFailure):
                    raise word.error()
                if word is not None:
                    shares[rank] = word
            absent = [rank for rank in missing if rank not in shares]
            if absent and late:
                raise RunFailed(
                    f"rank {absent[0]} did not write its part of version {self.version} in time; start the trainer "
                    "again"
                )
            if absent:
                time.sleep(_POLL_SECONDS)
        return [shares[rank] for rank in range(self.ranks.count)]

    def wait(self) -> None:
        """Waits for a moment, on another rank than 0. Raises the error of rank 0 if it has failed."""
        word = self._get(0)
        if isinstance(word, RankFailure):
            raise word.error()
        time.sleep(_POLL_SECONDS)

    def clear(self) -> None:
        """Deletes the announcements of a version, and those of killed attempts."""
        for key in self.store.list(self._folder):
            self.store.delete(key)

    @property
    def _folder(self) -> str:
        return f"shares/{self.version:08d}"

    def _key(self, rank: int) -> str:
        return f"{self._folder}/{self.ranks.session}-{self.number:04d}-{rank:04d}.json"

    def _put(self, word: Share | RankFailure) -> None:
        self.store.put(self._key(self.ranks.rank), msgspec.json.encode(word))

    def _get(self, rank: int) -> Share | RankFailure | None:
        try:
            data = self.store.get(self._key(rank))
        except KeyError:
            return None
        return msgspec.json.decode(data, type=Share | RankFailure)
