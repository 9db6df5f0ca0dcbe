"""The agent loop: sample a turn, run its calls, show their results, until the agent ends or its budget does.

`run_agent_loop` plays every episode. An engine gives turns as tokens (`_EngineTurns`), a chat API as messages
(`_ChatTurns`).

With `summarise_at` an engine's episode is a chain of segments. Before a segment grows too long, the agent writes a
summary. The summary is sampled and trained on like any turn; the next segment begins with the task and the summary.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import blake3
import msgspec

from etude.harness.documents import open_file, results_as_documents
from etude.harness.edit_appliers import EditApplier, merge_applier
from etude.harness.token_ledger import TokenLedger
from etude.harness.tools import Tools
from etude.protocol import GenerateRequest
from etude.protocol.backends import ChatAnswer, ChatClient, ContextSpent, Conversation, ConversationRefused
from etude.records import Budget, Generation, Segment, StopReason, Task, ToolCall, Turn
from etude.renderers import Renderer

GRACE_SECONDS = 30.0  # of a tool beyond the budget of seconds; the tool's own limit should end it before
LEFT_OUT = "error: the result does not fit your context; ask for less"
POLICY_GRACE_SECONDS = 1.0  # of a policy beyond its timeout
SUMMARISE = (
    "Your context is almost full, and all of it but the task will be dropped. Please summarise your work for yourself: "
    "what you found out and where it stands, what you changed and why, what the tests say, and what to do next. "
    "Call no tool. Think first if you need to; only what follows your thoughts is kept."
)
AGAIN = "That was {fault}. It must be there whole, in fewer words. "
MEMORY = "Your context was full, so this is all you keep of your work so far (summary {count}):\n{summary}"
PREFILL = "\n\nBegin your answer with the following line, and close its tag after the last line.\n{prefill}"
_COUNTS = ("edits", "edit_errors", "repeats", "tests_run", "tests_failed", "undo", "malformed", "truncated")


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled; `max_tokens` bounds one turn, and by default the rest of the episode's budget does. A
    thought of `thinking_budget` tokens is closed, and the turn goes on behind it. With `routes` the experts of every
    token are kept. With `documents` the open file, and the files and matches that the agent reads, are sent as
    documents (docs/documents.md). A segment of `summarise_at` tokens is summarised, in at most `summary_tokens`; 0:
    never."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    thinking_budget: int | None = None
    routes: bool = False
    documents: bool = False
    summarise_at: int = 0
    summary_tokens: int = 512


class Policy(Protocol):
    """The source of sampled tokens; the engine's client is one."""

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float,
        on_part: Callable[[Generation], None] | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        """Samples one answer; `on_part` is called with its parts as they come. `begun`: what has been sampled of it
        already. TimeoutError after `timeout` seconds."""
        ...


