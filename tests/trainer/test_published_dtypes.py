"""Versions have the types of their checkpoint, so the engine computes with the trainer's numbers."""

from pathlib import Path

import pytest
import torch

from etude.config import WeightSource
from etude.inference.engine.engine import Engine
from etude.inference.server.weights import WeightWatcher
from etude.models.dtypes import main_dtype, published_dtypes, round_to
from etude.models.experts import observe
from etude.models.loading import load_model, named_tensors
from etude.store import open_store
from etude.trainer.rl.process import Trainer
from etude.weights.export import advance, export
from etude.weights.manifest import newest_manifest
from etude.weights.payloads import DamagedVersion
from etude.weights.receiver import Receiver
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import admit, new_run, play, step

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def following(folder, config, *, dtype=torch.float32):
    """The watcher of an engine as `server.run` makes it, on the store of the run, not started."""
    model = load_model(config.model.path, dtype=dtype)
    source = WeightSource(weights=f"{folder}/weights", trainer_dtype=config.trainer.dtype)
    types = published_dtypes(Path(config.model.path), model, getattr(torch, source.trainer_dtype))
    round_to(model, types)
    return WeightWatcher(Engine(model, routes=True), source, types=types)


def caught_up(watcher):
    """The watcher after its receiver has taken the newest version."""
    receiver = watcher._receiver
    receiver.apply(receiver.poll())
    return watcher


def routes(model, ids):
    with torch.no_grad(), observe() as choices:
        model.get_decoder()(input_ids=ids, use_cache=False)
    return choices.stacked()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_router_biases_stay_float32(tmp_path, dtype):
    """10,240 tokens take the same experts in trainer and engine, before version 0 is fetched and after a step. With the
    biases rounded to bfloat16, some hundred of them take others."""
    folder, config = new_run(tmp_path, "glm", stored=torch.bfloat16, trainer={"dtype": dtype, "lr": 1e-3})
    trainer = Trainer(folder)
    watcher = following(folder, config, dtype=getattr(torch, dtype))
    manifest = newest_manifest(open_store(f"{folder}/weights"))
    assert watcher.live_digest() == manifest.digest, "the folder is version 0"
    assert caught_up(watcher).live_digest() == manifest.digest
    bias = trainer.learner.optimizer.published()[BIAS]
    assert bias.dtype == torch.float32
    assert len(bias.unique()) > len(bias.bfloat16().unique()), "rounding would merge some"
    admit(folder, config, 0, 0, play(watcher._engine, 0))
    step(trainer)
    caught_up(watcher)
    assert watcher.live_digest() == newest_manifest(open_store(f"{folder}/weights")).digest
    ids = torch.randint(7, 97, (20, 512), generator=torch.Generator().manual_seed(0))
    model = trainer.learner.model.eval()
    assert torch.equal(routes(model, ids), routes(watcher._engine.model, ids))
    model.get_buffer(BIAS).data = bias.bfloat16().float()
    assert not torch.equal(routes(model, ids), routes(watcher._engine.model, ids)), "the test would find rounded biases"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float32_checkpoint_is_trained_and_served(tmp_path, dtype):
    """Published in float32, or in bfloat16 by a trainer that computes in it: then version 0 is the folder, rounded."""
    folder, config = new_run(tmp_path, stored=torch.float32, trainer={"dtype": dtype, "lr": 1e-3})
    trainer, watcher = Trainer(folder), following(folder, config)
    store = open_store(f"{folder}/weights")
    assert {str(t.dtype) for t in trainer.learner.optimizer.published().values()} == {f"torch.{dtype}"}
    assert watcher.live_digest() == newest_manifest(store).digest
    caught_up(watcher)
    for version in range(2):
        admit(folder, config, version, version, play(watcher._engine, version))
        step(trainer)
        assert caught_up(watcher).live_digest() == newest_manifest(store).digest != watcher.served.digest
    live = named_tensors(watcher._engine.model)
    assert all(torch.equal(t.float(), live[name]) for name, t in trainer.learner.optimizer.published().items())
    resumed = Trainer(folder)
    assert resumed.version == 2
    if dtype == "float32":
        export(store, 1, Path(config.model.path), tmp_path / "one")
        assert advance(store, tmp_path / "one", 2, tmp_path / "two") == 1
        assert (
            weights_digest(named_tensors(load_model(tmp_path / "two")), torch.float32) == newest_manifest(store).digest
        )
        with pytest.raises(DamagedVersion, match=r"in float32, which this engine would round to bfloat16"):
            Receiver(store, named_tensors(load_model(config.model.path, dtype=torch.bfloat16))).poll()


def test_the_types_of_a_folder(tmp_path):
    """Names are those that transformers gives while it loads: MiniMax's biases have another in the file."""
    folder = save_random_model(tmp_path / "minimax", "minimax")
    assert main_dtype(folder) == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder, dtype=dtype)
        types = published_dtypes(folder, model, dtype)
        wide = {name for name, kind in types.items() if kind == torch.float32}
        assert wide == {f"model.layers.{i}.mlp.e_score_correction_bias" for i in range(3)}
        assert all(named_tensors(model)[name].dtype == torch.float32 for name in wide)
