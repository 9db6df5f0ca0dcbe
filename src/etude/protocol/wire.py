"""The bodies of the engine's token routes, as JSON or MessagePack: one definition for client and server, without torch.

POST /generate   GenerateRequest -> Generation, or with `part_seconds` its parts as frames
POST /score      ScoreRequest -> SequenceScores; status `CONFLICT` if another version came meanwhile

An unknown field is refused: a misspelt option must not be ignored in silence.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from etude.records import Generation, Record

JSON, MSGPACK = "application/json", "application/msgpack"
CONFLICT = 409
DRAINING = "draining"  # status of a server that ends, and code of its refusals
MAX_NAME = 512  # characters of a session's name
MAX_SEQUENCES = 256  # in one request to score
TURN_HEADER, WEIGHTS_HEADER = "x-etude-turn", "x-etude-weights"
"""Header of a request: the name under which the answer's tokens are kept. Header of an answer: its first version."""

_Ids = Annotated[list[int], msgspec.Meta(max_length=1 << 22)]


class GenerateRequest(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `max_tokens` tokens after `ids`, the stop token included. `documents` stand before `ids`, in their order;
    each attends to itself alone and is computed once for all requests (docs/documents.md). `session` names the episode,
    whose older keys and values the request may reuse. `routes_from` is the first position whose experts are returned,
    positions of documents counted. With `part_seconds` the answer comes in parts (`records.joined`), at most one in so
    many seconds; 0: as tokens come. An answer whose last part has no reason goes on at another server, from its tokens.
    A temperature below 1e-4 counts as 0."""

    ids: _Ids
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)] = ()
    seed: int = 0
    session: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    routes_from: int | None = None
    documents: Annotated[tuple[_Ids, ...], msgspec.Meta(max_length=4096)] = ()
    part_seconds: float | None = None


class ScoreRequest(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sequences of ids to score, each computed alone, with fresh keys and values. With `decoded`, the last 32 tokens of
    a sequence (half of a shorter one) are fed one at a time, batched with other requests like tokens of episodes."""

    sequences: Annotated[tuple[_Ids, ...], msgspec.Meta(max_length=MAX_SEQUENCES)]
    decoded: bool = False


class ServedTokens(Record, frozen=True, kw_only=True):
    """The tokens of one answer of the /v1 routes (`GET /v1/turns/NAME`). Arrays are as in `records.Segment`:
    little-endian int32, log-probabilities float32, after temperature and top-p. `plain`: nothing else changed the
    distribution, and the prompt has no documents. `message` is the answer in OpenAI's chat format, as JSON, empty if it
    was not finished; `malformed` counts the calls that the dialect's parser could not read and that the message shows
    as text; `text` is the text of prompt and answer."""

    prompt_ids: bytes
    ids: bytes
    logprobs: bytes
    spans: list[tuple[int, int, int]]  # first and last token plus one, and the version of their weights
    temperature: float
    top_p: float
    finish_reason: str
    plain: bool
    choices: int  # sampled for the request; these tokens are of the first
    message: bytes
    text: str
    malformed: int = 0


class SequenceScores(Record, frozen=True, kw_only=True):
    """Log-probabilities of each sequence's tokens but the first, given those before, at temperature 1."""

    version: int
    digest: str  # of the served tensors, as the server reports it
    logprobs: tuple[list[float], ...]


def frame(part: Generation | str) -> bytes:
    """One part of an answer, or why it failed: four bytes of length, little-endian, and MessagePack."""
    data = msgspec.msgpack.encode(part)
    return struct.pack("<I", len(data)) + data


def take_frames(buffer: bytearray) -> list[Generation | str]:
    """The complete frames at the front of `buffer`, which are removed from it. Raises msgspec.MsgspecError."""
    parts: list[Generation | str] = []
    while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from("<I", buffer)[0]):
        parts.append(msgspec.msgpack.decode(bytes(buffer[4:end]), type=Generation | str))
        del buffer[:end]
    return parts
