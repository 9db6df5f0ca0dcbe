"""Repetition of transactions while a database server is away: restarted, failed over, or cut off."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from etude.errors import UserError

OUTAGE_SECONDS = 120.0
"""For which a transaction is tried again while the server is away."""
OPEN_SECONDS = 10.0
"""The same for the first connection of a process, whose URL may be wrong."""
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_LASTING = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "not permitted")
T = TypeVar("T")


class Outage(UserError):
    """The database server is away."""


def is_outage(error: DBAPIError) -> bool:
    """Whether the same transaction may succeed later. PostgreSQL's codes: 08 connection, 57P01 to 57P03 shutdown, crash
    and start; a refused connection has no code."""
    code = getattr(error.orig, "sqlstate", "none")
    if code == "none":  # SQLite, which has no server
        return False
    if code is None:
        return not any(reason in str(error.orig) for reason in _LASTING)
    return code.startswith("08") or code in ("57P01", "57P02", "57P03")


def persist(work: Callable[[bool], T], seconds: float = OUTAGE_SECONDS) -> T:
    """The result of `work(again)`, repeated while it raises Outage; `again` is False at the first call only. After
    `seconds` the Outage is raised. A call may have been committed although it raised, so `work` must have the same
    effect if it is repeated."""
    deadline, pause, again = time.monotonic() + seconds, _PAUSE, False
    while True:
        try:
            result = work(again)
        except Outage as e:
            if time.monotonic() + pause > deadline:
                raise
            if not again and seconds == OUTAGE_SECONDS:
                print(f"note: {e}; tried again for {seconds:.0f} s", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause, again = min(2 * pause, _LONGEST_PAUSE), True
        else:
            return result
