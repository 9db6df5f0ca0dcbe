"""Multimodal folders: the text model inside is computed, trained, published and written, and the rest stays."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from etude.audit.architectures import table
from etude.models import support
from etude.models.loading import load_config, load_model, named_tensors
from etude.models.lora import adapted_layers
from etude.models.text_models import tensors_beside
from etude.store import open_store
from etude.trainer.finetune import folder as stage_folder
from etude.trainer.rl.pass_sizes import on_meta
from etude.weights.export import _targets, export
from etude.weights.publisher import Publisher
from tests.helpers.multimodal import MULTIMODAL, write_multimodal


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_model_is_exact_in_rows_shared_prompts_and_engine(kind, tmp_path):
    row = table.examine(kind, write_multimodal(tmp_path / "m", kind), support.USES)
    assert {use: (cell.state, cell.said) for use, cell in row.cells.items()} == dict.fromkeys(
        support.USES, ("exact", "")
    )


def whole(folder):
    return AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_version_is_text_and_its_folder_is_whole(kind, tmp_path):
    """Published are the tensors of text alone, under the names of the whole; the written folder has all, and plain
    transformers loads it."""
    base = write_multimodal(tmp_path / "base", kind)
    model = load_model(base, dtype=torch.bfloat16)
    live = named_tensors(model)
    assert live
    assert not any("vis" in name for name in live)
    assert live.keys() <= dict(whole(base).named_parameters()).keys()
    assert {name: p.shape for name, p in on_meta(load_config(base), torch.bfloat16).named_parameters()} == {
        name: p.shape for name, p in model.named_parameters()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    Publisher(store := open_store(str(tmp_path / "weights"))).publish(0, live, (), {})
    export(store, 0, base, tmp_path / "out")
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    stage_folder.save(tmp_path / "stage", model, masters, stage_folder.types_of(base, model), base)
    before = whole(base).state_dict()
    for written in ("out", "stage"):
        after = whole(tmp_path / written).state_dict()
        for name, tensor in before.items():
            moved = (tensor.bfloat16() + 0.125 if name in live or name == "lm_head.weight" else tensor).float()
            assert torch.equal(after[name], moved), name


def test_adapters_are_of_text_alone(tmp_path):
    base = write_multimodal(tmp_path / "m", "mistral3")
    model = load_model(base)
    layers = adapted_layers(model, ["q_proj"])
    assert len(layers) == 2
    assert all(".language_model." in name for name in layers)
    assert _targets(model, layers) == {"target_modules": layers}  # "q_proj" alone would mean the encoder's, too
    assert all("vision" in name or "projector" in name for name in tensors_beside(base, model))


def test_rows_of_a_trial_have_no_ids_of_images(tmp_path):
    config = load_config(write_multimodal(tmp_path / "m", "gemma4"))
    ids = np.concatenate([np.concatenate(support.trial_rows(config, seed)) for seed in range(20)])
    assert ids.max() == 89
    assert ids.min() == 0
