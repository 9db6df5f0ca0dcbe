"""What an engine may use, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """What the engine may use. `cache_bytes` holds the keys and values of running rows and of kept prefixes,
    `document_bytes` those of documents, which are kept apart from any row."""

    rows: int = 128
    cache_bytes: int = 512 * 2**20
    document_bytes: int = 256 * 2**20
    prefill_tokens: int = 1024  # prompt tokens fed in one step, over all rows; and as many of documents, apart
    max_length: int | None = None  # prompt and generation; None: what the model allows
    speculate: bool = True  # feed drafted tokens where the measured costs say that it pays
    routes: bool = False  # keep the experts of every token beside its keys and values, for requests that ask for them


@dataclass
class Counters:
    """Sums since the start; seconds of wall clock."""

    busy_seconds: float = 0.0  # inside forward passes and sampling
    pause_seconds: float = 0.0  # rows stood still for a weight swap
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    scored_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    swaps: int = 0
    steps: int = 0
    draft_passes: int = 0  # passes in which some row fed drafted tokens
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted ones that were emitted
