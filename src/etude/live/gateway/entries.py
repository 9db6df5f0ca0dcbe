"""The entries that wait for the log: turns, unrecorded turns, suggestions and signals, and the key of a counter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from etude.live.log.records import Arm, LivePolicy, ServedTurn, Session, Signal, Suggestion, TurnContent


class Key(NamedTuple):
    """The release and arm of a counter, and the account that is vouched for; an account has one tenant."""

    release: int
    arm: Arm
    account: str
    tenant: str


@dataclass(frozen=True)
class TurnEntry:
    """A turn with consent. The writer sets `session.opened`, and `sequence`, `blob`, `scrubbed`, `rules` and `at` of
    the turn, whose `reason` tells why `content` is missing. `text`, the text of the tokens, is scrubbed beside request
    and response: a prompt may hold more than its request. Findings of the rules `keep` in the request stay. `answer` is
    the id in the answer's body, "" for one that names the turn."""

    session: Session
    turn: ServedTurn
    content: TurnContent | None = None
    text: str = ""
    keep: tuple[str, ...] = LivePolicy().keep
    answer: str = ""

    @property
    def bytes(self) -> int:
        """The approximate size in memory."""
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
    account: str  # of the user's name
    answer: str = ""


@dataclass(frozen=True)
class SuggestionEntry:
    """An edit of a turn of `tenant`, and of `account` unless that is "". The writer sets `shown`."""

    tenant: str
    suggestion: Suggestion
    account: str = ""


@dataclass(frozen=True)
class SignalEntry:
    """A signal, and its text `comment`; its subject belongs to `account` unless that is "". The writer sets the turn as
    subject where that is the id of a body, `arrived_at` and, for a comment, `text`."""

    signal: Signal
    comment: str | None = None
    account: str = ""


Entry: TypeAlias = TurnEntry | ServedEntry | SuggestionEntry | SignalEntry
