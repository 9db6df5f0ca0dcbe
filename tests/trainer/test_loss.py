"""Every preset against a scalar reference written from its paper: plain floats, loops over episodes and tokens.

Values: tolerance 1e-12, float64 on both sides. Gradients: central differences of the reference with h = 1e-5, whose
rounding (1e-16 / 1e-5, times values up to 30) and truncation (1e-10) stay below the tolerance of 1e-7; no ratio of the
data lies within h of a clipping bound. What a paper stops the gradient of is taken from `fixed`, which is not moved.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from etude.config import LossConfig
from etude.errors import UserError
from etude.trainer.rl.loss import LossStats, LossTokens, policy_loss
from etude.trainer.rl.mismatch import Mismatch
from etude.trainer.rl.policies import PolicyDrift, drift, keep, shares
from etude.trainer.rl.presets import PRESETS, divisor, loss_preset
from etude.trainer.rl.value import gae

P, G, L = 3, 2, 12  # groups, members, token budget


@dataclass(frozen=True)
class Token:
    o: float
    mu: float
    ref: float
    kept: bool = True


@dataclass(frozen=True)
class Episode:
    group: int
    reward: float
    tokens: tuple[Token, ...]


def data() -> tuple[list[Episode], list[float]]:
    """Six episodes and the current log-probabilities of their tokens, in order.

    Group 0 has unequal rewards, group 1 equal ones, group 2 a one-token completion; ratios leave every band on both
    sides under advantages of both signs, and one token is masked.
    """
    rng = np.random.default_rng(3)
    log_r = [0.5, -0.6, 0.1, 0.26, -0.05, -0.4, 0.45, 0.2, -0.3, 0.01, 0.6, 0.05, -0.5, 0.3, 1.9, -2.5, 0.02]
    log_q = [0.0, 1.8, -0.9, 0.4, 0.75, -0.1, 0.2, -1.2, 1.0, 0.3, -0.2, 0.1, 2.0, -0.8, 0.6, 0.05, -0.3]
    sizes, rewards, tokens, current = [4, 3, 2, 3, 1, 4], [1.0, 0.25, 0.5, 0.5, 0.0, 2.0], [], []
    for i, (r, q) in enumerate(zip(log_r, log_q, strict=True)):
        o = float(-rng.uniform(3, 5))
        current.append(o + r)
        tokens.append(Token(o, o - q, float(current[-1] + rng.normal(0, 0.5)), kept=i != 7))
    episodes, at = [], 0
    for i, (size, reward) in enumerate(zip(sizes, rewards, strict=True)):
        episodes.append(Episode(i // G, reward, tuple(tokens[at : at + size])))
        at += size
    return episodes, current


def group_advantages(episodes, normalised):
    out = []
    for e in episodes:
        rewards = [x.reward for x in episodes if x.group == e.group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        out.append((e.reward - mean) / (std + 1e-6) if normalised else e.reward - mean)
    return out


def walk(episodes, current):
    """(episode index, token, current log-probability, position) of every kept token."""
    at = 0
    for i, e in enumerate(episodes):
        for token in e.tokens:
            if token.kept:
                yield i, token, current[at], at
            at += 1


def clip(x, low, high):
    return max(low, min(high, x))


def pessimistic(ratio, advantage, low, high):
    return min(ratio * advantage, clip(ratio, low, high) * advantage)


def k3(now, ref):
    return math.exp(ref - now) - (ref - now) - 1


def composer2(episodes, current, fixed, beta):
    a = group_advantages(episodes, False)
    total = sum((a[i] - beta * (fixed[at] - t.ref)) * now for i, t, now, at in walk(episodes, current))
    return -total / (P * G * L)


def fireworks(episodes, current, fixed, beta):
    a, total, kl = group_advantages(episodes, True), 0.0, 0.0
    for i, t, now, _ in walk(episodes, current):
        total += min(math.exp(t.o - t.mu), 5.0) * pessimistic(math.exp(now - t.o), a[i], 0.8, 1.2)
        kl += k3(now, t.ref)
    return -total + beta * kl


def grpo(episodes, current, fixed, beta):
    a, total = group_advantages(episodes, True), 0.0
    for i, t, now, _ in walk(episodes, current):
        inside = pessimistic(math.exp(now - t.o), a[i], 0.8, 1.2) - beta * k3(now, t.ref)
        total += inside / len(episodes[i].tokens)
    return -total / (P * G)


def dr_grpo(episodes, current, fixed, beta):
    a = group_advantages(episodes, False)
    return -sum(pessimistic(math.exp(n - t.o), a[i], 0.8, 1.2) for i, t, n, _ in walk(episodes, current)) / (P * G * L)


def _per_token(episodes, current, weight, high):
    a, total = group_advantages(episodes, True), 0.0
    for i, t, now, _ in walk(episodes, current):
        total += weight(math.exp(t.o - t.mu)) * pessimistic(math.exp(now - t.o), a[i], 0.8, high)
    return -total / sum(len(e.tokens) for e in episodes)


def dapo(episodes, current, fixed, beta):
    return _per_token(episodes, current, lambda q: 1.0, 1.28)


def tis(episodes, current, fixed, beta):
    return _per_token(episodes, current, lambda q: min(q, 2.0), 1.28)


def icepop(episodes, current, fixed, beta):
    return _per_token(episodes, current, lambda q: q if 0.5 <= q <= 5 else 0.0, 1.2)


def cispo(episodes, current, fixed, beta):
    a, total = group_advantages(episodes, True), 0.0
    for i, t, now, at in walk(episodes, current):
        total += clip(math.exp(fixed[at] - t.mu), 0.0, 5.0) * a[i] * now
    return -total / sum(len(e.tokens) for e in episodes)


def gspo(episodes, current, fixed, beta):
    """Equation 5: one ratio per sequence; it is defined on whole sequences, so nothing is masked here."""
    a, total, at = group_advantages(episodes, True), 0.0, 0
    for i, e in enumerate(episodes):
        s = math.exp(sum(current[at + j] - t.o for j, t in enumerate(e.tokens)) / len(e.tokens))
        total += pessimistic(s, a[i], 1 - 3e-4, 1 + 4e-4)
        at += len(e.tokens)
    return -total / (P * G)


def ppo(episodes, current, fixed, beta):
    total = 0.0
    for _, t, now, at in walk(episodes, current):
        total += pessimistic(math.exp(now - t.o), scalar_gae(episodes)[at], 0.8, 1.2)
    return -total / sum(len(e.tokens) for e in episodes)


def value_of(position):
    return 0.3 * math.sin(position)


def scalar_gae(episodes, lam=0.8):
    """Equation 16 of the paper as the sum that it is: A_t = sum over k of lam^k delta_(t+k)."""
    out, at = [], 0
    for e in episodes:
        n = len(e.tokens)
        values = [value_of(at + j) for j in range(n)] + [0.0]
        deltas = [(e.reward if j == n - 1 else 0.0) + values[j + 1] - values[j] for j in range(n)]
        out += [sum(lam ** (k - j) * deltas[k] for k in range(j, n)) for j in range(n)]
        at += n
    return out


SCALAR = {f.__name__: f for f in (composer2, fireworks, grpo, dr_grpo, dapo, tis, icepop, cispo, gspo, ppo)}


def tensors(episodes, current, name):
    """The same data as the loss takes it."""
    flat = [(i, t) for i, e in enumerate(episodes) for t in e.tokens]
    l_N = torch.tensor(current, dtype=torch.double, requires_grad=True)
    column = lambda f: torch.tensor([float(f(i, t)) for i, t in flat], dtype=torch.double)  # noqa: E731
    a = group_advantages(episodes, PRESETS[name].advantage == "zscore")
    advantage_N = column(lambda i, t: a[i])
    if name == "ppo":
        advantage_N = torch.tensor(scalar_gae(episodes), dtype=torch.double)
    o_N, index_N = column(lambda i, t: t.o), torch.tensor([i for i, _ in flat])
    mean_E = torch.stack([(l_N.detach() - o_N)[index_N == i].mean() for i in range(len(episodes))])
    return LossTokens(
        current=l_N,
        proximal=o_N,
        rollout=column(lambda i, t: t.mu),
        advantage=advantage_N,
        reference=column(lambda i, t: t.ref),
        length=column(lambda i, t: len(episodes[i].tokens)),
        keep=None if name == "gspo" else torch.tensor([t.kept for _, t in flat]),
        drift=mean_E[index_N],
    )


def divisor_of(name, episodes):
    return divisor(PRESETS[name], P * G, L, sum(len(e.tokens) for e in episodes))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_papers_formula_in_value_and_gradient(name):
    episodes, current = data()
    beta = PRESETS[name].kl_beta or 0.1
    tokens = tensors(episodes, current, name)
    loss = policy_loss(tokens, replace(PRESETS[name], kl_beta=beta), divisor_of(name, episodes))
    loss.backward()
    assert loss.item() == pytest.approx(SCALAR[name](episodes, current, current, beta), abs=1e-12, rel=1e-12)
    h = 1e-5
    for at in range(len(current)):
        up, down = ([x + s * h * (i == at) for i, x in enumerate(current)] for s in (1, -1))
        slope = (SCALAR[name](episodes, up, current, beta) - SCALAR[name](episodes, down, current, beta)) / (2 * h)
        assert tokens.current.grad[at].item() == pytest.approx(slope, abs=1e-7), (name, at)
    assert any(tokens.current.grad != 0)


def test_the_data_clips_on_both_sides_and_leaves_every_band():
    episodes, current = data()
    a = group_advantages(episodes, True)
    sides = {(math.exp(now - t.o) > 1.28, math.exp(now - t.o) < 0.8, a[i] > 0, a[i] < 0)
             for i, t, now, _ in walk(episodes, current)}  # fmt: skip
    assert {(True, False, True, False), (True, False, False, True), (False, True, True, False),
            (False, True, False, True)} <= sides  # fmt: skip
    q = [math.exp(t.o - t.mu) for _, t, _, _ in walk(episodes, current)]
    assert min(q) < 0.5
    assert max(q) > 5
    assert any(2 < x < 5 for x in q)


@pytest.mark.parametrize("name", PRESETS)
def test_equal_rewards_masked_tokens_and_no_tokens_give_no_gradient(name):
    """Without a KL term: equal rewards give advantage 0 (ppo has values instead), masked tokens are absent."""
    episodes, current = data()
    chosen = replace(PRESETS[name], kl_beta=0.0, kl="none")
    tokens = tensors(episodes, current, name)
    policy_loss(tokens, chosen, divisor_of(name, episodes)).backward()
    if name != "ppo":
        assert tokens.current.grad[7:12].abs().max() < 1e-18, "episodes 2 and 3 won the same"
    none = replace(tokens, keep=torch.zeros(len(current), dtype=torch.bool))
    none.current.grad = None
    loss = policy_loss(none, chosen, 1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert none.current.grad.abs().max() == 0.0
    empty = LossTokens(
        *(torch.zeros(0, dtype=torch.double, requires_grad=i == 0) for i in range(4)), None, torch.zeros(0)
    )
    loss = policy_loss(empty, chosen, 1.0)
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"cispo"}))
def test_on_policy_every_preset_has_the_gradient_of_reinforce(name):
    """r = q = 1: the gradient of every token is -A / N, or -A / (N * length); cispo's ratio is 1 as well, see below."""
    episodes, current = data()
    episodes = [replace(e, tokens=tuple(replace(t, kept=True) for t in e.tokens)) for e in episodes]
    tokens = tensors(episodes, current, name)
    now = tokens.current.detach()
    tokens = replace(tokens, proximal=now, rollout=now, drift=None, keep=None, reference=None)
    policy_loss(tokens, PRESETS[name], divisor_of(name, episodes)).backward()
    per = tokens.length if PRESETS[name].divisor == "episodes" else torch.ones_like(now)
    expected = -tokens.advantage / per / divisor_of(name, episodes)
    assert torch.allclose(tokens.current.grad, expected, atol=1e-14)


