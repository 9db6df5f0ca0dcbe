"""Requests of simulated accounts, what they were answered, and what became of it: as arrays, and as records of the log.

Arrays are by turn (N) and by signal (S). Times are seconds since the window opened; `records` gives the log of the live
loop, in which they are nanoseconds of the server's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.live_simulation.texts import ASKED, read_answer
from etude.live.log.records import Arm, Consent, ServedTurn, Session, Signal, SignalKind, Suggestion, TurnKind
from etude.live.simulate.users import (
    ACTIONS,
    BROKEN,
    EDIT,
    OUTCOMES,
    QUESTION,
    TEXT,
    VARIANT_SHARES,
    Action,
    SimulatedAccounts,
    has_properties,
)

_SESSION = 4
CELLS = 4  # kinds of request
COLLECT = 7200.0  # seconds of a window that collect turns
HORIZON = 1800.0
PERIOD = 5 * 3600.0  # from one window to the next
EPOCH = 1_767_225_600_000_000_000  # 1 January 2026
KINDS = tuple(SignalKind)
_CODE = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Turns:
    """Answers, int64 [N] unless noted otherwise. A session has up to `_SESSION` requests of an account."""

    account_N: np.ndarray
    cell_N: np.ndarray
    variant_N: np.ndarray
    action_N: np.ndarray  # -1: an edit after an answered question
    question_N: np.ndarray  # the turn whose question this one follows, or -1
    session_N: np.ndarray
    sequence_N: np.ndarray  # within the session
    next_N: np.ndarray  # the next turn of the session, or -1
    at_N: np.ndarray  # float64
    correct_N: np.ndarray  # bool
    value_N: np.ndarray  # float64: hidden utility, correctness times preference


@dataclass(frozen=True)
class Signals:
    """Signals on turns, float64 [S] unless noted otherwise."""

    turn_S: np.ndarray  # int64
    kind_S: np.ndarray  # int64, of KINDS
    value_S: np.ndarray
    horizon_S: np.ndarray  # nan: none
    seen_S: np.ndarray  # seconds since the window opened, true time
    lag_S: np.ndarray  # seconds until it arrives
    skew_S: np.ndarray  # error of the client's clock
    event_S: np.ndarray  # int64: repetitions share it

    def where(self, keep_S: np.ndarray) -> Signals:
        """Those that a mask or an order of indices selects."""
        return Signals(**{name: getattr(self, name)[keep_S] for name in self.__dataclass_fields__})

    def of(self, *kinds: SignalKind) -> np.ndarray:
        """Mask of the signals of these kinds: bool [S]."""
        return np.isin(self.kind_S, [_CODE[kind] for kind in kinds])


def serve(
    rng: np.random.Generator,
    population: SimulatedAccounts,
    policy_CVA: np.ndarray,
    count: int,
    actions: tuple[Action, ...] = ACTIONS,
    activity_A: np.ndarray | None = None,
) -> Turns:
    """`count` answers of a policy (probabilities by cell, variant and action), in the order of their times."""
    activity = population.activity_A if activity_A is None else activity_A
    account = rng.choice(population.size, count, p=activity / activity.sum())
    cell = rng.integers(0, policy_CVA.shape[0], count)
    variant = rng.choice(len(VARIANT_SHARES), count, p=VARIANT_SHARES)
    sums = policy_CVA[cell, variant].cumsum(-1)
    action = np.minimum((rng.random((count, 1)) > sums).sum(-1), len(actions) - 1)
    rate = np.array([a.correct for a in actions]).T
    correct = rng.random(count) < rate[variant, action]
    taste = (population.preference_AQ[account] * has_properties(actions)[variant, action]).sum(-1)
    at = np.sort(rng.random(count)) * COLLECT
    outcome = np.array([OUTCOMES.index(a.outcome) for a in actions])[action]
    patience = population.patience_A[account] * np.where(variant == 2, 1.0, 0.3)
    answered = np.flatnonzero((outcome == QUESTION) & (rng.random(count) < patience))
    follows = np.append(np.full(count, -1), answered)
    of = np.append(np.arange(count), answered)  # the turn after an answered question is like it, but for the edit
    session, sequence, following = _sessions(account, follows)
    later = np.where(following[answered] >= 0, at[np.minimum(following[count:], count - 1)], np.inf)
    when = np.append(
        at, np.minimum(at[answered] + 60.0, (at[answered] + np.where(following[count:] >= 0, later, np.inf)) / 2)
    )
    return Turns(
        account[of],
        cell[of],
        variant[of],
        np.append(action, np.full(len(answered), -1)),
        follows,
        session,
        sequence,
        following,
        when,
        correct[of],
        (correct * taste)[of],
    )


def _sessions(account: np.ndarray, follows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Session, place in it and next turn of each turn: requests of an account in their order, a turn that follows a
    question directly after it."""
    first, count = len(account), len(follows_N)
    order = np.argsort(account, kind="stable")
    mine = account[order]
    start = np.flatnonzero(np.r_[True, mine[1:] != mine[:-1]])
    rank = np.arange(first) - np.repeat(start, np.diff(np.r_[start, first]))
    opens = np.zeros(first, np.int64)
    opens[order] = np.cumsum(rank % _SESSION == 0) - 1
    session = np.append(opens, opens[follows_N[first:]])
    place = np.append(np.arange(first) * 2, follows_N[first:] * 2 + 1)
    chain = np.lexsort((place, session))
    fresh = np.r_[True, np.diff(session[chain]) != 0]
    head = np.flatnonzero(fresh)
    sequence, following = np.empty(count, np.int64), np.full(count, -1)
    sequence[chain] = np.arange(count) - np.repeat(head, np.diff(np.r_[head, count]))
    following[chain[:-1]] = np.where(fresh[1:], -1, chain[1:])
    return session, sequence, following


