"""Shifts of the policy's behaviour: the mean of the last steps against that of the steps before them.

Learning shifts behaviour, too: a shift is for people to look at, never a part of the reward. Welch's t is taken on the
means of single steps, which include the variance between batches; a metric that has shifted is silent for one window.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance
from typing import Any

from etude.records import Record

T = 6.0  # of Welch's test; with windows of 10 steps one metric in 100,000 comparisons is beyond it by chance
LEAST = 0.1  # share of the mean that a shift must have, and as much in units where the mean is below 1
WATCHED = {
    "rollout/edits": "edits per episode",
    "rollout/edit_errors": "refused edits per episode",
    "rollout/repeats": "repeated edits per episode",
    "rollout/undo": "edits taken back per episode",
    "rollout/tests_run": "test runs per episode",
    "rollout/malformed": "malformed calls per episode",
    "rollout/turns": "turns per episode",
    "rollout/length": "sampled tokens per episode",
    "rollout/calls/run": "shell commands per episode",
    "rollout/path/added": "lines added per episode",
    "rollout/path/comments": "share of added lines that are comments",
    "rollout/path/asks": "questions per episode",
    "rollout/path/reach": "names that reach outside, per episode",
    "rollout/path/outside": "changed files besides the one in focus, per episode",
}


class Shift(Record, frozen=True, kw_only=True):
    """A metric's mean over `window` steps up to `step`, against the `window` steps before those."""

    metric: str
    step: int
    window: int
    before: float
    after: float
    t: float

    @property
    def sentence(self) -> str:
        """The shift in words."""
        return (
            f"{WATCHED.get(self.metric, self.metric)}: {self.before:.3g} in the {self.window} versions before "
            f"{self.step - self.window + 1}, {self.after:.3g} since (t = {self.t:.1f})"
        )


class BehaviourDrift:
    """Takes the lines of metrics.jsonl in order. `lines` are those of earlier attempts."""

    def __init__(self, window: int, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.window = window
        self._values: dict[str, list[float]] = {name: [] for name in WATCHED}
        self._quiet: dict[str, int] = dict.fromkeys(WATCHED, 0)
        for line in lines:
            self.observe(line)

    def observe(self, line: Mapping[str, Any]) -> list[Shift]:
        """The shifts that show at this step."""
        shifts: list[Shift] = []
        for name, values in self._values.items():
            values.append(float(line.get(name, 0.0)))
            del values[: -2 * self.window]
            self._quiet[name] = max(0, self._quiet[name] - 1)
            if len(values) < 2 * self.window or self._quiet[name]:
                continue
            before, after = values[: self.window], values[self.window :]
            t = welch(before, after)
            old, new = fmean(before), fmean(after)
            matters = abs(new - old) >= LEAST * min(1.0, max(abs(old), abs(new))) and abs(new - old) > 1e-9
            if abs(t) >= T and matters:
                self._quiet[name] = self.window
                step = int(line["step"])
                shifts.append(Shift(metric=name, step=step, window=self.window, before=old, after=new, t=t))
        return shifts


def welch(before: Sequence[float], after: Sequence[float]) -> float:
    """The difference of two means in units of its standard error; infinite where nothing varies but the mean."""
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    difference = fmean(after) - fmean(before)
    if error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error
