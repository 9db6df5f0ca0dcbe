"""Logprob probes: fixed sequences that every engine scores after each weight swap, and the trainer as well.

    controller   makes the sequences once, requests scores of every engine that serves a new version, and stores these;
                 engines decode the end of each sequence as they decode episodes
    trainer      scores the sequences under each version that it publishes; at every step it compares the scores of the
                 engines that have arrived with its own

No process waits for another: an engine that does not answer leaves a version without a measurement. The store holds
`sequences.msgpack`, the same for a run and its continuations, and `VERSION/ENGINE.msgpack` for each result until the
trainer has taken it.
"""

import asyncio
import sys
from collections.abc import Sequence

from etude.errors import UserError
from etude.protocol import SequenceScores
from etude.protocol.backends import EngineClient, EngineError
from etude.records import Record, Task, decode, encode
from etude.renderers import Renderer
from etude.store import ObjectMissing, Store

PROBE_TOKENS = 256  # of a sequence, at most
SECONDS = 120.0  # for an engine to answer
PROBES_KEPT = 16  # versions whose results may still come
_SEQUENCES = "sequences.msgpack"


class ProbeSequences(Record, frozen=True, kw_only=True):
    """The sequences that are scored, as token ids."""

    ids: tuple[list[int], ...]


class ProbeResult(Record, frozen=True, kw_only=True):
    """The scores of one engine, named by its URL."""

    engine: str
    scored: SequenceScores


def make_probe_sequences(tasks: Sequence[Task], renderer: Renderer, count: int, length: int) -> ProbeSequences:
    """`count` sequences of at most `length` tokens, or one per task if there are fewer; a function of the arguments. A
    sequence is the text of a task; the tasks are spread over all."""
    chosen = [tasks[i * len(tasks) // count] for i in range(count)] if len(tasks) > count else tasks
    ids: list[list[int]] = []
    for task in chosen:
        ids.append(renderer.prompt([{"role": "user", "content": task.text}])[:length])
    return ProbeSequences(ids=tuple(ids))


def reset_probes(store: Store, sequences: ProbeSequences) -> None:
    """Stores the sequences, and deletes the results of engines of an earlier attempt of the run."""
    for key in store.list():
        store.delete(key)
    if sequences.ids:
        store.put(_SEQUENCES, encode(sequences))


def read_probe_sequences(store: Store) -> tuple[list[int], ...]:
    """The sequences of the run; () if probes are off."""
    try:
        return decode(store.get(_SEQUENCES), ProbeSequences).ids
    except ObjectMissing:
        return ()


def write_result(store: Store, number: int, result: ProbeResult) -> None:
    """Stores the result of engine number `number`."""
    store.put(f"{result.scored.version:08d}/{number:04d}.msgpack", encode(result))


def take_probe_results(store: Store) -> list[ProbeResult]:
    """The results that have arrived since the last call; they are deleted from the store."""
    keys = [key for key in store.list() if key != _SEQUENCES]
    results = [decode(store.get(key), ProbeResult) for key in keys]
    for key in keys:
        store.delete(key)
    return results


class ProbeScorer:
    """Requests scores of engines in the background: once per engine and version, one at a time. Never raises."""

    def __init__(self, store: Store, sequences: ProbeSequences, client: EngineClient) -> None:
        self._store, self._ids, self._client = store, sequences.ids, client
        self._numbers: dict[str, int] = {}  # of engines, in the order in which they came
        self._done: dict[str, int] = {}  # version of an engine's last request
        self._asking: dict[str, asyncio.Task[None]] = {}

    def served(self, url: str, version: int) -> None:
        """Requests scores of an engine that now serves `version`, unless that was done or a request is under way."""
        self._numbers.setdefault(url, len(self._numbers))
        task = self._asking.get(url)
        if self._ids and self._done.get(url, -1) < version and (task is None or task.done()):
            self._asking[url] = asyncio.create_task(self._ask(url, version))

    async def aclose(self) -> None:
        """Cancels the requests under way."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, url: str, version: int) -> None:
        try:
            scored = await self._client.score(url, self._ids, SECONDS, decoded=True)
            if scored is None:  # another version was swapped in meanwhile: the next call of `served` repeats it
                return
            version = scored.version
            result = ProbeResult(engine=url, scored=scored)
            await asyncio.to_thread(write_result, self._store, self._numbers[url], result)
        except (EngineError, TimeoutError, UserError) as e:
            why = str(e) or f"no answer within {SECONDS:.0f} s"
            what = f"the logprob probes of version {version} were not scored at {url}: {why}"
            print(what, file=sys.stderr, flush=True)
        self._done[url] = version
