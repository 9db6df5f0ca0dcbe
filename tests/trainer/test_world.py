"""The place of a rank by its environment, and what the ranks' models need."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.config import MeshConfig
from etude.errors import UserError
from etude.models.batch_invariant import possible
from etude.models.dtypes import set_computing_dtype
from etude.trainer.rl.step import Learner
from etude.trainer.sharding import wide_parameter
from etude.trainer.world import World
from tests.helpers.tiny_models import random_model


@pytest.mark.parametrize(("environment", "sentence"), [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment: ranks need the numbers"),
    ({}, "RANK is '' in the environment: ranks need the numbers"),
    ({"RANK": "2"}, "RANK is 2 in the environment, and WORLD_SIZE 2"),
    ({"RANK": "1"}, "MASTER_ADDR is missing in the environment"),
    ({"RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is '' in the environment"),
])  # fmt: skip
def test_an_environment_that_torchrun_did_not_make_is_refused(environment, sentence, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=sentence):
        World.join(MeshConfig(shard=2), "cpu", 5)


@pytest.mark.parametrize(("kind", "name"), [("ernie4_5_moe", "model.layers.1.mlp.gate.weight"), ("qwen3", "")])
def test_parameters_that_are_computed_in_float32_are_known(kind, name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=2))
    assert wide_parameter(model) == name


def test_other_weights_take_the_place_of_the_models():
    assert not Learner(None, None).swaps
    assert Learner(None, None, reference=object()).swaps
    assert Learner(None, None, teacher=object()).swaps, "a checkpoint that is being written must not hold a teacher's"


def test_a_divided_model_in_bfloat16_has_not_the_engines_bits():
    """Its rows are float32, and its layers are not."""
    model = random_model("qwen3")
    assert possible(model)
    set_computing_dtype(model, torch.bfloat16)
    assert not possible(model)
