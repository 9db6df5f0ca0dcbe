"""The rest of a player whose host is broken: infrastructure that ends one episode after another there would use up the
tries of every group.

A player with `ROW` failures in a row, while engines serve, leases nothing for a while, and then one episode at a time,
of other groups than those that have failed if there are any. The first result ends the rest. Failures of several groups
in a row are the host's: they do not count against the groups, and each makes the rest longer. Those of a single group
may be the group's own, whose box nobody can make, and so may those of a group that has failed `TRIES` times after a
rest: where nothing else is left to play, several such groups would be tried without end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

from etude.records import Episode, Outcome

ROW = 3
TRIES = 2
FIRST_SECONDS, LONGEST_SECONDS = 30.0, 600.0


@dataclass
class FailureRow:
    """The episodes in a row that infrastructure has ended at a player: their number and their `groups`. `why` is a
    sentence while the player rests."""

    groups: set[int] = field(default_factory=set[int])
    count: int = 0
    why: str = ""
    _tries: Counter[int] = field(default_factory=Counter[int])  # that have failed after a rest, by group
    _seconds: float = 0.0  # of the last rest
    _until: float = -math.inf  # the end of the rest, on the monotonic clock

    @property
    def rests(self) -> bool:
        """Whether there are so many that the player rests, or tries one episode at a time."""
        return self.count >= ROW

    def add(self, episode: Episode) -> bool:
        """Counts an episode that has ended, while engines served. Whether it was lost by a fault of the host."""
        if not episode.outcome.lost:
            self.groups, self.count, self.why, self._seconds = set(), 0, "", 0.0
            self._tries.clear()
        if episode.outcome is not Outcome.INFRA:
            return False
        group, now = episode.group_id, time.monotonic()
        over = now > self._until  # those that were in flight then begin no other rest
        self._tries[group] += self.rests and over
        self.groups.add(group)
        self.count += 1
        of_host = self.rests and len(self.groups) > 1 and self._tries[group] <= TRIES
        if self.rests and over:
            longer = min(max(2 * self._seconds, FIRST_SECONDS), LONGEST_SECONDS)
            self._seconds = longer if of_host else FIRST_SECONDS
            self._until = now + self._seconds
            self.why = (
                f"infrastructure has ended its last {self.count} episodes ({episode.detail}); it plays none for "
                f"{self._seconds:.0f} s, then one at a time"
            )
        return of_host

    def limit(self, episodes: int) -> int:
        """The number of episodes to play at a time, of those that the player was started for."""
        if not self.rests:
            return episodes
        return int(time.monotonic() > self._until)
