"""The engine: continuous batching on one thread.

    submit -> waiting -> admit (prefix cache, pages) -> prefill, in chunks -> decode, one token per step -> finish

Every step runs one forward pass over a flat batch: the next token of every decoding row, what is drafted to come after
(`speculation.py`: it changes how fast rows go on, never what they say), and chunks of waiting prompts.
Between steps the thread applies weight swaps and answers aborts; rows keep running over a swap, and every token carries
the version that sampled it. In deterministic mode a request's tokens and log-probabilities depend on its ids, its seed
and the weights alone: passes are exact (`etude.models.batch_invariant`), or where they cannot be (on an accelerator, in
bfloat16) one request runs at a time, without the prefix cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import SwapUndone
from etude.inference.engine.cache import NO_MATCH, Match, PagedCache
from etude.inference.engine.documents import Documents
from etude.inference.engine.forward import cost_curve, logits_of, score
from etude.inference.engine.limits import Counters, EngineLimits
from etude.inference.engine.requests import Request, RunningSequence, Slots, check_sequence
from etude.inference.engine.sampling import MARGIN, sample
from etude.inference.engine.speculation import Speculation, kept
from etude.models import batch_invariant, fused
from etude.models.documents import RECIPE
from etude.models.kernels import BLOCK
from etude.records import Generation

_WORTH_WAITING = 16  # prompt tokens saved by waiting for another prompt
_IDLE_SECONDS = 0.5  # how long the thread sleeps at most before it looks around


class Engine:
    """Runs requests on one model. Start it with `start` (a thread) or call `step` yourself."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int = 0,
        limits: EngineLimits | None = None,
        deterministic: bool = False,
    ) -> None:
        fused.install(model)
        self.model = model
        self.version = version
        self.deterministic = deterministic
        self.exact = deterministic and batch_invariant.possible(model)
        self.alone = deterministic and not self.exact
        self.limits = limits or EngineLimits()
        self.counters = Counters()
        self.device = next(model.parameters()).device
        self.vocab_size = model.config.vocab_size
        self.cache = PagedCache(
            model.config,
            num_bytes=self.limits.cache_bytes,
            max_length=min(self.limits.max_length or 2**31, model.config.max_position_embeddings),
            # The CPU kernel computes in float32 whatever the weights' type.
            dtype=torch.float32 if self.device.type == "cpu" else model.dtype,
            device=self.device,
        )
        self.max_length = self.cache.max_length
        self.documents = Documents(model, self.cache, self.limits.document_bytes, self.limits.routes)
        self.last_pause = 0.0
        self.on_failure: Callable[[], None] = lambda: None
        self._arrived: list[RunningSequence] = []  # submitted from any thread; under the lock
        self._waiting: deque[RunningSequence] = deque()  # like the two below, only the engine's thread changes it
        self._prefilling: list[RunningSequence] = []
        self._decoding: list[RunningSequence] = []
        self._swaps: deque[tuple[int, Callable[[], None], Future[float]]] = deque()
        self._scores: deque[tuple[list[int], Future[tuple[int, list[float]]]]] = deque()
        self._paused: str | None = None
        self._clear_cache = False
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._slots = Slots(1 if self.alone else self.limits.rows, self.max_length, self.cache.blocks_per_row)
        self._order_stale = True
        # Deterministic mode is about bits, and those depend on the size of a pass.
        speculate = self.limits.speculate and not deterministic
        self._speculation = Speculation(lambda: cost_curve(model, self.cache)) if speculate else None

    # --- called from any thread -----------------------------------------------------------------------------------

    def submit(self, request: Request, on_token: Callable[[int, float], None] | None = None) -> RunningSequence:
        """Queue a request; `RunningSequence.future` gives its Generation. Raises ValueError for a request that cannot
        run.

        `on_token(id, logprob)` is called on the engine's thread for every sampled token.
        """
        request.check(self.max_length, self.vocab_size)
        self.documents.check(request)
        if request.routes_from is not None and not self.limits.routes:
            raise ValueError("this server keeps no expert ids: start it with --routes")
        row = RunningSequence(request, Future(), on_token)
        row.future.set_running_or_notify_cancel()  # from here on only `RunningSequence.abort` ends it
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._arrived.append(row)
            self._wake.notify()
        return row

    def generate(self, request: Request, timeout: float = 600.0) -> Generation:
        """Submit and wait. Needs the thread."""
        return self.submit(request).future.result(timeout)

    def swap(self, version: int, apply: Callable[[], None]) -> Future[float]:
        """Between two steps call `apply`, which writes new weights into the live tensors, and go on as `version`.

        The future gives the seconds that rows stood still. If `apply` raises SwapUndone, so does the future and the
        engine goes on with the old version; any other error ends the engine.
        """
        future: Future[float] = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._swaps.append((version, apply, future))
            self._wake.notify()
        return future

    def score(self, ids: list[int]) -> Future[tuple[int, list[float]]]:
        """The version, and log-probabilities as `forward.score` gives them. Raises ValueError for ids without any."""
        check_sequence(ids, self.max_length, self.vocab_size)
        future: Future[tuple[int, list[float]]] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._scores.append((ids, future))
            self._wake.notify()
        return future

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop sampling. `abort` ends running requests, `wait` lets them end, `keep` freezes them where they are."""
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"pause mode {mode!r} is not one of abort, wait, keep")
        with self._wake:
            self._paused = mode
            self._clear_cache = clear_cache
            if mode == "abort":
                for row in self._rows():
                    row.abort()
            self._wake.notify()

    def resume(self) -> None:
        with self._wake:
            self._paused = None
            self._wake.notify()

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting."""
        return len(self._prefilling) + len(self._decoding), len(self._arrived) + len(self._waiting)

    def _rows(self) -> list[RunningSequence]:
        return [*self._arrived, *self._waiting, *self._prefilling, *self._decoding]

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="etude-engine", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Abort what runs and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if something did."""
        return self._failure

    # --- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._take_arrivals()
                    if not self._closed and not self._has_work():
                        self._wake.wait(_IDLE_SECONDS)
                    if self._closed:
                        break
                self.step()
        except BaseException as e:
            self._failure = e
            self.on_failure()
            raise
        finally:
            with self._wake:
                self._closed = True
            reason = self._failure or RuntimeError("the engine was closed")
            for row in self._rows():
                row.future.set_exception(reason)
            for *_, future in (*self._swaps, *self._scores):
                future.set_exception(reason)

    def _take_arrivals(self) -> None:
        with self._wake:
            self._waiting.extend(self._arrived)
            self._arrived.clear()

    def _has_work(self) -> bool:
        if self._swaps or any(row.aborted for row in self._waiting):
            return True
        if self._paused == "keep":
            return False
        return bool(self._prefilling or self._decoding or self._scores or (self._waiting and not self._paused))

    def step(self) -> None:
        """Apply swaps and aborts, admit, run one forward pass, sample, finish."""
        self._take_arrivals()
        self._apply_swaps()
        with torch.inference_mode(), batch_invariant.exact(self.exact):
            self._drop_aborted()
            if self._paused:
                if self._clear_cache and not self._prefilling and not self._decoding:
                    self.cache.clear()
                    self.documents.clear()
                    self._clear_cache = False
            else:
                self._admit()
            start = time.perf_counter()
            busy = not self._paused and self.documents.compute(
                self.limits.prefill_tokens, self.version, alone=self.alone
            )
            if self._paused != "keep" and (self._prefilling or self._decoding):
                self._forward()
                busy = True
            if self._paused != "keep" and self._scores:
                self._score_one()
                busy = True
            if busy:
                self.counters.busy_seconds += time.perf_counter() - start
                self.counters.steps += 1

    def _apply_swaps(self) -> None:
        while self._swaps:
            version, apply, future = self._swaps.popleft()
            start = time.perf_counter()
            try:
                apply()
            except SwapUndone as e:
                future.set_exception(e)
                continue
            except BaseException as e:
                future.set_exception(e)
                raise
            self.version = version
            self.last_pause = time.perf_counter() - start
            self.counters.pause_seconds += self.last_pause
            self.counters.swaps += 1
            self.documents.clear()
            future.set_result(self.last_pause)

    def _drop_aborted(self) -> None:
        for row in [row for row in self._waiting if row.aborted]:
            self._waiting.remove(row)
            self._finish(row, "abort")
        for rows in (self._prefilling, self._decoding):
            for row in [row for row in rows if row.aborted]:
                rows.remove(row)
                self._finish(row, "abort")

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, in order, as far as they go and as their documents are there."""
        deferred: list[RunningSequence] = []
        while self._waiting and self._slots.free:
            row = self._waiting.popleft()
            request = row.request
            match = NO_MATCH
            if not self.alone:
                match = self.cache.match(request.path[:-1], self.version, request.session)
            if self._shares_unfinished_prompt(row, match.length):
                deferred.append(row)
                continue
            if not self.documents.gather(row, match.length, self.version):
                deferred.append(row)
                continue
            if not self._place(row, match):
                self._waiting.appendleft(row)
                break
            self.counters.cached_tokens += row.cached
            self._slots.open(row)
            self._prefilling.append(row)
        self._waiting.extendleft(reversed(deferred))

    def _shares_unfinished_prompt(self, row: RunningSequence, cached: int) -> bool:
        """Whether a prompt being computed now will serve this one: a group's first member goes ahead of the others."""
        path, end = row.request.path, max(cached, row.request.document_tokens) + _WORTH_WAITING
        return len(path) > end and any(other.request.path[:end] == path[:end] for other in self._prefilling)

    def _place(self, row: RunningSequence, match: Match) -> bool:
        request = row.request
        num_pages = self._pages_needed(request)
        claimed = sum(node.users == 0 for node in (*match.nodes, *([match.partial] if match.partial else [])))
        if self.cache.available - claimed < num_pages - len(match.nodes):
            return False
        row.pages = self.cache.take(match, num_pages, request.session)
        row.held = list(match.nodes)
        row.kv_version = self.version if match.version is None else min(match.version, self.version)
        row.cached_documents = self.documents.assemble(row, match.length)
        row.fed = max(match.length, request.document_tokens)
        row.cached = row.cached_documents + max(0, match.length - request.document_tokens)
        return True

    def _pages_needed(self, request: Request) -> int:
        return -(-min(len(request.prompt) + request.max_tokens, self.max_length) // BLOCK)

    def _forward(self) -> None:
        decoding = self._sorted_decoding()
        chunks = self._chunks()
        fed = len(decoding) + sum(n for _, n in chunks)
        drafts = self._speculation.drafts(decoding, self._slots, fed) if self._speculation else None
        ids_N, slot_N, position_N, count_R = self._decoding_tokens(decoding, drafts)
        decoded = len(ids_N)
        ids, slots, positions = [ids_N], [slot_N], [position_N]
        for row, n in chunks:
            ids.append(np.array(row.request.prompt[row.fed : row.fed + n], dtype=np.int64))
            slots.append(np.full(n, row.slot, dtype=np.int64))
            positions.append(np.arange(row.fed, row.fed + n))

        ends = np.cumsum([n for _, n in chunks], dtype=np.int64) + decoded - 1
        complete = [row.fed + n == len(row.request.prompt) for row, n in chunks]
        sampled_S = np.concatenate([np.arange(decoded), ends[complete]])
        ids_N, slot_N, position_N = np.concatenate(ids), np.concatenate(slots), np.concatenate(positions)
        logits_SV = logits_of(
            self.model, self.cache, self._slots.table, ids_N, slot_N, position_N, sampled_S, alone=self.alone,
            routes=self.limits.routes,
        )  # fmt: skip
        self.counters.prefilled_tokens += fed - len(decoding)

        for row, n in chunks:
            row.fed += n
        finished_prompts = [row for (row, _), done in zip(chunks, complete, strict=True) if done]
        for row in finished_prompts:
            self._share_prompt(row)
        if len(sampled_S):
            # The token after position p is drawn with (seed, p + 1).
            count_R = np.concatenate([count_R, np.ones(len(finished_prompts), np.int64)])
            self._sample([*decoding, *finished_prompts], drafts, count_R, position_N[sampled_S] + 1, logits_SV)
        self._prefilling = [row for row in self._prefilling if row not in finished_prompts]

    def _score_one(self) -> None:
        """One sequence per step, so that running rows wait for one short pass at a time."""
        ids, future = self._scores[0]
        log_probs = score(self.model, self.cache, ids, alone=self.alone)
        self._scores.popleft()  # not before: if the pass fails, whoever waits is told
        self.counters.scored_tokens += len(ids)
        future.set_result((self.version, log_probs.tolist()))

    def _chunks(self) -> list[tuple[RunningSequence, int]]:
        """Rows whose prompts are fed in this pass, and how many tokens of each."""
        budget, chunks = self.limits.prefill_tokens, []
        for row in self._prefilling:
            n = min(budget, len(row.request.prompt) - row.fed)
            if n == 0:
                break
            budget -= n
            chunks.append((row, n))
        return chunks

    def _decoding_tokens(
        self, rows: list[RunningSequence], drafts: list[np.ndarray] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, slots and positions of every row's last token and its draft, and how many tokens each row has here."""
        slots = self._slots
        slot_R = np.array([row.slot for row in rows], dtype=np.int64)
        if drafts is None:
            return slots.last[slot_R], slot_R, slots.length[slot_R] - 1, np.ones(len(rows), np.int64)
        count_R = np.array([len(draft) + 1 for draft in drafts], dtype=np.int64)
        start_R = np.cumsum(count_R) - count_R
        offset_N = np.arange(count_R.sum()) - np.repeat(start_R, count_R)
        ids_N = np.empty(len(offset_N), np.int64)
        ids_N[offset_N > 0] = np.concatenate(drafts)
        ids_N[start_R] = slots.last[slot_R]
        slot_N = np.repeat(slot_R, count_R)
        return ids_N, slot_N, slots.length[slot_N] - 1 + offset_N, count_R

    def _sorted_decoding(self) -> list[RunningSequence]:
        """Decoding rows, those with a common prompt next to each other, so that attention reads its pages once."""
        if self._order_stale:
            self._decoding.sort(key=lambda row: row.pages[: len(row.request.prompt) // BLOCK])
            self._order_stale = False
        return self._decoding

    def _share_prompt(self, row: RunningSequence) -> None:
        """Offer a computed prompt's pages, at once, to the group's other members."""
        if self.alone:
            return
        path, session = row.request.path, row.request.session
        row.held = self.cache.insert(row.held, row.pages, path, row.kv_version, session)
        self._slots.write_pages(row)
        siblings = any(other.request.path[: len(path)] == path for other in self._waiting)
        if siblings and len(row.held) < len(row.pages):
            self.cache.offer_tail(row.held, row.pages[len(row.held)], path, row.kv_version, session)

    def _sample(
        self, rows: list[RunningSequence], drafts: list[np.ndarray] | None, count_R: np.ndarray, position_S: np.ndarray,
        logits_SV: Tensor,
    ) -> None:  # fmt: skip
        """Draw a token at every sampled position, and let each row emit its own, or as many as its draft was right."""
        slots = self._slots
        slot_R = np.array([row.slot for row in rows], dtype=np.int64)
        slot_S = np.repeat(slot_R, count_R)
        ids_S, log_probs_S, margin_S = sample(
            logits_SV, slots.temperature[slot_S], slots.top_p[slot_S], slots.seed[slot_S], position_S
        )
        if not np.isfinite(log_probs_S).all():
            raise FloatingPointError(f"the weights of version {self.version} give logits that are not finite")
        start_R = np.cumsum(count_R) - count_R
        if drafts is None:
            emitted_R = count_R
            done_R = slots.append(slot_R, ids_S, log_probs_S, self.version)
        else:
            emitted_R = self._verify(rows, drafts, start_R, ids_S, margin_S)
            done_R = slots.extend(slot_R, start_R, emitted_R, ids_S, log_probs_S, self.version)
        self.counters.sampled_tokens += int(emitted_R.sum())
        for row, start, count in zip(rows, start_R.tolist(), emitted_R.tolist(), strict=True):
            if row.on_token is not None:
                for token, log_prob in zip(ids_S[start : start + count], log_probs_S[start:], strict=False):
                    row.on_token(int(token), float(log_prob))
        if len(rows) > len(self._decoding):
            self._order_stale = True
        if done_R.any():
            for row, reason in zip(rows, slots.reasons(slot_R, done_R), strict=True):
                if reason:
                    self._finish(row, reason)
        self._decoding = [row for row in rows if row.slot >= 0]

    def _verify(
        self,
        rows: list[RunningSequence],
        drafts: list[np.ndarray],
        start_R: np.ndarray,
        ids_S: np.ndarray,
        margin_S: np.ndarray,
    ) -> np.ndarray:
        """How many of its drawn tokens each row emits."""
        emitted_R = np.ones(len(rows), np.int64)
        # In narrower types every draw would be in doubt: there the pass with drafts decides.
        safe_S = margin_S >= (MARGIN if self.model.dtype == torch.float32 else -1.0)
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=False)):
            if len(draft):
                mine = slice(start_R[i], start_R[i] + len(draft) + 1)
                emitted_R[i] = kept(draft, ids_S[mine], safe_S[mine], row.request.stop)
                row.alone = not safe_S[mine][: emitted_R[i] + 1].all()
                self.counters.drafted_tokens += len(draft)
                self.counters.accepted_tokens += max(int(emitted_R[i]) - 1, 0)
        self.counters.draft_passes += 1
        return emitted_R

    def _finish(self, row: RunningSequence, reason: str) -> None:
        """Give back slot and pages, keep what others can reuse, and answer."""
        self.documents.release(row)
        generation = Generation(ids=[], logprobs=[], versions=[], finish_reason=reason)
        if row.slot >= 0:
            generation = self._result(row, reason)
            computed = (row.request.path + generation.ids)[: self._computed(row, generation)]
            session = row.request.session
            if self.alone:
                self.cache.discard(row.held, row.pages)
            else:
                row.held = self.cache.insert(row.held, row.pages, computed, row.kv_version, session)
                self.cache.release(row.held, row.pages, computed, row.kv_version, session)
            self._slots.close(row)
        self.counters.finished += 1
        self.counters.aborted += reason == "abort"
        row.future.set_result(generation)

    @staticmethod
    def _computed(row: RunningSequence, generation: Generation) -> int:
        """Tokens whose keys and values are in the cache: all but the last sampled one, which was never fed."""
        return row.fed + max(len(generation.ids) - 1, 0)

    def _result(self, row: RunningSequence, reason: str) -> Generation:
        ids, log_probs, versions = self._slots.result(row)
        accepted, rejected = Speculation.counts(row, self._slots)
        routes = None
        if row.request.routes_from is not None and self.cache.experts is not None and ids:
            routes = self.cache.routes(row.pages, row.request.routes_from, len(row.request.prompt) + len(ids) - 1)
        return Generation(
            ids=ids, logprobs=log_probs, versions=versions, finish_reason=reason, routes=routes,
            kv_version=row.kv_version,
            cached_tokens=row.cached, cached_document_tokens=row.cached_documents,
            recipe=RECIPE if row.request.documents else "",
            accepted_draft_tokens=accepted, rejected_draft_tokens=rejected,
        )  # fmt: skip
