"""Ten versions of a bandit-sized policy through the live loop: requests, signals, labels, filters, estimate, update.

A run is a pure function of its arguments. Beside a run stand the oracle, which learns from hidden utility, and the
null, whose rewards are shuffled among the turns of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.live_simulation import bandit, faults
from benchmarks.live_simulation.traffic import CELLS, Signals, Turns, WindowLog, nanoseconds, react, records, serve
from etude.config.live import LabelsConfig
from etude.live.learn.attribution import labels
from etude.live.learn.content import RequestFeatures
from etude.live.learn.estimate import baselines, first_of, shares_capped
from etude.live.learn.filters import WindowRows, decide
from etude.live.log.records import LabelState, SignalKind
from etude.live.simulate.users import SimulatedAccounts, draw_population, utility

VERSIONS = 10
TURNS = 2000  # requests of a window
RATE = 6.0  # of the update
_OLD = 60.0  # days that honest accounts have been known for
LIVE, ORACLE, NULL, PLUS, ZERO, DROPPED = "live", "oracle", "null", "plus", "zero", "dropped"
SILENCE = {PLUS: 1.0, ZERO: 0.0, DROPPED: None}
"""The naive treatments of a turn that nobody voted on."""


@dataclass(frozen=True)
class Setting:
    """The settings of a run. `rewards`: their source. `fault`: name of a scenario, "" for none. `guarded`:
    whether the stage that stops the fault is on."""

    rewards: str = LIVE
    fault: str = ""
    guarded: bool = True
    versions: int = VERSIONS
    turns: int = TURNS

    def off(self, fault: str) -> bool:
        """Whether this run has a fault and not the stage that stops it."""
        return self.fault == fault and not self.guarded

    @property
    def keys(self) -> int:
        """The keys of an attacker who invents 300 names; those of "honest" give no consent."""
        return {"one-key": 1, "five-keys": 5, "honest": 1}.get(self.fault, 0)

    @property
    def replaces(self) -> bool:
        """Whether something else stands in the place of the labels."""
        return self.rewards != LIVE or self.off("short-edit-hack") or self.off("flattery")


@dataclass(frozen=True)
class LearningRun:
    """`logits` of the versions, the first being the one before, and hidden utility of each."""

    logits: list[np.ndarray]
    utility: list[float]

    @property
    def gain(self) -> float:
        """Rise of hidden utility."""
        return self.utility[-1] - self.utility[0]


@dataclass(frozen=True)
class Window:
    """One window. `crooked_A`: accounts of an attacker."""

    number: int
    population: SimulatedAccounts
    crooked_A: np.ndarray
    turns: Turns
    signals: Signals
    vouchers: list[str]


def run(seed: int, setting: Setting, first_CVA: np.ndarray | None = None) -> LearningRun:
    """All versions of a setting. `first_CVA`: logits of the first one, by default `bandit.first_policy`."""
    rng = np.random.default_rng((seed, 5))
    population = draw_population(rng)
    hidden_VA = utility(population)
    crooked_A = np.zeros(population.size, bool)
    if setting.fault == "sybils":
        population, crooked_A = faults.with_sybils(population)
    elif setting.keys:
        population, crooked_A = faults.with_sybils(population, share=0.5, times=1.0)
    vouchers = faults.vouchers_of(crooked_A, setting.keys if setting.guarded else 0)
    withheld_A = crooked_A & (setting.fault == "honest")
    logits = [bandit.first_policy(CELLS + (setting.fault == "lone-voter")) if first_CVA is None else first_CVA]
    for number in range(setting.versions):
        policy = bandit.probabilities(logits[-1])
        turns = serve(rng, population, policy[:CELLS], setting.turns)
        if setting.fault == "lone-voter":
            turns = faults.with_probe(rng, turns, int(population.consent_A.argmax()), policy[CELLS, 0])
        signals = _signals(rng, population, crooked_A, turns, setting)
        window = Window(number, population, crooked_A, turns, signals, vouchers)
        consent_A = population.consent_A & ~withheld_A
        log = records(population, turns, signals, number, consent_A=consent_A, vouchers=vouchers)
        gain_N = replaced_gains(rng, window, log, setting) if setting.replaces else gains(window, log, setting)
        logits.append(bandit.learn(logits[-1], turns, gain_N, RATE))
    return LearningRun(logits, [bandit.mean_of(theta[:CELLS], hidden_VA) for theta in logits])


def _signals(
    rng: np.random.Generator, population: SimulatedAccounts, crooked_A: np.ndarray, turns: Turns, setting: Setting
) -> Signals:
    """The signals that arrive at the log: the users', with the fault."""
    signals = react(rng, population, turns, ratings=0.3 if setting.fault == "flattery" else 0.05)
    if setting.fault == "sybils" or setting.keys:
        signals = faults.praising(turns, signals, crooked_A[turns.account_N])
    elif setting.fault == "lone-voter":
        signals = faults.voted(turns, signals)
    elif setting.off("discard-hack"):
        dead = np.isin(signals.turn_S, signals.turn_S[signals.of(SignalKind.INVALID_CALL)])
        signals = signals.where(~dead)
    return signals


