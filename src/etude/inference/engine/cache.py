"""The KV cache: blocks of `BLOCK` tokens, shared between sequences with a common prefix, kept after a sequence ends.

Finished and prefilled sequences leave their blocks in a trie keyed by tokens, so the next turn of an episode and the
members of a group find the keys and values of their common prefix. A prefix that ends inside a block is copied up to
its end. Blocks that no sequence holds are evicted, least recently used first.

Weights change while the cache lives. A node records the oldest version that computed any of its prefix, and the
sessions that used it. A request may use a node if the current weights computed it, or if its own session used it before
(an episode keeps its old keys and values over a swap).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from etude.config import EngineConfig
from etude.models.kernels import BLOCK
from etude.models.key_values import KeyValueShape, cpu_cache_mb
from etude.records import Routes

FREE_SHARE = 0.8  # of a CUDA device's free memory, for the cache; the rest is for passes
_SCANNED_SIBLINGS = 64  # how many children of a node are compared token by token for a partial match


class CacheTooSmall(ValueError):
    """The memory of a cache is too small for its purpose."""


@dataclass(eq=False)
class CacheNode:
    """A cached block: `tokens` (at most BLOCK of them) that follow those of the parent."""

    page: int
    tokens: tuple[int, ...]
    parent: CacheNode | None
    version: int
    sessions: set[str]
    children: dict[tuple[int, ...], list[CacheNode]] = field(default_factory=dict)
    users: int = 0  # running sequences that hold this node
    used: int = 0  # logical time of the last use

    def usable(self, version: int, session: str | None) -> bool:
        """Whether a request of this session may use the node's keys and values under this version."""
        return self.version == version or (session is not None and session in self.sessions)


@dataclass(frozen=True)
class Match:
    """The longest usable prefix: whole nodes, then the first `partial_tokens` of another node."""

    nodes: tuple[CacheNode, ...]
    partial: CacheNode | None
    partial_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.nodes) * BLOCK + self.partial_tokens

    @property
    def version(self) -> int | None:
        """The oldest weights in this prefix."""
        used = [*self.nodes, *([self.partial] if self.partial else [])]
        return min((node.version for node in used), default=None)


NO_MATCH = Match((), None, 0)


def cache_bytes(config: EngineConfig, device: torch.device, kept: KeyValueShape, max_length: int) -> int:
    """Memory of the cache in bytes: as configured; else `FREE_SHARE` of the free memory of a CUDA device with the
    weights, or `cpu_cache_mb` on any other device."""
    if config.cache_mb is not None:
        return int(config.cache_mb * 2**20)
    if device.type != "cuda":
        return cpu_cache_mb(kept, max_length) * 2**20
    return int(FREE_SHARE * torch.cuda.mem_get_info(device)[0] - config.documents_mb * 2**20)


