"""The repair ladder: where the right bits of a damaged chunk may still be found, nearest first.

Every rung gives absolute bits, so it does not matter what the damaged chunk holds, and what a rung gives is digested in
full before it is believed. A rung is tried three times, then the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.weights.ulpd.schema import Bits

TRIES = 3


class RepairUnavailable(Exception):
    """A rung that cannot help, in a few words."""


class Unrepairable(Exception):
    """No rung had the right bits."""


@dataclass(frozen=True)
class Rung:
    """A place that may know a chunk's bits. `fetch` may raise Unavailable."""

    name: str
    fetch: Callable[[int], Bits]


@dataclass(frozen=True)
class Repaired:
    """The right bits of a chunk, and the rung that had them."""

    chunk: int
    bits: Bits
    rung: str


def mend(chunk: int, right: Callable[[Bits], bool], rungs: Sequence[Rung]) -> Repaired:
    """The bits of a chunk from the first rung that has them; `right` digests them. Raises Unrepairable."""
    reasons: list[str] = []
    for rung in rungs:
        reason = ""
        for _ in range(TRIES):
            try:
                found = rung.fetch(chunk)
            except RepairUnavailable as e:
                reason = str(e)
                continue
            if right(found):
                return Repaired(chunk, found, rung.name)
            reason = "its bits have another digest"
        reasons.append(f"{rung.name}: {reason}")
    raise Unrepairable(f"chunk {chunk} cannot be repaired ({'; '.join(reasons)})")
