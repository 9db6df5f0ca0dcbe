"""Steps of the trainer on a device are those of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from etude.audit.rescoring import set_weights
from etude.config import LossConfig, RLConfig
from etude.models.loading import load_model
from etude.records import Episode
from etude.store import open_store
from etude.trainer.optimizer import MasterAdamW, for_policy
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.presets import loss_preset
from etude.trainer.rl.process import use_deterministic_algorithms
from etude.trainer.rl.reference import Reference
from etude.trainer.rl.step import Learner, train_step
from etude.trainer.rl.value import Critic
from etude.weights.content import load
from tests.device.conftest import Device
from tests.device.fakegpu import NAME
from tests.helpers.trainer_runs import engine_of, new_run, play, publish_versions

pytestmark = pytest.mark.release  # with `make device`, in processes of its own

SYNCS = 45

Played = tuple[RLConfig, dict[str, torch.Tensor], list[list[Episode]], tuple[int, int] | None]


@pytest.fixture(scope="module", params=["qwen3", "moe"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Configuration and weights of a run, two groups that its engine sampled, and the shape of recorded experts."""
    kind = request.param
    run, config = new_run(tmp_path_factory.mktemp(kind), kind, trainer={"lr": 1e-3, "warmup_steps": 0})
    publish_versions(run, config, 1, {})
    _, tensors = load(open_store(str(run / "weights")), 0)
    engine = engine_of(config, tensors, 0)
    groups = [play(engine, number, routes=kind == "moe") for number in (1, 2)]
    return config, tensors, groups, (2, 2) if kind == "moe" else None


def stepped(
    played: Played, device: str, loss: dict[str, object] | None = None, **trainer: object
) -> tuple[dict[str, float], MasterAdamW]:
    """Metrics of a step on `device`, and the optimizer after it."""
    config, tensors, groups, routes = played
    options = {"trainer": config.trainer.model_copy(update={**trainer, "device": device}),
               "rollout": config.rollout.model_copy(update={"prompts": 2}),
               "loss": LossConfig.model_validate(loss or {})}  # fmt: skip
    config = config.model_copy(update=options)
    model = load_model(config.model.path, device=device)
    set_weights(model, {name: tensor.to(device) for name, tensor in tensors.items()})
    optimizer = for_policy(model, config.trainer)
    preset = loss_preset(config.loss)
    reference = Reference(load_model(config.model.path, device=device)) if preset.kl_beta else None
    critic = Critic(model) if preset.advantage == "value" else None
    batch = make_batch((), groups, advantage=preset.advantage, routes=routes if config.trainer.router_replay else None)
    result = train_step(Learner(model, optimizer, reference, critic), batch, config, 0, 0.0)
    assert result.verdict.trains
    return result.metrics, optimizer


@pytest.mark.parametrize("execution", ["rows", "packed", "streaming", "recompute"])
def test_a_step(device: Device, played: Played, execution: str) -> None:
    """Tolerance 2e-4: float32 sums in another order, as between executions on the host."""
    cut = {"execution": execution, "micro_tokens": 100 if execution in ("streaming", "recompute") else 8192}
    replay = {"router_replay": played[3] is not None}
    host, expected = stepped(played, "cpu", **cut, **replay)
    there, optimizer = stepped(played, device.name, **cut, **replay)
    assert there.keys() == host.keys()
    for name in ("optim/grad_norm", "loss/policy", "off_policy/k2"):
        assert there[name] == pytest.approx(host[name], rel=2e-4, abs=2e-6), name
    for name, tensor in optimizer.state().items():
        assert tensor.device.type == ("cpu" if name.startswith("step/") else device.type), name
        assert torch.allclose(tensor.cpu().float(), expected.state()[name].float(), rtol=2e-2, atol=2e-4), name


@pytest.mark.parametrize("options", [
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "offload_activations": True, "offload_optimizer": True},
])  # fmt: skip
def test_memory_options(device: Device, played: Played, options: dict[str, object]) -> None:
    """The same gradients, whatever waits in the host's memory or is computed again: tolerance as above."""
    plain, _ = stepped(played, device.name)
    saved, optimizer = stepped(played, device.name, **options)
    assert saved["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"], rel=2e-4)
    state = {name: tensor for name, tensor in optimizer.state().items() if not name.startswith("step/")}
    places = {tensor.device.type for tensor in state.values()}
    assert places == ({"cpu"} if "offload_optimizer" in options else {device.type})


@pytest.mark.parametrize("preset", ["ppo", "gspo"])
def test_presets(device: Device, played: Played, preset: str) -> None:
    """A critic, a reference model and ratios of whole episodes; several updates of a batch."""
    loss = {"preset": preset, "updates": 2, "kl": "k3", "kl_beta": 0.1}
    host, _ = stepped(played, "cpu", loss)
    there, _ = stepped(played, device.name, loss)
    assert there["optim/grad_norm"] == pytest.approx(host["optim/grad_norm"], rel=2e-3)


@contextmanager
def deterministic() -> Iterator[None]:
    """As in the process of a trainer that repeats bits."""
    before = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    use_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if before is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


def test_a_deterministic_step(device: Device, played: Played) -> None:
    """A step takes no function that PyTorch has no deterministic algorithm for, and repeats its bits."""
    options = {"execution": "rows", "router_replay": played[3] is not None}
    with deterministic():
        runs = [stepped(played, device.name, **options) for _ in range(2)]
    (metrics, first), (again, second) = runs
    assert metrics["optim/grad_norm"] == again["optim/grad_norm"]
    assert all(torch.equal(tensor, second.state()[name]) for name, tensor in first.state().items())


def test_the_host_waits_for_few_values(device: Device, played: Played) -> None:
    """The host waits at every copy of a value to it. A step on two groups in one pass may do so this often; the number
    must not grow with tokens or layers."""
    if device.type != NAME:
        pytest.skip("the stand-in counts")
    stepped(played, device.name)
    assert sum(device.syncs.values()) <= SYNCS, device.syncs
