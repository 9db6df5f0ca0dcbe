"""Which task the next group gets: repeat the library's tasks, prefer those whose groups are likely to disagree.

A group of G episodes teaches only if its rewards differ, which at pass rate p happens with probability
1 - p^G - (1 - p)^G. p is the mean of a Beta posterior over the task's last group, because the policy has changed since
the ones before, with a prior at the mean of all first groups, so unseen tasks are tried early.

The policy goes on improving until the next group is played, so rates that are a little too low today are the best bet.
Seen in three demo runs (G = 16): tasks of which none passed divided their next group in 10 % of cases, 1 to 3 in 93 %,
4 to 7 in 82 %, 8 to 11 in 76 %, 12 to 15 in 45 %, all in 25 %.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PRIOR_EPISODES = 1.0  # weight of the prior: one, so that a first group dominates it
FLOOR = 0.02  # least weight of any task: what looks hopeless today is still met now and then as the policy improves


@dataclass
class Curriculum:
    """Draws task ids. `observe` takes results; `draw(index)` depends only on (seed, index, results so far)."""

    tasks: Sequence[str]
    group: int
    seed: int
    _last: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # passed, episodes
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    _first: tuple[int, int] = (0, 0)  # passed, episodes of all first groups

    def observe(self, task: str, passed: int, episodes: int) -> None:
        """Records one finished group."""
        if task not in self._last:
            self._first = (self._first[0] + passed, self._first[1] + episodes)
        self._last[task] = (passed, episodes)
        self._seen[task] = self._seen.get(task, 0) + episodes

    def draw(self, index: int, exclude: frozenset[str] = frozenset()) -> str:
        """The task of group `index`; tasks in `exclude` (already in flight) only if nothing else is left."""
        candidates = [task for task in self.tasks if task not in exclude] or list(self.tasks)
        weights = [self.weight(task) for task in candidates]
        return random.Random(f"{self.seed}/{index}").choices(candidates, weights)[0]

    def weight(self, task: str) -> float:
        """How much a group of this task is expected to teach, with a bonus for tasks met seldom."""
        prior = self._first[0] / self._first[1] if self._first[1] else 0.5
        passed, episodes = self._last.get(task, (0, 0))
        p = (passed + PRIOR_EPISODES * prior) / (episodes + PRIOR_EPISODES)
        informative = 1 - p**self.group - (1 - p) ** self.group
        # Variance of the reward, p(1-p), once more times 1-p: greatest at a third, where there is most left to gain.
        return FLOOR + informative * 6.75 * p * (1 - p) ** 2 / (1 + self._seen.get(task, 0) / (4 * self.group))


@dataclass
class MixedCurriculum:
    """Draws from several repositories: which one follows from the weights alone, which of its tasks from its results.

    After n groups a repository has had its share of n, give or take one (largest deficit first), so every batch is
    mixed as the run is. `weights` add up to 1. Repositories may join later.
    """

    parts: Mapping[str, Curriculum]
    weights: Mapping[str, float]
    _order: list[str] = field(default_factory=list[str])  # the repository of each group so far
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _joined: int = 0  # groups before the last repository joined

    def join(self, parts: Mapping[str, Curriculum], weights: Mapping[str, float]) -> None:
        """Adds repositories; `weights` are those of all. Shares count from here: nobody catches up."""
        self.parts, self.weights = {**self.parts, **parts}, weights
        self._counts, self._joined = {}, len(self._order)

    def observe(self, task: str, passed: int, episodes: int) -> None:
        """Records one finished group. A task that no repository has any more is forgotten."""
        for part in self.parts.values():
            if task in part.tasks:
                part.observe(task, passed, episodes)

    def draw(self, index: int, exclude: frozenset[str] = frozenset()) -> str:
        """The task of group `index`, as `Curriculum.draw`."""
        return self.parts[self.repository(index)].draw(index, exclude)

    def repository(self, index: int) -> str:
        """The repository of group `index`: a function of the weights."""
        while len(self._order) <= index:
            due = len(self._order) - self._joined + 1
            chosen = max(self.parts, key=lambda name: self.weights[name] * due - self._counts.get(name, 0))
            self._counts[chosen] = self._counts.get(chosen, 0) + 1
            self._order.append(chosen)
        return self._order[index]
