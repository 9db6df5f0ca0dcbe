"""What the ways to answer look like: texts in the nano model's dialect, which the server parses and the gateway reads.

Nothing is told of an answer but what these find in its tokens: its calls, a question, how long its edit is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from etude.config.sections import find_model
from etude.live.gateway.entries import TurnEntry
from etude.live.gateway.observed import LastTurns
from etude.live.log.records import Arm, Consent, ServedTurn, Session, SignalKind, TurnContent, TurnKind, ulid
from etude.live.simulate.users import Action
from etude.protocol.apis import SampledTurn
from etude.records import Generation
from etude.renderers import Renderer, renderer_for

ASKED = ("Fix the loop in chunk", "Please handle empty input in compact", "Can you rename the argument of zip_all?")
"""Requests; the texts of an answer go with them in order."""
_QUESTIONS = (
    "Do you mean the inner loop or the outer one?",
    "Should empty input give None?",
    "What is its name?",
)
_BROKEN = (
    "<|call|>edit<|arg|>for x in array:<|end|>",
    "<|call|>edit<|arg|>if array<|arg|>if not array<|tool|>ok<|end|>",
    "<|call|>undo<|arg|>zip_all<|end|>",
)
_CODE = """
    for index, value in enumerate(array):
        if value is None:
            continue
        out[index] = value
"""
_TOLD = (SignalKind.INVALID_CALL, SignalKind.QUESTION, SignalKind.NO_EDIT)


@dataclass(frozen=True)
class ReadAnswer:
    """What the loop knows of an answer at once: its signals, and the characters of its edit, 0 without one."""

    kinds: frozenset[SignalKind]
    characters: int


def sampled_text(action: Action, number: int) -> str:
    """The tokens of an answer as text, special ones by name."""
    if action.outcome == "question":
        return f"{_QUESTIONS[number]}<|end|>"
    if action.outcome == "broken":
        return _BROKEN[number]
    new = (_CODE * (1 + action.characters // len(_CODE)))[: action.characters]
    return f"<|call|>edit<|arg|>    pass  # {number}<|arg|>{new}<|end|>"


@cache
def read_answer(action: Action, number: int) -> ReadAnswer:
    """What the server's parser and the gateway make of the answer to request `number` of ASKED."""
    turn = sampled(sampled_text(action, number))
    call = next((each for each in turn.parsed.calls if each.arguments is not None), None)
    message = msgspec.json.encode(turn.message)
    entry = _entry(ASKED[number], message)
    kinds = frozenset(each.entry.signal.kind for each in LastTurns().signals(entry, turn.malformed))
    assert kinds <= set(_TOLD), "an answer alone tells no more"
    return ReadAnswer(kinds, len(str((call.arguments or {}).get("new", ""))) if call is not None else 0)


@cache
def dialect() -> tuple[Renderer, Tokenizer]:
    """The nano model's."""
    folder = find_model("nano")
    return renderer_for(folder), Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def sampled(text: str) -> SampledTurn:
    """The turn whose tokens are a text's."""
    renderer, tokenizer = dialect()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    turn = SampledTurn(renderer, 1)
    versions, logprobs = [0] * len(ids), [0.0] * len(ids)
    turn.settle(Generation(ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop"))
    return turn


def _entry(asked: str, message: bytes) -> TurnEntry:
    session = Session(
        id=ulid(), tenant="firm", account="a", voucher="a", consent=Consent(), arm=Arm.CONTROL, release=0,
        propensity=1.0, opened=0,
    )  # fmt: skip
    turn = ServedTurn(
        id=ulid(), session=session.id, sequence=0, kind=TurnKind.MAIN, release=0, manifest="", spans=(),
        prompt_tokens=1, sampled_tokens=1, blob=None, scrubbed={}, rules="", stop="stop", seconds=1.0, cluster="", at=0,
    )  # fmt: skip
    request = msgspec.json.encode({"messages": [{"role": "user", "content": asked}]})
    content = TurnContent(
        dialect="chat", request=request, response=message, prompt_ids=b"", ids=b"", logprobs=b"", temperature=1.0,
        top_p=1.0,
    )  # fmt: skip
    return TurnEntry(session, turn, content)