@pytest.mark.parametrize("name", PRESETS)
def test_extreme_ratios_stay_finite(name):
    values = torch.tensor([-1e4, -700.0, -0.0, -1.0], dtype=torch.double, requires_grad=True)
    other = torch.tensor([-0.5, -1e4, -800.0, -1.0], dtype=torch.double)
    one = torch.ones(4, dtype=torch.double)
    tokens = LossTokens(values, other, other.flip(0), one * -1, other, one, drift=torch.tensor([1e5, -1e5, 0.0, 1.0]))
    loss = policy_loss(tokens, replace(PRESETS[name], kl_beta=0.1), 4.0, LossStats())
    loss.backward()
    assert math.isfinite(loss.item())
    assert values.grad.isfinite().all()


def test_composer2_has_the_bits_it_always_had():
    """The sum that runs were trained with: -(A - beta * (l - ref)) * l, summed and divided, in float32."""
    torch.manual_seed(0)
    l_N = (-torch.rand(1001)).requires_grad_()
    a_N, ref_N, one_N = torch.randn(1001), -torch.rand(1001), torch.ones(1001)
    for beta, reference in ((0.0, None), (0.1, ref_N)):
        chosen = loss_preset(LossConfig(kl_beta=beta))
        found = policy_loss(LossTokens(l_N, l_N.detach(), ref_N, a_N, reference, one_N), chosen, 1234.0, LossStats())
        weights = a_N if reference is None else a_N - beta * (l_N.detach() - reference)
        expected = -(weights * l_N).sum() / 1234.0
        assert torch.equal(found, expected)
        (mine,), (theirs,) = torch.autograd.grad(found, l_N), torch.autograd.grad(expected, l_N)
        assert torch.equal(mine, theirs)


