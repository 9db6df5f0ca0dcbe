"""The journal of an episode: its tokens and the results of its commands, kept in the store while it is played.

After a kill an episode goes on: the agent loop runs again from the beginning, its policy returns the recorded tokens,
and its box the recorded results (`journal_seams.py`). What is between the two, prompts and file operations of our own
tools, repeats itself: every request is compared with the recorded one.

A journal is numbered pieces; the last one is written again with more entries until it is long. Each attempt at the
episode writes its own. The first piece names the attempt that it goes on from and the number of that one's entries, so
a player that was taken for dead and still writes changes nothing for those after it. Entries are written in their
order: what lasts is always the beginning of what happened.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import blake3
import msgspec

from etude.errors import UserError
from etude.harness import Tools
from etude.protocol import GenerateRequest
from etude.records import Generation, Record, Routes
from etude.sandbox import LeftState
from etude.sandbox.egress import EgressRequest
from etude.store import ObjectMissing, Store

FOLDER = "journal"
INTERVAL = 0.25  # seconds between two puts of an episode; the result of a command does not wait
PIECE_BYTES = 32 << 10  # after which a piece is written no more
MAX_BYTES = 64 << 20  # of a journal; a longer one is given up
DIGEST = 16  # bytes in front of a piece
_THREADS = ThreadPoolExecutor(8, "journal")


class TurnPart(Record, frozen=True, kw_only=True, tag=True):
    """Tokens of a turn in flight, after its first `after`; `request` is a digest."""

    request: bytes
    after: int
    generation: Generation
    at: float  # seconds of the episode's budget that were spent


class TurnEnd(Record, frozen=True, kw_only=True, tag=True):
    """The end of a turn: its tokens after the first `after`, which parts hold."""

    request: bytes
    after: int
    generation: Generation
    at: float


class CommandResult(Record, frozen=True, kw_only=True, tag=True):
    """The result of a command or a test run, as MessagePack, or its error; what it left in the box."""

    request: bytes
    result: bytes
    error: tuple[str, str] | None  # class and message
    files: tuple[tuple[bytes, bytes | None], ...]  # of the work tree, written since the command before; None: deleted
    left: LeftState | None  # None: as after the command before
    requests: tuple[EgressRequest, ...]  # of the box to the outside, since the command before
    at: float


Entry = TurnPart | TurnEnd | CommandResult
E = TypeVar("E", TurnPart, TurnEnd, CommandResult)


class EarlierAttempt(Record, frozen=True, kw_only=True):
    """The beginning of another attempt that an attempt goes on from."""

    attempt: int
    entries: int


class Piece(Record, frozen=True, kw_only=True):
    """Some entries of an attempt, in their order."""

    base: EarlierAttempt | None
    entries: tuple[Entry, ...]


class JournalUnfit(Exception):
    """The journal does not fit what the episode does, or its box cannot be brought back: the episode begins anew."""


class EpisodeJournal:
    """The journal of one attempt at an episode. Methods of recording never raise: a journal that cannot be written is
    given up with a line on stderr, and a later attempt goes on from its beginning."""

    def __init__(self, store: Store, group: int, member: int, attempt: int) -> None:
        self._store, self._attempt = store, attempt
        self.folder = f"{FOLDER}/{group:08d}/{member:04d}"
        self.name = f"member {member} of group {group}"
        self.unfit = ""  # why the recorded part cannot be used
        self.recovered = Counter[str]()  # by the ledger's names (`RECOVERY`)
        self._recorded: deque[Entry] = deque()
        self._base: EarlierAttempt | None = None
        self._forget()

    def _forget(self) -> None:
        self._recorded.clear()
        self._base = None
        self._number, self._last = 0, tuple[Entry, ...]()  # of the last piece, and its entries
        self._bytes = 0  # of the pieces before
        self._pending: list[Entry] = []
        self._due, self._timer = 0.0, False
        self._lock = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()
        self._stopped = False
        self.live, self._spent = False, 0.0  # seconds of the budget that the recorded part took
        self._tools: Tools | None = None
        self._origin: float | None = None  # of the budget's seconds, on the monotonic clock

    # The recorded part ------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Reads what earlier attempts recorded."""
        kept = self._attempts() if self._attempt else {}
        if not (earlier := [attempt for attempt in kept if attempt < self._attempt and kept[attempt]]):
            return
        try:
            own, before = self._entries(max(earlier), kept)
        except (ValueError, ObjectMissing) as e:
            self.unfit = f"it is damaged ({e})"
            return
        entries = before + own
        self._recorded.extend(entries)
        self._base, self.recovered["continued"] = EarlierAttempt(attempt=max(earlier), entries=len(own)), 1
        self._spent = entries[-1].at if entries else 0.0
        states = [e.left for e in entries if isinstance(e, CommandResult) and e.left is not None]
        if states and states[-1].fault:
            self.unfit = states[-1].fault

    def _attempts(self) -> dict[int, int]:
        """The number of pieces of each attempt, up to the first that is missing."""
        numbers: dict[int, set[int]] = {}
        for key in self._store.list(self.folder):
            attempt, _, piece = key.rpartition("/")[2].partition(".")[0].partition("-")
            if attempt.isdecimal() and piece.isdecimal():
                numbers.setdefault(int(attempt), set()).add(int(piece))
        return {attempt: next(n for n in range(len(own) + 1) if n not in own) for attempt, own in numbers.items()}

    def _entries(self, attempt: int, kept: Mapping[int, int]) -> tuple[list[Entry], list[Entry]]:
        """The entries of an attempt, and those that it goes on from. Raises ValueError."""
        keys = [self._key(attempt, number) for number in range(kept.get(attempt, 0))]
        if not keys:
            raise ValueError(f"attempt {attempt} is missing")
        pieces = [_decoded(data) for data in _THREADS.map(self._store.get, keys)]
        own = [entry for piece in pieces for entry in piece.entries]
        if (base := pieces[0].base) is None:
            return own, []
        if base.attempt >= attempt:
            raise ValueError(f"attempt {attempt} goes on from {base.attempt}")
        others, before = self._entries(base.attempt, kept)
        if len(others) < base.entries:
            raise ValueError(f"entries of attempt {base.attempt} are missing")
        return own, before + others[: base.entries]

    def take(self, kind: type[E], request: bytes) -> E | None:
        """The next recorded entry, if it is of this kind; None if nothing is left. Raises JournalUnfit if the next one
        answers another request."""
        if self.unfit:
            raise JournalUnfit(self.unfit)
        if not self._recorded:
            return None
        entry = self._recorded[0]
        if entry.request != request:
            raise self.refuse("the episode goes another way than it was recorded")
        if not isinstance(entry, kind):
            return None
        self._recorded.popleft()
        return entry

    def refuse(self, why: str) -> JournalUnfit:
        """The exception for a recorded part that cannot be used."""
        self.unfit = self.unfit or why
        return JournalUnfit(self.unfit)

    # Time -------------------------------------------------------------------------------------------------------------

    def started(self, tools: Tools) -> None:
        """The time of the budget begins; it ends at the tools' deadline."""
        self._tools, self._origin = tools, time.monotonic()
        if self.live:
            self.live = False
            self.go_live()

    def go_live(self) -> None:
        """The recorded part is over: the time that it took before counts from now on."""
        if self.live:
            return
        self.live = True
        if self._origin is not None and self._tools is not None:
            saved = max(0.0, self._spent - (time.monotonic() - self._origin))
            self._origin -= saved
            self._tools.deadline -= saved

    def seconds(self, timeout: float) -> float:
        """A timeout, bounded by the time that is left to the episode."""
        return timeout if self._tools is None else min(timeout, self._tools.deadline - time.monotonic())

    @property
    def at(self) -> float:
        """Seconds of the budget that are spent."""
        return self._spent if self._origin is None else time.monotonic() - self._origin

    # Recording --------------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Records an entry soon, without waiting."""
        if self._stopped or self.unfit:
            return
        self._pending.append(entry)
        if not self._timer:
            self._timer = True
            task = asyncio.get_running_loop().create_task(self._later())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _later(self) -> None:
        await asyncio.sleep(max(0.0, self._due - time.monotonic()))
        await self.flush()

    async def flush(self) -> None:
        """Waits until all entries are in the store."""
        async with self._lock:
            self._timer = False
            entries, self._pending = self._pending, []
            if entries and not self._stopped:
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(_THREADS, self._put, tuple(entries)))
                self._due = time.monotonic() + INTERVAL

    def _put(self, entries: tuple[Entry, ...]) -> None:
        try:
            whole = (*self._last, *entries)
            data = msgspec.msgpack.encode(Piece(base=None if self._number else self._base, entries=whole))
            self._store.put(self._key(self._attempt, self._number), blake3.blake3(data).digest(DIGEST) + data)
            self._last = whole
            if len(data) > PIECE_BYTES:
                self._number, self._last, self._bytes = self._number + 1, (), self._bytes + len(data)
            if self._bytes > MAX_BYTES:
                raise ValueError(f"it is longer than {MAX_BYTES >> 20} MB")
        except (UserError, ValueError, TypeError) as e:  # UnicodeError is a ValueError: a text that no record can hold
            self._stopped = True
            print(f"etude: {self.name} is no longer recorded: {e}", file=sys.stderr)

    async def close(self, keep: bool) -> None:
        """Ends the recording; to `keep`, the last entries are written."""
        if keep:
            await self.flush()
        self._stopped = True
        async with self._lock:  # until the last piece is written
            self._pending.clear()

    @property
    def grew(self) -> bool:
        """Whether this attempt has recorded anything."""
        return self._number > 0 or len(self._last) > 0

    # Its end ----------------------------------------------------------------------------------------------------------

    async def begin_anew(self) -> None:
        """Forgets the recorded part, and says so."""
        tokens = sum(len(e.generation.ids) for e in self._recorded if not isinstance(e, CommandResult))
        tokens += self.recovered["recovered_tokens"]
        print(f"etude: {self.name} begins anew, {tokens} tokens are sampled again: {self.unfit}", file=sys.stderr)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.delete)
        self._forget()
        self.unfit = ""
        self.recovered = Counter(begun_anew=1, dropped_tokens=tokens)

    def delete(self) -> None:
        """Removes all pieces of the episode."""
        list(_THREADS.map(self._store.delete, self._store.list(self.folder)))

    def _key(self, attempt: int, piece: int) -> str:
        return f"{self.folder}/{attempt:04d}-{piece:06d}.msgpack"


