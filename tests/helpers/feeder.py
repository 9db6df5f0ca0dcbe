"""`VllmServer` for tests that do one thing after the other."""

import asyncio
from typing import Any

import httpx2

from etude.protocol.backends.vllm import LiveVersion, VllmServer, WeightsOf


class Feeder:
    """One vLLM server, updated as `etude weights feed` does."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _do(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def ask() -> Any:
            async with httpx2.AsyncClient(trust_env=False) as http:
                return await getattr(VllmServer(http, self.url), method)(*arguments, **options)

        return asyncio.run(ask())

    def ask(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """The answers of the workers."""
        return self._do("ask", method, *arguments)

    def send(self, verb: str, path: str) -> dict[str, Any]:
        return self._do("send", verb, path)

    def follow(self, store: str) -> int:
        """The version that the server says it serves."""
        return self._do("follow", WeightsOf(store), keep=False)[0]

    def update(self, version: int) -> LiveVersion:
        return self._do("update", version, keep=False, seconds=60.0)
