"""The ids in the bodies of answers, by which clients that read no headers name them.

OpenAI's chat completions have theirs in the whole body and in every chunk of a stream; OpenAI's responses and
Anthropic's messages in the whole body, or in the first event. Bodies pass byte for byte and are only read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

NAME = re.compile(r"[\x21-\x7e]{5,200}")  # shorter ones name nothing for long
ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_OWN = re.compile(rf"(?:chatcmpl-|msg_|resp_)({ULID.pattern})")
_FIRST = re.compile(rb'\s*\{\s*"id"\s*:\s*"([\x21\x23-\x5b\x5d-\x7e]{5,200})"')
_MOST = 1 << 20  # bytes that are kept of a body whose id is not found


class _Named(msgspec.Struct):
    """The places of an id in a body or an event."""

    id: Any = None
    message: Any = None
    response: Any = None


class AnswerId:
    """The reader of one answer's id; `media` is its content type, `dialect` that of the request."""

    def __init__(self, media: str, dialect: str) -> None:
        self._is_stream = media.startswith("text/event-stream")
        self._in_event = self._is_stream and dialect != "chat"
        self._data = bytearray()
        self._ended = False

    def feed(self, part: bytes) -> str:
        """The id, once, as soon as the body so far holds it; else ""."""
        if self._ended:
            return ""
        self._data += part
        name = self._of_stream() if self._is_stream else self._of_whole()
        if name or len(self._data) > _MOST:
            self._ended = True
            self._data.clear()
        return name

    def _of_stream(self) -> str:
        *lines, rest = bytes(self._data).split(b"\n")
        self._data[:] = rest
        return next(filter(None, (self._read(line[5:]) for line in lines if line.startswith(b"data:"))), "")

    def _of_whole(self) -> str:
        if first := _FIRST.match(self._data):
            return first[1].decode()
        return self._read(bytes(self._data)) if self._data[-64:].rstrip().endswith(b"}") else ""

    def _read(self, data: bytes) -> str:
        try:
            named = msgspec.json.decode(data, type=_Named)
        except (ValueError, RecursionError):
            return ""
        inner = named.message or named.response
        name = (inner.get("id") if isinstance(inner, dict) else None) if self._in_event else named.id
        return name if isinstance(name, str) and NAME.fullmatch(name) else ""


def turn_in(name: str) -> str:
    """The turn that an id of an `etude serve` names; the id itself for any other."""
    own = _OWN.fullmatch(name)
    return own[1] if own else name
