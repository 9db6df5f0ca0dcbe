"""`etude weights feed STORE --vllm URL`: updates a vLLM server to each version that is published.

The server fetches, verifies and stages a version while it serves (`etude.inference.vllm.worker`). Then it is paused
between two steps, the version is written into its weights, and the digest that it reads back from all of them must be
the manifest's. Keys and values of the old weights are computed again: running requests go on with the tokens they
have, and the prefix cache is empty. A swap that fails half-way leaves the server paused, never serving a mixture.

A run updates its servers by the same steps (`etude.protocol.backends.vllm`), but keeps keys and values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import httpx2

from etude.errors import UserError
from etude.protocol import bearer, own_token
from etude.protocol.backends import EngineLost, NotLive, VllmServer, WeightsOf
from etude.store import Store
from etude.weights import published_versions

EVERY = 1.0  # seconds between two polls of the store
DEADLINE = 600.0  # limit on the seconds from a version's first sight to its use


def feed(
    url: str,
    store: Store,
    relay: str | None = None,
    public_key: str | None = None,
    *,
    once: bool = False,
    every: float = EVERY,
    deadline: float = DEADLINE,
    say: Callable[[str], None] = print,
) -> int:
    """Updates the server to every newest version, for ever, also after it was started anew; with `once` until it serves
    the newest, which is returned. Raises UserError if the server does not answer for `deadline` seconds (with `once` at
    all), or if a version is not live `deadline` seconds after it was seen."""

    async def following() -> int:
        lost, line = 0.0, ""
        async with httpx2.AsyncClient(trust_env=False, headers=bearer(own_token())) as http:
            server, weights = VllmServer(http, url), WeightsOf(store.url, relay or "", public_key or "")
            while True:
                try:
                    live, _ = await server.follow(weights, keep=False)
                    lost, line = 0.0, ""
                    say(f"{server.url} serves " + (f"version {live}" if live >= 0 else "no version of this store yet"))
                    return await _feed(server, store, live, once, every, deadline, say)
                except EngineLost as e:
                    lost = lost or time.monotonic()
                    if once or time.monotonic() - lost > deadline:
                        raise
                    if line != str(e):
                        say(f"{e}; it is fed again once it answers")
                    line = str(e)
                await asyncio.sleep(every)

    try:
        return asyncio.run(following())
    except EngineLost as e:
        raise UserError(f"{e}: start it, or look at its log") from None


async def _feed(
    server: VllmServer, store: Store, live: int, once: bool, every: float, deadline: float, say: Callable[[str], None]
) -> int:
    seen: float | None = None  # when the missing version was first seen
    while True:
        newest = max(published_versions(store, after=live), default=live)
        if newest > live:
            seen = seen or time.monotonic()
            try:
                swapped = await server.update(newest, keep=False, seconds=deadline)
            except NotLive as e:
                if time.monotonic() - seen > deadline:
                    raise UserError(f"{server.url} stays at version {live}: {e}") from None
                say(f"not live yet: {e}")
                with suppress(NotLive):  # another feed may have brought it there
                    live = max(live, min(int(worker["version"]) for worker in await server.ask("etude_status")))
                seen = seen if live < newest else None
            else:
                live, seen = swapped.version, None
                say(f"version {live} is live, digest {swapped.digest}, pause {1e3 * swapped.pause:.0f} ms")
                continue
        elif once:
            return live
        elif live >= 0 and (await server.send("GET", "/weight_info"))["weight_version"] != str(live):
            raise EngineLost(f"{server.url} has been started anew, without version {live}")
        await asyncio.sleep(every)
