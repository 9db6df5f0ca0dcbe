"""The engine on a device gives the host's answers. Tolerance 2e-5 of log-probabilities: float32 sums in another
order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.config import EngineConfig, WeightSource
from etude.inference.engine.configuration import configuration
from etude.inference.engine.engine import Engine
from etude.inference.engine.loading import load_engine
from etude.inference.engine.requests import Request
from etude.inference.engine.sampling_params import SamplingParams
from etude.inference.server.weights import WeightWatcher
from etude.models import gemm
from etude.models.loading import load_model, named_tensors
from etude.records import Generation
from etude.store import Store, open_store
from etude.weights.publisher import Publisher
from tests.device.conftest import Device
from tests.device.fakegpu import NAME
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import prompt, sampled

pytestmark = pytest.mark.release  # with `make device`, in processes of its own

TOLERANCE = 2e-5
SECOND = f"{NAME}:1"
DECODE_SYNCS = 1  # of a step that decodes: the draws of all its rows come to the host together


@pytest.fixture
def device(device: Device) -> Device:
    """The second stand-in: what forgets the number of a device takes the first. (A backward pass takes no second.)"""
    return Device(SECOND, device.syncs) if device.type == NAME else device


@pytest.fixture(scope="module", params=["qwen3", "moe", "deepseek"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, dense, of experts, or of experts and latent attention (MLA)."""
    return save_random_model(tmp_path_factory.mktemp("model") / "model", request.param)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("moe") / "model", "moe")


@pytest.fixture(scope="module")
def two_versions(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of_two_versions(moe, tmp_path_factory.mktemp("weights"))


def store_of_two_versions(moe: Path, folder: Path) -> Store:
    """A store with versions 0 and 1."""
    store = open_store(str(folder))
    publisher = Publisher(store, 8)
    tensors = {name: tensor.bfloat16() for name, tensor in named_tensors(load_model(moe)).items()}
    for version in range(2):
        publisher.publish(version, tensors, (), {})
        tensors = {name: tensor * 1.05 for name, tensor in tensors.items()}
    publisher.finish_anchor()
    return store


def engine_on(place: str, folder: Path, **options: bool) -> Engine:
    config = EngineConfig(device=place, dtype="float32", cache_mb=4, documents_mb=4, speculate=False)
    engine = Engine(load_model(folder, device=place), config, **options)
    assert engine.cache.keys.device.type == torch.device(place).type
    assert configuration(engine)["head"] == "float32"
    return engine


def answers(place: str, folder: Path) -> list[Generation]:
    """Ragged rows, a shared prefix, sampling with all parameters, experts; a prompt whose beginning is in the cache."""
    engine = engine_on(place, folder, routes=not is_dense(folder))
    routes = {"routes_from": 0} if engine.routes else {}
    first = [
        Request(ids=prompt(number, length), max_tokens=6, seed=number, temperature=temperature, top_p=top_p, **routes)
        for number, length, temperature, top_p in ((1, 40, 0, 1), (2, 7, 0, 1), (3, 65, 1, 1), (3, 65, 0.7, 0.8))
    ]
    every = (
        SamplingParams(top_k=5, min_p=0.01, logit_bias={3: 2.0, 9: -4.0}, top_logprobs=3),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.3, min_tokens=4),
        SamplingParams(allowed=tuple(range(7, 60)), bad_words=((8,), (9, 10))),
    )
    second = [Request(ids=prompt(3, 65) + prompt(4, 9), max_tokens=5, seed=5, params=params) for params in every]
    return sampled(engine, first) + sampled(engine, second)


def is_dense(folder: Path) -> bool:
    return load_model(folder).config.model_type == "qwen3"


def answers_over_documents(place: str, folder: Path) -> list[Generation]:
    """Two requests share documents that stand at other places."""
    a, b = prompt(6, 40), prompt(7, 33)
    engine = engine_on(place, folder, routes=True)
    assert engine.documents.refusal == ""
    found = sampled(engine, [
        Request(documents=documents, ids=prompt(8, 9), max_tokens=4, seed=1, routes_from=0)
        for documents in ((a, b), (b, a))
    ])  # fmt: skip
    assert engine.documents.counters.hits == 2
    return found