@dataclass(frozen=True)
class EngineModel:
    """A model behind an engine: turns are tokens, which can be trained on."""

    policy: Policy
    renderer: Renderer
    sampling: Sampling

    @property
    def compact(self) -> bool:
        """Whether the model has the tools of the compact dialect, and reads no schemas."""
        return self.renderer.dialect == "compact"

    async def prompt(self, opening: Opening, memory: str = "") -> list[int]:
        """The first tokens of a segment."""
        messages = await opening.messages(memory)
        return self.renderer.prompt(messages, () if self.compact else opening.tools.schemas)

    async def open(self, spec: EpisodeSpec, opening: Opening) -> TurnSource:
        """The source of an episode's turns."""
        prompt = await self.prompt(opening) + self.renderer.plain(opening.prefill)
        return _EngineTurns(self, spec, opening, prompt)

    async def sample(
        self,
        ledger: TokenLedger,
        max_tokens: int,
        seed: int,
        seconds: float,
        session: str | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        cut: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> Generation:
        """Samples a turn after the tokens of a ledger, and appends the turn as `cut` leaves it. `on_tokens` is called
        with the sampled ids as they come. Raises TimeoutError, Aborted or EngineError."""
        prompt, sampling = ledger.prompt(), self.sampling
        request = GenerateRequest(
            ids=prompt,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=tuple(self.renderer.stop_ids),
            seed=seed,
            session=session,
            routes_from=ledger.routed if sampling.routes else None,
            documents=ledger.documents,
            part_seconds=None if on_tokens is None else 0.0,
        )

        def grown(part: Generation) -> None:
            assert on_tokens is not None
            on_tokens(part.ids)

        # The policy has a deadline of its own, and can distinguish a lost engine from a slow one.
        async with asyncio.timeout(seconds + POLICY_GRACE_SECONDS):
            generation = await self.policy.generate(request, seconds, None if on_tokens is None else grown)
        if generation.finish_reason == "abort":
            raise Aborted("the engine aborted a turn")
        generation = cut(generation)
        ledger.add_turn(prompt, generation)
        return generation


@dataclass(frozen=True)
class ChatAPI:
    """A model behind a chat API: turns are messages, which cannot be trained on."""

    client: ChatClient
    compact: ClassVar[bool] = False

    async def open(self, spec: EpisodeSpec, opening: Opening) -> TurnSource:
        """The source of an episode's turns."""
        return _ChatTurns(self.client, spec, opening, await opening.messages(""))


Model = EngineModel | ChatAPI


@dataclass(frozen=True)
class Toolset:
    """The tools of an agent on a repository: the names of the built-in ones, () for all, the applier of the tool
    `apply`, and the functions of the user."""

    names: tuple[str, ...] = ()
    apply_edit: EditApplier = merge_applier
    functions: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True)
class EpisodeSpec:
    """The settings of an episode, without its box. `started` is called when the time of its budget begins."""

    task: Task
    model: Model
    budget: Budget
    seed: int
    toolset: Toolset = Toolset()
    started: Callable[[Tools], None] = lambda tools: None


@dataclass(frozen=True)
class Opening:
    """The beginning of an episode. `messages` are the first messages, with the memory of the work before a summary, ""
    at the start. `prefill`, a tag and a line end, begins the first answer: an engine's model reads it behind the
    prompt; an API's model is told to write it, and may leave it out. `text` is the open file for a model that reads
    documents."""

    tools: Tools
    messages: Callable[[str], Awaitable[list[dict[str, str]]]]
    prefill: str = ""
    text: str | None = None


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
    answer: str = ""  # text of the last turn, without thoughts and calls


def turn_seed(seed: int, turn: int) -> int:
    """A 63-bit seed for one turn, so that a turn can be sampled again without those before it."""
    return int.from_bytes(blake3.blake3(f"{seed}/{turn}".encode()).digest(8)) >> 1


async def run_agent_loop(spec: EpisodeSpec, opening: Opening) -> UngradedEpisode:
    """Plays an episode from its opening. A spent budget ends the episode where it stands. Raises BoxError with payer
    "infra", EngineError or Aborted if the infrastructure failed, and UserError if an API refuses every conversation."""
    source, tools = await spec.model.open(spec, opening), opening.tools
    tools.seed, tools.deadline = spec.seed, time.monotonic() + spec.budget.seconds
    spec.started(tools)
    timed_out, note = False, ""
    try:
        stop_reason = await _play(spec.budget, source, tools)
    except _BudgetSpent as spent:
        stop_reason, note = spent.reason, spent.note
    except TimeoutError:
        stop_reason, timed_out = StopReason.SECONDS, True
    counts = tools.metrics
    metrics = {name: float(counts[name]) for name in dict.fromkeys((*_COUNTS, *counts))} | source.metrics()
    return UngradedEpisode(
        source.segments(),
        tuple(source.turns),
        stop_reason,
        metrics,
        timed_out,
        bool(tools.visible_passed),
        note,
        answer=source.answer(),
    )


async def _play(budget: Budget, source: TurnSource, tools: Tools) -> StopReason:
    """The reason for the end of the episode. Raises _BudgetSpent, and TimeoutError if a tool outlives the time."""
    for _ in range(budget.turns):
        calls = await source.sample()
        sampled = time.monotonic()
        async with asyncio.timeout(tools.deadline - sampled + GRACE_SECONDS):
            tools.room = budget.context - source.length
            results, finished = await tools.call_all(calls)
            ended = time.monotonic()
            source.turns[-1] = msgspec.structs.replace(
                source.turns[-1], calls=tuple(calls), results=tuple(results), seconds_tools=ended - sampled
            )
            if finished or not calls:
                return StopReason.FINISHED if finished or not source.cut else StopReason.TOKENS
            if ended >= tools.deadline:
                return StopReason.SECONDS
            await source.show(calls, results)
    return StopReason.TURNS


