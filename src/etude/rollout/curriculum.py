"""Which task the next group gets: those whose groups are likely to disagree, the untried judged by tasks like them.

A group of G episodes teaches only if its rewards differ, which at pass rate p happens with probability
1 - p^G - (1 - p)^G. For a task that was played, p is the mean of a Beta posterior over its last group, because the
policy has changed since the ones before. A task that was not played is judged by the first groups of others: the means
of ever narrower classes (`classes`), each shrunk to the one above it and forgetting what an older policy did. First
groups alone, because later ones were chosen for their pass rate. What is averaged is how much a group taught and not
only p: half solved and half hopeless teach nothing, whatever their mean. So as the policy improves, easy classes
give way to harder ones before their tasks are met, and the difficulty of what is played stays in band.

The policy goes on improving until the next group is played, so rates that are a little too low today are the best bet.
Seen in three demo runs (G = 16): tasks of which none passed divided their next group in 10 % of cases, 1 to 3 in 93 %,
4 to 7 in 82 %, 8 to 11 in 76 %, 12 to 15 in 45 %, all in 25 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.records import Task

PRIOR_EPISODES = 1.0
"""Weight of the prior in episodes: one, so that a first group dominates it."""

FLOOR = 0.02
"""Least weight of any task: what looks hopeless today is still met now and then as the policy improves."""

SHRINK = 2.0
"""Groups that the estimate of the wider class counts for in that of a narrower one."""

HALF_LIFE = 128.0
"""Groups after which a result counts half: about a third of a demo run."""


@dataclass(frozen=True)
class Estimate:
    """What is expected of a task's next group: its pass rate, and how much it teaches (0 to 1)."""

    rate: float
    gain: float


@dataclass(frozen=True)
class _Tally:
    """Sums over the first groups of a class, older ones counting less; `at` is the number of groups seen then."""

    groups: float = 0.0
    rate: float = 0.0
    gain: float = 0.0
    at: int = 0

    def aged(self, now: int) -> _Tally:
        kept = 0.5 ** ((now - self.at) / HALF_LIFE)
        return _Tally(self.groups * kept, self.rate * kept, self.gain * kept, now)

    def refine(self, wider: Estimate) -> Estimate:
        """The mean of this class, shrunk to that of a wider one."""
        weight = self.groups + SHRINK
        return Estimate((self.rate + SHRINK * wider.rate) / weight, (self.gain + SHRINK * wider.gain) / weight)


def classes(task: Task) -> tuple[str, ...]:
    """Ever narrower classes of tasks that are about equally hard: kind and broken places, operator, lines."""
    kind = f"{task.kind} {task.difficulty.get('sites', 1.0):g}"
    operator = f"{kind} {task.operator}"
    lines = max(task.difficulty.get("lines", 1.0), 1.0)
    return kind, operator, f"{operator} {int(math.log2(lines))}"


@dataclass
class Curriculum:
    """Draws task ids. `observe` takes results; `draw(index)` depends only on (seed, index, results so far)."""

    tasks: Mapping[str, tuple[str, ...]]  # id -> its classes, the widest first
    group: int
    seed: int
    _last: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # passed, episodes
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    _tallies: dict[str, _Tally] = field(default_factory=dict[str, _Tally])  # "": of all tasks
    _judged: dict[tuple[str, ...], Estimate] = field(default_factory=dict[tuple[str, ...], Estimate])  # until a result
    _groups: int = 0

    def observe(self, task: str, passed: int, episodes: int) -> None:
        """Records one finished group; nothing is learned from one of which no episode came to an end."""
        if not episodes:
            return
        self._groups += 1
        self._judged.clear()
        if task not in self._last:
            rate = passed / episodes
            for name in ("", *self.tasks[task]):
                old = self._tallies.get(name, _Tally()).aged(self._groups)
                self._tallies[name] = _Tally(old.groups + 1, old.rate + rate, old.gain + self._gain(rate), self._groups)
        self._last[task] = (passed, episodes)
        self._seen[task] = self._seen.get(task, 0) + episodes

    def met(self, task: str) -> bool:
        """Whether a group of this task has ended."""
        return task in self._last

    def draw(self, index: int, exclude: frozenset[str] = frozenset()) -> str:
        """The task of group `index`; tasks in `exclude` (already in flight) only if nothing else is left."""
        candidates = [task for task in self.tasks if task not in exclude] or list(self.tasks)
        weights = [self.weight(task) for task in candidates]
        return random.Random(f"{self.seed}/{index}").choices(candidates, weights)[0]

    def weight(self, task: str) -> float:
        """How much a group of this task is expected to teach, with a bonus for tasks met seldom."""
        return FLOOR + self.expected(task).gain / (1 + self._seen.get(task, 0) / (4 * self.group))

    def expected(self, task: str) -> Estimate:
        """Of the next group of this task: by its last one if there was one, else by first groups of its classes."""
        likely = self._of_classes(self.tasks[task])
        if task not in self._last:
            return likely
        passed, episodes = self._last[task]
        rate = (passed + PRIOR_EPISODES * likely.rate) / (episodes + PRIOR_EPISODES)
        return Estimate(rate, self._gain(rate))

    def _of_classes(self, names: tuple[str, ...]) -> Estimate:
        """Of a task of which nothing else is known."""
        if names not in self._judged:
            likely = Estimate(0.5, self._gain(0.5))
            for name in ("", *names):
                likely = self._tallies.get(name, _Tally()).aged(self._groups).refine(likely)
            self._judged[names] = likely
        return self._judged[names]

    def _gain(self, p: float) -> float:
        """How much a group teaches at pass rate p; 1 at most."""
        informative = 1 - p**self.group - (1 - p) ** self.group
        # Variance of the reward, p(1-p), once more times 1-p: greatest at a third, where there is most left to gain.
        return informative * 6.75 * p * (1 - p) ** 2