def expected_gradient(kind, logits, reference):
    """Sum over the actions of an enumerable policy of P * gradient of the loss at that action, advantage 0, beta 1."""
    policy = torch.log_softmax(logits, 0)
    one = torch.ones(1).double()
    losses = []
    for i in range(len(logits)):
        now = policy[i : i + 1]
        tokens = LossTokens(now, now.detach(), now.detach(), 0 * one, reference[i : i + 1], one)
        chosen = replace(PRESETS["composer2"], kl=kind, kl_beta=1.0)
        losses.append(policy[i].detach().exp() * policy_loss(tokens, chosen, 1.0))
    return torch.autograd.grad(sum(losses), logits)[0]


def test_kl_estimators_on_an_enumerable_policy():
    """k1 through the advantage and k2 as a term give the gradient of KL(policy || reference), k3 as a term that of the
    forward KL; k1 as a term of its own would give 0. Exact expectations, float64."""
    torch.manual_seed(1)
    logits = torch.randn(5, dtype=torch.double, requires_grad=True)
    reference = torch.log_softmax(torch.randn(5, dtype=torch.double), 0)
    policy = torch.log_softmax(logits, 0)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits, retain_graph=True)
    assert torch.allclose(expected_gradient("k1", logits, reference), reverse, atol=1e-12)
    assert torch.allclose(expected_gradient("k2", logits, reference), reverse, atol=1e-12)
    assert torch.allclose(expected_gradient("k3", logits, reference), forward, atol=1e-12)
    (naive,) = torch.autograd.grad((policy.exp().detach() * (policy - reference)).sum(), logits)
    assert naive.abs().max() < 1e-12


