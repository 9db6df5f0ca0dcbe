"""`etude doctor mismatch` on runs whose episodes a real engine sampled, with one fault injected into each."""

import json
import shutil
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from etude import runfolder
from etude.audit import mismatch
from etude.audit.rescoring import chosen, logits, set_weights
from etude.cli.main import main
from etude.errors import UserError
from etude.inference.engine import cache
from etude.models import gemm
from etude.models.loading import load_model
from etude.records import Outcome, StopReason
from etude.store import open_store
from etude.weights.content import load
from tests.helpers.trainer_runs import edited, engine_of, flip, keep, new_run, play, publish_versions

STALE_GROUP = 90  # trained on by version 3, from the weights of version 2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    run, config = new_run(tmp_path_factory.mktemp("base"))
    publish_versions(run, config, 4, {3: (STALE_GROUP,)})
    return run, config


@pytest.fixture
def case(base, tmp_path):
    """A copy of the base run, its versions, and a way to diagnose what is put into it."""
    source, config = base
    run = tmp_path / "run"
    shutil.copytree(source, run)
    store = open_store(str(run / "weights"))

    def diagnosis(episodes):
        keep(run, episodes)
        return mismatch.diagnose(run, pieces=8)

    return SimpleNamespace(
        run=run,
        config=config,
        tensors=lambda version: load(store, version)[1],
        engine=lambda tensors, version=2: engine_of(config, tensors, version),
        diagnosis=diagnosis,
    )


def two_groups(engine, **options):
    return play(engine, 1, **options) + play(engine, 2, **options)


