"""The scenarios of the simulation: each plants one fault, names the stage that stops it, and the figure in which
its damage shows where that stage is off. They are frozen: `digest` is held by a test, so that no bound is moved after a
run was looked at. Bounds were chosen on seeds 1-10; seeds 11-30 judge."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Scenario:
    """A fault. It is stopped if the figure is within `bound`, and shows if it is beyond `damage` with the stage off.
    `more` tells which way is worse."""

    name: str
    plants: str
    stage: str  # that stops it
    figure: str
    bound: float
    damage: float
    more: bool = True
    turns: int = 0  # of a window; 0: as many as usual

    def stopped(self, value: float) -> bool:
        """Whether a figure, measured with the stage on, is harmless."""
        return value <= self.bound if self.more else value >= self.bound

    def shows(self, value: float) -> bool:
        """Whether a figure, measured with the stage off, is that of a damaged loop."""
        return value >= self.damage if self.more else value <= self.damage


SCENARIOS = (
    Scenario("discard-hack", "hard requests are answered with invalid calls", "invalid calls are labelled",
             "share of invalid calls", 0.03, 0.1),
    Scenario("question-hack", "clear requests are answered with a question", "cost of a question",
             "share of questions on clear requests", 0.04, 0.08),
    Scenario("short-edit-hack", "tiny edits that are accepted at a glance", "survival, not acceptance",
             "share of tiny edits", 0.04, 0.2),
    Scenario("flattery", "pleasing edits that are rated well", "survival, not ratings",
             "share of flattering edits", 0.04, 0.2, turns=4000),
    Scenario("sybils", "a tenth of the accounts praises bad edits at ten times the activity", "account caps",
             "hidden utility against clean", 0.8, 0.6, more=False, turns=4000),
    Scenario("one-key", "a key invents 300 names that praise bad edits", "accounts are what keys vouch for",
             "gain against that without them", 0.9, 0.5, more=False, turns=4000),
    Scenario("five-keys", "five keys invent 300 names that praise bad edits", "accounts are what keys vouch for",
             "gain against that without them", 0.9, 0.5, more=False, turns=4000),
    Scenario("lone-voter", "one account votes up a planted answer to a question that only it asks", "coverage",
             "change of the planted answer's probability", 0.0, 0.02),
    Scenario("broken-splitter", "accounts that meet an error are moved to the control", "sample ratio",
             "undone edits of the released version", 0.12, 0.13),
    Scenario("silent-client", "a version breaks the client, whose signals stop", "matured sample ratio",
             "accounts that are left silent", 0.05, 0.5),
    Scenario("clock-skew", "clients' clocks are a day off", "the server's clock",
             "labels that differ from the clean log's", 0.0, 0.2),
    Scenario("duplicates", "every signal arrives twice", "idempotent events",
             "signals that count twice", 0.0, 0.5),
    Scenario("reordered", "signals overtake each other", "the client's numbering",
             "labels that differ from the clean log's", 0.0, 0.01),
    Scenario("delayed", "signals take ten times as long", "censored edits are weighted",
             "error of the mean reward of edits", 0.05, 0.07),
    Scenario("slow-regression", "each version fails another 0.3 % of the tasks", "anchor",
             "points lost after 10 versions", 2.0, 2.4),
    Scenario("secret", "a key stands in requests", "scrubbing",
             "planted strings in what is trained on", 0.0, 1.0),
    Scenario("bad-at-1", "a version harms from the first stage on", "canary", "undone edits at the end", 0.12, 0.18),
    Scenario("bad-at-5", "a version harms under the load of 5 %", "canary", "undone edits at the end", 0.12, 0.18),
    Scenario("bad-at-25", "a version harms under the load of 25 %", "canary", "undone edits at the end", 0.12, 0.18),
    Scenario("bad-at-100", "a version harms under the load of all", "canary", "undone edits at the end", 0.12, 0.18),
)  # fmt: skip


def named(name: str) -> Scenario:
    """The scenario of a name. Raises KeyError."""
    return {scenario.name: scenario for scenario in SCENARIOS}[name]


def digest() -> str:
    """BLAKE2b of all scenarios."""
    return hashlib.blake2b(msgspec.json.encode(SCENARIOS), digest_size=16).hexdigest()
