"""The kernels that stand in for norms and rotations: the same bits, or not in place."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from etude.inference.engine import fused
from etude.inference.engine.cache import PagedCache
from etude.inference.engine.forward import logits_of
from etude.models import attention, batch_invariant, gemm
from etude.models.key_values import configured
from tests.helpers.tiny_models import random_model

KINDS = ("moe", "qwen3", "llama")


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


def ours(model: nn.Module, kind: str) -> list[bool]:
    return ["forward" in vars(module) for module in model.modules() if type(module).__name__.endswith(kind)]


def engine_logits(model: nn.Module, sizes: list[int]) -> torch.Tensor:
    """Of one row of tokens, fed in passes of these sizes."""
    cache = PagedCache(
        configured(model.config), num_bytes=2**20, max_length=96, dtype=torch.float32, device=torch.device("cpu")
    )
    table = np.arange(cache.pages_per_sequence, dtype=np.int32)[None]
    ids = np.random.default_rng(1).integers(0, 97, sum(sizes))
    logits, start = [], 0
    for size in sizes:
        position = np.arange(start, start + size)
        slot = np.zeros(size, np.int64)
        logits.append(logits_of(model, cache, table, ids[position], slot, position, np.arange(size)))
        start += size
    return torch.cat(logits)


@pytest.fixture(params=["plain", "exact"])
def mode(request: pytest.FixtureRequest) -> bool:
    return request.param == "exact"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_same_bits_with_the_kernels(kind: str, mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "takes", lambda *_: False)  # their bits are their own, see test_products.py
    model = random_model(kind, hidden_size=96)
    model.set_attn_implementation(attention.NAME)
    with torch.no_grad():
        for norm in norms_of(model):
            norm.weight.uniform_(-2.0, 2.0)
    ids = torch.randint(0, 97, (1, 37), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), batch_invariant.batch_invariant(mode):
        before = model(input_ids=ids, use_cache=False).logits, engine_logits(model, [37, 1, 5, 1, 20])
        fused.install(model)
        after = model(input_ids=ids, use_cache=False).logits, engine_logits(model, [37, 1, 5, 1, 20])
    assert all(ours(model, "RMSNorm"))
    assert all(ours(model, "Attention"))
    assert all(ours(model, "DecoderLayer"))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_attention_layer_that_does_more_stays() -> None:
    model = random_model("qwen3", attention_bias=True)
    model.set_attn_implementation(attention.NAME)
    fused.install(model)
    assert not any(ours(model, "Attention"))
    model = random_model("qwen3")
    model.set_attn_implementation(attention.NAME)
    type_ = type(model.model.layers[0].self_attn)
    model.model.layers[0].self_attn.__class__ = type("ScaledAttention", (type_,), {"forward": _scaled(type_.forward)})
    fused.install(model)
    assert ours(model, "Attention") == [False, True, True]


def test_a_layer_that_does_more_or_is_looked_at_stays() -> None:
    model = random_model("qwen3", hidden_size=96)
    model.set_attn_implementation(attention.NAME)
    layers: list[nn.Module] = list(model.model.layers)
    type_ = type(layers[0])
    layers[0].__class__ = type("ScaledLayer", (type_,), {"forward": lambda *a, **k: type_.forward(*a, **k) * 1.0001})
    layers[2].more = nn.Identity()
    fused.install(model)
    assert ["forward" in vars(layer) for layer in layers] == [False, True, False]
    seen: list[torch.Tensor] = []
    handle = layers[1].self_attn.register_forward_hook(lambda _m, _args, out: seen.append(out[0]))
    with torch.inference_mode():
        engine_logits(model, [3])
    handle.remove()
    assert [tuple(out.shape) for out in seen] == [(1, 3, 96)]


def _scaled(forward: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    def scaled(*given: object, **more: object) -> tuple[torch.Tensor, None]:
        out, none = forward(*given, **more)
        return out * 1.0001, none

    return scaled


@pytest.mark.parametrize("size", [32, 64, 480, 512, 544, 1024, 1536, 4096])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_norms_of_all_sizes_are_summed_as_pytorch_sums(size: int, rows: int) -> None:
    norm = LlamaRMSNorm(size)
    torch.manual_seed(size + rows)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(1, rows, size) * torch.tensor([1e-6, 1.0, 1e6])[torch.arange(rows) % 3, None]
        expected = norm(x)
        fused.install(norms(norm))
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
    fused.install(norms(other, narrow))
    assert "forward" not in vars(other)
    assert "forward" not in vars(narrow)


def test_gradients_are_those_of_the_model_itself() -> None:
    ids = torch.arange(20)[None]
    gradients = []
    for installed in (False, True):
        model = random_model("qwen3", hidden_size=96)
        if installed:
            fused.install(model)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
