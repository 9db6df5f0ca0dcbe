"""What an earlier attempt of a run has left for the next."""

import tomllib

import msgspec
import pytest

from etude.config import FleetConfig, RLConfig, validate
from etude.errors import UserError
from etude.evals.stats import Estimate
from etude.evals.suite import EvalResult
from etude.run.jobs import RunFleet
from etude.run.launch import FASTER, measured, step_seconds, train_rl
from tests.run.test_run import CONFIG

RESULT = EvalResult(
    split="heldout", seed=1, samples=1, seconds=2.0, tasks=(), pass_1=Estimate(0.5, 0.4, 0.6), pass_k={1: 0.5},
    outcomes={"scored": 2}, retries=0, stops={}, behaviour={},
)  # fmt: skip


@pytest.mark.parametrize(("when", "cure"), [("before", "or start a new run"), ("after", "delete it")])
def test_a_damaged_measurement_is_named(tmp_path, when, cure):
    """Before the training it can't be made again: the weights are others now."""
    path = tmp_path / f"eval-{when}.json"
    whole = msgspec.json.encode(RESULT)
    path.write_bytes(whole)
    assert measured(path) == RESULT
    for data in (whole[: len(whole) // 2], b"", b"\xff" + whole, b"[]", whole.replace(b'"seed":1', b'"seed":"x"')):
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"eval-{when}\.json is damaged \(.*{cure}"):
            measured(path)


def test_the_time_of_a_step_follows_the_pace_of_the_evaluation():
    """40 episodes in 20 seconds: a step of 64 episodes takes as many half seconds, less what groups share."""
    rollout = {"prompts": 4, "group": 16}
    config = validate(RLConfig, {"tasks": {"repository": "here"}, "rollout": rollout}, "run.toml")
    before = msgspec.structs.replace(RESULT, seconds=20.0, outcomes={"scored": 38, "timeout": 2})
    assert step_seconds(config, before) == pytest.approx(32 * FASTER)
    assert step_seconds(config, None) is None


def test_a_fleet_that_has_no_place_leaves_no_run(tmp_path, monkeypatch):
    """The mended fleet may have the run's name."""

    def place(*_):
        raise UserError("no head of Ray answers")

    monkeypatch.setattr(RunFleet, "place", place)
    config = validate(RLConfig, tomllib.loads(CONFIG), "run.toml")
    fleet = validate(FleetConfig, {"engines": [{"name": "eu"}]}, "fleet.toml")
    with pytest.raises(UserError, match="no head of Ray"):
        train_rl(config, tmp_path / "run", resume=False, toml=None, fleet=fleet)
    assert not (tmp_path / "run").exists()
