"""The end of a lease: a lease expires if its holder has not renewed it for the agreed number of seconds.

The observer measures this time on its own monotonic clock, from when it first saw the lease in its present state. So
neither a clock that is set nor a difference between two machines' clocks ends a lease or keeps it alive. The time
begins again after an outage of the database, in which nobody could renew anything.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from etude.ledger.database import last_outage

ELSEWHERE = "elsewhere/"
"""The beginning of the names of lease holders that do not end with the controller."""
_LOOKS = 100  # at the leases, in the duration of the shortest of them
_Held = tuple[int, int, int, int]  # group, member, attempt, renewals


class LeaseWatch:
    """When one process has first seen each lease in its present state."""

    def __init__(self) -> None:
        self._since: dict[_Held, float] = {}
        self._due = -math.inf
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Whether it is time to look at all leases: that costs more than a lease, of which there may be thousands."""
        return time.monotonic() >= self._due

    def over(self, rows: Iterable[sa.Row[Any, Any, Any, Any, Any]]) -> set[_Held]:
        """The leases in `rows`, which are all present leases, that nobody has renewed in time."""
        with self._lock:
            now, seen = time.monotonic(), self._since
            held = {(row.group_id, row.member, row.attempt, row.renewals): row.lease_seconds for row in rows}
            self._since = {lease: seen.get(lease, now) for lease in held}
            self._due = now + min(held.values(), default=0.0) / _LOOKS
            outage = last_outage()
            return {lease for lease, since in self._since.items() if now - max(since, outage) > held[lease]}