def _config(setting: Setting) -> LabelsConfig:
    if setting.off("sybils"):
        return LabelsConfig(per_account=10**6, account_share=1.0, organisation_share=1.0, trim=0.0, age_days=1e-9)
    if setting.off("question-hack"):
        return LabelsConfig(question_cost=0.0)
    return LabelsConfig(coverage=1) if setting.off("lone-voter") else LabelsConfig()


def gains(window: Window, log: WindowLog, setting: Setting) -> np.ndarray:
    """Weight times advantage of each turn by the live loop's own filters, labels and estimate; 0 for a turn that is
    not trained on. float64 [N]."""
    turns = window.turns
    new_A = window.crooked_A & (setting.fault == "sybils")
    old = nanoseconds(0, -_OLD * 86_400)
    rows = WindowRows(
        number=window.number,
        cut=log.cut,
        at=log.cut,
        sessions={s.id: s for s in log.sessions},
        turns=log.turns,
        pending=frozenset(t.id for t in log.turns),
        suggestions=log.suggestions,
        signals=log.signals,
        forgotten=frozenset(),
        since={name: nanoseconds(0, 0) if new else old for name, new in zip(window.vouchers, new_A, strict=True)},
    )
    kinds = [(f"kind {cell}", frozenset({(0, bytes([cell]))})) for cell in range(CELLS + 1)]
    features = {
        turn.id: RequestFeatures(kinds[cell][0], turn.id, kinds[cell][1], False, False)
        for turn, cell in zip(log.turns, turns.cell_N.tolist(), strict=True)
    }
    decision = decide(rows, features, _config(setting))
    return np.array([exit.weight * exit.advantage for exit in decision.exits])


def replaced_gains(rng: np.random.Generator, window: Window, log: WindowLog, setting: Setting) -> np.ndarray:
    """The same where something stands in the place of the labels: hidden utility, shuffled rewards, or votes."""
    config, turns, population = LabelsConfig(), window.turns, window.population
    reward_N, weight_N = _replaced(rng, window, log, setting)
    at = np.flatnonzero(population.consent_A[turns.account_N] & (weight_N > 0))
    at = at[first_of(turns.account_N[at], rng.permutation(len(at)), config.per_account)]
    account_N = turns.account_N[at]
    shares = config.account_share, config.organisation_share, config.tenant_share
    weight = shares_capped(
        weight_N[at], account_N, population.organisation_A[account_N], np.zeros(len(at), np.int64), *shares
    )
    cell_N = turns.cell_N[at] * 4 + np.minimum(turns.sequence_N[at], 3)
    out = np.zeros(len(turns.account_N))
    out[at] = weight * (reward_N[at] - baselines(reward_N[at], weight, cell_N, config.shrinkage, config.trim))
    return out


def _replaced(
    rng: np.random.Generator, window: Window, log: WindowLog, setting: Setting
) -> tuple[np.ndarray, np.ndarray]:
    """Reward and weight of each turn."""
    turns = window.turns
    if setting.rewards == ORACLE:
        return 2.0 * turns.value_N - 1.0, np.ones(len(turns.value_N))
    if setting.rewards == NULL:
        rows = labels(log.sessions, log.turns, log.suggestions, log.signals, log.cut, LabelsConfig())
        known = [label for label in rows if label.state == LabelState.MATURED]
        at, order = np.array([int(label.turn[5:]) for label in known]), rng.permutation(len(known))
        reward_N, weight_N = np.zeros((2, len(turns.value_N)))
        reward_N[at] = np.array([label.reward for label in known])[order]
        weight_N[at] = np.array([label.weight for label in known])[order]
        return reward_N, weight_N
    kinds = {"short-edit-hack": faults.ACCEPTANCE, "flattery": faults.RATINGS}.get(setting.fault, faults.VOTES)
    reward_N = faults.naive_rewards(turns, window.signals, SILENCE.get(setting.rewards), kinds)
    return np.nan_to_num(reward_N), 1.0 * ~np.isnan(reward_N)
