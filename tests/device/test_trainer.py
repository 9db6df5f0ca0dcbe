"""Steps of the trainer on a device are those of the host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from etude.config import LoraConfig, LossConfig, RLConfig
from etude.records import Episode
from etude.store import open_store
from etude.trainer.lora import AdapterAdamW
from etude.trainer.optimizer import MasterAdamW
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.presets import loss_preset
from etude.trainer.rl.process import make_learner, use_deterministic_algorithms
from etude.trainer.rl.step import Learner, train_step
from etude.trainer.world import World
from etude.weights.content import load
from tests.device.conftest import Device
from tests.device.fakegpu import NAME
from tests.helpers.trainer_runs import engine_of, new_run, play, publish_versions

pytestmark = pytest.mark.release  # with `make device`, in processes of its own

SYNCS = 45

Played = tuple[RLConfig, list[list[Episode]], tuple[int, int] | None]


@pytest.fixture(scope="module", params=["qwen3", "moe"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return played_by(request.param, tmp_path_factory.mktemp(request.param))


def played_by(kind: str, folder: Path) -> Played:
    """Configuration of a run, two groups that its engine sampled, and the shape of recorded experts."""
    run, config = new_run(folder, kind, trainer={"lr": 1e-3, "warmup_steps": 0})
    publish_versions(run, config, 1, {})
    _, tensors = load(open_store(str(run / "weights")), 0)
    engine = engine_of(config, tensors, 0)
    groups = [play(engine, number, routes=kind == "moe") for number in (1, 2)]
    return config, groups, (2, 2) if kind == "moe" else None


def configured(played: Played, device: str, loss: dict[str, object] | None = None, **trainer: object) -> RLConfig:
    options = {"trainer": played[0].trainer.model_copy(update={**trainer, "device": device}),
               "rollout": played[0].rollout.model_copy(update={"prompts": 2}),
               "loss": LossConfig.model_validate(loss or {})}  # fmt: skip
    return played[0].model_copy(update=options)


def stepped(
    played: Played, device: str, loss: dict[str, object] | None = None, **trainer: object
) -> tuple[dict[str, float], MasterAdamW]:
    """Metrics of a step on `device`, and the optimizer after it; the learner is that of the trainer's process."""
    config = configured(played, device, loss, **trainer)
    learner = make_learner(config, World(device=config.trainer.device))
    return step_of(learner, config, played), learner.optimizer


def step_of(learner: Learner, config: RLConfig, played: Played) -> dict[str, float]:
    _, groups, routes = played
    advantage = loss_preset(config.loss).advantage
    batch = make_batch((), groups, advantage=advantage, routes=routes if config.trainer.router_replay else None)
    result = train_step(learner, batch, config, 0, 0.0)
    assert result.verdict.trains
    return result.metrics


@pytest.mark.parametrize("execution", ["rows", "packed", "streaming", "recompute"])
def test_a_step(device: Device, played: Played, execution: str) -> None:
    """Tolerance 2e-4: float32 sums in another order, as between executions on the host."""
    cut = {"execution": execution, "micro_tokens": 100 if execution in ("streaming", "recompute") else 8192}
    replay = {"router_replay": played[2] is not None}
    host, expected = stepped(played, "cpu", **cut, **replay)
    there, optimizer = stepped(played, device.name, **cut, **replay)
    assert there.keys() == host.keys()
    for name in ("optim/grad_norm", "loss/policy", "off_policy/k2"):
        assert there[name] == pytest.approx(host[name], rel=2e-4, abs=2e-6), name
    for name, tensor in optimizer.state().items():
        assert tensor.device.type == ("cpu" if name.startswith("step/") else device.type), name
        assert torch.allclose(tensor.cpu().float(), expected.state()[name].float(), rtol=2e-2, atol=2e-4), name


@contextmanager
def saved_bytes() -> Iterator[Counter[str]]:
    """Bytes that autograd keeps for backward passes, parameters apart, by kind of device."""
    kept: Counter[str] = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.device.type] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


MEMORY = {
    "kept": {},
    "computed again": {"activation_checkpointing": True},
    "on the host": {"activation_checkpointing": True, "offload_activations": True, "offload_optimizer": True},
}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
def test_memory_options(device: Device, played: Played, lora: LoraConfig | None) -> None:
    """The same gradients, whatever waits in the host's memory or is computed again (tolerance as above), and fewer
    bytes on the device for each option. Where layers keep their input alone, hooks around the step see nothing else of
    them; inputs that wait on the host are seen by no hook but `save_on_cpu`'s."""
    norms, on_device = dict[str, float](), dict[str, int]()
    for name, options in MEMORY.items():
        config = configured(played, device.name, lora=lora, execution="rows", **options)
        learner = make_learner(config, World(device=config.trainer.device))
        with saved_bytes() as kept:
            norms[name] = step_of(learner, config, played)["optim/grad_norm"]
        on_device[name] = kept[device.type]
        offloaded = "offload_optimizer" in options
        state = learner.optimizer.state()
        places = {t.device.type for n, t in state.items() if not n.startswith("step/")}
        if isinstance(learner.optimizer, AdapterAdamW):
            places |= {t.device.type for t in learner.optimizer.adapters.base().values()}
        assert places == ({"cpu"} if offloaded else {device.type}), name
    assert norms["computed again"] == pytest.approx(norms["kept"], rel=2e-4)
    assert norms["on the host"] == pytest.approx(norms["kept"], rel=2e-4)
    text = AutoConfig.from_pretrained(played[0].model.path)
    four_per_token = sum(len(segment.ids) for group in played[1] for episode in group for segment in episode.segments)
    inputs = text.num_hidden_layers * text.hidden_size * four_per_token  # ids are bytes of int32; inputs are float32
    assert on_device["computed again"] < 0.5 * on_device["kept"]
    saved = on_device["computed again"] - on_device["on the host"]
    assert saved == pytest.approx(inputs, rel=0.1), "the inputs of all layers"


def test_adapters(device: Device, played: Played) -> None:
    """A step on adapters, and the weights that follow them. Tolerances as above."""
    sparse = AutoConfig.from_pretrained(played[0].model.path).model_type == "qwen3_moe"
    targets = ("q_proj", "gate_up_proj", "down_proj") if sparse else "all-linear"
    lora = LoraConfig(rank=4, alpha=8.0, targets=targets)
    host, expected = stepped(played, "cpu", lora=lora)
    there, optimizer = stepped(played, device.name, lora=lora)
    assert there["optim/grad_norm"] == pytest.approx(host["optim/grad_norm"], rel=2e-4)
    assert isinstance(optimizer, AdapterAdamW)
    assert isinstance(expected, AdapterAdamW)
    for name, weight in optimizer.adapters.live().items():
        base = optimizer.adapters.base()[name].to("cpu").float()
        assert not torch.equal(weight.detach().to("cpu").float(), base), name
        theirs = expected.adapters.live()[name].detach()
        assert torch.allclose(weight.detach().to("cpu"), theirs, rtol=2e-2, atol=2e-4), name


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
    options = {"execution": "rows", "router_replay": played[2] is not None}
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
    config = configured(played, device.name)
    learner = make_learner(config, World(device=config.trainer.device))
    device.syncs.clear()
    step_of(learner, config, played)
    assert sum(device.syncs.values()) <= SYNCS, device.syncs