def answers_of_versions(place: str, folder: Path, store: Store) -> list[Generation]:
    """A new version comes while a request runs: written element by element, proven by its digest."""
    engine = engine_on(place, folder)
    receiver = WeightWatcher(engine, WeightSource(weights=store.url))._receiver
    assert receiver is not None
    receiver.apply(receiver.poll(0))
    row = engine.submit(Request(ids=prompt(1, 40), max_tokens=6, seed=3))
    for step in range(6):
        if step == 3:
            engine.swap(1, lambda: receiver.apply(receiver.poll(1)))
        engine.step()
    return [row.future.result(0), *sampled(engine, [Request(ids=prompt(2, 9), max_tokens=3)])]


def same(ours: list[Generation], theirs: list[Generation]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.ids, a.versions, a.routes) == (b.ids, b.versions, b.routes)
        assert a.logprobs == pytest.approx(b.logprobs, abs=TOLERANCE)


def test_answers(device: Device, folder: Path) -> None:
    same(answers(device.name, folder), answers("cpu", folder))


def test_documents(device: Device, moe: Path) -> None:
    same(answers_over_documents(device.name, moe), answers_over_documents("cpu", moe))


def test_versions(device: Device, moe: Path, two_versions: Store) -> None:
    found = answers_of_versions(device.name, moe, two_versions)
    assert found[0].versions == [0, 0, 0, 1, 1, 1]
    same(found, answers_of_versions("cpu", moe, two_versions))


def test_an_engine_tries_itself_there_and_drafts(device: Device, moe: Path) -> None:
    """Against transformers' own forward pass on the device, which is tried with other libraries than the host's; and
    an answer that repeats its prompt."""
    config = EngineConfig(device=device.name, dtype="float32", cache_mb=4)
    engine = load_engine(moe, config)
    host = Engine(load_model(moe), EngineConfig(cache_mb=4))
    request = Request(ids=prompt(9, 20) * 3, max_tokens=20, temperature=0.0)
    same(sampled(engine, [request]), sampled(host, [request]))
    assert engine.score(prompt(5, 50), decoded=True)


def test_scores(device: Device, moe: Path) -> None:
    found = []
    for place in ("cpu", device.name):
        engine = engine_on(place, moe)
        future = engine.score_prompt(prompt(5, 50), top=3)
        engine.step()
        found.append(future.result(0)[1])
    assert found[0].log_probs == pytest.approx(found[1].log_probs, abs=TOLERANCE)
    assert found[0].ranks.tolist() == found[1].ranks.tolist()


def test_a_narrow_head_is_multiplied_in_parts(device: Device) -> None:
    """Logits of bfloat16 factors are float32. Tolerance: sums of 64 terms of size 1."""
    noise = torch.Generator().manual_seed(1)
    hidden_SD, weight_VD = (torch.randn(rows, 64, generator=noise).bfloat16() for rows in (3, 2**14 + 5))
    found = gemm.head(hidden_SD.to(device.name), weight_VD.to(device.name)).to("cpu")
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), hidden_SD.double() @ weight_VD.double().T, atol=1e-4)


def test_deterministic_mode_runs_one_request_at_a_time(device: Device, moe: Path) -> None:
    """On a device passes are not batch-invariant; the bits of an answer still depend on nothing beside it."""
    requests = [Request(ids=prompt(number, 20), max_tokens=4, seed=number) for number in range(3)]
    together = sampled(engine_on(device.name, moe, deterministic=True), requests)
    alone = [sampled(engine_on(device.name, moe, deterministic=True), [request])[0] for request in requests]
    assert [(a.ids, a.logprobs) for a in together] == [(a.ids, a.logprobs) for a in alone]


def test_the_host_waits_once_in_a_step_that_decodes(device: Device, folder: Path) -> None:
    if device.type != NAME:
        pytest.skip("the stand-in counts")
    waits(device, folder)


def waits(device: Device, folder: Path) -> None:
    """Rows of all kinds: greedy, nuclei, parameters that change logits, most probable tokens."""
    engine = engine_on(device.name, folder)
    kinds = (
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "params": SamplingParams(top_logprobs=3)},
        {"temperature": 0.7, "params": SamplingParams(top_k=5, min_p=0.01, logit_bias={3: 2.0}, bad_words=((8,),))},
        {"params": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, allowed=tuple(range(7, 90)))},
    )
    for number, options in enumerate(kinds):
        engine.submit(Request(ids=prompt(number, 20 + number), max_tokens=20, seed=number, **options))
    engine.step()
    for _ in range(3):
        device.syncs.clear()
        engine.step()
        assert sum(device.syncs.values()) <= DECODE_SYNCS, device.syncs
