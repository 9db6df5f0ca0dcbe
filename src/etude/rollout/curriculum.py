"""Which task the next group gets: some groups meet a new task, the others return to one that disagreed before.

A group of G episodes teaches only if its rewards differ, which at pass rate p happens with probability
1 - p^G - (1 - p)^G. p is the mean of a Beta posterior over the task's last group, because the policy has changed since
the groups before (as posterior sampling does, https://arxiv.org/abs/2507.04632, without its draw from the posterior).
Of a task without a group nothing is known that would tell one from another: neither lines, nor the kind of damage, nor
other tasks of the same function. In runs of the demo (G = 16) first groups divided in 55 % of cases, whatever the
policy had learned, and groups of tasks that had divided before in 92 %. New tasks keep a policy from learning its tasks
by heart; the others make sure that most of a batch teaches.

The policy goes on improving until the next group is played, so rates that are a little too low today are the best bet.
Seen in four demo runs: tasks of which none passed divided their next group in 5 to 10 % of cases, 1 to 3 in 90 %, 4 to
7 in 85 %, 8 to 11 in 80 %, 12 to 15 in 50 %, all in 20 %.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEW = 0.4  # share of the groups that meet a new task, while there are any
PRIOR_EPISODES = 0.25  # weight of the prior: with it, none of 16 divides the next group in 12 % of cases
FLOOR = 0.002  # least weight of any task: what looks hopeless today is still met now and then as the policy improves


@dataclass
class Curriculum:
    """Draws task ids. `observe` takes results; `draw(index)` depends only on (seed, index, results so far)."""

    tasks: Sequence[str]
    group: int
    seed: int
    _last: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # passed, episodes
    _seen: dict[str, int] = field(default_factory=dict[str, int])

    def observe(self, task: str, passed: int, episodes: int) -> None:
        """Records one finished group."""
        self._last[task] = (passed, episodes)
        self._seen[task] = self._seen.get(task, 0) + episodes

    def draw(self, index: int, exclude: frozenset[str] = frozenset()) -> str:
        """The task of group `index`; tasks in `exclude` (already in flight) only if nothing else is left."""
        rng = random.Random(f"{self.seed}/{index}")
        candidates = [task for task in self.tasks if task not in exclude] or list(self.tasks)
        new = [task for task in candidates if task not in self._last]
        met = [task for task in candidates if task in self._last]
        if new and (rng.random() < NEW or not any(map(self._divided, met))):
            return rng.choice(new)
        return rng.choices(met, [self.weight(task) for task in met])[0]

    def weight(self, task: str) -> float:
        """How much one more group of a met task is expected to teach, with a bonus for tasks met seldom."""
        passed, episodes = self._last[task]
        p = (passed + PRIOR_EPISODES / 2) / (episodes + PRIOR_EPISODES)
        informative = 1 - p**self.group - (1 - p) ** self.group
        # Variance of the reward, p(1-p), once more times 1-p: greatest at a third, where there is most left to gain.
        # Its square, because 12 to 15 of 16 are many, and divide half as often as 1 to 11.
        gain = (6.75 * p * (1 - p) ** 2) ** 2
        return FLOOR + informative * gain / (1 + self._seen[task] / (4 * self.group))

    def _divided(self, task: str) -> bool:
        passed, episodes = self._last[task]
        return 0 < passed < episodes


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
