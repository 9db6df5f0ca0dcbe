"""Records from clients' requests with signals or suggestions (docs/live.md).

A signal has one of two shapes: etude's, or OpenTelemetry's `gen_ai.evaluation.result`
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-events/).
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Any

import msgspec

from etude.live.gateway.answer_ids import NAME, ULID
from etude.live.gateway.entries import SignalEntry, SuggestionEntry
from etude.live.log.accounts import Accounts
from etude.live.log.records import Signal, SignalKind, Suggestion
from etude.protocol import Refusal, check_brackets

MAX_EVENTS = 256
"""Events of one request."""
_MAX_TEXT = 64 << 10
_SOURCES = ("client", "git", "ci", "judge", "explicit")
_MEASURED = {
    SignalKind.SURVIVED: (0.0, 1.0), SignalKind.COMMITTED: (0.0, 1.0), SignalKind.FOLLOWUP: (0.0, 1.0),
    SignalKind.TESTS: (-1.0, 1.0), SignalKind.RATING: (-1.0, 1.0), SignalKind.LINT: (-1e6, 1e6),
    SignalKind.LATENCY: (0.0, 1e6),
}  # fmt: skip
"""The kinds that need a value, and its bounds; the value of other kinds is a probability, by default 1."""
_LABELS = {"pass": 1.0, "yes": 1.0, "true": 1.0, "good": 1.0, "fail": 0.0, "no": 0.0, "false": 0.0, "bad": 0.0}
_OURS = frozenset({
    "response_id", "name", "value", "label", "comment", "source", "event_id", "horizon", "observed_at",
    "client_sequence", "confidence",
})  # fmt: skip


def read_signals(body: bytes, tenant: str, account: str = "") -> list[SignalEntry]:
    """The signals of a request of a tenant, on turns of `account` alone unless that is "". Raises Refusal."""
    events = _parsed(body, Any)
    events = events if isinstance(events, list) else [events]
    if not 1 <= len(events) <= MAX_EVENTS:
        raise Refusal(400, f"a request has 1 to {MAX_EVENTS} events")
    return [_signal(event, tenant, account) for event in events]


def _signal(event: Any, tenant: str, account: str) -> SignalEntry:
    if not isinstance(event, dict):
        raise Refusal(400, "an event is an object with response_id, name and value")
    digest = hashlib.blake2b(msgspec.json.encode(event, order="sorted"), digest_size=16).hexdigest()
    if event.get("name") == "gen_ai.evaluation.result":
        event = _of_otel(event)
    if unknown := sorted(map(str, event.keys() - _OURS)):
        raise Refusal(400, f"{unknown[0][:100]} is no field of an event", param=unknown[0][:100])
    try:
        kind = SignalKind(event.get("name"))
    except ValueError:
        raise Refusal(
            400,
            f"{str(event.get('name'))[:100]!r} is no kind of signal; give one of {', '.join(SignalKind)}",
            param="name",
        ) from None
    source = event.get("source", "client")
    if source not in _SOURCES:
        raise Refusal(400, f"source is one of {', '.join(_SOURCES)}", param="source")
    signal = Signal(
        event=_text(event, "event_id", 128) or digest,
        tenant=tenant,
        subject=_subject(event.get("response_id"), "response_id"),
        kind=kind,
        value=_value(kind, event),
        horizon=_number(event, "horizon", 0.0, 1e9),
        observed_at=_integer(event, "observed_at") or time.time_ns(),
        arrived_at=0,
        source=source,
        client_sequence=_integer(event, "client_sequence"),
        confidence=_first(_number(event, "confidence", 0.0, 1.0), 1.0),
    )
    if kind == SignalKind.SURVIVED and signal.horizon is None:
        raise Refusal(400, "survived needs a horizon: seconds after the edit was shown", param="horizon")
    comment = _text(event, "comment", _MAX_TEXT)
    if kind == SignalKind.CORRECTION and not comment:
        raise Refusal(400, "a correction needs its text as comment", param="comment")
    return SignalEntry(signal, comment or None, account)


def _of_otel(event: dict[str, Any]) -> dict[str, Any]:
    fields = event.get("attributes")
    if not isinstance(fields, dict):
        raise Refusal(400, "gen_ai.evaluation.result has attributes", param="attributes")
    ours = {
        "response_id": fields.get("gen_ai.response.id"),
        "name": fields.get("gen_ai.evaluation.name"),
        "value": fields.get("gen_ai.evaluation.score.value"),
        "label": fields.get("gen_ai.evaluation.score.label"),
        "comment": fields.get("gen_ai.evaluation.explanation"),
        "source": "judge",
        "event_id": event.get("event_id"),
    }
    return {name: value for name, value in ours.items() if value is not None}


def read_suggestions(body: bytes, tenant: str, accounts: Accounts, account: str = "") -> list[SuggestionEntry]:
    """The edits of a request of a tenant, their paths hashed, on turns of `account` alone unless that is "". Raises
    Refusal."""
    fields = _parsed(body, _Suggestions)
    return [
        SuggestionEntry(
            tenant,
            Suggestion(
                id=_identifier(edit.id, "id"),
                turn=_subject(fields.turn, "turn"),
                path=accounts.digest("path", tenant, edit.path),
                base=edit.base,
                old_lines=edit.old_lines,
                new=edit.new,
                characters=edit.characters,
                shown=0,
            ),
            account,
        )
        for edit in fields.suggestions
    ]


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z:_-]{1,128}$")]


class _ShownEdit(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    base: _Digest
    old_lines: tuple[_Count, _Count]
    new: _Digest
    characters: _Count


class _Suggestions(msgspec.Struct, forbid_unknown_fields=True):
    turn: str
    suggestions: Annotated[list[_ShownEdit], msgspec.Meta(min_length=1, max_length=MAX_EVENTS)]


def _parsed(body: bytes, kind: Any) -> Any:
    try:
        check_brackets(body)
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as e:
        raise Refusal(400, str(e)) from None


def _identifier(value: Any, name: str) -> str:
    if not isinstance(value, str) or not ULID.fullmatch(value):
        raise Refusal(400, f"{name} is a ULID", param=name)
    return value


def _subject(value: Any, name: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        message = f"{name} is the x-etude-generation of an answer's head, or the id in its body"
        raise Refusal(400, message, param=name)
    return value


def _value(kind: SignalKind, event: dict[str, Any]) -> float:
    low, high = _MEASURED.get(kind, (0.0, 1.0))
    value = event.get("value")
    if value is None and isinstance(event.get("label"), str):
        value = _LABELS.get(event["label"].lower())
        if value is not None and kind == SignalKind.RATING:
            value = 2 * value - 1
    if isinstance(value, bool):
        value = float(value) if value or kind != SignalKind.RATING else -1.0
    if value is None and kind not in _MEASURED:
        return 1.0
    if not isinstance(value, int | float) or not low <= value <= high:
        raise Refusal(400, f"the value of {kind.value} is a number in [{low:g}, {high:g}]", param="value")
    return float(value)


def _number(event: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = event.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refusal(400, f"{name} is a number in [{low:g}, {high:g}]", param=name)
    return float(value)


def _integer(event: dict[str, Any], name: str) -> int | None:
    value = event.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 63):
        raise Refusal(400, f"{name} is an integer of at most 63 bits", param=name)
    return value


def _text(event: dict[str, Any], name: str, most: int) -> str:
    value = event.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise Refusal(400, f"{name} is a text of at most {most} characters", param=name)
    return value


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
