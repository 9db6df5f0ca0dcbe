"""Habits that a version may learn, planted: whether one window shows each in its signal, and whether it is unlearned.

The answers are texts (`texts.py`), so a habit is seen only if parser, gateway and labels find it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.live_simulation import bandit
from benchmarks.live_simulation.traffic import WindowLog, react, records, serve
from benchmarks.live_simulation.windows import TURNS, Setting, run
from etude.config.live import LabelsConfig
from etude.live.learn.attribution import labels
from etude.live.log.records import Label
from etude.live.simulate.users import ACTIONS, draw_population

HABITS = {"malformed calls": "broken", "questions": "question", "short edits": "tiny"}
"""The action of each habit."""
_COMPONENTS = {"broken": "invalid_call", "question": "question"}


@dataclass(frozen=True)
class HabitSeen:
    """A habit in one window: the mean of its signal without and with it, and their distance in standard errors. And the
    shares of clear requests that were answered with it, when it was planted and some versions later."""

    name: str
    usual: float
    planted: float
    errors: float
    before: float
    after: float


def plant(name: str, seed: int, more: float = 0.15, versions: int = 6, turns: int = TURNS) -> HabitSeen:
    """A version that answers `more` of all requests with the habit, beside one that does not; and what the live loop
    makes of it in `versions` windows."""
    action = HABITS[name]
    at = [each.name for each in ACTIONS].index(action)
    usual_CVA = bandit.probabilities(bandit.first_policy())
    habit_CVA = (1 - more) * usual_CVA
    habit_CVA[..., at] += more
    values = list[np.ndarray]()
    for number, policy_CVA in enumerate((usual_CVA, habit_CVA)):
        rng = np.random.default_rng((seed, 11, number))
        population = draw_population(rng)
        served = serve(rng, population, policy_CVA, turns)
        log = records(population, served, react(rng, population, served), 0)
        rows = labels(log.sessions, log.turns, log.suggestions, log.signals, log.cut, LabelsConfig())
        values.append(_signal(action, log, rows))
    means, errors = [v.mean() for v in values], [v.var(ddof=1) / len(v) for v in values]
    learned = run(seed, Setting(versions=versions, turns=turns), np.log(habit_CVA)).logits
    shares = [bandit.share_of(logits, action, (0, 1)) for logits in (learned[0], learned[-1])]
    return HabitSeen(name, means[0], means[1], float(abs(means[1] - means[0]) / np.sqrt(sum(errors))), *shares)


def _signal(action: str, log: WindowLog, rows: Sequence[Label]) -> np.ndarray:
    """What shows a habit: whether a turn's label has its component, or for edits their characters."""
    if action not in _COMPONENTS:
        return np.array([edit.characters for edit in log.suggestions], float)
    return np.array([row.components.get(_COMPONENTS[action], 0.0) < 0 for row in rows], float)
