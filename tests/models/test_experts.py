"""The experts function: padding for few shapes."""

import pytest
import torch

from etude.models import experts
from tests.helpers.tiny_models import random_model


@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize("chosen", [8, 3])
def test_padding_the_experts_changes_nothing(tokens, chosen):
    """In float32 and with some experts idle; the sums' order may change, and rounding of 1e-6 relative with it."""
    model = random_model("moe")
    model.set_experts_implementation(experts.NAME)
    module = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts")
    torch.manual_seed(tokens)
    hidden_TD = torch.randn(tokens, module.hidden_dim)
    index_TK = torch.rand(tokens, chosen).topk(2).indices
    weight_TK = torch.rand(tokens, 2)
    with torch.no_grad():
        plain = experts.etude_experts(module, hidden_TD, index_TK, weight_TK)
        with experts.few_shapes(), experts.observe() as choices:
            padded = experts.etude_experts(module, hidden_TD, index_TK, weight_TK)
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(choices.stacked()[:, 0], index_TK.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_goes_through_the_same_experts(dtype):
    """Without gradients one token takes a path of its own, whose sums of 48 and of 16 products have another order. By
    the processor's kernels that is up to 5.6 units of the largest output (200 draws of float32); 16 are allowed, and
    another expert would be off by 1e5 of them."""
    model = random_model("moe").to(dtype)
    model.set_experts_implementation(experts.NAME)
    module = next(m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts")
    torch.manual_seed(0)
    for _ in range(20):
        hidden_1D = torch.randn(1, module.hidden_dim, dtype=dtype)
        index_1K, weight_1K = torch.rand(1, module.num_experts).topk(2).indices, torch.rand(1, 2, dtype=dtype)
        grouped = experts.etude_experts(module, hidden_1D, index_1K, weight_1K).detach()
        with torch.no_grad(), experts.observe() as choices:
            alone = experts.etude_experts(module, hidden_1D, index_1K, weight_1K)
        assert alone.dtype == dtype
        size = float(grouped.float().abs().max())
        torch.testing.assert_close(alone, grouped, rtol=0, atol=16 * torch.finfo(dtype).eps * max(size, 1e-3))
        assert torch.equal(choices.stacked()[:, 0], index_1K.to(torch.uint8))
