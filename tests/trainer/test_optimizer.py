import pytest
import torch

from etude.config import TrainerConfig
from etude.errors import UserError
from etude.trainer import checkpoint
from etude.trainer.optimizer import MasterAdamW


class Tiny(torch.nn.Module):
    """Two linear layers; `named_tensors` needs nothing but named parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        self.load_state_dict({name: t.bfloat16() for name, t in self.state_dict().items()})

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def steps(model, optimizer, first, count):
    metrics = {}
    for n in range(first, first + count):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(n))
        model(x).square().sum().backward()
        metrics = optimizer.step(n, 0.0)
    return metrics


def test_live_weights_are_the_bfloat16_rounding_of_the_master():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = MasterAdamW(model, TrainerConfig(lr=1e-2))
    steps(model, optimizer, 1, 3)
    published = optimizer.published()
    for name, live in model.named_parameters():
        assert torch.equal(live, published[name].float())
    masters = {k.removeprefix("master/"): v for k, v in optimizer.state().items() if k.startswith("master/")}
    assert any(not torch.equal(masters[n], published[n].float()) for n in masters), "the master keeps more bits"


def test_master_steps_are_those_of_torch_adamw():
    torch.manual_seed(0)
    model, other = Tiny(), Tiny()
    config = TrainerConfig(lr=1e-2, warmup_steps=0, grad_clip=1e9)
    optimizer = MasterAdamW(model, config)
    other.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2, betas=config.betas, weight_decay=0.0)
    steps(model, optimizer, 1, 1)
    other(torch.randn(4, 5, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    plain.step()
    state = optimizer.state()
    for name, parameter in other.named_parameters():
        assert torch.allclose(state[f"master/{name}"], parameter, atol=1e-7)


def test_warmup_and_clipping():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = MasterAdamW(model, TrainerConfig(lr=1e-2, warmup_steps=3))
    assert steps(model, optimizer, 1, 1)["optim/lr"] == pytest.approx(1e-2 / 4)
    assert steps(model, optimizer, 4, 1)["optim/lr"] == pytest.approx(1e-2)


def test_the_learning_rate_falls_to_zero_in_the_last_share_of_the_run():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = MasterAdamW(model, TrainerConfig(lr=1e-2, warmup_steps=0, decay=0.4))
    rates = []
    for progress in (0.0, 0.6, 0.8, 1.0):
        model(torch.ones(1, 5)).sum().backward()
        rates.append(optimizer.step(1, progress)["optim/lr"])
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 0.0])


def test_a_non_finite_gradient_skips_the_step():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = MasterAdamW(model, TrainerConfig())
    before = {name: t.clone() for name, t in optimizer.state().items()}
    (model(torch.full((1, 5), float("nan"))).sum()).backward()
    assert optimizer.step(1, 0.0)["optim/skipped"] == 1.0
    assert all(torch.equal(before[name], t) for name, t in optimizer.state().items())


def test_resume_from_a_checkpoint_is_exact(tmp_path):
    torch.manual_seed(0)
    model = Tiny()
    optimizer = MasterAdamW(model, TrainerConfig(lr=1e-2))
    steps(model, optimizer, 1, 3)
    checkpoint.save(tmp_path, 3, optimizer.state(), keep=2)
    steps(model, optimizer, 4, 3)

    torch.manual_seed(9)
    resumed_model = Tiny()
    resumed = MasterAdamW(resumed_model, TrainerConfig(lr=1e-2))
    resumed.load(checkpoint.load(tmp_path, 3))
    steps(resumed_model, resumed, 4, 3)
    expected = optimizer.state()
    actual = resumed.state()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_checkpoints_keep_the_newest_and_leave_nothing_half_written(tmp_path):
    for version in range(4):
        checkpoint.save(tmp_path, version, {"x": torch.full((2,), float(version))}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_3"]
    with pytest.raises(UserError, match=r"version 1 .*there: 2, 3"):
        checkpoint.load(tmp_path, 1)


def test_a_full_disk_is_one_sentence(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(UserError, match="checkpoint of version 0 cannot be written"):
        checkpoint.save(blocked, 0, {"x": torch.zeros(1)}, keep=1)
