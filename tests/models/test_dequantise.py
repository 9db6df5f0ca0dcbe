"""Folders of FP8 and MXFP4 against transformers' own dequantisation, and what is served of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from etude.audit.architectures.families import FAMILIES, build
from etude.config import EngineConfig
from etude.errors import UserError
from etude.inference.engine.loading import load_engine
from etude.models import dequantise
from etude.models.loading import load_model
from etude.weights import model_folder
from tests.helpers.tiny_models import save_random_model

BLOCK = 16


def quantise(folder, about, change):
    """Applies `change` to each tensor of the folder, which gives the tensors in its place."""
    made = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        made |= change(name, tensor)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": about}))


def blocks(name, tensor):
    """FP8 with a scale for each block of `BLOCK` rows and columns."""
    if not name.endswith("proj.weight"):
        return {name: tensor}
    rows, columns = (size // BLOCK for size in tensor.shape)
    grid = tensor.float().view(rows, BLOCK, columns, BLOCK)
    scale = grid.abs().amax((1, 3)) / 448
    narrow = (grid / scale[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
    return {name: narrow, f"{name}_scale_inv": scale}


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_fp8_blocks_are_as_transformers_dequantises_them(tmp_path, cached, capsys):
    folder = save_random_model(tmp_path / "m", "qwen3")
    quantise(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, blocks)
    plain = model_folder(folder)
    assert "are written in bfloat16, once" in capsys.readouterr().err
    assert model_folder(folder) == plain != folder
    assert not capsys.readouterr().err
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    ).state_dict()
    ours = load_model(plain, dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    load_engine(plain, EngineConfig(cache_mb=8, speculate=False)).close()


@pytest.mark.parametrize("shape", [(), (1,), "rows"])
def test_fp8_with_a_scale_for_a_tensor_or_a_row(shape, tmp_path, cached):
    """As other makers store it: `weight_scale`, and scales of activations, which are dropped."""

    def change(name, tensor):
        if not name.endswith("proj.weight"):
            return {name: tensor}
        scale = (
            tensor.abs().amax(1, keepdim=True) if shape == "rows" else tensor.abs().amax().view(shape)
        ).float() / 448
        narrow, prefix = (tensor.float() / scale).to(torch.float8_e4m3fn), name.removesuffix("weight")
        expected[name] = (narrow.float() * scale).to(torch.bfloat16)
        return {name: narrow, f"{prefix}weight_scale": scale, f"{prefix}input_scale": torch.ones(1)}

    expected = {}
    folder = save_random_model(tmp_path / "m", "llama")
    quantise(folder, {"quant_method": "compressed-tensors", "format": "float-quantized"}, change)
    ours = load_model(model_folder(folder), dtype=torch.bfloat16).state_dict()
    assert expected
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_blocks_that_do_not_divide_a_matrix(tmp_path, cached):
    """The last block is smaller, as in DeepSeek's matrices of 576 rows."""

    def change(name, tensor):
        if not name.endswith("gate_proj.weight"):
            return {name: tensor}
        scale = torch.rand(2, 2)  # 48 x 48 in blocks of 32
        return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}

    folder = save_random_model(tmp_path / "m", "qwen3")
    quantise(folder, {"quant_method": "fp8", "weight_block_size": [32, 32]}, change)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)[:48, :48]
    ours = load_model(model_folder(folder), dtype=torch.bfloat16).state_dict()[name]
    assert torch.equal(ours, (stored[name].float() * scale).to(torch.bfloat16))


def test_mxfp4_experts_are_as_transformers_dequantises_them(tmp_path, cached):
    def change(name, tensor):
        if not name.endswith("_proj"):
            return {name: tensor}
        experts, rows, columns = tensor.shape  # stored the other way round
        shape = experts, columns, rows // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": torch.randint(120, 124, shape, dtype=torch.uint8)}

    torch.manual_seed(0)
    folder = tmp_path / "m"
    build(next(family for family in FAMILIES if family.model_type == "gpt_oss")).to(torch.bfloat16).save_pretrained(
        folder
    )
    quantise(folder, {"quant_method": "mxfp4"}, change)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    ours = load_model(model_folder(folder), dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_scale_for_each_expert():
    weight, scale = torch.ones(3, 4, 8).to(torch.float8_e4m3fn), torch.tensor([1.0, 2.0, 4.0])
    plain = dequantise._plain("experts", weight, scale, [2, 2])
    assert torch.equal(plain, torch.ones(3, 4, 8, dtype=torch.bfloat16) * scale.bfloat16()[:, None, None])
    with pytest.raises(UserError, match="do not fit"):
        dequantise._plain("weight", weight[0], torch.ones(2, 2, 2), None)
