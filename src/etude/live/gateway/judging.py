"""The judge of follow-ups: a model behind an URL, asked by a thread of its own, long after the answer has gone out.

Texts are scrubbed before they leave. A follow-up that the judge does not answer for (its server is away, its answer is
no verdict, too many wait) has no signal: it is counted, and neither good nor bad.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from etude.config.live import JudgeConfig
from etude.errors import UserError
from etude.live.gateway.entries import SignalEntry
from etude.live.log.followups import (
    ANSWER_TOKENS,
    SYSTEM,
    WORDS,
    FollowUp,
    ReaderAgreement,
    agreement,
    by_words,
    examples,
    question_of,
    reader_of,
    verdict_of,
    write_agreement,
)
from etude.live.log.scrub import Scrubber
from etude.protocol.backends import ChatClient, ChatModel, Conversation, ConversationRefused, EngineError

_MOST = 1000  # follow-ups that wait
_AT_ONCE = 8
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class UnreadFollowUp:
    """A signal FOLLOWUP whose value is not known yet, and the texts to read."""

    entry: SignalEntry
    followup: FollowUp


def judge_client(config: JudgeConfig) -> ChatClient:
    """The client of a judge. Raises UserError if its key is not in the environment."""
    key = os.environ.get(config.key_variable) if config.key_variable else None
    if config.key_variable and not key:
        raise UserError(f"the judge's key is not in ${config.key_variable}: set it, or judge.key_variable to another")
    return ChatClient(ChatModel(config.url, config.model, config.api, temperature=0.0), key, config.seconds)


async def judged(client: ChatClient, followup: FollowUp, seconds: float) -> float | None:
    """The probability of dissatisfaction; None if the judge gives none within `seconds`."""
    talk = Conversation(SYSTEM, [{"role": "user", "content": question_of(followup)}])
    try:
        async with asyncio.timeout(seconds):
            answer = await client.answer(talk, (), ANSWER_TOKENS, 0, seconds)
    except (TimeoutError, EngineError, ConversationRefused, UserError):
        return None
    return verdict_of(answer.text)


def calibrated(config: JudgeConfig | None, folder: Path) -> list[ReaderAgreement]:
    """The agreement of the word list, and of a judge, with the labelled examples; the judge's is kept in the folder.
    Raises UserError if it answers for none of them."""
    words = agreement(WORDS, by_words)
    if config is None:
        return [words]
    values = asyncio.run(_verdicts(config))
    if all(value is None for value in values.values()):
        raise UserError(f"the judge {config.model} at {config.url} gave no verdict: check its url, model and key")
    judge = agreement(reader_of(config), values.get)
    write_agreement(folder, judge)
    return [words, judge]


async def _verdicts(config: JudgeConfig) -> dict[FollowUp, float | None]:
    gate, followups = asyncio.Semaphore(_AT_ONCE), [each.followup for each in examples()]
    async with judge_client(config) as client:

        async def one(followup: FollowUp) -> float | None:
            async with gate:
                return await judged(client, followup, config.seconds)

        return dict(zip(followups, await asyncio.gather(*map(one, followups)), strict=True))


class FollowUpJudge:
    """The judge of a gateway. `submit` queues a signal that has its value; any thread may call `read`."""

    def __init__(self, config: JudgeConfig, submit: Callable[[list[SignalEntry]], object]) -> None:
        self.counts = Counter[str]()
        """Follow-ups that were `judged`, that `failed`, and that found too many before them (`busy`)."""
        self._config = config
        self._submit = submit
        self._client = judge_client(config)
        self._scrubber = Scrubber()
        self._scrubbing = threading.Lock()
        self._waiting = 0
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()

    def read(self, unread: UnreadFollowUp) -> None:
        """Has a follow-up judged. Never waits, and never raises."""
        with self._lock:
            if self._waiting >= _MOST:
                self.counts["busy"] += 1
                return
            self._waiting += 1
        self._run(self._judge(unread))

    def close(self) -> None:
        """Waits for open verdicts, at most five seconds, and ends the thread."""
        with suppress(TimeoutError):
            self._run(self._end()).result(_CLOSE_SECONDS + 1)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._scrubber.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _judge(self, unread: UnreadFollowUp) -> None:
        value = None
        try:
            async with self._gate:
                followup = await asyncio.to_thread(self._scrubbed, unread.followup)
                value = await judged(self._client, followup, self._config.seconds)
        except Exception as e:  # no failure of a judge may reach the gateway
            if not self.counts["failed"]:
                print(f"etude live: the judge failed ({type(e).__name__})", file=sys.stderr, flush=True)
        finally:
            with self._lock:
                self._waiting -= 1
            self.counts["failed" if value is None else "judged"] += 1
        if value is not None:
            signal = msgspec.structs.replace(unread.entry.signal, value=value, reader=reader_of(self._config))
            self._submit([replace(unread.entry, signal=signal)])

    def _scrubbed(self, followup: FollowUp) -> FollowUp:
        texts = [msgspec.json.encode(text) for text in (followup.request, followup.answer, followup.message)]
        with self._scrubbing:
            cleaned, _ = self._scrubber.scrub(*texts)
        return FollowUp(*(msgspec.json.decode(text, type=str) for text in cleaned))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_CLOSE_SECONDS)
        await self._client.__aexit__()
