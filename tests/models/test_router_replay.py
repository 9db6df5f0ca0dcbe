"""Replay in one forward pass: whose experts run, with which gates, and where gradients go."""

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from etude.errors import RunFailed, UserError
from etude.models import attention, experts
from etude.models.router_replay import MISSING, UNFED, replay, routers, shape
from tests.helpers.tiny_models import random_model

T = 30


def model_of(kind):
    """ "moe": normalised softmax gates; "plain": not normalised; "sigmoid": with a bias for the choice, and a scale."""
    if kind == "sigmoid":
        torch.manual_seed(0)
        config = DeepseekV3Config(
            vocab_size=97, hidden_size=48, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=1,
            topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=16, initializer_range=0.25, n_shared_experts=1,
        )  # fmt: skip
        model = DeepseekV3ForCausalLM(config).eval()
        for router in routers(model):
            router.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    else:
        model = random_model("moe", norm_topk_prob=kind == "moe")
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


@pytest.fixture(scope="module", params=["moe", "plain", "sigmoid"])
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def moe():
    return model_of("moe")


def forward(model, routes=None, **options):
    """Last hidden states, the experts that ran, and what was counted."""
    ids = torch.arange(T)[None] * 7 % 97
    with experts.observe() as choices, replay(model.get_decoder(), routes, torch.ones(T), **options) as sums:
        hidden_TD = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    return hidden_TD, choices.stacked().numpy(), sums.metrics()


def others(model, seed=0):
    """Experts at random, K different ones per token and layer."""
    layers, slots = shape(model)
    draw = np.random.default_rng(seed).random((T, layers, 8))
    return draw.argsort(-1)[..., :slots].astype(np.int16)


@torch.no_grad()
def test_the_routers_own_routes_change_no_bit(model):
    plain, own, nothing = forward(model)
    assert nothing == {}
    again, ran, metrics = forward(model, own.astype(np.int16))
    assert torch.equal(again, plain)
    assert np.array_equal(ran, own)
    assert metrics == {
        "router/missing": 0.0,
        "router/replayed": 1.0,
        "router/refused": 0.0,
        "router/flip_layer": 0.0,
        "router/flip_token": 0.0,
    }


@torch.no_grad()
def test_recorded_experts_run_with_the_routers_own_gates(model):
    """The output of each MoE block against the formula, written out token by token; rounding of float32 sums."""
    routes = others(model)
    seen = []
    blocks = [m for m in model.modules() if hasattr(getattr(m, "experts", None), "num_experts")]
    handles = [b.experts.register_forward_hook(lambda _m, args, out: seen.append((*args, out))) for b in blocks]
    logits = []
    handles += [r.register_forward_hook(lambda _m, _args, out: logits.append(out[0])) for r in routers(model)]
    try:
        _, ran, metrics = forward(model, routes, plausible=0.0)
    finally:
        for handle in handles:
            handle.remove()
    assert np.array_equal(ran, routes), "no flip is left"
    assert metrics["router/refused"] == 0.0
    assert metrics["router/flip_token"] > 0.9, "or the record says nothing"
    for layer, (hidden_TD, ids_TK, _, out_TD) in enumerate(seen):
        module = blocks[layer].experts
        for t in (0, 7, T - 1):
            scores = logits[layer][t].sigmoid() if "Deepseek" in type(model).__name__ else logits[layer][t].softmax(-1)
            gates = scores[ids_TK[t]]
            if getattr(model.config, "norm_topk_prob", True):
                gates = gates / gates.sum()
            gates = gates * getattr(model.config, "routed_scaling_factor", 1.0)
            expected = torch.zeros(48)
            for gate, e in zip(gates, ids_TK[t], strict=True):
                a, b = (module.gate_up_proj[e] @ hidden_TD[t]).chunk(2)
                expected += gate * (module.down_proj[e] @ (module.act_fn(a) * b))
            torch.testing.assert_close(out_TD[t], expected, rtol=1e-4, atol=1e-5)


def test_gradients_go_through_the_gates_and_to_no_other_expert(moe):
    """Against central differences of the router's weight: float32 at a step of 1e-3 is good to some percent."""
    routes = others(moe)
    routes[:, 0] = np.array([2, 5])
    weights_TD = torch.randn(T, 48, generator=torch.Generator().manual_seed(0))

    def value():
        return (forward(moe, routes, plausible=0.0)[0] * weights_TD).sum()

    moe.zero_grad()
    value().backward()
    block = next(m for m in moe.modules() if hasattr(getattr(m, "experts", None), "num_experts"))
    grad_E = block.experts.down_proj.grad.abs().sum((1, 2))
    assert [e for e in range(8) if grad_E[e] > 0] == [2, 5]
    grad_ED = block.gate.weight.grad
    assert grad_ED[[0, 1, 3, 4, 6, 7]].abs().sum() < 1e-3 * grad_ED.abs().sum(), "normalised: only 2 against 5 counts"
    direction = grad_ED / grad_ED.norm()
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            block.gate.weight += sign * 1e-3 * direction
            ends.append(value().double())
            block.gate.weight -= sign * 1e-3 * direction
    assert float((ends[0] - ends[1]) / 2e-3) == pytest.approx(float(grad_ED.norm()), rel=0.05)


@torch.no_grad()
def test_implausible_experts_are_refused(moe):
    """At 1 only what is as good as the router's own is taken: the first layer runs its own experts, as sets."""
    _, own, _ = forward(moe)
    routes = others(moe, 1)
    _, ran, metrics = forward(moe, routes, plausible=1.0)
    assert np.array_equal(np.sort(ran[:, 0]), np.sort(own[:, 0]))
    assert 0.5 < metrics["router/refused"] < 1
    assert metrics["router/replayed"] == pytest.approx(1 - metrics["router/refused"])
    assert (np.diff(np.sort(ran, axis=-1)) > 0).all(), "no expert twice"
    kept = (ran == routes).mean()
    assert kept == pytest.approx(metrics["router/replayed"]), "what is kept stays in its slot"
    half = forward(moe, routes, plausible=0.5)[2]
    assert 0 < half["router/refused"] < metrics["router/refused"]


@torch.no_grad()
def test_tokens_without_routes_take_their_own(moe):
    _, own, _ = forward(moe)
    routes = others(moe)
    routes[0:10], routes[T - 1] = MISSING, UNFED
    _, ran, metrics = forward(moe, routes, plausible=0.0)
    assert np.array_equal(ran[:10], own[:10]), "causal: nothing before them has changed"
    assert np.array_equal(ran[10:-1], routes[10:-1])
    assert metrics["router/missing"] == pytest.approx(10 / 29), "nothing could be recorded of the last one"


def test_routes_of_another_model_and_routers_of_another_kind(moe):
    for wrong in (np.zeros((T, 3, 2), np.int16), np.zeros((T, 2, 3), np.int16), np.full((T, 2, 2), 8, np.int16)):
        with pytest.raises(RunFailed, match="recorded experts"):
            forward(moe, wrong)
    with pytest.raises(UserError, match="no experts to replay"):
        shape(random_model("qwen3"))
    odd = model_of("moe")
    handle = routers(odd)[1].register_forward_hook(lambda _m, _a, out: (out[0], out[1].square(), out[2]))
    with pytest.raises(UserError, match="follow no known formula"):
        forward(odd, others(odd))
    handle.remove()
    assert not any(r._forward_hooks for r in routers(odd)), "an error leaves no hook behind"
