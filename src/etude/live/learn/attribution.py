"""The label of each turn, from the records up to a cut. Pure functions of their arguments.

    records -> timeline (by turn, in order) -> fates (of edits) -> observations (of turns) -> reward and weight

A turn whose edits are no longer observed is censored: it is left out, neither good nor bad, and matured turns of its
cell weigh 1/G in its place, with G the probability of not being censored until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etude.config.live import LabelsConfig
from etude.live.learn.fates import SECOND, EditFate, client_windows, session_fates, turn_fate
from etude.live.learn.rewards import censoring_weights, components, rewards, rules_version
from etude.live.learn.timeline import TurnLog, arrange, distinct
from etude.live.log.records import Label, LabelState, ServedTurn, Session, Signal, SignalKind, Suggestion

_CLOSED = (LabelState.MATURED, LabelState.CENSORED)
_SESSION_KINDS = (SignalKind.ENDED, SignalKind.TESTS)
_MESSAGE_KINDS = (SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.STOPPED, SignalKind.TESTS, SignalKind.LINT)


@dataclass(frozen=True)
class _Observations:
    """The observations of one turn, and the state of its outcome."""

    turn: ServedTurn
    state: LabelState
    reason: str
    seconds: float
    edited: bool
    observed: dict[str, float]
    correction: str | None
    reader: str


def _observe(
    log: TurnLog, turn: ServedTurn, fates: Mapping[str, EditFate], config: LabelsConfig, rated: bool
) -> _Observations:
    """The observations of a turn. An invalid call and a missing edit are observed at once and never censored; so is a
    question, except for the edit that may follow its answer."""
    last_signals = log.last(turn.id)
    kinds = (*_MESSAGE_KINDS, SignalKind.NO_EDIT, SignalKind.INVALID_CALL)
    observed = {str(k): last_signals[k].value for k in kinds if k in last_signals}
    observed["latency"] = turn.seconds
    if SignalKind.FOLLOWUP in last_signals:
        observed["followup"] *= last_signals[SignalKind.FOLLOWUP].confidence
    if rated and SignalKind.RATING in last_signals:
        observed["rating"] = last_signals[SignalKind.RATING].value
    if outcomes := [s.value for s in (log.last(turn.session).get(k) for k in _SESSION_KINDS) if s is not None]:
        after = len(log.main[turn.session]) - 1 - log.place[turn.id]
        mean = sum(min(max(value, -1.0), 1.0) for value in outcomes) / len(outcomes)
        observed["session"] = mean * config.session_decay**after
    subjects = [turn.id, *(s.id for s in log.suggestions.get(turn.id, ()))]
    edits = turn_fate(log, turn, fates, config)
    fate = _edit_free_fate(log, turn, rated, config)
    if edits is not None:
        observed.pop("no_edit", None)  # the gateway sees the answer alone, and here is an edit
        fate = edits[0]
        if fate.state == LabelState.MATURED:
            observed |= {"share": fate.share, "characters": edits[1], "undone": float(fate.undone)}
        chosen = [s for x in subjects for s in log.of(x, SignalKind.APPLIED, SignalKind.REJECTED)]
        last = max(chosen, key=lambda s: s.order).signal.kind if chosen else None
        observed["choice"] = 0.0 if last is None else 1.0 if last == SignalKind.APPLIED else -1.0
    elif SignalKind.QUESTION in last_signals:
        observed.pop("no_edit", None)
        observed["question"] = 1.0
        fate, observed["repaid"] = _question(log, turn, fates, config)
    if {"invalid_call", "no_edit"} & set(observed) and fate.state != LabelState.MATURED:
        fate = EditFate(LabelState.MATURED)
    reason = "open" if fate.state == LabelState.OPEN else ""
    shown = max([turn.at, *(s.shown for s in log.suggestions.get(turn.id, ()))])
    if log.cut < shown + int(config.delay_seconds * SECOND):
        fate, reason = EditFate(LabelState.OPEN), "delay"
    if SignalKind.ERROR in last_signals:  # ours, not the model's
        fate, reason = EditFate(LabelState.DROPPED), "error"
    texts = [s for x in subjects for s in log.of(x, SignalKind.CORRECTION, SignalKind.FOLLOWUP) if _corrects(s.signal)]
    texts.sort(key=lambda s: (s.signal.kind == SignalKind.CORRECTION, s.order))  # a correction goes before follow-ups
    text = texts[-1].signal.text if texts else None
    reader = last_signals[SignalKind.FOLLOWUP].reader if SignalKind.FOLLOWUP in last_signals else ""
    return _Observations(turn, fate.state, reason, fate.seconds, edits is not None, observed, text, reader)


def _corrects(signal: Signal) -> bool:
    """Whether the text of a signal says what was wanted instead: thanks do not."""
    return signal.text is not None and (signal.kind == SignalKind.CORRECTION or signal.value * signal.confidence >= 0.5)


def _edit_free_fate(log: TurnLog, turn: ServedTurn, rated: bool, config: LabelsConfig) -> EditFate:
    """The fate of a turn without an edit: matured once the user has reacted, else censored."""
    kinds = (*_MESSAGE_KINDS, SignalKind.RATING) if rated else _MESSAGE_KINDS
    answered = [s.at for s in (*log.of(turn.id, *kinds), *log.of(turn.session, *_SESSION_KINDS))]
    gone = [s.at for s in (*log.gone(turn.session, turn.at), *log.of(turn.id, SignalKind.GONE)) if s.at >= turn.at]
    window = config.window_seconds
    if answered:
        return EditFate(LabelState.MATURED, seconds=min(max(0.0, (min(answered) - turn.at) / SECOND), window))
    if gone:
        return EditFate(LabelState.CENSORED, seconds=min((min(gone) - turn.at) / SECOND, window))
    return EditFate(LabelState.CENSORED, seconds=window)


def _question(
    log: TurnLog, turn: ServedTurn, fates: Mapping[str, EditFate], config: LabelsConfig
) -> tuple[EditFate, float]:
    """The fate of a question, and 1.0 if its answer repaid it: at least half of the next turn's edit survived."""
    after = log.next(turn)
    if log.of(turn.id, SignalKind.ANSWERED) and after is not None:
        edits = turn_fate(log, after, fates, config)
        if edits is not None and edits[0].state != LabelState.MATURED:
            return edits[0], 0.0
        return EditFate(LabelState.MATURED), float(edits is not None and edits[0].share >= 0.5)
    return EditFate(LabelState.MATURED), 0.0


