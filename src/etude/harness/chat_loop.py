"""The agent loop over a chat API: the same task, tools and budgets as `loop.py`, without tokens.

The API counts the tokens: a turn is bounded by the rest of the budget, and the conversation ends once prompt and
answer reach the context. Time that busy servers took does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from etude.harness.edit_appliers import EditApplier, merge_applier
from etude.harness.full_tools import FullTools
from etude.harness.loop import GRACE_SECONDS, UngradedEpisode, turn_seed
from etude.harness.prompts import messages_of
from etude.protocol.backends import ChatAnswer, ChatClient, ContextSpent, Conversation
from etude.records import Budget, StopReason, Task, Turn
from etude.sandbox import Box

_COUNTS = ("edits", "edit_errors", "repeats", "tests_run", "tests_failed", "undo", "malformed", "truncated")


async def run_chat_loop(
    task: Task,
    box: Box,
    client: ChatClient,
    budget: Budget,
    seed: int,
    apply_edit: EditApplier = merge_applier,
    names: Sequence[str] = (),
) -> UngradedEpisode:
    """Plays a task in `box`, with the tools of these names, or all. A spent budget ends the episode where it stands.
    Raises BoxError with payer "infra", EngineError if the API is lost, and UserError if it refuses."""
    return await _ChatLoop(task, client, budget, seed, FullTools(box, task, apply_edit, names)).run()


class _ChatLoop:
    """One episode in progress."""

    def __init__(self, task: Task, client: ChatClient, budget: Budget, seed: int, tools: FullTools) -> None:
        system, user = messages_of(task)
        self._client, self._budget, self._seed = client, budget, seed
        self._tools = tools
        self._talk = Conversation(system["content"], [{"role": "user", "content": user["content"]}])
        self._turns: list[Turn] = []
        self._counts = Counter[str]()  # tokens over all turns
        self._length = 0  # of prompt and answer of the last turn
        self._deadline = self._tools.deadline = time.monotonic() + budget.seconds

    async def run(self) -> UngradedEpisode:
        """Plays to the end."""
        timed_out = False
        try:
            stop_reason = await self._play()
        except TimeoutError:
            stop_reason, timed_out = StopReason.SECONDS, True
        metrics = {name: float(self._tools.metrics.get(name, 0)) for name in _COUNTS}
        metrics |= {name: float(count) for name, count in sorted(self._tools.metrics.items())}
        metrics |= {name: float(count) for name, count in self._counts.items()} | {"turns": float(len(self._turns))}
        passed = bool(self._tools.visible_passed)
        return UngradedEpisode((), tuple(self._turns), stop_reason, metrics, timed_out, passed)

    async def _play(self) -> StopReason:
        """Plays the turns; returns why the episode ended. Raises TimeoutError if a tool outlives the time."""
        while len(self._turns) < self._budget.turns:
            left = self._budget.tokens - self._counts["sampled_tokens"]
            room = min(left, self._budget.context - self._length)
            if room <= 0:
                return StopReason.TOKENS
            started = time.monotonic()
            if started >= self._deadline:
                return StopReason.SECONDS
            seed = turn_seed(self._seed, len(self._turns))
            try:
                answer = await self._client.answer(
                    self._talk, self._tools.schemas, room, seed, self._deadline - started
                )
            except TimeoutError:
                return StopReason.SECONDS
            except ContextSpent:
                return StopReason.TOKENS
            self._deadline += answer.waited
            self._tools.deadline = self._deadline
            if not await self._act(answer, time.monotonic() - started - answer.waited):
                return StopReason.FINISHED
        return StopReason.TURNS

    async def _act(self, answer: ChatAnswer, seconds: float) -> bool:
        """Runs the calls of a turn; returns whether the conversation goes on."""
        usage = answer.usage
        self._counts.update(prompt_tokens=usage.prompt, cached_tokens=usage.cached, sampled_tokens=usage.sampled)
        self._length = usage.prompt + usage.sampled
        self._tools.room = self._budget.context - self._length
        self._tools.metrics["truncated"] += answer.cut
        began = time.monotonic()
        async with asyncio.timeout(max(0.0, self._deadline - began) + GRACE_SECONDS):
            results, finished = await self._tools.call_all(answer.calls)
        turn = Turn(
            text=answer.text,
            calls=answer.calls,
            results=tuple(results),
            seconds_model=seconds,
            seconds_tools=time.monotonic() - began,
        )
        self._turns.append(turn)
        if finished or not answer.calls:
            return False
        self._talk.messages.append(answer.message)
        self._talk.messages += self._client.format.results(answer, results)
        return True
