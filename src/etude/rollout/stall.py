"""Stalls: the time in which a run has made no progress, and the cause.

A run makes progress when an episode ends, a token is sampled, a version is served or groups are trained on. If none of
these happens for `rollout.stall_seconds`, one sentence names the cause. After LIMIT times as long the run
ends with that sentence; it can be resumed.
"""

from collections.abc import Hashable
from dataclasses import dataclass

STALL_LIMIT = 5  # multiples of rollout.stall_seconds without progress that end a run


@dataclass(frozen=True)
class StallSnapshot:
    """The state of a run that makes no progress."""

    served: int  # version
    published: int
    prompts: int  # P: groups of a step
    ready: int  # groups that are finished and not trained on, P at most
    takeable: int  # ready groups that the next step may take: P, or none where a straggler would come too late
    live: int  # episodes
    at_engine: int  # requests being computed or waiting for a row
    oldest: str  # live episode, e.g. "member 3 of group 17 (task clamp)"; empty if none is live
    oldest_seconds: float


class StallWatchdog:
    """Measures how long a run has made no progress. `now` is in seconds, on one monotonic clock."""

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self._progress: Hashable = None
        self._moved = now
        self._warned = False

    def observe(self, progress: Hashable, now: float) -> float:
        """Seconds since `progress`, a value that changes with every progress of the run, last changed."""
        if progress != self._progress:
            self._progress, self._moved, self._warned = progress, now, False
        return now - self._moved

    def warns(self, stalled: float) -> bool:
        """Whether to warn after `stalled` seconds: true once per stall."""
        if stalled < self.seconds or self._warned:
            return False
        self._warned = True
        return True


def diagnose_stall(s: StallSnapshot) -> str:
    """The cause of a stall, as a clause on the part that keeps the others waiting."""
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