class _BudgetSpent(Exception):
    """No turn can be sampled any more; `note` is a sentence for people."""

    def __init__(self, reason: StopReason, note: str = "") -> None:
        self.reason, self.note = reason, note


class _Turns:
    """The model's side of one episode. `turns` are its answers so far, summaries included; the loop adds calls and
    results to the last one. The episode ends at the tools' deadline."""

    def __init__(self, spec: EpisodeSpec, opening: Opening) -> None:
        self.turns: list[Turn] = []
        self._spec = spec
        self._opening = opening
        self._tools = opening.tools
        self.cut = False  # whether the last turn ended at its limit of tokens

    def answer(self) -> str:
        """The text of the last turn, without thoughts and calls."""
        return self.turns[-1].text.strip() if self.turns else ""

    def segments(self) -> tuple[Segment, ...]:
        """The tokens of the episode, if there are any."""
        return ()

    def _seconds(self) -> float:
        """The seconds until the deadline. Raises _BudgetSpent."""
        if (seconds := self._tools.deadline - time.monotonic()) <= 0:
            raise _BudgetSpent(StopReason.SECONDS)
        return seconds

    def _ended(self, cut: bool) -> None:
        self.cut = cut
        self._tools.metrics["truncated"] += cut

    def _add_turn(self, text: str, seconds: float) -> None:
        self.turns.append(Turn(text=text, calls=(), results=(), seconds_model=seconds, seconds_tools=0.0))


