"""The votes by which the servers of one replica go from version to version together, or not at all.

    every member: fetch, stage -> READY(v)? -> all said yes in time -> flip between two steps -> APPLIED? -> all said
    yes in time -> commit; else undo

A round opens with its first vote and is decided when all members have voted or its time is over; a decision is never
changed, and who comes late hears the one that was made. A member that hears nothing (the coordinator is gone) undoes.

python -m etude.weights.coordinator --members N [--port N] [--ready-file FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.weights.service import answer

READY_SECONDS, APPLIED_SECONDS = 10.0, 2.0
"""How long a round waits for its last vote. Engines stand still during the second one."""
_KEPT = 64  # decided rounds that a late member may still ask about
_GRACE_SECONDS = 2.0  # a member waits this much longer than the coordinator


class Vote(msgspec.Struct, frozen=True):
    """One member's. `version` is the one it could go to; `ticket` names the round, None before there is one."""

    member: str
    ok: bool
    version: int
    ticket: int | None = None
    why: str = ""


class Decision(msgspec.Struct, frozen=True):
    """What was decided. If versions differed, `target` is the lowest: all can go there."""

    go: bool
    ticket: int
    target: int
    why: str = ""


class Ballot(Protocol):
    """What a member needs of its replica."""

    def committed(self) -> int:
        """The version that the replica serves, -1 if none or unknown."""
        ...

    def ready(self, version: int, ok: bool, why: str = "") -> Decision:
        """Whether all members are ready to flip to `version`."""
        ...

    def applied(self, decision: Decision, ok: bool) -> bool:
        """Whether all members have flipped; if not, undo."""
        ...


class Alone:
    """The ballot of a replica with one member."""

    def committed(self) -> int:
        return -1

    def ready(self, version: int, ok: bool, why: str = "") -> Decision:
        return Decision(ok, 0, version, why)

    def applied(self, decision: Decision, ok: bool) -> bool:
        return ok


class Remote:
    """The ballot of a member of a replica whose coordinator answers at `url`."""

    def __init__(self, url: str, member: str):
        self._member = member
        self._http = httpx2.Client(base_url=url, trust_env=False)

    def committed(self) -> int:
        try:
            return int(self._http.get("/health", timeout=_GRACE_SECONDS).json()["committed"])
        except httpx2.HTTPError:
            return -1

    def ready(self, version: int, ok: bool, why: str = "") -> Decision:
        vote = Vote(self._member, ok, version, why=why)
        return self._cast("/ready", vote, READY_SECONDS) or Decision(False, -1, version, "the coordinator is silent")

    def applied(self, decision: Decision, ok: bool) -> bool:
        vote = Vote(self._member, ok, decision.target, decision.ticket)
        decided = self._cast("/applied", vote, APPLIED_SECONDS)
        return decided is not None and decided.go

    def _cast(self, route: str, vote: Vote, seconds: float) -> Decision | None:
        try:
            found = self._http.post(route, content=msgspec.json.encode(vote), timeout=seconds + _GRACE_SECONDS)
            return msgspec.json.decode(found.content, type=Decision)
        except (httpx2.HTTPError, msgspec.MsgspecError):
            return None


@dataclass
class _Round:
    ticket: int
    votes: dict[str, Vote] = field(default_factory=dict[str, Vote])
    decided: asyncio.Future[Decision] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Coordinator:
    """Counts the votes of `members` members."""

    def __init__(self, members: int, ready_seconds: float = READY_SECONDS, applied_seconds: float = APPLIED_SECONDS):
        self._members = members
        self._seconds = (ready_seconds, applied_seconds)
        self._tickets = itertools.count()
        self._open: _Round | None = None  # of the question READY
        self._applied: OrderedDict[int, _Round] = OrderedDict()
        self.committed = -1

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/ready", self._ready, methods=["POST"]),
                Route("/applied", self._confirm, methods=["POST"]),
                Route("/health", self._health),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "committed": self.committed, "members": self._members})

    async def _ready(self, http: Request) -> Response:
        vote = msgspec.json.decode(await http.body(), type=Vote)
        if self._open is None or self._open.decided.done():
            self._open = _Round(next(self._tickets))
        decision = await self._count(self._open, vote, self._seconds[0])
        if decision.go and decision.ticket not in self._applied:
            self._applied[decision.ticket] = _Round(decision.ticket)
            while len(self._applied) > _KEPT:
                self._applied.popitem(last=False)
        return Response(msgspec.json.encode(decision))

    async def _confirm(self, http: Request) -> Response:
        vote = msgspec.json.decode(await http.body(), type=Vote)
        asked = self._applied.get(-1 if vote.ticket is None else vote.ticket)
        if asked is None:
            return Response(msgspec.json.encode(Decision(False, -1, vote.version, "this round is forgotten")))
        decision = await self._count(asked, vote, self._seconds[1])
        if decision.go:
            self.committed = max(self.committed, decision.target)
        return Response(msgspec.json.encode(decision))

    async def _count(self, asked: _Round, vote: Vote, seconds: float) -> Decision:
        """The round's decision, once all have voted or the time since its first vote is over."""
        if not asked.decided.done():
            if not asked.votes:
                asyncio.get_running_loop().call_later(seconds, self._decide, asked)
            asked.votes[vote.member] = vote
            if len(asked.votes) >= self._members or not vote.ok:
                self._decide(asked)
        return await asyncio.shield(asked.decided)

    def _decide(self, asked: _Round) -> None:
        if asked.decided.done():
            return
        votes = list(asked.votes.values())
        unable = [vote for vote in votes if not vote.ok]
        target = min((vote.version for vote in votes if vote.ok), default=votes[0].version)
        why = ""
        if unable:
            why = f"{unable[0].member} cannot: {unable[0].why or 'its tensors did not take the values'}"
        elif len(votes) < self._members:
            why = f"{self._members - len(votes)} of {self._members} members did not answer"
        elif any(vote.version != target for vote in votes):
            why = "the members are ready for different versions"
        asked.decided.set_result(Decision(not why, asked.ticket, target, why))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etude.weights.coordinator", description="Count a replica's votes.")
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--ready-file", type=Path, help="written with url and pid once it answers")
    parser.add_argument("--parent-death", action="store_true", help="die with the process that started this one")
    options = parser.parse_args(argv)
    return answer("coordinator", lambda: Coordinator(options.members).app(), options)


if __name__ == "__main__":
    sys.exit(main())
