"""Clients that share an engine: who has asked for least comes first, and whose place is taken loses nothing."""

from __future__ import annotations

import random

import pytest

from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.fairness import ClientLoads, PassShares
from etude.inference.engine.requests import Request, RunningSequence
from etude.inference.engine.sampling_params import SamplingParams
from etude.models import attention, experts
from etude.models.kernels import BLOCK
from etude.protocol import NOBODY, Client
from etude.protocol.clients import begin_asking, client_of
from tests.helpers.tiny_models import random_model
from tests.inference.test_engine import assert_same, prompt

FLOOD, HONEST = Client("10.0.0.1", "1"), Client("10.0.0.2", "1")


@pytest.fixture(scope="module")
def model():
    model = random_model("moe", 0)
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


@pytest.fixture(autouse=True)
def nobody():
    yield
    begin_asking(NOBODY)


def submitted(engine: Engine, client: Client, *requests: Request) -> list[RunningSequence]:
    begin_asking(client)
    return [engine.submit(request) for request in requests]


def steps_until(engine: Engine, *sequences: RunningSequence, most: int = 3000) -> int:
    for number in range(most):
        if all(sequence.future.done() for sequence in sequences):
            return number
        engine.step()
    raise AssertionError("the requests did not finish")


@pytest.mark.parametrize("short", ["slots", "pages"])
def test_a_lighter_client_takes_the_place_of_a_heavier_one(model, short: str) -> None:
    """Where slots are short, and where pages are: four sequences of this length fill the cache."""
    config = EngineConfig(max_batch=4 if short == "slots" else 16, speculate=False)
    if short == "pages":
        page = Engine(model, config).cache.page_bytes
        config = config.model_copy(update={"cache_mb": 16.5 * page / 2**20})
    engine = Engine(model, config, max_length=4 * BLOCK)
    requests = [Request(ids=prompt(20, n), max_tokens=4 * BLOCK - 20, seed=n) for n in range(8)]
    flood = submitted(engine, FLOOD, *requests)
    for _ in range(30):
        engine.step()
    assert engine.load == (4, 4)
    honest = submitted(engine, HONEST, Request(ids=prompt(9, 99), max_tokens=20, seed=5))
    assert steps_until(engine, *honest) <= 20 + 20 + 2
    assert engine.counters.displaced >= 1
    steps_until(engine, *flood)
    assert engine.scheduler.loads.unfinished(FLOOD) == 0


def test_a_place_with_a_common_prefix_frees_no_page_of_it(model) -> None:
    """The pages that a lighter client shares with a heavier one are taken already."""
    config = EngineConfig(max_batch=16, speculate=False)
    page = Engine(model, config).cache.page_bytes
    config = config.model_copy(update={"cache_mb": 16.5 * page / 2**20})
    common = prompt(2 * BLOCK, 1)
    for pages in (3, 4, 5):
        engine = Engine(model, config, max_length=8 * BLOCK)
        ids = [*(prompt(5, n) for n in range(3)), common + prompt(5, 3)]
        flood = submitted(engine, FLOOD, *(Request(ids=each, max_tokens=4 * BLOCK - len(each)) for each in ids))
        for _ in range(12):
            engine.step()
        assert engine.cache.available == 0
        honest = submitted(engine, HONEST, Request(ids=[*common, 5], max_tokens=(pages - 2) * BLOCK - 1))
        steps_until(engine, *flood, *honest)
        assert engine.counters.displaced == (1 if pages < 5 else 2)
        assert [len(each.future.result().ids) for each in honest] == [(pages - 2) * BLOCK - 1]
        assert len(engine.cache.free) + engine.cache.idle == engine.cache.num_pages


def test_a_sequence_that_gave_its_place_goes_on_as_if_it_had_not(model) -> None:
    rng = random.Random(1)
    config = EngineConfig(max_batch=3, speculate=False, prefill_tokens=24)
    params = SamplingParams(top_k=30, repetition_penalty=1.2, frequency_penalty=0.3, top_logprobs=2)
    long = [
        Request(ids=prompt(rng.randint(3, 60), n), max_tokens=rng.randint(20, 70), seed=n, top_p=rng.choice([1.0, 0.9]),
                params=params if n % 2 else SamplingParams())
        for n in range(8)
    ]  # fmt: skip
    alone = list[RunningSequence]()
    for request in long:
        engine = Engine(model, config)
        alone += submitted(engine, NOBODY, request)
        steps_until(engine, alone[-1])
    engine = Engine(model, config)
    together, short = submitted(engine, FLOOD, *long), list[RunningSequence]()
    for number in range(30):
        for _ in range(rng.randint(1, 12)):
            engine.step()
        short += submitted(engine, Client(f"10.1.0.{number}", "1"), Request(ids=prompt(5, number), max_tokens=4))
    steps_until(engine, *together, *short)
    assert engine.counters.displaced > 5
    for one, other in zip(alone, together, strict=True):
        generation = other.future.result()
        assert_same(one.future.result(), generation)
        assert len(generation.ids) == len(generation.logprobs) == len(generation.versions)
        tops = [[[token for token, _ in top] for top in each.top_logprobs] for each in (one, other)]
        assert tops[0] == tops[1]
    cache = engine.cache
    assert len(cache.free) + cache.idle == cache.num_pages, "every page is free or kept for later"


