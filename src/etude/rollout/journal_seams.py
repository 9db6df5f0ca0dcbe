"""The two seams at which an episode is recorded: the policy that samples tokens, and the box that runs commands.

Both answer from the journal until it is used up; then the one samples and the other runs commands, and both record.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from etude.harness import Policy
from etude.protocol import GenerateRequest
from etude.records import Generation, joined
from etude.rollout.journal import (
    CommandResult,
    EpisodeJournal,
    TurnEnd,
    TurnPart,
    command_digest,
    request_digest,
    rest_of,
)
from etude.sandbox import (
    BoxError,
    ExecResult,
    LeftState,
    NotFound,
    StateWatch,
    TestReport,
    ValueBox,
)
from etude.sandbox.egress import EgressRequest

T = TypeVar("T", ExecResult, TestReport)
_CLEAN = LeftState()


class JournalPolicy:
    """A policy whose turns are recorded."""

    def __init__(self, journal: EpisodeJournal, policy: Policy) -> None:
        self._journal, self._policy = journal, policy

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float,
        on_part: Callable[[Generation], None] | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        """See `harness.loop.Policy`. Raises JournalUnfit if the recorded turn answers another request."""
        journal, digest = self._journal, request_digest(request)
        while (part := journal.take(TurnPart, digest)) is not None:
            begun = _longer(journal, begun, part)
        if (turn := journal.take(TurnEnd, digest)) is not None:
            whole = _longer(journal, begun, turn)
            journal.recovered["recovered_tokens"] += len(whole.ids)
            return whole
        journal.go_live()
        if (seconds := journal.seconds(timeout)) <= 0:
            raise TimeoutError
        journal.recovered["recovered_tokens"] += 0 if begun is None else len(begun.ids)
        known = begun

        def record(part: Generation) -> None:
            nonlocal known
            if part.finish_reason == "abort":  # such a turn goes on
                return
            after = 0 if known is None else len(known.ids)
            journal.add(TurnPart(request=digest, after=after, generation=part, at=journal.at))
            known = part if known is None else joined([known, part])
            if on_part is not None:
                on_part(part)

        generation = await self._policy.generate(request, seconds, record, begun)
        if generation.finish_reason != "abort":
            if known is not None and generation.ids[: len(known.ids)] != known.ids:
                known = None
            after, rest = 0 if known is None else len(known.ids), rest_of(generation, known)
            journal.add(TurnEnd(request=digest, after=after, generation=rest, at=journal.at))
        return generation


def _longer(journal: EpisodeJournal, begun: Generation | None, entry: TurnPart | TurnEnd) -> Generation:
    """The turn with a recorded entry. Raises JournalUnfit if the entry does not follow."""
    if begun is None or (entry.after == 0 and begun.ids):  # the turn was sampled anew
        begun = None
    if len(begun.ids if begun else ()) != entry.after:
        raise journal.refuse("the parts of a turn do not follow one another")
    try:
        return entry.generation if begun is None else joined([begun, entry.generation])
    except ValueError as e:
        raise journal.refuse(str(e)) from None


class JournalBox:
    """A box whose commands and test runs are recorded. The recorded ones are not run: their files are written, and
    before the first new command the box gets what else they left."""

    def __init__(self, journal: EpisodeJournal, box: ValueBox) -> None:
        self._journal, self.inner = journal, box
        self._left = _CLEAN  # by the recorded commands
        self._watch: StateWatch | None = None
        self._requests: list[EgressRequest] = []  # of the recorded commands
        self._seen = 0  # requests of this box that are recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def exec(self, line: str, timeout: float) -> ExecResult:
        """See `Box.exec`. The result is in the store before it is returned."""
        digest = command_digest("exec", line)
        if (entry := self._journal.take(CommandResult, digest)) is not None:
            return await self._recorded(entry, ExecResult)
        self._journal.go_live()
        watch = await self._watched()
        result = await self._run(digest, lambda: self.inner.exec(line, self._seconds(timeout)), watch)
        await self._journal.flush()
        return result

    async def run_tests(self, tests: Sequence[str], timeout: float) -> TestReport:
        """See `Box.run_tests`. A run on a copy leaves nothing, so its result is recorded while the episode goes on."""
        digest = command_digest("tests", *tests)
        if (entry := self._journal.take(CommandResult, digest)) is not None:
            return await self._recorded(entry, TestReport)
        self._journal.go_live()
        box = await self._ready()
        return await self._run(digest, lambda: box.run_tests(tests, timeout), None)

    async def read(self, path: str, max_bytes: int = 65536) -> bytes:
        """See `Box.read`."""
        return await (await self._ready()).read(path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """See `Box.write`."""
        await (await self._ready()).write(path, data)

    async def list(self, path: str) -> list[str]:
        """See `Box.list`."""
        return await (await self._ready()).list(path)

    async def delete(self, path: str) -> None:
        """See `Box.delete`."""
        await (await self._ready()).delete(path)

    async def changes(self, roots: Sequence[str] = ()) -> dict[str, bytes | None]:
        """See `Box.changes`."""
        return await (await self._ready()).changes(roots)

    def requests(self) -> Sequence[EgressRequest] | None:
        """See `Box.requests`; with those of the recorded commands."""
        own = self.inner.requests()
        return own if own is None else [*self._requests, *own]

    def _seconds(self, timeout: float) -> float:
        return max(0.1, self._journal.seconds(timeout))

    async def _ready(self) -> ValueBox:
        """The box, for what is not recorded. After the recorded part it has all that the recorded commands left."""
        if self._journal.live and self._left != _CLEAN:
            await self._watched()
        return self.inner

    async def _watched(self) -> StateWatch:
        """The watch of the live box, after it got what recorded commands left. Raises BoxError and JournalUnfit."""
        if self._watch is None:
            watch = await self.inner.watched()
            if self._left != _CLEAN:
                try:
                    await watch.bring(self._left)
                except BoxError as e:
                    if e.payer == "infra":
                        raise
                    raise self._journal.refuse(str(e)) from None
            self._watch, self._seen = watch, len(self.inner.requests() or ())
        return self._watch

    async def _recorded(self, entry: CommandResult, kind: type[T]) -> T:
        """The recorded result of a command, once its files are written. Raises the recorded error, and JournalUnfit."""
        journal = self._journal
        journal.recovered["recovered_commands"] += 1
        files = sorted(entry.files, key=lambda file: file[1] is not None)  # first what is deleted
        for path, data in files:
            try:
                if data is not None:
                    await self.inner.write(os.fsdecode(path), data)
                else:
                    await self.inner.delete(os.fsdecode(path))
            except NotFound:
                pass  # it was there only between two commands
            except BoxError as e:
                raise journal.refuse(f"files cannot be brought back: {e}") from None
        self._left = entry.left or self._left
        self._requests += entry.requests
        if entry.error is not None:
            name, message = entry.error
            raise next(kind for kind in _kinds(BoxError) if kind.__name__ == name)(message)
        return msgspec.msgpack.decode(entry.result, type=kind)

    async def _run(self, digest: bytes, run: Callable[[], Awaitable[T]], watch: StateWatch | None) -> T:
        """Runs a command, and records how it ended; what the infrastructure ended is not."""
        try:
            result: T = await run()
        except BoxError as e:
            if e.payer != "infra":
                await self._record(digest, e, watch)
            raise
        await self._record(digest, result, watch)
        return result

    async def _record(self, digest: bytes, ended: object, watch: StateWatch | None) -> None:
        files: dict[str, bytes | None] = {}
        left = self._left
        if watch is not None:
            left, files = await watch.look()
        requests = tuple((self.inner.requests() or ())[self._seen :])
        self._seen += len(requests)
        try:
            result = b"" if isinstance(ended, BoxError) else msgspec.msgpack.encode(ended)
        except UnicodeError:  # it has no bytes; the store refuses it, too
            result, left = b"", LeftState(fault="a result is no text")
        entry = CommandResult(
            request=digest,
            result=result,
            error=(type(ended).__name__, str(ended)) if isinstance(ended, BoxError) else None,
            files=tuple((os.fsencode(path), data) for path, data in files.items()),
            left=left if left != self._left else None,
            requests=requests,
            at=self._journal.at,
        )
        self._left = left
        self._journal.add(entry)


def _kinds(kind: type[BoxError]) -> list[type[BoxError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _kinds(below))]
