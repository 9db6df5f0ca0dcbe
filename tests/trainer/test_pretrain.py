"""The stages on a model of a few thousand parameters and the rows of a few functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.make_nano.__main__ import make
from pydantic import ValidationError

from etude.corpus import SPECIAL_IDS, packing
from etude.corpus.filters import function_texts
from etude.corpus.sources import File
from etude.errors import UserError
from etude.trainer.finetune import config as pretrain_config
from etude.trainer.finetune import packed, pretrain, training_loop
from etude.trainer.finetune.config import MidtrainConfig, NewModelConfig, OptimConfig, SftConfig
from tests.helpers.folders import state_of

CODE = "\n\n\n".join(
    f"def f{i}(items, low={i}):\n    total = 0\n    for item in items:\n        if item > low:\n"
    f"            total += item\n    return total - low"
    for i in range(30)
)
MODEL = NewModelConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, head_dim=16, expert_size=16,
    experts=4, max_positions=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m models.make_nano` writes, of a few functions."""
    folder = tmp_path_factory.mktemp("nano")
    found = list(function_texts(File("demo", "demo/sums.py", CODE)))
    make(found[:-4], found[-4:], folder, shape=MODEL, most=60)
    return folder


def _optim(**changes: object) -> OptimConfig:
    values = {"tokens": 40_000, "batch": 4, "length": 128, "lr": 5e-3, "compile": False, "threads": 1, "log_every": 1}
    return OptimConfig.model_validate({**values, **changes})


def _config(kind: type[MidtrainConfig | SftConfig], model: Path, rows: Path, **changes: object) -> Any:
    data = {"files": [rows], "epochs": 100}
    return kind.model_validate({"seed": 3, "model": {"path": model}, "data": data, "trainer": _optim(**changes)})


def _losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["loss/token"] for row in rows if "loss/token" in row]


def test_midtrain_then_sft_lower_the_loss_and_give_a_loadable_model(made: Path, tmp_path: Path) -> None:
    config = _config(MidtrainConfig, made / "new", made / "midtrain.jsonl")
    folder = pretrain.midtrain(config, tmp_path / "mid")
    losses = _losses(tmp_path / "mid")
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    config = _config(SftConfig, folder, made / "sft.jsonl", tokens=20_000, lr=3e-3)
    tuned = pretrain.sft(config, tmp_path / "sft")
    after = _losses(tmp_path / "sft")
    assert np.mean(after[-5:]) < 0.8 * after[0]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tuned)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tuned).eos_token_id == SPECIAL_IDS["<|end|>"]


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
def test_interrupted_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    made: Path, tmp_path: Path, stage: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run, kind = (pretrain.midtrain, MidtrainConfig) if stage == "midtrain" else (pretrain.sft, SftConfig)
    config = _config(kind, made / "new", made / f"{stage}.jsonl", tokens=6_000)
    run(config, whole)
    run(config, parts, stop_after=4)
    run(config, parts, resume=True)
    one, two = state_of(whole), state_of(parts)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert _losses(whole) == _losses(parts)
    assert len(_losses(whole)) > 4


def test_run_folder_is_not_reused_and_resume_needs_a_state(made: Path, tmp_path: Path) -> None:
    config = _config(MidtrainConfig, made / "new", made / "midtrain.jsonl", tokens=2_000)
    with pytest.raises(UserError, match="no saved state"):
        pretrain.midtrain(config, tmp_path / "run", resume=True)
    pretrain.midtrain(config, tmp_path / "run", stop_after=1)
    with pytest.raises(UserError, match="already holds a run"):
        pretrain.midtrain(config, tmp_path / "run")
    with pytest.raises(UserError, match="not a model folder"):
        pretrain.sft(_config(SftConfig, tmp_path / "nothing", made / "sft.jsonl"), tmp_path / "sft")


def test_loss_counts_only_labelled_targets(tmp_path: Path) -> None:
    """The gathered loss equals the plain one over all logits with unlabelled targets ignored."""
    model = pretrain.new_model(MODEL, 0).float()
    generator = np.random.default_rng(0)
    starts = np.zeros((4, 24), dtype=np.uint8)
    starts[:, 0] = 1
    ids, mask = generator.integers(32, 320, (4, 24)).astype(np.uint32), generator.integers(0, 2, (4, 24))
    rows = packing.Rows(ids, mask.astype(np.uint8), starts)
    (batch,) = packed.PackedSteps.of(rows, _optim(), "crossing", 1)[0]
    loss, balance, load_LE, _ = packed.loss_function(model)(batch)
    ids_BT = torch.from_numpy(rows.ids.astype(np.int64))
    targets_BT = torch.where(torch.from_numpy(rows.mask) > 0, ids_BT, -100)[:, 1:]
    logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    # Same float32 sums in another order.
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert load_LE.shape == (1, MODEL.experts)
    assert float(load_LE.sum()) == pytest.approx(1.0)
    assert float(balance.detach()) > 0.9


def test_schedule_warms_up_stays_and_decays_to_zero() -> None:
    config = _optim(lr=1.0, warmup=0.1, decay=0.5)
    rates = [training_loop.learning_rate(config, p) for p in (0.0, 0.05, 0.1, 0.4, 0.75, 1.0)]
    assert rates == pytest.approx([0.02, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_master_weights_keep_updates_smaller_than_bfloat16_can_hold() -> None:
    model = pretrain.new_model(MODEL, 0)
    optimizer = training_loop.optimizer_of(model, _optim(weight_decay=0.0))
    name, live = next(iter(model.named_parameters()))
    before = optimizer.state()[f"master/{name}"].clone()
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.collect()
        optimizer.apply(1e-6)
    after = optimizer.state()[f"master/{name}"]
    # Adam's step is the learning rate itself when every gradient is equal.
    assert torch.allclose(before - after, torch.full_like(before, 3e-6), atol=1e-7)
    assert torch.equal(live, after.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('stage = "other"\n', "stage must be one of"),
        ('stage = "midtrain"\nname = "x"\nspeed = 1\n', "speed"),
        ('stage = "midtrain"\nname = "x"\nmodel.path = "nano"\n', "data"),
        ('stage = "sft"\nname = "x"\n', "model"),
        ('stage = "sft"\nname = "x"\nmodel.path = "nano"\n', "give the files to learn from"),
    ],
)
def test_bad_configuration_is_refused(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(table)
    with pytest.raises((ValueError, ValidationError), match=message):
        pretrain_config.load(path)


@pytest.mark.parametrize("name", ["midtrain", "sft", "repair", "retry"])
def test_recipes_learn_the_rows_that_are_made_for_them(name: str, made: Path) -> None:
    data = pretrain_config.load(Path(__file__).parents[2] / f"models/nano/recipes/{name}.toml").data
    assert data is not None
    assert [path.as_posix() for path in data.files] == [f"outputs/nano/{name}.jsonl"]
    assert [path.as_posix() for path in data.held_out] == [f"outputs/nano/held-out-{name}.jsonl"]
    assert (made / f"{name}.jsonl").is_file()
    assert (made / f"held-out-{name}.jsonl").is_file()
