"""One member of a replica: looks for a version, stages it, votes, flips with the others, or takes it back."""

from __future__ import annotations

from collections.abc import Callable

from etude.errors import UserError
from etude.failpoints import failpoint
from etude.weights.coordinator import Ballot
from etude.weights.receiver import DamagedVersion, Receiver, WeightsMismatch, WeightUpdate

BetweenSteps = Callable[[int, Callable[[], None]], object]
"""Calls a function between two steps of the engine, which goes on as the given version; returns when that is done."""


class NotTogether(Exception):
    """The replica did not go to a version; all of it serves the old one, and will try again."""


class ReplicaMember:
    """Drives a receiver by the votes of its replica."""

    def __init__(self, receiver: Receiver, ballot: Ballot):
        self.receiver = receiver
        self._ballot = ballot
        self._limit: int | None = None  # the version that all members can reach, after a round that found them apart

    def advance(self, between_steps: BetweenSteps) -> bool:
        """Look once; true if a new version is live.

        Raises DamagedVersion, UserError, NotTogether or WeightsMismatch; the old version is live then, whole.
        """
        receiver = self.receiver
        if not receiver.behind():
            return False
        committed = self._ballot.committed()
        if receiver.version < committed:  # the others serve it: nothing is left to vote on
            update = receiver.poll(committed)
            if update is not None:
                between_steps(update.manifest.version, update.apply)
            return update is not None
        try:
            update = receiver.poll(self._limit)
        except (DamagedVersion, UserError) as e:
            self._ballot.ready(receiver.version, False, str(e))
            raise
        self._limit = None
        if update is None:
            return False
        failpoint("receiver.staged")
        self._vote(update, between_steps)
        return True

    def _vote(self, update: WeightUpdate, between_steps: BetweenSteps) -> None:
        version = update.manifest.version
        decision = self._ballot.ready(version, True)
        if not decision.go:
            self._limit = decision.target
            raise NotTogether(f"version {version} waits: {decision.why}")
        failpoint("receiver.ready")

        def flip() -> None:
            try:
                update.flip()
            except WeightsMismatch:
                self._ballot.applied(decision, False)
                raise
            failpoint("receiver.flipped")
            if not self._ballot.applied(decision, True):
                update.undo()
                raise NotTogether(f"version {version} was taken back: not all members have flipped")
            update.commit()

        between_steps(version, flip)
