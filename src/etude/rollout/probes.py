"""Canaries: fixed sequences that every engine scores after each weight swap, and the trainer too.

    controller   makes them once, asks every engine that serves a new version, on the side, and stores the answers
    trainer      scores them under each version that it publishes, and judges at every step what has arrived by then

Nobody waits for anybody: an engine that does not answer leaves a version unmeasured, and that is all. The store holds
`sequences.msgpack`, the same for a run and its continuations, and `VERSION/ENGINE.msgpack` for each answer until the
trainer has taken it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from etude.errors import UserError
from etude.protocol.client import EngineClient, EngineError
from etude.protocol.wire import SequenceScores
from etude.records import Record, Task, decode, encode
from etude.renderers import Renderer
from etude.store import ObjectMissing, Store

TOKENS = 256  # of a sequence, at most
SECONDS = 120.0  # for an engine to answer
KEPT = 16  # versions whose answers may still come
_SEQUENCES = "sequences.msgpack"


class Sequences(Record, frozen=True, kw_only=True):
    """What is scored."""

    ids: tuple[list[int], ...]


class ProbeResult(Record, frozen=True, kw_only=True):
    """What one engine, named by its URL, said of the sequences."""

    engine: str
    scored: SequenceScores


def make(tasks: Sequence[Task], renderer: Renderer, count: int, length: int) -> Sequences:
    """`count` sequences of at most `length` tokens: how as many tasks, spread over all of them, are put to the agent,
    with the file from the broken function on. Fewer if there are fewer tasks. They follow from the arguments alone."""
    chosen = [tasks[i * len(tasks) // count] for i in range(count)] if len(tasks) > count else tasks
    return Sequences(ids=tuple(renderer.prompt([{"role": "user", "content": _text(t)}])[:length] for t in chosen))


def _text(task: Task) -> str:
    lines = task.changes.get(task.focus.path, "").splitlines()
    return "\n".join([task.instruction, *lines[task.focus.first_line - 1 :]])


def begin(store: Store, sequences: Sequences) -> None:
    """Stores the sequences, and forgets the answers of engines that an earlier start of the run had."""
    for key in store.list():
        store.delete(key)
    if sequences.ids:
        store.put(_SEQUENCES, encode(sequences))


def read_sequences(store: Store) -> tuple[list[int], ...]:
    """The sequences of the run; none if canaries are off."""
    try:
        return decode(store.get(_SEQUENCES), Sequences).ids
    except ObjectMissing:
        return ()


def write_answer(store: Store, number: int, answer: ProbeResult) -> None:
    """Stores what the engine with this number said."""
    store.put(f"{answer.scored.version:08d}/{number:04d}.msgpack", encode(answer))


def take_answers(store: Store) -> list[ProbeResult]:
    """The answers that have come since the last call; they are removed."""
    keys = [key for key in store.list() if key != _SEQUENCES]
    found = [decode(store.get(key), ProbeResult) for key in keys]
    for key in keys:
        store.delete(key)
    return found


class ProbeScorer:
    """Asks engines for their scores, each once per version and one question at a time. Never raises, never waits."""

    def __init__(self, store: Store, sequences: Sequences, client: EngineClient, engines: Sequence[str]) -> None:
        self._store, self._ids, self._client = store, sequences.ids, client
        self._numbers = {url: number for number, url in enumerate(engines)}
        self._done: dict[str, int] = {}  # version that an engine was last asked about
        self._asking: dict[str, asyncio.Task[None]] = {}

    def served(self, url: str, version: int) -> None:
        """An engine was seen to serve this version: it is asked, unless it was before or is being asked."""
        task = self._asking.get(url)
        if self._ids and self._done.get(url, -1) < version and (task is None or task.done()):
            self._asking[url] = asyncio.create_task(self._ask(url, version))

    async def aclose(self) -> None:
        """Gives up what is being asked."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, url: str, version: int) -> None:
        try:
            scored = await self._client.score(url, self._ids, SECONDS)
            if scored is None:  # another version came while it scored: that one is asked about
                return
            version = scored.version
            answer = ProbeResult(engine=url, scored=scored)
            await asyncio.to_thread(write_answer, self._store, self._numbers[url], answer)
        except (EngineError, TimeoutError, UserError) as e:
            print(f"canaries of version {version} were not measured at {url}: {e}", file=sys.stderr, flush=True)
        self._done[url] = version
