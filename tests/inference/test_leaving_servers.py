"""Servers as processes that are killed, or told to go, in the middle of a turn."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from etude.config import EngineConfig, ServerConfig
from etude.inference.engine.loading import load_engine
from etude.protocol.backends import EngineClient
from etude.protocol.wire import GenerateRequest
from etude.run.engines import engine_url, spawn_engine
from tests.helpers.engines import serving

NANO = Path(__file__).parents[2] / "models" / "nano"
SECONDS = 240.0
LONG = GenerateRequest(ids=list(range(100, 150)), max_tokens=3500, seed=7, routes_from=0)
SHORT = GenerateRequest(ids=list(range(100, 150)), max_tokens=150, seed=7, part_seconds=0.1)


@pytest.fixture(scope="module")
def other():
    """A server that stays, in this process."""
    with serving(load_engine(NANO, EngineConfig(cache_mb=96), deterministic=True, routes=True), NANO) as url:
        yield url


def start(folder):
    config = ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=96, deterministic=True, routes=True)
    child = spawn_engine(config, folder)
    return child, engine_url(child, folder)


async def disturbed(url: str, other: str, request: GenerateRequest, child, sign: signal.Signals, at_part: int):
    """The turn at a process that gets a signal after so many parts, how often it went on, and when the process ended
    after the signal."""
    count, sent = 0, 0.0

    def on_part(_) -> None:
        nonlocal count, sent
        count += 1
        if count == at_part:
            child.popen.send_signal(sign)
            sent = time.monotonic()

    async with EngineClient([url, other]) as client:
        turn = asyncio.create_task(client.generate(request, SECONDS, on_part))
        while child.exit_code is None and not turn.done():
            await asyncio.sleep(0.02)
        gone = time.monotonic() - sent
        return await turn, client.resumed, gone


@pytest.mark.slow
def test_a_turn_outlives_the_kill_of_its_server(tmp_path, other):
    child, url = start(tmp_path)

    async def play():
        async with EngineClient([other]) as client:
            whole = await client.generate(SHORT, SECONDS)
        return whole, await disturbed(url, other, SHORT, child, signal.SIGKILL, 3)

    whole, (turn, resumed, _) = asyncio.run(play())
    assert (turn.ids, turn.logprobs) == (whole.ids, whole.logprobs)
    assert resumed == 1


@pytest.mark.slow
def test_sigterm_lets_turns_end_or_hands_them_back(tmp_path, other):
    """Half a minute: the turn is longer than the server waits."""
    child, url = start(tmp_path)
    turn, resumed, gone = asyncio.run(disturbed(url, other, LONG, child, signal.SIGTERM, 1))
    assert child.exit_code == 0, child.log.read_text()
    assert gone < 25
    assert (len(turn.ids), turn.routes.end) == (3500, 50 + 3500 - 1)
    assert resumed == (gone > 17.5), "it was handed back, or it has ended"


@pytest.mark.slow
@pytest.mark.smoke
def test_a_second_sigterm_and_an_idle_server_end_at_once(tmp_path, other):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (idle, _), (child, url) = start(tmp_path / "a"), start(tmp_path / "b")
    began = time.monotonic()
    idle.stop(20)
    assert idle.exit_code == 0
    assert time.monotonic() - began < 12  # far less than a drain takes

    async def play():
        async with EngineClient([url, other]) as client:
            turn = asyncio.create_task(client.generate(LONG, SECONDS, lambda _: begun.set()))
            begun = asyncio.Event()
            await asyncio.wait_for(begun.wait(), SECONDS)
            child.popen.terminate()
            await asyncio.sleep(0.5)
            assert child.exit_code is None
            assert (await client.health(url))["status"] == "draining"
            began = time.monotonic()
            await asyncio.to_thread(child.stop, 20)
            seconds = time.monotonic() - began
            while not client.resumed:
                await asyncio.sleep(0.02)
            turn.cancel()
            return seconds

    assert asyncio.run(play()) < 12
    assert child.exit_code == 0, child.log.read_text()