class PagedCache:
    """Keys, values and expert ids of all sequences, and the trie for their reuse. A sequence holds `max_length` tokens,
    or fewer if `num_bytes` do not suffice. Raises CacheTooSmall if they hold less than two pages."""

    def __init__(
        self, kept: KeyValueShape, *, num_bytes: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kept = kept
        self.page_bytes = kept.elements * BLOCK * dtype.itemsize
        self.num_pages = num_bytes // self.page_bytes
        if self.num_pages < 2:
            raise CacheTooSmall(f"a cache of {num_bytes / 2**20:.3g} MB holds {max(self.num_pages, 0) * BLOCK} tokens")
        self.max_length = min(max_length, self.num_pages * BLOCK)
        self.pages_per_sequence = -(-self.max_length // BLOCK)
        shape = (kept.layers, self.num_pages, kept.heads, BLOCK)
        self.keys, self.values = (_zeros((*shape, size), dtype, device) for size in (kept.key, kept.value))
        self.experts: Tensor | None = None  # [pages, BLOCK, MoE layers, K], made when the first ids arrive
        self.free = list(range(self.num_pages - 1, -1, -1))
        self.root = CacheNode(page=-1, tokens=(), parent=None, version=-1, sessions=set())
        self.idle = 0  # nodes without users: pages that eviction can get back
        self.nodes: set[CacheNode] = set()
        self._clock = 0

    def check_holds(self, tokens: int) -> None:
        """Raise CacheTooSmall if a sequence of so many tokens does not fit."""
        if self.max_length < tokens:
            held, needed = (pages * self.page_bytes / 2**20 for pages in (self.num_pages, -(-tokens // BLOCK)))
            raise CacheTooSmall(
                f"a cache of {held:.3g} MB holds {self.max_length} tokens, and the context of {tokens} needs "
                f"{math.ceil(needed)} MB"
            )

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can provide, evictions included."""
        return len(self.free) + self.idle

    def match(self, tokens: Sequence[int], version: int, session: str | None) -> Match:
        """The longest prefix of `tokens` that a request of this session may reuse."""
        nodes: list[CacheNode] = []
        node = self.root
        for start in range(0, len(tokens), BLOCK):
            piece = tuple(tokens[start : start + BLOCK])
            exact = [n for n in node.children.get(piece, ()) if n.usable(version, session)]
            if len(piece) < BLOCK or not exact:
                return Match(tuple(nodes), *self._partial(node, piece, version, session))
            # The newest weights first: they serve every session.
            node = max(exact, key=lambda n: n.version)
            nodes.append(node)
        return Match(tuple(nodes), None, 0)

    def _partial(
        self, node: CacheNode, piece: tuple[int, ...], version: int, session: str | None
    ) -> tuple[CacheNode | None, int]:
        best, best_length = None, 0
        for tokens in list(node.children)[-_SCANNED_SIBLINGS:]:
            length = _common(tokens, piece)
            if length > best_length:
                usable = [n for n in node.children[tokens] if n.usable(version, session)]
                if usable:
                    best, best_length = max(usable, key=lambda n: n.version), length
        return best, best_length

    def take(self, match: Match, num_pages: int, session: str | None) -> list[int]:
        """Pages of a new sequence: the matched nodes', a copy of the partial one, and fresh ones up to `num_pages`. The
        caller holds the nodes of the match until it calls `release`. Raises IndexError if pages run out; ask
        `available` first, counting the idle nodes of the match as taken."""
        self._clock += 1
        for node in match.nodes:
            self._hold(node, session)
        if match.partial is not None:
            self._hold(match.partial, session)
        pages = [node.page for node in match.nodes]
        pages += [self._new_page() for _ in range(num_pages - len(pages))]
        if match.partial is not None:
            self._copy(match.partial.page, pages[len(match.nodes)], match.partial_tokens)
            self._release(match.partial)
        return pages

    def insert(
        self, held: list[CacheNode], pages: list[int], tokens: Sequence[int], version: int, session: str | None
    ) -> list[CacheNode]:
        """Share a sequence's computed tokens with others; returns the nodes that the sequence holds now. `held` are the
        nodes it held before, for its first pages. A page that becomes a node belongs to the trie from here on. Where an
        equal node exists, the sequence uses that node's page, and its own is freed."""
        self._clock += 1
        held = list(held)
        node = held[-1] if held else self.root
        for index in range(len(held), len(tokens) // BLOCK):
            piece = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            equal = [n for n in node.children.get(piece, ()) if n.version == version]
            if equal:
                self.free.append(pages[index])
                pages[index] = equal[0].page
                node = equal[0]
                self._hold(node, session)
            else:
                node = self._add(node, pages[index], piece, version, session, users=1)
            held.append(node)
        return held

    def offer_tail(
        self, held: list[CacheNode], page: int, tokens: Sequence[int], version: int, session: str | None
    ) -> None:
        """Share the last, partly filled page of a running sequence: a copy of it becomes a node."""
        piece = tuple(tokens[len(held) * BLOCK :])
        if piece and self.available:
            copy = self._new_page()
            self._copy(page, copy, len(piece))
            self._add(held[-1] if held else self.root, copy, piece, version, session, users=0)

    def release(
        self, held: list[CacheNode], pages: list[int], tokens: Sequence[int], version: int, session: str | None
    ) -> None:
        """End a sequence: its last, partly filled page stays in the trie, and its unused pages become free."""
        index = len(held)
        piece = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
        parent = held[-1] if held else self.root
        if piece and not any(n.version == version for n in parent.children.get(piece, ())):
            self._add(parent, pages[index], piece, version, session, users=0)
            index += 1
        self.free += pages[index:]
        for node in held:
            self._release(node)

    def discard(self, held: list[CacheNode], pages: list[int], *, wipe: bool = False) -> None:
        """End a sequence and keep nothing of it but the pages that others share. `wipe` zeroes its pages: its numbers
        may not be finite, and a masked product of the pages' next owner would still spread them."""
        own = pages[len(held) :]
        if wipe and own:
            self.keys[:, own] = 0
            self.values[:, own] = 0
        self.free += own
        for node in held:
            self._release(node)

    def places(self, pages: Sequence[int], position: int, count: int) -> tuple[Tensor, Tensor]:
        """Page and offset, [count] each, of `count` tokens of a sequence from `position` on."""
        position_T = torch.arange(position, position + count, device=self.keys.device)
        return torch.tensor(pages, device=self.keys.device)[position_T // BLOCK], position_T % BLOCK

    def hold_experts(self, like_TEK: Tensor) -> Tensor:
        """The expert ids of all pages; allocated at the first call, for tokens like these."""
        if self.experts is None:
            shape = (self.num_pages, BLOCK, *like_TEK.shape[1:])
            self.experts = torch.zeros(shape, dtype=like_TEK.dtype, device=self.keys.device)
        return self.experts

    def routes(self, pages: list[int], first: int, end: int) -> Routes:
        """Expert ids of a sequence's positions [first, end), as stored beside its keys."""
        assert self.experts is not None, "no pass has recorded any"
        begin = first // BLOCK
        blocks = self.experts[torch.tensor(pages[begin : -(-end // BLOCK)], device=self.experts.device)]
        fed = blocks.flatten(0, 1)[first - begin * BLOCK : end - begin * BLOCK].cpu().numpy()
        wide = fed.dtype != np.uint8
        data = fed.astype("<i2").tobytes() if wide else fed.tobytes()
        return Routes(first=first, ids=data, layers=fed.shape[1], slots=fed.shape[2], wide=wide)

    def clear(self) -> None:
        """Drop every prefix that no running sequence holds."""
        while self.idle:
            self._evict(self.idle)

    def _add(
        self, parent: CacheNode, page: int, tokens: tuple[int, ...], version: int, session: str | None, users: int
    ) -> CacheNode:
        sessions = {session} if session is not None else set()
        node = CacheNode(page, tokens, parent, version, sessions, users=users, used=self._clock)
        parent.children.setdefault(tokens, []).append(node)
        self.nodes.add(node)
        self.idle += users == 0
        return node

    def _hold(self, node: CacheNode, session: str | None) -> None:
        self.idle -= node.users == 0
        node.users += 1
        node.used = self._clock
        if session is not None:
            node.sessions.add(session)

    def _release(self, node: CacheNode) -> None:
        node.users -= 1
        self.idle += node.users == 0

    def _copy(self, source: int, target: int, num_tokens: int) -> None:
        self.keys[:, target, :, :num_tokens] = self.keys[:, source, :, :num_tokens]
        self.values[:, target, :, :num_tokens] = self.values[:, source, :, :num_tokens]
        if self.experts is not None:
            self.experts[target, :num_tokens] = self.experts[source, :num_tokens]

    def _new_page(self) -> int:
        if not self.free:
            # An eighth at a time, so that sorting the leaves is paid once per many pages.
            self._evict(max(1, self.idle // 8))
        return self.free.pop()

    def _evict(self, count: int) -> None:
        """Free at least one and about `count` pages of idle leaves, least recently used first."""
        leaves = [node for node in self.nodes if node.users == 0 and not node.children]
        for node in sorted(leaves, key=lambda n: n.used)[:count]:
            assert node.parent is not None
            siblings = node.parent.children[node.tokens]
            siblings.remove(node)
            if not siblings:
                del node.parent.children[node.tokens]
            self.nodes.remove(node)
            self.idle -= 1
            self.free.append(node.page)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because the end of a sequence's last page is read with weight 0, where garbage could be a NaN. On the CPU
    they come from numpy, whose zeros take memory only when they are written."""
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