def labels(
    sessions: Iterable[Session],
    turns: Iterable[ServedTurn],
    suggestions: Iterable[Suggestion],
    signals: Iterable[Signal],
    cut: int,
    config: LabelsConfig,
    *,
    of: Collection[str] | None = None,
    rated: Collection[str] = (),
) -> list[Label]:
    """The labels of the main turns before `cut`, sorted by turn, from the rows that had arrived by then. Rows may come
    in any order, and repeatedly. `of` restricts the labels to these turns, which also share the weight of censored
    ones; other turns of their sessions count as context. `rated`: turns whose ratings count. Signals slower than the
    window (commit, merge) are not read: see `slow_signals`."""
    log = arrange(sessions, turns, suggestions, signals, cut)
    wanted = None if of is None else set(of)
    counted = set(rated)
    observations: list[_Observations] = []
    windows = client_windows(log, config)
    for session, row in log.main.items():
        if any(wanted is None or turn.id in wanted for turn in row):
            fates = session_fates(log, session, config, windows)
            observations += [
                _observe(log, t, fates, config, t.id in counted) for t in row if wanted is None or t.id in wanted
            ]
    observations.sort(key=lambda j: j.turn.id)
    return _labelled(log, observations, config)


def _labelled(log: TurnLog, observations: Sequence[_Observations], config: LabelsConfig) -> list[Label]:
    names = sorted({name for j in observations for name in j.observed})
    columns = {name: np.array([j.observed.get(name, np.nan) for j in observations]) for name in names}
    parts = components(columns, config)
    reward_N = rewards(parts) if observations else np.zeros(0)
    closed = [i for i, j in enumerate(observations) if j.state in _CLOSED]
    cells: dict[tuple[str, bool], int] = {}
    cell = [
        cells.setdefault((log.sessions[observations[i].turn.session].tenant, observations[i].edited), len(cells))
        for i in closed
    ]
    seconds = np.array([observations[i].seconds for i in closed], float)
    known = np.array([observations[i].state == LabelState.MATURED for i in closed], bool)
    weight_N = np.ones(len(observations))
    weight_N[closed] = censoring_weights(seconds, known, np.array(cell, int), config.most_weight)
    rules = rules_version(config)
    out: list[Label] = []
    for i, j in enumerate(observations):
        matured = j.state == LabelState.MATURED
        kept = {n: float(parts[n][i]) for n in sorted(parts) if not np.isnan(parts[n][i])} if matured else {}
        label = Label(
            turn=j.turn.id,
            cut=log.cut,
            rules=rules,
            state=j.state,
            components=kept,
            reason=j.reason,
            reward=float(reward_N[i]) if matured else 0.0,
            correction=j.correction,
            weight=float(weight_N[i]) if matured else 0.0,
            reader=j.reader if matured else "",
        )
        out.append(label)
    return out


def slow_signals(signals: Iterable[Signal], cut: int, config: LabelsConfig) -> list[Signal]:
    """The signals that come too late for training: commits, merges, reverts, and survival beyond the window.
    `calibration` compares early signals with them."""
    kinds = (SignalKind.COMMITTED, SignalKind.MERGED, SignalKind.REVERTED)
    beyond = config.window_seconds
    late = [s for s in distinct(signals, cut) if s.kind in kinds or (s.kind == SignalKind.SURVIVED and s.horizon)]
    return [s for s in late if s.kind in kinds or (s.horizon or 0.0) > beyond]
