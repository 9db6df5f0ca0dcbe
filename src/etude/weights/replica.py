"""The servers of one replica go from version to version together, or not at all: the member's side of the votes.

    every member: fetch, stage -> READY(v)? -> all are ready in time -> swap between two steps -> APPLIED? -> all have
    applied in time -> commit; else undo

A member that gets no reply (the coordinator has failed) undoes its swap. The coordinator's side is `coordinator.py`. A
server without a coordinator calls `Receiver.advance` and needs nothing of this module.
"""

from __future__ import annotations

from typing import Annotated

import httpx2
import msgspec

from etude.errors import SwapUndone, UserError
from etude.failpoints import failpoint
from etude.protocol import JSON, bearer, own_token
from etude.weights.payloads import DamagedVersion
from etude.weights.receiver import BetweenSteps, Receiver, WeightsMismatch, WeightUpdate

READY_SECONDS, APPLIED_SECONDS = 10.0, 2.0
"""Time that a round waits for its last vote. Engines are paused during the second round."""
GRACE_SECONDS = 2.0
"""Time that a member waits longer than the coordinator."""
_MAX_CHARACTERS = 10_000  # limit for a member's name, and for its reasons


class NotTogether(SwapUndone):
    """The replica did not go to a version; all of its members serve the old one, and will try again."""


class Vote(msgspec.Struct, frozen=True):
    """One member's vote on a version that it could go to. `ticket` names the round, None before the first."""

    member: Annotated[str, msgspec.Meta(max_length=_MAX_CHARACTERS)]
    ok: bool
    version: Annotated[int, msgspec.Meta(ge=-1, lt=2**53)]
    ticket: Annotated[int, msgspec.Meta(ge=-1, lt=2**53)] | None = None
    why: Annotated[str, msgspec.Meta(max_length=_MAX_CHARACTERS)] = ""


class Decision(msgspec.Struct, frozen=True):
    """The decision of a round. If the members' versions differ, `target` is the lowest: all can go there."""

    go: bool
    ticket: int
    target: int
    why: str = ""


class CoordinatorVote:
    """The vote in a replica whose coordinator answers at `url`."""

    def __init__(self, url: str, member: str):
        self._member = member
        self._http = httpx2.Client(base_url=url, trust_env=False, headers={"content-type": JSON, **bearer(own_token())})

    def committed(self) -> int:
        """The version that the replica serves, -1 if none or if the coordinator does not answer."""
        try:
            return int(self._http.get("/health", timeout=GRACE_SECONDS).json()["committed"])
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            return -1

    def ready(self, version: int, ok: bool, why: str = "") -> Decision:
        """The round's decision; no if the coordinator does not answer."""
        vote = Vote(self._member, ok, version, why=why[:_MAX_CHARACTERS])
        return self._cast("/ready", vote, READY_SECONDS) or Decision(False, -1, version, "the coordinator is silent")

    def applied(self, decision: Decision, ok: bool) -> bool:
        """Whether all members have swapped; false if the coordinator does not answer."""
        vote = Vote(self._member, ok, decision.target, decision.ticket)
        decided = self._cast("/applied", vote, APPLIED_SECONDS)
        return decided is not None and decided.go

    def _cast(self, route: str, vote: Vote, seconds: float) -> Decision | None:
        try:
            reply = self._http.post(route, content=msgspec.json.encode(vote), timeout=seconds + GRACE_SECONDS)
            return msgspec.json.decode(reply.content, type=Decision)
        except (httpx2.HTTPError, msgspec.MsgspecError):
            return None


class ReplicaMember:
    """Brings a receiver from version to version by the votes of its replica."""

    def __init__(self, receiver: Receiver, votes: CoordinatorVote):
        self.receiver = receiver
        self._votes = votes
        self._limit: int | None = None  # the version that all members can reach, after a round of different versions

    def advance(self, between_steps: BetweenSteps) -> bool:
        """Looks for a new version once; true if one is live now. Raises DamagedVersion, UserError, NotTogether or
        WeightsMismatch; then the old version is live and complete."""
        receiver = self.receiver
        if not receiver.behind():
            return False
        committed = self._votes.committed()
        if receiver.version < committed:  # the others serve it already, so no vote is needed
            return receiver.advance(between_steps, committed)
        try:
            update = receiver.poll(self._limit)
        except (DamagedVersion, UserError) as e:
            self._votes.ready(receiver.version, False, str(e))
            raise
        self._limit = None
        if update is None:
            return False
        failpoint("receiver.staged")
        self._vote(update, between_steps)
        return True

    def _vote(self, update: WeightUpdate, between_steps: BetweenSteps) -> None:
        version = update.manifest.version
        decision = self._votes.ready(version, True)
        if not decision.go:
            self._limit = decision.target
            raise NotTogether(f"version {version} waits: {decision.why}")
        failpoint("receiver.ready")

        def swap() -> None:
            try:
                self.receiver.swap(update)
            except WeightsMismatch:
                self._votes.applied(decision, False)
                raise
            failpoint("receiver.swapped")
            if not self._votes.applied(decision, True):
                self.receiver.undo(update)
                raise NotTogether(f"version {version} was taken back: not all members have swapped")
            self.receiver.commit(update)

        between_steps(version, swap)
