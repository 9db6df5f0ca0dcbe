"""Adapters of experts: sums of slices, gradients of every layout against plain autograd, and what has none."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etude.audit.architectures.families import FAMILIES, build
from etude.models import batch_invariant, experts
from etude.models.lora import DOWN, UP, attach, first_values, fused_weights, is_transposed, merged, weight_names

SCALE = 2.0


def family(model_type, **options):
    chosen = next(f for f in FAMILIES if f.model_type == model_type)
    model = build(type(chosen)(chosen.name, model_type, chosen.options | options))
    model.set_experts_implementation(experts.NAME)
    return model


def adapters_of(model, rank=3):
    """Random adapters of all fused weights, by layer."""
    weights, noise = fused_weights(model), torch.Generator().manual_seed(7)
    turned = {layer for layer in weights if is_transposed(model, layer)}
    tensors = first_values(weights, rank, 1, turned)
    for tensor in tensors.values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=noise))
    return {layer: (tensors[layer + DOWN], tensors[layer + UP]) for layer in weights}


@pytest.mark.parametrize("shape", [(90, 70, 60), (3, 700, 600), (5, 7, 6)])
def test_a_slice_of_a_sum_is_the_sum_of_the_slices(shape):
    """So ranks that hold rows of a weight, or some of the experts, compute the bits of one process."""
    E, O, I = shape  # noqa: E741
    noise = torch.Generator().manual_seed(0)
    base = torch.randn(shape, generator=noise).to(torch.bfloat16)
    down, up = torch.randn(E, 4, I, generator=noise) / 25, torch.randn(E, O, 4, generator=noise) / 50
    whole = merged(base, down, up, SCALE, torch.bfloat16)
    for expert in range(E):  # each is a linear layer's
        assert torch.equal(merged(base[expert], down[expert], up[expert], SCALE, torch.bfloat16), whole[expert])
    for rows in (slice(0, 2), slice(2, E), slice(1, 1)):
        assert torch.equal(merged(base[rows], down, up, SCALE, torch.bfloat16, rows), whole[rows])
        assert torch.equal(merged(base[rows], down[rows], up[rows], SCALE, torch.bfloat16), whole[rows])
        of_one = merged(base[0][rows], down[0], up[0], SCALE, torch.bfloat16, rows)
        assert torch.equal(of_one, whole[0][rows])
    turned = base.mT.contiguous()
    assert torch.equal(merged(turned, up.mT, down.mT, SCALE, torch.bfloat16), whole.mT)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that gets memory of its own in this context."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return result


def truth_of(module, adapters):
    """The module in float64 with transformers' own forward, whose weights are W + scale * B A; and its leaves."""
    other = copy.deepcopy(module).double()
    other.config._experts_implementation = "eager"
    leaves = []
    for own, pair in adapters.items():
        down, up = (t.detach().double().requires_grad_() for t in pair)
        base = other._parameters.pop(own).detach()
        setattr(other, own, base + SCALE * (up @ down))
        leaves += [down, up]
    return other, leaves


def gradients(forward, module, leaves, dtype, largest):
    noise = torch.Generator().manual_seed(3)
    weight = getattr(module, "gate_up_proj", None)
    size = (module.up_proj if weight is None else weight).shape[1 if module.is_transposed else 2]
    hidden_TD = torch.randn(40, size, generator=noise).to(dtype).requires_grad_()
    index_TK = torch.rand(40, module.num_experts - 1, generator=noise).topk(2).indices  # the last one is idle
    weight_TK = torch.rand(40, 2, generator=noise).to(dtype).requires_grad_()
    out_TD = forward(hidden_TD, index_TK, weight_TK)
    towards_TD = torch.randn(out_TD.shape, generator=noise).to(dtype)
    with largest:
        return out_TD, torch.autograd.grad((out_TD * towards_TD).sum(), (hidden_TD, weight_TK, *leaves))


