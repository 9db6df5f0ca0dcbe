"""The inference servers and players of a run, which come and go while it goes on, and the stage of the run for its
players.

    joining ──(as new as the others)──> serving <──(has caught up)── draining
       ^                                   │  └──(lags, or leaves)──────^  │
       └────────(is started anew)───────── gone <──(silent, dead)──────────┘

A server joins by itself, or by the controller that has started it. The controller alone decides on `state`; `leaving`
is what an operator, or a server that is asked to end, sets. Every process that sends turns reads this table: turns go
to servers in the state `serving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from etude.ledger.leases import ELSEWHERE
from etude.ledger.schema import RunStage, engines, episodes, meta, players
from etude.ledger.tables import RunTables, persistent

MemberState = Literal["joining", "serving", "draining", "gone"]
_c, _e, _p = engines.c, episodes.c, players.c


@dataclass(frozen=True)
class MemberEngine:
    """The row of an inference server. `why` is the reason why it gets no turns, `leaving` why it was asked to leave."""

    url: str
    name: str
    state: MemberState
    why: str
    version: int
    leaving: str


@dataclass(frozen=True)
class MemberPlayer:
    """The row of a player, by the name under which it leases: the most `episodes` that it plays at a time now, `why`
    they are fewer than it was started for, and a number that grows while it lives."""

    owner: str
    episodes: int
    why: str
    beat: int


class Membership(RunTables):
    """The tables of who takes part in a run. Methods raise UserError as those of `Ledger` do, and may be repeated."""

    @persistent
    def join(self, url: str, name: str) -> None:
        """Adds a server as joining, also one that was gone or was asked to leave; any other keeps its state."""
        values = {"name": name, "state": "joining", "why": "", "version": -1, "leaving": ""}
        try:
            with self._write() as c:
                row = c.execute(sa.select(_c.state, _c.leaving).where(_c.url == url)).one_or_none()
                if row is None:
                    c.execute(sa.insert(engines), {"url": url} | values)
                elif row.state == "gone" or row.leaving:
                    c.execute(sa.update(engines).where(_c.url == url).values(values))
        except IntegrityError:
            pass  # another process has added it in this moment

    @persistent
    def set(self, states: Sequence[tuple[str, MemberState, str, int]]) -> None:
        """Sets URL, state, why and version of servers; nothing happens to one that never joined."""
        rows: list[dict[str, object]] = [
            {"at": url, "state": state, "why": why, "version": version} for url, state, why, version in states
        ]
        with self._write() as c:
            if rows:
                c.execute(sa.update(engines).where(_c.url == sa.bindparam("at")), rows)

    @persistent
    def drain(self, url: str, why: str) -> bool:
        """Asks a server to leave: it gets no new turns, and ends. False if no such server is there."""
        there = (_c.url == url, _c.state != "gone")
        with self._write() as c:
            return c.execute(sa.update(engines).where(*there).values(leaving=why)).rowcount > 0

    @persistent
    def part(self, why: str, keep: Sequence[str] = ()) -> None:
        """Counts all servers as gone, but those whose names are in `keep`, and forgets the players but those
        `ELSEWHERE`."""
        others = (_c.state != "gone", _c.name.not_in(list(keep)))
        with self._write() as c:
            c.execute(sa.delete(players).where(~_p.owner.startswith(ELSEWHERE, autoescape=True)))
            c.execute(sa.update(engines).where(*others).values(state="gone", why=why))

    @persistent
    def engines(self) -> list[MemberEngine]:
        """All servers, by name."""
        query = sa.select(_c.url, _c.name, _c.state, _c.why, _c.version, _c.leaving).order_by(_c.name, _c.url)
        with self._read() as c:
            return [MemberEngine(*row) for row in c.execute(query)]

    @persistent
    def offer(self, owner: str, episodes: int, why: str = "") -> None:
        """Says how many episodes a player plays at a time now, and counts a beat of it."""
        values = {"episodes": episodes, "why": why}
        try:
            with self._write() as c:
                mine = sa.update(players).where(_p.owner == owner).values(beat=_p.beat + 1, **values)
                if not c.execute(mine).rowcount:
                    c.execute(sa.insert(players), {"owner": owner, "beat": 0} | values)
        except IntegrityError:
            pass  # its reply was lost, and this is the second try

    @persistent
    def withdraw(self, owner: str) -> None:
        """Forgets a player that is silent; it comes back with its next offer."""
        with self._write() as c:
            c.execute(sa.delete(players).where(_p.owner == owner))

    @persistent
    def offers(self) -> list[MemberPlayer]:
        """The players, by name."""
        with self._read() as c:
            rows = c.execute(sa.select(_p.owner, _p.episodes, _p.why, _p.beat).order_by(_p.owner))
            return [MemberPlayer(*row) for row in rows]

    @persistent
    def players(self) -> dict[str, int]:
        """Number of leased episodes by the holder of the leases."""
        query = sa.select(_e.owner, sa.func.count()).where(_e.state == "leased").group_by(_e.owner).order_by(_e.owner)
        with self._read() as c:
            return {row[0]: row[1] for row in c.execute(query)}

    @persistent
    def set_stage(self, stage: RunStage) -> None:
        """Names the stage of the run for its players, and counts a beat of the controller."""
        with self._write() as c:
            c.execute(sa.update(meta).where(meta.c.key == "stage").values(value=stage))
            _beat(c)

    @persistent
    def beat(self) -> None:
        """Counts a beat of the controller, in any stage of the run: engines and players end without one."""
        with self._write() as c:
            _beat(c)

    @persistent
    def stage(self) -> tuple[RunStage, int]:
        """The stage of the run, and a number that grows while the controller lives."""
        with self._read() as c:
            values = {row.key: row.value for row in c.execute(sa.select(meta))}
        return values["stage"], int(values["beat"])


def _beat(connection: sa.Connection) -> None:
    beat = int(connection.execute(sa.select(meta.c.value).where(meta.c.key == "beat")).scalar_one())
    connection.execute(sa.update(meta).where(meta.c.key == "beat").values(value=str(beat + 1)))
