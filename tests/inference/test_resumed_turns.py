"""Turns whose server is lost, or goes: they go on at another one, from their tokens, and are the undisturbed turns.

Deterministic mode: ids, log-probabilities and experts are equal bit for bit, computed in whatever passes.
"""

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2
import msgspec
import pytest

from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.server import draining
from etude.inference.server.draining import Drain
from etude.inference.server.server import build_app
from etude.inference.server.weights import WeightWatcher
from etude.models.loading import load_model
from etude.protocol.backends import EngineClient, EngineError
from etude.protocol.wire import GenerateRequest
from etude.records import joined
from tests.helpers.cut_link import cut_link
from tests.helpers.engines import serving
from tests.helpers.http_apps import guarded

NANO = Path(__file__).parents[2] / "models" / "nano"
SECONDS = 120.0
PROMPT = list(range(100, 150))
TURN = GenerateRequest(ids=PROMPT, max_tokens=40, seed=7, routes_from=5, part_seconds=0.0)
DOCUMENTS = msgspec.structs.replace(TURN, documents=(list(range(200, 240)), list(range(300, 333))))


def untried(config: EngineConfig) -> Engine:
    """An engine without its trial at loading, which takes longer than these tests."""
    return Engine(load_model(NANO), config, deterministic=True, routes=True)


class Servers:
    """Two servers of one model: engines, drains and URLs."""

    def __init__(self, stack: ExitStack) -> None:
        self.engines = [untried(EngineConfig(cache_mb=64, documents_mb=16)) for _ in range(2)]
        self.drains = [Drain(engine) for engine in self.engines]
        self.urls = [
            stack.enter_context(serving(engine, NANO, drain=drain))
            for engine, drain in zip(self.engines, self.drains, strict=True)
        ]

    def version(self, number: int, version: int) -> None:
        """Counts one server's weights as a version; they stay the same."""
        self.engines[number].swap(version, lambda: None).result(SECONDS)

    def sampled(self, number: int) -> int:
        return self.engines[number].counters.sampled_tokens


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("passes", [0, 9])
def test_turns_of_an_engine_that_dies_go_on_elsewhere(servers, passes):
    """Before the first token, and in the middle."""
    engine = untried(EngineConfig(cache_mb=64))
    left = passes

    def before(*_):
        nonlocal left
        left -= 1
        if left < 0:
            raise IndexError("no such row")

    engine.model.get_decoder().register_forward_pre_hook(before)
    engine.start()

    async def play():
        async with EngineClient([url, servers.urls[1]]) as client:
            return await client.generate(TURN, SECONDS), await undisturbed(servers, TURN), client.resumed

    with guarded(build_app(engine, WeightWatcher(engine, None), NANO)) as port:
        url = f"http://127.0.0.1:{port}"
        turn, whole, resumed = asyncio.run(play())
    assert isinstance(engine.failure, IndexError)
    assert (turn.ids, turn.logprobs, turn.routes) == (whole.ids, whole.logprobs, whole.routes)
    assert resumed == (passes > 0)


async def undisturbed(servers: Servers, request: GenerateRequest):
    async with EngineClient(servers.urls[1:]) as client:
        return await client.generate(request, SECONDS)


@pytest.mark.parametrize("request_", [TURN, DOCUMENTS], ids=["plain", "documents"])
@pytest.mark.parametrize("how", ["cut", "lose"])
def test_a_lost_turn_goes_on_at_another_server(servers, request_, how):
    async def play():
        whole = await undisturbed(servers, request_)
        before = servers.sampled(1)
        async with cut_link(servers.urls[0]) as link, EngineClient([link.url, servers.urls[1]]) as client:
            parts, there = [], 0

            def on_part(part):
                nonlocal there
                parts.append(part)
                there += len(part.ids) * (not client.resumed)
                if len(parts) == 5:
                    link.cut() if how == "cut" else client.lose(link.url)

            lost = await client.generate(request_, SECONDS, on_part)
            return whole, lost, parts, there, servers.sampled(1) - before, client

    whole, lost, parts, there, again, client = asyncio.run(play())
    assert (lost.ids, lost.logprobs, lost.versions) == (whole.ids, whole.logprobs, whole.versions)
    assert lost.routes == whole.routes
    assert (lost.finish_reason, lost.recipe, lost.kv_version) == (whole.finish_reason, whole.recipe, 0)
    assert joined(parts) == lost
    assert 5 <= there < 40
    assert again == 40 - there, "nothing is sampled twice but what came after the last part"
    assert client.resumed == 1
    assert client.recomputed_tokens > 0


