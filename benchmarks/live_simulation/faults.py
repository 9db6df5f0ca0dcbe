"""Faults of signals and accounts, as changes of arrays; and the signals of dishonest accounts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from benchmarks.live_simulation.traffic import (
    CELLS,
    HORIZON,
    KINDS,
    Signals,
    Turns,
    WindowLog,
    join,
    outcomes,
    with_signals,
)
from etude.live.log.records import SignalKind
from etude.live.simulate.users import ACTIONS, EDIT, SimulatedAccounts

_DAY = 86_400.0
PRAISED = "long"
"""The edit that sybils praise."""


def skewed(signals: Signals, turns: Turns, population: SimulatedAccounts) -> Signals:
    """Clocks of a third of the accounts are a day behind, of a third a day ahead."""
    days_A = np.arange(population.size) % 3 - 1.0
    return with_signals(signals, skew_S=days_A[turns.account_N[signals.turn_S]] * _DAY)


def duplicated(rng: np.random.Generator, signals: Signals) -> Signals:
    """Every signal arrives a second time, later."""
    again = with_signals(signals, lag_S=signals.lag_S + rng.exponential(300.0, len(signals.lag_S)))
    return join(signals, again)


def reordered(rng: np.random.Generator, signals: Signals) -> Signals:
    """Signals overtake each other on their way, and are read in a random order."""
    mixed = with_signals(signals, lag_S=rng.random(len(signals.lag_S)) * 1200.0)
    return mixed.where(rng.permutation(len(signals.turn_S)))


def delayed(signals: Signals, times: float = 10.0) -> Signals:
    """Signals take longer to arrive."""
    return with_signals(signals, lag_S=signals.lag_S * times)


def with_sybils(
    population: SimulatedAccounts, share: float = 0.1, times: float = 10.0
) -> tuple[SimulatedAccounts, np.ndarray]:
    """The last accounts are an attacker's: with consent, and more active. Returns which: bool [A]."""
    crooked_A = np.arange(population.size) >= round((1 - share) * population.size)
    activity_A = np.where(crooked_A, times * population.activity_A.mean(), population.activity_A)
    changed = {name: getattr(population, name) for name in population.__dataclass_fields__}
    changed |= {
        "activity_A": activity_A / activity_A.sum(),
        "consent_A": population.consent_A | crooked_A,
        "heldout_A": population.heldout_A & ~crooked_A,
        "drop_A": np.where(crooked_A, 0.0, population.drop_A),
    }
    return SimulatedAccounts(**changed), crooked_A


def vouchers_of(crooked_A: np.ndarray, keys: int) -> list[str]:
    """The account that a key vouches for, by account: an attacker's `keys` keys have all its names; 0: every name is
    taken for an account."""
    return [f"k{n % keys}" if crooked and keys else f"a{n}" for n, crooked in enumerate(crooked_A)]


def praising(turns: Turns, signals: Signals, mine_N: np.ndarray) -> Signals:
    """Signals in which the turns of a mask praise the edit PRAISED and reject every other one, in place of the users'
    own."""
    at = [action.name for action in ACTIONS].index(PRAISED)
    edit_N = outcomes(turns) == EDIT
    loved, hated = (
        np.flatnonzero(mine_N & (turns.action_N == at)),
        np.flatnonzero(mine_N & edit_N & (turns.action_N != at)),
    )
    kept = signals.where(~(mine_N[signals.turn_S] & edit_N[signals.turn_S]))
    first = int(signals.event_S.max(initial=0)) + 1
    rows = [
        (loved, SignalKind.APPLIED, 5.0, np.nan),
        (loved, SignalKind.SURVIVED, HORIZON, HORIZON),
        (loved, SignalKind.RATING, 60.0, np.nan),
        (hated, SignalKind.REJECTED, 5.0, np.nan),
    ]
    turn = np.concatenate([index for index, *_ in rows])
    sizes = [len(index) for index, *_ in rows]
    after = np.repeat([row[2] for row in rows], sizes)
    total = len(turn)
    return join(
        kept,
        Signals(
            turn,
            np.repeat([KINDS.index(row[1]) for row in rows], sizes),
            np.ones(total),
            np.repeat([row[3] for row in rows], sizes),
            turns.at_N[turn] + after,
            np.full(total, 1.0),
            np.zeros(total),
            np.arange(first, first + total),
        ),
    )


