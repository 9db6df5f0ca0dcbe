"""Repair of a damaged chunk: the sources that may still have the right bits, nearest first.

A source gives absolute bits, so the content of the damaged chunk does not matter, and its bits are digested in full
before they are used. A source is tried three times, then the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.weights.ulpd.chunk_grid import Bits

TRIES = 3


class RepairUnavailable(Exception):
    """A repair source cannot help; the message is the reason, in a few words."""


class Unrepairable(Exception):
    """No repair source had the right bits."""


@dataclass(frozen=True)
class RepairSource:
    """A place that may have a chunk's bits. `fetch` takes the chunk's number and may raise RepairUnavailable."""

    name: str
    fetch: Callable[[int], Bits]


@dataclass(frozen=True)
class Repaired:
    """The right bits of a chunk, and the name of the source that had them."""

    chunk: int
    bits: Bits
    source: str


def repair_chunk(chunk: int, right: Callable[[Bits], bool], sources: Sequence[RepairSource]) -> Repaired:
    """The bits of a chunk from the first source that has them; `right` checks their digest. Raises Unrepairable."""
    reasons: list[str] = []
    for source in sources:
        reason = ""
        for _ in range(TRIES):
            try:
                part = source.fetch(chunk)
            except RepairUnavailable as e:
                reason = str(e)
                continue
            if right(part):
                return Repaired(chunk, part, source.name)
            reason = "its bits have another digest"
        reasons.append(f"{source.name}: {reason}")
    raise Unrepairable(f"chunk {chunk} cannot be repaired ({'; '.join(reasons)})")
