"""The agent loop: sample a turn, run its calls, show their results, until the agent ends or its budget does.

With `summarise_at` an episode is a chain of segments. Before a segment grows too long, the agent writes a summary. The
summary is sampled and trained on like any turn; the next segment begins with the task and the summary.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import blake3
import msgspec

from etude.harness.documents import results_as_documents
from etude.harness.edit_appliers import EditApplier, merge_applier
from etude.harness.prompts import AGAIN, SUMMARISE, Opening, open_task
from etude.harness.token_ledger import TokenLedger
from etude.protocol import GenerateRequest
from etude.records import Budget, Generation, Segment, StopReason, Task, ToolCall, Turn
from etude.renderers import Renderer
from etude.sandbox import Box

GRACE_SECONDS = 30.0  # of a tool beyond the budget of seconds; the tool's own limit should end it before
LEFT_OUT = "error: the result does not fit your context; ask for less"
POLICY_GRACE_SECONDS = 1.0  # of a policy beyond its timeout
_COUNTS = ("edits", "edit_errors", "repeats", "tests_run", "tests_failed", "undo", "malformed", "truncated")


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled; `max_tokens` bounds one turn, and with `routes` the experts of every token are kept. With
    `documents` the open file, and the files and matches that the agent reads, are sent as documents
    (docs/documents.md). A segment of `summarise_at` tokens is summarised, in at most `summary_tokens`; 0: never.
    `tools` are the names of the full tools that the agent has; (): all."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    routes: bool = False
    documents: bool = False
    summarise_at: int = 0
    summary_tokens: int = 512
    tools: tuple[str, ...] = ()


class Policy(Protocol):
    """The source of sampled turns; the engine's client is one."""

    async def generate(
        self, request: GenerateRequest, timeout: float, on_tokens: Callable[[list[int]], None] | None = None
    ) -> Generation:
        """Samples one answer; `on_tokens` is called with the sampled ids as they come. TimeoutError after `timeout`
        seconds."""
        ...


class Aborted(Exception):
    """The engine has aborted a turn: an infrastructure failure, so the episode is repeated."""


