"""A step of a model of real size on this machine: Qwen3-0.6B's shape, random weights, bfloat16."""

import pytest
import torch
from benchmarks.models import qwen3_600m
from transformers import AutoModelForCausalLM

from etude.config import RLConfig, validate
from etude.models import attention, experts
from etude.records import Group
from etude.trainer.activations import checkpoint_activations
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.finetune.packed import PackedPass, loss_function
from etude.trainer.finetune.training_loop import optimizer_of
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.memory import peak_bytes, reset_peak
from etude.trainer.rl.memory_table import GIB
from etude.trainer.rl.step import Learner, train_step
from tests.trainer.test_batch import episode, segment

LIMIT = 20 * GIB


@pytest.mark.release
def test_an_sft_step_of_a_model_of_600_million_parameters_takes_less_than_20_gib():
    """Two rows of 1,200 tokens, all of them labelled."""
    model = random_model_of_600_million()
    optimizer = optimizer_of(model, OptimConfig(dtype="bfloat16"))
    ids_BT = torch.randint(0, 151_936, (2, 1200))
    index_K = torch.arange(2400).view(2, 1200)[:, :-1].flatten()
    targets_K = ids_BT[:, 1:].flatten()
    part = PackedPass(ids_BT, index_K, targets_K, torch.ones(len(index_K)), torch.tensor(float(len(index_K))))
    reset_peak("cpu")
    loss, *_ = loss_function(model)(part)
    loss.backward()
    assert 0 < optimizer.collect() < float("inf")
    optimizer.apply(1e-3)
    # Random weights: nothing is known of the next token. log 151,936 = 11.93, and logits of their size add some tenths.
    assert loss.item() == pytest.approx(11.93, abs=0.5)
    assert 10 * GIB < peak_bytes("cpu") < LIMIT, "states alone are 10.7"


def random_model_of_600_million():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        qwen3_600m(), dtype=torch.bfloat16, attn_implementation=attention.NAME, experts_implementation=experts.NAME
    ).train()
    checkpoint_activations(model)
    return model


@pytest.mark.release
def test_an_rl_step_of_a_model_of_600_million_parameters_takes_less_than_20_gib():
    """Two episodes of 1,200 tokens with a common prompt; more than a chunk of positions is predicted."""
    tables = {
        "tasks": {"repository": "unused"},
        "rollout": {"prompts": 1, "group": 2, "tokens": 800, "context": 1200},
        "trainer": {"dtype": "bfloat16", "activation_checkpointing": True, "threads": 2, "lr": 1e-3, "warmup_steps": 0},
    }
    config = validate(RLConfig, tables, "test")
    model = random_model_of_600_million()
    learner = Learner(model, for_policy(model, config.trainer))
    prompt = torch.randint(0, 151_936, (400,)).tolist()
    answers = torch.randint(0, 151_936, (2, 800)).tolist()
    group = [episode(i, float(i), [segment(prompt, [(token, 1) for token in ids])]) for i, ids in enumerate(answers)]
    batch = make_batch((Group(id=1, index=0, task_id="t", admitted_version=0, episodes=()),), [group])
    before = model.lm_head.weight.detach()[:1000].clone()
    reset_peak("cpu")
    result = train_step(learner, batch, config, 0, 0.0)
    peak = peak_bytes("cpu")
    assert result.lr == 1e-3
    assert not torch.equal(model.lm_head.weight[:1000], before)
    assert 10 * GIB < peak < LIMIT, "states alone are 10.7"