def test_gae_is_the_sum_of_the_paper():
    episodes, _ = data()
    at, expected = 0, scalar_gae(episodes)
    for e in episodes:
        values = [value_of(at + j) for j in range(len(e.tokens))]
        advantages, targets = gae(values, e.reward, 0.8)
        assert advantages.tolist() == pytest.approx(expected[at : at + len(values)], abs=1e-14)
        assert (targets - advantages).tolist() == pytest.approx(values, abs=1e-14)
        at += len(values)
    assert gae([0.5, 0.2], 1.0, 1.0)[0].tolist() == pytest.approx([0.5, 0.8]), "lambda 1: the return less the value"


def micro(mu, advantages, episodes):
    return SimpleNamespace(
        ids_1T=torch.zeros(1, len(mu)),
        logprobs_N=torch.tensor(mu),
        advantages_N=torch.tensor(advantages),
        episode_N=torch.tensor(episodes),
    )


def test_masks_drop_and_count_what_they_say():
    mu = [math.log(0.5), math.log(0.5), math.log(0.9), -1.0, -1.0]
    o = torch.tensor([math.log(0.65), math.log(0.25), math.log(0.65), -1.0, -12.0])
    batch = micro(mu, [1.0, 1.0, -1.0, 1.0, 1.0], [0, 0, 0, 1, 2])
    dropped = Counter()
    assert keep(batch, o, None, (), dropped) is None
    assert keep(batch, o, None, ("ipo",), dropped).tolist() == [False, False, False, True, False]
    # .25 against .5 under a positive advantage is pulled back, and .65 against .9 under a negative one pushed further.
    assert keep(batch, o, None, ("dppo",), dropped).tolist() == [True, True, False, True, True]
    assert dropped == {"drop/tokens/ipo": 4, "drop/tokens/dppo": 1, "drop/tokens/all_masks": 5}
    of_episode = drift([batch], [o], [batch.logprobs_N], 3)
    assert of_episode.mean_E[1:].tolist() == pytest.approx([0.0, -11.0])
    assert keep(batch, o, of_episode, ("veto",), dropped).tolist() == [True, True, True, True, False]
    assert keep(batch, o, of_episode, ("geo_rs",), dropped).tolist() == [False, False, False, True, False]
    assert keep(batch, o, of_episode, ("opsm",), dropped).tolist() == [True, True, False, True, True]
    assert keep(batch, o, of_episode, ("veto", "geo_rs"), dropped).tolist() == [False, False, False, True, False]
    near = PolicyDrift(torch.tensor([5e-4, 0.0, 0.0]), torch.zeros(3))
    assert keep(batch, o, near, ("geo_rs", "opsm", "veto"), dropped).all()


