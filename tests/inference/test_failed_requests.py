"""Requests that the engine cannot compute, over HTTP: each answers with an error of its own, beside others."""

import asyncio
import json
from pathlib import Path

import httpx2
import openai
import pytest
from tokenizers import Tokenizer

from etude.config import EngineConfig
from etude.inference.engine.loading import load_engine
from etude.protocol.backends import EngineClient, EngineError
from etude.protocol.wire import GenerateRequest
from tests.helpers.engines import serving

NANO = Path(__file__).parents[2] / "models" / "nano"
SECONDS = 120.0
WORD = "zebra"


@pytest.fixture(scope="module")
def poison():
    """A token that no request but the bad ones holds."""
    return Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(f"{WORD} {WORD}", add_special_tokens=False).ids[0]


@pytest.fixture(scope="module")
def url(poison):
    engine = load_engine(NANO, EngineConfig(cache_mb=64, speculate=False))

    def before(_, args, kwargs):
        if (kwargs["input_ids"] == poison).any():
            raise IndexError("no such row")

    engine.model.get_decoder().register_forward_pre_hook(before, with_kwargs=True)
    with serving(engine, NANO) as url:
        yield url


def test_ids_beside_others(url, poison):
    async def play():
        async with EngineClient([url]) as client:
            good = [GenerateRequest(ids=[40 + i, 41], max_tokens=8, temperature=0.0) for i in range(4)]
            before = await asyncio.gather(*(client.generate(request, SECONDS) for request in good))
            bad = GenerateRequest(ids=[40, poison], max_tokens=8)

            async def fail(on_tokens=None):
                with pytest.raises(EngineError, match=r"could not compute this request|ended its answer"):
                    await client.generate(bad, SECONDS, on_tokens)

            after = await asyncio.gather(
                *(client.generate(request, SECONDS) for request in good), fail(), fail(lambda _: None), fail()
            )
            with pytest.raises(EngineError, match=r"refused to score \(500\)"):
                await client.score(url, [[40, 41], [40, poison, 41]], SECONDS)
            assert await client.score(url, [[40, 41]], SECONDS) is not None
            health = await client.health(url)
        return before, after[:4], health

    before, after, health = asyncio.run(play())
    assert [generation.ids for generation in after] == [generation.ids for generation in before]
    assert (health["status"], health["failed"], health["running"]) == ("ok", 3, 0)


def test_text_whole_in_choices_and_streamed(url):
    body = {"prompt": f"{WORD} {WORD}", "max_tokens": 8}
    for more in ({}, {"n": 4}):
        answer = httpx2.post(f"{url}/v1/completions", json=body | more, timeout=SECONDS)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "IndexError no such row" in answer.json()["error"]["message"]
    streamed = httpx2.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=SECONDS)
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
        with pytest.raises(openai.APIError, match="no such row"):
            list(client.completions.create(model="nano", stream=True, **body))
        good = client.completions.create(model="nano", prompt="def f(x):", max_tokens=4)
    assert good.usage is not None
    assert good.usage.completion_tokens > 0
