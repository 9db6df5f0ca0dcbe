import math

import pytest
import torch

from etude.config import TrainerConfig
from etude.trainer import checkpoint
from etude.trainer.optimizer import AdamWSettings, MasterAdamW, for_policy, learning_rate
from etude.weights.ranks import Ranks


class Tiny(torch.nn.Module):
    """Two linear layers; `named_tensors` needs nothing but named parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        self.load_state_dict({name: t.bfloat16() for name, t in self.state_dict().items()})

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


CONFIG = TrainerConfig(lr=1e-2)


def steps(model, optimizer, first, count, config=CONFIG):
    """Norms of the gradients of `count` updates; update n has the data of seed n."""
    norms = []
    for n in range(first, first + count):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(n))
        model(x).square().sum().backward()
        norms.append(optimizer.collect())
        optimizer.apply(learning_rate(config, n, 0.0))
    return norms


def test_live_weights_are_the_bfloat16_rounding_of_the_master():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = for_policy(model, CONFIG)
    steps(model, optimizer, 1, 3)
    published = optimizer.published()
    for name, live in model.named_parameters():
        assert torch.equal(live, published[name].float())
    masters = {k.removeprefix("master/"): v for k, v in optimizer.state().items() if k.startswith("master/")}
    assert any(not torch.equal(masters[n], published[n].float()) for n in masters), "the master keeps more bits"


def test_updates_of_a_policy_are_those_of_torch_adamw_in_every_bit():
    """The masters after five updates, with clipping and decay, against torch's own clipping and AdamW."""
    torch.manual_seed(0)
    model, other = Tiny(), Tiny()
    config = TrainerConfig(lr=1e-2, warmup_steps=0, grad_clip=0.5, weight_decay=0.1)
    optimizer = for_policy(model, config)
    other.load_state_dict(model.state_dict())
    masters = {n: p.detach().clone().requires_grad_() for n, p in sorted(other.named_parameters())}
    plain = torch.optim.AdamW(masters.values(), lr=1e-2, betas=config.betas, weight_decay=0.1, foreach=True)
    for n in range(1, 6):
        (norm,) = steps(model, optimizer, n, 1, config)
        other(torch.randn(4, 5, generator=torch.Generator().manual_seed(n))).square().sum().backward()
        for name, live in other.named_parameters():
            masters[name].grad, live.grad = live.grad, None
        assert torch.nn.utils.clip_grad_norm_(masters.values(), 0.5).item() == norm > 0.5
        plain.step()
        with torch.no_grad():
            for name, live in other.named_parameters():
                live.copy_(masters[name].bfloat16())
    state = optimizer.state()
    for name, master in masters.items():
        assert torch.equal(state[f"master/{name}"], master), name
        assert torch.equal(state[f"exp_avg_sq/{name}"], plain.state[master]["exp_avg_sq"]), name


def test_updates_of_the_earlier_stages_are_those_of_the_papers_formula_in_every_bit():
    """Bias out of the second moment before the root, float64 scalars, decay of matrices only; tensor by tensor."""
    torch.manual_seed(0)
    model = Tiny().bfloat16()
    named = dict(model.named_parameters())
    optimizer = MasterAdamW(named, AdamWSettings((0.9, 0.95), 0.1, 0.5, "paper", decay_vectors=False))
    masters = {n: p.detach().float() for n, p in named.items()}
    first, second = ({n: torch.zeros_like(m) for n, m in masters.items()} for _ in range(2))
    for t in range(1, 6):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(t)).bfloat16()).square().sum().backward()
        grads = {n: p.grad.float() for n, p in named.items()}
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()])).item()
        assert optimizer.collect() == norm > 0.5
        optimizer.apply(0.01)
        for n, master in masters.items():
            grad = grads[n] * (0.5 / (norm + 1e-6))
            first[n] = torch.lerp(first[n], grad, 1 - 0.9)
            second[n] = (second[n] * 0.95).addcmul(grad, grad, value=1 - 0.95)
            root = (second[n] / (1 - 0.95**t)).sqrt() + 1e-8
            masters[n] = (master * (1 - 0.01 * 0.1 * (master.ndim > 1))).addcdiv(
                first[n], root, value=-0.01 / (1 - 0.9**t)
            )
    state = optimizer.state()
    for name, master in masters.items():
        assert torch.equal(state[f"master/{name}"], master), name
        assert torch.equal(named[name], master.bfloat16()), name