def outcomes(turns: Turns, actions: tuple[Action, ...] = ACTIONS) -> np.ndarray:
    """The outcome of each turn, of OUTCOMES: int64 [N]. Cells beyond the first are of requests for a text."""
    usual_N = np.append([OUTCOMES.index(a.outcome) for a in actions], [EDIT])[turns.action_N]
    return np.where(turns.cell_N >= CELLS, TEXT, usual_N)


def react(
    rng: np.random.Generator,
    population: SimulatedAccounts,
    turns: Turns,
    actions: tuple[Action, ...] = ACTIONS,
    *,
    ratings: float = 0.05,
) -> Signals:
    """The signals of honest users. An edit is applied or rejected at a glance, undone if its user finds it wrong or
    unlike the house, and what is alive of it after two and thirty minutes is told unless the client is gone first."""
    count = len(turns.account_N)
    outcome = outcomes(turns, actions)
    charm = np.append([a.charm for a in actions], [0.0])[turns.action_N]
    glance = np.append([a.glance for a in actions], [0.0])[turns.action_N]
    edit, account, value = outcome == EDIT, turns.account_N, turns.value_N
    rows: list[_SignalRow] = []

    def tell(
        mask: np.ndarray,
        kind: SignalKind,
        worth: np.ndarray | float,
        after: np.ndarray | float,
        horizon: float = np.nan,
    ) -> None:
        rows.append((mask, kind, worth, horizon, after))

    applied = edit & (rng.random(count) < np.minimum(0.97, 0.35 + 0.5 * value + glance))
    noticed = ~turns.correct_N & (rng.random(count) < population.skill_A[account])
    spoiled = np.where(noticed, 0.55, np.where(turns.correct_N, 0.3 * (1.0 - value), 0.05))
    undone = applied & (rng.random(count) < spoiled)
    undone_at = np.minimum(rng.lognormal(np.log(240.0), 0.7, count), 0.8 * HORIZON)
    noise = 0.1 * rng.standard_normal((2, count))
    alive = np.clip(np.where(turns.correct_N, value, np.where(noticed, 0.1, 0.35)) + noise[0], 0.0, 1.0)
    # who waits for a hard request rather leaves
    gone = applied & (rng.random(count) < population.drop_A[account] * np.where(turns.variant_N == 1, 1.8, 1.0))
    gone_at = np.where(gone, rng.random(count) * HORIZON, np.inf)
    undone &= undone_at < gone_at
    tell(applied, SignalKind.APPLIED, 1.0, 5.0)
    tell(edit & ~applied, SignalKind.REJECTED, 1.0, 5.0)
    tell(undone, SignalKind.UNDONE, 1.0, undone_at)
    early = applied & ~(undone & (undone_at <= 120.0)) & (gone_at > 120.0)
    tell(early, SignalKind.SURVIVED, np.sqrt(alive), 120.0, 120.0)
    tell(applied & ~undone & (gone_at > HORIZON), SignalKind.SURVIVED, alive, HORIZON, HORIZON)
    tell(gone & ~undone, SignalKind.GONE, 1.0, gone_at)
    has_next = turns.next_N >= 0
    reply_at = np.where(has_next, turns.at_N[turns.next_N] - turns.at_N, 0.0)
    unhappy = np.clip(1.0 - value - 0.2 * charm + 1.5 * noise[1], 0.0, 1.0)
    writes = has_next & (rng.random(count) < 0.4) & (outcome != QUESTION)
    tell(writes, SignalKind.FOLLOWUP, unhappy, reply_at)
    rates = (rng.random(count) < ratings) & (outcome != TEXT)
    tell(rates, SignalKind.RATING, np.where(rng.random(count) < np.clip(value + charm, 0, 1), 1.0, -1.0), 60.0)
    says = {kind: said(turns, kind, actions) for kind in _OF_THE_ANSWER}
    tell(says[SignalKind.QUESTION], SignalKind.QUESTION, 1.0, 0.0)
    answered = np.zeros(count, bool)
    answered[turns.question_N[turns.question_N >= 0]] = True
    tell(answered, SignalKind.ANSWERED, 1.0, reply_at)
    tell(says[SignalKind.INVALID_CALL], SignalKind.INVALID_CALL, 1.0, 0.0)
    tell(says[SignalKind.NO_EDIT], SignalKind.NO_EDIT, 1.0, 0.0)
    tell((outcome == BROKEN) & has_next & (rng.random(count) < 0.5), SignalKind.RETRY, 1.0, reply_at)
    return _gather(rng, population, turns, rows)


