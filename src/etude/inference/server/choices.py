"""Answers while they are sampled: tokens become text, and stop strings end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
from starlette.requests import Request as HTTPRequest
from tokenizers import Tokenizer

from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request, RequestFailed
from etude.inference.engine.sampling_params import TopLogprobs
from etude.protocol.apis.conversation import RequestRefused
from etude.protocol.apis.turn import SampledTurn, overlap
from etude.records import Generation

_SETTLE_SECONDS = 1.0  # how long a choice cut by a stop string may take to end, for its usage figures


class Detokenizer:
    """Text of a growing sequence of ids, in linear time: new ids are decoded behind those that came before, because
    some tokenizers write a token otherwise at the start of a text. `text` holds no half of a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []  # new ones, behind those that last became text, which begin with a character
        self._told = 0  # how many of them are in the text
        self.text = ""

    def add(self, ids: Iterable[int], final: bool = False) -> str:
        """The text that comes with further ids; with `final`, also of bytes that are no character."""
        self._ids += ids
        before, whole = self._decode(self._ids[: self._told]), self._decode(self._ids)
        added = whole[len(before) :]
        if added.endswith("\ufffd") and not final:
            return ""  # half of a character until its other bytes come
        self._ids = self._ids[self._told :] or self._ids
        self._told = len(self._ids)
        self.text += added
        return added

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class Choice:
    """One answer while it grows. `text` may be shown: it holds no stop string and no half of a character; without a
    detokenizer it stays empty, unless there are stop strings. Submits `request`. Raises ValueError or RuntimeError."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        detokenizer: Detokenizer | None,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
    ) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.reason = ""
        self._detokenizer, self._stops, self._keep_stop = detokenizer, stops, keep_stop
        self._events: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()
        loop, put = asyncio.get_running_loop(), self._events.put_nowait
        self.sequence = engine.submit(request, lambda *sampled: tell(loop, put, sampled))
        self.sequence.future.add_done_callback(lambda _: tell(loop, put, None))

    @property
    def tops(self) -> list[TopLogprobs]:
        """The most probable tokens beside each of `ids`; empty if they were not asked for."""
        return self.sequence.top_logprobs[: len(self.ids)]

    async def grow(self) -> AsyncIterator[str]:
        """Yields the text that comes with further ids, maybe none. Ends with `reason` set; a stop string ends the
        sequence early. Raises RequestFailed or RuntimeError."""
        while True:
            event = await self._events.get()
            while event is not None:
                self.ids.append(event[0])
                self.logprobs.append(event[1])
                if (cut := self._read([event[0]])) is not None:
                    self.sequence.abort()
                    self.reason = "stop"
                    yield self._show(cut)
                    return
                if self._events.empty():
                    break
                event = self._events.get_nowait()
            if event is None:
                break
            text = self._whole
            held = max((overlap(text[-len(stop) :], stop) for stop in self._stops), default=0)
            yield self._show(len(text) - held)
        self.reason = self.sequence.future.result().finish_reason
        self._read([], final=True)
        yield self._show(len(self._whole))

    @property
    def _whole(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""

    def _read(self, ids: list[int], final: bool = False) -> int | None:
        """Decodes a further token; where the text is cut by a stop string, if it is."""
        if self._detokenizer is None or (ids and ids[-1] in self.sequence.request.stop):
            return None
        before = len(self._whole)
        if not self._detokenizer.add(ids, final):
            return None
        text, found = self._whole, []
        for stop in self._stops:
            at = text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at, at + len(stop) if self._keep_stop else at))
        return min(found)[1] if found else None

    def _show(self, end: int) -> str:
        """The text up to `end` beyond what was shown. The end of a text may be the start of a stop string, which must
        never be shown."""
        added = self._whole[len(self.text) : end]
        self.text += added
        return added

    async def settled(self) -> Generation:
        """The answer as a generation, once it has ended: what was cut off is not in it."""
        await asyncio.wait([asyncio.wrap_future(self.sequence.future)], timeout=_SETTLE_SECONDS)
        count, future = len(self.ids), self.sequence.future
        whole = future.result() if future.done() else None
        if whole is None:
            versions = [0] * count
            return Generation(ids=self.ids, logprobs=self.logprobs, versions=versions, finish_reason=self.reason)
        return msgspec.structs.replace(
            whole, ids=self.ids, logprobs=self.logprobs, versions=whole.versions[:count], finish_reason=self.reason
        )

    async def play(self, turn: SampledTurn) -> None:
        """Samples the turn to its end."""
        try:
            shown = 0
            async for _ in self.grow():
                turn.grow(self.ids[shown:])
                shown = len(self.ids)
            if self.reason == "abort":
                turn.refuse(RequestRefused("lost", "the server was told to end its running requests"))
            else:
                turn.settle(await self.settled())
        except RequestFailed as e:
            turn.refuse(RequestRefused("failed", str(e)))
        except RuntimeError as e:
            turn.refuse(RequestRefused("lost", str(e)))
        finally:
            self.sequence.abort()


def tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *words: object) -> None:
    """Calls from the engine's thread what lives on an event loop; a loop that was closed since has no one to tell."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *words)


async def drained(http: HTTPRequest, choices: Sequence[Choice]) -> list[Generation]:
    """Runs all choices to their end; aborts them if the client goes away. Raises RequestFailed or RuntimeError."""

    async def drain(choice: Choice) -> Generation:
        async for _ in choice.grow():
            pass
        return await choice.settled()

    work = asyncio.gather(*map(drain, choices))
    gone = asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            for choice in choices:
                choice.sequence.abort()
        return await work
    finally:
        gone.cancel()
        work.cancel()  # where this request was cancelled itself
        for choice in choices:  # those beside one that failed
            choice.sequence.abort()
