"""The records before a cut, by turn: sessions, main turns in order, edits, and signals at the server's times.

Signals are ordered by the server's time of arrival and the client's numbering; a client's clock is never read. A signal
that arrives late but has a lower number than another happened before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from etude.live.log.records import ServedTurn, Session, Signal, SignalKind, Suggestion, TurnKind

END_KINDS = (SignalKind.UNDONE, SignalKind.RESTORED, SignalKind.REJECTED)
EDIT_KINDS = (*END_KINDS, SignalKind.SURVIVED, SignalKind.OVERWRITTEN, SignalKind.APPLIED)
_NEXT_TURN_KINDS = (SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED)  # reported on the turn after


@dataclass(frozen=True)
class TimedSignal:
    """A signal and the time by which it had happened: its arrival, or that of a later-numbered signal of the client."""

    signal: Signal
    at: int

    @property
    def order(self) -> tuple[int, int, str]:
        """The sorting key of signals: time, number and event."""
        sequence = self.signal.client_sequence
        return (self.at, -1 if sequence is None else sequence, self.signal.event)


@dataclass
class TurnLog:
    """Records before the cut, by their turn or session."""

    cut: int
    sessions: dict[str, Session]
    turns: dict[str, ServedTurn]
    main: dict[str, list[ServedTurn]]  # of a session, in order
    place: dict[str, int]  # of a main turn in its session
    suggestions: dict[str, list[Suggestion]]  # of a turn
    signals: dict[str, list[TimedSignal]] = field(
        default_factory=dict[str, list[TimedSignal]]
    )  # of a subject, in order

    def of(self, subject: str, *kinds: SignalKind) -> list[TimedSignal]:
        """Signals of a subject, in order."""
        return [s for s in self.signals[subject] if s.signal.kind in kinds] if subject in self.signals else []

    def last(self, subject: str) -> dict[SignalKind, Signal]:
        """The last signal of each kind on a subject."""
        return {seen.signal.kind: seen.signal for seen in self.signals.get(subject, ())}

    def next(self, turn: ServedTurn) -> ServedTurn | None:
        """The main turn after this one."""
        row, after = self.main[turn.session], self.place[turn.id] + 1
        return row[after] if after < len(row) else None

    def gone(self, session: str, since: int) -> list[TimedSignal]:
        """The first signal GONE of a session at or after `since`, as a list of at most one."""
        return [s for s in self.of(session, SignalKind.GONE) if s.at >= since][:1]


def distinct(signals: Iterable[Signal], cut: int) -> list[Signal]:
    """The signals that had arrived at the cut, without repeated events. Sorted by tenant and event."""
    first: dict[tuple[str, str], tuple[int, bytes, Signal]] = {}
    for signal in signals:
        if signal.arrived_at <= cut:
            entry = (signal.arrived_at, msgspec.msgpack.encode(signal), signal)
            key = (signal.tenant, signal.event)
            if key not in first or entry[:2] < first[key][:2]:
                first[key] = entry
    return [first[key][2] for key in sorted(first)]


def arrange(
    sessions: Iterable[Session],
    turns: Iterable[ServedTurn],
    suggestions: Iterable[Suggestion],
    signals: Iterable[Signal],
    cut: int,
) -> TurnLog:
    """The records that had arrived at `cut`, by turn. They may come in any order, and repeatedly."""
    known = {s.id: s for s in sessions if s.opened <= cut}
    served = {t.id: t for t in turns if t.at <= cut and t.session in known}
    main: dict[str, list[ServedTurn]] = defaultdict(list)
    for turn in sorted(served.values(), key=lambda t: (t.session, t.sequence, t.id)):
        if turn.kind == TurnKind.MAIN:
            main[turn.session].append(turn)
    place = {turn.id: i for row in main.values() for i, turn in enumerate(row)}
    edits: dict[str, list[Suggestion]] = defaultdict(list)
    turn_of: dict[str, str] = {}
    for edit in sorted({s.id: s for s in suggestions}.values(), key=lambda s: s.id):
        if edit.shown <= cut and edit.turn in served:
            edits[edit.turn].append(edit)
            turn_of[edit.id] = edit.turn
    log = TurnLog(cut, known, served, main, place, edits)
    streams: dict[tuple[str, str], list[Signal]] = defaultdict(list)
    for signal in distinct(signals, cut):
        turn = served.get(turn_of.get(signal.subject, signal.subject))
        session = known.get(turn.session if turn else signal.subject)
        if session is not None and session.tenant == signal.tenant:
            streams[session.id, signal.source].append(signal)
    rows: dict[str, list[TimedSignal]] = defaultdict(list)
    for stream in streams.values():
        for seen in _timed(stream):
            if (subject := _subject(log, seen.signal, turn_of)) is not None:
                rows[subject].append(seen)
    for row in rows.values():
        row.sort(key=lambda s: s.order)
    log.signals = rows
    return log


def _timed(stream: Sequence[Signal]) -> Iterable[TimedSignal]:
    """The signals of one client, each no later than the signals with higher numbers."""
    numbered = sorted((s for s in stream if s.client_sequence is not None), key=lambda s: (s.client_sequence, s.event))
    by = None
    for signal in reversed(numbered):
        by = signal.arrived_at if by is None else min(by, signal.arrived_at)
        yield TimedSignal(signal, by)
    for signal in stream:
        if signal.client_sequence is None:
            yield TimedSignal(signal, signal.arrived_at)


def _subject(log: TurnLog, signal: Signal, turn_of: Mapping[str, str]) -> str | None:
    """The subject that a signal counts for: the main turn before, for kinds that the next turn's message reports; the
    turn of an edit, for kinds that edits do not have."""
    if signal.subject in turn_of:
        of_edit = signal.kind in (*EDIT_KINDS, SignalKind.GONE, SignalKind.CORRECTION)
        return signal.subject if of_edit else turn_of[signal.subject]
    turn = log.turns.get(signal.subject)
    explicit = signal.kind == SignalKind.FOLLOWUP and signal.source == "explicit"  # a comment on an answer
    if signal.kind not in _NEXT_TURN_KINDS or turn is None or explicit:
        return signal.subject
    row = log.main.get(turn.session, [])
    before = bisect_left(row, (turn.sequence, turn.id), key=lambda t: (t.sequence, t.id)) - 1
    return row[before].id if before >= 0 else None
