"""Answers while they are sampled: tokens become text, and stop strings end the answer."""

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
from etude.protocol.apis import RequestRefused, SampledTurn, failed, stop_overlap
from etude.records import Generation

_SETTLE_SECONDS = 1.0  # wait for the end of a choice cut by a stop string, for its usage figures


class Detokenizer:
    """Text of a growing sequence of ids, in linear time. New ids are decoded behind earlier ones, because some
    tokenizers decode a token differently at the start of a text. `text` ends with a complete character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []  # the last decoded ids, which begin with a character, and new ones
        self._in_text = 0  # the number of `_ids` that are in the text
        self.text = ""

    def add(self, ids: Iterable[int], final: bool = False) -> str:
        """The text of further ids, "" within a character; `final` also returns the text of incomplete characters."""
        self._ids += ids
        before, whole = self._decode(self._ids[: self._in_text]), self._decode(self._ids)
        added = whole[len(before) :]
        if added.endswith("\ufffd") and not final:
            return ""  # an incomplete character
        self._ids = self._ids[self._in_text :] or self._ids
        self._in_text = len(self._ids)
        self.text += added
        return added

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class EngineEnded(RuntimeError):
    """The engine ended while it computed an answer."""


class Choice:
    """One growing answer; the constructor submits `request`. `text` may be shown: it has no stop string and no
    incomplete character. Without a detokenizer it is empty. Raises ValueError or RuntimeError."""

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
        self.sequence = engine.submit(request, lambda *sampled: call_on(loop, put, sampled))
        self.sequence.future.add_done_callback(lambda _: call_on(loop, put, None))

    @property
    def tops(self) -> list[TopLogprobs]:
        """The most probable tokens at each of `ids`; empty unless requested."""
        return self.sequence.top_logprobs[: len(self.ids)]

    async def grow(self) -> AsyncIterator[str]:
        """Yields the text of further ids, which may be empty. Sets `reason` at the end; a stop string ends the sequence
        early. Raises RequestFailed or RuntimeError."""
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
            held = max((stop_overlap(text[-len(stop) :], stop) for stop in self._stops), default=0)
            yield self._show(len(text) - held)
        self.reason = self._generation().finish_reason
        self._read([], final=True)
        yield self._show(len(self._whole))

    def _generation(self) -> Generation:
        """The ended sequence's generation. Raises RequestFailed or EngineEnded."""
        error = self.sequence.future.exception()
        if error is not None and not isinstance(error, RequestFailed):
            raise EngineEnded(str(error) or type(error).__name__) from error
        return self.sequence.future.result()

    @property
    def _whole(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""

    def _read(self, ids: list[int], final: bool = False) -> int | None:
        """Decodes further tokens. Returns the place where a stop string cuts the text, or None."""
        if self._detokenizer is None or (ids and ids[-1] in self.sequence.request.stop):
            return None
        before = len(self._whole)
        if not self._detokenizer.add(ids, final):
            return None
        text, cuts = self._whole, []
        for stop in self._stops:
            at = text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                cuts.append((at, at + len(stop) if self._keep_stop else at))
        return min(cuts)[1] if cuts else None

    def _show(self, end: int) -> str:
        """The new text up to `end`. The end of the text may be the start of a stop string, which must not be shown."""
        added = self._whole[len(self.text) : end]
        self.text += added
        return added

    async def settled(self) -> Generation:
        """The ended answer as a generation, without the tokens after a cut."""
        await asyncio.wait([asyncio.wrap_future(self.sequence.future)], timeout=_SETTLE_SECONDS)
        count, future = len(self.ids), self.sequence.future
        whole = self._generation() if future.done() else None
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
                turn.refuse(RequestRefused("lost", "the server was paused and ended its running requests"))
            else:
                turn.settle(await self.settled())
        except RequestFailed as e:
            turn.refuse(RequestRefused(e.kind, str(e)))
        except EngineEnded as e:
            turn.refuse(RequestRefused("lost", str(e)))
        finally:
            self.sequence.abort()


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Runs `call` on an event loop, from the engine's thread; does nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


async def drained(http: HTTPRequest, choices: Sequence[Choice]) -> list[Generation]:
    """The generations of all choices; aborts them if the client disconnects. Raises RequestFailed, EngineEnded or
    RequestRefused."""

    async def drain(choice: Choice) -> Generation:
        try:
            async for _ in choice.grow():
                pass
            return await choice.settled()
        except (EngineEnded, RequestFailed):
            raise
        except Exception as e:
            raise failed(e) from e

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
        work.cancel()  # if this request itself was cancelled
        for choice in choices:  # the others, if one failed
            choice.sequence.abort()