@pytest.mark.parametrize("way", ["grouped", "padded", "exact"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h", "minimax_m2"])
def test_gradients_of_experts_are_those_of_plain_autograd_on_the_sum(kind, way):
    """Gated and plain, transposed, interleaved, with biases; float32 against float64, as between executions."""
    options = {"layer_types": ["moe", "attention"] * 2, "num_hidden_layers": 4} if kind == "nemotron_h" else {}
    model = family(kind, **options)
    adapters = adapters_of(model)
    name, module = next((n, m) for n, m in model.named_modules() if hasattr(m, "is_concatenated"))
    if way == "exact" and not batch_invariant.is_plain(module):
        pytest.skip("the mode supports plain experts alone")
    own = {layer.rpartition(".")[2]: pair for layer, pair in adapters.items() if layer.startswith(f"{name}.")}
    assert len(own) == 2
    other, true_leaves = truth_of(module, own)
    leaves = []
    for weight, (down, up) in own.items():
        parameter, pair = getattr(module, weight), (down.requires_grad_(), up.requires_grad_())
        attach(model, f"{name}.{weight}", *pair, SCALE)
        parameter.data = merged(parameter.data, *pair, SCALE, torch.float32)
        leaves += pair
    module.requires_grad_(False)
    largest = Largest()
    with {"grouped": nullcontext, "padded": experts.few_shapes, "exact": batch_invariant.batch_invariant}[way]():
        out, ours = gradients(lambda *a: experts.etude_experts(module, *a), module, leaves, torch.float32, largest)
    assert largest.elements < min(getattr(module, weight).numel() for weight in own), "no gradient of a whole weight"
    true_out, truth = gradients(other, module, true_leaves, torch.float64, nullcontext())
    torch.testing.assert_close(out, true_out.float(), rtol=1e-4, atol=1e-5)
    for mine, exact in zip(ours, truth, strict=True):
        assert float((mine.double() - exact).norm() / exact.norm()) < 1e-5
        if mine.ndim == 3:
            assert not bool(mine[-1].any())


def test_a_rank_with_some_of_the_experts_computes_their_part():
    """As under expert parallelism: it gets rows of its own experts, ids from 0 on, one expert a row, of weight 1."""
    first, count, noise = 2, 3, torch.Generator().manual_seed(5)
    whole = family("qwen3_moe")
    name, module = next((n, m) for n, m in whole.named_modules() if hasattr(m, "is_concatenated"))
    part = copy.deepcopy(whole)
    local = part.get_submodule(name)
    local.num_experts, local._is_expert_parallel = count, True
    pairs = {own: adapters_of(whole)[f"{name}.{own}"] for own in weight_names(module)}
    own_pairs = {own: tuple(t[first : first + count].clone() for t in pair) for own, pair in pairs.items()}
    for model, chosen in ((whole, pairs), (part, own_pairs)):
        model.requires_grad_(False)
        for own, pair in chosen.items():
            attach(model, f"{name}.{own}", *(t.requires_grad_() for t in pair), SCALE)
    for own, (down, up) in pairs.items():
        weight = getattr(module, own)
        rows = slice(first, first + count)
        getattr(local, own).data = merged(weight.data[rows], down, up, SCALE, torch.float32, rows)
        weight.data = merged(weight.data, down, up, SCALE, torch.float32)
    hidden_TD = torch.randn(30, 128, generator=noise)
    index_T1 = torch.randint(first, first + count, (30, 1), generator=noise)
    outs, grads = [], []
    for experts_of, ids, chosen in ((module, index_T1, pairs), (local, index_T1 - first, own_pairs)):
        out_TD = experts.etude_experts(experts_of, hidden_TD, ids, torch.ones(30, 1))
        outs.append(out_TD)
        grads.append(torch.autograd.grad(out_TD.square().sum(), [t for pair in chosen.values() for t in pair]))
    assert torch.equal(outs[0], outs[1])
    for every, own in zip(*grads, strict=True):
        assert torch.equal(every[first : first + count], own)
        assert int(every.flatten(1).any(dim=1).sum()) == count