_OF_THE_ANSWER = (SignalKind.QUESTION, SignalKind.INVALID_CALL, SignalKind.NO_EDIT)


def said(turns: Turns, kind: SignalKind, actions: tuple[Action, ...] = ACTIONS) -> np.ndarray:
    """The turns whose answer the gateway reads as a signal of the kind, from its tokens: bool [N]."""
    numbers = range(len(ASKED))
    says_AK = np.array([[kind in read_answer(a, n).kinds for n in numbers] for a in actions] + [[False] * len(ASKED)])
    return says_AK[turns.action_N, np.arange(len(turns.action_N)) % len(ASKED)] & (turns.cell_N < CELLS)


_SignalRow = tuple[np.ndarray, SignalKind, np.ndarray | float, float, np.ndarray | float]
"""The turns of a signal, its kind, value, horizon, and seconds after the turn."""


def _gather(rng: np.random.Generator, population: SimulatedAccounts, turns: Turns, rows: list[_SignalRow]) -> Signals:
    count = len(turns.account_N)
    index = [np.flatnonzero(mask) for mask, *_ in rows]
    turn = np.concatenate(index)
    total = len(turn)

    def spread(position: int) -> np.ndarray:
        return np.concatenate([np.broadcast_to(row[position], count)[i] for row, i in zip(rows, index, strict=True)])

    kind = np.concatenate([np.full(len(i), _CODE[row[1]]) for row, i in zip(rows, index, strict=True)])
    lag = population.delay_A[turns.account_N[turn]] * rng.lognormal(0.0, 1.0, total)
    return Signals(
        turn,
        kind,
        spread(2).astype(float),
        spread(3).astype(float),
        turns.at_N[turn] + spread(4),
        np.minimum(lag, 6 * 3600.0),
        np.zeros(total),
        np.arange(total),
    )


@dataclass(frozen=True)
class WindowLog:
    """A window of the live log as records. Turn number n of the arrays is `turns[n]`."""

    sessions: list[Session]
    turns: list[ServedTurn]
    suggestions: list[Suggestion]
    signals: list[Signal]
    cut: int


def nanoseconds(window: int, seconds: float) -> int:
    """Time of the server, `seconds` after a window opened."""
    return EPOCH + int((window * PERIOD + seconds) * 1e9)