def test_a_healthy_run(case, capsys):
    found = case.diagnosis(two_groups(case.engine(case.tensors(2))))
    assert found.cause == "healthy", found
    assert found.k2_tagged < mismatch.FLOOR["float32"]
    assert found.wrong_draws < mismatch.WRONG_DRAWS
    assert found.tokens == 240
    with pytest.raises(SystemExit) as end:
        main(["doctor", "mismatch", str(case.run), "--json"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cause"] == "healthy"


def test_an_engine_that_serves_stale_weights(case):
    found = case.diagnosis(two_groups(case.engine(case.tensors(0))))
    assert found.cause == "weights", found
    assert "2 version(s) older" in found.sentence


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_one_tensor_left_behind(case, name):
    found = case.diagnosis(two_groups(case.engine(case.tensors(2) | {name: case.tensors(1)[name]})))
    assert found.cause == "weights", found
    assert name in found.sentence


def test_one_tensor_that_no_version_ever_had(case):
    tensors = case.tensors(2)
    name = "model.layers.1.self_attn.o_proj.weight"
    wrong = tensors[name] + 0.05 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    found = case.diagnosis(two_groups(case.engine(tensors | {name: wrong})))
    assert found.cause == "weights", found
    assert "no published version explains them" in found.sentence


def test_text_that_was_tokenised_again(case):
    """In every other episode one sampled token has become two, whose log-probabilities add up to its own."""
    episodes = two_groups(case.engine(case.tensors(2)))
    for i in range(0, 8, 2):
        ids, mask, logprobs, versions = episodes[i].segments[0].arrays()
        at = 24 + 10 + i
        pair = (np.array([(ids[at] - 7 + 1) % 90 + 7, (ids[at] - 7 + 5) % 90 + 7], "<i4"), logprobs[[at, at]] / 2)
        episodes[i] = edited(
            episodes[i],
            ids=np.concatenate([ids[:at], pair[0], ids[at + 1 :]]),
            mask=np.append(mask, np.uint8(1)),
            logprobs=np.concatenate([logprobs[:at], pair[1], logprobs[at + 1 :]]).astype("<f4"),
            versions=np.append(versions, versions[-1:]),
        )
    found = case.diagnosis(episodes)
    assert found.cause == "tokens", found
    assert "4 episode(s) were replaced" in found.sentence


@pytest.mark.parametrize(("option", "value"), [("temperature", 0.9), ("top_p", 0.9)])
def test_other_sampling_parameters_in_the_engine(case, option, value):
    found = case.diagnosis(two_groups(case.engine(case.tensors(2)), **{option: value}))
    assert found.cause == "tokens", found
    assert f"{option} {value:g}" in found.sentence


def test_drawn_at_one_temperature_and_recorded_at_another(case):
    episodes = two_groups(case.engine(case.tensors(2)), temperature=0.8)
    model = load_model(case.config.model.path)
    set_weights(model, case.tensors(2))
    for i, e in enumerate(episodes):
        (piece,) = mismatch._pieces(e)
        logprobs = e.segments[0].arrays()[2].copy()
        logprobs[piece.at_N] = chosen(logits(model, piece), piece)
        episodes[i] = edited(e, logprobs=logprobs)
    found = case.diagnosis(episodes)
    assert found.cause == "tokens", found
    assert "drawn at temperature 0.8 and recorded at 1" in found.sentence


def test_a_head_in_bfloat16_on_one_side(case, monkeypatch):
    def narrow(hidden, weight):
        return torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16()).float()

    monkeypatch.setattr(gemm, "head", narrow)
    found = case.diagnosis(two_groups(case.engine(case.tensors(2))))
    assert found.cause == "kernel", found
    assert "head" in found.sentence


def test_a_prefix_cache_that_outlives_a_swap(case, monkeypatch):
    engine = case.engine(case.tensors(1), 1)
    two_groups(engine)  # fills the cache with version 1's keys and values
    monkeypatch.setattr(cache.CacheNode, "usable", lambda node, version, session: True)
    set_weights(engine.model, case.tensors(2))
    engine.version = 2
    found = case.diagnosis(two_groups(engine))
    assert engine.counters.cached_tokens > 0
    assert found.cause == "cache", found
    assert "1 version(s) older" in found.sentence


def test_an_infrastructure_failure_scored_as_zero(case):
    episodes = two_groups(case.engine(case.tensors(2)))
    lost = {"segments": (), "stop_reason": StopReason.ERROR, "detail": "EngineError: gone", "reward": 0.0}
    episodes[3] = msgspec.structs.replace(episodes[3], outcome=Outcome.SCORED, **lost)
    found = case.diagnosis(episodes)
    assert found.cause == "infra", found
    assert "1-3-0 with reward 0: EngineError: gone" in found.sentence
    episodes[3] = msgspec.structs.replace(episodes[3], outcome=Outcome.INFRA)
    assert case.diagnosis(episodes).cause == "healthy", "the same failure, typed as what it is"


def test_a_mask_that_is_shifted_by_one(case):
    episodes = two_groups(case.engine(case.tensors(2)))
    episodes[2] = edited(episodes[2], mask=np.roll(episodes[2].segments[0].arrays()[1], -1))
    found = case.diagnosis(episodes)
    assert (found.cause, "1-2-0" in found.sentence) == ("tokens", True), found


def test_staleness_is_told_from_a_fault(case):
    found = case.diagnosis(play(case.engine(case.tensors(0), 0), STALE_GROUP))
    assert found.cause == "staleness", found
    assert found.k2_tagged < mismatch.FLOOR["float32"]
    assert found.shares["staleness"] == pytest.approx(1.0, abs=1e-3)


def test_a_run_without_episodes_is_one_sentence(case):
    with pytest.raises(UserError, match="holds no episodes"):
        mismatch.diagnose(case.run)
    with pytest.raises(UserError, match="holds no run"):
        mismatch.diagnose(case.run / "nowhere")


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """A run of a mixture of experts whose engine takes other experts than the trainer would, and its episodes."""
    run, config = new_run(tmp_path_factory.mktemp("moe"), "moe", trainer={"router_replay": True})
    publish_versions(run, config, 3, {})
    engine = engine_of(config, load(open_store(str(run / "weights")), 2)[1], 2)
    flip(engine.model)
    episodes = two_groups(engine, routes=True)
    assert all(e.segments[0].routes is not None for e in episodes)
    return run, episodes


@pytest.fixture
def replay_case(routed, tmp_path):
    """Diagnoses episodes of that run, with the trainer's replay on or off."""
    source, episodes = routed

    def diagnosis(changed, replay):
        run = tmp_path / f"run-{replay}"
        shutil.copytree(source, run)
        path = run / "config.json"
        config = json.loads(path.read_text())
        config["trainer"]["router_replay"] = replay
        path.write_text(json.dumps(config))
        keep(run, changed)
        return mismatch.diagnose(run, pieces=8)

    return episodes, diagnosis


def with_routes(episode, change):
    segment = episode.segments[0]
    return msgspec.structs.replace(episode, segments=(msgspec.structs.replace(segment, routes=change(segment.routes)),))


def test_dropped_replay_is_named(replay_case):
    episodes, diagnosis = replay_case
    assert diagnosis(episodes, True).cause == "healthy"
    found = diagnosis(episodes, False)
    assert (found.cause, found.k2_tagged > 1e-4) == ("routing", True), found
    assert "the recorded experts are not replayed" in found.sentence
    assert "router_replay = true" in found.action


def test_episodes_whose_routes_were_lost(replay_case):
    episodes, diagnosis = replay_case
    found = diagnosis([*episodes[:5], *(with_routes(e, lambda _: None) for e in episodes[5:])], True)
    assert found.cause == "routing", found
    assert "3 of 8 episodes" in found.sentence


def test_routes_that_belong_to_other_tokens(routed, replay_case):
    """The engine's routers are the trainer's here, and the ids are turned by one token: only own routes fit."""
    run, _ = routed
    _, diagnosis = replay_case
    config = runfolder.load_config(run)
    episodes = two_groups(engine_of(config, load(open_store(str(run / "weights")), 2)[1], 2), routes=True)

    def turned(routes):
        return msgspec.structs.replace(routes, ids=np.roll(np.frombuffer(routes.ids, "u1"), 4).tobytes())

    found = diagnosis([with_routes(e, turned) for e in episodes], True)
    assert found.cause == "routing", found
    assert "not those that the engine took" in found.sentence