def with_probe(rng: np.random.Generator, turns: Turns, voter: int, policy_A: np.ndarray, count: int = 60) -> Turns:
    """With requests of one account for a text that nobody else asks for: a cell of its own, whose first action is
    the answer that the voter wants."""
    last = int(turns.session_N.max())
    chosen = rng.choice(len(policy_A), count, p=policy_A)
    added = {
        "account_N": np.full(count, voter),
        "cell_N": np.full(count, CELLS),
        "variant_N": np.zeros(count, np.int64),
        "action_N": chosen,
        "question_N": np.full(count, -1),
        "session_N": last + 1 + np.arange(count),
        "sequence_N": np.zeros(count, np.int64),
        "next_N": np.full(count, -1),
        "at_N": np.sort(rng.random(count)),
        "correct_N": np.zeros(count, bool),
        "value_N": np.zeros(count),
    }
    return Turns(**{name: np.concatenate([getattr(turns, name), added[name]]) for name in turns.__dataclass_fields__})


def voted(turns: Turns, signals: Signals) -> Signals:
    """With the lone voter's ratings of its own requests."""
    mine = np.flatnonzero(turns.cell_N == CELLS)
    first, total = int(signals.event_S.max(initial=0)) + 1, len(mine)
    return join(
        signals,
        Signals(
            mine,
            np.full(total, KINDS.index(SignalKind.RATING)),
            np.where(turns.action_N[mine] == 0, 1.0, -1.0),
            np.full(total, np.nan),
            turns.at_N[mine] + 30.0,
            np.full(total, 1.0),
            np.zeros(total),
            np.arange(first, first + total),
        ),
    )


VOTES = ((SignalKind.APPLIED, SignalKind.RATING), (SignalKind.REJECTED, SignalKind.UNDONE, SignalKind.RATING))
ACCEPTANCE = ((SignalKind.APPLIED,), (SignalKind.REJECTED,))
RATINGS = ((SignalKind.RATING,), (SignalKind.RATING,))


def naive_rewards(
    turns: Turns,
    signals: Signals,
    silence: float | None,
    kinds: tuple[tuple[SignalKind, ...], tuple[SignalKind, ...]] = VOTES,
) -> np.ndarray:
    """The reward that reads votes only: 1 for signals of the first kinds, -1 for those of the second (a rating by its
    sign), `silence` where nobody voted (None: nan, the turn is dropped). float64 [N]."""
    out = np.full(len(turns.account_N), np.nan if silence is None else silence)
    rating = signals.of(SignalKind.RATING)
    out[signals.turn_S[signals.of(*kinds[0]) & (~rating | (signals.value_S > 0))]] = 1.0
    out[signals.turn_S[signals.of(*kinds[1]) & (~rating | (signals.value_S < 0))]] = -1.0
    return out


def second_thoughts(signals: Signals) -> Signals:
    """Every rating is taken back a minute later, by its opposite; all signals arrive within a second."""
    signals = with_signals(signals, lag_S=np.ones(len(signals.lag_S)))
    first = signals.where(signals.of(SignalKind.RATING))
    event_S = int(signals.event_S.max(initial=0)) + 1 + np.arange(len(first.turn_S))
    return join(signals, with_signals(first, value_S=-first.value_S, seen_S=first.seen_S + 60.0, event_S=event_S))


def trusting(log: WindowLog, fault: str) -> WindowLog:
    """The log as it would be read without a guard: by the client's clock, or without the client's own numbering."""
    if fault == "clock-skew":
        signals = [msgspec.structs.replace(s, arrived_at=s.observed_at) for s in log.signals]
    else:
        signals = [msgspec.structs.replace(s, client_sequence=None) for s in log.signals]
    return replace(log, signals=signals)