def test_statistics_of_weights_and_clipping():
    episodes, current = data()
    stats = LossStats()
    tokens = replace(tensors(episodes, current, "tis"), keep=None)
    policy_loss(tokens, PRESETS["tis"], 1.0, stats)
    metrics, flat = stats.metrics(), [t for e in episodes for t in e.tokens]
    q = [math.exp(t.o - t.mu) for t in flat]
    w = [min(x, 2.0) for x in q]
    assert metrics["loss/W_mean"] == pytest.approx(sum(w) / len(w))
    assert metrics["loss/W_cut"] == pytest.approx(sum(x > 2 for x in q) / len(q))
    assert metrics["loss/W_ess"] == pytest.approx(sum(w) ** 2 / (len(w) * sum(x * x for x in w)))
    r = [math.exp(now - t.o) for now, t in zip(current, flat, strict=True)]
    assert metrics["loss/r_mean"] == pytest.approx(sum(r) / len(r))
    a = [x for x, e in zip(group_advantages(episodes, True), episodes, strict=True) for _ in e.tokens]
    cut = [(x > 1.28 and b > 0) or (x < 0.8 and b < 0) for x, b in zip(r, a, strict=True)]
    assert metrics["loss/clip_frac"] == pytest.approx(sum(cut) / len(cut))
    assert LossStats().metrics() == {}


def test_what_a_configuration_replaces():
    chosen = loss_preset(
        LossConfig(preset="dapo", correction="truncate", cap_high=3.0, kl="k2", kl_beta=0.5, clip_high=1.5)
    )
    assert (chosen.correction, chosen.cap, chosen.kl, chosen.kl_beta) == ("truncate", (0.0, 3.0), "k2", 0.5)
    assert chosen.clip == (0.8, 1.5)
    assert loss_preset(LossConfig()) == PRESETS["composer2"]
    assert loss_preset(LossConfig(kl_beta=0.1)).kl == "k1"
    with pytest.raises(UserError, match="needs an estimator"):
        loss_preset(LossConfig(preset="dapo", kl_beta=0.1))
    with pytest.raises(UserError, match="ratio of 1"):
        loss_preset(LossConfig(preset="dapo", clip_low=1.2))


def test_shares_hold_whole_groups():
    rows = [SimpleNamespace(group=g, at=i) for i, g in enumerate([0, 0, 1, 2, 2, 4])]
    parts = shares(rows, 2)
    assert [sorted({row.group for row in part}) for part, _ in parts] == [[0, 1], [2, 4]]
    assert [share for _, share in parts] == [0.5, 0.5]
    assert [len(part) for part, _ in shares(rows, 9)] == [2, 1, 2, 1]
    assert shares([], 3) == [([], 1.0)]


def test_mismatch_estimators_follow_their_definitions():
    trainer, engine = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.1, -2.0, -0.2, -5.0])
    mismatch = Mismatch()
    mismatch.add(trainer[:1], engine[:1])
    mismatch.add(trainer[1:], engine[1:])
    d = (trainer - engine).double().tolist()
    metrics = mismatch.metrics("mismatch")
    assert metrics["mismatch/k1"] == pytest.approx(-sum(d) / 4)
    assert metrics["mismatch/k2"] == pytest.approx(sum(x * x / 2 for x in d) / 4)
    assert metrics["mismatch/k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 4)
    short = [max(-1.0, min(1.0, x)) for x in d]
    assert metrics["mismatch/k3_clip"] == pytest.approx(sum(math.exp(x) - 1 - x for x in short) / 4)
    assert metrics["mismatch/max_abs"] == pytest.approx(2.0, abs=1e-6)
    weights = [math.exp(x) for x in d]
    assert metrics["mismatch/ess"] == pytest.approx(sum(weights) ** 2 / (4 * sum(w * w for w in weights)))
    assert metrics["mismatch/chi2"] == pytest.approx(sum(w * w for w in weights) / 4 - 1)
    assert metrics["mismatch/p_ln2"] == 0.25
    assert metrics["mismatch/p_dp"] == 0.25, "only .61 against .82"
    assert metrics["mismatch/k2_lowp"] == pytest.approx(d[3] ** 2 / 2)
    p, e = trainer.double().exp().numpy(), engine.double().exp().numpy()
    assert metrics["mismatch/corr"] == pytest.approx(np.corrcoef(p, e)[0, 1])


def test_mismatch_without_tokens_reports_nothing():
    assert Mismatch().metrics("mismatch") == {}
