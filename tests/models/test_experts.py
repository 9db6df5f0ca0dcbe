"""The experts function: padding for few shapes."""

import pytest
import torch
from tiny import random_model

from etude.models import experts


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
