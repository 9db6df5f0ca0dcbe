"""The scheduler: the queues of waiting, prefilling and decoding sequences, and their slots, pages and documents.

waiting -> admit (prefix cache, pages, documents) -> prefilling, in chunks -> decoding -> finish
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from etude.config import EngineConfig
from etude.inference.engine.cache import NO_MATCH, Match, PagedCache, cache_bytes
from etude.inference.engine.counters import Counters
from etude.inference.engine.documents import Documents
from etude.inference.engine.requests import RequestFailed, RunningSequence, SequenceStates
from etude.inference.engine.speculation import draft_counts
from etude.models.document_spans import RECIPE
from etude.models.kernels import BLOCK
from etude.models.key_values import measured
from etude.records import Generation

_log = logging.getLogger(__name__)
_WORTH_WAITING = 16  # waiting for another prompt must save at least this many prompt tokens


@dataclass(frozen=True)
class ScheduledBatch:
    """The tokens of one pass: the last of every decoding sequence, and chunks of prompts with their sizes."""

    decoding: list[RunningSequence]
    chunks: list[tuple[RunningSequence, int]]

    @cached_property
    def complete(self) -> list[bool]:
        """Whether each chunk is the last of its prompt."""
        return [sequence.fed + n == len(sequence.request.prompt) for sequence, n in self.chunks]

    @cached_property
    def prompts(self) -> list[RunningSequence]:
        """The sequences whose prompts end in this pass, which get their first sampled tokens."""
        return [sequence for (sequence, _), done in zip(self.chunks, self.complete, strict=True) if done]


class Scheduler:
    """The queues of an engine. Everything here runs on the engine's thread, except `documents.check`. `serial`: one
    sequence at a time, and nothing is shared between sequences."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        counters: Counters,
        *,
        max_length: int,
        serial: bool,
        routes: bool,
    ) -> None:
        device = next(model.parameters()).device
        kept = measured(model)
        self.cache = PagedCache(
            kept,
            num_bytes=cache_bytes(config, device, kept, max_length),
            max_length=max_length,
            # The CPU kernel computes in float32 for weights of any type.
            dtype=torch.float32 if device.type == "cpu" else model.dtype,
            device=device,
        )
        self.documents = Documents(model, self.cache, int(config.documents_mb * 2**20), routes)
        self.states = SequenceStates(
            1 if serial else config.max_batch, self.cache.max_length, self.cache.pages_per_sequence
        )
        self.counters = counters
        self.waiting: deque[RunningSequence] = deque()
        self.prefilling: list[RunningSequence] = []
        self.decoding: list[RunningSequence] = []
        self._serial, self._prefill_tokens = serial, config.prefill_tokens
        self._unsorted = True

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, sequences: Iterable[RunningSequence]) -> None:
        """Queue new sequences behind the waiting ones."""
        self.waiting.extend(sequences)

    def sequences(self) -> list[RunningSequence]:
        """All waiting and running sequences."""
        return [*self.waiting, *self.prefilling, *self.decoding]

    def drop_aborted(self) -> None:
        """Finish every aborted or failed sequence."""
        for queue in (self.waiting, self.prefilling, self.decoding):
            for sequence in [sequence for sequence in queue if sequence.aborted or sequence.error]:
                queue.remove(sequence)
                self._finish(sequence, "abort")

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """A context in which a pass takes at most so many prompt tokens."""
        usual, self._prefill_tokens = self._prefill_tokens, tokens
        try:
            yield
        finally:
            self._prefill_tokens = usual

    def forget(self) -> None:
        """Drop all prefixes and documents that no sequence holds."""
        self.cache.clear()
        self.documents.clear()

    def admit(self, version: int) -> None:
        """Give slots and pages to waiting sequences, in order, while there is room and their documents are computed."""
        deferred: list[RunningSequence] = []
        while self.waiting and self.states.free:
            sequence = self.waiting.popleft()
            try:
                placed = self._admit_one(sequence, version)
            except Exception as e:
                sequence.fail(e)
                self._finish(sequence, "error")
                continue
            if placed is None:
                deferred.append(sequence)
            elif not placed:
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(deferred))

    def _admit_one(self, sequence: RunningSequence, version: int) -> bool | None:
        """Whether the sequence was admitted; None if it waits but later ones may be admitted."""
        request, match = sequence.request, NO_MATCH
        if not self._serial:
            match = self.cache.match(request.path[:-1], version, request.session)
        if self._shares_unfinished_prompt(sequence, match.length):
            return None
        if not self.documents.gather(sequence, match.length, version):
            return None
        if not self._place(sequence, match, version):
            return False
        self.states.open(sequence)
        self.counters.cached_tokens += sequence.cached
        self.prefilling.append(sequence)
        return True

    def _shares_unfinished_prompt(self, sequence: RunningSequence, cached: int) -> bool:
        """Whether a prompt that is being computed will serve this one, too: the first member of a group goes ahead of
        the others."""
        path = sequence.request.path
        end = max(cached, sequence.request.document_tokens) + _WORTH_WAITING
        return len(path) > end and any(other.request.path[:end] == path[:end] for other in self.prefilling)

    def _place(self, sequence: RunningSequence, match: Match, version: int) -> bool:
        """Give the sequence its pages, the matched ones first; false if there are too few."""
        request = sequence.request
        num_pages = -(-min(len(request.prompt) + request.max_tokens, self.cache.max_length) // BLOCK)
        claimed = sum(node.users == 0 for node in (*match.nodes, *([match.partial] if match.partial else [])))
        if self.cache.available - claimed < num_pages - len(match.nodes):
            return False
        sequence.pages = self.cache.take(match, num_pages, request.session)
        sequence.held = list(match.nodes)
        sequence.kv_version = version if match.version is None else min(match.version, version)
        sequence.cached_documents = self.documents.assemble(sequence, match.length)
        sequence.fed = max(match.length, request.document_tokens)
        sequence.cached = sequence.cached_documents + max(0, match.length - request.document_tokens)
        return True

    def schedule(self) -> ScheduledBatch:
        """The next pass: every decoding sequence, and prompts up to `prefill_tokens`."""
        if self._unsorted:
            # Sequences with a common prompt are neighbours, so that attention reads its pages once.
            self.decoding.sort(key=lambda sequence: sequence.pages[: len(sequence.request.prompt) // BLOCK])
            self._unsorted = False
        budget, chunks = self._prefill_tokens, []
        for sequence in self.prefilling:
            n = min(budget, len(sequence.request.prompt) - sequence.fed)
            if n == 0:
                break
            budget -= n
            chunks.append((sequence, n))
        return ScheduledBatch(self.decoding, chunks)

    def update(self, batch: ScheduledBatch, reasons: list[str]) -> None:
        """Update the queues after a computed pass. `reasons` say why each decoding sequence, and then each prompt's,
        ends, "" where it goes on; empty if none ends."""
        prompts, complete = batch.prompts, batch.complete
        for sequence, n in batch.chunks:
            sequence.fed += n
        for sequence in prompts:
            if sequence.error is None:
                self._share_prompt(sequence)
        if any(complete):
            self._unsorted = True
            self.prefilling = [sequence for sequence in self.prefilling if sequence not in prompts]
        decoding = [*batch.decoding, *prompts]
        if reasons:
            for sequence, reason in zip(decoding, reasons, strict=True):
                if reason:
                    self._finish(sequence, reason)
        self.decoding = [sequence for sequence in decoding if sequence.slot >= 0]

    def _share_prompt(self, sequence: RunningSequence) -> None:
        """Share a computed prompt's pages with the other members of its group."""
        if self._serial:
            return
        path, session = sequence.request.path, sequence.request.session
        sequence.held = self.cache.insert(sequence.held, sequence.pages, path, sequence.kv_version, session)
        self.states.write_pages(sequence)
        siblings = any(other.request.path[: len(path)] == path for other in self.waiting)
        if siblings and len(sequence.held) < len(sequence.pages):
            page = sequence.pages[len(sequence.held)]
            self.cache.offer_tail(sequence.held, page, path, sequence.kv_version, session)

    def _finish(self, sequence: RunningSequence, reason: str) -> None:
        """Free slot and pages, keep the reusable ones in the cache, and answer."""
        self.documents.release(sequence)
        generation = Generation(ids=[], logprobs=[], versions=[], finish_reason=reason)
        if sequence.slot >= 0 and sequence.error is None:
            try:
                generation = self._result(sequence, reason)
            except Exception as e:
                sequence.fail(e)
        if sequence.error is not None:
            self._finish_failed(sequence, sequence.error)
            return
        if sequence.slot >= 0:
            held, pages, session = sequence.held, sequence.pages, sequence.request.session
            # The cache has keys and values of all tokens but the last sampled one, which was never fed.
            computed = (sequence.request.path + generation.ids)[: sequence.fed + max(len(generation.ids) - 1, 0)]
            if self._serial:
                self.cache.discard(held, pages)
            else:
                held = self.cache.insert(held, pages, computed, sequence.kv_version, session)
                self.cache.release(held, pages, computed, sequence.kv_version, session)
            self.states.close(sequence)
        self.counters.finished += 1
        self.counters.aborted += reason == "abort"
        sequence.future.set_result(generation)

    def _finish_failed(self, sequence: RunningSequence, error: RequestFailed) -> None:
        """Free slot and pages, keep nothing, and answer with the error."""
        if sequence.pages:
            self.cache.discard(sequence.held, sequence.pages, wipe=True)
        if sequence.slot >= 0:
            self.states.close(sequence)
        self.counters.failed += 1
        _log.warning("%s", error, exc_info=error.__cause__)
        sequence.future.set_exception(error)

    def _result(self, sequence: RunningSequence, reason: str) -> Generation:
        request = sequence.request
        ids, log_probs, versions = self.states.result(sequence)
        accepted, rejected = draft_counts(sequence, self.states)
        routes = None
        if request.routes_from is not None and self.cache.experts is not None and ids:
            routes = self.cache.routes(sequence.pages, request.routes_from, len(request.prompt) + len(ids) - 1)
        return Generation(
            ids=ids,
            logprobs=log_probs,
            versions=versions,
            finish_reason=reason,
            routes=routes,
            kv_version=sequence.kv_version,
            cached_tokens=sequence.cached,
            cached_document_tokens=sequence.cached_documents,
            recipe=RECIPE if request.documents else "",
            accepted_draft_tokens=accepted,
            rejected_draft_tokens=rejected,
        )
