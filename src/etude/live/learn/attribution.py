"""What became of each turn: records up to a cut -> one Label a turn. Pure functions of their arguments.

A turn's window opens when its edit was shown, and closes at the first of: the edit was undone, the horizon
(`labels.window_seconds`), the file or the client is gone. Gone is censored: neither good nor bad, but left out, and
matured turns of its cell weigh 1/G in its place, with G the probability of not being censored until then.

Only the server's time of arrival and a client's own numbering decide; a client's clock is never read. A signal that
arrives late but is numbered before another happened before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import blake3
import msgspec
import numpy as np

from etude.config.live import LabelsConfig
from etude.live.log.records import Label, LabelState, ServedTurn, Session, Signal, SignalKind, Suggestion, TurnKind

_FORM = "1"  # of the rules in this file; change it with any of them
_SECOND = 1_000_000_000
_EARLY = 0.95  # a survival reported at this share of its horizon, by the server's clock, has lasted for all of it

WEIGHTS = {
    "kept": 0.6,  # characters alive, up to `labels.characters` of them
    "lost": -0.4,  # share of the characters that did not survive
    "undone": -0.2,
    "choice": 0.2,  # 1 - threshold for an accepted edit, -threshold for a rejected one, 0 for silence
    "invalid_call": -0.6,
    "question": -1.0,  # times `labels.question_cost`
    "no_edit": -1.0,  # times `labels.no_edit_cost`
    "followup": -0.3,
    "retry": -0.3,
    "stopped": -0.2,
    "tests": 0.2,
    "lint": -0.1,  # of ten new findings
    "rating": 0.2,
    "latency": -0.05,  # of a minute or more
    "session": 0.2,
}
"""What each component adds to a reward when it is fully there; the sum is cut at -1 and 1."""

_REPORTED_LATER = (SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED)
_ENDS = (SignalKind.UNDONE, SignalKind.RESTORED, SignalKind.REJECTED)
_OF_EDITS = (*_ENDS, SignalKind.SURVIVED, SignalKind.OVERWRITTEN, SignalKind.APPLIED)
_CLOSED = (LabelState.MATURED, LabelState.CENSORED)
_OF_SESSIONS = (SignalKind.ENDED, SignalKind.TESTS)
_SPOKEN = (SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.STOPPED, SignalKind.TESTS, SignalKind.LINT)


def rules_version(config: LabelsConfig) -> str:
    """What labels were computed by: the rules of this file and their settings."""
    settings = msgspec.json.encode([config.model_dump(mode="json"), WEIGHTS], order="sorted")
    return f"{_FORM}-{blake3.blake3(settings).hexdigest()[:12]}"


def components(observed: Mapping[str, np.ndarray], config: LabelsConfig) -> dict[str, np.ndarray]:
    """What each component adds to the rewards of N turns, float64 [N] each; NaN where nothing was observed. `observed`
    holds float columns [N], NaN where not observed, any of: share (of the characters alive when the window closed),
    characters, undone, choice (1 accepted, -1 rejected, 0 silent), invalid_call (1: any), question (1: asked),
    repaid (1: it was answered, and the edit of the next turn survived), no_edit, followup (probability of
    dissatisfaction), retry, stopped, tests, lint (new findings), rating, latency (seconds), session. Raises ValueError
    for other names."""
    if unknown := set(observed) - set(WEIGHTS) - {"share", "characters", "repaid"}:
        raise ValueError(f"no component is made of {sorted(unknown)}")
    out: dict[str, np.ndarray] = {}
    if "share" in observed:
        alive_N = np.clip(observed["share"], 0.0, 1.0)
        out["kept"] = WEIGHTS["kept"] * np.minimum(1.0, alive_N * observed["characters"] / config.characters)
        out["lost"] = WEIGHTS["lost"] * (1.0 - alive_N)
    for name, column_N in observed.items():
        if name in ("share", "characters", "repaid"):
            continue
        if name == "choice":
            part_N = np.where(column_N > 0, 1.0 - config.threshold, np.where(column_N < 0, -config.threshold, 0.0))
            part_N = np.where(np.isnan(column_N), np.nan, part_N)
        elif name == "question":
            repaid_N = np.nan_to_num(observed.get("repaid", np.zeros_like(column_N)))
            part_N = config.question_cost * column_N * (1.0 - repaid_N)
        elif name == "no_edit":
            part_N = config.no_edit_cost * column_N
        elif name in ("tests", "rating", "session"):
            part_N = np.clip(column_N, -1.0, 1.0)
        elif name == "lint":
            part_N = np.clip(column_N / 10.0, -1.0, 1.0)
        elif name == "latency":
            part_N = np.clip(column_N / 60.0, 0.0, 1.0)
        else:
            part_N = np.clip(column_N, 0.0, 1.0)
        out[name] = WEIGHTS[name] * part_N
    return out


def rewards(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """The sum of components, float64 [N], cut at -1 and 1; a component that was not observed adds nothing."""
    total = np.zeros(len(next(iter(parts.values()))) if parts else 0)
    for name in sorted(parts):
        total += np.nan_to_num(parts[name])
    return np.clip(total, -1.0, 1.0)


def censoring_weights(seconds_N: np.ndarray, known_N: np.ndarray, cell_N: np.ndarray, most: float) -> np.ndarray:
    """1/G(t-) of the known, at most `most`, and 0 of the censored, float64 [N]. G is the Kaplan-Meier estimate of the
    probability, within a cell (int [N]), that a turn is not censored before t; of an outcome and a censoring at the
    same time the outcome came first. Until `most` cuts, the weights of a cell add up to its size if its last turn is
    known: each censored turn is shared out among those that were seen for longer (Efron 1967; the weights are those
    of Robins and Rotnitzky 1992)."""
    order = np.lexsort((~known_N, seconds_N, cell_N))  # outcomes before censorings at the same time
    out = np.zeros(len(order))
    for mine in np.split(order, np.flatnonzero(np.diff(cell_N[order])) + 1):
        at_risk = np.arange(len(mine), 0.0, -1.0)  # one after the other: ties of censorings multiply to the same
        stays = np.where(known_N[mine], 1.0, 1.0 - 1.0 / at_risk)
        before = np.cumprod(np.r_[1.0, stays])[:-1]
        out[mine] = np.where(known_N[mine], np.minimum(1.0 / before, most), 0.0)
    return out


@dataclass(frozen=True)
class _TimedSignal:
    """A signal and the time by which it had happened: it or one that its client numbered later had arrived."""

    signal: Signal
    at: int

    @property
    def order(self) -> tuple[int, int, str]:
        sequence = self.signal.client_sequence
        return (self.at, -1 if sequence is None else sequence, self.signal.event)


@dataclass(frozen=True)
class _Fate:
    """What became of an edit. `seconds`: from being shown to the close of its window, or as long as it was seen."""

    state: LabelState
    share: float = 0.0
    seconds: float = 0.0
    undone: bool = False


@dataclass
class _Log:
    """Records below the cut, by what they are about."""

    cut: int
    sessions: dict[str, Session]
    turns: dict[str, ServedTurn]
    main: dict[str, list[ServedTurn]]  # of a session, in order
    place: dict[str, int]  # of a main turn in its session
    suggestions: dict[str, list[Suggestion]]  # of a turn
    signals: dict[str, list[_TimedSignal]] = field(
        default_factory=dict[str, list[_TimedSignal]]
    )  # of a subject, in order

    def of(self, subject: str, *kinds: SignalKind) -> list[_TimedSignal]:
        """Signals of a subject, in order."""
        return [s for s in self.signals[subject] if s.signal.kind in kinds] if subject in self.signals else []

    def last(self, subject: str) -> dict[SignalKind, Signal]:
        """The last signal of each kind on a subject."""
        return {seen.signal.kind: seen.signal for seen in self.signals.get(subject, ())}

    def next(self, turn: ServedTurn) -> ServedTurn | None:
        """The main turn after this one."""
        row, after = self.main[turn.session], self.place[turn.id] + 1
        return row[after] if after < len(row) else None

    def gone(self, session: str, since: int) -> list[_TimedSignal]:
        """The first signal, from a time on, that the client of a session is gone; or none."""
        return [s for s in self.of(session, SignalKind.GONE) if s.at >= since][:1]


def distinct(signals: Iterable[Signal], cut: int) -> list[Signal]:
    """Signals that had arrived at the cut, one of each event: the first that arrived. Sorted by tenant and event."""
    first: dict[tuple[str, str], tuple[int, bytes, Signal]] = {}
    for signal in signals:
        if signal.arrived_at <= cut:
            entry = (signal.arrived_at, msgspec.msgpack.encode(signal), signal)
            key = (signal.tenant, signal.event)
            if key not in first or entry[:2] < first[key][:2]:
                first[key] = entry
    return [first[key][2] for key in sorted(first)]


def _arrange(
    sessions: Iterable[Session], turns: Iterable[ServedTurn], suggestions: Iterable[Suggestion],
    signals: Iterable[Signal], cut: int,
) -> _Log:  # fmt: skip
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
    log = _Log(cut, known, served, main, place, edits)
    streams: dict[tuple[str, str], list[Signal]] = defaultdict(list)
    for signal in distinct(signals, cut):
        turn = served.get(turn_of.get(signal.subject, signal.subject))
        session = known.get(turn.session if turn else signal.subject)
        if session is not None and session.tenant == signal.tenant:
            streams[session.id, signal.source].append(signal)
    rows: dict[str, list[_TimedSignal]] = defaultdict(list)
    for stream in streams.values():
        for seen in _timed(stream):
            if (subject := _subject(log, seen.signal, turn_of)) is not None:
                rows[subject].append(seen)
    for row in rows.values():
        row.sort(key=lambda s: s.order)
    log.signals = rows
    return log


def _timed(stream: Sequence[Signal]) -> Iterable[_TimedSignal]:
    """The signals of one client, each no later than those that the client numbered after it."""
    numbered = sorted((s for s in stream if s.client_sequence is not None), key=lambda s: (s.client_sequence, s.event))
    by = None
    for signal in reversed(numbered):
        by = signal.arrived_at if by is None else min(by, signal.arrived_at)
        yield _TimedSignal(signal, by)
    for signal in stream:
        if signal.client_sequence is None:
            yield _TimedSignal(signal, signal.arrived_at)


def _subject(log: _Log, signal: Signal, turn_of: Mapping[str, str]) -> str | None:
    """What a signal is about: for what the message of a turn tells, the main turn before it; for what is of a turn and
    was told of one of its edits, that turn."""
    if signal.subject in turn_of:
        of_edit = signal.kind in (*_OF_EDITS, SignalKind.GONE, SignalKind.CORRECTION)
        return signal.subject if of_edit else turn_of[signal.subject]
    turn = log.turns.get(signal.subject)
    explicit = signal.kind == SignalKind.FOLLOWUP and signal.source == "explicit"  # a comment on an answer
    if signal.kind not in _REPORTED_LATER or turn is None or explicit:
        return signal.subject
    row = log.main.get(turn.session, [])
    before = bisect_left(row, (turn.sequence, turn.id), key=lambda t: (t.sequence, t.id)) - 1
    return row[before].id if before >= 0 else None


def _fates(log: _Log, session: str, config: LabelsConfig) -> dict[str, _Fate]:
    """What became of the edits of a session, by suggestion; of a turn without any, of the edit that signals of the turn
    itself tell of, by turn. Later edits first, since an overwritten one shares their fate."""
    horizon = int(config.window_seconds * _SECOND)
    out: dict[str, _Fate] = {}
    later: dict[str, list[Suggestion]] = defaultdict(list)  # by path
    for turn in reversed(log.main[session]):
        own: list[Suggestion] = []
        for edit in log.suggestions.get(turn.id, ()):
            seen = log.of(edit.id, *_OF_EDITS, SignalKind.GONE) + log.of(turn.id, *_OF_EDITS, SignalKind.GONE)
            successors = [(s, out[s.id]) for s in later[edit.path] if s.shown <= edit.shown + horizon]
            out[edit.id] = _fate(edit.shown, seen + log.gone(session, edit.shown), successors, log.cut, config)
            own.append(edit)
        for edit in own:
            later[edit.path].append(edit)
        if not own and (seen := log.of(turn.id, *_OF_EDITS)):
            seen = seen + log.of(turn.id, SignalKind.GONE) + log.gone(session, turn.at)
            out[turn.id] = _fate(turn.at, seen, [], log.cut, config)
    return out


def _fate(
    shown: int,
    seen: Sequence[_TimedSignal],
    successors: Sequence[tuple[Suggestion, _Fate]],
    cut: int,
    config: LabelsConfig,
) -> _Fate:
    """`successors`: later edits of the session in the same file, with their fates."""
    window = config.window_seconds
    last_seen = overwritten = 0.0
    for one in sorted(seen, key=lambda s: s.order):
        signal, after = one.signal, max(0.0, (one.at - shown) / _SECOND)
        if signal.kind in _ENDS:
            return _Fate(LabelState.MATURED, 0.0, min(after, window), signal.kind != SignalKind.REJECTED)
        if signal.kind == SignalKind.GONE:
            return _Fate(LabelState.CENSORED, seconds=min(after, window))
        if signal.kind == SignalKind.OVERWRITTEN:
            overwritten = max(overwritten, min(1.0, signal.value))
            if overwritten >= 1.0:  # nothing of its own is left to be seen
                return _union(0.0, 1.0, successors, window)
        elif signal.kind == SignalKind.SURVIVED and signal.horizon is not None and signal.horizon <= window:
            lasted = signal.horizon if after >= _EARLY * signal.horizon else after
            last_seen = max(last_seen, lasted)
            if lasted >= window:
                return _union(min(max(signal.value, 0.0), 1.0), overwritten, successors, window)
    if cut < shown + int(config.delay_seconds * _SECOND):
        return _Fate(LabelState.OPEN)
    return _Fate(LabelState.CENSORED, seconds=last_seen)


def _union(alive: float, overwritten: float, successors: Sequence[tuple[Suggestion, _Fate]], window: float) -> _Fate:
    """The share of an edit that is alive, of it or of what replaced it."""
    if not overwritten or not successors:
        return _Fate(LabelState.MATURED, alive, window)
    states = {fate.state for _, fate in successors}
    for state in (LabelState.OPEN, LabelState.CENSORED):
        if state in states:
            return _Fate(state, seconds=min(fate.seconds for _, fate in successors if fate.state == state))
    size = sum(max(1, edit.characters) for edit, _ in successors)
    kept = sum(max(1, edit.characters) * fate.share for edit, fate in successors) / size
    return _Fate(LabelState.MATURED, min(1.0, alive + overwritten * kept), window)


@dataclass(frozen=True)
class _Judged:
    """One turn before its cell is known: what was observed, and whether its outcome is."""

    turn: ServedTurn
    state: LabelState
    reason: str
    seconds: float
    edited: bool
    observed: dict[str, float]
    correction: str | None


def _edits(log: _Log, turn: ServedTurn, fates: Mapping[str, _Fate], config: LabelsConfig) -> tuple[_Fate, float] | None:
    """The fate of all edits of a turn together, and their characters; None for a turn without."""
    rows = [(max(1.0, float(s.characters)), fates[s.id]) for s in log.suggestions.get(turn.id, ())]
    if not rows and turn.id in fates:
        rows = [(config.characters, fates[turn.id])]
    if not rows:
        return None
    size = sum(n for n, _ in rows)
    for state in (LabelState.OPEN, LabelState.CENSORED):
        if waits := [fate.seconds for _, fate in rows if fate.state == state]:
            return _Fate(state, seconds=min(waits)), size
    share = sum(n * fate.share for n, fate in rows) / size
    return _Fate(LabelState.MATURED, share, max(f.seconds for _, f in rows), any(f.undone for _, f in rows)), size


def _judge(log: _Log, turn: ServedTurn, fates: Mapping[str, _Fate], config: LabelsConfig, rated: bool) -> _Judged:
    """What is known of a turn. An invalid call and an edit that did not come are known at once and never censored; so
    is a question, but for the edit that may follow it."""
    told = log.last(turn.id)
    observed = {str(k): told[k].value for k in (*_SPOKEN, SignalKind.NO_EDIT, SignalKind.INVALID_CALL) if k in told}
    observed["latency"] = turn.seconds
    if SignalKind.FOLLOWUP in told:
        observed["followup"] *= told[SignalKind.FOLLOWUP].confidence
    if rated and SignalKind.RATING in told:
        observed["rating"] = told[SignalKind.RATING].value
    if outcomes := [s.value for s in (log.last(turn.session).get(k) for k in _OF_SESSIONS) if s is not None]:
        after = len(log.main[turn.session]) - 1 - log.place[turn.id]
        mean = sum(min(max(value, -1.0), 1.0) for value in outcomes) / len(outcomes)
        observed["session"] = mean * config.session_decay**after
    subjects = [turn.id, *(s.id for s in log.suggestions.get(turn.id, ()))]
    edits = _edits(log, turn, fates, config)
    fate = _spoken(log, turn, rated, config)
    if edits is not None:
        fate = edits[0]
        if fate.state == LabelState.MATURED:
            observed |= {"share": fate.share, "characters": edits[1], "undone": float(fate.undone)}
        chosen = [s for x in subjects for s in log.of(x, SignalKind.APPLIED, SignalKind.REJECTED)]
        last = max(chosen, key=lambda s: s.order).signal.kind if chosen else None
        observed["choice"] = 0.0 if last is None else 1.0 if last == SignalKind.APPLIED else -1.0
    elif SignalKind.QUESTION in told:
        observed.pop("no_edit", None)
        observed["question"] = 1.0
        fate, observed["repaid"] = _question(log, turn, fates, config)
    if {"invalid_call", "no_edit"} & set(observed) and fate.state != LabelState.MATURED:
        fate = _Fate(LabelState.MATURED)
    reason = "open" if fate.state == LabelState.OPEN else ""
    shown = max([turn.at, *(s.shown for s in log.suggestions.get(turn.id, ()))])
    if log.cut < shown + int(config.delay_seconds * _SECOND):
        fate, reason = _Fate(LabelState.OPEN), "delay"
    if SignalKind.ERROR in told:  # ours, not the model's
        fate, reason = _Fate(LabelState.DROPPED), "error"
    texts = [s for x in subjects for s in log.of(x, SignalKind.CORRECTION, SignalKind.FOLLOWUP) if s.signal.text]
    texts.sort(key=lambda s: (s.signal.kind == SignalKind.CORRECTION, s.order))  # what was wanted says most
    text = texts[-1].signal.text if texts else None
    return _Judged(turn, fate.state, reason, fate.seconds, edits is not None, observed, text)


def _spoken(log: _Log, turn: ServedTurn, rated: bool, config: LabelsConfig) -> _Fate:
    """The fate of a turn without an edit: known once the user has said something, else censored."""
    kinds = (*_SPOKEN, SignalKind.RATING) if rated else _SPOKEN
    heard = [s.at for s in (*log.of(turn.id, *kinds), *log.of(turn.session, *_OF_SESSIONS))]
    gone = [s.at for s in (*log.gone(turn.session, turn.at), *log.of(turn.id, SignalKind.GONE)) if s.at >= turn.at]
    window = config.window_seconds
    if heard:
        return _Fate(LabelState.MATURED, seconds=min(max(0.0, (min(heard) - turn.at) / _SECOND), window))
    if gone:
        return _Fate(LabelState.CENSORED, seconds=min((min(gone) - turn.at) / _SECOND, window))
    return _Fate(LabelState.CENSORED, seconds=window)


def _question(log: _Log, turn: ServedTurn, fates: Mapping[str, _Fate], config: LabelsConfig) -> tuple[_Fate, float]:
    """Whether the answer to a question was worth it: 1 if the edit of the very next turn survived by half or more."""
    after = log.next(turn)
    if log.of(turn.id, SignalKind.ANSWERED) and after is not None:
        edits = _edits(log, after, fates, config)
        if edits is not None and edits[0].state != LabelState.MATURED:
            return edits[0], 0.0
        return _Fate(LabelState.MATURED), float(edits is not None and edits[0].share >= 0.5)
    return _Fate(LabelState.MATURED), 0.0


def labels(
    sessions: Iterable[Session], turns: Iterable[ServedTurn], suggestions: Iterable[Suggestion],
    signals: Iterable[Signal], cut: int, config: LabelsConfig, *, of: Collection[str] | None = None,
    rated: Collection[str] = (),
) -> list[Label]:  # fmt: skip
    """A label of each main turn that was served before the cut, sorted by turn, from rows that had arrived by then; in
    any order, with any repeated. `of`: only these turns, which are also those that stand for each other when one is
    censored; the others of a session tell what came after. `rated`: turns whose ratings count. Signals slower than the
    window (commit, merge, survival of a day) are not read: see `slow_signals`."""
    log = _arrange(sessions, turns, suggestions, signals, cut)
    wanted = None if of is None else set(of)
    counted = set(rated)
    judged: list[_Judged] = []
    for session, row in log.main.items():
        if any(wanted is None or turn.id in wanted for turn in row):
            fates = _fates(log, session, config)
            judged += [_judge(log, t, fates, config, t.id in counted) for t in row if wanted is None or t.id in wanted]
    judged.sort(key=lambda j: j.turn.id)
    return _labelled(log, judged, config)


def _labelled(log: _Log, judged: Sequence[_Judged], config: LabelsConfig) -> list[Label]:
    names = sorted({name for j in judged for name in j.observed})
    columns = {name: np.array([j.observed.get(name, np.nan) for j in judged]) for name in names}
    parts = components(columns, config)
    reward_N = rewards(parts) if judged else np.zeros(0)
    closed = [i for i, j in enumerate(judged) if j.state in _CLOSED]
    cells: dict[tuple[str, bool], int] = {}
    cell = [cells.setdefault((log.sessions[judged[i].turn.session].tenant, judged[i].edited), len(cells))
            for i in closed]  # fmt: skip
    seconds = np.array([judged[i].seconds for i in closed], float)
    known = np.array([judged[i].state == LabelState.MATURED for i in closed], bool)
    weight_N = np.ones(len(judged))
    weight_N[closed] = censoring_weights(seconds, known, np.array(cell, int), config.most_weight)
    rules = rules_version(config)
    out: list[Label] = []
    for i, j in enumerate(judged):
        matured = j.state == LabelState.MATURED
        kept = {n: float(parts[n][i]) for n in sorted(parts) if not np.isnan(parts[n][i])} if matured else {}
        out.append(Label(turn=j.turn.id, cut=log.cut, rules=rules, state=j.state, components=kept,
                         reason=j.reason,
                         reward=float(reward_N[i]) if matured else 0.0, correction=j.correction,
                         weight=float(weight_N[i]) if matured else 0.0))  # fmt: skip
    return out


def slow_signals(signals: Iterable[Signal], cut: int, config: LabelsConfig) -> list[Signal]:
    """What tells of turns that are too old to be trained on: commits, merges, reverts, and survival beyond the
    window. It serves to watch whether the early signals told the truth."""
    kinds = (SignalKind.COMMITTED, SignalKind.MERGED, SignalKind.REVERTED)
    beyond = config.window_seconds
    late = [s for s in distinct(signals, cut) if s.kind in kinds or (s.kind == SignalKind.SURVIVED and s.horizon)]
    return [s for s in late if s.kind in kinds or (s.horizon or 0.0) > beyond]
