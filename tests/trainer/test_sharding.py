"""What `sharding` relies on in transformers and FSDP2, on four ranks; and one process, which does without all of it."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from etude.config import TrainerConfig
from etude.errors import UserError
from etude.models.loading import load_model
from etude.trainer import checkpoint
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.plan import TokenRows, rows
from etude.trainer.rl.process import Trainer
from etude.trainer.sharding import first_row, load_sharded, local
from etude.trainer.world import World
from tests.helpers import forked_ranks
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import admit, engine_of, new_run, play, step
from tests.trainer.test_ranks import world_with

PLACED = {  # by mesh (replicate, shard, expert, context): kinds of placements of experts, and of other tensors
    (1, 4, 1, 1): (("Shard",), ("Shard",)),
    (1, 4, 2, 1): (("_StridedShard", "Shard"), ("Shard",)),
    (1, 4, 4, 1): (("_StridedShard", "Shard"), ("Shard",)),
    (2, 2, 1, 1): (("Replicate", "Shard"), ("Replicate", "Shard")),
}


def score(model):
    """Log-probabilities of some tokens."""
    tokens = TokenRows((np.arange(7, 27),), (np.arange(1, 20),))
    return evaluate(model, rows(tokens), tokens.count).logprobs_N.numpy()


def divided_models(folder, odd):
    """For each mesh, what a rank has."""
    outcome = {}
    for sizes in PLACED:
        world = world_with(sizes)
        model = load_sharded(folder, torch.float32, world)
        held = {
            name: (tuple(type(x).__name__ for x in p.placements), first_row(p), local(p).detach().numpy().copy())
            for name, p in model.named_parameters()
        }
        experts = [m for m in model.modules() if getattr(m, "_is_expert_parallel", False)]
        before = score(model)
        with torch.no_grad():
            local(model.get_input_embeddings().weight).mul_(1.5)
        outcome[sizes] = {
            "held": held,
            "types": {type(p) for p in model.parameters()} == {DTensor},
            "fsdp": isinstance(model, FSDPModule),
            "replica": world.replica,
            "experts": [m.num_experts for m in experts],
            "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            "scores": (before, score(model)),
        }
    try:
        load_sharded(odd, torch.float32, world_with((1, 4, 1, 1)))
    except UserError as e:
        outcome["refused"] = str(e)
    dist.barrier()
    return outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_random_model(tmp_path_factory.mktemp("model") / "moe", num_hidden_layers=2, initializer_range=0.05))


@pytest.fixture(scope="module")
def ranks(folder, tmp_path_factory):
    odd = save_random_model(tmp_path_factory.mktemp("odd") / "moe", num_experts=3, num_hidden_layers=2)
    return forked_ranks.run(divided_models, 4, folder, str(odd))


@pytest.mark.parametrize("sizes", PLACED, ids=str)
def test_ranks_hold_the_rows_that_their_placements_say(ranks, folder, sizes):
    """`from_pretrained(distributed_config=)` gives DTensors, whose rows are those of the file, each once per copy."""
    held, whole = [rank[sizes] for rank in ranks], dict(load_model(folder).named_parameters())
    assert all(rank["fsdp"] and rank["types"] for rank in held)
    for name, tensor in whole.items():
        kinds = PLACED[sizes][0 if ".experts." in name else 1]
        covered = {}
        for rank in held:
            placements, first, own = rank["held"][name]
            assert placements == kinds, name
            assert np.array_equal(own, tensor.detach().numpy()[first : first + len(own)]), name
            covered.setdefault(rank["replica"], []).extend(range(first, first + len(own)))
        assert all(sorted(rows_of_copy) == list(range(len(tensor))) for rows_of_copy in covered.values()), name


def test_experts_are_marked_and_counted_by_rank(ranks):
    for rank in ranks:
        assert rank[1, 4, 2, 1]["experts"] == [4]
        assert rank[1, 4, 4, 1]["experts"] == [2]
        assert not rank[1, 4, 1, 1]["experts"]


def test_a_pass_sees_updated_rows_of_tied_embeddings_and_head(ranks, folder):
    """The head is gathered from the same rows: a copy of its own would be stale after an update."""
    alone = load_model(folder)
    before = score(alone)
    with torch.no_grad():
        alone.get_input_embeddings().weight.mul_(1.5)
    after = score(alone)
    assert np.abs(before - after).max() > 1e-3
    for sizes in PLACED:
        for rank in ranks:
            assert rank[sizes]["tied"]
            for ours, theirs in zip(rank[sizes]["scores"], (before, after), strict=True):
                assert np.abs(ours - theirs).max() <= 5e-6


def test_a_rank_without_experts_is_refused_on_all_ranks(ranks):
    assert {rank["refused"].partition(": ")[2] for rank in ranks} == {
        "of 4 ranks some would have none of its 3 experts: make trainer.mesh.shard x context a divisor of their number"
    }


def test_the_interface_has_the_fields_that_are_set():
    fields = {field.name for field in dataclasses.fields(DistributedConfig)}
    assert {"dp_replicate_size", "fsdp_size", "ep_size", "fsdp_mixed_precision"} <= fields


def test_a_self_check_is_refused_for_several_ranks():
    with pytest.raises(ValueError, match=r"trainer\.self_check compares passes of one rank, and trainer\.mesh has 2"):
        TrainerConfig.model_validate({"self_check": True, "mesh": {"shard": 2}})


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_has_no_collective_and_no_copy(tmp_path, monkeypatch):
    """A step, a version and a checkpoint. The optimizer's tensors are the model's own; states go to the disk from where
    they are."""
    folder, config = new_run(tmp_path)
    called = []
    for name in dir(dist):
        if callable(getattr(dist, name)) and (
            name.startswith(("all_", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "new_"))
            or name == "init_process_group"
        ):
            monkeypatch.setattr(dist, name, lambda *_, name=name, **__: called.append(name))
    trainer = Trainer(folder)
    admit(folder, config, 0, 0, play(engine_of(config, trainer.learner.optimizer.published(), 0), 0))
    optimizer, model = trainer.learner.optimizer, trainer.learner.model
    step(trainer)
    assert trainer.version == 1
    assert not called
    live = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {name: t.data_ptr() for name, t in optimizer._live.items()} == live
    assert all(optimizer.live[name] is p for name, p in model.named_parameters())
    state = optimizer.state()
    parts = checkpoint.parts_of(state)
    assert all(parts[name].rows.data_ptr() == t.data_ptr() for name, t in state.items() if not name.startswith("step"))
    assert {name: optimizer._master[name].data_ptr() for name in live} == {
        name: state[f"master/{name}"].data_ptr() for name in live
    }
    assert not any(isinstance(t, DTensor) for t in model.parameters())


def test_one_process_loads_the_model_that_load_model_does(folder):
    model = load_sharded(folder, torch.bfloat16, World())
    assert type(model) is type(load_model(folder))
    assert not isinstance(model, FSDPModule)
    assert not hasattr(model, "computed")
    optimizer = for_policy(model, TrainerConfig())
    assert all(optimizer._live[name] is p for name, p in model.named_parameters())
