"""The counters of an engine, for `/health` and `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Sums since the start or the last `reset`; seconds of wall clock."""

    busy_seconds: float = 0.0  # inside forward passes and sampling
    pause_seconds: float = 0.0  # pauses of sequences at weight swaps
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    scored_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # requests that could not be computed
    displaced: int = 0  # times that a sequence gave its place to a lighter client's
    swaps: int = 0
    steps: int = 0
    draft_passes: int = 0  # passes in which some sequence fed drafted tokens
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens that were emitted

    def reset(self) -> None:
        """Set all sums to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)
