"""The interception endpoint as a process of its own, with an episode that never ends:

python -m tests.helpers.endpoint_process READY_FILE
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from etude.harness.endpoint.recording import Recording
from etude.harness.endpoint.server import Endpoint, open_endpoint
from etude.harness.loop import EngineModel, EpisodeSpec, Sampling
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Generation
from etude.renderers import Renderer, renderer_for
from tests.helpers.speakers import TEMPLATE, Speaker, a_task, hermes_tokenizer, write_model

BUDGET = Budget(turns=10**9, tokens=10**9, context=6000, seconds=1e6)


class Talker:
    """A policy that answers anything at once."""

    def __init__(self, folder: Path) -> None:
        self._speaker = Speaker(folder)

    async def generate(self, request: GenerateRequest, timeout: float, on_part: Any = None) -> Generation:
        """One of two short turns, by the length of the prompt."""
        calls = [("bash", {"command": "ls"})] if len(request.ids) % 2 else []
        ids = self._speaker.turn(*calls, text="Fine.")[: request.max_tokens]
        await asyncio.sleep(random.random() / 100)
        whole = Generation(ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), finish_reason="stop")
        if on_part is not None:
            on_part(msgspec.structs.replace(whole, ids=ids[:-1]))
        return whole


async def _renew(endpoint: Endpoint, key: str, make: Any) -> None:
    """An episode keeps all that was said in it: a new one takes its place now and then, under the same key."""
    while True:
        await asyncio.sleep(0.5)
        old, session = endpoint._episodes[key].recording, endpoint._episodes[key]  # pyright: ignore[reportPrivateUsage]
        session.recording, session.kept = make(), {}
        await asyncio.sleep(0.5)
        await old.close()


async def serve(ready: Path, renderer: Renderer, folder: Path) -> None:
    """Until SIGTERM."""
    talker = Talker(folder)

    def make() -> Recording:
        return Recording(EpisodeSpec(a_task(), EngineModel(talker, renderer, Sampling()), BUDGET, 7))

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        async with open_endpoint(listener) as endpoint:
            key = endpoint.open(make())
            renewing = asyncio.create_task(_renew(endpoint, key, make))
            told = {"port": listener.getsockname()[1], "key": key, "pid": os.getpid()}
            ready.with_suffix(".tmp").write_text(json.dumps(told))
            ready.with_suffix(".tmp").replace(ready)
            await stopped.wait()
            renewing.cancel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        model = write_model(Path(where), hermes_tokenizer(), TEMPLATE)
        asyncio.run(serve(Path(sys.argv[1]), renderer_for(model), model))
