"""A turn of the model, during sampling and complete: thoughts, text and calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from etude.protocol.apis.conversation import RequestRefused
from etude.records import Generation
from etude.renderers import ParsedTurn, Renderer, Tool, content_text

Event = tuple[Literal["reasoning", "text", "call"], Any]  # a piece of text, or a call of the chat format
T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_PARSES = 128  # of the same token at most, so that a stream takes linear time


class SampledTurn:
    """One turn of the model, which can be read during sampling. Its text ends before the first of the texts `stops`;
    `tools` are those of the prompt."""

    def __init__(
        self, renderer: Renderer, prompt_tokens: int, stops: tuple[str, ...] = (), tools: Sequence[Tool] = ()
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.stops = stops
        self.stop: str | None = None  # the text of `stops` that ended the turn
        self.ids: list[int] = []
        self.generation: Generation | None = None
        self.message: dict[str, Any] = {}  # in OpenAI's chat format, once the turn is complete
        self.parsed = ParsedTurn("", ())
        self.malformed = 0  # calls that the dialect could not read, but for what a stop text cut
        self.refusal: RequestRefused | None = None
        self.name = secrets.token_hex(12)  # part of the ids in answers, the same in all answers with this turn
        self.most_calls: int | None = None
        self._renderer = renderer
        self._tools = tools
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether the turn is complete or refused."""
        return self.generation is not None or self.refusal is not None

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls."""
        assert self.generation is not None
        return "tool_calls" if self.message.get("tool_calls") else self.generation.finish_reason

    @property
    def text(self) -> str:
        """The text of the whole turn, without thoughts and calls."""
        return content_text(self.message)

    def grow(self, ids: list[int]) -> None:
        """Appends sampled ids."""
        self.ids += ids
        self._wake()

    def settle(self, generation: Generation) -> None:
        """Completes the turn."""
        self.ids = generation.ids
        text = self._renderer.text(self.ids) if self.stops else ""
        self.stop = next((stop for stop in self.stops if stop in text), None)
        # What a stop text cut is no call, though the generation says "stop".
        self.parsed = self._parsed("length" if self.stop else generation.finish_reason)
        shown = self.parsed
        if self.stop is not None:
            calls = tuple(call for call in shown.calls if call.arguments is not None)
            shown = ParsedTurn(self._before_stop(shown.text), calls, shown.reasoning)
        self.malformed = sum(call.arguments is None for call in shown.calls)
        self.message = shown.openai(f"call_{self.name}_")
        if self.most_calls is not None and "tool_calls" in self.message:
            self.message["tool_calls"] = self.message["tool_calls"][: self.most_calls]
        self.generation = generation
        self._wake()

    def _parsed(self, finish_reason: str) -> ParsedTurn:
        return self._renderer.parse(self.ids, finish_reason, self._tools)

    def refuse(self, refusal: RequestRefused) -> None:
        """Ends the turn with a refusal."""
        self.refusal = refusal
        self._wake()

    def sampling(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The task that samples this turn. However it ends, so does the turn, and nobody waits for it any longer."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._sampled)
        return task

    def _sampled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
        if not self.done:
            self.refuse(RequestRefused("lost", "the answer was ended"))

    def fail(self, error: BaseException) -> RequestRefused:
        """Ends the turn with a failure that is not its request's, which is logged. Returns its refusal."""
        refusal = failed(error)
        self.refuse(refusal)
        return refusal

    async def whole(self) -> None:
        """Waits until the turn is complete. Raises RequestRefused for a refused turn."""
        while not self.done:
            await self._changed.wait()
        if self.refusal is not None:
            raise self.refusal

    async def events(self) -> AsyncIterator[Event]:
        """The turn as it is sampled: thoughts and text in pieces, then each call as a whole. Raises RequestRefused."""
        thought = shown = ""
        read = 0
        while not self.done:
            changed = self._changed
            if len(self.ids) - read > len(self.ids) // _PARSES:
                read = len(self.ids)
                parsed = self._parsed("length")
                if _extends(parsed.reasoning, thought) and not shown:
                    yield "reasoning", parsed.reasoning[len(thought) :]
                    thought = parsed.reasoning
                # Without what may be half of a character, or the beginning of a stop string.
                text = self._before_stop(parsed.text.rstrip("\ufffd"))
                text = text[: len(text) - max((stop_overlap(text, stop) for stop in self.stops), default=0)]
                if _extends(text, shown) and not parsed.calls:
                    yield "text", text[len(shown) :]
                    shown = text
            await changed.wait()
        await self.whole()
        if _extends(self.parsed.reasoning, thought) and not shown:
            yield "reasoning", self.parsed.reasoning[len(thought) :]
        if _extends(self.text, shown):
            yield "text", self.text[len(shown) :]
        for call in self.message.get("tool_calls", ()):
            yield "call", call

    def _before_stop(self, text: str) -> str:
        return text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def failed(error: BaseException) -> RequestRefused:
    """The refusal that answers a request after a failure that is not its own. The failure is logged."""
    _LOG.error("a request failed between sampling and answering", exc_info=error)
    return RequestRefused("failed", f"the answer failed in this server ({type(error).__name__}): see its log")


@contextmanager
def answering(turns: Sequence[SampledTurn] = ()) -> Iterator[None]:
    """Raises RequestRefused for every failure in writing an answer; its turns fail with it."""
    try:
        yield
    except RequestRefused:
        raise
    except Exception as e:
        raise next((turn.fail(e) for turn in turns), None) or failed(e) from e


async def answered_lines(
    turns: Sequence[SampledTurn], lines: AsyncIterator[bytes], refused: Callable[[RequestRefused], bytes]
) -> AsyncIterator[bytes]:
    """The lines of a stream. Whatever goes wrong is its last line, in the shape of the API."""
    try:
        with answering(turns):
            async for line in lines:
                yield line
    except RequestRefused as e:
        yield refused(e)


async def merge_streams(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T | None]]:
    """The items of several streams as they come, each with the number of its stream; None at the end of a stream. An
    exception of a stream is raised."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        yield 0, None
        return
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item, None))
            queue.put_nowait((number, None, None))
        except (Exception, asyncio.CancelledError) as e:  # nobody else would say that the stream has ended
            queue.put_nowait((number, None, e if isinstance(e, Exception) else RuntimeError("a stream was cancelled")))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            left -= item is None
            yield number, item
    finally:
        for task in tasks:
            task.cancel()


def _extends(text: str, before: str) -> bool:
    return len(text) > len(before) and text.startswith(before)


def stop_overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, `stop` as a whole excluded."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