class _EngineTurns(_Turns):
    """Turns as tokens on a ledger. `_next` are the tokens that the model reads next: the prompt, or the results of the
    turn before."""

    def __init__(self, model: EngineModel, spec: EpisodeSpec, opening: Opening, prompt: list[int]) -> None:
        super().__init__(spec, opening)
        self._model, self._renderer, self._sampling = model, model.renderer, model.sampling
        budget, text, documents = spec.budget, opening.text, list[list[int]]()
        if (
            text is not None
        ):  # it leaves room for the prompt, for all tokens that may be sampled, and half of the context
            room = min(budget.context // 2, budget.context - budget.tokens - len(prompt))
            documents = open_file(text, spec.task.focus, self._renderer.document, room, shown=model.compact)
        self._documents = tuple(documents)  # the open file
        self._ledger = TokenLedger(self._documents)
        self._next: Sequence[int] = prompt
        self._generation: Generation | None = None  # the last one
        self._acted = 0  # turns without the summaries
        self._summaries = 0
        self._document_tokens: Counter[str] = Counter()  # over all requests: sent, and those already computed
        self._summary_at, self._request_tokens = float("inf"), 0  # tokens: of a segment, and of a request to summarise
        if self._sampling.summarise_at:
            self._request_tokens = len(self._renderer.bridge((), "stop", (), SUMMARISE + AGAIN))
            needed = 2 * (self._request_tokens + self._sampling.summary_tokens)  # two requests and two summaries
            self._summary_at = min(self._sampling.summarise_at, budget.context - needed)

    @property
    def length(self) -> int:
        """The tokens of the context."""
        return len(self._ledger)

    async def sample(self) -> Sequence[ToolCall]:
        """The calls of the next turn. Raises _BudgetSpent, Aborted or EngineError."""
        generation = await self._turn(self._sampling.max_tokens or self._spec.budget.tokens)
        self._acted += 1
        return self._renderer.parse(generation.ids, generation.finish_reason, self._tools.schemas).calls

    async def _turn(self, max_tokens: int) -> Generation:
        """A turn of at most `max_tokens` tokens. What has reached the budget of thoughts is a turn of the ledger: if
        its thought is open, tokens that close the thought follow with mask 0; then comes the rest. Raises _BudgetSpent
        or Aborted."""
        first = min(self._sampling.thinking_budget or max_tokens, max_tokens)
        self._generation = generation = await self._sample(first)
        if generation.finish_reason == "length" and len(generation.ids) == first < max_tokens:
            self._next = closing = self._renderer.end_of_thought(generation.ids)
            try:
                rest = await self._sample(max_tokens - first)
            except _BudgetSpent:
                self._ended(cut=True)
                raise
            self._tools.metrics["thoughts_closed"] += bool(closing)
            text = self.turns[-2].text + self._renderer.text(closing)
            self.turns[-2] = msgspec.structs.replace(self.turns[-2], text=text, continued=True)
            self._generation = generation = msgspec.structs.replace(rest, ids=[*generation.ids, *closing, *rest.ids])
        self._ended(generation.finish_reason == "length")
        return generation

    async def _sample(self, max_tokens: int) -> Generation:
        """Appends `_next` to the ledger, and samples tokens after it. Raises _BudgetSpent or Aborted."""
        ledger, budget = self._ledger, self._spec.budget
        # A result that does not fit stays out: a segment is never longer than the budget.
        if len(ledger) + len(self._next) >= budget.context or ledger.sampled >= budget.tokens:
            raise _BudgetSpent(StopReason.TOKENS)
        ledger.add_environment(self._next)
        started, seconds = time.monotonic(), self._seconds()
        most = min(max_tokens, budget.tokens - ledger.sampled, budget.context - len(ledger))
        try:
            generation = await self._model.sample(ledger, most, turn_seed(self._spec.seed, len(self.turns)), seconds)
        except TimeoutError:
            raise _BudgetSpent(StopReason.SECONDS) from None
        self._document_tokens["document_tokens"] += sum(map(len, ledger.documents))
        self._document_tokens["cached_document_tokens"] += generation.cached_document_tokens
        self._add_turn(self._renderer.text(generation.ids), time.monotonic() - started)
        return generation

    async def show(self, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        """Shows results as text or as documents; a segment that has grown too long is summarised."""
        ledger, budget = self._ledger, self._spec.budget
        self._next = self._after_turn(results)
        if self._acted < budget.turns and len(ledger) + len(self._next) >= self._summary_at:
            await self._summarise(results)
        elif self._sampling.documents:
            focus, known = self._spec.task.focus, ledger.documents
            shown, new = results_as_documents(calls, results, focus, self._renderer.document, known)
            ids = self._after_turn(shown)
            if len(ledger) + sum(map(len, new)) + len(ids) < budget.context:
                self._next = ids
                self._ledger = ledger.continued(new) if new else ledger

    def _after_turn(self, results: Sequence[str], request: str = "") -> list[int]:
        """The tokens between the last turn and the next one."""
        assert self._generation is not None
        return self._renderer.bridge(self._generation.ids, self._generation.finish_reason, results, request)

    async def _summarise(self, results: Sequence[str]) -> None:
        """Requests a summary after the results, and opens a segment with it. Raises _BudgetSpent or Aborted. An empty
        or cut summary is requested once more. Both are kept and trained on, and the agent goes on with the last one, so
        a bad summary costs the agent its memory."""
        most = self._sampling.summary_tokens
        self._next = self._after_turn(results, SUMMARISE)
        if len(self._ledger) + len(self._next) + 2 * most + self._request_tokens >= self._spec.budget.context:
            self._next = self._after_turn([LEFT_OUT] * len(results), SUMMARISE)
        summary = ""
        for last in (False, True):
            answer = await self._turn(most)
            text = self._renderer.parse(answer.ids, answer.finish_reason).text.strip()
            summary = text or summary
            fault = "cut off" if answer.finish_reason == "length" else "" if text else "empty"
            if not fault:
                break
            self._tools.metrics["summary_errors"] += 1
            if not last:
                self._next = self._after_turn((), AGAIN.format(fault=fault) + SUMMARISE)
        self._summaries += 1
        self._ledger = self._ledger.restarted(self._documents)
        memory = MEMORY.format(count=self._summaries, summary=summary or "(nothing)")
        state = self._tools.state()
        self._next = await self._model.prompt(self._opening, f"{memory}\n\n{state}" if state else memory)

    def answer(self) -> str:
        ids = self._generation.ids if self._generation is not None else []
        ended = bool(ids) and ids[-1] in self._renderer.stop_ids
        return self._renderer.parse(ids, "stop" if ended else "length").text.strip()

    def segments(self) -> tuple[Segment, ...]:
        return self._ledger.segments()

    def metrics(self) -> dict[str, float]:
        """Figures of the episode besides the counts of the tools."""
        ledger, sampling, tools = self._ledger, self._sampling, self._tools
        figures = {"turns": float(self._acted)} | ledger_figures([ledger], self.turns)
        if tools.visible_passed is not None:
            figures["visible_passed"] = float(tools.visible_passed)
        if sampling.documents:
            figures["documents"] = float(len(ledger.documents))
            figures |= {name: float(count) for name, count in self._document_tokens.items()}
        if sampling.summarise_at:
            errors = float(tools.metrics["summary_errors"])
            figures |= {"summaries": float(self._summaries), "summary_errors": errors}
        if sampling.documents or sampling.summarise_at:
            figures["segments"] = float(len(ledger.segments()))
        return figures


def ledger_figures(ledgers: Sequence[TokenLedger], turns: Sequence[Turn]) -> dict[str, float]:
    """Figures of an episode on these ledgers, with these turns."""
    return {
        "sampled_tokens": float(sum(ledger.sampled for ledger in ledgers)),
        "context_tokens": float(max(map(len, ledgers), default=0)),
        "kv_lag": float(max((ledger.kv_lag for ledger in ledgers), default=0)),
        "tokens_prefix_property": float(sum(ledger.checks for ledger in ledgers)),
        "seconds_model": sum(turn.seconds_model for turn in turns),
        "seconds_tools": sum(turn.seconds_tools for turn in turns),
    }


class _ChatTurns(_Turns):
    """Turns as messages in an API's form. The API counts the tokens: a turn is bounded by the rest of the budget, and
    the conversation ends once prompt and answer reach the context. Time that busy servers took does not count."""

    def __init__(
        self, client: ChatClient, spec: EpisodeSpec, opening: Opening, messages: Sequence[dict[str, str]]
    ) -> None:
        super().__init__(spec, opening)
        self._client = client
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        self._talk = Conversation(system, [dict(message) for message in messages if message["role"] != "system"])
        if opening.prefill:
            self._talk.messages[-1]["content"] += PREFILL.format(prefill=opening.prefill.strip())
        self._last: ChatAnswer | None = None
        self._counts = Counter[str]()  # tokens over all turns
        self.length = 0  # tokens of prompt and answer of the last turn

    async def sample(self) -> Sequence[ToolCall]:
        budget, tools = self._spec.budget, self._tools
        room = min(budget.tokens - self._counts["sampled_tokens"], budget.context - self.length)
        if room <= 0:
            raise _BudgetSpent(StopReason.TOKENS)
        started, seconds = time.monotonic(), self._seconds()
        seed = turn_seed(self._spec.seed, len(self.turns))
        try:
            answer = await self._client.answer(self._talk, tools.schemas, room, seed, seconds)
        except TimeoutError:
            raise _BudgetSpent(StopReason.SECONDS) from None
        except ContextSpent:
            raise _BudgetSpent(StopReason.TOKENS) from None
        except ConversationRefused as e:
            raise _BudgetSpent(StopReason.REFUSED, f"the API refused the conversation: {e}") from None
        tools.deadline += answer.waited
        usage, self._last = answer.usage, answer
        self._counts.update(prompt_tokens=usage.prompt, cached_tokens=usage.cached, sampled_tokens=usage.sampled)
        self.length = usage.prompt + usage.sampled
        text, tag = answer.text, self._opening.prefill.rstrip("\n")
        if tag and tag in text and not self.turns:  # the prefill is no part of the answer
            text = text.partition(tag)[2].removeprefix("\n")
        self._add_turn(text, time.monotonic() - started - answer.waited)
        self._ended(answer.cut)
        return answer.calls

    async def show(self, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        assert self._last is not None
        self._talk.messages += [self._last.message, *self._client.format.results(self._last, results)]

    def metrics(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()} | {"turns": float(len(self.turns))}


TurnSource = _EngineTurns | _ChatTurns