def test_one_client_keeps_its_order(model) -> None:
    engine = Engine(model, EngineConfig(max_batch=2, speculate=False))
    requests = [Request(ids=prompt(8, n), max_tokens=tokens, seed=n) for n, tokens in enumerate((60, 50, 4, 4, 4, 4))]
    sequences = submitted(engine, FLOOD, *requests)
    for _ in range(5):
        engine.step()
    assert [sequence.slot >= 0 for sequence in sequences] == [True, True, False, False, False, False]
    steps_until(engine, *sequences)
    assert engine.counters.displaced == 0


def test_a_heavier_client_is_not_starved(model) -> None:
    """Lighter ones come without end: a fourth of the admissions and of the time is left."""
    engine = Engine(model, EngineConfig(max_batch=4, speculate=False))
    heavy = submitted(engine, FLOOD, *(Request(ids=prompt(8, n), max_tokens=40, seed=n) for n in range(6)))
    number, light = 0, list[RunningSequence]()
    while not all(sequence.future.done() for sequence in heavy):
        if sum(not sequence.future.done() for sequence in light) < 3:
            client = Client(f"10.2.0.{number}", "1")
            light += submitted(engine, client, Request(ids=prompt(5, number), max_tokens=8))
            number += 1
        engine.step()
        assert number < 1500


def test_loads() -> None:
    loads = ClientLoads()

    def sequence(client: Client, tokens: int) -> RunningSequence:
        return RunningSequence(Request(ids=[1], max_tokens=1), None, None, client, tokens)  # type: ignore[arg-type]

    own, others = Client("a", "1"), [Client("a", str(number)) for number in range(2, 12)]
    mine = sequence(own, 100)
    loads.add(mine)
    for other in others:
        loads.add(sequence(other, 400))
    loads.add(sequence(Client("b", "1"), 1000))
    assert loads.lighter(own, others[0]), "of one group: by member"
    assert loads.lighter(Client("b", "1"), own), "of two groups: by group"
    assert not loads.lighter(others[0], others[1])
    assert loads.light([mine, sequence(others[0], 400)]) == {mine}
    assert loads.light([mine]) == set()
    loads.end(mine, 50)
    assert 49 < loads.of(own)[1] <= 50, "what it took counts for a while"
    assert loads.unfinished(own) == 0


def test_shares_of_time() -> None:
    shares, alone, every = PassShares(), 0.0, 0.0
    shares.note(0.04, False, False)
    shares.begin()
    for _ in range(1000):
        if shares.alone():
            alone += 0.005
            shares.note(0.005, True, True)
        else:
            every += 0.04
            shares.note(0.04, False, True)
    assert 2.7 < alone / every < 3.3
    shares.note(0.006, False, True)
    assert not shares.alone(), "a pass of all takes hardly longer"


def test_clients_of_requests() -> None:
    def of(*headers: tuple[str, str], client: object = ("10.1.2.3", 5)) -> Client:
        return client_of({"client": client, "headers": [(a.encode(), b.encode("latin-1")) for a, b in headers]})

    assert of() == Client("10.1.2.3", "5")
    assert of(client=None) == Client("", "0")
    assert of(("x-etude-asker", "k1/10.0.0.1:7")) == Client("key k1", "10.0.0.1:7")
    assert of(("x-etude-asker", "k1")) == Client("key k1", "")


def test_prompts_to_score_leave_time_to_sample(model) -> None:
    """Those of token routes do not wait."""
    for client in (Client("10.0.0.1", "1"), Client("10.0.0.1", "")):
        engine = Engine(model, EngineConfig(speculate=False))
        honest = submitted(engine, HONEST, Request(ids=prompt(9), max_tokens=30))
        engine.step()
        begin_asking(client)
        scores = [engine.score_prompt(prompt(200, number)) for number in range(30)]
        steps_until(engine, *honest)
        done = sum(score.done() for score in scores)
        assert done <= 15 if client.member else done >= 28
        while not all(score.done() for score in scores):
            engine.step()