def test_a_turn_over_a_swap_keeps_the_versions_that_sampled_it(servers):
    async def play():
        whole = await undisturbed(servers, TURN)
        async with cut_link(servers.urls[0]) as link, EngineClient([link.url, servers.urls[1]]) as client:
            parts = []

            def on_part(part):
                parts.append(part)
                if len(parts) == 3:
                    servers.version(0, 1)
                    servers.version(1, 2)
                if part.versions and part.versions[-1] == 1:
                    link.cut()

            return whole, await client.generate(TURN, SECONDS, on_part)

    try:
        whole, lost = asyncio.run(play())
    finally:
        servers.version(0, 0)
        servers.version(1, 0)
    assert (lost.ids, lost.logprobs, lost.routes) == (whole.ids, whole.logprobs, whole.routes)
    assert lost.versions == sorted(lost.versions)
    assert set(lost.versions) == {0, 1, 2}
    assert lost.kv_version == 0


def test_what_an_earlier_process_has_got_is_kept(servers):
    async def play():
        whole = await undisturbed(servers, TURN)
        cut = msgspec.structs.replace
        some = cut(whole.routes, ids=whole.routes.ids[: 60 * whole.routes.layers * whole.routes.slots])
        begun = cut(whole, ids=whole.ids[:16], logprobs=whole.logprobs[:16], versions=[0] * 16, finish_reason="")
        half, full = cut(begun, routes=some), cut(whole, finish_reason="")
        async with EngineClient(["http://127.0.0.1:9"]) as nobody:
            assert await nobody.generate(TURN, SECONDS, begun=whole) == whole
            assert await nobody.generate(TURN, SECONDS, begun=full) == whole
            stopped = cut(TURN, max_tokens=99, stop=(whole.ids[-1],), routes_from=None)
            ended = await nobody.generate(stopped, SECONDS, begun=cut(full, routes=None))
            assert (ended.ids, ended.finish_reason) == (whole.ids, "stop")
            with pytest.raises(ValueError, match="experts of positions"):
                await nobody.generate(cut(TURN, routes_from=7), SECONDS, begun=half)
        before = servers.sampled(1)
        async with EngineClient(servers.urls[1:]) as client:
            assert some.end == 5 + 60 == 50 + 16 - 1
            rest = await client.generate(TURN, SECONDS, begun=half)
            sampled = servers.sampled(1) - before
            parts = []
            fetched = await client.generate(TURN, SECONDS, parts.append, begun=cut(full, routes=some))
            none = await client.generate(TURN, SECONDS, begun=cut(full, routes=None))
            return whole, rest, sampled, fetched, none, parts, servers.sampled(1) - before - sampled

    whole, rest, sampled, fetched, none, parts, more = asyncio.run(play())
    for each in (rest, fetched, none):
        assert (each.ids, each.logprobs, each.versions, each.routes) == (
            whole.ids, whole.logprobs, whole.versions, whole.routes,
        )  # fmt: skip
        assert each.finish_reason == "length"
    assert sampled == 40 - 16
    assert more == 2, "one token for the missing experts each, which is dropped"
    assert [part.ids for part in parts] == [[]]


def test_a_server_that_drains_refuses_and_hands_back(servers, monkeypatch):
    """Both turns are handed back at the end of their time; the one that was to be whole is played anew elsewhere."""
    drain = servers.drains[0]
    monkeypatch.setattr(draining, "HAND_BACK_SECONDS", 0.3)

    async def play():
        whole = await undisturbed(servers, TURN)
        long = msgspec.structs.replace(TURN, max_tokens=2000, part_seconds=0.05)
        async with EngineClient(servers.urls) as client, httpx2.AsyncClient(base_url=servers.urls[0]) as http:
            begun = asyncio.Event()
            running = asyncio.create_task(client.generate(long, SECONDS, lambda _: begun.set()))
            body = {"ids": PROMPT, "max_tokens": 2000}
            piece = asyncio.create_task(http.post("/generate", json=body, timeout=SECONDS))
            await asyncio.wait_for(begun.wait(), SECONDS)
            while servers.engines[0].load[0] < 2:
                await asyncio.sleep(0.01)
            drain.begin()
            assert not drain.over()
            assert (await http.get("/health")).json()["status"] == "draining"
            refusals = [
                await http.post("/generate", json=body),
                await http.post("/score", json={"sequences": [[1, 2]]}),
                await http.post("/v1/completions", json={"prompt": "x"}),
            ]
            for refusal in refusals:
                assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
                assert refusal.json()["error"]["code"] == "draining"
            elsewhere = await client.generate(msgspec.structs.replace(TURN, session="new"), SECONDS)
            assert (elsewhere.ids, elsewhere.logprobs) == (whole.ids, whole.logprobs)
            started = time.monotonic()
            while not drain.over():
                assert time.monotonic() - started < SECONDS
                await asyncio.sleep(0.02)
            assert drain.handed_back
            handed = await piece
            assert (handed.status_code, handed.json()["error"]["code"]) == (503, "draining")
            while not client.resumed:
                await asyncio.sleep(0.02)
            running.cancel()
            lonely = EngineClient(servers.urls[:1])
            with pytest.raises(EngineError, match=r"could not be reached for 0\.5 seconds: .* is going away"):
                await lonely.generate(TURN, 0.5)
            await lonely.close()

    try:
        asyncio.run(play())
    finally:
        drain.__init__(servers.engines[0])
        servers.engines[0].resume()
