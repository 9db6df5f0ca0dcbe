"""The agent loop: sample a turn, run its calls, append their results, until the agent ends or its budget does."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import blake3

from etude.environments.base import Box
from etude.harness.documents import MIN_RESULT, pointer, title_of
from etude.harness.ledger import TokenLedger
from etude.harness.prompts import Opening, open_task
from etude.harness.renderers import Renderer
from etude.harness.tools import READ_ONLY, Tools
from etude.records import Budget, Generation, Segment, StopReason, Task, ToolCall, Turn

GRACE_SECONDS = 30.0  # what a tool may run beyond the budget of seconds; its own limit should end it before
POLICY_GRACE_SECONDS = 1.0  # what a policy may take beyond its timeout
_COUNTS = (
    "edits",
    "edit_errors",
    "repeats",
    "tests_run",
    "tests_failed",
    "undo",
    "malformed",
    "truncated",
)


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled; `max_tokens` bounds one turn, and with `routes` the experts of every token are kept.

    With `documents` the open file, and what is read and found, are sent as documents (docs/documents.md).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    routes: bool = False
    documents: bool = False


class Policy(Protocol):
    """What samples a turn; the engine's client is one."""

    async def generate(
        self,
        ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        stop: Sequence[int],
        seed: int,
        timeout: float,
        **options: Any,
    ) -> Generation:
        """At most `max_tokens` tokens after `ids`, the stop token included. TimeoutError after `timeout` seconds.

        `options` asks for the experts of the positions from `routes_from` on, has the ids of `documents` that stand
        before `ids`, the name of the `session`, or `on_tokens`, which is called with sampled ids as they come.
        """
        ...


class Aborted(Exception):
    """The engine gave a turn up: our fault, so the episode is repeated."""


