"""The conversations of an outside agent in one episode, recorded on token ledgers.

A conversation that goes on from a recorded turn appends only its new messages to that turn's tokens. One that leaves
the recorded path (a summary, dropped text, a sub-agent, a second call beside the first) opens a branch: a segment of
its own, which begins with the shared tokens (mask 0, they are trained on where they were sampled) and goes on with the
new messages. So sampled text is never tokenised again, and every sampled token is trained on once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from etude.harness.loop import EngineModel, EpisodeSpec, UngradedEpisode, ledger_figures, turn_seed
from etude.harness.token_ledger import TokenLedger
from etude.protocol.apis import (
    AgentRequest,
    RequestRefused,
    SampledTurn,
    as_refusal,
    conversation_digest,
    conversation_digests,
)
from etude.records import Generation, StopReason, Turn
from etude.renderers import LONGEST_TOKEN, Message, Renderer, Tool, content_text


@dataclass(frozen=True)
class RecordedFork:
    """The start of a branch: after turn number `turn` (-1: at the start) of the recorded path, with `tokens` of it."""

    turn: int
    tokens: int


@dataclass
class _RecordedBranch:
    ledger: TokenLedger
    tools: bool
    turns: list[RecordedTurn] = field(default_factory=list)
    tip: RecordedTurn | None = None  # the turn that may be continued; None while a turn is sampled


class RecordedTurn(SampledTurn):
    """One turn of the model, for all equal requests."""

    def __init__(
        self,
        renderer: Renderer,
        number: int,
        branch: _RecordedBranch,
        chain: bytes,
        request: AgentRequest,
        failing: Callable[[BaseException], None],
    ) -> None:
        super().__init__(renderer, len(branch.ledger), request.stops, request.tools)
        self._failing = failing
        self.number = number
        self.branch = branch
        self.chain = chain  # digest of the conversation that it answers
        self.end = 0  # tokens of the ledger up to the end of the turn
        self.cut = False  # the limit of tokens ended the turn
        self.results: tuple[str, ...] = ()  # results of its calls in the first request that continues it
        self.seconds_model = self.seconds_tools = 0.0
        self.finished = 0.0

    def fail(self, error: BaseException) -> RequestRefused:
        """See `SampledTurn.fail`; the episode ends with it."""
        self._failing(error)
        return super().fail(error)


class Recording:
    """One episode of an outside agent. Requests are taken one after the other, up to the beginning of their sampling;
    prompts are encoded beside the event loop, which belongs to all episodes."""

    def __init__(self, spec: EpisodeSpec) -> None:
        if not isinstance(spec.model, EngineModel):
            raise TypeError("an outside agent's model is behind an engine, whose tokens are recorded")
        self.renderer = spec.model.renderer
        self.ended = asyncio.Event()  # nothing more is sampled
        self.stop_reason: StopReason | None = None
        self.failure: BaseException | None = None  # of the infrastructure, or a mistake of ours
        self.forks: list[RecordedFork] = []
        self.requests = self.repeats = 0
        self._spec, self._model = spec, spec.model
        self._session = f"agent-{secrets.token_hex(8)}"
        self._deadline = time.monotonic() + spec.budget.seconds
        self._branches: list[_RecordedBranch] = []
        self._requested: dict[tuple[bytes, tuple[str, ...], int | None], RecordedTurn] = {}
        self._turns: dict[bytes, RecordedTurn] = {}  # whole turns by the digest of the conversation up to their end
        self._tasks: set[asyncio.Task[None]] = set()
        self._tools: dict[str, Tool] = {}  # every definition that was sent, by the tool's name
        self._asking = asyncio.Lock()

    async def ask(self, request: AgentRequest) -> RecordedTurn:
        """The turn that answers a request: the recorded one of an equal request, else one whose sampling begins here.
        Raises RequestRefused without a change of state, except that a spent budget ends the episode."""
        self.requests += 1
        async with self._asking:
            return await self._ask(request)

    async def _ask(self, request: AgentRequest) -> RecordedTurn:
        chain = conversation_digests(request)
        key = chain[-1], request.stops, request.max_tokens
        if key in self._requested:
            self.repeats += 1
            return self._requested[key]
        self._check_budget()
        at = next((i for i in range(len(chain) - 1, -1, -1) if chain[i] in self._turns), 0)
        tip = self._turns.get(chain[at])
        new = request.messages[at:]
        if tip is None:
            kept, added = 0, await self._encoded(new, self.renderer.prompt, new, request.tools)
        else:
            kept, added = tip.end, await self._encoded(new, self.renderer.follow, tip.ids, new)
        self._check_budget()
        if kept + len(added) >= self._spec.budget.context:
            raise self._too_long(f"{kept + len(added)}")
        for tool in request.tools:
            self._tools.setdefault(tool["function"]["name"], tool)
        branch = self._branch(tip, new, bool(request.tools))
        branch.ledger.add_environment(added)
        turn = RecordedTurn(self.renderer, len(self._requested), branch, chain[-1], request, self.fail)
        self._requested[key] = turn
        task = turn.sampling(self._sample(turn, request.max_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return turn

    async def count(self, request: AgentRequest) -> int:
        """Tokens of a conversation as a prompt; nothing is recorded."""
        messages = request.messages
        return len(await self._encoded(messages, self.renderer.prompt, messages, request.tools))

    async def _encoded(self, messages: Sequence[Message], encode: Callable[..., list[int]], *how: Any) -> list[int]:
        """The ids that `encode` makes of messages, in a thread. Raises RequestRefused."""
        if sum(len(content_text(m)) for m in messages) > LONGEST_TOKEN * self._spec.budget.context:
            raise self._too_long("far more")
        with as_refusal():
            return await asyncio.to_thread(encode, *how)

    def end(self, reason: StopReason) -> None:
        """Ends the episode: nothing more is sampled."""
        self.stop_reason = self.stop_reason or reason
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        """Ends the episode by a failure that is not the agent's, which the caller of the episode gets."""
        self.failure = self.failure or error
        self.end(StopReason.ERROR)

    async def close(self) -> None:
        """Cancels the turns that are being sampled."""
        self.ended.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ungraded(self, stop_reason: StopReason, timed_out: bool) -> UngradedEpisode:
        """The episode. Side turns (such as titles, requested without tools beside a conversation with tools) are among
        its turns but in no segment, so they are not trained on."""
        working = [b for b in self._branches if b.tools] or self._branches
        ledgers = [branch.ledger for branch in working]
        segments = tuple(segment for ledger in ledgers for segment in ledger.segments())
        trained = [turn for branch in working for turn in branch.turns]
        side = [turn for branch in self._branches if branch not in working for turn in branch.turns]
        turns = tuple(
            Turn(
                text=self.renderer.text(turn.ids),
                calls=turn.parsed.calls,
                results=turn.results,
                seconds_model=turn.seconds_model,
                seconds_tools=turn.seconds_tools,
            )
            for turn in (*trained, *side)
        )
        counts = (
            {"turns": len(turns)}
            | ledger_figures(ledgers, turns)
            | {
                "malformed": sum(call.arguments is None for turn in turns for call in turn.calls),
                "truncated": sum(turn.cut for turn in (*trained, *side)),
                "segments": len(segments),
                "requests": self.requests,
                "repeated_requests": self.repeats,
                "forks": len(self.forks),
                "side_turns": len(side),
            }
        )
        metrics = {name: float(count) for name, count in counts.items()}
        tools = tuple(map(dict, self._tools.values()))
        last = max(trained, key=lambda turn: turn.number, default=None)
        answer = "" if last is None else last.parsed.text.strip()
        return UngradedEpisode(segments, turns, stop_reason, metrics, timed_out, tools=tools, answer=answer)

    def _check_budget(self) -> None:
        if not self.ended.is_set():
            if len(self._requested) >= self._spec.budget.turns:
                self.end(StopReason.TURNS)
            elif sum(branch.ledger.sampled for branch in self._branches) >= self._spec.budget.tokens:
                self.end(StopReason.TOKENS)
            elif time.monotonic() >= self._deadline:
                self.end(StopReason.SECONDS)
        if self.ended.is_set():
            why = "the engine was lost" if self.failure is not None else f"its budget of {self.stop_reason} is spent"
            raise RequestRefused("spent", f"the episode has ended: {why}")

    def _too_long(self, count: str) -> RequestRefused:
        most = self._spec.budget.context - 1
        return RequestRefused("context", f"prompt is too long: {count} tokens > {most} maximum", "messages")

    def _branch(self, tip: RecordedTurn | None, new: tuple[Message, ...], tools: bool) -> _RecordedBranch:
        """The branch of the next turn: that of `tip` if `tip` is its last turn, else a new one."""
        if tip is not None:
            tip.results = tip.results or tuple(map(content_text, new))
            tip.seconds_tools = tip.seconds_tools or time.monotonic() - tip.finished
        if tip is not None and tip.branch.tip is tip:
            tip.branch.tip = None
            return tip.branch
        branch = _RecordedBranch(TokenLedger(), tools)
        if tip is not None:
            branch.ledger.add_environment(tip.branch.ledger.prompt()[: tip.end])
        if self._branches:
            self.forks.append(RecordedFork(-1 if tip is None else tip.number, len(branch.ledger)))
        self._branches.append(branch)
        return branch

    async def _sample(self, turn: RecordedTurn, max_tokens: int | None) -> None:
        started = time.monotonic()
        ledger, sampling, budget = turn.branch.ledger, self._model.sampling, self._spec.budget
        left = budget.tokens - sum(branch.ledger.sampled for branch in self._branches)
        limits = left, budget.context - len(ledger), *filter(None, (max_tokens, sampling.max_tokens))
        try:
            generation = await self._model.sample(
                ledger,
                max(1, min(limits)),
                turn_seed(self._spec.seed, turn.number),
                self._deadline - started,
                self._session,
                turn.grow,
                partial(self._cut, turn.stops),
            )
        except TimeoutError:
            self.end(StopReason.SECONDS)
            turn.refuse(RequestRefused("spent", "the episode has ended: its time is up"))
            return
        except asyncio.CancelledError:
            turn.refuse(RequestRefused("spent", "the episode has ended"))
            raise
        except Exception as e:  # raised to the caller of the episode; the agent only learns that the episode is over
            turn.fail(e)
            turn.refuse(RequestRefused("lost", "the engine was lost"))
            return
        turn.finished = time.monotonic()
        turn.seconds_model = turn.finished - started
        turn.cut = generation.finish_reason == "length"
        turn.end = len(ledger)
        turn.settle(generation)
        turn.branch.turns.append(turn)
        turn.branch.tip = turn
        self._turns[conversation_digest(turn.chain, turn.message)] = turn

    def _cut(self, stops: tuple[str, ...], generation: Generation) -> Generation:
        """The generation up to the token that completes a stop string: the agent never sees the rest."""
        ids = generation.ids

        def stopped(count: int) -> bool:
            text = self.renderer.text(ids[:count])
            return any(stop in text for stop in stops)

        if not stops or not stopped(len(ids)):
            return generation
        count = bisect_left(range(len(ids)), True, key=stopped)
        routes = generation.routes
        if routes is not None:
            size = routes.layers * routes.slots * (2 if routes.wide else 1)
            kept = len(routes.ids) - (len(ids) - count) * size
            routes = msgspec.structs.replace(routes, ids=routes.ids[:kept])
        return msgspec.structs.replace(
            generation,
            ids=ids[:count],
            logprobs=generation.logprobs[:count],
            versions=generation.versions[:count],
            finish_reason="stop",
            routes=routes,
        )
