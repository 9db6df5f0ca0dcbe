"""The kernels that stand in for norms and rotations: the same bits, or not in place."""

import sys

import pytest
import torch
from tests.models.tiny import random_model
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from etude.models import shortcuts

KINDS = ("moe", "qwen3", "llama")


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_same_bits_with_the_kernels(kind: str) -> None:
    model = random_model(kind, hidden_size=96)
    ids = torch.randint(0, 97, (1, 37), generator=torch.Generator().manual_seed(1))
    code = sys.modules[type(model).__module__]
    stock = getattr(code.apply_rotary_pos_emb, "__wrapped__", code.apply_rotary_pos_emb)
    code.apply_rotary_pos_emb = stock  # whatever another test has installed
    with torch.inference_mode():
        plain = model(input_ids=ids, use_cache=False).logits
        shortcuts.install(model)
        assert all("forward" in vars(norm) for norm in norms_of(model))
        assert code.apply_rotary_pos_emb.__wrapped__ is stock
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("size", [32, 64, 480, 512, 544, 1024, 1536, 4096])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_norms_of_all_sizes_are_summed_as_pytorch_sums(size: int, rows: int) -> None:
    norm = LlamaRMSNorm(size)
    torch.manual_seed(size + rows)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(1, rows, size) * torch.tensor([1e-6, 1.0, 1e6])[torch.arange(rows) % 3, None]
        expected = norm(x)
        shortcuts.install(norms(norm))
        assert "forward" in vars(norm)
        assert torch.equal(norm(x), expected)


def norms(*modules: nn.Module) -> nn.Module:
    """A model that has these modules beside its own."""
    model = random_model("llama")
    model.extra = nn.ModuleList(modules)
    return model


def test_another_formula_or_width_stays() -> None:
    other, narrow = GemmaRMSNorm(64), LlamaRMSNorm(48)
    other.variance_epsilon = other.eps  # by its names it could be ours
    with torch.no_grad():
        other.weight.normal_()
    shortcuts.install(norms(other, narrow))
    assert "forward" not in vars(other)
    assert "forward" not in vars(narrow)


def test_gradients_are_those_of_the_model_itself() -> None:
    ids = torch.arange(20)[None]
    gradients = []
    for installed in (False, True):
        model = random_model("qwen3", hidden_size=96)
        if installed:
            shortcuts.install(model)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
