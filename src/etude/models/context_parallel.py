"""Context parallelism: several ranks compute one row together (Ulysses, arXiv:2309.14509).

    embeddings, norms, linear layers, experts, head     [1, S, D]          a rank's slice of the row
    attention                                           [1, H / c, T, D]   the whole row, for a rank's heads

The row is padded and cut into c equal consecutive slices. Before each attention an all-to-all brings every rank all
tokens of its heads, and after it another one brings back all heads of its tokens. So a layout attends as in one
process, over whole rows, and padding never reaches it. Each rank's gradients are those of its tokens; their sum over
the ranks is the gradient of the row.

Suffixes: c ranks, S tokens of a slice, T of the row, W numbers of a token.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from etude.models import batch_invariant

_group: ContextVar[Any] = ContextVar("etude_context_group", default=None)
_row: ContextVar[RowSlice | None] = ContextVar("etude_context_row", default=None)


class Heads(NamedTuple):
    """The inputs of attention in a layer: queries, keys, values, and the logits of sinks if it has them."""

    query_BHTD: Tensor
    key_BKTD: Tensor
    value_BKTD: Tensor
    sinks_H: Tensor | None


@dataclass(frozen=True)
class RowSlice:
    """Slice `index` of a row of `tokens` tokens that `ranks` ranks compute together. Every slice has `length` tokens,
    of which those behind the end of the row are padding."""

    tokens: int
    length: int
    index: int = 0
    ranks: int = 1
    group: Any = None

    @property
    def here(self) -> slice:
        """The places in the row of the slice's tokens, without padding."""
        first = self.index * self.length
        return slice(min(first, self.tokens), min(first + self.length, self.tokens))

    def cut(self, row_T: np.ndarray, fill: float = 0) -> np.ndarray:
        """The slice of an array [T, ...], with `fill` in place of padding."""
        own = row_T[self.here]
        extra = self.length - len(own)
        return np.pad(own, ((0, extra), *[(0, 0)] * (own.ndim - 1)), constant_values=fill) if extra else own

    def gathered(self, heads: Heads) -> Heads:
        """All tokens of this rank's heads, from all heads of its slice. Keys are repeated if their number is no
        multiple of the ranks. Raises ValueError for several rows, and for queries that the ranks do not divide."""
        query, key, value, sinks_H = heads
        if len(query) != 1 or query.shape[1] % self.ranks:
            raise ValueError(f"{self.ranks} ranks compute one row of equally many heads, not {tuple(query.shape)}")
        # The least number of repetitions that gives each rank whole groups: it divides the queries of a key.
        repeats = self.ranks // math.gcd(self.ranks, key.shape[1])
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        sizes = [x.shape[3] for x in (query, key, value)]
        sent = [x[0].unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(2) for x in (query, key, value)]
        row_TW = _AllToAll.apply(torch.cat(sent, dim=2), self.group).flatten(0, 1)[: self.tokens]
        parts = row_TW.split([x.shape[2] for x in sent], dim=1)
        # Contiguous, so that what a layer keeps of one of them does not keep all three.
        query, key, value = (
            x.unflatten(1, (-1, size)).transpose(0, 1).contiguous()[None] for x, size in zip(parts, sizes, strict=True)
        )
        return Heads(query, key, value, None if sinks_H is None else sinks_H.chunk(self.ranks)[self.index])

    def scattered(self, out_1HTD: Tensor) -> Tensor:
        """All heads of the slice, [1, H, S, D], from attention's output for all tokens of this rank's heads."""
        _, heads, tokens, size = out_1HTD.shape
        row_TW = F.pad(out_1HTD[0].transpose(0, 1).flatten(1), (0, 0, 0, self.ranks * self.length - tokens))
        own_cSW = _AllToAll.apply(row_TW.unflatten(0, (self.ranks, self.length)), self.group)
        own_SW = own_cSW.transpose(0, 1).reshape(self.length, self.ranks * heads * size)
        return own_SW.unflatten(1, (-1, size)).transpose(0, 1)[None]


class _AllToAll(torch.autograd.Function):
    """Part r of a tensor [c, ...] goes to rank r, and part r of the result comes from it. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def over(group: Any) -> AbstractContextManager[Any]:
    """A context in which the ranks of this group compute rows together; with None each computes whole rows. All of them
    must run the same passes."""
    return batch_invariant.within(_group, group)


def join(group: Any) -> None:
    """`over` for the rest of the program."""
    _group.set(group)


def row_slice(tokens: int) -> RowSlice:
    """This rank's slice of a row of so many tokens: the whole row outside of `over`. In batch-invariant mode it has a
    multiple of the mode's tile."""
    group = _group.get()
    ranks, index = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    length = -(-tokens // ranks)
    return RowSlice(tokens, length + batch_invariant.padding(length), index, ranks, group)


def computing(row: RowSlice | None) -> AbstractContextManager[RowSlice | None]:
    """A context for the passes over a slice: attention inside sees the whole row."""
    return batch_invariant.within(_row, row if row is not None and row.ranks > 1 else None)


def current() -> RowSlice | None:
    """The slice of the pass that runs; None if it is over whole rows."""
    return _row.get()


def total(number_N: Tensor) -> Tensor:
    """The sum of a tensor over the ranks that compute rows together."""
    if (group := _group.get()) is not None:
        dist.all_reduce(number_N, group=group)
    return number_N


def alone() -> bool:
    """Whether this rank computes whole rows."""
    return _group.get() is None


def leads() -> bool:
    """Whether this rank computes what the ranks of a row need once: it has the row's first slice."""
    group = _group.get()
    return group is None or dist.get_rank(group) == 0
