"""The number of episodes to play at a time: as many as keep the engines' rows full, and no more.

An episode is at an engine for a share of its time; tools take the rest. If `live` episodes keep
`demand` requests at the engines, and rows are empty, then by Little's law live * rows / demand episodes would keep as
many requests there as the engines have rows. If requests queue instead, every one in the queue is an episode too many:
it takes longer, its tokens grow older, and the throughput is the same. `next_limit` moves towards that
number, by a bounded step per window, since shares change as the policy does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_SECONDS = 5.0  # over which load is averaged before the limit moves; an agent's turn is about as long
GROW, SHRINK = 1.5, 0.75  # bounds of one move: one window with a burst of long turns must change little
DEAD_BAND = 0.1  # share of the rows by which demand must miss them for the limit to move: a mean is no better


@dataclass(frozen=True)
class Load:
    """Means over a window: live episodes, and requests at the engines, computed or waiting."""

    live: float
    demand: float


def mean_load(samples: Sequence[tuple[int, int]]) -> Load:
    """The load of a window from its (live, demand) samples, of which there must be at least one."""
    count = len(samples)
    return Load(sum(live for live, _ in samples) / count, sum(demand for _, demand in samples) / count)


def next_limit(limit: int, load: Load, *, rows: int, lowest: int, highest: int) -> int:
    """The limit of the next window, in [lowest, highest], after one in which `limit` episodes were allowed. Where fewer
    episodes were live than were allowed, something else held them back (the staleness bound, or the end of the run),
    and allowing more would change nothing: the limit then only falls."""
    queued, wanted = load.demand - rows, float(limit)
    if queued > DEAD_BAND * rows:
        wanted = load.live - queued
    elif queued < -DEAD_BAND * rows and load.live > (1 - DEAD_BAND) * limit:
        wanted = load.live * rows / load.demand if load.demand else limit * GROW
    moved = round(min(max(wanted, limit * SHRINK), limit * GROW))
    return min(max(moved, lowest), highest)


@dataclass
class Concurrency:
    """The limit of live episodes over a run. A fixed one has `lowest` equal to `highest`."""

    rows: int  # that all engines together compute at a time
    lowest: int
    highest: int
    limit: int = field(init=False)
    _since: float | None = None
    _samples: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __post_init__(self) -> None:
        self.limit = min(max(self.rows, self.lowest), self.highest)

    def observe(self, now: float, live: int, demand: int) -> None:
        """Notes a sample at `now` (seconds, monotonic); at the end of a window, moves the limit."""
        if self._since is None:
            self._since = now
        self._samples.append((live, demand))
        if now - self._since >= WINDOW_SECONDS:
            load = mean_load(self._samples)
            self.limit = next_limit(self.limit, load, rows=self.rows, lowest=self.lowest, highest=self.highest)
            self._since, self._samples = now, []


def episode_concurrency(
    max_in_flight: int | None, *, rows: int, staleness: int, prompts: int, group: int
) -> Concurrency:
    """The configured limit of live episodes: a fixed number, or with None one by the load. No more than
    (O + 1) * P * G episodes can ever be live, by admission; fewer than a group would be none."""
    if max_in_flight is not None:
        return Concurrency(rows, max_in_flight, max_in_flight)
    return Concurrency(rows, group, (staleness + 1) * prompts * group)
