"""Products: the library's up to rounding, and never in exact mode."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from etude.inference.engine import fused
from etude.models import attention, batch_invariant, gemm
from etude.models.experts import etude_experts
from tests.helpers.tiny_models import random_model
from tests.inference.test_fused import engine_logits


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11, 16, 17, 40])
@pytest.mark.parametrize(("out", "size"), [(5, 7), (64, 32), (33, 257)])
def test_a_product_is_that_of_float64(count: int, out: int, size: int) -> None:
    noise = torch.Generator().manual_seed(count)
    x, weight = torch.randn(count, size, generator=noise), torch.randn(out, size, generator=noise)
    true = F.linear(x.double(), weight.double())
    with torch.inference_mode():
        assert gemm.few(x, weight) == (count <= 16)
        assert gemm.takes(x, weight)
        ours, theirs = gemm.product(x, weight), F.linear(x, weight)
        turned = gemm.product(x.t().contiguous().t(), weight)
    # Float32 sums of `size` products of size 1, in any order.
    assert (ours - true).abs().max() < 3e-7 * size
    assert (theirs - true).abs().max() < 3e-7 * size
    assert (turned - true).abs().max() < 3e-7 * size


@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
@pytest.mark.parametrize(("out", "size"), [(64, 32), (4500, 33)])
def test_the_head_in_bfloat16_has_float32_logits(count: int, out: int, size: int) -> None:
    noise = torch.Generator().manual_seed(count)
    x, weight = (torch.randn(rows, size, generator=noise).bfloat16() for rows in (count, out))
    weight[0] = float("nan")
    true = F.linear(x.double(), weight.double())
    with torch.inference_mode():
        ours = gemm.head(x, weight)
    assert ours.dtype == torch.float32
    assert ours[:, 0].isnan().all(), "broken weights are noticed"
    assert (ours - true)[:, 1:].abs().max() < 3e-7 * size
    with batch_invariant.batch_invariant(), torch.inference_mode():
        assert torch.equal(gemm.head(x, weight).nan_to_num(), batch_invariant.head(x, weight).nan_to_num())


def test_many_rows_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, onednn = [], gemm.onednn
    monkeypatch.setattr(gemm, "onednn", lambda x, weight: sizes.append(len(x)) or onednn(x, weight))
    small, large = torch.ones(8, 24), torch.ones(2**14, 24)
    with torch.inference_mode():
        for rows, weight in ((5, small), (16, small), (17, small), (40, small), (5, large), (7, large)):
            gemm.product(torch.ones(rows, 24), weight)
    assert sizes[:2] == [17, 40]
    assert 7 in sizes, "many weights are worth it from 7 rows on"
    with torch.no_grad():
        etude_experts(random_model("moe", hidden_size=96).model.layers[1].mlp.experts, torch.ones(500, 96),
                      torch.zeros(500, 1, dtype=torch.int64), torch.ones(500, 1))  # fmt: skip
    assert sizes[-2:] == [500, 500], "so do experts of many rows"


def test_padding() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    kinds = (cpu, torch.float32), (cpu, torch.bfloat16), (meta, torch.float32)
    assert [[gemm.padding(rows, *kind) for rows in (0, 5, 16, 17, 24)] for kind in kinds] == [
        [0, 0, 0, 7, 0], [0, 0, 0, 15, 8], [0, 0, 0, 0, 0],
    ]  # fmt: skip
    with batch_invariant.batch_invariant():
        assert [gemm.padding(rows, *kinds[0]) for rows in (0, 5, 16, 17, 24)] == [0, 11, 0, 15, 8]


def test_a_pytorch_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 24), torch.randn(10, 24)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with torch.inference_mode():
        assert torch.equal(gemm.product(x, weight), F.linear(x, weight))


def test_what_is_not_a_number_stays_so() -> None:
    x, weight = torch.ones(5, 64), torch.ones(9, 64)
    weight[3, 60] = torch.nan
    with torch.inference_mode():
        assert gemm.product(x, weight).isnan().sum(dim=0).tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0]


def experts(count: int, size: int, inner: int) -> SimpleNamespace:
    noise = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        num_experts=count, act_fn=nn.SiLU(), gate_up_proj=torch.randn(count, 2 * inner, size, generator=noise),
        down_proj=torch.randn(count, size, inner, generator=noise),
    )  # fmt: skip


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU()])
@pytest.mark.parametrize("count", [3, gemm.FEW, gemm.FEW + 1])
def test_parts_of_a_layer(count: int, act: nn.Module) -> None:
    noise = torch.Generator().manual_seed(count)
    x, gate, up = (torch.randn(n, 40, generator=noise) for n in (count, 24, 24))
    down = torch.randn(40, 24, generator=noise)
    with torch.inference_mode():
        out, parts = gemm.gated(act, x, gate, up, down), gemm.three(x, gate, up, gate)
        twice = x.double()
        true = F.linear(act(F.linear(twice, gate.double())) * F.linear(twice, up.double()), down.double())
        assert (out - true).abs().max() < 1e-6 * true.abs().max()
        assert all(torch.equal(part, gemm.product(x, w)) for part, w in zip(parts, (gate, up, gate), strict=True))


@pytest.mark.parametrize(("tokens", "slots", "many"), [(1, 2, 8), (7, 3, 5), (16, 1, 2), (30, 2, 8)])
def test_experts_are_weighted_sums_of_gated_products(tokens: int, slots: int, many: int) -> None:
    module, noise = experts(many, 40, 24), torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 40, generator=noise)
    weight_TK, index_TK = torch.rand(tokens, many, generator=noise).topk(slots)
    true_TD = torch.zeros(tokens, 40, dtype=torch.float64)
    for t in range(tokens):
        for k in range(slots):
            expert = int(index_TK[t, k])
            gate, up = F.linear(x[t].double(), module.gate_up_proj[expert].double()).chunk(2)
            out = F.linear(F.silu(gate) * up, module.down_proj[expert].double())
            true_TD[t] += weight_TK[t, k].double() * out
    with torch.inference_mode():
        assert gemm.takes_experts(module, x, index_TK)
        ours_TD = gemm.experts(module, x, index_TK, weight_TK)
    assert (ours_TD - true_TD).abs().max() < 1e-6 * true_TD.abs().max()


def test_who_takes_them() -> None:
    few, many, weight = torch.ones(gemm.FEW, 8), torch.ones(gemm.FEW + 1, 8), torch.ones(4, 8)
    assert not gemm.few(few, weight), "gradients may be kept"
    with torch.inference_mode():
        assert gemm.few(few, weight)
        assert not gemm.few(many, weight)
        assert not gemm.few(few.bfloat16(), weight.bfloat16())
        with batch_invariant.batch_invariant():
            assert not gemm.few(few, weight)
            assert torch.equal(gemm.head(few, weight), batch_invariant.head(few, weight))
        module = experts(4, 8, 4)
        assert not gemm.takes_experts(module, many, torch.zeros(len(many), 4))
        module.act_fn = nn.GELU()
        assert not gemm.takes_experts(module, few, torch.zeros(len(few), 1))


@pytest.mark.parametrize("tokens", [1, gemm.FEW, 500])
def test_under_autocast_they_are_not_taken(tokens: int) -> None:
    """`etude doctor mismatch` asks so how easily experts flip: products must be as narrow as the library makes them."""
    module = random_model("moe", hidden_size=96).model.layers[1].mlp.experts
    noise = torch.Generator().manual_seed(0)
    x_TD = torch.randn(tokens, 96, generator=noise)
    weight_TK, index_TK = torch.rand(tokens, module.num_experts, generator=noise).topk(2)
    with torch.inference_mode():
        wide_TD = etude_experts(module, x_TD, index_TK, weight_TK)
        with torch.autocast("cpu", torch.bfloat16):
            assert not gemm.takes_experts(module, x_TD, index_TK)
            assert gemm.product(x_TD[:1], x_TD).dtype == torch.bfloat16
            narrow_TD = etude_experts(module, x_TD, index_TK, weight_TK)
    # The grouped product of the CPU is as wide as its operands; bfloat16 would be off by some 1e-2 of the largest.
    assert (narrow_TD - wide_TD).abs().max() < 3e-2 * wide_TD.abs().max()


@pytest.mark.parametrize("kind", ["moe", "qwen3"])
def test_a_model_says_the_same_up_to_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(kind, hidden_size=96)
    model.set_attn_implementation(attention.NAME)
    fused.install(model)
    sizes, logits = [20, 1, 5, 1, 16, 2], []
    with torch.inference_mode():
        for few in (gemm.FEW, 0):
            monkeypatch.setattr(gemm, "FEW", few)
            monkeypatch.setattr(gemm, "_FEWER", few)
            logits.append(engine_logits(model, sizes))
    assert not np.array_equal(*logits), "no pass took them"
    # Some dozens of float32's roundings, 6e-8 each, of the largest logit; a wrong product is off by some 1e-1 of it.
    assert (logits[0] - logits[1]).abs().max() < 5e-6 * logits[1].abs().max()