@dataclass(frozen=True)
class UngradedEpisode:
    """An episode before it is graded."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    metrics: dict[str, float]
    timed_out: bool  # a tool outlived the budget of seconds: the state of the box is unknown
    visible_passed: bool = False  # the visible tests passed on the tree as the agent left it
    note: str = ""  # one sentence for people, added to the grade's
    tools: tuple[dict[str, Any], ...] = ()  # definitions that an outside agent gave its model


def turn_seed(seed: int, turn: int) -> int:
    """A 63-bit seed for one turn, so that a turn can be sampled again without those before it."""
    return int.from_bytes(blake3.blake3(f"{seed}/{turn}".encode()).digest(8)) >> 1


@dataclass(frozen=True)
class EpisodeSpec:
    """The settings of an episode, without its box. `apply_edit` serves the tool `apply`."""

    task: Task
    policy: Policy
    renderer: Renderer
    budget: Budget
    sampling: Sampling
    seed: int
    apply_edit: EditApplier = merge_applier


async def run_agent_loop(spec: EpisodeSpec, box: Box) -> UngradedEpisode:
    """Plays a coding task in `box`. A spent budget ends the episode where it stands. Raises BoxError with payer
    "infra", EngineError or Aborted if the infrastructure failed."""
    sampling = spec.sampling
    opening = await open_task(
        spec.task, box, spec.renderer, spec.budget, spec.apply_edit, documents=sampling.documents, names=sampling.tools
    )
    return await run_from_opening(spec, opening)


async def run_from_opening(spec: EpisodeSpec, opening: Opening) -> UngradedEpisode:
    """Plays from any opening, as `run_agent_loop` does from that of a coding task."""
    return await _AgentLoop(spec, opening).run()


class _BudgetSpent(Exception):
    """No turn can be sampled any more."""

    def __init__(self, reason: StopReason) -> None:
        self.reason = reason


class _AgentLoop:
    """One episode in progress. Read `run`, then `_turns`: the other methods follow in the order of their calls.
    `_next` are the tokens that the model reads next: the prompt, or the results of the turn before."""

    def __init__(self, spec: EpisodeSpec, opening: Opening) -> None:
        self._spec = spec
        self._tools = opening.tools
        self._opening = opening
        self._ledger = TokenLedger(opening.documents)
        self._next: Sequence[int] = opening.prompt
        self._turn_records: list[Turn] = []
        self._acted = 0  # turns without the summaries
        self._summaries = 0
        self._document_tokens: Counter[str] = Counter()  # over all requests: sent, and those already computed
        self._deadline = self._tools.deadline = time.monotonic() + spec.budget.seconds
        self._summary_at, self._request_tokens = float("inf"), 0  # tokens: of a segment, and of a request to summarise
        if spec.sampling.summarise_at:
            self._request_tokens = len(spec.renderer.bridge((), "stop", (), SUMMARISE + AGAIN))
            needed = 2 * (self._request_tokens + spec.sampling.summary_tokens)  # two requests and two summaries
            self._summary_at = min(spec.sampling.summarise_at, spec.budget.context - needed)

    async def run(self) -> UngradedEpisode:
        """Plays to the end."""
        timed_out = False
        try:
            async with asyncio.timeout(self._deadline - time.monotonic() + GRACE_SECONDS):
                stop_reason = await self._turns()
        except _BudgetSpent as spent:
            stop_reason = spent.reason
        except TimeoutError:
            stop_reason, timed_out = StopReason.SECONDS, True
        visible_passed = bool(self._tools.visible_passed)
        segments, turn_records = self._ledger.segments(), tuple(self._turn_records)
        return UngradedEpisode(segments, turn_records, stop_reason, self._metrics(), timed_out, visible_passed)

    async def _turns(self) -> StopReason:
        renderer, sampling = self._spec.renderer, self._spec.sampling
        while self._acted < self._spec.budget.turns:
            generation = await self._sample(sampling.max_tokens)
            self._acted += 1
            sampled = time.monotonic()
            calls = renderer.parse(generation.ids, generation.finish_reason, self._tools.schemas).calls
            self._tools.room = self._spec.budget.context - len(self._ledger)
            results, finished = await self._tools.call_all(calls)
            ended = time.monotonic()
            self._turn_records[-1] = msgspec.structs.replace(
                self._turn_records[-1], calls=calls, results=tuple(results), seconds_tools=ended - sampled
            )
            if finished or not calls:
                return StopReason.FINISHED
            if ended >= self._deadline:
                return StopReason.SECONDS
            results_ids = renderer.bridge(generation.ids, generation.finish_reason, results)
            if self._acted < self._spec.budget.turns and len(self._ledger) + len(results_ids) >= self._summary_at:
                await self._summarise(generation, results)
            elif sampling.documents:
                self._next = self._show_documents(generation, calls, results) or results_ids
            else:
                self._next = results_ids
        return StopReason.TURNS

    async def _sample(self, max_tokens: int) -> Generation:
        """Appends `_next` to the ledger, and samples a turn after it. Raises _BudgetSpent or Aborted."""
        spec, ledger = self._spec, self._ledger
        budget, sampling = spec.budget, spec.sampling
        # A result that does not fit stays out: a segment is never longer than the budget.
        if len(ledger) + len(self._next) >= budget.context or ledger.sampled >= budget.tokens:
            raise _BudgetSpent(StopReason.TOKENS)
        ledger.add_environment(self._next)
        prompt, started = ledger.prompt(), time.monotonic()
        seconds = self._deadline - started
        if seconds <= 0:
            raise _BudgetSpent(StopReason.SECONDS)
        request = GenerateRequest(
            ids=prompt,
            max_tokens=min(max_tokens, budget.tokens - ledger.sampled, budget.context - len(ledger)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=tuple(spec.renderer.stop_ids),
            seed=turn_seed(spec.seed, len(self._turn_records)),
            routes_from=ledger.routed if sampling.routes else None,
            documents=ledger.documents,
        )
        try:
            # The policy has a deadline of its own, and can distinguish a lost engine from a slow one.
            async with asyncio.timeout(seconds + POLICY_GRACE_SECONDS):
                generation = await spec.policy.generate(request, seconds)
        except TimeoutError:
            raise _BudgetSpent(StopReason.SECONDS) from None
        if generation.finish_reason == "abort":
            raise Aborted("the engine aborted a turn")
        ledger.add_turn(prompt, generation)
        self._document_tokens["document_tokens"] += sum(map(len, ledger.documents))
        self._document_tokens["cached_document_tokens"] += generation.cached_document_tokens
        self._tools.metrics["truncated"] += generation.finish_reason == "length"
        text, seconds = spec.renderer.text(generation.ids), time.monotonic() - started
        self._turn_records.append(Turn(text=text, calls=(), results=(), seconds_model=seconds, seconds_tools=0.0))
        return generation

    def _show_documents(
        self, generation: Generation, calls: Sequence[ToolCall], results: Sequence[str]
    ) -> list[int] | None:
        """The results with long ones as documents, which begin a new segment; None if that does not fit."""
        renderer, ledger = self._spec.renderer, self._ledger
        focus = self._tools.task.focus
        shown, new = results_as_documents(calls, results, focus, renderer.document, ledger.documents)
        ids = renderer.bridge(generation.ids, generation.finish_reason, shown)
        if len(ledger) + sum(map(len, new)) + len(ids) >= self._spec.budget.context:
            return None
        if new:
            self._ledger = ledger.continued(new)
        return ids

    async def _summarise(self, generation: Generation, results: Sequence[str]) -> None:
        """Requests a summary after the results, and opens a segment with it. Raises _BudgetSpent or Aborted. An empty
        or cut summary is requested once more. Both are kept and trained on, and the agent goes on with the last one, so
        a bad summary costs the agent its memory."""
        renderer, sampling = self._spec.renderer, self._spec.sampling
        self._next = renderer.bridge(generation.ids, generation.finish_reason, results, SUMMARISE)
        needed = 2 * sampling.summary_tokens + self._request_tokens
        if len(self._ledger) + len(self._next) + needed >= self._spec.budget.context:
            left_out = [LEFT_OUT] * len(results)
            self._next = renderer.bridge(generation.ids, generation.finish_reason, left_out, SUMMARISE)
        summary = ""
        for last in (False, True):
            answer = await self._sample(sampling.summary_tokens)
            text = renderer.parse(answer.ids, answer.finish_reason).text.strip()
            summary = text or summary
            fault = "cut off" if answer.finish_reason == "length" else "" if text else "empty"
            if not fault:
                break
            self._tools.metrics["summary_errors"] += 1
            if not last:
                self._next = renderer.bridge(
                    answer.ids, answer.finish_reason, (), AGAIN.format(fault=fault) + SUMMARISE
                )
        self._summaries += 1
        self._ledger = self._ledger.restarted(self._opening.documents)
        self._next = await self._opening.reopen(summary, self._summaries)

    def _metrics(self) -> dict[str, float]:
        """Counts of the episode; a tool that was never called has no entry."""
        ledger, sampling, counts = self._ledger, self._spec.sampling, self._tools.metrics
        figures = {
            "turns": float(self._acted),
            "sampled_tokens": float(ledger.sampled),
            "context_tokens": float(len(ledger)),
            "kv_lag": float(ledger.kv_lag),
            "tokens_prefix_property": float(ledger.checks),
            "seconds_model": sum(turn.seconds_model for turn in self._turn_records),
            "seconds_tools": sum(turn.seconds_tools for turn in self._turn_records),
        }
        if self._tools.visible_passed is not None:
            figures["visible_passed"] = float(self._tools.visible_passed)
        if sampling.documents:
            figures["documents"] = float(len(ledger.documents))
            figures |= {name: float(count) for name, count in self._document_tokens.items()}
        if sampling.summarise_at:
            figures |= {"summaries": float(self._summaries), "summary_errors": float(counts["summary_errors"])}
        if sampling.documents or sampling.summarise_at:
            figures["segments"] = float(len(ledger.segments()))
        return {name: float(counts[name]) for name in dict.fromkeys((*_COUNTS, *counts))} | figures
