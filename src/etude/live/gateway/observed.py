"""Signals that the gateway derives from recorded turns: from an answer, and from the next request of its session
(`derive.py`)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.live.gateway.answer_ids import turn_in
from etude.live.gateway.entries import SignalEntry, TurnEntry
from etude.live.gateway.judging import UnreadFollowUp
from etude.live.log.derive import DerivedSignal, Message, answer_of, conversation, of_answer, of_next, schemas_of
from etude.live.log.followups import WORDS, FollowUp
from etude.live.log.records import Signal, SignalKind, TurnKind

_MAX_HELD_BYTES = 64 << 20  # of all remembered requests, one for each session
_MAX_BYTES = 1 << 20  # of a request; longer ones are not read


@dataclass(frozen=True)
class _LastTurn:
    """The last turn of a session: its ids, conversation and answer, and the bytes that these take."""

    names: frozenset[str]
    request: list[Message]
    answer: Message
    size: int


class LastTurns:
    """The last main turn of each session, in memory alone."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, _LastTurn] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def signals(self, entry: TurnEntry, malformed: int = 0) -> list[UnreadFollowUp]:
        """The signals of a turn that will be recorded, of whose calls the server could not read `malformed`. Signals on
        the turn before it have the new turn as subject. Follow-ups have the word list's value."""
        content, turn = entry.content, entry.turn
        if content is None or turn.kind is not TurnKind.MAIN or turn.stop == "abort":
            return []
        try:
            if len(content.request) > _MAX_BYTES:
                raise ValueError("the request is too long to be read")
            body = msgspec.json.decode(content.request, type=dict)
            message = msgspec.json.decode(content.response or b"{}", type=dict)
            sent, answer, tools = conversation(content.dialect, body), answer_of(message, malformed), schemas_of(body)
        except (ValueError, RecursionError):
            broken = [DerivedSignal(SignalKind.INVALID_CALL, 1.0)] if malformed else []
            return [_unread(entry, signal, "") for signal in broken]
        with self._lock:
            before = self._last.pop(turn.session, None)
            request = _whole(before, body, sent)
            size = len(content.request) + (before.size if before is not None and request is not sent else 0)
            self._last[turn.session] = _LastTurn(frozenset({turn.id, entry.answer} - {""}), request, answer, size)
            self._bytes += size - (before.size if before is not None else 0)
            while self._bytes > _MAX_HELD_BYTES:
                self._bytes -= self._last.popitem(last=False)[1].size
        signals = of_answer(request, answer, tools)
        signals += of_next(before.request, before.answer, request) if before is not None else []
        return [_unread(entry, signal, before.answer.text if before is not None else "") for signal in signals]


def _whole(before: _LastTurn | None, body: dict[str, Any], sent: list[Message]) -> list[Message]:
    """The conversation of a request: a client of OpenAI's responses may send the new items alone, and name the answer
    before them."""
    previous = body.get("previous_response_id")
    if before is None or not isinstance(previous, str) or not {previous, turn_in(previous)} & before.names:
        return sent
    return [*before.request, before.answer, *sent]


def _unread(entry: TurnEntry, derived: DerivedSignal, answer: str) -> UnreadFollowUp:
    signal = Signal(
        event=f"gateway {entry.turn.id} {derived.kind.value}",
        tenant=entry.session.tenant,
        subject=entry.turn.id,
        kind=derived.kind,
        value=derived.value,
        observed_at=time.time_ns(),
        arrived_at=0,
        source="judge",
        reader=WORDS if derived.kind is SignalKind.FOLLOWUP else "",
    )
    return UnreadFollowUp(SignalEntry(signal, derived.text), FollowUp(derived.before, answer, derived.text or ""))
