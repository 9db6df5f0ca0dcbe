"""Sockets and connections of etude's HTTP servers: deadlines for heads, idle and stalled connections, and a bounded
number of connections, of which the oldest without a request makes room for a new one.

    listener = open_listener(host, port, access)
    run_server(server_config(Guarded(app, access)), listener, "relay", ready_file)
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import socket
import struct
import termios
from functools import partial
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.errors import UserError
from etude.protocol.access import TOKEN_VARIABLE, Access, is_loopback
from etude.protocol.guard import LIMITS, Refusal, ServiceLimits, busy, refused

_BACKLOG = 1024
_DRAIN_SECONDS = 5
_OTHER_FILES = 128  # descriptors that are no connections
_FILES = 65536
_LOOKS = 4  # at an answer, in the time during which its client must read
_ACKNOWLEDGED = 120  # where Linux's tcp_info has the bytes that the peer has acknowledged; its first byte is the state
_CLOSE_WAIT = 8  # the state of a connection that the peer has ended


def open_listener(host: str, port: int, access: Access) -> socket.socket:
    """A bound socket. Raises UserError if the port is taken, or if other machines could connect without a token."""
    if not 0 <= port <= 65535:  # the resolver would take another port
        raise UserError(f"cannot listen on {host}:{port}: choose another port, up to 65535, or 0 for a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise UserError(f"cannot listen on {host} ({why}): give the address of this machine") from None
    try:
        if access.token is None and not is_loopback(str(address[0])):
            raise UserError(
                f"--host {host} lets other machines in: give a token that they must send, in ${TOKEN_VARIABLE} or with "
                "--api-key-file"
            )
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except UserError:
        listener.close()
        raise
    except OSError as e:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({e.strerror or e}): choose another port, or 0 for a free one"
        ) from None
    # With Nagle's algorithm a small answer would wait for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(_BACKLOG)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of a listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: ASGIApp, limits: ServiceLimits = LIMITS) -> uvicorn.Config:
    """The configuration of a server with these limits, for an app that is `Guarded`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = Connections(max(1, min(limits.connections, soft - _OTHER_FILES)))
    protocol = partial(GuardedProtocol, limits=limits, connections=connections)
    return uvicorn.Config(
        app,
        http=cast(Any, protocol),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )


def raise_file_limit() -> None:
    """Raises this process's limit of open files to the system's, or to `_FILES` if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_server(server: uvicorn.Server, listener: socket.socket, name: str, ready_file: Path | None) -> None:
    """Prints the server's URL, writes URL and pid to `ready_file` as JSON, and serves until a signal comes."""
    url = url_of(listener)
    print(f"{name} at {url}", flush=True)
    if ready_file is not None:
        temporary = ready_file.with_name(f"{ready_file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        temporary.replace(ready_file)
    server.run(sockets=[listener])


class Connections:
    """The open connections of a server; `waiting` has those without a request, the longest wait first."""

    def __init__(self, most: int) -> None:
        self.most, self.open = most, 0
        self.waiting: dict[GuardedProtocol, None] = {}


class GuardedProtocol(H11Protocol):
    """One connection, closed if a head does not come in time, or if the client reads nothing of its answer."""

    def __init__(self, *args: Any, limits: ServiceLimits, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits, self._connections = limits, connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._taken, self._still = 0, 0  # bytes that the client had taken, and looks since then

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Beyond the limit of connections, closes the oldest without a request; if all have requests, refuses this."""
        super().connection_made(transport)
        connections = self._connections
        connections.open += 1
        if connections.open > connections.most:
            oldest = next(iter(connections.waiting), None)
            if oldest is None:
                self._refuse(busy("this server has too many connections"))
                return
            oldest.transport.abort()
            connections.waiting.pop(oldest, None)
        self._await_head()
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._connections.open -= 1
        self._stop_awaiting_head()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Starts a head's deadline at its first byte, and stops it at its last."""
        if self.transport.is_closing():
            return
        if self._is_waiting() and self._head_timer is None:
            self._await_head()
        super().data_received(data)
        if not self._is_waiting():
            self._stop_awaiting_head()

    def on_response_complete(self) -> None:
        """The connection waits for its next request, unless that has come already."""
        super().on_response_complete()
        if self._is_waiting() and not self.transport.is_closing():
            self._connections.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        """Refuses malformed HTTP with an error object of OpenAI's shape."""
        self._refuse(Refusal(400, f"the request is not HTTP as this server reads it: {msg}"))

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._connections.waiting[self] = None
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._refuse_late_head)

    def _stop_awaiting_head(self) -> None:
        self._connections.waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(Refusal(408, f"the head did not come within {self._limits.head_seconds:g} seconds", "timeout"))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Sends a refusal and closes the connection. An answer that has begun is cut off."""
        if self.transport.is_closing():
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or not self._is_waiting():
            self.transport.abort()
            return
        response = refused({}, refusal)
        shown = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=refusal.status, headers=shown),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look_again(self) -> None:
        self._stall_timer = self.loop.call_later(self._limits.stall_seconds / _LOOKS, self._look_for_a_stall)

    def _look_for_a_stall(self) -> None:
        """Ends the connection if bytes wait for the client, and it has taken none for so many looks; or if the client
        has ended it while nothing more is read of it, which would not show before the answer. What the system holds
        counts, too: its buffers take the whole of most streams, which would keep their engine to the end."""
        waiting, taken, gone = self._unread()
        self._still = self._still + 1 if waiting and taken == self._taken else 0
        self._taken = taken
        if self._still >= _LOOKS or (gone and self.flow.read_paused):
            self.transport.abort()
        else:
            self._look_again()

    def _unread(self) -> tuple[int, int, bool]:
        """The bytes that wait for the client, a number that changes as it takes some, and whether it has gone."""
        unsent = self.transport.get_write_buffer_size()
        link: socket.socket = self.transport.get_extra_info("socket")
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)))
            known = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (taken,) = struct.unpack_from("Q", known, _ACKNOWLEDGED)
            return unsent + queued, taken, known[0] == _CLOSE_WAIT
        except (
            AttributeError,
            OSError,
            ValueError,
            struct.error,
        ):  # another system, or no TCP
            return unsent if self.flow.write_paused or self.transport.is_closing() else 0, -unsent, False
