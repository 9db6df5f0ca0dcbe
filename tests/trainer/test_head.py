"""Chunked log-probabilities against the whole softmax in float64, and the most memory that either takes."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from etude.models.batch_invariant import batch_invariant
from etude.models.head import Head
from etude.trainer.head import CHUNK, _plain, token_logprobs
from etude.trainer.rl.memory import LiveBytes

S, M, V, D = 100, 140, 211, 24


def a_head(dtype=torch.float32, bias=False, **options):
    noise = torch.Generator().manual_seed(0)
    weight_VD = torch.randn(V, D, generator=noise).to(dtype).requires_grad_()
    bias_V = torch.randn(V, generator=noise).to(dtype).requires_grad_() if bias else None
    return Head(weight_VD, bias_V, **options)


def some_tokens(dtype=torch.float32):
    """More tokens than positions: some positions predict several, some none."""
    rng, noise = np.random.default_rng(0), torch.Generator().manual_seed(1)
    hidden_SD = torch.randn(S, D, generator=noise).to(dtype).requires_grad_()
    return hidden_SD, rng.integers(0, S, M), rng.integers(0, V, M), torch.randn(M, generator=noise)


def truth(head, hidden_SD, of_M, target_M, weight_M, temperature):
    leaves = [x for x in (hidden_SD, head.weight_VD, head.bias_V) if x is not None]
    logits_SV = head.finish(hidden_SD.double() @ head.weight_VD.double().t()) / temperature
    logprobs_SV = torch.log_softmax(logits_SV, -1)
    chosen_M = logprobs_SV[torch.from_numpy(of_M), torch.from_numpy(target_M)]
    entropy_E = -(logprobs_SV.exp() * logprobs_SV).sum(-1)[::16]
    return chosen_M, entropy_E, torch.autograd.grad((chosen_M * weight_M).sum(), leaves)


HEADS = [{}, {"scale": 0.3}, {"bias": True}, {"bias": True, "scale": 2.0, "cap": 2.0}]


@pytest.mark.parametrize("options", HEADS, ids=["plain", "scaled", "biased", "capped"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_are_the_whole_softmax(options, temperature):
    head, (hidden_SD, of_M, target_M, weight_M) = a_head(**options), some_tokens()
    expected_M, entropies_E, gradients = truth(head, hidden_SD, of_M, target_M, weight_M, temperature)
    leaves = [x for x in (hidden_SD, head.weight_VD, head.bias_V) if x is not None]
    none_at = np.zeros(0, int), np.zeros(0, int)
    for chunk in (16, 48, 1024):
        for leaf in leaves:
            leaf.grad = None
        logprobs_M, entropy_E = token_logprobs(head, hidden_SD, of_M, target_M, temperature=temperature, chunk=chunk)
        (logprobs_M * weight_M).sum().backward()
        # Logits reach 20: a unit in the last place of one is 2e-6.
        assert torch.allclose(logprobs_M.double(), expected_M, rtol=0, atol=1e-5)
        assert torch.allclose(entropy_E.double(), entropies_E, rtol=0, atol=1e-5)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            apart = (leaf.grad.double() - gradient.double()).norm() / gradient.double().norm()
            assert apart <= 1e-6, "float32 sums of some hundred terms"
        for before in (1, 16, 31):  # positions of earlier slices of a row
            some_E = token_logprobs(head, hidden_SD, of_M, target_M, chunk=chunk, before=before)[1]
            first = -before % 16
            all_E = [token_logprobs(head, hidden_SD[i : i + 1], *none_at)[1] for i in range(first, len(hidden_SD), 16)]
            assert torch.allclose(some_E, torch.cat(all_E), rtol=0, atol=1e-5)
        with torch.no_grad():
            again_M, _ = token_logprobs(head, hidden_SD, of_M, target_M, temperature=temperature, chunk=chunk)
        assert torch.equal(again_M, logprobs_M)


def test_a_narrow_head_gives_a_float32_gradient_to_a_weight_that_takes_it():
    """The weight's gradient is summed over chunks, and over passes, without rounding to bfloat16."""
    head, (hidden_SD, of_M, target_M, weight_M) = a_head(torch.bfloat16), some_tokens(torch.bfloat16)
    wide = Head(head.weight_VD.detach().double().requires_grad_())
    *_, (_, gradient_VD) = truth(wide, hidden_SD, of_M, target_M, weight_M, 1.0)
    head.weight_VD.grad_dtype = torch.float32
    for _ in range(3):
        logprobs_M, _ = token_logprobs(head, hidden_SD, of_M, target_M, chunk=16)
        (logprobs_M * weight_M).sum().backward()
    assert head.weight_VD.grad.dtype == torch.float32
    assert (head.weight_VD.grad - 3 * gradient_VD).norm() <= 1e-6 * (3 * gradient_VD).norm()


def test_a_frozen_head_gets_no_gradient():
    head, (hidden_SD, of_M, target_M, weight_M) = a_head(), some_tokens()
    expected = truth(head, hidden_SD, of_M, target_M, weight_M, 1.0)[2][0]
    head.weight_VD.requires_grad_(False)
    logprobs_M, _ = token_logprobs(head, hidden_SD, of_M, target_M, chunk=32)
    (logprobs_M * weight_M).sum().backward()
    assert head.weight_VD.grad is None
    assert (hidden_SD.grad - expected).norm() <= 1e-6 * expected.norm()


def test_batch_invariant_mode_keeps_its_bits():
    head, (hidden_SD, of_M, target_M, _) = a_head(), some_tokens()
    with batch_invariant():
        logprobs_M, _ = token_logprobs(head, hidden_SD, of_M, target_M, chunk=16)
        logits_SV = head.logits(hidden_SD)
    chosen_M = torch.log_softmax(logits_SV, -1)[torch.from_numpy(of_M), torch.from_numpy(target_M)]
    assert torch.equal(logprobs_M, chosen_M)


def test_no_tokens_and_a_wrong_chunk():
    head, none = a_head(), np.zeros(0, np.int64)
    logprobs_M, entropy_E = token_logprobs(head, torch.zeros(0, D, requires_grad=True), none, none)
    assert logprobs_M.shape == entropy_E.shape == (0,)
    logprobs_M.sum().backward()
    with pytest.raises(ValueError, match="multiple of 16"):
        token_logprobs(head, torch.zeros(0, D), none, none, chunk=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_that_of_a_chunk(dtype):
    """The head of Qwen3-0.6B on 8,192 positions, forward and backward, in tensors without memory."""
    S, V, D = 8192, 151_936, 1024
    of_S = np.arange(S)

    def peak(chunked):
        with FakeTensorMode():
            weight_VD = torch.zeros(V, D, dtype=dtype, requires_grad=True)
            weight_VD.grad_dtype = torch.float32
            hidden_SD = torch.zeros(S, D, dtype=dtype, requires_grad=True)
            with LiveBytes() as live:
                if chunked:
                    logprobs_S, _ = token_logprobs(Head(weight_VD), hidden_SD, of_S, of_S)
                else:
                    at_S = torch.arange(S)
                    logprobs_S, _ = _plain(Head(weight_VD), hidden_SD, at_S, at_S, 1.0, slice(None, None, 16))
                logprobs_S.sum().backward()
        return live.peak

    assert peak(True) <= 1.2 * CHUNK / S * peak(False)
