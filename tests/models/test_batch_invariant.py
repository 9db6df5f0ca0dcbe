"""Exact mode on this machine: no bit of a token depends on the tokens beside it, and the function is the plain one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from etude.models import attention, batch_invariant, experts
from tests.helpers.tiny_models import random_model

SHAPES = [(256, 256), (256, 128), (256, 512), (512, 256), (256, 8), (256, 4096), (48, 192), (16, 48), (48, 97)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_products_of_whole_tiles_give_a_row_the_same_bits(inner, outer):
    """The one thing that exact mode takes on trust from the library: a row's place and company do not matter."""
    torch.manual_seed(0)
    rows_ND, weight = torch.randn(1040, inner), torch.randn(outer, inner)
    whole = F.linear(rows_ND, weight)
    for count in (16, 32, 48, 64, 112, 128, 240, 256, 272, 512, 1008):
        for start in (0, 1, 17):
            assert torch.equal(F.linear(rows_ND[start : start + count], weight), whole[start : start + count])


def model_of(kind):
    model = random_model(kind, initializer_range=0.1)
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


def hidden(model, ids):
    with batch_invariant.batch_invariant():
        extra = batch_invariant.padding(len(ids))
        return model.get_decoder()(input_ids=F.pad(ids, (0, extra))[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
@torch.no_grad()
def test_a_token_has_the_same_bits_in_rows_of_every_length(kind):
    model = model_of(kind)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 97, 130))
    whole = hidden(model, ids)
    for length in (1, 2, 15, 16, 17, 31, 33, 64, 100):
        assert torch.equal(hidden(model, ids[:length])[:length], whole[:length])


@pytest.mark.parametrize("kind", ["moe", "qwen3", "llama"])
def test_values_and_gradients_are_those_of_the_plain_mode(kind):
    """Float32 sums in another order: relative L2 below 2e-6, as between executions."""
    model = model_of(kind)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 97, 70))
    weight_TD = torch.randn(70, 48, generator=torch.Generator().manual_seed(0))
    results = []
    for forward in (lambda: hidden(model, ids)[:70], lambda: model.get_decoder()(input_ids=ids[None])[0][0]):
        model.zero_grad()
        out = forward()
        (out * weight_TD).sum().backward()
        results.append((out.detach(), torch.cat([p.grad.flatten().double() for p in model.get_decoder().parameters()])))
    (ours, our_gradient), (plain, gradient) = results
    assert torch.allclose(ours, plain, atol=1e-5)
    assert float((our_gradient - gradient).norm() / gradient.norm()) <= 2e-6


def test_what_cannot_be_exact_is_not_promised():
    assert batch_invariant.possible(model_of("moe"))
    assert not batch_invariant.possible(model_of("llama").bfloat16())
    biased = model_of("moe")
    next(m for m in biased.modules() if hasattr(m, "is_concatenated")).has_bias = True
    assert not batch_invariant.possible(biased)


def test_off_nothing_is_padded():
    rows_ND = torch.randn(5, 4)
    assert batch_invariant.padded(rows_ND) is rows_ND
    with batch_invariant.batch_invariant(False):
        assert batch_invariant.padding(5) == 0
    with batch_invariant.batch_invariant():
        assert batch_invariant.padding(5) == 11
        assert batch_invariant.padding(32) == 0