def _decoded(data: bytes) -> Piece:
    """Raises ValueError for bytes that are not those that were written."""
    if blake3.blake3(data[DIGEST:]).digest(DIGEST) != data[:DIGEST]:
        raise ValueError("a piece is not as it was written")
    return msgspec.msgpack.decode(data[DIGEST:], type=Piece)


def request_digest(request: GenerateRequest) -> bytes:
    """The digest that a recorded turn is compared by: of its prompt, token by token, and of how it is sampled."""
    how = (request.max_tokens, request.temperature, request.top_p, request.stop, request.seed)
    data = msgspec.msgpack.encode((request.documents, request.ids, *how, request.routes_from is not None))
    return blake3.blake3(data).digest(DIGEST)


def command_digest(kind: str, *arguments: Any) -> bytes:
    """The digest that a recorded command is compared by."""
    data = repr((kind, *arguments)).encode("utf-8", "backslashreplace")
    return blake3.blake3(data).digest(DIGEST)


def rest_of(generation: Generation, begun: Generation | None) -> Generation:
    """A turn without its beginning, which `records.joined` joins again."""
    if begun is None:
        return generation
    n, routes = len(begun.ids), generation.routes
    if routes is not None and begun.routes is not None:
        unit = routes.layers * routes.slots * (2 if routes.wide else 1)
        cut = (begun.routes.end - routes.first) * unit
        routes = Routes(
            first=begun.routes.end, ids=routes.ids[cut:], layers=routes.layers, slots=routes.slots, wide=routes.wide
        )
    return msgspec.structs.replace(
        generation,
        ids=generation.ids[n:],
        logprobs=generation.logprobs[n:],
        versions=generation.versions[n:],
        routes=routes,
        accepted_draft_tokens=generation.accepted_draft_tokens - begun.accepted_draft_tokens,
        rejected_draft_tokens=generation.rejected_draft_tokens - begun.rejected_draft_tokens,
    )


async def open_journal(store: Store, group: int, member: int, attempt: int) -> EpisodeJournal:
    """The journal of an attempt, with what earlier ones recorded. Raises UserError if the store fails."""
    journal = EpisodeJournal(store, group, member, attempt)
    await asyncio.to_thread(journal.read)
    if journal.unfit:
        await journal.begin_anew()
    return journal


def sweep_journals(store: Store, unfinished: set[tuple[int, int]]) -> None:
    """Removes the journals of all episodes but these (group, member)."""
    names = ((key, key.split("/")) for key in store.list(FOLDER))
    keys = [key for key, (_, group, member, _) in names if (int(group), int(member)) not in unfinished]
    list(_THREADS.map(store.delete, keys))
