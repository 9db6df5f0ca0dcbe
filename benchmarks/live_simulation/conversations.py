"""What simulated users say and tell: their requests as messages of a chat, their opinions as words that the gateway
reads, and the signals that their clients send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.live_simulation.texts import ASKED
from benchmarks.live_simulation.traffic import KINDS, OF_AN_EDIT, Signals, Turns
from etude.live.log.derive import dissatisfied
from etude.live.log.records import SignalKind

_MODULES = ("arrays", "parsers", "reports", "sockets")  # by cell
_OPINIONS = ("Perfect, thanks.", "Thanks.", "Well.", "Hm, still open.", "This is wrong.", "Not what I wanted: wrong.")
_CLIENT_KINDS = (
    SignalKind.APPLIED,
    SignalKind.REJECTED,
    SignalKind.UNDONE,
    SignalKind.SURVIVED,
    SignalKind.GONE,
    SignalKind.RATING,
)
"""What clients tell. The gateway finds the other kinds in answers and requests."""
_NEXT_KINDS = (SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED)
"""What a next request shows; of several the last of these."""


@dataclass(frozen=True)
class UserChat:
    """A conversation: the name of its session, and its messages."""

    session: str
    messages: list[dict[str, Any]]

    def after(self, message: dict[str, Any]) -> UserChat:
        """With an answer and the results of its calls."""
        calls = message.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        return UserChat(self.session, [*self.messages, message, *results])


@dataclass(frozen=True)
class NextRequest:
    """Why a user goes on after the answer to the turn `before`, and how unhappy with it."""

    before: int
    kind: SignalKind
    unhappy: float


def first_chat(session: str, cell: int, case: int) -> UserChat:
    """A request of the kind `cell`, the only one about this case."""
    return UserChat(session, [_user(_request(cell, case))])


def next_chat(chat: UserChat, after: NextRequest, cell: int, case: int) -> UserChat:
    """The conversation that goes on after an answer: with the answer to its question, with the request in other words
    in its place, or with an opinion, of which the gateway's reader thinks about as the user does."""
    if after.kind is SignalKind.RETRY:
        last = max(n for n, message in enumerate(chat.messages) if message["role"] == "user")
        return UserChat(chat.session, [*chat.messages[:last], _user(_request(cell, case))])
    opinion = min(_OPINIONS, key=lambda words: abs(_unhappy(words) - after.unhappy))
    words = "Yes, in" if after.kind is SignalKind.ANSWERED else f"{opinion} Now see"
    return UserChat(chat.session, [*chat.messages, _user(f"{words} {_place(cell, case)}")])


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _place(cell: int, case: int) -> str:
    return f"{_MODULES[cell]}.py, case {case}."


def _request(cell: int, case: int) -> str:
    return f"{ASKED[cell % len(ASKED)].rstrip('?')}, and keep its callers in {_place(cell, case)}"


@cache
def _unhappy(opinion: str) -> float:
    return dissatisfied(f"{opinion} Now see {_place(0, 1)}")


def next_requests(turns: Turns, signals: Signals) -> dict[int, NextRequest]:
    """The turns that go on in the conversation of another. All other turns begin one of their own."""
    out: dict[int, NextRequest] = {}
    for kind in _NEXT_KINDS:
        mine = signals.where(signals.of(kind))
        for before, value in zip(mine.turn_S.tolist(), mine.value_S.tolist(), strict=True):
            out[int(turns.next_N[before])] = NextRequest(before, kind, value)
    return out


@dataclass(frozen=True)
class ClientSignal:
    """A signal that a client sends on a turn. `arrives`: seconds since the window opened; `place`: among the signals of
    the window, as they happened."""

    turn: int
    kind: SignalKind
    value: float
    horizon: float  # nan: none
    arrives: float
    place: int
    event: int

    def body(self, window: int, turn: str, edit: str) -> dict[str, Any]:
        """The event for `/v1/feedback` on a turn and its edit."""
        return {
            "response_id": edit if self.kind in OF_AN_EDIT else turn,
            "name": self.kind.value,
            "value": self.value,
            "event_id": f"{window}-{self.event}",
            "client_sequence": self.place,
            **({} if np.isnan(self.horizon) else {"horizon": self.horizon}),
        }


def client_signals(signals: Signals) -> Sequence[ClientSignal]:
    """What clients tell, in the order in which it arrives."""
    mine = signals.where(signals.of(*_CLIENT_KINDS))
    place_S = np.argsort(np.argsort(mine.seen_S, kind="stable"))
    columns = (mine.turn_S, mine.kind_S, mine.value_S, mine.horizon_S, mine.seen_S + mine.lag_S, place_S, mine.event_S)
    made = [
        ClientSignal(turn, KINDS[kind], *rest) for turn, kind, *rest in zip(*(c.tolist() for c in columns), strict=True)
    ]
    return sorted(made, key=lambda signal: (signal.arrives, signal.place))
