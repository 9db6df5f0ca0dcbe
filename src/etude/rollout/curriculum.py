"""Which task the next group gets: repeat the library's tasks, prefer those whose groups are likely to disagree.

A group of G episodes teaches only if its rewards differ, which at pass rate p happens with probability
1 - p^G - (1 - p)^G. p is the mean of a Beta posterior over the episodes a task has had so far, with a prior at the
run's own mean, so unseen tasks are tried early and hopeless or solved ones are met less and less often.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_EPISODES = 2.0
"""Weight of the prior in episodes: two, so that the first group of 8 or 16 already dominates it."""

FLOOR = 0.02
"""Least weight of any task: what looks hopeless today is still met now and then as the policy improves."""


@dataclass
class Curriculum:
    """Draws task ids. `observe` takes results; `draw(index)` depends only on (seed, index, results so far)."""

    tasks: Sequence[str]
    group: int
    seed: int
    _passed: dict[str, float] = field(default_factory=dict[str, float])
    _seen: dict[str, int] = field(default_factory=dict[str, int])

    def observe(self, task: str, passed: int, episodes: int) -> None:
        """Records one finished group."""
        self._passed[task] = self._passed.get(task, 0.0) + passed
        self._seen[task] = self._seen.get(task, 0) + episodes

    def draw(self, index: int, exclude: frozenset[str] = frozenset()) -> str:
        """The task of group `index`; tasks in `exclude` (already in flight) only if nothing else is left."""
        candidates = [task for task in self.tasks if task not in exclude] or list(self.tasks)
        weights = [self.weight(task) for task in candidates]
        return random.Random(f"{self.seed}/{index}").choices(candidates, weights)[0]

    def weight(self, task: str) -> float:
        """How much a group of this task is expected to teach, with a bonus for tasks not met yet."""
        seen = self._seen.get(task, 0)
        total = sum(self._seen.values())
        prior = sum(self._passed.values()) / total if total else 0.5
        p = (self._passed.get(task, 0.0) + PRIOR_EPISODES * prior) / (seen + PRIOR_EPISODES)
        informative = 1 - p**self.group - (1 - p) ** self.group
        # p(1-p) is the variance of the reward: among informative groups, the balanced ones carry more signal.
        return FLOOR + informative * 4 * p * (1 - p) / (1 + seen / (4 * self.group))
