"""Logprob probes: an engine's scores of fixed sequences, on their way to the trainer, and a wrong engine by name."""

import asyncio
import json
import threading
import time
from contextlib import aclosing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import uvicorn

from etude import runfolder
from etude.audit.rescoring import set_weights
from etude.config import EngineConfig
from etude.errors import RunFailed
from etude.inference.engine import cache
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.engine.runner import Runner
from etude.inference.server.server import build_app
from etude.inference.server.weights import ServedVersion, WeightWatcher
from etude.ledger import Ledger
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends import EngineClient, EngineError
from etude.renderers import renderer_for
from etude.rollout import probes
from etude.run.state import Engines, Run
from etude.run.versions import observe_versions
from etude.store import open_store
from etude.tasks import dataset
from etude.trainer.rl.guards import Guards, StepFigures
from etude.trainer.rl.probe_scores import TrainerProbes
from etude.trainer.rl.process import Trainer
from etude.weights.content import load
from etude.weights.manifest import manifests
from etude.weights.receiver import Receiver
from tests.helpers.trainer_runs import admit, answer, begin_probes, engine_of, new_run, play, prompt, sampled, step

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


def test_sequences_follow_from_tasks_and_tokenizer():
    tasks = dataset.load_dataset(ROOT / "tests/tasks/data/tiny").split("train")
    renderer = renderer_for(ROOT / "models/nano", None)
    made = probes.make_probe_sequences(tasks, renderer, 2, 40)
    assert made == probes.make_probe_sequences(tasks, renderer, 2, 40)
    assert [len(ids) for ids in made.ids] == [40, 40]
    assert made.ids[0] != made.ids[1]
    assert tasks[0].prompt in renderer.text(probes.make_probe_sequences(tasks, renderer, 8, 256).ids[0])
    assert len(probes.make_probe_sequences(tasks, renderer, 8, 256).ids) == 3, "no more than there are tasks"
    assert probes.make_probe_sequences(tasks, renderer, 0, 256).ids == ()
    seven = [msgspec.structs.replace(tasks[0], prompt=f"Mend number {n}.") for n in range(7)]
    for count, expected in ((1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (6, [0, 1, 2, 3, 4, 5]), (7, list(range(7)))):
        texts = map(renderer.text, probes.make_probe_sequences(seven, renderer, count, 256).ids)
        assert [n for text in texts for n in range(7) if f"Mend number {n}." in text] == expected, "spread over all"


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_an_engine_scores_as_the_trainer_does(tmp_path, kind):
    run, config = new_run(tmp_path, kind)
    sequences = begin_probes(run)
    model = load_model(config.model.path)
    store = open_store(str(run / "probes"))
    for deterministic in (False, True):
        probes.reset_probes(store, probes.ProbeSequences(ids=tuple(sequences)))
        trainer = TrainerProbes(store, model, exactly=deterministic)
        trainer.score(7)
        answer(run, Engine(model, version=7, deterministic=deterministic), number=3)
        (found,) = trainer.arrived()
        assert (found.engine, found.version) == ("http://engine-3", 7)
        # Rounding of float32 leaves some 1e-12; exact passes leave nothing.
        assert found.max_abs == 0.0 if deterministic else found.k2 < 1e-9
        assert trainer.arrived() == [], "an answer is judged once"


@pytest.mark.parametrize("deterministic", [False, True])
def test_probes_are_decoded_as_episodes_are(tmp_path, monkeypatch, deterministic):
    """An engine whose decoding is wrong, but not its prefill: tokens claim to stand one position too late. The sampler
    gets the given tokens, in rows of different lengths beside a sampled one, which is not disturbed."""
    run, config = new_run(tmp_path)
    sequences = [ids[: 9 + 7 * i] for i, ids in enumerate(begin_probes(run))]
    store = open_store(str(run / "probes"))
    probes.reset_probes(store, probes.ProbeSequences(ids=tuple(sequences)))
    model = load_model(config.model.path)
    trainer = TrainerProbes(store, model, exactly=deterministic)
    trainer.score(0)
    engine = Engine(model, deterministic=deterministic)
    request = Request(ids=prompt(5, 20), max_tokens=40, seed=1)
    (alone,) = sampled(Engine(model, deterministic=deterministic), [request])
    row = engine.submit(request)
    answer(run, engine)
    (right,) = trainer.arrived()
    assert right.k2 == 0.0 if deterministic else right.k2 < 1e-9
    while not row.future.done():
        engine.step()
    assert row.future.result().ids == alone.ids
    assert engine.counters.sampled_tokens == 40, "given tokens are scored, not sampled"
    assert engine.counters.scored_tokens == sum(map(len, sequences))

    honest = Runner._decoding_tokens

    def shifted(self, rows, drafts):
        ids_N, slot_N, position_N, count_R = honest(self, rows, drafts)
        return ids_N, slot_N, position_N + 1, count_R

    monkeypatch.setattr(Runner, "_decoding_tokens", shifted)
    broken = Engine(model, deterministic=deterministic)
    prefilled = broken.score(sequences[-1])
    broken.step()
    own = trainer._scores[0][-len(sequences[-1]) + 1 :]
    np.testing.assert_allclose(prefilled.result()[1], own, atol=1e-4)
    answer(run, broken)
    (wrong,) = trainer.arrived()
    assert wrong.k2 > 0.01
    (event, *_) = Guards(config.guards, 1).judge(StepFigures(), [wrong]).events
    assert (event.guard, event.level) == ("probe_growth", "stop")


def test_a_version_between_two_halves_of_a_probe_is_no_answer(tmp_path):
    _, config = new_run(tmp_path)
    engine = Engine(load_model(config.model.path))
    future = engine.score(prompt(1, 40), decoded=True)
    engine.step()
    engine.swap(1, lambda: None)
    while not future.done():
        engine.step()
    assert future.result()[0] == -1
    aborted = engine.score(prompt(1, 40), decoded=True)
    engine.step()
    engine.pause("abort")
    while not aborted.done():
        engine.step()
    assert aborted.result()[0] == -1


def test_scores_neither_read_nor_leave_keys_and_rows_go_on(tmp_path, monkeypatch):
    _, config = new_run(tmp_path)
    model = load_model(config.model.path)
    ids = prompt(5, 70)
    request = Request(ids=ids, max_tokens=20, seed=1)
    alone, engine = Engine(model), Engine(model)
    (expected,) = sampled(alone, [request])
    monkeypatch.setattr(cache.CacheNode, "usable", lambda node, version, session: True)
    row = engine.submit(request)
    futures = []
    while not row.future.done():
        futures.append(engine.score(ids))
        engine.step()
    assert row.future.result(0).ids == expected.ids
    nodes = len(engine.cache.nodes)
    before = futures[0].result(0)
    set_weights(model, {name: 1.1 * t for name, t in named_tensors(model).items()})
    engine.version = 1
    later = engine.score(ids)
    engine.step()
    assert all(future.result(0) == before for future in futures)
    assert (before[0], later.result(0)[0]) == (0, 1)
    assert np.abs(np.subtract(before[1], later.result(0)[1])).mean() > 0.01, "with the new weights alone"
    assert len(engine.cache.nodes) == nodes
    assert engine.counters.scored_tokens == 70 * (len(futures) + 1)
    for wrong, why in (([3], "2 to"), ([3] * 5000, "2 to"), ([3, 97], "vocabulary")):
        with pytest.raises(ValueError, match=why):
            engine.score(wrong)


@contextmanager
def serving(config, tensors, version, engine_config=None):
    """An inference server of these tensors on a thread: its URL, engine and watcher."""
    engine = Engine(engine_of(config, tensors, version).model, engine_config, version=version)
    watcher = WeightWatcher(engine, None)
    server = uvicorn.Server(
        uvicorn.Config(build_app(engine, watcher, Path(config.model.path)), port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + SECONDS
    while not server.started:
        assert time.monotonic() < deadline
        assert thread.is_alive()
        thread.join(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", engine, watcher
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        engine.close()


def asked(run, engines, version):
    """Asks every engine once, as the controller does when it sees a version, and waits for the answers."""
    store = open_store(str(run / "probes"))

    async def ask():
        async with asyncio.timeout(SECONDS), EngineClient(engines) as client:
            asker = probes.ProbeScorer(store, probes.ProbeSequences(ids=probes.read_probe_sequences(store)), client)
            for _ in range(2):  # it is seen at every tick
                for url in engines:
                    asker.served(url, version)
            await asyncio.gather(*asker._asking.values())

    asyncio.run(ask())


def test_a_wrong_server_is_named_and_the_run_goes_on_without_answers(tmp_path, capsys):
    """Two servers over HTTP, one with a damaged tensor that it does not know of."""
    run, config = new_run(tmp_path, guards={"min_tokens": 16})
    begin_probes(run)
    trainer = Trainer(run)
    right = load(open_store(str(run / "weights")), 0)[1]
    name = "model.layers.1.self_attn.o_proj.weight"
    wrong = right | {
        name: right[name] + 0.2 * torch.randn(right[name].shape, generator=torch.Generator().manual_seed(1))
    }
    with serving(config, right, 0) as (url, engine, _), serving(config, wrong, 0) as (other, bad, _):
        engine.start()
        bad.start()
        asked(run, [url, other], 0)
    for version in (0, 1):
        admit(run, config, version, version, play(engine_of(config, right, 0), version))
        step(trainer)
    first, second = runfolder.read_jsonl(run / "metrics.jsonl")
    found = {a["engine"]: a for a in first["probe/answers"]}
    assert found[url]["k2"] < 1e-9
    assert found[other]["k2"] == first["probe/k2"] > 1e-2
    (event,) = [e for e in first["guard/events"] if e["guard"] == "probe_growth"]
    assert (event["level"], event["action"]) == ("stop", "skip")
    assert f"the engine at {other} scores the probes of version 0 otherwise" in event["sentence"]
    assert event["sentence"] in capsys.readouterr().err
    assert first["time/probes"] > 0
    assert "probe/answers" not in second, "nothing has arrived: nothing is judged, and nothing waits"


def test_the_controller_asks_names_differences_and_refuses_other_tensors(tmp_path, capsys):
    """One look of the watch loop at two servers: one of them has fewer rows, and then says it has other tensors."""
    run, config = new_run(tmp_path)
    sequences = begin_probes(run)
    Trainer(run)
    weights, answers = open_store(str(run / "weights")), open_store(str(run / "probes"))
    tensors = load(weights, 0)[1]

    async def look(engines, watcher):
        asks = probes.ProbeSequences(ids=tuple(sequences))
        async with (
            EngineClient(engines) as client,
            aclosing(probes.ProbeScorer(answers, asks, client)) as asker,
        ):
            names = ("pool", "impossible", "rollouts", "sandbox", "training", "measuring", "concurrency")
            watched = Run(
                folder=run, config=config, weights=weights, children=[], **dict.fromkeys(names),
                ledger=Ledger.open(f"sqlite:///{run}/ledger.db"), engines=Engines([], client, asker),
            )  # fmt: skip
            for number, url in enumerate(engines):
                watched.engines.add(url, str(number), serves=True)
            for _ in range(3):
                await observe_versions(watched)
            await asyncio.gather(*asker._asking.values())
            watcher.served = ServedVersion(0, "0" * 64)
            with pytest.raises(RunFailed, match="serves other tensors than version 0 has"):
                await observe_versions(watched)
        return watched

    with (
        serving(config, tensors, 0) as (url, one, _),
        serving(config, tensors, 0, EngineConfig(max_batch=4)) as (other, two, watcher),
    ):
        one.start()
        two.start()
        watched = asyncio.run(look([url, other], watcher))
    sentence = f"the engine at {other} is not configured as that at {url}: max_batch is 4, not 128"
    assert watched.record.complaints == {sentence}
    assert capsys.readouterr().err.count(sentence) == 1
    assert [(a.engine, a.scored.version) for a in probes.take_probe_results(answers)] == [(url, 0), (other, 0)]


def test_a_version_that_comes_while_a_server_scores_and_a_bad_question(tmp_path):
    _, config = new_run(tmp_path)
    tensors = named_tensors(load_model(config.model.path))

    async def ask(url, ids):
        async with EngineClient([url]) as client:
            return await client.score(url, [ids], SECONDS)

    with serving(config, tensors, 4) as (url, engine, watcher):
        with pytest.raises(EngineError, match="2 to"):
            asyncio.run(ask(url, [3]))
        answers = []
        thread = threading.Thread(target=lambda: answers.append(asyncio.run(ask(url, [3, 4, 5]))))
        thread.start()
        deadline = time.monotonic() + SECONDS
        while not engine._scores:  # the engine's thread is not started: this test takes its steps
            assert time.monotonic() < deadline
            thread.join(0.02)
        engine.version, watcher.served = 5, ServedVersion(5, "")
        engine.step()
        thread.join(SECONDS)
        assert answers == [None]


def test_an_unreachable_engine_is_one_sentence(tmp_path, capsys, monkeypatch):
    store = open_store(str(tmp_path / "probes"))
    monkeypatch.setattr(probes, "SECONDS", 0.3)

    async def ask():
        async with EngineClient(["http://127.0.0.1:9"]) as client:
            asker = probes.ProbeScorer(store, probes.ProbeSequences(ids=([3, 4],)), client)
            asker.served("http://127.0.0.1:9", 3)
            await asyncio.gather(*asker._asking.values())

    asyncio.run(ask())
    said = capsys.readouterr().err
    assert said.startswith("the logprob probes of version 3 were not scored at http://127.0.0.1:9")
    assert said.count("\n") == 1
    assert store.list() == []


def test_a_continued_run_forgets_the_answers_of_engines_that_are_gone(tmp_path):
    run, config = new_run(tmp_path)
    sequences = begin_probes(run)
    model = load_model(config.model.path)
    answer(run, Engine(model, version=2))
    store = open_store(str(run / "probes"))
    assert store.list() == ["00000002/0000.msgpack", "sequences.msgpack"]
    begin_probes(run)
    assert store.list() == ["sequences.msgpack"]
    assert [list(ids) for ids in probes.read_probe_sequences(store)] == sequences
    probes.reset_probes(store, probes.ProbeSequences(ids=()))
    trainer = TrainerProbes(store, model, exactly=False)
    trainer.score(2)
    assert (trainer.arrived(), trainer.seconds()) == ([], 0.0)


def test_an_answer_that_is_no_number_is_as_wrong_as_can_be(tmp_path):
    run, config = new_run(tmp_path)
    begin_probes(run, count=1, tokens=3)
    store = open_store(str(run / "probes"))
    trainer = TrainerProbes(store, load_model(config.model.path), exactly=False)
    trainer.score(0)
    scored = probes.SequenceScores(version=0, digest="", logprobs=([float("nan"), -1.0],))
    probes.write_result(store, 0, probes.ProbeResult(engine="http://e", scored=scored))
    (found,) = trainer.arrived()
    assert found.k2 > 100
    assert json.dumps(found.k2)


def test_limits_of_an_engine_are_in_its_configuration(tmp_path):
    from etude.inference.engine.configuration import configuration, digest_of
    from etude.rollout.engines import engine_differences, precision_warnings

    _, config = new_run(tmp_path)
    model = load_model(config.model.path)
    one, same, other = (configuration(Engine(model, EngineConfig(max_batch=n))) for n in (4, 4, 8))
    assert (one["head"], one["log_softmax"], one["dtype"]) == ("float32", "float32", "float32")
    assert digest_of(one) == digest_of(same) != digest_of(other)
    assert (
        engine_differences({"http://a": one, "http://b": same})
        == precision_warnings({"http://a": one, "http://b": same})
        == []
    )
    (said,) = engine_differences({"http://a": one, "http://b": same, "http://c": other})
    assert said == "the engine at http://c is not configured as that at http://a: max_batch is 8, not 4"
    (said,) = precision_warnings({"http://a": one | {"head": "narrower than float32"}})
    assert said.startswith("the engine at http://a is not float32 where log-probabilities are made: head is narrower")


def test_versions_at_a_learning_rate_of_zero_are_one(tmp_path):
    """G10: three steps with real gradients, each published, received by an engine over deltas and measured there."""
    run, config = new_run(tmp_path, trainer={"lr": 0.0, "warmup_steps": 0}, guards={"min_tokens": 16})
    begin_probes(run)
    trainer, store = Trainer(run), open_store(str(run / "weights"))
    engine = Engine(load_model(config.model.path), version=-1)
    receiver = Receiver(store, named_tensors(engine.model))
    for version in range(3):
        receiver.apply(receiver.poll())
        engine.version = receiver.version
        answer(run, engine)
        admit(run, config, version, version, play(engine, version))
        step(trainer)
    assert len({m.digest for m in manifests(store)}) == 1
    lines = runfolder.read_jsonl(run / "metrics.jsonl")
    assert all(line["optim/grad_norm"] > 0 and line["optim/updates"] == 1 for line in lines), "else nothing was tried"
    assert [a["version"] for line in lines for a in line["probe/answers"]] == [0, 1, 2]
    # The same sequences, weights and passes: the same rounding of float32, to the bit.
    assert len({line["probe/k2"] for line in lines}) == 1
    assert max(line["mismatch/k2"] for line in lines) < 1e-9
    assert not any("guard/events" in line for line in lines)
