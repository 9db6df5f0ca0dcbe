"""The fate of an edit: matured, with the share of its characters that is alive; open; or censored.

The window of an edit opens when the edit is shown, and closes at the first of: the edit is undone, or told to be alive
at the horizon (`labels.window_seconds`) or up to four times as late. A client that never looks so late has a window of
its own, which ends with its last look; otherwise all that it kept would be censored, and all that it undid would count.
An edit whose file or client is gone, or of which nothing was told in time, is censored, unless its fate is told
afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etude.config.live import LabelsConfig
from etude.live.learn.timeline import EDIT_KINDS, END_KINDS, TimedSignal, TurnLog
from etude.live.log.records import LabelState, ServedTurn, SignalKind, Suggestion

SECOND = 1_000_000_000
"""Nanoseconds."""
_EARLY = 0.95  # share of a horizon, by the server's clock, after which a reported survival counts for all of it
_LATE = 2  # times `labels.delay_seconds` for which an edit of a client that is there waits for its outcome
_SHORTEST, _LONGEST = 0.1, 4.0  # times the window: the shortest window of a client, and the latest horizon that is read

ClientWindows = Mapping[tuple[str, str], float]
"""Tenant and client -> seconds of the window of its edits."""


@dataclass(frozen=True)
class EditFate:
    """The fate of an edit. `seconds`: from being shown to the close of its window, or to the last observation."""

    state: LabelState
    share: float = 0.0
    seconds: float = 0.0
    undone: bool = False


def client_windows(log: TurnLog, config: LabelsConfig) -> ClientWindows:
    """The windows of the clients whose latest look is earlier than `labels.window_seconds`, by all of their reports."""
    latest: dict[tuple[str, str], float] = defaultdict(float)
    for session, row in log.main.items():
        client = log.sessions[session].tenant, log.sessions[session].client
        for subject in (name for turn in row for name in (turn.id, *(s.id for s in log.suggestions.get(turn.id, ())))):
            looks = [s.signal.horizon or 0.0 for s in log.of(subject, SignalKind.SURVIVED)]
            latest[client] = max([latest[client], *looks])
    window = config.window_seconds
    return {client: last for client, last in latest.items() if _SHORTEST * window <= last < window}


def session_fates(log: TurnLog, session: str, config: LabelsConfig, windows: ClientWindows) -> dict[str, EditFate]:
    """The fates of the edits of a session, by suggestion; for a turn without suggestions, the fate of the edit that
    signals on the turn imply, by turn. Later edits come first, because an overwritten edit shares their fate."""
    client = log.sessions[session].tenant, log.sessions[session].client
    window = windows.get(client, config.window_seconds)
    horizon = int(window * SECOND)
    out: dict[str, EditFate] = {}
    later: dict[str, list[Suggestion]] = defaultdict(list)  # by path
    for turn in reversed(log.main[session]):
        own: list[Suggestion] = []
        for edit in log.suggestions.get(turn.id, ()):
            seen = log.of(edit.id, *EDIT_KINDS, SignalKind.GONE) + log.of(turn.id, *EDIT_KINDS, SignalKind.GONE)
            successors = [(s, out[s.id]) for s in later[edit.path] if s.shown <= edit.shown + horizon]
            out[edit.id] = _fate(edit.shown, seen + log.gone(session, edit.shown), successors, log.cut, window, config)
            own.append(edit)
        for edit in own:
            later[edit.path].append(edit)
        if not own and (seen := log.of(turn.id, *EDIT_KINDS)):
            seen = seen + log.of(turn.id, SignalKind.GONE) + log.gone(session, turn.at)
            out[turn.id] = _fate(turn.at, seen, [], log.cut, window, config)
    return out


def _fate(
    shown: int,
    seen: Sequence[TimedSignal],
    successors: Sequence[tuple[Suggestion, EditFate]],
    cut: int,
    window: float,
    config: LabelsConfig,
) -> EditFate:
    """The fate of one edit. `successors`: later edits of the session in the same file, with their fates."""
    gone: float | None = None
    last_seen = overwritten = 0.0
    for one in sorted(seen, key=lambda s: s.order):
        signal, after = one.signal, max(0.0, (one.at - shown) / SECOND)
        if signal.kind in END_KINDS:
            return EditFate(LabelState.MATURED, 0.0, min(after, window), signal.kind != SignalKind.REJECTED)
        if signal.kind == SignalKind.GONE:
            gone = min(after, window) if gone is None else gone
        elif signal.kind == SignalKind.OVERWRITTEN:
            overwritten = max(overwritten, min(1.0, signal.value))
            if overwritten >= 1.0:  # all of the edit is replaced
                return _union(0.0, 1.0, successors, window)
        elif signal.kind == SignalKind.SURVIVED and (signal.horizon or 0.0) <= _LONGEST * window:
            look = signal.horizon or 0.0
            lasted = look if after >= _EARLY * look else after
            last_seen = max(last_seen, lasted)
            if lasted >= window:
                return _union(min(max(signal.value, 0.0), 1.0), overwritten, successors, window)
    wait = config.delay_seconds * (_LATE if gone is None else 1)
    if cut < shown + int(wait * SECOND):
        return EditFate(LabelState.OPEN)
    return EditFate(LabelState.CENSORED, seconds=last_seen if gone is None else gone)


def _union(
    alive: float, overwritten: float, successors: Sequence[tuple[Suggestion, EditFate]], window: float
) -> EditFate:
    """The joint fate of an edit and the edits that replaced parts of it."""
    if not overwritten or not successors:
        return EditFate(LabelState.MATURED, alive, window)
    states = {fate.state for _, fate in successors}
    for state in (LabelState.OPEN, LabelState.CENSORED):
        if state in states:
            return EditFate(state, seconds=min(fate.seconds for _, fate in successors if fate.state == state))
    size = sum(max(1, edit.characters) for edit, _ in successors)
    kept = sum(max(1, edit.characters) * fate.share for edit, fate in successors) / size
    return EditFate(LabelState.MATURED, min(1.0, alive + overwritten * kept), window)


def turn_fate(
    log: TurnLog, turn: ServedTurn, fates: Mapping[str, EditFate], config: LabelsConfig
) -> tuple[EditFate, float] | None:
    """The joint fate of all edits of a turn, and their characters; None for a turn without edits."""
    rows = [(max(1.0, float(s.characters)), fates[s.id]) for s in log.suggestions.get(turn.id, ())]
    if not rows and turn.id in fates:
        rows = [(config.characters, fates[turn.id])]
    if not rows:
        return None
    size = sum(n for n, _ in rows)
    for state in (LabelState.OPEN, LabelState.CENSORED):
        if waits := [fate.seconds for _, fate in rows if fate.state == state]:
            return EditFate(state, seconds=min(waits)), size
    share = sum(n * fate.share for n, fate in rows) / size
    return EditFate(LabelState.MATURED, share, max(f.seconds for _, f in rows), any(f.undone for _, f in rows)), size