def records(
    population: SimulatedAccounts,
    turns: Turns,
    signals: Signals,
    window: int,
    actions: tuple[Action, ...] = ACTIONS,
    consent_A: np.ndarray | None = None,
    vouchers: list[str] | None = None,
) -> WindowLog:
    """The log that the gateway would have written; `vouchers`: by account, the one that a key vouches for."""
    granted = population.consent_A if consent_A is None else consent_A
    outcome = outcomes(turns, actions)
    base = nanoseconds(window, 0.0)
    sessions: list[Session] = []
    served: list[ServedTurn] = []
    suggestions: list[Suggestion] = []
    size = np.append([read_answer(a, 0).characters for a in actions], [400])[turns.action_N]
    columns = (turns.account_N, turns.session_N, turns.sequence_N, turns.at_N, outcome, size)
    for n, (account, session, sequence, at, how, characters) in enumerate(
        zip(*(c.tolist() for c in columns), strict=True)
    ):
        time = base + int(at * 1e9)
        if sequence == 0:
            consent = Consent(granted=bool(granted[account]), scope="train", policy="tenant", at=time)
            sessions.append(
                Session(
                    id=f"S{window:03}-{session:06}",
                    tenant="firm",
                    account=f"a{account}",
                    voucher=vouchers[account] if vouchers else f"a{account}",
                    client="editor",
                    consent=consent,
                    organisation=f"o{population.organisation_A[account]}",
                    arm=Arm.CONTROL,
                    release=window,
                    propensity=1.0,
                    opened=time,
                )
            )
        served.append(
            ServedTurn(
                id=f"T{window:03}-{n:06}",
                session=f"S{window:03}-{session:06}",
                sequence=sequence,
                kind=TurnKind.MAIN,
                release=window,
                manifest="",
                spans=(),
                prompt_tokens=1,
                sampled_tokens=1,
                blob="simulated",
                scrubbed={},
                rules="1",
                stop="end_turn",
                seconds=1.0,
                cluster="one",
                at=time,
            )
        )
        if how == EDIT:
            suggestions.append(
                Suggestion(
                    id=f"E{window:03}-{n:06}",
                    turn=f"T{window:03}-{n:06}",
                    path="p",
                    base="b",
                    old_lines=(0, 1),
                    new="n",
                    characters=characters,
                    shown=time,
                )
            )
    cut = nanoseconds(window, COLLECT + 2 * HORIZON)
    return WindowLog(sessions, served, suggestions, signal_records(signals, turns, outcome, window), cut)


_OF_THE_NEXT = {SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED}
OF_AN_EDIT = {SignalKind.APPLIED, SignalKind.REJECTED, SignalKind.UNDONE, SignalKind.SURVIVED, SignalKind.GONE}


def signal_records(signals: Signals, turns: Turns, outcome_N: np.ndarray, window: int) -> list[Signal]:
    """Signals in the order of the arrays: of an edit, of the turn that brings a message, or of the turn itself."""
    base = nanoseconds(window, 0.0)
    out: list[Signal] = []
    number_S = np.empty(len(signals.turn_S), np.int64)
    number_S[np.argsort(signals.seen_S, kind="stable")] = np.arange(len(number_S))
    columns = (
        signals.turn_S,
        signals.kind_S,
        signals.value_S,
        signals.horizon_S,
        signals.seen_S,
        signals.lag_S,
        signals.skew_S,
        signals.event_S,
        number_S,
    )
    for n, code, value, horizon, seen, lag, skew, event, number in zip(*(c.tolist() for c in columns), strict=True):
        kind = KINDS[code]
        letter = "E" if kind in OF_AN_EDIT and outcome_N[n] == EDIT else "T"
        subject = turns.next_N[n] if kind in _OF_THE_NEXT else n
        out.append(
            Signal(
                event=f"{window:03}-{event:07}",
                tenant="firm",
                subject=f"{letter}{window:03}-{subject:06}",
                kind=kind,
                value=value,
                horizon=None if horizon != horizon else horizon,
                observed_at=base + int((seen + skew) * 1e9),
                arrived_at=base + int((seen + lag) * 1e9),
                source="client",
                client_sequence=number,
            )
        )
    return out


def with_signals(signals: Signals, **changed: np.ndarray) -> Signals:
    """The same signals with some arrays replaced."""
    return replace(signals, **changed)


def join(first: Signals, second: Signals) -> Signals:
    """Both, one after the other."""
    return Signals(**{n: np.concatenate([getattr(first, n), getattr(second, n)]) for n in first.__dataclass_fields__})
