"""Which rank writes which chunks, and the exchange of rows at the edges of shards.

The grid of chunks does not depend on the number of ranks. A rank writes the chunks whose first element it holds. Of its
last chunk of a tensor the following ranks hold the rest, the halo, which they send to it. Every rank computes all sizes
from one table of the rows that each holds. `divide` and `exchange` are collectives: all ranks call them, on the thread
of their other collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as _typed_dist

from etude.weights.ranks import Parts, Ranks, Shard, held_rows
from etude.weights.ulpd.chunk_grid import Bits, Schema, unsigned

dist = cast(Any, _typed_dist)  # its functions have no types
Elements = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EdgeRun:
    """Elements [start, stop) of a tensor that another rank needs, or holds for this one."""

    peer: int
    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Division:
    """The part of one rank in a schema: the first element that it holds of each tensor, the chunks that it writes,
    ascending, and the runs that it sends and receives, by peer and tensor. `held_WT2` are the elements [first, stop) of
    each tensor on each rank."""

    schema: Schema
    held_WT2: Elements
    first_T: Elements
    chunks: Sequence[int]
    sent: tuple[EdgeRun, ...]
    received: tuple[EdgeRun, ...]
    exchanges: bool  # whether any rank sends anything

    def may_precede(self, other: Division) -> bool:
        """Whether this rank knows the version before: the same rows of the same tensors, or another schema."""
        return self.schema != other.schema or np.array_equal(self.held_WT2, other.held_WT2)


def divide(ranks: Ranks, schema: Schema, parts: Parts, last: Division | None) -> Division:
    """The division of tensors whose rows lie on the ranks as each says; `last` is returned if it is the same. Raises
    ValueError, on all ranks, if their tensors differ or if an element is not on exactly one of them."""
    own_T2 = np.array([_elements_of(parts[spec.name]) for spec in schema.tensors], np.int64).reshape(-1, 2)
    held_WT2 = _gather(ranks, schema, own_T2)
    if last is not None and last.schema == schema and np.array_equal(last.held_WT2, held_WT2):
        return last
    sizes_T = np.array([spec.elements for spec in schema.tensors], np.int64)
    _refuse_gaps(schema, sizes_T, held_WT2)
    first_T, stop_T = held_WT2[ranks.rank].T
    first, stop = first_T.tolist(), stop_T.tolist()
    chunks = [i for i, chunk in enumerate(schema.chunks) if first[chunk.tensor] <= chunk.start < stop[chunk.tensor]]
    runs = _runs(schema, sizes_T, held_WT2)
    sent = [EdgeRun(to, t, start, stop) for by, to, t, start, stop in runs if by == ranks.rank]
    received = [EdgeRun(by, t, start, stop) for by, to, t, start, stop in runs if to == ranks.rank]
    return Division(schema, held_WT2, first_T, chunks, _in_order(sent), _in_order(received), bool(runs))


def exchange(ranks: Ranks, division: Division, parts: Parts) -> dict[str, Bits]:
    """The halo of each tensor that has one: the bits of the elements after those that this rank holds."""
    if not division.exchanges:
        return {}
    specs = division.schema.tensors
    outgoing, sizes_out = _buffer(ranks, division, division.sent)
    at = 0
    for run in division.sent:
        spec, first = specs[run.tensor], int(division.first_T[run.tensor])
        part = unsigned(held_rows(parts[spec.name]))[run.start - first : run.stop - first].view(torch.uint8)
        outgoing[at : at + part.numel()].copy_(part)
        at += part.numel()
    incoming, sizes_in = _buffer(ranks, division, division.received)
    dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=ranks.group)
    pieces: dict[int, list[tuple[int, Bits]]] = {}
    at, data = 0, incoming.numpy()
    for run in division.received:
        form = specs[run.tensor].format
        stop = at + (run.stop - run.start) * form.width // 8
        pieces.setdefault(run.tensor, []).append((run.start, np.frombuffer(data[at:stop].tobytes(), form.unsigned)))
        at = stop
    return {
        specs[tensor].name: np.concatenate([bits for _, bits in sorted(some, key=lambda piece: piece[0])])
        for tensor, some in pieces.items()
    }


def _elements_of(part: torch.Tensor | Shard) -> tuple[int, int]:
    """The elements [first, stop) of the whole tensor that this process holds; (0, 0) for none."""
    rows = held_rows(part)
    if rows.is_meta or not rows.numel():
        return 0, 0
    first = part.first * (rows.numel() // len(rows) if rows.ndim else 1) if isinstance(part, Shard) else 0
    return first, first + rows.numel()


def _gather(ranks: Ranks, schema: Schema, own_T2: Elements) -> Elements:
    """The table of all ranks. Raises ValueError, on all of them, if their schemas differ."""
    if ranks.count == 1:
        return own_T2[None]
    own_id = torch.frombuffer(bytearray.fromhex(schema.id), dtype=torch.uint8)
    ids = [torch.empty_like(own_id) for _ in range(ranks.count)]
    dist.all_gather(ids, own_id, group=ranks.group)
    if others := [rank for rank, other in enumerate(ids) if not torch.equal(other, ids[0])]:
        raise ValueError(f"the tensors of rank {others[0]} have other names, types or shapes than those of rank 0")
    own = torch.from_numpy(own_T2)  # pyright: ignore[reportUnknownMemberType]
    tables = [torch.empty_like(own) for _ in range(ranks.count)]
    dist.all_gather(tables, own, group=ranks.group)
    return torch.stack(tables).numpy()


def _refuse_gaps(schema: Schema, sizes_T: Elements, held_WT2: Elements) -> None:
    """Raises ValueError unless each element is on exactly one rank."""
    empty_WT = held_WT2[..., 0] == held_WT2[..., 1]
    first_WT, stop_WT = (np.where(empty_WT, sizes_T, held_WT2[..., i]) for i in (0, 1))
    order_WT = np.argsort(first_WT, axis=0, kind="stable")
    first_WT, stop_WT = (np.take_along_axis(some, order_WT, 0) for some in (first_WT, stop_WT))
    edges_WT = np.concatenate((np.zeros_like(stop_WT[:1]), stop_WT)), np.concatenate((first_WT, sizes_T[None]))
    if (wrong_T := (edges_WT[0] != edges_WT[1]).any(axis=0)).any():
        name = schema.tensors[int(np.argmax(wrong_T))].name
        raise ValueError(f"the ranks together do not hold {name}: each row must be on one of them")


def _runs(schema: Schema, sizes_T: Elements, held_WT2: Elements) -> list[tuple[int, int, int, int, int]]:
    """(sender, receiver, tensor, start, stop) of all ranks: the first elements of a shard, as far as they belong to a
    chunk that begins on another rank."""
    if len(held_WT2) == 1 or not schema.chunks:
        return []
    before_T = np.cumsum(sizes_T) - sizes_T  # elements of the tensors before, so that all chunks lie in one row
    begin_C = np.array([before_T[chunk.tensor] + chunk.start for chunk in schema.chunks])
    end_C = np.append(begin_C[1:], sizes_T.sum())
    first_WT, stop_WT = (held_WT2[..., i] + before_T for i in (0, 1))
    chunk_WT = np.searchsorted(begin_C, first_WT, "right") - 1
    by_E, tensor_E = np.nonzero((first_WT < stop_WT) & (begin_C[chunk_WT] < first_WT))
    chunk_E = chunk_WT[by_E, tensor_E]
    begins_E = begin_C[chunk_E]
    to_E = ((first_WT[:, tensor_E] <= begins_E) & (begins_E < stop_WT[:, tensor_E])).argmax(axis=0)
    start_E = first_WT[by_E, tensor_E]
    end_E = np.minimum(end_C[chunk_E], stop_WT[by_E, tensor_E])
    columns = (by_E, to_E, tensor_E, start_E - before_T[tensor_E], end_E - before_T[tensor_E])
    return [(by, to, t, start, stop) for by, to, t, start, stop in zip(*(c.tolist() for c in columns), strict=True)]


def _in_order(runs: Sequence[EdgeRun]) -> tuple[EdgeRun, ...]:
    return tuple(sorted(runs, key=lambda run: (run.peer, run.tensor)))


def _buffer(ranks: Ranks, division: Division, runs: Sequence[EdgeRun]) -> tuple[torch.Tensor, list[int]]:
    """Host memory for runs, and the bytes for each peer."""
    sizes = [0] * ranks.count
    for run in runs:
        sizes[run.peer] += (run.stop - run.start) * division.schema.tensors[run.tensor].format.width // 8
    return torch.empty(sum(sizes), dtype=torch.uint8), sizes
