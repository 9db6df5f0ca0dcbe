"""SGLang as the engine of a run, by a fake that speaks its protocol; the real one has not been tried."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import UserError
from etude.models.files import expert_layers
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends.base import EngineError
from etude.protocol.backends.sglang import SglangBackend
from etude.protocol.client import EngineClient
from etude.protocol.wire import GenerateRequest
from tests.helpers.fake_sglang import fake_sglang

NANO = Path("models/nano").absolute()
SECONDS = 300.0
IDS = list(range(100, 150))


@pytest.fixture(scope="module")
def server():
    with fake_sglang(NANO) as (url, fake):
        yield url, fake


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where versions 0 and 1 lie as folders."""
    root, model = tmp_path_factory.mktemp("versions"), load_model(NANO, dtype=torch.bfloat16)
    for version in range(2):
        model.save_pretrained(root / str(version))
        with torch.no_grad():
            named_tensors(model)["model.norm.weight"] += 0.125
    return root


def backend(folders: Path, **options) -> SglangBackend:
    async def folder_of(version: int) -> Path:
        return folders / str(version)

    return SglangBackend(
        "run", folder_of, **{"context": 512, "layers": 6, "expert_layers": expert_layers(NANO), **options}
    )


def test_requests_updates_versions_experts_and_scores(server, folders):
    (url, fake) = server

    async def play():
        async with EngineClient([url], backend=backend(folders)) as client:
            await client.check(url)
            await client.bring(url, 0)
            requests = [GenerateRequest(ids=IDS, max_tokens=100, session=f"s{n}", routes_from=10) for n in range(4)]
            running = [asyncio.create_task(client.generate(request, SECONDS)) for request in requests]
            while min([*fake._live.values(), 99]) < 5 or len(fake._live) < 4:
                await asyncio.sleep(0.01)
            await client.bring(url, 1)
            answers, parts = await asyncio.gather(*running), []
            late = GenerateRequest(ids=IDS, max_tokens=8, session="late", routes_from=0)
            streamed = await client.generate(late, SECONDS, parts.extend)
            score = await client.score(url, [IDS, IDS[:9]], SECONDS)
            with pytest.raises(EngineError, match="does not load version 7: no such folder"):
                await client.bring(url, 7)
            return answers, streamed, parts, score, await client.health(url)

    answers, streamed, parts, score, health = asyncio.run(play())
    assert [version for version, _ in fake.trace] == ["0", "1"]
    cut = fake.trace[1][1]
    assert sorted(cut.values()) == sorted(answer.versions.index(1) for answer in answers)
    assert all(answer.versions == sorted(answer.versions) and len(answer.ids) == 100 for answer in answers)
    routes = answers[0].routes
    assert (routes.first, routes.end, routes.layers, routes.slots) == (10, 50 + 99, 3, 2)
    assert (np.diff(np.sort(routes.array())) > 0).all(), "a layer without experts is none of those that came"
    assert (streamed.ids, streamed.versions, streamed.kv_version) == (parts, [1] * 8, 1)
    assert streamed.cached_tokens == 0, "a new session sees no older keys"
    assert (score.version, [len(logprobs) for logprobs in score.logprobs]) == (1, [49, 8])
    assert (health["version"], health["digest"]) == (1, "")
    assert not fake.engine.is_paused, "a version that was not loaded leaves the old one serving"


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"quantization": "fp8"}, "serves quantised weights"),
        ({"speculative_algorithm": "EAGLE"}, "speculates, which is not tried"),
        ({"context_length": 256}, "takes fewer tokens than rollout.context = 512"),
        ({"enable_metrics": False}, "start it with --enable-metrics"),
    ],
)
def test_a_server_that_cannot_play_is_refused_by_name(server, folders, info, why):
    url, fake = server

    async def check() -> None:
        async with EngineClient([url], backend=backend(folders)) as client:
            await client.check(url)

    fake.info = info
    try:
        with pytest.raises(UserError, match=why):
            asyncio.run(check())
    finally:
        fake.info = {}


def test_log_probabilities_of_another_distribution_are_noticed(server, folders):
    url, fake = server
    answer = fake._answer

    def original(*arguments):
        whole = answer(*arguments)
        for entry in whole["meta_info"]["output_token_logprobs"]:
            entry[0] -= 2
        return whole

    async def check() -> None:
        async with EngineClient([url], backend=backend(folders)) as client:
            await client.check(url)

    fake._answer = original
    try:
        with pytest.raises(UserError, match="unset SGLANG_RETURN_ORIGINAL_LOGPROB"):
            asyncio.run(check())
    finally:
        del fake._answer


def test_what_sglang_does_not_do_is_an_error(server, folders):
    url, _ = server

    async def ask(request: GenerateRequest, **options) -> None:
        async with EngineClient([url], backend=backend(folders, **options)) as client:
            await client.generate(request, SECONDS)

    with pytest.raises(EngineError, match="are those before top_p"):
        asyncio.run(ask(GenerateRequest(ids=IDS, max_tokens=2, top_p=0.9)))
    with pytest.raises(EngineError, match="experts for 51 tokens of 5 layers"):
        asyncio.run(ask(GenerateRequest(ids=IDS, max_tokens=2, routes_from=0), layers=5))
