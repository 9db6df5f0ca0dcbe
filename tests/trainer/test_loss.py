import math

import pytest
import torch

from etude.trainer.loss import Mismatch, composer2


def reference_composer2(logprobs, advantages, references, beta, normaliser):
    """The formula, one token at a time: -(1/N) sum (A - beta (l - ref)) l, the bracket without gradient."""
    total = 0.0
    for i, logprob in enumerate(logprobs):
        advantage = advantages[i] - (beta * (logprob.item() - references[i]) if references else 0.0)
        total = total - advantage * logprob
    return total / normaliser


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_composer2_equals_the_scalar_formula_in_value_and_gradient(beta):
    torch.manual_seed(0)
    l1 = (-torch.rand(7)).double().requires_grad_()
    l2 = l1.detach().clone().requires_grad_()
    advantages, references = torch.randn(7).double(), -torch.rand(7).double()
    value = composer2(l1, advantages, references if beta else None, kl_beta=beta, normaliser=12.0)
    expected = reference_composer2(l2, advantages.tolist(), references.tolist() if beta else None, beta, 12.0)
    value.backward()
    expected.backward()
    assert torch.allclose(value, expected, atol=1e-12)
    assert torch.allclose(l1.grad, l2.grad, atol=1e-12)


def test_the_k1_penalty_has_the_gradient_of_the_reverse_kl():
    """On an enumerable policy the expected gradient through A_t is that of KL(policy || reference), exactly."""
    torch.manual_seed(1)
    logits = torch.randn(5, dtype=torch.double, requires_grad=True)
    reference = torch.log_softmax(torch.randn(5, dtype=torch.double), 0)
    policy = torch.log_softmax(logits, 0)
    kl = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    # The expectation over tokens, written out: each token's loss weighted by its probability.
    losses = [
        policy[i].detach().exp()
        * composer2(policy[i : i + 1], torch.zeros(1).double(), reference[i : i + 1], kl_beta=1.0, normaliser=1.0)
        for i in range(5)
    ]
    (actual,) = torch.autograd.grad(sum(losses), logits)
    assert torch.allclose(actual, expected, atol=1e-12)


def test_mismatch_estimators_follow_their_definitions():
    trainer, engine = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -2.0, -0.2])
    mismatch = Mismatch()
    mismatch.add(trainer[:1], engine[:1])
    mismatch.add(trainer[1:], engine[1:])
    d = (trainer - engine).double().tolist()
    metrics = mismatch.metrics("mismatch")
    assert metrics["mismatch/k1"] == pytest.approx(-sum(d) / 3)
    assert metrics["mismatch/k2"] == pytest.approx(sum(x * x / 2 for x in d) / 3)
    assert metrics["mismatch/k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 3)
    assert metrics["mismatch/max_abs"] == pytest.approx(0.3, abs=1e-6)
    weights = [math.exp(x) for x in d]
    assert metrics["mismatch/ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))


def test_mismatch_without_tokens_reports_nothing():
    assert Mismatch().metrics("mismatch") == {}
