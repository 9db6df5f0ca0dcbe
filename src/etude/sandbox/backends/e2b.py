"""E2B: a virtual machine for each box, by the service's HTTP API (create, delete) and its agent in the machine.

That agent starts our program and carries its streams: Connect RPC with JSON, a length-prefixed message at a time.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx2

from etude.errors import UserError
from etude.sandbox.backends.host import LIFETIME, Need, ProgramStream
from etude.sandbox.base import Capabilities, LaunchFailed

PORT = 49983  # of the service's agent in a machine
CHUNK = 1 << 18
SECONDS = 60.0
_END = 0x02  # flag of the message that ends a stream


class E2BMachine(ProgramStream):
    """One process in one machine."""

    def __init__(
        self, client: httpx2.AsyncClient, url: str, key: Mapping[str, str], base: str, headers: Mapping[str, str]
    ) -> None:
        self._client, self._url, self._key, self._base, self._headers = client, url, key, base, headers
        self._ends = AsyncExitStack()
        self._events: AsyncIterator[dict[str, Any]]
        self._pid = 0

    async def begin(self, command: Sequence[str]) -> None:
        """Raises OSError or httpx2.HTTPError."""
        request = {"process": {"cmd": command[0], "args": list(command[1:]), "envs": {}, "cwd": "/"}, "stdin": True}
        body = json.dumps(request).encode()
        url, timeout = f"{self._base}/process.Process/Start", httpx2.Timeout(SECONDS, read=2 * SECONDS)
        headers = {**self._headers, "content-type": "application/connect+json", "keepalive-ping-interval": "50"}
        framed = struct.pack(">BI", 0, len(body)) + body
        sent = self._client.stream("POST", url, content=framed, headers=headers, timeout=timeout)
        response = await self._ends.enter_async_context(sent)
        response.raise_for_status()
        self._events = _messages(response.aiter_bytes())
        while not self._pid:
            event = await anext(self._events, None)
            if event is None:
                raise OSError("no process was started")
            self._pid = event.get("start", {}).get("pid", 0)

    async def read(self) -> bytes:
        """As `ProgramStream.read`."""
        try:
            async for event in self._events:
                if "end" in event:
                    return b""
                if data := event.get("data", {}).get("stdout"):
                    return base64.b64decode(data)
        except httpx2.HTTPError as e:
            raise OSError(str(e) or type(e).__name__) from None
        return b""

    async def write(self, data: bytes) -> None:
        """As `ProgramStream.write`."""
        for start in range(0, len(data), CHUNK):
            text = base64.b64encode(data[start : start + CHUNK]).decode()
            request = {"process": {"pid": self._pid}, "input": {"stdin": text}}
            try:
                url = f"{self._base}/process.Process/SendInput"
                (await self._client.post(url, json=request, headers=self._headers, timeout=SECONDS)).raise_for_status()
            except httpx2.HTTPError as e:
                raise OSError(str(e) or type(e).__name__) from None

    async def _close(self) -> None:
        with contextlib.suppress(httpx2.HTTPError):  # the service ends it when its time is over
            await self._client.delete(self._url, headers=self._key, timeout=SECONDS)
        await self._ends.aclose()
        await self._client.aclose()


async def _messages(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream. Raises OSError with the reason that ended it, if there is one."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            flags, size = struct.unpack_from(">BI", buffer)
            if len(buffer) < 5 + size:
                break
            message = json.loads(buffer[5 : 5 + size])
            del buffer[: 5 + size]
            if flags & _END:
                if error := message.get("error"):
                    raise OSError(str(error.get("message", error)))
                return
            yield message.get("event", {})


class E2B:
    """`template` is built with `e2b template build`. E2B_API_KEY, E2B_DOMAIN, E2B_API_URL and E2B_SANDBOX_URL count."""

    name = "e2b"

    def __init__(self, template: str) -> None:
        self._template = template
        self._domain = os.environ.get("E2B_DOMAIN") or "e2b.app"
        self._api = os.environ.get("E2B_API_URL") or f"https://api.{self._domain}"
        self._key = os.environ.get("E2B_API_KEY", "")

    async def reach(self) -> None:
        """Raises UserError if there is no key."""
        if not self._key:
            raise UserError("e2b needs a key; set E2B_API_KEY.")

    async def open(self) -> Capabilities:
        """What the boxes of the service have. Raises UserError."""
        await self.reach()
        return Capabilities("vm", True, False, True, True, "none", limits=("memory", "processes"))

    async def start(self, command: Sequence[str], need: Need) -> E2BMachine:
        """Start a machine and its program. Raises LaunchFailed."""
        client, key = httpx2.AsyncClient(), {"X-API-Key": self._key}
        wanted = {"templateID": self._template, "timeout": int(LIFETIME), "allow_internet_access": False}
        try:
            answer = await client.post(f"{self._api}/v2/sandboxes", json=wanted, headers=key, timeout=SECONDS)
            answer.raise_for_status()
            made = answer.json()
            number = made["sandboxID"]
            base = os.environ.get("E2B_SANDBOX_URL") or f"https://{PORT}-{number}.{made.get('domain') or self._domain}"
            headers = {
                "Authorization": f"Basic {base64.b64encode(b'root:').decode()}",
                "Connect-Protocol-Version": "1",
                "E2b-Sandbox-Id": number,
                "E2b-Sandbox-Port": str(PORT),
                "X-Access-Token": made.get("envdAccessToken") or "",
            }
            machine = E2BMachine(client, f"{self._api}/sandboxes/{number}", key, base, headers)
        except (httpx2.HTTPError, KeyError, ValueError) as e:
            await client.aclose()
            raise LaunchFailed(f"e2b made no machine ({_reason(e)})") from None
        try:
            await machine.begin(command)
        except (httpx2.HTTPError, OSError) as e:
            await machine.close()
            raise LaunchFailed(f"e2b started no program ({_reason(e)})") from None
        return machine


def _reason(error: Exception) -> str:
    if isinstance(error, httpx2.HTTPStatusError):
        return f"{error.response.status_code} {error.response.reason_phrase}"
    return str(error) or type(error).__name__
