"""Signals that the gateway derives from recorded turns: from an answer, and from the next request of its session
(`derive.py`)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

import msgspec

from etude.live.gateway.entries import SignalEntry, TurnEntry
from etude.live.log.derive import DerivedSignal, Message, answer_of, conversation, of_answer, of_next, schemas_of
from etude.live.log.records import Signal, TurnKind

_MAX_HELD_BYTES = 64 << 20  # of all remembered requests, one for each session
_MAX_BYTES = 1 << 20  # of a request; longer ones are not read


class LastTurns:
    """The last main turn of each session, in memory alone."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[list[Message], Message, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def signals(self, entry: TurnEntry) -> list[SignalEntry]:
        """The signals of a turn that will be recorded. Signals on the turn before it have the new turn as subject."""
        content, turn = entry.content, entry.turn
        if (
            content is None
            or turn.kind is not TurnKind.MAIN
            or turn.stop == "abort"
            or len(content.request) > _MAX_BYTES
        ):
            return []
        try:
            body = msgspec.json.decode(content.request, type=dict)
            message = msgspec.json.decode(content.response or b"{}", type=dict)
            request = conversation(content.dialect, body)
            answer = answer_of(message)
            signals = of_answer(request, answer, schemas_of(body))
        except (ValueError, RecursionError):
            return []
        with self._lock:
            before = self._last.pop(turn.session, None)
            self._last[turn.session] = request, answer, len(content.request)
            self._bytes += len(content.request) - (before[2] if before is not None else 0)
            while self._bytes > _MAX_HELD_BYTES:
                self._bytes -= self._last.popitem(last=False)[1][2]
        signals += of_next(before[0], before[1], request) if before is not None else []
        return [_entry(entry, signal) for signal in signals]


def _entry(entry: TurnEntry, signal: DerivedSignal) -> SignalEntry:
    return SignalEntry(
        Signal(
            event=f"gateway {entry.turn.id} {signal.kind.value}",
            tenant=entry.session.tenant,
            subject=entry.turn.id,
            kind=signal.kind,
            value=signal.value,
            observed_at=time.time_ns(),
            arrived_at=0,
            source="judge",
        ),
        signal.text,
    )
