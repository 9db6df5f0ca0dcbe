"""How an engine is shared among clients: who has asked for least is served first.

The load of a client is the number of tokens that its unfinished requests may take, and of those that it took lately.
One client is lighter than another if its load is at most half of the other's; groups are compared first, and members
within a group. Lighter clients are admitted first and may take the places of heavier ones (`Scheduler`), and passes are
shared by time: while lighter sequences run, passes of these alone get three quarters of it, unless passes of all take
hardly longer. So a client waits for the requests of its equals, not for a flood's, and a flood is not starved. The
counters are like those of Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), with the declared length
of a request beside what it has taken, so that a client is known for a flood before it was served.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable

from etude.inference.engine.requests import RunningSequence
from etude.protocol import Client

_TIMES = 2.0  # a client is lighter than one with so many times its load
_HALF_LIFE = 30.0  # seconds in which half of the taken tokens is forgotten
SHARE = 3.0
"""Seconds of lighter sequences alone for each second of all, and of sampling for each of scoring."""
_HARDLY = 1.25  # a pass of all that takes at most so many times the seconds of the lighter ones
_REMEMBERED = 4096  # clients without requests

Key = str | Client


class ClientLoads:
    """The loads of all clients and of their groups, as of the last beginning or end of a sequence: all comparisons
    between two such events agree."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._owed, self._sequences = Counter[Key](), Counter[Key]()
        self._taken: dict[Key, tuple[float, float]] = {}  # tokens, and when

    def add(self, sequence: RunningSequence) -> None:
        """A sequence was submitted."""
        self._now = time.monotonic()
        for key in _keys(sequence):
            self._owed[key] += sequence.tokens
            self._sequences[key] += 1

    def end(self, sequence: RunningSequence, taken: int) -> None:
        """A sequence has ended, after so many tokens."""
        self._now = now = time.monotonic()
        for key in _keys(sequence):
            self._owed[key] -= sequence.tokens
            self._sequences[key] -= 1
            self._taken[key] = self._recent(key) + taken, now
            if not self._sequences[key]:
                del self._owed[key], self._sequences[key]
        if len(self._taken) > _REMEMBERED:
            self._taken = {key: kept for key, kept in self._taken.items() if key in self._owed or now - kept[1] < 60}

    def unfinished(self, client: Client) -> int:
        """The number of the client's sequences that wait or run. Any thread may ask."""
        return self._sequences.get(client, 0)

    def of(self, client: Client) -> tuple[float, float]:
        """The loads of the client's group and of the client: the order in which clients are served."""
        return self._load(client.group), self._load(client)

    def lighter(self, one: Client, other: Client) -> bool:
        """Whether one client is lighter than the other."""
        level = 0 if one.group != other.group else 1
        return one != other and self.of(one)[level] * _TIMES <= self.of(other)[level]

    def light(self, sequences: Iterable[RunningSequence]) -> set[RunningSequence]:
        """The sequences of clients that are lighter than the heaviest; empty if there are none."""
        running = list(sequences)
        loads = {client: self.of(client) for client in {sequence.client for sequence in running}}
        if len(loads) < 2:
            return set()
        heaviest = max(loads, key=loads.__getitem__)
        light = {client for client in loads if self.lighter(client, heaviest)}
        return {sequence for sequence in running if sequence.client in light}

    def _load(self, key: Key) -> float:
        return self._owed.get(key, 0) + self._recent(key)

    def _recent(self, key: Key) -> float:
        tokens, then = self._taken.get(key, (0.0, self._now))
        return tokens * math.exp2((then - self._now) / _HALF_LIFE)


class PassShares:
    """Whether the next pass is of lighter sequences alone. Times are those of the passes so far."""

    def __init__(self) -> None:
        self._all = self._alone = 0.0  # seconds of the last pass of each kind
        self._paid = 0.0  # seconds of lighter sequences that no pass of all has followed

    def alone(self) -> bool:
        """Whether lighter sequences have the next pass to themselves."""
        if self._alone and self._all <= _HARDLY * self._alone:
            return False
        return self._paid < SHARE * self._all

    def begin(self) -> None:
        """Other sequences run now: what lighter ones take alone is to be measured anew."""
        self._alone = 0.0

    def note(self, seconds: float, alone: bool, contended: bool) -> None:
        """A pass took so long; `contended` if lighter and heavier sequences ran."""
        if alone:
            self._alone = seconds
            self._paid += seconds
        else:
            self._all = seconds
            self._paid = max(0.0, self._paid - SHARE * seconds) if contended else self._paid


def _keys(sequence: RunningSequence) -> tuple[Key, Key]:
    return sequence.client.group, sequence.client
