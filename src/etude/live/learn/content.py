"""Features of a request, from the content of its turn: windows filter turns, and form cells, by them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import msgspec

from etude.code import secret_in
from etude.corpus import bands_of
from etude.live.log.derive import asks_for_edit, conversation
from etude.live.log.records import TurnContent
from etude.live.log.scrub import holds_replaced

_MAX_CHARACTERS = 20_000  # characters of a message that are read
_SHORTEST, _LONGEST = 12, 4000  # characters of a correction: of languages without blanks, too
_EITHER_OR = re.compile(
    r"\b(?:random(?:ly)?|flip a coin|coin toss|roll a dice?|heads or tails|pick (?:one|any|either)|"
    r"choose (?:one|any|between|either)|(?:answer|reply|respond|say|output)\b.{0,60}\beither\b.{1,80}\bor)\b"
)
_DICTATED = re.compile(
    r"\b(?:say|reply|answer|respond|output|print|repeat|echo|type)\s+(?:with\s+|back\s+)?"
    r"(?:exactly|only|just|the following|verbatim|after me|this)\b"
)
_INJECTED = re.compile(
    r"\b(?:ignore|disregard|forget|override)\s+(?:all\s+|any\s+|the\s+|your\s+)*"
    r"(?:previous|prior|above|earlier|preceding|system)\s+(?:instruction|prompt|message|rule|direction)|"
    r"<\|im_(?:start|end)\|>|<\|(?:system|user|assistant)\|>|\[/?inst\]|<</?sys>>"
)
_ORDERS = re.compile(
    r"\b(?:from now on|henceforth),? (?:you|always|never)\b|"
    r"\b(?:curl|wget)\b[^\n|]{0,200}\|\s*(?:sudo\s+)?(?:ba|z)?sh\b"
)
"""What a correction of one answer does not say."""


@dataclass(frozen=True)
class RequestFeatures:
    """Features of a request. `intent`: "edit", "question" or "other", from the request alone. `same`: digest of prompt
    and answer. `bands`: MinHash bands, which similar requests share. `votes`: a rating has no meaning, because the
    request wants a random choice or dictates its answer. `injected`: the request gives orders like a system prompt."""

    intent: str
    same: str
    bands: frozenset[tuple[int, bytes]]
    votes: bool
    injected: bool


def request_features(content: TurnContent) -> RequestFeatures:
    """The features of one turn. An unreadable request has the intent "other" and is similar to no other request."""
    message = last_message(content.dialect, content.request)[:_MAX_CHARACTERS].lower()
    same = blake3.blake3(len(content.prompt_ids).to_bytes(8) + content.prompt_ids + content.ids).hexdigest()
    intent = "edit" if asks_for_edit(message) else "question" if "?" in message else "other"
    votes = bool(_EITHER_OR.search(message) or _DICTATED.search(message))
    texts = content.request[: 50 * _MAX_CHARACTERS].decode("utf-8", "replace").lower()
    words = bands_of(message, n=2, bands=6, rows=4)
    return RequestFeatures(intent, same, frozenset(words), votes, bool(_INJECTED.search(texts)))


def last_message(dialect: str, request: bytes) -> str:
    """The text of the user's last message in a request, or ""."""
    try:
        body = msgspec.json.decode(request, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return ""
    texts = [each.text for each in conversation(dialect, body) if each.role == "user" and each.text.strip()]
    return texts[-1] if texts else ""


def unfit(correction: str) -> str:
    """Why a correction teaches nothing: "short", "long", "secret" (something in it was replaced, or is a secret), or
    "injected" (orders to the model in place of what was wanted); "" if it may teach."""
    text = correction.strip()
    if len(text.split()) < 2 and len(text) < _SHORTEST:
        return "short"
    if len(text) > _LONGEST:
        return "long"
    if holds_replaced(text) or secret_in(text.encode("utf-8", "surrogatepass")) is not None:
        return "secret"
    lowered = text.lower()
    return "injected" if _INJECTED.search(lowered) or _ORDERS.search(lowered) else ""


def clusters(features: Sequence[RequestFeatures]) -> list[int]:
    """The cluster of each request, as a number: similar requests, directly or by way of others, share a cluster.
    MinHash bands of pairs of words put the 50 % point near a Jaccard similarity of 0.6."""
    parent = list(range(len(features)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[tuple[int, bytes], int] = {}
    for i, each in enumerate(features):
        for band in sorted(each.bands):
            j = first.setdefault(band, i)
            low, high = sorted((root(i), root(j)))
            parent[high] = low
    return [root(i) for i in range(len(features))]
