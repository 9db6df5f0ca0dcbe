"""Swaps under load. What a token's version tag means, exactly:

a request keeps its keys and values over a swap. Its prompt is fed under the version of its first token, and token j
under the version of token j + 1: so the tags of a generation are its whole history, and whoever feeds the same tokens
under the same versions gets the same log-probabilities, in deterministic mode to the last bit. A request that begins
after the swap is a plain forward pass of the new weights.
"""

import asyncio
import json
import threading
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from etude import processes
from etude.config import ServerConfig, WeightSource
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.server.weights import WeightWatcher
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends.client import EngineClient
from etude.protocol.wire import GenerateRequest
from etude.records import Generation
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.weights.publisher import Publisher
from etude.weights.receiver import LiveTensors, WeightsMismatch, materialise
from tests.inference.test_engine import TOLERANCE, model_of, prompt, score

NANO = Path(__file__).parents[2] / "models" / "nano"
SECONDS = 120.0


def stepped(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """About a tenth of the elements move by about 2 %, all else stays."""
    generator = torch.Generator().manual_seed(seed)
    moved = {n: (t * (1 + 0.02 * torch.randn(t.shape, generator=generator))).to(t.dtype) for n, t in tensors.items()}
    chosen = {n: torch.rand(t.shape, generator=generator) < 0.1 for n, t in tensors.items()}
    return {name: torch.where(chosen[name], moved[name], tensor) for name, tensor in tensors.items()}


@pytest.fixture
def versions(tmp_path):
    """A store with four versions of a tiny model."""
    store = open_store(str(tmp_path / "weights"))
    publisher, current = Publisher(store, 8), {n: t.bfloat16() for n, t in named_tensors(model_of()).items()}
    for version in range(4):
        publisher.publish(version, current, (), {})
        current = stepped(current, version)
    return store


def replayed(store, request: Request, generation: Generation) -> Generation:
    """The request, run again by another engine that changes weights where the tags say so."""
    model = model_of(seed=1)
    engine = Engine(model, version=-1, deterministic=True)
    sequence = engine.submit(request)
    for version in generation.versions:
        if version != engine.version:
            tensors = named_tensors(model)
            engine.swap(version, lambda v=version, t=tensors: materialise(store, v, t))
        engine.step()
    return sequence.future.result(SECONDS)


@pytest.mark.parametrize("at", [(1, 2, 3), (5, 6, 20), (9, 9, 9)])
def test_tags_reproduce_every_token_of_a_generation_over_swaps(versions, at):
    model = model_of(seed=2)
    engine = Engine(model, deterministic=True)
    watcher = WeightWatcher(engine, WeightSource(weights=versions.url))
    receiver = watcher._receiver
    receiver.apply(receiver.poll(0))
    request = Request(ids=prompt(40), max_tokens=30, seed=3)
    sequence = engine.submit(request)
    for step in range(30):
        for version in [number for number, place in enumerate(at, 1) if place == step]:
            done = engine.swap(version, lambda v=version: receiver.apply(receiver.poll(v)))
            engine._apply_swaps()
            done.result(0)
        engine.step()
    generation = sequence.future.result(0)
    assert generation.versions == [sum(place <= step for place in at) for step in range(30)]
    again = replayed(versions, request, generation)
    assert (again.ids, again.logprobs, again.versions) == (generation.ids, generation.logprobs, generation.versions)
    # The test can fail: another history gives other values.
    other = Generation(**{f: getattr(generation, f) for f in generation.__struct_fields__} | {"versions": [0] * 30})
    assert replayed(versions, request, other).logprobs != generation.logprobs

    fresh = Request(ids=prompt(30, 1), max_tokens=8, seed=4)
    sequence = engine.submit(fresh)
    while not sequence.future.done():
        engine.step()
    generation = sequence.future.result(0)
    assert set(generation.versions) == {3}
    np.testing.assert_allclose(generation.logprobs, score(model, fresh, generation), atol=TOLERANCE)


def test_a_swap_that_does_not_take_is_undone_and_the_engine_goes_on(versions, monkeypatch):
    model = model_of(seed=2)
    engine = Engine(model)
    watcher = WeightWatcher(engine, WeightSource(weights=versions.url))
    receiver = watcher._receiver
    receiver.apply(receiver.poll(0))
    before = watcher.live_digest()
    engine.start()
    try:
        write = LiveTensors.write
        monkeypatch.setattr(
            LiveTensors, "write", lambda self, change: monkeypatch.setattr(LiveTensors, "write", write)
        )  # lost
        sequence = engine.submit(Request(ids=prompt(20), max_tokens=100))
        assert watcher.poll() is False
        assert "did not arrive in the live tensors" in watcher.trouble
        assert (watcher.live_digest(), engine.failure) == (before, None)
        assert watcher.poll() is True
        assert (watcher.trouble, watcher.served.version) == ("", 3)
        assert watcher.live_digest() == receiver.manifest.digest == watcher.served.digest
        assert len(sequence.future.result(SECONDS).ids) == 100
    finally:
        engine.close()


def test_rot_is_repaired_while_the_engine_stands_still(versions):
    model = model_of(seed=2)
    engine = Engine(model)
    watcher = WeightWatcher(engine, WeightSource(weights=versions.url))
    engine.start()
    try:
        watcher.poll()
        named_tensors(model)["model.norm.weight"][7] += 0.5
        watcher._damaged = watcher._receiver.scrub(1.0)
        assert len(watcher._damaged) == 1
        watcher.poll()
        assert (watcher.repairs, watcher.trouble, engine.is_paused) == (1, "", False)
        assert watcher.live_digest() == watcher.served.digest
        assert len(engine.generate(Request(ids=[8, 9], max_tokens=3), SECONDS).ids) == 3
    finally:
        engine.close()


def test_swaps_that_are_undone_do_not_end_the_engine():
    engine = Engine(model_of())
    future = engine.swap(1, lambda: (_ for _ in ()).throw(WeightsMismatch("the old ones are back")))
    engine.step()
    with pytest.raises(WeightsMismatch, match="the old ones are back"):
        future.result(0)
    assert engine.version == 0


@pytest.mark.slow
@pytest.mark.smoke
def test_a_streaming_client_sees_no_error_while_versions_arrive(tmp_path):
    """Clients stream and generate at a real server, which takes payloads from a real relay; three versions arrive."""
    store = open_store(str(tmp_path / "weights"))
    current = {name: tensor.bfloat16() for name, tensor in named_tensors(load_model(NANO)).items()}
    publisher = Publisher(store, anchor_versions=4)
    publisher.publish(0, current, (), {})
    relay = start(tmp_path, "relay", "etude.weights.relay", "--store", store.url)
    source = WeightSource(weights=store.url, relay=relay[1])
    child = spawn_engine(ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=64, source=source), tmp_path)
    server = child, engine_url(child, tmp_path)
    ended, tokens, reasons = threading.Event(), [], []

    def stream() -> None:
        body = {"prompt": "def chunk(array, size):\n", "stream": True, "max_tokens": 100, "logprobs": 1}
        with httpx2.Client(base_url=server[1], timeout=SECONDS, trust_env=False) as http:
            while not ended.is_set():
                with http.stream("POST", "/v1/completions", json=body | {"seed": len(reasons)}) as answer:
                    assert answer.status_code == 200
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            choice = json.loads(line[6:])["choices"][0]
                            tokens.append(len(choice["logprobs"]["tokens"]))
                            reasons.extend([choice["finish_reason"]] if choice["finish_reason"] else [])

    async def generate(number: int) -> Generation:
        async with EngineClient([server[1]]) as client:
            request = GenerateRequest(ids=list(range(40, 80)), max_tokens=20, seed=number)
            return await client.generate(request, SECONDS)

    async def serves(version: int) -> dict:
        async with EngineClient([server[1]]) as client, asyncio.timeout(SECONDS):
            while (health := await client.health(server[1]))["version"] != version:
                assert health["status"] in ("ok", "repairing"), health
        return health

    client = threading.Thread(target=stream)
    client.start()
    try:
        generations = []
        for version in range(1, 4):
            current = stepped(current, version)
            manifest = publisher.publish(version, current, (), {})
            generations.append(asyncio.run(generate(version)))
            health = asyncio.run(serves(version))
            assert health["digest"] == manifest.digest
            with httpx2.Client(base_url=server[1], timeout=SECONDS, trust_env=False) as http:
                assert http.get("/health?verify=1").json()["digest"] == manifest.digest
    finally:
        ended.set()
        client.join(SECONDS)
        for child, _ in (server, relay):
            child.stop(60)
    assert server[0].exit_code == 0, server[0].log.read_text()
    assert reasons
    assert set(reasons) <= {"length", "stop"}
    assert sum(tokens) > 0
    assert all(g.versions == sorted(g.versions) and len(g.ids) == 20 for g in generations)
    assert health["swaps"] == 3
    assert "comes from the store" not in server[0].log.read_text(), "the relay had every payload"


def start(folder: Path, name: str, *argv: str) -> tuple[processes.Child, str]:
    ready = folder / f"{name}.json"
    child = processes.start(name, [*argv, "--ready-file", str(ready)], folder / f"{name}.log")
    return child, json.loads(processes.wait_for_file(ready, child, SECONDS))["url"]
