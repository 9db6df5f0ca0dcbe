"""The agent loop: sample a turn, run its calls, append their results, until the agent ends or its budget does.

With `summarise_at` an episode is a chain of segments. Before one grows too long, between two turns, the agent is asked
for a summary; it is sampled and trained on like any turn, and the next segment begins with the task and the summary.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import blake3
import msgspec

from etude.harness.documents import MIN_RESULT, pointer, title_of
from etude.harness.ledger import TokenLedger
from etude.harness.prompts import AGAIN, SUMMARISE, Opening, open_task, reopen_task
from etude.harness.sketches import Apply, merged
from etude.harness.tools import READ_ONLY, Tools
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Generation, Segment, StopReason, Task, ToolCall, Turn
from etude.renderers import Renderer
from etude.sandbox.base import Box, BoxError

GRACE_SECONDS = 30.0  # what a tool may run beyond the budget of seconds; its own limit should end it before
LEFT_OUT = "error: the result does not fit your context; ask for less"
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
    A segment of `summarise_at` tokens is summarised, in at most `summary_tokens`; 0: never.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    routes: bool = False
    documents: bool = False
    summarise_at: int = 0
    summary_tokens: int = 512


class Policy(Protocol):
    """What samples a turn; the engine's client is one."""

    async def generate(
        self, request: GenerateRequest, timeout: float, on_tokens: Callable[[list[int]], None] | None = None
    ) -> Generation:
        """Samples one answer; `on_tokens` is called with the sampled ids as they come. TimeoutError after `timeout`
        seconds."""
        ...


class Aborted(Exception):
    """The engine gave a turn up: our fault, so the episode is repeated."""


@dataclass(frozen=True)
class UngradedEpisode:
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


@dataclass(frozen=True)
class EpisodeSpec:
    """What one episode is played with; its box comes beside it. `lay` is what the tool `apply` asks."""

    task: Task
    policy: Policy
    renderer: Renderer
    budget: Budget
    sampling: Sampling
    seed: int
    lay: Apply = merged


async def run_episode(play: EpisodeSpec, box: Box) -> UngradedEpisode:
    """Plays in `box`. A spent budget ends the episode where it stands; errors that are ours are raised."""
    return await play_opened(play, await _open(play, box))


async def play_opened(play: EpisodeSpec, opening: Opening) -> UngradedEpisode:
    """Plays on from an opening, as `run_episode` does."""
    return await _Loop(play, opening).draft()


async def _open(play: EpisodeSpec, box: Box) -> Opening:
    return await open_task(play.task, box, play.renderer, play.budget, play.lay, documents=play.sampling.documents)


@dataclass(frozen=True)
class Branch:
    """One way on from a fork: `play` it once. `box` is its own, and the caller's to close."""

    box: Box
    play: Callable[[], Coroutine[Any, Any, UngradedEpisode]]


@dataclass(frozen=True)
class Trunk:
    """The first turns of several episodes. No branches if the agent has left a box that cannot be forked: `fault`."""

    draft: UngradedEpisode
    branches: tuple[Branch, ...]
    fault: str = ""


async def fork_episode(play: EpisodeSpec, box: Box, turns: int, seeds: Sequence[int]) -> Trunk:
    """Plays `turns` turns in `box` once, the trunk; from there an episode per seed may go on, in a fork of the box.

    They have the trunk's tokens in common, log-probabilities included, and budgets count those. Running processes, and
    the shell's folder and variables, stay behind in `box`. If the trunk ends the episode, every branch is that one.
    """
    trunk = _Loop(play, await _open(play, box))
    draft = await trunk.draft(turns)
    try:
        # A tool that outlived the time may still hold the box, which nobody will look into.
        boxes = [box] * len(seeds) if draft.timed_out else await box.fork(len(seeds))
    except BoxError as e:
        if e.payer == "infra":
            raise
        return Trunk(draft, (), f"the box could not be forked: {e}")

    async def over() -> UngradedEpisode:
        return draft

    ended = draft.stop_reason is not StopReason.TURNS or turns >= play.budget.turns
    ways = [over if ended else trunk.fork(fork, s).draft for fork, s in zip(boxes, seeds, strict=True)]
    return Trunk(draft, tuple(Branch(fork, way) for fork, way in zip(boxes, ways, strict=True)))


