"""The document cache: keys and values of documents by (hash of token ids, weight version, recipe), for any position.

    gather (hold cached entries, make room for the rest) -> compute, beside decoding -> assemble into a sequence's pages

A request takes the memory for all its documents at once or waits without any, so requests never wait for each other in
a circle. Entries that no request holds are evicted, least recently used first. Only `check` and `stats` may be called
from other threads than the engine's.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from etude.inference.engine.cache import PagedCache
from etude.inference.engine.requests import Request, RunningSequence
from etude.models.document_spans import RECIPE, CachedDocument, Rotation, compute, empty_document, refusal, token_bytes
from etude.models.kernels import place
from etude.records import token_digest


class DocumentKey(NamedTuple):
    """The key of an entry: everything that its content depends on."""

    ids: str  # digest of the token ids
    version: int  # of the weights
    recipe: str


@dataclass(eq=False)
class DocumentEntry:
    """A document in the cache, computed or being computed."""

    key: DocumentKey
    document: CachedDocument
    users: int = 0  # requests between `gather` and `assemble`

    @property
    def ready(self) -> bool:
        """Whether all of its tokens are computed."""
        return self.document.computed == len(self.document)

    @property
    def num_bytes(self) -> int:
        """Memory of its keys and values."""
        return 2 * self.document.keys_LKnD.nbytes


@dataclass(frozen=True)
class Gathered:
    """The entries that a waiting request holds: its documents that reach beyond its first `begin` tokens."""

    version: int
    begin: int
    places: tuple[tuple[int, DocumentEntry], ...]  # offset in the prompt, entry
    missed_tokens: int  # of documents that were not in the cache

    @property
    def entries(self) -> set[DocumentEntry]:
        """Each entry once, even if the prompt repeats it."""
        return {entry for _, entry in self.places}


@dataclass
class DocumentCounters:
    """Sums since the start. Every place of a document in a request is a hit or a miss."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    assembly_seconds: float = 0.0


