"""Parts of generations, as they leave the engine: together they are the whole, bit for bit."""

import numpy as np
import pytest

from etude.config import EngineConfig
from etude.inference.engine.drafts import DraftSource
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.records import Generation, Routes, joined
from tests.inference.test_engine import model_of, prompt, run


def in_parts(engine: Engine, *requests: Request, every: int = 3, at_step=lambda number: None) -> list[list[Generation]]:
    """The parts of each request's generation, of which one is asked for at each `every`-th step."""
    sequences = [engine.submit(request) for request in requests]
    parts: list[list[Generation]] = [[] for _ in requests]
    asked = [engine.next_part(sequence) for sequence in sequences]
    for number in range(2000):
        at_step(number)
        engine.step()
        for i, sequence in enumerate(sequences):
            if asked[i].done() and number % every == i % every:
                parts[i].append(asked[i].result())
                asked[i] = engine.next_part(sequence)
        if all(sequence.future.done() for sequence in sequences):
            rest = [[future.result()] if future.done() else [] for future in asked]
            return [[*of, *more, s.future.result()] for of, more, s in zip(parts, rest, sequences, strict=True)]
    raise AssertionError("the requests did not finish")


@pytest.mark.parametrize(("kind", "routes"), [("moe", True), ("qwen3", False)])
def test_parts_are_the_whole(kind, routes):
    model = model_of(kind)
    requests = [
        Request(ids=prompt(length, length), max_tokens=20, seed=length, routes_from=first if routes else None)
        for length, first in ((3, 0), (70, 11), (40, 39))
    ]
    whole = run(Engine(model, deterministic=True, routes=routes), *requests)
    for every in (1, 4):
        parts = in_parts(Engine(model, deterministic=True, routes=routes), *requests, every=every)
        assert [joined(each) for each in parts] == whole
        for each, request in zip(parts, requests, strict=True):
            assert len(each) >= 20 // every
            assert [part.finish_reason for part in each] == [""] * (len(each) - 1) + ["length"]
            assert {part.kv_version for part in each} == {0}
            if routes:
                assert each[0].routes.first == request.routes_from
                assert [part.routes.end - part.routes.first for part in each[1:]] == [len(p.ids) for p in each[1:]]


def test_parts_over_a_swap_and_with_drafts():
    model = model_of()
    ids = prompt(50)
    plain = Request(ids=ids, max_tokens=24, temperature=0.0, routes_from=0)
    (whole,) = run(Engine(model, routes=True), plain)
    engine = Engine(model, EngineConfig(speculate=True), routes=True)
    drafted = Request(
        ids=ids, max_tokens=24, temperature=0.0, routes_from=0,
        sources=(DraftSource("prediction", np.array(whole.ids, np.int32)),),
    )  # fmt: skip

    def at_step(number: int) -> None:
        if number == 2:
            engine.swap(1, lambda: None)

    ((*parts, last),) = in_parts(engine, drafted, every=2, at_step=at_step)
    together = joined([*parts, last])
    assert together.ids == whole.ids
    assert together.versions == sorted(together.versions)
    assert set(together.versions) == {0, 1}
    assert (together.routes.first, together.routes.end) == (0, 50 + 24 - 1)
    assert together.accepted_draft_tokens == last.accepted_draft_tokens > 0
    assert not any(part.accepted_draft_tokens for part in parts)


def test_an_aborted_sequence_ends_with_its_rest():
    engine = Engine(model_of(), deterministic=True, routes=True)
    request = Request(ids=prompt(20), max_tokens=50, seed=3, routes_from=0)
    (whole,) = run(Engine(model_of(), deterministic=True, routes=True), request)
    sequence = engine.submit(request)
    asked = engine.next_part(sequence)
    for _ in range(6):
        engine.step()
    first = asked.result()
    sequence.abort()
    engine.step()
    last = sequence.future.result()
    count = len(first.ids) + len(last.ids)
    assert last.finish_reason == "abort"
    assert 1 < count < 50
    assert joined([first, last]).ids == whole.ids[:count]
    assert joined([first, last]).routes.end == 20 + count - 1


def test_parts_that_do_not_follow_each_other_are_not_joined():
    def part(first: int, **fields) -> Generation:
        routes = Routes(first=first, ids=bytes(4), layers=1, slots=2)
        return Generation(ids=[1], logprobs=[-1.0], versions=[0], finish_reason="", routes=routes, **fields)

    assert joined([part(0, kv_version=3), part(2, kv_version=2)]).routes.end == 4
    assert joined([part(0, kv_version=3), part(2, kv_version=2)]).kv_version == 2
    with pytest.raises(ValueError, match="not those of consecutive positions"):
        joined([part(0), part(3)])
    with pytest.raises(ValueError, match="were computed as a and as b"):
        joined([part(0, recipe="a"), part(2, recipe="b")])


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_wrong_time_between_parts_is_refused(seconds):
    with pytest.raises(ValueError, match=r"part_seconds must lie in \[0, 3600\]"):
        Request(ids=[1], max_tokens=1, part_seconds=seconds).check(64, 100)