@pytest.mark.parametrize(("bucket", "offload"), [(16, False), (2**26, True), (16, True)])
def test_buckets_and_states_on_the_host_change_no_bit(monkeypatch, bucket, offload):
    """The kernels are elementwise; buckets of 16 elements cut the tensors of 35, 7, 21 and 3."""
    config = TrainerConfig(lr=1e-2, weight_decay=0.1)
    states = []
    for options in ({}, {"offload": offload}):
        torch.manual_seed(0)
        model = Tiny()
        live = dict(model.named_parameters())
        optimizer = MasterAdamW(live, AdamWSettings(config.betas, 0.1, 1.0), **options)
        steps(model, optimizer, 1, 4, config)
        states.append(optimizer.state() | {f"live/{n}": p.detach() for n, p in live.items()})
        monkeypatch.setattr("etude.trainer.optimizer.BUCKET", bucket)
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())


def test_a_policys_gradients_are_summed_in_float32():
    """A thousand passes: a bfloat16 sum stops growing once a gradient is less than 2^-9 of the sum."""
    model = Tiny().bfloat16()
    optimizer = for_policy(model, CONFIG)
    x = torch.full((1, 5), 0.5, dtype=torch.bfloat16)
    model(x).sum().backward()
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    for _ in range(999):
        model(x).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        assert torch.allclose(p.grad, 1000 * once[name], rtol=1e-4), name  # a thousand roundings of 2^-24
    assert math.isfinite(optimizer.collect())


def test_the_learning_rate_warms_up_and_falls_to_zero_in_the_last_share_of_the_run():
    config = TrainerConfig(lr=1e-2, warmup_steps=3)
    assert [learning_rate(config, n, 1.0) for n in (1, 4, 9)] == pytest.approx([1e-2 / 4, 1e-2, 1e-2])
    config = TrainerConfig(lr=1e-2, warmup_steps=0, decay=0.4)
    rates = [learning_rate(config, 1, progress) for progress in (0.0, 0.6, 0.8, 1.0, 1.1)]
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 0.0, 0.0])


def test_a_tensor_without_gradient_and_dropped_gradients_change_nothing():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = for_policy(model, CONFIG)
    before = {name: t.clone() for name, t in optimizer.state().items()}
    (model(torch.full((1, 5), float("nan"))).sum()).backward()
    assert math.isnan(optimizer.collect())
    optimizer.drop()
    optimizer.apply(1.0)
    assert all(torch.equal(before[name], t) for name, t in optimizer.state().items())
    model.a(torch.ones(1, 5)).sum().backward()
    optimizer.collect()
    optimizer.apply(1.0)
    changed = {name for name, t in optimizer.state().items() if not torch.equal(before[name], t)}
    assert changed == {f"{part}/{name}" for part in ("master", "exp_avg", "exp_avg_sq", "step")
                       for name in ("a.weight", "a.bias")}  # fmt: skip


def test_resume_from_a_checkpoint_is_exact(tmp_path):
    torch.manual_seed(0)
    model = Tiny()
    optimizer = for_policy(model, CONFIG)
    steps(model, optimizer, 1, 3)
    parts = checkpoint.parts_of(optimizer.state())
    checkpoint.write(tmp_path, 3, parts, Ranks(0, 1, "a"), {})
    steps(model, optimizer, 4, 3)

    torch.manual_seed(9)
    resumed_model = Tiny()
    resumed = for_policy(resumed_model, CONFIG)
    resumed.load(checkpoint.load(tmp_path, 3)[0])
    steps(resumed_model, resumed, 4, 3)
    expected = optimizer.state()
    actual = resumed.state()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_an_optimizer_follows_a_version_and_keeps_what_rounds_to_it(tmp_path):
    torch.manual_seed(0)
    model = Tiny()
    optimizer = for_policy(model, CONFIG)
    steps(model, optimizer, 1, 2)
    before = {name: t.clone() for name, t in optimizer.state().items()}
    published = {name: t.clone() for name, t in optimizer.published().items()}
    changed = next(iter(published))
    published[changed].view(-1)[0] = 7.0
    optimizer.follow(published)
    assert all(torch.equal(t, published[name]) for name, t in optimizer.published().items())
    after = optimizer.state()
    assert after[f"master/{changed}"].view(-1)[0] == 7.0
    after[f"master/{changed}"].view(-1)[0] = before[f"master/{changed}"].view(-1)[0]
    assert all(torch.equal(after[name], before[name]) for name in before)
