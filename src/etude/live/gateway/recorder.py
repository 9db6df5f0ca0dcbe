"""The record of a turn: after the answer is sent, its tokens are fetched from the server and queued for the log."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import msgspec

from etude.live.gateway.answer_ids import turn_in
from etude.live.gateway.entries import ServedEntry, TurnEntry
from etude.live.gateway.judging import FollowUpJudge
from etude.live.gateway.observed import LastTurns
from etude.live.gateway.queue import RecordQueue
from etude.live.gateway.requests import TurnRequest
from etude.live.gateway.upstream import AWAY, Server
from etude.live.log.records import ServedTurn, Session, SignalKind, TurnContent, VersionSpan
from etude.live.log.tenants import Directory
from etude.protocol import ServedTokens
from etude.protocol.apis import answer_message
from etude.renderers import Message

_FETCH_SECONDS = 15.0
_MAX_FETCHES = 512
_MAX_FETCHED_BYTES = 256 << 20  # of the bodies of all requests whose tokens are being fetched
_DRAIN_SECONDS = 5.0


class TurnRecorder:
    """Queues the turns of answers. `directory` holds the policies of the tenants; `judge` reads follow-ups."""

    def __init__(self, queue: RecordQueue, directory: Directory, judge: FollowUpJudge | None = None) -> None:
        self.open: dict[str, asyncio.Event] = {}
        """By the ids of turns, of sessions, and of bodies with their tenant, which a client knows before they are
        queued: an event that is set once they are."""
        self._queue = queue
        self._directory = directory
        self._judge = judge
        self._last = LastTurns()
        self._fetches: set[asyncio.Task[None]] = set()
        self._fetched_bytes = 0

    @property
    def judged(self) -> dict[str, int]:
        """Follow-ups by what the judge did with them; empty without a judge."""
        return {} if self._judge is None else dict(self._judge.counts)

    @property
    def fetches(self) -> int:
        """The number of turns whose tokens are being fetched."""
        return len(self._fetches)

    def begin(self, request: TurnRequest) -> None:
        """Marks a turn as known to the client: its answer begins."""
        self.open[request.id] = self.open[request.session] = asyncio.Event()

    def name(self, request: TurnRequest, answer: str) -> None:
        """Makes a turn known by the id in its answer's body."""
        if turn_in(answer) != request.id:
            request.answer = answer
            self.open[_key(request.key.tenant, answer)] = self.open[request.id]

    def waiting(self, tenant: str, subject: str) -> asyncio.Event | None:
        """The event of a turn or session that is not queued yet, by its id or that of an answer's body."""
        return self.open.get(_key(tenant, subject)) or self.open.get(turn_in(subject))

    def end(self, request: TurnRequest, server: Server, status: int) -> None:
        """Queues the record of a turn whose answer has ended, or begins to fetch its tokens."""
        if status != 200 or not self._is_fetched(request, server):
            self._settle(request)

    async def drain(self) -> None:
        """Waits for the fetches, at most five seconds."""
        if self._fetches:
            await asyncio.wait(self._fetches, timeout=_DRAIN_SECONDS)

    def _is_fetched(self, request: TurnRequest, server: Server) -> bool:
        """Begins to fetch the tokens of a turn with consent: True then. Queues the entry of a turn without."""
        if request.dialect is None:
            return False
        if not request.recorded:
            if request.consent.policy == "header":
                self._queue.withdraw(request.account, request.key.tenant)
            self._queue.append(ServedEntry(request.id, request.turn_key, request.account, request.answer))
        elif len(self._fetches) >= _MAX_FETCHES or self._fetched_bytes + request.size > _MAX_FETCHED_BYTES:
            self._queue.drop("queue_full")
            self._queue.count(request.counter_key, "dropped")
        else:
            task = asyncio.create_task(self._record(request, server, time.monotonic() - request.began))
            self._fetches.add(task)
            self._fetched_bytes += request.size
            task.add_done_callback(lambda _: self._fetched(task, request))
            return True
        return False

    def _fetched(self, task: asyncio.Task[None], request: TurnRequest) -> None:
        self._fetches.discard(task)
        self._fetched_bytes -= request.size
        self._settle(request)

    def _settle(self, request: TurnRequest) -> None:
        """Sets the event of a turn that is queued or will have no record."""
        settled = self.open.pop(request.id)
        settled.set()
        for key in (request.session, _key(request.key.tenant, request.answer)):
            if self.open.get(key) is settled:
                del self.open[key]

    async def _record(self, request: TurnRequest, server: Server, seconds: float) -> None:
        tokens = None
        with suppress(*AWAY, ValueError):
            if server.keeps_turns:
                status, body = await server.fetch(f"/v1/turns/{request.id}", _FETCH_SECONDS)
                tokens = msgspec.msgpack.decode(body, type=ServedTokens) if status == 200 else None
        if tokens is not None and tokens.spans and tokens.spans[-1][2] not in server.digests:
            await server.look()  # the server changed its version after the last look
        answer = None
        if tokens is None and request.copy:
            answer = await asyncio.to_thread(
                answer_message, request.dialect or "", bytes(request.copy), request.is_stream
            )
        entry = self._entry(request, server, tokens, answer, seconds)
        derived = await asyncio.to_thread(self._last.signals, entry, tokens.malformed if tokens else 0)
        if not self._queue.append(entry):
            return
        unread = [] if self._judge is None else [u for u in derived if u.entry.signal.kind is SignalKind.FOLLOWUP]
        if signals := [u.entry for u in derived if u not in unread]:
            self._queue.submit(signals)
        for each in unread:
            assert self._judge is not None
            self._judge.read(each)

    def _entry(
        self,
        request: TurnRequest,
        server: Server,
        tokens: ServedTokens | None,
        answer: tuple[Message, str] | None,
        seconds: float,
    ) -> TurnEntry:
        """The entry of a turn: of its tokens, or of the text of its `answer` and the reason why it ended."""
        assignment, content = request.assignment, None
        spans = tuple(VersionSpan(low=s[0], high=s[1], version=s[2]) for s in (tokens.spans if tokens else ()))
        version = spans[-1].version if spans else server.version
        if (reason := _untrainable(tokens)) != "no_tokens":
            assert tokens is not None
            assert request.dialect is not None
            content = TurnContent(
                dialect=request.dialect,
                request=request.body,
                response=tokens.message,
                prompt_ids=tokens.prompt_ids,
                ids=tokens.ids,
                logprobs=tokens.logprobs,
                temperature=tokens.temperature,
                top_p=tokens.top_p,
            )
        elif answer is not None:
            content = TurnContent(
                dialect=request.dialect or "",
                request=request.body,
                response=msgspec.json.encode(answer[0]),
                prompt_ids=b"",
                ids=b"",
                logprobs=b"",
                temperature=1.0,
                top_p=1.0,
            )
        session = Session(
            id=request.session,
            tenant=request.key.tenant,
            account=request.account,
            voucher=request.voucher,
            organisation=request.organisation,
            client=request.client,
            consent=request.consent,
            arm=assignment.arm,
            release=assignment.release,
            propensity=assignment.propensity,
            opened=0,
        )
        turn = ServedTurn(
            id=request.id,
            session=request.session,
            sequence=0,
            kind=request.kind,
            release=request.release,
            manifest=server.digests.get(version, ""),
            spans=spans,
            blob=None,
            reason=reason,
            scrubbed={},
            rules="",
            prompt_tokens=len(tokens.prompt_ids) // 4 if tokens else 0,
            sampled_tokens=len(tokens.ids) // 4 if tokens else 0,
            seconds=seconds,
            cluster=server.cluster,
            stop=tokens.finish_reason if tokens else answer[1] if answer else "",
            at=0,
        )
        keep = self._directory.policies[request.key.tenant].keep
        return TurnEntry(session, turn, content, tokens.text if tokens else "", keep, request.answer)


def _key(tenant: str, answer: str) -> str:
    return f"{tenant}\0{answer}"


def _untrainable(tokens: ServedTokens | None) -> str:
    """The reason why an answer cannot be trained on, or ""."""
    if tokens is None or not tokens.ids or len(tokens.ids) != len(tokens.logprobs):
        return "no_tokens"
    if tokens.choices != 1:
        return "several_choices"
    return "" if tokens.plain else "sampling"