class _Loop:
    """One episode in progress."""

    def __init__(self, play: EpisodeSpec, opening: Opening) -> None:
        self.ledger = TokenLedger(opening.documents)
        self.turns: list[Turn] = []
        self._added: Sequence[int] = opening.prompt  # what the environment says next
        self._acted = 0  # turns but summaries
        self._summaries = 0
        self._play = play
        self._open = opening.documents
        self._tools = tools = opening.tools
        self._documents: Counter[str] = Counter()  # their tokens in all requests, sent and found computed
        budget, sampling = play.budget, play.sampling
        self._deadline = tools.deadline = time.monotonic() + budget.seconds
        # Two requests and two summaries must find room.
        self._asked = len(play.renderer.bridge((), "stop", (), SUMMARISE + AGAIN)) if sampling.summarise_at else 0
        self._trigger = min(sampling.summarise_at, budget.context - 2 * (self._asked + sampling.summary_tokens))

    def fork(self, box: Box, seed: int) -> _Loop:
        """The episode as it stands, to be gone on with in a fork of its box, under another seed."""
        new = copy.copy(self)
        new.ledger, new.turns, new._documents = self.ledger.fork(), self.turns[:], self._documents.copy()
        new._tools = self._tools.forked(box)
        new._play = replace(self._play, seed=seed)
        return new

    async def draft(self, turns: int | None = None) -> UngradedEpisode:
        """Plays to the end, or no more than `turns` turns in all."""
        timed_out = False
        try:
            async with asyncio.timeout(self._deadline - time.monotonic() + GRACE_SECONDS):
                stop_reason = await self._run(self._play.budget.turns if turns is None else turns)
        except TimeoutError:
            stop_reason, timed_out = StopReason.SECONDS, True
        return UngradedEpisode(self.ledger.segments(), tuple(self.turns), stop_reason, self.metrics(), timed_out)

    async def _run(self, turns: int) -> StopReason:
        """Plays turns until there is a reason to stop."""
        while self._acted < turns:
            generation = await self._turn(self._play.sampling.max_tokens)
            if isinstance(generation, StopReason):
                return generation
            self._acted += 1
            sampled = time.monotonic()
            calls = self._play.renderer.parse(generation.ids, generation.finish_reason).calls
            results, finished = await _run_calls(self._tools, calls)
            ended = time.monotonic()
            self.turns[-1] = msgspec.structs.replace(
                self.turns[-1], calls=calls, results=tuple(results), seconds_tools=ended - sampled
            )
            if finished or not calls:
                return StopReason.FINISHED
            if ended >= self._deadline:
                return StopReason.SECONDS
            if self._is_long(generation, results):
                reason = await self._summarise(generation, results)
                if reason is not None:
                    return reason
            else:
                self._added = self._bridge(generation, calls, results)
        return StopReason.TURNS

    async def _turn(self, max_tokens: int) -> Generation | StopReason:
        """Appends what the environment says, and samples a turn after it, without running its calls."""
        ledger, budget = self.ledger, self._play.budget
        # A result that does not fit stays out: a segment is never longer than the budget.
        if len(ledger) + len(self._added) >= budget.context or ledger.sampled >= budget.tokens:
            return StopReason.TOKENS
        ledger.add_environment(self._added)
        started = time.monotonic()
        generation = await self._sample(started, max_tokens)
        if generation is None:
            return StopReason.SECONDS
        text, seconds = self._play.renderer.text(generation.ids), time.monotonic() - started
        self.turns.append(Turn(text=text, calls=(), results=(), seconds_model=seconds, seconds_tools=0.0))
        return generation

    def _is_long(self, generation: Generation, results: Sequence[str]) -> bool:
        if not self._play.sampling.summarise_at or self._acted >= self._play.budget.turns:
            return False
        added = self._play.renderer.bridge(generation.ids, generation.finish_reason, results)
        return len(self.ledger) + len(added) >= self._trigger

    async def _summarise(self, generation: Generation, results: Sequence[str]) -> StopReason | None:
        """Asks for a summary behind the results, and opens a segment with it; a reason if the episode ends instead.

        One that is empty or cut is asked for once more. Both are kept and trained on, and the agent goes on with what
        it wrote last, so a bad summary costs it its memory.
        """
        bridge, sampling = self._play.renderer.bridge, self._play.sampling
        self._added = bridge(generation.ids, generation.finish_reason, results, SUMMARISE)
        if len(self.ledger) + len(self._added) + 2 * sampling.summary_tokens + self._asked >= self._play.budget.context:
            shown = [LEFT_OUT] * len(results)
            self._added = bridge(generation.ids, generation.finish_reason, shown, SUMMARISE)
        summary = ""
        for last in (False, True):
            said = await self._turn(sampling.summary_tokens)
            if isinstance(said, StopReason):
                return said
            text = self._play.renderer.parse(said.ids, said.finish_reason).text.strip()
            summary = text or summary
            fault = "cut off" if said.finish_reason == "length" else "" if text else "empty"
            if not fault:
                break
            self._tools.metrics["summary_errors"] += 1
            if not last:
                again = AGAIN.format(fault=fault) + SUMMARISE
                self._added = bridge(said.ids, said.finish_reason, (), again)
        self._summaries += 1
        self.ledger = self.ledger.restarted(self._open)
        self._added = await reopen_task(
            self._tools.task, self._tools, self._play.renderer, summary, self._summaries, documents=sampling.documents
        )
        return None

    def _bridge(self, generation: Generation, calls: Sequence[ToolCall], results: Sequence[str]) -> list[int]:
        """What follows a turn. If long results become documents, the ledger goes on as a new segment."""

        def bridge(shown: Sequence[str]) -> list[int]:
            return self._play.renderer.bridge(generation.ids, generation.finish_reason, shown)

        if not self._play.sampling.documents:
            return bridge(results)
        shown, new = list(results), list[list[int]]()
        for i, (call, result) in enumerate(zip(calls, results, strict=True)):
            title = title_of(call, self._tools.task.focus)
            document = self._play.renderer.document(title, result) if title and not result.startswith("error: ") else []
            if title and len(document) >= MIN_RESULT:
                shown[i] = pointer(title)
                if document not in (*self.ledger.documents, *new):
                    new.append(document)
        added = bridge(shown)
        if len(self.ledger) + sum(map(len, new)) + len(added) >= self._play.budget.context:
            return bridge(results)
        if new:
            self.ledger = self.ledger.continued(new)
        return added

    async def _sample(self, now: float, max_tokens: int) -> Generation | None:
        """Samples a turn into the ledger; None if the time is up before it is whole."""
        budget, sampling, ledger = self._play.budget, self._play.sampling, self.ledger
        prompt = ledger.prompt()
        seconds = self._deadline - now
        if seconds <= 0:
            return None
        request = GenerateRequest(
            ids=prompt,
            max_tokens=min(max_tokens, budget.tokens - ledger.sampled, budget.context - len(ledger)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=tuple(self._play.renderer.stop_ids),
            seed=turn_seed(self._play.seed, len(self.turns)),
            routes_from=ledger.routed if sampling.routes else None,
            documents=ledger.documents,
        )
        try:
            # The policy keeps its own deadline, and knows whether the engine was lost or only slow.
            async with asyncio.timeout(seconds + POLICY_GRACE_SECONDS):
                generation = await self._play.policy.generate(request, seconds)
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
            "turns": float(self._acted),
            "sampled_tokens": float(self.ledger.sampled),
            "context_tokens": float(len(self.ledger)),
            "kv_lag": float(self.ledger.kv_lag),
            "tokens_prefix_property": float(self.ledger.checks),
            "seconds_model": sum(turn.seconds_model for turn in self.turns),
            "seconds_tools": sum(turn.seconds_tools for turn in self.turns),
        }
        if self._play.sampling.documents:
            figures["documents"] = float(len(self.ledger.documents))
            figures |= {name: float(count) for name, count in self._documents.items()}
        if self._play.sampling.summarise_at:
            figures |= {"summaries": float(self._summaries), "summary_errors": float(counted["summary_errors"])}
        if self._play.sampling.documents or self._play.sampling.summarise_at:
            figures["segments"] = float(len(self.ledger.segments()))
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
