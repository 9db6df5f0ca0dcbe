"""Counts the votes by which the servers of one replica go from version to version together, or not at all.

A round opens with its first vote and is decided when all members have voted or its time is over. A decision is never
changed, and a late member gets the earlier decision. The members' side is `replica.py`.

python -m etude.weights.coordinator --members N [--port N] [--ready-file FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.protocol import HANDLERS, decoded
from etude.weights.replica import APPLIED_SECONDS, READY_SECONDS, Decision, Vote
from etude.weights.service import add_flags, serve

_KEPT = 64  # decided rounds kept for late members


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
        self._open: _Round | None = None  # the open round of READY votes
        self._applied: OrderedDict[int, _Round] = OrderedDict()
        self.committed = -1

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/ready", self._ready, methods=["POST"]),
                Route("/applied", self._confirm, methods=["POST"]),
                Route("/health", self._health),
            ],
            exception_handlers=HANDLERS,
        )

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "committed": self.committed, "members": self._members})

    async def _ready(self, http: Request) -> Response:
        vote = await decoded(http, Vote)
        if self._open is None or self._open.decided.done():
            self._open = _Round(next(self._tickets))
        decision = await self._count(self._open, vote, self._seconds[0])
        if decision.go and decision.ticket not in self._applied:
            self._applied[decision.ticket] = _Round(decision.ticket)
            while len(self._applied) > _KEPT:
                self._applied.popitem(last=False)
        return Response(msgspec.json.encode(decision))

    async def _confirm(self, http: Request) -> Response:
        vote = await decoded(http, Vote)
        round_ = self._applied.get(-1 if vote.ticket is None else vote.ticket)
        if round_ is None:
            return Response(msgspec.json.encode(Decision(False, -1, vote.version, "this round is forgotten")))
        decision = await self._count(round_, vote, self._seconds[1])
        if decision.go:
            self.committed = max(self.committed, decision.target)
        return Response(msgspec.json.encode(decision))

    async def _count(self, round_: _Round, vote: Vote, seconds: float) -> Decision:
        """The round's decision, once all have voted or the time since its first vote is over."""
        if not round_.decided.done():
            if not round_.votes:
                asyncio.get_running_loop().call_later(seconds, self._decide, round_)
            round_.votes[vote.member] = vote
            if len(round_.votes) >= self._members or not vote.ok:
                self._decide(round_)
        return await asyncio.shield(round_.decided)

    def _decide(self, round_: _Round) -> None:
        if round_.decided.done():
            return
        votes = list(round_.votes.values())
        unable = [vote for vote in votes if not vote.ok]
        target = min((vote.version for vote in votes if vote.ok), default=votes[0].version)
        why = ""
        if unable:
            why = f"{unable[0].member} cannot: {unable[0].why or 'its tensors did not take the values'}"
        elif len(votes) < self._members:
            why = f"{self._members - len(votes)} of {self._members} members did not answer"
        elif any(vote.version != target for vote in votes):
            why = "the members are ready for different versions"
        round_.decided.set_result(Decision(not why, round_.ticket, target, why))


def main(argv: list[str] | None = None) -> int:
    """Runs a coordinator until SIGINT or SIGTERM. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m etude.weights.coordinator", description="Count a replica's votes.")
    parser.add_argument("--members", type=int, required=True)
    add_flags(parser)
    options = parser.parse_args(argv)
    return serve("coordinator", lambda: Coordinator(options.members).app(), options, token=True)


if __name__ == "__main__":
    sys.exit(main())
