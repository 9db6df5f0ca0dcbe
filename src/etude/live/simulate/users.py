"""Simulated accounts with known preferences, by which the learning of the live loop can be judged.

Each account weighs properties of a change that a program can check. The hidden utility of a change is its correctness
times the share of the account's weights that it satisfies. Signals are drawn from that utility, never from text: a
pleasing text has no utility, and `estimate_preferences` shows that signals reveal the weights.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

import numpy as np

from etude.code import lines_of

PROPERTIES = ("house", "signature", "short", "test", "asks")
"""The change uses the house idiom; keeps the signatures; changes few lines; adds a test; asks only if the request is
unclear."""


@dataclass(frozen=True)
class SimulatedAccounts:
    """Accounts; arrays are float64 [A] unless their names say otherwise."""

    preference_AQ: np.ndarray  # weights of PROPERTIES, rows sum to 1
    organisation_A: np.ndarray  # int64
    skill_A: np.ndarray  # probability that a wrong change is noticed
    patience_A: np.ndarray  # probability that a question is answered
    activity_A: np.ndarray  # share of the requests
    delay_A: np.ndarray  # median seconds until a signal arrives
    drop_A: np.ndarray  # probability that the client is gone before an edit's window closes
    consent_A: np.ndarray  # bool
    heldout_A: np.ndarray  # bool: never trained on; `utility` is by their preferences

    @property
    def size(self) -> int:
        """The number of accounts."""
        return len(self.activity_A)


def draw_population(
    rng: np.random.Generator, size: int = 600, *, opt_out: float = 0.1, heldout: float = 0.2, zipf: float = 0.8
) -> SimulatedAccounts:
    """Accounts of 25 organisations. Preferences are Dirichlet about a firm-wide taste, activity is Zipf's with exponent
    `zipf`, delays are log-normal. The share `opt_out` of the accounts, and the held-out share `heldout`, give no
    consent."""
    taste_Q = np.array([0.35, 0.2, 0.15, 0.15, 0.15])
    activity = rng.permutation((1.0 + np.arange(size)) ** -zipf)
    heldout_A = rng.permutation(size) < round(heldout * size)
    return SimulatedAccounts(
        preference_AQ=rng.dirichlet(12.0 * taste_Q, size),
        organisation_A=rng.integers(0, 25, size),
        skill_A=rng.beta(6, 2, size),
        patience_A=rng.beta(5, 2, size),
        activity_A=activity / activity.sum(),
        delay_A=rng.lognormal(np.log(60.0), 1.0, size),
        drop_A=rng.beta(2, 8, size),
        consent_A=(rng.random(size) >= opt_out) & ~heldout_A,
        heldout_A=heldout_A,
    )


@dataclass(frozen=True)
class Action:
    """A way to answer a request. `correct` are probabilities for an easy, a hard and an unclear request. `glance` makes
    users accept an answer unread, `charm` makes them rate it well; neither adds to its utility."""

    name: str
    outcome: str  # "edit", "question", "broken" or "text"
    correct: tuple[float, float, float]
    has: tuple[int, ...]  # of PROPERTIES without the last, which follows from the request
    characters: int = 400
    glance: float = 0.0
    charm: float = 0.0


VARIANTS = ("easy", "hard", "unclear")
VARIANT_SHARES = np.array([0.5, 0.3, 0.2])
ACTIONS = (
    Action("house", "edit", (0.85, 0.45, 0.15), (1, 1, 1, 1)),
    Action("generic", "edit", (0.85, 0.45, 0.15), (0, 1, 1, 0)),
    Action("long", "edit", (0.9, 0.55, 0.15), (0, 0, 0, 1)),
    Action("tiny", "edit", (0.3, 0.12, 0.05), (0, 1, 1, 0), characters=15, glance=0.6),
    Action("question", "question", (0.0, 0.0, 0.75), (1, 1, 1, 1)),
    Action("broken", "broken", (0.0, 0.0, 0.0), (0, 0, 0, 0)),
    Action("flatter", "edit", (0.25, 0.1, 0.05), (0, 1, 0, 0), charm=0.9),
)
EDIT, QUESTION, BROKEN, TEXT = range(4)
OUTCOMES = ("edit", "question", "broken", "text")


def has_properties(actions: tuple[Action, ...] = ACTIONS) -> np.ndarray:
    """The PROPERTIES of each answer to each variant of a request: float64 [V, A, Q]."""
    out = np.zeros((len(VARIANTS), len(actions), len(PROPERTIES)))
    for v, variant in enumerate(VARIANTS):
        for a, action in enumerate(actions):
            asks = (variant == "unclear") == (action.outcome == "question")
            out[v, a] = (*action.has, asks)
    return out


def utility(population: SimulatedAccounts, actions: tuple[Action, ...] = ACTIONS) -> np.ndarray:
    """Mean hidden utility of each answer to each variant for held-out accounts, by activity: float64 [V, A]."""
    share_A = population.activity_A * population.heldout_A
    taste_Q = (share_A / share_A.sum()) @ population.preference_AQ
    correct_VA = np.array([action.correct for action in actions]).T
    return correct_VA * (has_properties(actions) @ taste_Q)


def estimate_preferences(has_NQ: np.ndarray, value_N: np.ndarray) -> np.ndarray:
    """Weights of the properties, float64 [Q]: least squares on the properties and values of N correct changes."""
    solution_Q = np.linalg.lstsq(has_NQ, value_N, rcond=None)[0]
    return solution_Q


def properties_of(
    before: str, after: str, *, house: str, generic: str, lines: int, question: bool = False, unclear: bool = False
) -> np.ndarray:
    """The PROPERTIES of a change of a Python file, float64 [Q]. `house` and `generic` are regular expressions of
    two idioms for the same thing, sought in the added lines; `lines` is the most that a short change adds or removes.
    A file that is no Python keeps no signature."""
    changed = [x for x in difflib.ndiff(lines_of(before), lines_of(after)) if x[:2] in ("+ ", "- ")]
    added = "\n".join(x[2:] for x in changed if x.startswith("+ "))
    tests = [len(re.findall(r"^\s*(?:def test_|>>> )", text, re.M)) for text in (before, after)]
    return np.array(
        [
            bool(re.search(house, added)) and not re.search(generic, added),
            _signatures(before) <= _signatures(after) and bool(_signatures(after)),
            len(changed) <= lines,
            tests[1] > tests[0],
            question == unclear,
        ],
        float,
    )


def _signatures(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {f"{node.name}({ast.unparse(node.args)})" for node in ast.walk(tree) if isinstance(node, kinds)}
