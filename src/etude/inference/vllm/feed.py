"""`etude weights feed STORE --vllm URL`: updates a vLLM server to each version that is published.

The server fetches, verifies and stages a version while it serves (`etude.inference.vllm.worker`). Then it is paused
between two steps, the version is written into its weights, and the digest that it reads back from all of them must be
the manifest's. Keys and values of the old weights are computed again: running requests go on with the tokens they
have, and the prefix cache is empty. A swap that fails half-way leaves the server paused, never serving a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx2

from etude.errors import UserError
from etude.store import Store
from etude.weights.manifest import versions

EVERY = 1.0  # seconds between two polls of the store
DEADLINE = 600.0  # seconds that a version may take from its first sight to being live
_POLL = 0.2  # seconds between two questions whether a version is staged
_REQUEST = 600.0  # one request; the first one reads the checkpoint again
Answer = dict[str, Any]


class NotLive(Exception):
    """A version did not go live; the old one is served, whole."""


@dataclass(frozen=True)
class LiveVersion:
    """A version that went live."""

    version: int
    digest: str  # of the live tensors
    pause: float  # seconds without a step


class VllmServer:
    """A vLLM server in development mode, whose workers have the `etude.inference.vllm.worker.WorkerExtension`."""

    def __init__(self, url: str, request_seconds: float = _REQUEST):
        self.url = url.rstrip("/")
        self._seconds = request_seconds

    def ask(self, method: str, *arguments: str) -> Answer:
        """The answer of the server's worker. Raises NotLive if it refuses, UserError if it cannot be reached."""
        body = {"method": method, "args": list(arguments)}
        answers = cast(list[Answer], self.send("POST", "/collective_rpc", body=body)["results"])
        for answer in answers:
            if answer.get("error"):
                raise NotLive(str(answer["error"]))
        if len(answers) != 1:
            raise UserError(f"{self.url} has {len(answers)} workers; etude feeds servers with one")
        return answers[0]

    def send(self, verb: str, path: str, body: Answer | None = None, **query: str) -> Answer:
        """One request. Raises UserError unless it succeeds."""
        try:
            response = httpx2.request(
                verb, f"{self.url}{path}", params=query, json=body, timeout=self._seconds, trust_env=False
            )
        except httpx2.HTTPError as e:
            why = f"{type(e).__name__} {e}".strip()
            raise UserError(f"{self.url} does not answer ({why}): start it, or look at its log") from None
        if response.status_code == 404:
            raise UserError(f"{self.url} has no {path}: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if response.status_code != 200:
            raise UserError(
                f"{self.url}{path} answered {response.status_code} ({response.text[:200]}): look at its log"
            )
        return cast(Answer, response.json())


def follow(server: VllmServer, store: str, relay: str | None = None, public_key: str | None = None) -> int:
    """Makes the server follow the store; returns the version that it serves, -1 if that is none of the store's. A swap
    that was cut off (this program was killed) is finished if the server's weights are whole. Raises UserError."""
    try:
        version = int(server.ask("etude_open", store, relay or "", public_key or "")["version"])
        if not server.send("GET", "/is_paused")["is_paused"]:
            return version
        server.ask("etude_digest")
    except NotLive as e:
        raise UserError(f"{server.url} cannot follow {store}: {e}") from None
    _resume(server, version)
    return version


def update_to(server: VllmServer, version: int, deadline: float = DEADLINE) -> LiveVersion:
    """Makes a version live. Raises NotLive if the old one goes on, UserError if the server does not answer."""
    end = time.monotonic() + deadline
    server.ask("etude_stage", str(version))
    while (status := server.ask("etude_status"))["staging"]:
        if time.monotonic() > end:
            raise NotLive(f"version {version} was not fetched within {deadline:g} s")
        time.sleep(_POLL)
    staged = int(status["staged"])
    if staged < 0:
        raise NotLive(f"the server does not find version {version} in the store")
    began = time.monotonic()
    server.send("POST", "/pause", mode="keep")
    try:
        answer = server.ask("etude_swap", str(staged))
    except NotLive:
        server.send("POST", "/resume")
        raise
    _resume(server, staged)
    return LiveVersion(staged, str(answer["digest"]), time.monotonic() - began)


def feed(
    server: VllmServer, store: Store, relay: str | None = None, public_key: str | None = None, *, once: bool = False,
    every: float = EVERY, deadline: float = DEADLINE, say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Updates the server to every newest version, for ever; with `once` until it serves the newest, which it returns.
    Raises UserError if the server does not answer, or if a version is not live `deadline` seconds after it was seen."""
    live = follow(server, store.url, relay, public_key)
    say(f"{server.url} serves " + (f"version {live}" if live >= 0 else "no version of this store yet"))
    seen: float | None = None  # when the version that is missing was seen first
    while True:
        newest = max(versions(store, after=live), default=live)
        if newest > live:
            seen = seen or time.monotonic()
            try:
                swapped = update_to(server, newest, deadline)
            except NotLive as e:
                if time.monotonic() - seen > deadline:
                    raise UserError(f"{server.url} stays at version {live}: {e}") from None
                say(f"not live yet: {e}")
            else:
                live, seen = swapped.version, None
                say(f"version {live} is live, digest {swapped.digest}, pause {1e3 * swapped.pause:.0f} ms")
                continue
        elif once:
            return live
        time.sleep(every)


def _resume(server: VllmServer, version: int) -> None:
    """Goes on with the new weights; keys and values of older ones are dropped."""
    server.send("POST", "/reset_prefix_cache", reset_running_requests="true")
    server.send("POST", "/update_weight_version", body={"new_version": str(version)})
    server.send("POST", "/resume")
