"""The guard of a vLLM server on another host: all that a run needs comes through, and nothing without the token."""

import asyncio
import re
import socket
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from etude import protocol
from etude.models.files import expert_layers
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends import EngineClient, VllmBackend, WeightsOf
from etude.protocol.wire import GenerateRequest
from etude.run.proxy import GET, POST, VllmProxy
from etude.store import open_store
from etude.weights.publisher import Publisher
from tests.helpers.fake_vllm import fake_vllm

NANO = Path("models/nano").absolute()
TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def fake():
    with fake_vllm(NANO) as (url, _):
        yield url


@pytest.fixture
def proxy(fake):
    proxy = VllmProxy(fake, "127.0.0.1", TOKEN)
    yield proxy
    proxy.close()


def test_a_run_plays_and_updates_through_it(fake, proxy, tmp_path):
    store = open_store(str(tmp_path / "weights"))
    digest = (
        Publisher(store).publish(0, named_tensors(load_model(NANO, dtype=torch.bfloat16)), (), {}, last=True).digest
    )
    request = GenerateRequest(ids=list(range(100, 120)), max_tokens=24, seed=3, session="a", routes_from=0)

    async def play(url: str, token: str | None) -> tuple:
        backend = VllmBackend("run", WeightsOf(store.url), context=512, expert_layers=expert_layers(NANO))
        async with EngineClient([url], token, backend) as client:
            await client.check(url)
            await client.bring(url, 0)
            health = await client.health(url)
            turn = await client.generate(request, 60.0)
            scores = await client.score(url, [request.ids], 60.0)
            return health["version"], health["digest"], turn, scores

    through = asyncio.run(play(proxy.url, TOKEN))
    assert through[:2] == (0, digest)
    beside = asyncio.run(play(fake, None))
    assert (through[2].ids, through[2].routes) == (beside[2].ids, beside[2].routes)
    # Float32: the second turn reads the prompt's keys from the cache, and sums in another order.
    assert np.allclose(through[2].logprobs, beside[2].logprobs, atol=1e-4)
    assert through[3] == beside[3]


def test_every_route_needs_the_token_and_no_other_is_there(proxy):
    for method, paths in (("GET", GET), ("POST", POST)):
        for path in paths:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert httpx2.request(method, proxy.url + path, headers=headers).status_code == 401, path
    own = {"authorization": f"Bearer {TOKEN}"}
    for path in ("/v1/completions", "/docs", "/load_lora_adapter", "/sleep", "/collective_rpc/"):
        assert httpx2.request("GET", proxy.url + path, headers=own).status_code in (404, 405, 307), path
        assert httpx2.request("POST", proxy.url + path, headers=own, json={}).status_code in (404, 405, 307), path


def test_the_routes_are_those_that_the_client_asks():
    """Every path in the client's source, so that a new one is not forgotten here."""
    source = Path(protocol.__file__).parent / "backends"
    text = "".join((source / name).read_text() for name in ("vllm.py", "vllm_answers.py"))
    paths = set(re.findall(r'"(?:\{url\})?(/[a-z0-9_/]+)"', text))
    assert {path for path in paths if not path.startswith("/inference")} | {"/inference/v1/generate"} == {*GET, *POST}


def test_a_server_that_is_gone_is_lost_and_not_busy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = VllmProxy(f"http://127.0.0.1:{port}", "127.0.0.1", TOKEN)
    try:
        answer = httpx2.get(f"{proxy.url}/health", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 502
        assert "retry-after" not in answer.headers
        assert "does not answer" in answer.json()["error"]["message"]
    finally:
        proxy.close()
