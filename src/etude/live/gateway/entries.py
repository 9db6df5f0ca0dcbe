"""The entries that wait for the log: turns, unrecorded turns, suggestions and signals, and the key of a counter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from etude.live.log.records import Arm, LivePolicy, ServedTurn, Session, Signal, Suggestion, TurnContent


class Key(NamedTuple):
    """The release, arm and account of a counter; an account has one tenant."""

    release: int
    arm: Arm
    account: str
    tenant: str


@dataclass(frozen=True)
class TurnEntry:
    """A turn with consent. Writing sets `session.opened`; of the turn `sequence`, `blob`, `scrubbed`, `rules` and `at`.
    Without `content` the turn's `reason` says why there is none. `text`: the tokens as text, which is scrubbed beside
    request and response: a prompt may hold more than its request. Findings of the rules `keep` in the request stay."""

    session: Session
    turn: ServedTurn
    content: TurnContent | None = None
    text: str = ""
    keep: tuple[str, ...] = LivePolicy().keep

    @property
    def bytes(self) -> int:
        """Its size in memory, about."""
        content = self.content
        if content is None:
            return 1000
        parts = content.request, content.response, content.prompt_ids, content.ids, content.logprobs, self.text
        return 1000 + sum(map(len, parts))


@dataclass(frozen=True)
class ServedEntry:
    """A turn without consent: the key of the counters of its signals, kept for a day."""

    turn: str
    key: Key


@dataclass(frozen=True)
class SuggestionEntry:
    """An edit of a turn of `tenant`. Writing sets `shown`."""

    tenant: str
    suggestion: Suggestion


@dataclass(frozen=True)
class SignalEntry:
    """A signal; writing sets `arrived_at` and, if there is a text, `text`."""

    signal: Signal
    comment: str | None = None


Entry: TypeAlias = TurnEntry | ServedEntry | SuggestionEntry | SignalEntry
