"""The engine: continuous batching on one thread.

    submit -> Scheduler: wait, admit -> [schedule -> Runner: forward, draw, verify -> update], step by step -> answer

Every step runs one forward pass over a flat batch: the next token of every decoding sequence, the tokens drafted to
come after it (`speculation.py`: drafts change the speed, never the tokens), and chunks of waiting prompts.
Between steps the thread applies weight swaps and answers aborts; sequences keep running over a swap, and every token
carries the version that sampled it. In deterministic mode a request's tokens and log-probabilities depend on its ids,
its seed and the weights alone: passes are batch-invariant (`etude.models.batch_invariant`), or where they cannot be (on
an accelerator, in bfloat16) one request runs at a time, without the prefix cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from etude.config import EngineConfig
from etude.inference.engine import fused
from etude.inference.engine.counters import Counters
from etude.inference.engine.fairness import SHARE
from etude.inference.engine.forward import PromptScores
from etude.inference.engine.requests import Request, RunningSequence, check_sequence, failed
from etude.inference.engine.runner import Runner
from etude.inference.engine.scheduler import Scheduler
from etude.models import batch_invariant
from etude.models.key_values import positions
from etude.protocol import Client, asking
from etude.records import Generation
from etude.weights.receiver import WeightsMismatch

VERSION_CHANGED = -1  # in place of a version: the weights changed while the sequence was scored
Scored = tuple[int, list[float]]  # the version or VERSION_CHANGED, and log-probabilities
DECODED = 32  # the last tokens of a scored sequence, which are decoded; a version must last for as many passes
_IDLE_SECONDS = 0.5  # how long the thread sleeps at most before it checks its queues


def _joined(first_version: int, parts: list[Future[Any]]) -> Future[Scored]:
    """Gathers the scores of a prompt, of forced tokens, or of both into one future, in that order. `first_version` was
    served at the request; only forced tokens are compared with it. VERSION_CHANGED replaces several versions."""
    future: Future[Scored] = Future()
    future.set_running_or_notify_cancel()
    left, lock = len(parts), threading.Lock()

    def ended(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            future.set_result(_scored(first_version, [part.result() for part in parts]))
        except BaseException as e:  # a callback's error is seen by nobody
            future.set_exception(e)

    for part in parts:
        part.add_done_callback(ended)
    return future


def _scored(first_version: int, results: Sequence[Any]) -> Scored:
    """The version and the scores of a prompt, of forced tokens, or of both."""
    versions: set[int] = set()
    log_probs: list[float] = []
    for result in results:
        if isinstance(result, Generation):
            versions |= {first_version, *result.versions}
            if result.finish_reason != "length":
                versions.add(VERSION_CHANGED)
            log_probs += result.logprobs
        else:
            versions.add(result[0])
            log_probs += result[1].log_probs.tolist()
    return versions.pop() if len(versions) == 1 else VERSION_CHANGED, log_probs


class Engine:
    """Runs requests on one model. Start it with `start` (a thread) or call `step` yourself. `max_length` bounds prompt
    and answer below the model's context. With `routes`, the experts of every token are kept for requests that ask for
    them. Raises CacheTooSmall if the cache of `config` is too small, and ValueError for a model whose layers keep no
    keys and values, or different ones."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        version: int = 0,
        max_length: int | None = None,
        deterministic: bool = False,
        routes: bool = False,
    ) -> None:
        fused.install(model)
        self.model = model
        self.config = config or EngineConfig()
        self.version = version
        self.deterministic, self.routes = deterministic, routes
        self.batch_invariant = deterministic and batch_invariant.possible(model)
        self.serial = deterministic and not self.batch_invariant  # one request at a time
        self.counters = Counters()
        self.vocab_size = model.config.get_text_config().vocab_size
        self.scheduler = Scheduler(
            model,
            self.config,
            self.counters,
            serial=self.serial,
            routes=routes,
            max_length=min(max_length or 2**31, positions(model.config)),
        )
        self.cache, self.documents = self.scheduler.cache, self.scheduler.documents
        self.max_length = self.cache.max_length
        # Deterministic mode promises equal bits, which depend on the size of a pass.
        self.speculate = self.config.speculate and not deterministic
        self.runner = Runner(
            model,
            self.cache,
            self.scheduler.states,
            self.counters,
            serial=self.serial,
            routes=routes,
            speculate=self.speculate,
        )
        self.last_pause = 0.0
        self.on_failure: Callable[[], None] = lambda: None
        self._arrived: list[RunningSequence] = []  # submitted from any thread; under the lock
        self._swaps: deque[tuple[int, Callable[[], None], Future[float]]] = deque()
        self._scores: deque[tuple[list[int], int, Client, Future[tuple[int, PromptScores]]]] = deque()
        self._parts: list[tuple[RunningSequence, Future[Generation]]] = []  # requested from any thread; under the lock
        self._resting = 0.0  # seconds of passes until the next prompt of a client is scored beside them
        self._paused: str | None = None
        self._clear_cache = False
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None  # the error that ended the thread

    # --- called from any thread -----------------------------------------------------------------------------------

    def submit(self, request: Request, on_token: Callable[[int, float], None] | None = None) -> RunningSequence:
        """Queue a request; `RunningSequence.future` resolves to its Generation. `on_token(id, logprob)` is called on
        the engine's thread for every sampled token. Raises ValueError for a request that cannot run, RuntimeError if
        the engine is closed."""
        request.check(self.max_length, self.vocab_size)
        self.documents.check(request)
        if request.routes_from is not None and not self.routes:
            raise ValueError("routes_from: this server keeps no expert ids, start it with --routes")
        tokens = min(len(request.prompt) + request.max_tokens, self.max_length)
        sequence = RunningSequence(request, Future(), on_token, asking(), tokens)
        sequence.future.set_running_or_notify_cancel()  # from here on only `RunningSequence.abort` ends it
        with self._wake:
            self._check_open()
            self._arrived.append(sequence)
            self._wake.notify()
        return sequence

    def generate(self, request: Request, timeout: float = 600.0) -> Generation:
        """Submit a request and wait for its generation. Needs the thread. Raises TimeoutError after `timeout`
        seconds."""
        return self.submit(request).future.result(timeout)

    def next_part(self, sequence: RunningSequence) -> Future[Generation]:
        """The tokens after the sequence's last part, as soon as there are any, between two steps. The end of the
        sequence leaves it unresolved: the sequence's own future has the rest."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            self._parts.append((sequence, future))
            self._wake.notify()
        return future

    def swap(self, version: int, apply: Callable[[], None]) -> Future[float]:
        """Call `apply`, which writes new weights into the live tensors, between two steps, and go on as `version`. The
        future resolves to the seconds that sequences were paused. If `apply` raises WeightsMismatch, so does the future
        and the engine goes on with the old version; any other error ends the engine."""
        future: Future[float] = Future()
        with self._wake:
            self._check_open()
            self._swaps.append((version, apply, future))
            self._wake.notify()
        return future

    def score(self, ids: list[int], *, decoded: bool = False) -> Future[Scored]:
        """The version, and the log-probabilities as `forward.score` computes them. With `decoded`, those of the last
        DECODED tokens, or of the second half of a short sequence, come from decoding: the tokens are fed one at a time
        through the cache, beside other requests, like the tokens of episodes. The version is VERSION_CHANGED if the
        weights changed meanwhile. Raises ValueError for an empty sequence."""
        check_sequence(ids, self.max_length, self.vocab_size)
        first_version, first = self.version, len(ids) - (min(DECODED, len(ids) // 2) if decoded else 0)
        parts: list[Future[Any]] = [self.score_prompt(ids[:first])] if first > 1 else []
        if decoded:
            rest = Request(ids=ids[:first], forced=tuple(ids[first:]), max_tokens=len(ids) - first)
            parts.append(self.submit(rest).future)
        return _joined(first_version, parts)

    def score_prompt(self, ids: list[int], top: int = 0) -> Future[tuple[int, PromptScores]]:
        """The version, and the scores of a prompt with ranks and the `top` most probable tokens at each position."""
        check_sequence(ids, self.max_length, self.vocab_size)
        future: Future[tuple[int, PromptScores]] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            self._check_open()
            self._scores.append((ids, top, asking(), future))
            self._wake.notify()
        return future

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop sampling. `abort` ends running requests, `wait` lets them end, `keep` freezes them in place."""
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"pause mode {mode!r} is not one of abort, wait, keep")
        with self._wake:
            self._paused = mode
            self._clear_cache = clear_cache
            if mode == "abort":
                for sequence in self._sequences():
                    sequence.abort()
            self._wake.notify()

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._wake:
            self._paused = None
            self._wake.notify()

    @property
    def closed(self) -> bool:
        """Whether it takes no requests any more: it was closed, or its thread has failed."""
        return self._closed

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called without a later `resume`."""
        return self._paused is not None

    @property
    def load(self) -> tuple[int, int]:
        """Number of running and of waiting requests."""
        return self.scheduler.running, len(self._arrived) + len(self.scheduler.waiting)

    def unfinished(self, client: Client) -> int:
        """Number of the client's sequences that wait or run."""
        return self.scheduler.loads.unfinished(client)

    @property
    def scoring(self) -> int:
        """Number of sequences that wait to be scored."""
        return len(self._scores)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="etude-engine", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Abort running requests and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _sequences(self) -> list[RunningSequence]:
        return [*self._arrived, *self.scheduler.sequences()]

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
            self.failure = e
            self.on_failure()
            raise
        finally:
            with self._wake:
                self._closed = True
            reason = self.failure or RuntimeError("the engine was closed")
            waited = [sequence.future for sequence in self._sequences()]
            for future in (*waited, *(future for *_, future in (*self._swaps, *self._scores))):
                with suppress(InvalidStateError):  # it has its answer, and the others wait for theirs
                    future.set_exception(reason)

    def _take_arrivals(self) -> None:
        with self._wake:
            self.scheduler.add(self._arrived)
            self._arrived.clear()

    def _has_work(self) -> bool:
        waiting = self.scheduler.waiting
        if self._swaps or any(sequence.aborted or sequence.error for sequence in waiting):
            return True
        if self._paused == "keep":
            return False
        return bool(self.scheduler.running or self._scores or (waiting and not self._paused))

    def step(self) -> None:
        """Apply swaps and aborts, admit, run one forward pass, answer ended requests. A request that cannot be computed
        fails alone; an error that any request would meet is raised, and ends the engine (`_check_itself`)."""
        self._take_arrivals()
        self._apply_swaps()
        scheduler = self.scheduler
        with torch.inference_mode(), batch_invariant.batch_invariant(self.batch_invariant):
            scheduler.drop_aborted()
            if not self._paused:
                scheduler.admit(self.version)
            elif self._clear_cache and not scheduler.running:
                scheduler.forget()
                self._clear_cache = False
            start = time.perf_counter()
            busy = not self._paused and self.documents.compute(
                self.config.prefill_tokens, self.version, serial=self.serial
            )
            if self._paused != "keep" and scheduler.running:
                batch = scheduler.schedule()
                scheduler.update(batch, self.runner.run(batch, self.version))
                seconds = time.perf_counter() - start
                scheduler.shares.note(seconds, batch.alone, scheduler.contended)
                self._resting -= seconds
                busy = True
            if self._paused != "keep" and self._may_score():
                # One sequence per step, so that running sequences wait for one short pass at a time.
                start_of_score = time.perf_counter()
                self._score_one()
                self._resting = SHARE * (time.perf_counter() - start_of_score)
                busy = True
            errors = [sequence.error for sequence in scheduler.sequences() if sequence.error is not None]
            if errors:
                self._check_itself(errors[0].__cause__ or errors[0])
                scheduler.drop_aborted()
            if self._parts:
                self._send_parts()
            if busy:
                self.counters.busy_seconds += time.perf_counter() - start
                self.counters.steps += 1

    def _send_parts(self) -> None:
        with self._wake:
            requested, self._parts = self._parts, []
        still: list[tuple[RunningSequence, Future[Generation]]] = []
        for sequence, future in requested:
            if sequence.future.done():
                continue
            try:
                part = self.scheduler.part(sequence)
            except Exception as e:
                sequence.fail(e)
                continue
            if part is None:
                still.append((sequence, future))
            else:
                future.set_result(part)
        with self._wake:
            self._parts += still

    def _may_score(self) -> bool:
        """Whether the next prompt is scored now: beside running sequences those of clients get a fourth of the time,
        and those of token routes are scored at once."""
        if not self._scores:
            return False
        *_, client, _ = self._scores[0]
        return not client.member or not self.scheduler.running or self._resting <= 0.0

    def _score_one(self) -> None:
        ids, top, _, future = self._scores[0]
        try:
            scores = self.runner.score(ids, top)
        except Exception as e:
            self._check_itself(e)
            self._scores.popleft()  # not before: if the engine ends, the future gets its error
            future.set_exception(failed(e))
            return
        self._scores.popleft()
        future.set_result((self.version, scores))

    def _check_itself(self, error: BaseException) -> None:
        """Raises `error`, with which a request failed, if a pass over two test tokens fails, too, or is not finite.
        Then the weights or the machine are at fault, and every request would fail."""
        try:
            if np.isfinite(self.runner.score([0, 1]).log_probs).all():
                return
        except Exception as e:
            raise error from e
        raise error

    def _apply_swaps(self) -> None:
        while self._swaps:
            version, apply, future = self._swaps.popleft()
            start = time.perf_counter()
            try:
                apply()
            except WeightsMismatch as e:
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
