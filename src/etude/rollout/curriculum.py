"""The choice of a group's task: a new task for some groups, for the others one whose rewards differed before.

A group of G episodes teaches only if its rewards differ, which at pass rate p happens with probability
1 - p^G - (1 - p)^G. p is the mean of a Beta posterior over the task's last group, because the policy has changed since
the groups before (as posterior sampling does, https://arxiv.org/abs/2507.04632, without its draw from the posterior).
For a task without a group nothing predicts whether its rewards differ: neither lines, nor the kind of damage, nor other
tasks of the same function. In runs of the demo (G = 16) the rewards of first groups differed in 55 % of cases, at any
stage of training, and those of tasks whose rewards had differed before in 92 %. New tasks prevent memorisation; the
others make sure that most of a batch teaches.

The policy goes on improving until the next group is played, so tasks a little too hard for it are the best choice.
In four demo runs, the share of next groups whose rewards differed, by passed members of the last group: 5 to 10 % at
none, 90 % at 1 to 3, 85 % at 4 to 7, 80 % at 8 to 11, 50 % at 12 to 15, 20 % at all.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEW = 0.4  # share of the groups that meet a new task, while there are any
PRIOR_EPISODES = 0.25  # weight of the prior: after 0 of 16, rewards of the next group differ with probability 12 %
FLOOR = 0.002  # least weight of any task: hopeless tasks are still drawn now and then, as the policy improves


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
        """The expected use of one more group of a task that had groups, with a bonus for tasks with few."""
        passed, episodes = self._last[task]
        p = (passed + PRIOR_EPISODES / 2) / (episodes + PRIOR_EPISODES)
        informative = 1 - p**self.group - (1 - p) ** self.group
        # Variance of the reward, p(1-p), once more times 1-p: greatest at a third, where there is most left to gain.
        # Its square, because many tasks are at 12 to 15 of 16, and teach half as often as those at 1 to 11.
        gain = (6.75 * p * (1 - p) ** 2) ** 2
        return FLOOR + informative * gain / (1 + self._seen[task] / (4 * self.group))

    def _divided(self, task: str) -> bool:
        passed, episodes = self._last[task]
        return 0 < passed < episodes


@dataclass
class MixedCurriculum:
    """Draws from several repositories: the repository by the weights alone, its task by its results.

    After n groups a repository has had its share of n, give or take one (largest deficit first), so every batch is
    mixed as the run is. `weights` add up to 1. Repositories may join later.
    """

    parts: Mapping[str, Curriculum]
    weights: Mapping[str, float]
    _order: list[str] = field(default_factory=list[str])  # the repository of each group so far
    _counts: dict[str, int] = field(default_factory=dict[str, int])
    _joined: int = 0  # groups before the last repository joined

    def join(self, parts: Mapping[str, Curriculum], weights: Mapping[str, float]) -> None:
        """Adds repositories; `weights` are those of all. Shares count from here: no repository catches up."""
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
