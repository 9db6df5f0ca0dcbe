"""The scheduler: the queues of waiting, prefilling and decoding sequences, and their slots, pages and documents.

waiting -> admit (prefix cache, pages, documents) -> prefilling, in chunks -> decoding -> finish

Clients share an engine as `fairness.py` says: a running sequence may give its place to one of a lighter client.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from transformers import PreTrainedModel

from etude.config import EngineConfig
from etude.inference.engine.cache import NO_MATCH, CacheNode, Match, PagedCache, cache_bytes
from etude.inference.engine.counters import Counters
from etude.inference.engine.documents import Documents
from etude.inference.engine.fairness import ClientLoads, PassShares
from etude.inference.engine.requests import RequestFailed, RunningSequence, SequenceStates
from etude.inference.engine.speculation import draft_counts
from etude.models.document_spans import RECIPE
from etude.models.kernels import BLOCK
from etude.models.key_values import measured
from etude.records import Generation

_log = logging.getLogger(__name__)
_OLDEST = 4  # of so many admissions one is by age
_WORTH_WAITING = 16  # waiting for another prompt must save at least this many prompt tokens


@dataclass(frozen=True)
class ScheduledBatch:
    """The tokens of one pass: the last of every decoding sequence, and chunks of prompts with their sizes."""

    decoding: list[RunningSequence]
    chunks: list[tuple[RunningSequence, int]]
    alone: bool = False  # of lighter clients; the others rest

    @cached_property
    def complete(self) -> list[bool]:
        """Whether each chunk is the last of its prompt."""
        return [sequence.fed + n == len(sequence.prefix) for sequence, n in self.chunks]

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
        self.loads, self.shares = ClientLoads(), PassShares()
        self._serial, self._prefill_tokens = serial, config.prefill_tokens
        self._unsorted = self._changed = True
        self._light = set[RunningSequence]()  # of the running sequences, those of lighter clients
        self._several = False  # clients wait
        self._numbers, self._admitted = itertools.count(), 0

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, sequences: Iterable[RunningSequence]) -> None:
        """Queue new sequences behind the waiting ones."""
        for sequence in sequences:
            sequence.number = next(self._numbers)
            self.loads.add(sequence)
            self.waiting.append(sequence)
            self._changed = True

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
        """Give slots and pages to waiting sequences while there is room and their documents are computed: to those of
        lighter clients first, for which those of heavier ones give their places, and every fourth time to the one that
        has waited longest."""
        if self._changed:
            self._sort_waiting()
        deferred: list[RunningSequence] = []
        passed = False  # whether there was no room for the one that has waited longest
        while self.waiting and (self.states.free or self._make_room(self.waiting[0], 0)):
            oldest = self._several and not passed and self._admitted % _OLDEST == _OLDEST - 1
            sequence = min(self.waiting, key=lambda each: each.number) if oldest else self.waiting[0]
            try:
                placed = self._admit_one(sequence, version, may_displace=not oldest)
            except Exception as e:
                self.waiting.remove(sequence)
                sequence.fail(e)
                self._finish(sequence, "error")
                continue
            if placed is False and not oldest:
                break
            passed |= placed is False
            if placed is not False:
                self.waiting.remove(sequence)
            if placed is None:
                deferred.append(sequence)
        self.waiting.extendleft(reversed(deferred))
        if self._changed:
            self._light, self._changed = self.loads.light([*self.prefilling, *self.decoding]), False
            self.shares.begin()

    def _sort_waiting(self) -> None:
        order = {client: self.loads.of(client) for client in {sequence.client for sequence in self.waiting}}
        self._several = len(order) > 1
        if self._several:
            self.waiting = deque(sorted(self.waiting, key=lambda each: (*order[each.client], each.number)))

    def _make_room(self, sequence: RunningSequence, pages: int, match: Match = NO_MATCH) -> bool:
        """Lets sequences of heavier clients give their places until a slot is free and so many pages more are
        available beside those of the match: the heaviest client's first, the last come first. False if that is not
        enough: then none does."""
        if self._serial or not self._changed:
            return False
        heavier = [o for o in (*self.prefilling, *self.decoding) if self.loads.lighter(sequence.client, o.client)]
        heavier.sort(key=lambda other: (*self.loads.of(other.client), other.number), reverse=True)
        giving, freed = list[RunningSequence](), 0
        matched, givers = {*match.nodes, match.partial}, Counter[CacheNode]()
        for other in heavier:
            if freed >= pages and (giving or self.states.free):
                break
            if other.can_give_place:
                giving.append(other)
                givers.update(other.held)
                left = (node for node in other.held if givers[node] == node.users and node not in matched)
                freed += len(other.pages) - len(other.held) + sum(1 for _ in left)
        if freed < pages or not (giving or self.states.free):
            return False
        for other in giving:
            self._give_place(other)
        return True

    def _give_place(self, sequence: RunningSequence) -> None:
        """Returns a running sequence to the queue. It goes on from its tokens, whose keys and values are kept as long
        as nobody needs their pages."""
        sampled = self.states.result(sequence)
        self._free(sequence, sampled[0])
        sequence.sampled, sequence.pages, sequence.held, sequence.fed = sampled, [], [], 0
        queue = self.prefilling if sequence in self.prefilling else self.decoding
        queue.remove(sequence)
        self.waiting.append(sequence)
        self.counters.displaced += 1

    def _admit_one(self, sequence: RunningSequence, version: int, *, may_displace: bool) -> bool | None:
        """Whether the sequence was admitted; None if it waits but later ones may be admitted."""
        request, match = sequence.request, NO_MATCH
        if not self._serial:
            match = self.cache.match(sequence.path[:-1], version, request.session)
        if self._shares_unfinished_prompt(sequence, match.length):
            return None
        if not self.documents.gather(sequence, match.length, version):
            return None
        missing = self._missing_pages(sequence, match)
        if missing > 0 and not (may_displace and self._make_room(sequence, missing, match)):
            return False
        self._place(sequence, match, version)
        self.states.open(sequence)
        self.counters.cached_tokens += sequence.cached
        self._admitted += 1
        self._changed = True
        self.prefilling.append(sequence)
        return True

    def _shares_unfinished_prompt(self, sequence: RunningSequence, cached: int) -> bool:
        """Whether a prompt that is being computed will serve this one, too: the first member of a group goes ahead of
        the others."""
        path = sequence.path
        end = max(cached, sequence.request.document_tokens) + _WORTH_WAITING
        return len(path) > end and any(other.path[:end] == path[:end] for other in self.prefilling)

    def _pages_of(self, sequence: RunningSequence) -> int:
        request = sequence.request
        return -(-min(len(request.prompt) + request.max_tokens, self.cache.max_length) // BLOCK)

    def _missing_pages(self, sequence: RunningSequence, match: Match) -> int:
        """The number of pages beyond the available ones that the sequence needs."""
        claimed = sum(node.users == 0 for node in (*match.nodes, *([match.partial] if match.partial else [])))
        return self._pages_of(sequence) - len(match.nodes) - (self.cache.available - claimed)

    def _place(self, sequence: RunningSequence, match: Match, version: int) -> None:
        """Give the sequence its pages, the matched ones first."""
        request, again = sequence.request, bool(sequence.sampled[0])
        sequence.pages = self.cache.take(match, self._pages_of(sequence), request.session)
        sequence.held = list(match.nodes)
        seen = [*([] if match.version is None else [match.version]), *([sequence.kv_version] if again else [])]
        sequence.kv_version = min([version, *seen])
        assembled = self.documents.assemble(sequence, match.length)
        sequence.fed = max(match.length, request.document_tokens)
        if not again:
            sequence.cached_documents = assembled
            sequence.cached = assembled + max(0, match.length - request.document_tokens)

    @property
    def contended(self) -> bool:
        """Whether sequences of lighter and of heavier clients run."""
        return bool(self._light)

    def schedule(self) -> ScheduledBatch:
        """The next pass: every decoding sequence, and prompts up to `prefill_tokens`; or of both those of lighter
        clients alone."""
        if self._unsorted:
            # Sequences with a common prompt are neighbours, so that attention reads its pages once.
            self.decoding.sort(key=lambda sequence: sequence.pages[: len(sequence.request.prompt) // BLOCK])
            self._unsorted = False
        alone = self.contended and self.shares.alone()
        budget, chunks = self._prefill_tokens, []
        for sequence in self.prefilling:
            if alone and sequence not in self._light:
                continue
            n = min(budget, len(sequence.prefix) - sequence.fed)
            if n == 0:
                break
            budget -= n
            chunks.append((sequence, n))
        decoding = [each for each in self.decoding if each in self._light] if alone else self.decoding
        return ScheduledBatch(decoding, chunks, alone)

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
        resting = [each for each in self.decoding if each not in self._light] if batch.alone else []
        if reasons:
            for sequence, reason in zip(decoding, reasons, strict=True):
                if reason:
                    self._finish(sequence, reason)
        self.decoding = [sequence for sequence in (*resting, *decoding) if sequence.slot >= 0]
        self._unsorted |= batch.alone

    def _share_prompt(self, sequence: RunningSequence) -> None:
        """Share a computed prompt's pages with the other members of its group."""
        if self._serial:
            return
        path, session = sequence.path, sequence.request.session
        sequence.held = self.cache.insert(sequence.held, sequence.pages, path, sequence.kv_version, session)
        self.states.write_pages(sequence)
        siblings = any(other.path[: len(path)] == path for other in self.waiting)
        if siblings and len(sequence.held) < len(sequence.pages):
            page = sequence.pages[len(sequence.held)]
            self.cache.offer_tail(sequence.held, page, path, sequence.kv_version, session)

    def _finish(self, sequence: RunningSequence, reason: str) -> None:
        """Free slot and pages, keep the reusable ones in the cache, and answer."""
        self.documents.release(sequence)
        sampled, generation = self.states.result(sequence)[0], None
        if sequence.error is None:
            try:
                generation = self._result(sequence, reason)
            except Exception as e:
                sequence.fail(e)
        self.loads.end(sequence, max(0, sequence.fed - sequence.cached) + len(sampled))
        self._changed = True
        if sequence.error is not None:
            self._finish_failed(sequence, sequence.error)
            return
        if sequence.slot >= 0:
            self._free(sequence, sampled)
        self.counters.finished += 1
        self.counters.aborted += reason == "abort"
        assert generation is not None
        sequence.future.set_result(generation)

    def _free(self, sequence: RunningSequence, ids: list[int]) -> None:
        """Free slot and pages of a sequence with these sampled tokens, and keep the reusable pages in the cache."""
        held, pages, session = sequence.held, sequence.pages, sequence.request.session
        # The cache has keys and values of all tokens but the last sampled one, which was never fed.
        decoded = max(len(ids) - len(sequence.sampled[0]) - 1, 0)
        computed = (sequence.request.path + ids)[: sequence.fed + decoded]
        if self._serial:
            self.cache.discard(held, pages)
        else:
            held = self.cache.insert(held, pages, computed, sequence.kv_version, session)
            self.cache.release(held, pages, computed, sequence.kv_version, session)
        self.states.close(sequence)

    def _finish_failed(self, sequence: RunningSequence, error: RequestFailed) -> None:
        """Free slot and pages, keep nothing, and answer with the error."""
        if sequence.pages:
            self.cache.discard(sequence.held, sequence.pages, wipe=True)
        if sequence.slot >= 0:
            self.states.close(sequence)
        self.counters.failed += 1
        _log.warning("%s", error, exc_info=error.__cause__)
        sequence.future.set_exception(error)

    def part(self, sequence: RunningSequence) -> Generation | None:
        """The tokens since the last part, None if there are none. Raises an error of reading the experts."""
        if self.states.count(sequence) == sequence.sent:
            return None
        ids, log_probs, versions = self.states.result(sequence, sequence.sent)
        request, routes = sequence.request, None
        if request.routes_from is not None and self.cache.experts is not None and sequence.slot >= 0:
            # All but the last sampled token have been fed.
            end = len(request.prompt) + sequence.sent - 1
            first = end if sequence.sent else request.routes_from
            routes = self.cache.routes(sequence.pages, first, end + len(ids))
        sequence.sent += len(ids)
        return Generation(
            ids=ids,
            logprobs=log_probs,
            versions=versions,
            finish_reason="",
            routes=routes,
            kv_version=sequence.kv_version,
            recipe=RECIPE if request.documents else "",
        )

    def _result(self, sequence: RunningSequence, reason: str) -> Generation:
        """The last part: all that was sampled, if it is the first, too."""
        part = self.part(sequence) or Generation(ids=[], logprobs=[], versions=[], finish_reason="")
        if sequence.slot < 0 and not sequence.sampled[0]:
            return msgspec.structs.replace(part, finish_reason=reason)
        accepted, rejected = draft_counts(sequence, self.states) if sequence.slot >= 0 else (0, 0)
        return msgspec.structs.replace(
            part,
            finish_reason=reason,
            kv_version=sequence.kv_version,
            cached_tokens=sequence.cached,
            cached_document_tokens=sequence.cached_documents,
            recipe=RECIPE if sequence.request.documents else "",
            accepted_draft_tokens=accepted,
            rejected_draft_tokens=rejected,
        )
