"""Whose request is being answered: the client, among which engines share their passes and servers their room.

A client is a group and a member of it. The gateway names both in a header: the API key, and its connection or user. For
all others the group is the peer's address and the member its connection, since a server has one token for all: on
loopback connections are all that tells clients apart. The header is believed, because whoever reaches a server beyond
loopback holds its token, and on loopback a client may have as many addresses as it wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from etude.protocol.access import headers

CLIENT_HEADER = "x-etude-asker"
_MAX_NAME = 128


class Client(NamedTuple):
    """The asker of a request. Groups share first, and then the members of a group."""

    group: str
    member: str


NOBODY = Client("", "")
"""The client of requests that come over no server."""
_asking: ContextVar[Client] = ContextVar("asking", default=NOBODY)


def client_of(scope: Mapping[str, Any]) -> Client:
    """The client of a request."""
    if named := next(headers(scope, CLIENT_HEADER.encode()), ""):
        group, _, member = named[:_MAX_NAME].partition("/")
        return Client(f"key {group}", member)
    host, port = scope.get("client") or ("", 0)
    return Client(host, str(port))


def asking() -> Client:
    """The client whose request this task answers."""
    return _asking.get()


def begin_asking(client: Client) -> None:
    """Names the client whose request this task answers from here on."""
    _asking.set(client)


def as_one_member() -> None:
    """The request counts as one of its group as a whole: the connections of a group that trains or grades are one
    client, whose requests keep their order."""
    _asking.set(asking()._replace(member=""))
