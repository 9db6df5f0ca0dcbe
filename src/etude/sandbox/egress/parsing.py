"""The parts of HTTP/1.1 and TLS that name the destination of a request."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from etude.sandbox.egress.policy import EgressRefused

MAX_HEAD = 16 << 10  # bytes of a request's head, or of a ClientHello
MAX_QUERY = 256  # characters of a query: a search, but no upload
_HOP = frozenset({"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"})
_SECRET = frozenset({"authorization", "cookie", "proxy-authorization"})
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME = 22, 1, 0


@dataclass(frozen=True)
class RequestHead:
    """A request to a proxy. `path` holds the query, too, and is None for a tunnel."""

    method: str
    host: str
    port: int
    path: str | None
    headers: Sequence[tuple[str, str]]

    def header(self, name: str) -> str | None:
        """The first value of a header; None if it is not there."""
        return next((value for key, value in self.headers if key == name), None)

    def onward(self) -> bytes:
        """The request as its server gets it: for one connection, and without headers that identify the box."""
        kept = [(key, value) for key, value in self.headers if key not in _HOP | _SECRET | {"host"}]
        place = self.host if self.port == 80 else f"{self.host}:{self.port}"
        lines = [f"{self.method} {self.path} HTTP/1.1", f"host: {place}", "connection: close"]
        return "\r\n".join([*lines, *(f"{key}: {value}" for key, value in kept), "", ""]).encode("latin-1")


def parse(data: bytes) -> RequestHead:
    """The head of a request up to the empty line. Raises EgressRefused."""
    line, *rest = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = line.split(" ")
    if any(c in text for text in (line, *rest) for c in "\r\n\0"):
        raise EgressRefused("a malformed head")
    if len(words) != 3 or not words[0].isalpha() or not words[2].startswith("HTTP/1."):
        raise EgressRefused("not a request to a proxy")
    headers: list[tuple[str, str]] = []
    for text in rest:
        key, colon, value = text.partition(":")
        if not colon or not key or key != key.strip():
            raise EgressRefused("a malformed head")
        headers.append((key.lower(), value.strip()))
    method, target = words[0], words[1]
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = (parts.hostname or "").removesuffix("."), parts.port or (443 if method == "CONNECT" else 80)
    except ValueError:
        raise EgressRefused("not a request to a proxy") from None
    if method == "CONNECT":
        if parts.path or parts.query or parts.username is not None:
            raise EgressRefused("not a request to a proxy")
        return RequestHead(method, host, port, None, headers)
    if parts.scheme != "http" or parts.username is not None:
        raise EgressRefused("not a request to a proxy")
    return RequestHead(method, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers)


def check_plain(head: RequestHead) -> None:
    """Raises EgressRefused unless a request without TLS only reads."""
    if head.method not in ("GET", "HEAD"):
        raise EgressRefused("only GET and HEAD are let through")
    if head.header("content-length") not in (None, "0") or head.header("transfer-encoding") is not None:
        raise EgressRefused("a request with a body")
    if len((head.path or "").partition("?")[2]) > MAX_QUERY:
        raise EgressRefused("a long query")
    names = [value.lower().removesuffix(f":{head.port}").removesuffix(".") for k, value in head.headers if k == "host"]
    if names not in ([], [head.host]):
        raise EgressRefused("its Host header names another host")


async def read_hello(reader: asyncio.StreamReader) -> tuple[bytes, str | None]:
    """(bytes read, server name) of a ClientHello in any records (RFC 8446). Raises EgressRefused or
    IncompleteReadError."""
    raw, message = b"", b""
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4]):
        header = await reader.readexactly(5)
        size = struct.unpack(">H", header[3:])[0]
        if header[0] != _HANDSHAKE or header[1] != 3 or not size or len(raw) + size > MAX_HEAD:
            raise EgressRefused("no TLS in a tunnel")
        body = await reader.readexactly(size)
        raw += header + body
        message += body
        if message[0] != _CLIENT_HELLO:
            raise EgressRefused("no TLS in a tunnel")
    return raw, server_name(message[4 : 4 + int.from_bytes(message[1:4])])


def server_name(hello: bytes) -> str | None:
    """The name in a ClientHello's server_name extension (RFC 6066), in lower case. Raises EgressRefused."""
    try:
        at = 34  # version and random
        at += 1 + hello[at]  # session
        at += 2 + int.from_bytes(hello[at : at + 2])  # ciphers
        at += 1 + hello[at]  # compression
        end = at + 2 + int.from_bytes(hello[at : at + 2])
        at += 2
        while at + 4 <= end:
            kind, size = struct.unpack_from(">HH", hello, at)
            if kind == _SERVER_NAME:
                (length,) = struct.unpack_from(">H", hello, at + 7)
                name = hello[at + 9 : at + 9 + length]
                if hello[at + 6] != 0 or len(name) != length:
                    raise EgressRefused("a malformed ClientHello")
                return name.decode("ascii").lower()
            at += 4 + size
    except (IndexError, struct.error, UnicodeDecodeError):
        raise EgressRefused("a malformed ClientHello") from None
    return None
