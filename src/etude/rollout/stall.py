"""When nothing moves: for how long, and who waits for whom.

A run moves when an episode ends, a token is sampled, a version is served or groups are trained on. If none of these
happens for `rollout.stall_seconds` one sentence says what everything waits for; after LIMIT times as long the run is
given up, with that sentence, and can be resumed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

LIMIT = 5


@dataclass(frozen=True)
class StallSnapshot:
    """Where a run stands while nothing moves."""

    served: int  # version
    published: int
    prompts: int  # P: groups of a step
    ready: int  # groups that are finished and not trained on, P at most
    takeable: int  # those of them that the next step may take: P or, where a straggler would be left too late, none
    live: int  # episodes
    at_engine: int  # requests being computed or waiting for a row
    oldest: str  # live episode, e.g. "member 3 of group 17 (task clamp)"; empty if none is live
    oldest_seconds: float


class StallWatchdog:
    """Tells how long a run has stood still. `now` is in seconds, on one monotonic clock."""

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self._marks: Hashable = None
        self._moved = now
        self._told = False

    def look(self, marks: Hashable, now: float) -> float:
        """Seconds since `marks`, which change whenever the run moves, last changed."""
        if marks != self._marks:
            self._marks, self._moved, self._told = marks, now, False
        return now - self._moved

    def due(self, still: float) -> bool:
        """Whether to say something after `still` seconds: true once per stall."""
        if still < self.seconds or self._told:
            return False
        self._told = True
        return True


def who_waits(s: StallSnapshot) -> str:
    """Who waits for whom, as a clause. The first party in the order of causes is the one to look at."""
    trainer = f"the trainer has {s.ready} of {s.prompts} groups"
    if s.published > s.served:
        return f"admission waits for the engines, which serve version {s.served} although {s.published} is published"
    if s.takeable >= s.prompts:
        return f"everything waits for the trainer, which has its {s.prompts} groups for version {s.published + 1}"
    if s.at_engine:
        return (
            f"{s.at_engine} of {s.live} live episodes wait for the engines, which sample nothing; {trainer} and waits "
            "for the rest"
        )
    if s.live:
        late = "and may not leave that group behind" if s.ready >= s.prompts else "and waits for the rest"
        return f"{s.live} live episodes wait for their tools, {s.oldest} for {s.oldest_seconds:.0f} s; {trainer} {late}"
    return f"{trainer}, no episode is live, and admission waits for version {s.published + 1}"
