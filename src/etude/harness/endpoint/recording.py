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
from dataclasses import dataclass, field

import msgspec
from jinja2 import TemplateError

from etude.harness.loop import Aborted, EngineModel, EpisodeSpec, UngradedEpisode, turn_seed
from etude.harness.token_ledger import TokenLedger
from etude.protocol import GenerateRequest
from etude.protocol.apis import AgentRequest, RequestRefused, SampledTurn, conversation_digest, conversation_digests
from etude.records import Generation, Segment, StopReason, Turn
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
        self, renderer: Renderer, number: int, branch: _RecordedBranch, chain: bytes, request: AgentRequest
    ) -> None:
        super().__init__(renderer, len(branch.ledger), request.stops, request.tools)
        self.number = number
        self.branch = branch
        self.chain = chain  # digest of the conversation that it answers
        self.end = 0  # tokens of the ledger up to the end of the turn
        self.results: tuple[str, ...] = ()  # results of its calls in the first request that continues it
        self.seconds_model = self.seconds_tools = 0.0
        self.finished = 0.0


class Recording:
    """One episode of an outside agent. Requests are taken one after the other, up to the beginning of their sampling;
    prompts are encoded beside the event loop, which belongs to all episodes."""

    def __init__(self, spec: EpisodeSpec) -> None:
        if not isinstance(spec.model, EngineModel):
            raise TypeError("an outside agent's model is behind an engine, whose tokens are recorded")
        self.renderer = spec.model.renderer
        self.ended = asyncio.Event()  # nothing more is sampled
        self.stop_reason: StopReason | None = None
        self.failure: Exception | None = None  # of the infrastructure
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
        if sum(len(content_text(m)) for m in request.messages[at:]) > LONGEST_TOKEN * self._spec.budget.context:
            raise self._too_long()
        try:
            if tip is None or tip.generation is None:
                kept, added = 0, await asyncio.to_thread(self.renderer.prompt, request.messages, request.tools)
            else:
                ids, new = tip.generation.ids, request.messages[at:]
                kept, added = tip.end, await asyncio.to_thread(self.renderer.follow, ids, new)
        except (ValueError, TemplateError) as e:
            raise RequestRefused("invalid", str(e), "messages") from None
        self._check_budget()
        if kept + len(added) >= self._spec.budget.context:
            raise self._too_long(kept + len(added))
        for tool in request.tools:
            self._tools.setdefault(tool["function"]["name"], tool)
        branch = self._branch(tip, request.messages[at:], bool(request.tools))
        branch.ledger.add_environment(added)
        turn = RecordedTurn(self.renderer, len(self._requested), branch, chain[-1], request)
        self._requested[key] = turn
        task = asyncio.create_task(self._sample(turn, request.max_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return turn

    async def count(self, request: AgentRequest) -> int:
        """Tokens of a conversation as a prompt; nothing is recorded."""
        if sum(len(content_text(m)) for m in request.messages) > LONGEST_TOKEN * self._spec.budget.context:
            raise self._too_long()
        try:
            return len(await asyncio.to_thread(self.renderer.prompt, request.messages, request.tools))
        except (ValueError, TemplateError) as e:
            raise RequestRefused("invalid", str(e), "messages") from None

    def end(self, reason: StopReason) -> None:
        """Ends the episode: nothing more is sampled."""
        self.stop_reason = self.stop_reason or reason
        self.ended.set()

    async def close(self) -> None:
        """Cancels the turns that are being sampled."""
        self.ended.set()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def ungraded(self, stop_reason: StopReason, timed_out: bool) -> UngradedEpisode:
        """The episode. Side turns (such as titles, requested without tools beside a conversation with tools) are among
        its turns but in no segment, so they are not trained on."""
        working = [b for b in self._branches if b.tools] or self._branches
        side = [b for b in self._branches if b not in working]
        segments = [segment for branch in working for segment in branch.ledger.segments()]
        turns = [
            Turn(
                text=self.renderer.text(turn.ids),
                calls=turn.parsed.calls,
                results=turn.results,
                seconds_model=turn.seconds_model,
                seconds_tools=turn.seconds_tools,
            )
            for branch in (*working, *side)
            for turn in branch.turns
        ]
        last = max((turn for branch in working for turn in branch.turns), key=lambda turn: turn.number, default=None)
        return UngradedEpisode(
            tuple(segments),
            tuple(turns),
            stop_reason,
            self._metrics(working, side, segments),
            timed_out,
            tools=tuple(map(dict, self._tools.values())),
            answer="" if last is None else last.parsed.text.strip(),
        )

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

    def _too_long(self, tokens: int | None = None) -> RequestRefused:
        length = f"{tokens} tokens" if tokens is not None else "far more tokens"
        return RequestRefused(
            "context", f"prompt is too long: {length} > {self._spec.budget.context - 1} maximum", "messages"
        )

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
        try:
            generation = await self._generate(turn, max_tokens, self._deadline - started)
        except TimeoutError:
            self.end(StopReason.SECONDS)
            turn.refuse(RequestRefused("spent", "the episode has ended: its time is up"))
            return
        except asyncio.CancelledError:
            turn.refuse(RequestRefused("spent", "the episode has ended"))
            raise
        except Exception as e:  # raised to the caller of the episode; the agent only learns that the episode is over
            self.failure = self.failure or e
            self.end(StopReason.ERROR)
            turn.refuse(RequestRefused("lost", "the engine was lost"))
            return
        turn.finished = time.monotonic()
        turn.seconds_model = turn.finished - started
        turn.end = len(turn.branch.ledger)
        turn.branch.turns.append(turn)
        turn.branch.tip = turn
        turn.settle(generation)
        self._turns[conversation_digest(turn.chain, turn.message)] = turn

    async def _generate(self, turn: RecordedTurn, max_tokens: int | None, seconds: float) -> Generation:
        """Samples a turn into its ledger."""
        ledger, sampling, budget = turn.branch.ledger, self._model.sampling, self._spec.budget
        prompt = ledger.prompt()
        left = budget.tokens - sum(branch.ledger.sampled for branch in self._branches)
        limits = (max_tokens or sampling.max_tokens, sampling.max_tokens, left, budget.context - len(ledger))
        request = GenerateRequest(
            ids=prompt,
            max_tokens=max(1, min(limits)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=tuple(self.renderer.stop_ids),
            seed=turn_seed(self._spec.seed, turn.number),
            session=self._session,
            routes_from=ledger.routed if sampling.routes else None,
        )
        async with asyncio.timeout(seconds + 1.0):  # the policy keeps its own deadline
            generation = await self._model.policy.generate(request, seconds, turn.grow)
        if generation.finish_reason == "abort":
            raise Aborted("the engine aborted a turn")
        generation = self._cut(generation, turn.stops, len(prompt))
        ledger.add_turn(prompt, generation)
        return generation

    def _cut(self, generation: Generation, stops: tuple[str, ...], prompt: int) -> Generation:
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
            routes = msgspec.structs.replace(routes, ids=routes.ids[: (prompt + count - 1 - routes.first) * size])
        return msgspec.structs.replace(
            generation,
            ids=ids[:count],
            logprobs=generation.logprobs[:count],
            versions=generation.versions[:count],
            finish_reason="stop",
            routes=routes,
        )

    def _metrics(
        self, working: list[_RecordedBranch], side: list[_RecordedBranch], segments: list[Segment]
    ) -> dict[str, float]:
        turns = [turn for branch in self._branches for turn in branch.turns]
        ledgers = [branch.ledger for branch in working]
        counts = {
            "turns": len(turns),
            "sampled_tokens": sum(ledger.sampled for ledger in ledgers),
            "context_tokens": max(map(len, ledgers), default=0),
            "kv_lag": max((ledger.kv_lag for ledger in ledgers), default=0),
            "tokens_prefix_property": sum(ledger.checks for ledger in ledgers),
            "seconds_model": sum(turn.seconds_model for turn in turns),
            "seconds_tools": sum(turn.seconds_tools for turn in turns),
            "malformed": sum(call.arguments is None for turn in turns for call in turn.parsed.calls),
            "truncated": sum(
                turn.generation is not None and turn.generation.finish_reason == "length" for turn in turns
            ),
            "segments": len(segments),
            "requests": self.requests,
            "repeated_requests": self.repeats,
            "forks": len(self.forks),
            "side_turns": sum(len(branch.turns) for branch in side),
        }
        return {name: float(count) for name, count in counts.items()}