@dataclass(frozen=True)
class Draft:
    """An episode before it is graded."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    metrics: dict[str, float]
    timed_out: bool  # a tool outlived the budget of seconds: what the agent left behind is unknown
    note: str = ""  # one sentence for people, which the grade does not say


def turn_seed(seed: int, turn: int) -> int:
    """A 63-bit seed for one turn, so that a turn can be sampled again without those before it."""
    return int.from_bytes(blake3.blake3(f"{seed}/{turn}".encode()).digest(8)) >> 1


async def run_episode(
    task: Task,
    *,
    policy: Policy,
    renderer: Renderer,
    box: Box,
    budget: Budget,
    sampling: Sampling,
    seed: int,
) -> Draft:
    """Plays `task` in `box`. A spent budget ends the episode where it stands; errors that are ours are raised."""
    opening = await open_task(task, box, renderer, budget, documents=sampling.documents)
    return await play_opened(opening, policy=policy, renderer=renderer, budget=budget, sampling=sampling, seed=seed)


async def play_opened(
    opening: Opening, *, policy: Policy, renderer: Renderer, budget: Budget, sampling: Sampling, seed: int
) -> Draft:
    """Plays on from an opening, as `run_episode` does."""
    loop = _Loop(policy, renderer, opening, budget, sampling, seed)
    try:
        async with asyncio.timeout(budget.seconds + GRACE_SECONDS):
            stop_reason = await loop.run(opening.prompt)
            timed_out = False
    except TimeoutError:
        stop_reason, timed_out = StopReason.SECONDS, True
    return Draft(loop.ledger.segments(), tuple(loop.turns), stop_reason, loop.metrics(), timed_out)


class _Loop:
    """One episode in progress."""

    def __init__(
        self, policy: Policy, renderer: Renderer, opening: Opening, budget: Budget, sampling: Sampling, seed: int
    ) -> None:
        self.ledger = TokenLedger(opening.documents)
        self.turns: list[Turn] = []
        self._policy = policy
        self._renderer = renderer
        self._tools = tools = opening.tools
        self._documents: Counter[str] = Counter()  # their tokens in all requests, sent and found computed
        self._budget = budget
        self._sampling = sampling
        self._seed = seed
        self._deadline = tools.deadline = time.monotonic() + budget.seconds

    async def run(self, prompt: Sequence[int]) -> StopReason:
        """Plays turns until there is a reason to stop."""
        budget = self._budget
        added = prompt
        while len(self.turns) < budget.turns:
            ledger = self.ledger
            # A result that does not fit stays out: a segment is never longer than the budget.
            if len(ledger) + len(added) >= budget.context or ledger.sampled >= budget.tokens:
                return StopReason.TOKENS
            ledger.add_environment(added)
            started = time.monotonic()
            generation = await self._sample(started)
            if generation is None:
                return StopReason.SECONDS
            sampled = time.monotonic()
            calls = self._renderer.parse(generation.ids, generation.finish_reason).calls
            results, finished = await _run_calls(self._tools, calls)
            ended = time.monotonic()
            text = self._renderer.text(generation.ids)
            self.turns.append(
                Turn(
                    text=text,
                    calls=calls,
                    results=tuple(results),
                    seconds_model=sampled - started,
                    seconds_tools=ended - sampled,
                )
            )
            if finished or not calls:
                return StopReason.FINISHED
            if ended >= self._deadline:
                return StopReason.SECONDS
            added = self._bridge(generation, calls, results)
        return StopReason.TURNS

    def _bridge(self, generation: Generation, calls: Sequence[ToolCall], results: Sequence[str]) -> list[int]:
        """What follows a turn. If long results become documents, the ledger goes on as a new segment."""

        def bridge(shown: Sequence[str]) -> list[int]:
            return self._renderer.bridge(generation.ids, generation.finish_reason, shown)

        if not self._sampling.documents:
            return bridge(results)
        shown, new = list(results), list[list[int]]()
        for i, (call, result) in enumerate(zip(calls, results, strict=True)):
            title = title_of(call, self._tools.task.focus)
            document = self._renderer.document(title, result) if title and not result.startswith("error: ") else []
            if title and len(document) >= MIN_RESULT:
                shown[i] = pointer(title)
                if document not in (*self.ledger.documents, *new):
                    new.append(document)
        added = bridge(shown)
        if len(self.ledger) + sum(map(len, new)) + len(added) >= self._budget.context:
            return bridge(results)
        if new:
            self.ledger = self.ledger.continued(new)
        return added

    async def _sample(self, now: float) -> Generation | None:
        """Samples a turn into the ledger; None if the time is up before it is whole."""
        budget, sampling, ledger = self._budget, self._sampling, self.ledger
        prompt = ledger.prompt()
        seconds = self._deadline - now
        options: dict[str, Any] = {"routes_from": ledger.routed} if sampling.routes else {}
        options |= {"documents": ledger.documents} if ledger.documents else {}
        try:
            # The policy keeps its own deadline, and knows whether the engine was lost or only slow.
            async with asyncio.timeout(seconds + POLICY_GRACE_SECONDS):
                generation = await self._policy.generate(
                    prompt,
                    max_tokens=min(sampling.max_tokens, budget.tokens - ledger.sampled, budget.context - len(ledger)),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    stop=self._renderer.stop_ids,
                    seed=turn_seed(self._seed, len(self.turns)),
                    timeout=seconds,
                    **options,
                )
        except TimeoutError:
            return None
        if generation.finish_reason == "abort":
            raise Aborted("the engine aborted a turn")
        ledger.add_turn(prompt, generation)
        self._documents["document_tokens"] += sum(map(len, ledger.documents))
        self._documents["cached_document_tokens"] += generation.cached_document_tokens
        self._tools.metrics["truncated"] += generation.finish_reason == "length"
        return generation

    def metrics(self) -> dict[str, float]:
        """Counts of the episode; a tool that was never called has no entry."""
        counted = self._tools.metrics
        figures = {
            "turns": float(len(self.turns)),
            "sampled_tokens": float(self.ledger.sampled),
            "context_tokens": float(len(self.ledger)),
            "kv_lag": float(self.ledger.kv_lag),
            "tokens_prefix_property": float(self.ledger.checks),
            "seconds_model": sum(turn.seconds_model for turn in self.turns),
            "seconds_tools": sum(turn.seconds_tools for turn in self.turns),
        }
        if self._sampling.documents:
            figures |= {"documents": float(len(self.ledger.documents)), "segments": float(len(self.ledger.segments()))}
            figures |= {name: float(count) for name, count in self._documents.items()}
        return {name: float(counted[name]) for name in dict.fromkeys((*_COUNTS, *counted))} | figures


async def _run_calls(tools: Tools, calls: Sequence[ToolCall]) -> tuple[list[str], bool]:
    """Results in call order, and whether the agent ended the episode: calls after `finish` are not run.

    Neighbouring calls that only read run at the same time.
    """
    results: list[str] = []
    at = 0
    while at < len(calls):
        if time.monotonic() >= tools.deadline:
            return results + ["error: no time left"] * (len(calls) - at), False
        run = [calls[at]]
        if calls[at].name in READ_ONLY:
            while at + len(run) < len(calls) and calls[at + len(run)].name in READ_ONLY:
                run.append(calls[at + len(run)])
        if len(run) == 1:
            results.append(await tools.call(run[0]))
        else:
            done = await asyncio.gather(*map(tools.call, run), return_exceptions=True)
            for result in done:
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
        if run[0].name == "finish" and run[0].arguments is not None:
            return results, True
        at += len(run)
    return results, False
