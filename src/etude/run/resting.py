"""The rest of a player whose host is broken: infrastructure that ends one episode after another there would use up the
tries of every group.

A player with `ROW` failures in a row, while engines serve, leases nothing for a while, and then one episode at a time,
of other groups than those that have failed if there are any. The first result ends the rest. Failures of several groups
in a row are the host's: they do not count against the groups, and each makes the rest longer. Those of a single group
may be the group's own, whose box nobody can make.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from etude.records import Episode, Outcome

ROW = 3
FIRST_SECONDS, LONGEST_SECONDS = 30.0, 600.0


@dataclass
class FailureRow:
    """The episodes in a row that infrastructure has ended at a player: their number and their `groups`. `why` is a
    sentence while the player rests."""

    groups: set[int] = field(default_factory=set[int])
    count: int = 0
    why: str = ""
    _seconds: float = 0.0  # of the last rest
    _until: float = -math.inf  # the end of the rest, on the monotonic clock

    @property
    def rests(self) -> bool:
        """Whether there are so many that the player rests, or tries one episode at a time."""
        return self.count >= ROW

    @property
    def of_host(self) -> bool:
        """Whether the failures are those of the host, not of the episodes."""
        return self.rests and len(self.groups) > 1

    def add(self, episode: Episode) -> None:
        """Counts an episode that has ended, while engines served."""
        if not episode.outcome.lost:
            self.groups, self.count, self.why, self._seconds = set(), 0, "", 0.0
        if episode.outcome is not Outcome.INFRA:
            return
        self.groups.add(episode.group_id)
        self.count += 1
        now = time.monotonic()
        if self.rests and now > self._until:  # those that were in flight then begin no other rest
            longer = min(max(2 * self._seconds, FIRST_SECONDS), LONGEST_SECONDS)
            self._seconds = longer if self.of_host else FIRST_SECONDS
            self._until = now + self._seconds
            self.why = (
                f"infrastructure has ended its last {self.count} episodes ({episode.detail}); it plays none for "
                f"{self._seconds:.0f} s, then one at a time"
            )

    def limit(self, episodes: int) -> int:
        """The number of episodes to play at a time, of those that the player was started for."""
        if not self.rests:
            return episodes
        return int(time.monotonic() > self._until)