class Documents:
    """The document cache of one engine. `num_bytes` bounds its keys and values, those being computed included."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, num_bytes: int, routes: bool) -> None:
        self.budget = num_bytes
        self.counters = DocumentCounters()
        self.refusal = refusal(model)
        self._model, self._cache, self._routes = model, cache, routes
        self._rotation = None if self.refusal else Rotation(model)
        self._placeable = self._rotation is not None and self._rotation.placeable()
        self._token_bytes = token_bytes(model.config, model.dtype.itemsize)
        # Part of the key, so that a cache that outlives its engine could not be read by another recipe.
        self.recipe = f"{RECIPE}, {model.dtype}"
        self._entries: OrderedDict[DocumentKey, DocumentEntry] = OrderedDict()  # least recently used first
        self._todo: deque[DocumentEntry] = deque()
        self.used = 0  # bytes
        self._gathered: dict[RunningSequence, Gathered] = {}
        self._first: RunningSequence | None = None  # waits for room; later sequences must not take it

    def stats(self) -> dict[str, int | float | str]:
        """Counters, and the size of the cache, for `/health`."""
        state = {"entries": len(self._entries), "bytes": self.used, "budget_bytes": self.budget}
        return {**vars(self.counters), **state, "refusal": self.refusal}

    def check(self, request: Request) -> None:
        """Raise ValueError if the documents of this request can never be served. From any thread."""
        if request.documents and self.refusal:
            raise ValueError(f"{self.refusal}: send the documents as plain text of the prompt")
        needed = sum(map(len, {tuple(document) for document in request.documents}))
        if needed * self._token_bytes > self.budget:
            raise ValueError(
                f"the documents have {needed} tokens and the document cache holds {self.budget // self._token_bytes}: "
                "send fewer or shorter ones, or raise documents_mb (--documents-mb of `etude serve`, "
                "inference.documents_mb of a run)"
            )

    def gather(self, sequence: RunningSequence, begin: int, version: int) -> bool:
        """Whether all documents that reach beyond the sequence's first `begin` tokens are computed and held for it. If
        not, they are queued until there is room: call again after the next `compute`."""
        if not sequence.request.documents:
            return True
        gathered = self._gathered.get(sequence)
        if gathered is not None and (gathered.version != version or begin < gathered.begin):
            self.release(sequence, stale=gathered.version != version)
            gathered = None
        if gathered is None and self._first in (None, sequence):
            gathered = self._hold(sequence.request, begin, version)
            self._first = sequence if gathered is None else None
            if gathered is not None:
                self._gathered[sequence] = gathered
        return gathered is not None and all(entry.ready for entry in gathered.entries)

    def _hold(self, request: Request, begin: int, version: int) -> Gathered | None:
        """The entries of a request; None if there is no room beside the entries that others hold."""
        starts = accumulate(map(len, request.documents), initial=0)
        keys = {
            start: (DocumentKey(token_digest(ids), version, self.recipe), ids)
            for (start, end), ids in zip(pairwise(starts), request.documents, strict=True)
            if end > begin
        }
        missing = {key: ids for key, ids in keys.values() if key not in self._entries}
        kept = {key for key, _ in keys.values()} - missing.keys()
        if not self._make_room(self._token_bytes * sum(map(len, missing.values())), kept):
            return None
        for key, ids in missing.items():
            self._entries[key] = entry = DocumentEntry(key, empty_document(self._model, ids))
            self.used += entry.num_bytes
            self._todo.append(entry)
        missed = sum(map(len, missing.values()))
        self.counters.misses += len(missing)
        self.counters.missed_tokens += missed
        self.counters.hits += len(keys) - len(missing)
        self.counters.hit_tokens += sum(len(ids) for _, ids in keys.values()) - missed
        places = tuple((start, self._entries[key]) for start, (key, _) in keys.items())
        gathered = Gathered(version, begin, places, missed)
        for entry in gathered.entries:
            entry.users += 1
            self._entries.move_to_end(entry.key)
        return gathered

    def _make_room(self, num_bytes: int, kept: set[DocumentKey]) -> bool:
        """Evict idle entries, except `kept`, until `num_bytes` more fit; evict nothing if that is not enough."""
        excess = self.used + num_bytes - self.budget
        leaving: list[DocumentEntry] = []
        for entry in self._entries.values():
            if excess <= 0:
                break
            if entry.users == 0 and entry.key not in kept:
                leaving.append(entry)
                excess -= entry.num_bytes
        if excess > 0:
            return False
        for entry in leaving:
            self._drop(entry)
        self.counters.evictions += len(leaving)
        return True

    def compute(self, tokens: int, version: int, *, serial: bool) -> bool:
        """Run one pass over up to `tokens` tokens of queued documents. Returns whether there were any. `serial` limits
        the pass to one document, so that its bits depend on nothing else."""
        # After a swap, documents of the old version are not computed further: `gather` releases them.
        self._todo = deque(entry for entry in self._todo if entry.key.version == version)
        parts: list[tuple[CachedDocument, int]] = []
        for entry in self._todo:
            if not tokens or (serial and parts):
                break
            count = min(tokens, len(entry.document) - entry.document.computed)
            parts.append((entry.document, count))
            tokens -= count
        if parts:
            try:
                self._compute(parts)
            except Exception:
                self._compute_alone(parts)
            self._todo = deque(entry for entry in self._todo if not entry.ready)
        return bool(parts)

    def _compute(self, parts: list[tuple[CachedDocument, int]]) -> None:
        assert self._rotation is not None
        compute(self._model, self._rotation, parts, self._routes)

    def _compute_alone(self, parts: list[tuple[CachedDocument, int]]) -> None:
        """Compute each part in a pass of its own. Where a pass fails, the requests for its document fail."""
        for part in parts:
            try:
                self._compute([part])
            except Exception as e:
                for sequence, gathered in self._gathered.items():
                    if any(entry.document is part[0] for entry in gathered.entries):
                        sequence.fail(e)

    def assemble(self, sequence: RunningSequence, begin: int) -> int:
        """Write the gathered documents, rotated, into the sequence's pages from token `begin` on, and release them.
        Returns how many of the sequence's document tokens were not computed for this request."""
        gathered = self._gathered.get(sequence)
        if gathered is None:
            return 0
        start_time = time.perf_counter()
        for start, entry in gathered.places:
            if begin < start + len(entry.document):  # the prefix cache may have gained others since
                self._place(sequence.pages, start, entry.document, max(begin - start, 0))
        self.release(sequence)
        self.counters.assembly_seconds += time.perf_counter() - start_time
        return sequence.request.document_tokens - gathered.missed_tokens

    def _place(self, pages: list[int], start: int, document: CachedDocument, first: int) -> None:
        """Write the document's tokens from `first` on; its first token stands at position `start` of the pages'
        sequence."""
        cache, rotation, length = self._cache, self._rotation, len(document)
        assert rotation is not None
        if self._placeable:
            cos_TD, sin_TD = rotation.angles(start + length)[:, 0].numpy()
            pages_P, keys, values = np.array(pages, np.int32), cache.keys.numpy(), cache.values.numpy()
            computed = document.keys_LKnD.numpy(), document.values_LKnD.numpy()
            place(*computed, cos_TD, sin_TD, first, start, pages_P, keys, values)
        else:
            page_T, offset_T = cache.places(pages, start + first, length - first)
            angles = rotation.angles(start + length)[:, :, start + first :]
            keys_LKTD = rotation(document.keys_LKnD[:, :, first:], angles)
            for to, x_LKTD in ((cache.keys, keys_LKTD), (cache.values, document.values_LKnD[:, :, first:])):
                to[:, page_T, :, offset_T] = x_LKTD.permute(2, 0, 1, 3).to(to.dtype)
        if document.experts_nEK is not None:
            experts = cache.hold_experts(document.experts_nEK)
            experts[cache.places(pages, start + first, length - first)] = document.experts_nEK[first:]

    def release(self, sequence: RunningSequence, *, stale: bool = False) -> None:
        """Release the entries that the sequence holds. Documents that no other request waits for are not computed
        further, and `stale` ones are dropped."""
        if self._first is sequence:
            self._first = None
        gathered = self._gathered.pop(sequence, None)
        if gathered is None:
            return
        for entry in gathered.entries:
            entry.users -= 1
            if entry.users == 0 and (stale or not entry.ready):
                self._drop(entry)
                if entry in self._todo:
                    self._todo.remove(entry)

    def clear(self) -> None:
        """Drop every document that no request holds."""
        for entry in [entry for entry in self._entries.values() if entry.users == 0]:
            self._drop(entry)

    def _drop(self, entry: DocumentEntry) -> None:
        del self._entries[entry.key]
        self.used -= entry.num_bytes
