"""The gateway's view of the log: keys, policies, forgotten accounts and release stages, read again each second."""

from __future__ import annotations

import time

import sqlalchemy as sa

from etude.live.gateway.arms import Stages, read_stages
from etude.live.log import schema
from etude.live.log.journal import reading
from etude.live.log.tenants import Directory

BLIND_SECONDS = 60.0
"""The age of a view after which no account gets the canary: a rollback might have been missed."""


class LogView:
    """Keys, policies, forgotten accounts and stages, as of the last read. Any thread may refresh the view."""

    def __init__(self, engine: sa.Engine) -> None:
        self.directory = Directory()
        self.forgotten = frozenset[str]()  # accounts
        self._engine = engine
        self._stages = Stages()
        self._read_at = time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Reads the log again. Raises the database's errors, with the stages as before."""
        with reading(self._engine) as connection:
            self.directory.refresh(connection)
            stages = read_stages(connection)
            forgotten = frozenset(connection.scalars(sa.select(schema.tombstones.c.account)))
        self._stages, self.forgotten, self._read_at = stages, forgotten, time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the log was read."""
        return time.monotonic() - self._read_at

    @property
    def stages(self) -> Stages:
        """The stages of the releases, without the canary if the view is too old."""
        return self._stages if self.age < BLIND_SECONDS else self._stages.without_canary
