"""Episodes that one process has leased and plays: the controller's, or a player's (`player.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from etude.ledger import EpisodeLease
from etude.run.episodes import cancel, play_leased
from etude.run.state import Play

LEASE_SECONDS = 120.0  # after which episodes of a dead process are played again


@dataclass(frozen=True)
class LiveEpisode:
    """An episode in flight, played since `since` on the monotonic clock."""

    lease: EpisodeLease
    since: float


class LeasedEpisodes:
    """The leases of `owner`, and the episodes that are played with the parts of `play`. A lease lasts for `seconds`
    after its last renewal."""

    def __init__(self, play: Play, owner: str, seconds: float = LEASE_SECONDS) -> None:
        self._play, self._owner, self._seconds = play, owner, seconds
        self._tasks: dict[asyncio.Task[None], LiveEpisode] = {}
        self._renewed = time.monotonic()

    @property
    def live(self) -> list[LiveEpisode]:
        """The episodes in flight."""
        return [episode for task, episode in self._tasks.items() if not task.done()]

    async def fill(self, limit: int, rather_not: Collection[int] = ()) -> None:
        """Renews the leases in time, then leases and begins episodes until `limit` are in flight, of the groups
        `rather_not` only where there are no others: a process that was busy must not take its own episodes for those of
        a dead one. The ledger is asked in threads: episodes go on while its server is away."""
        if time.monotonic() - self._renewed > self._seconds / 3:
            await asyncio.to_thread(self._play.ledger.renew, self._owner, self._seconds)
            self._renewed = time.monotonic()
        if (free := limit - len(self.live)) > 0:
            lease_some = self._play.ledger.lease
            for lease in await asyncio.to_thread(lease_some, self._owner, free, self._seconds, rather_not):
                self._tasks[asyncio.create_task(play_leased(self._play, lease))] = LiveEpisode(lease, time.monotonic())

    def reap(self) -> None:
        """Drops the episodes that have ended. Raises the exception of one that ended with the process's."""
        for task in [task for task in self._tasks if task.done()]:
            task.result()
            del self._tasks[task]

    async def close(self) -> None:
        """Cancels the episodes in flight, and gives them back to the ledger."""
        tasks, self._tasks = self._tasks, {}
        await cancel(tasks)
        if tasks:
            await asyncio.to_thread(self._play.ledger.release, self._owner)
