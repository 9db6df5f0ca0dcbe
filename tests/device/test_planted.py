"""The stand-in finds device mistakes: each of the list is made in turn, and must make a step, a publication or an
answer fail or differ. Every one is tried in a fork, whose modules are compiled anew with the mistake; threads do not
survive a fork, so this process only imports, and each fork makes the models, runs and stores of its check."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from etude.config import LoraConfig
from etude.models import flex
from tests.device import test_engine, test_trainer, test_weights
from tests.device.conftest import Device, dense_flex
from tests.device.fakegpu import NAME, fakegpu
from tests.device.test_engine import SECOND, store_of_two_versions
from tests.device.test_trainer import Played, played_by
from tests.helpers.tiny_models import save_random_model

# With `make device`, in a process of its own: threads that an earlier test has started, of autograd or a store, are
# missing in a fork.
pytestmark = pytest.mark.release
FORK_SECONDS = 240.0

# A module, what it says, what is said instead, and the check that must notice.
LEFT_OUT = tuple((module, right, right.replace(left_out, "", 1), check) for module, right, left_out, check in (
    ("trainer.rl.execution", "torch.from_numpy(ids_T).to(device)[None]", ".to(device)", "rows"),
    ("trainer.rl.execution", "torch.from_numpy(positions_T).to(device)[None]", ".to(device)", "rows"),
    ("trainer.rl.execution", "torch.from_numpy(part.source_S).to(hidden_TD.device)", ".to(hidden_TD.device)", "rows"),
    ("trainer.rl.batch", ".to(device, dtype)", "device, ", "rows"),
    ("trainer.head", ".astype(np.int64)).to(hidden_SD.device)", ".to(hidden_SD.device)", "rows"),
    ("trainer.optimizer", "dtype=torch.float32, device=where", ", device=where", "rows"),
    ("models.flex", "torch.from_numpy(sees_NN).to(device)", ".to(device)", "packed"),
    ("models.router_replay", "torch.from_numpy(routes_TLK).to(device).long()", ".to(device)", "rows"),
    ("models.experts", "torch.arange(T * K, device=order.device)", ", device=order.device", "rows"),
    ("trainer.rl.value", "torch.nn.Linear(weight.shape[1], 1).to(weight.device)", ".to(weight.device)", "ppo"),
    ("trainer.rl.policies", "dtype=torch.double, device=device", ", device=device", "gspo"),
    ("models.loading", "model.to(device).eval()", ".to(device)", "answers"),
    ("inference.engine.forward", "_padded(position_N, padding)).to(device)[None]", ".to(device)", "answers"),
    ("inference.engine.sampling", "torch.from_numpy(divisor).to(logits_NV.device)", ".to(logits_NV.device)", "answers"),
    ("inference.engine.sampling_params", "astype(np.float32)).to(logits_V.device)", ".to(logits_V.device)", "answers"),
    ("inference.engine.device_sampling", "[order]).to(log_probs_NV.device)", ".to(log_probs_NV.device)", "answers"),
    ("inference.engine.attention_metadata", ".to(self.device, torch.int64)", "self.device, ", "answers"),
    ("inference.engine.attention_metadata", 'self.cache.keys.device.type == "cpu" and ',
     'self.cache.keys.device.type == "cpu" and ', "answers"),
    ("models.document_spans", "torch.from_numpy(padded_N).to(device)", ".to(device)", "documents"),
    ("models.document_spans", 'cos_1TD.device.type != "cpu" or ', 'cos_1TD.device.type != "cpu" or ', "documents"),
    ("weights.receiver", "torch.from_numpy(positions).to(tensor.device)", ".to(tensor.device)", "versions"),
))  # fmt: skip
OTHERS = (
    # the first device in place of the engine's
    ("inference.engine.forward", "device = cache.keys.device", "device = torch.device(cache.keys.device.type)",
     "answers"),
    # memory that nobody has written
    ("inference.engine.cache", "torch.zeros(shape, dtype=dtype", "torch.empty(shape, dtype=dtype", "answers"),
    # values that are read before they have arrived
    ("inference.engine.device_sampling", "torch.cat(columns).cpu()", 'torch.cat(columns).to("cpu", non_blocking=True)',
     "answers"),
    ("weights.snapshots", '"cpu", copy=True)', '"cpu", copy=True, non_blocking=True)', "published"),
    ("trainer.rl.reference", '"cpu", copy=True)', '"cpu", copy=True, non_blocking=True)', "gspo"),
    # the host's random numbers
    ("models.batch_invariant", "torch.randn(rows, weight_VD.shape[1], generator=noise)",
     "torch.randn(rows, weight_VD.shape[1], generator=noise, device=weight_VD.device)", "answers"),
    # what should wait on the host or be computed again, and is kept on the device
    ("trainer.rl.process", "if options.activation_checkpointing:", "if False:", "memory"),
    ("trainer.rl.process", "offload=options.offload_activations", "offload=False", "memory"),
    ("trainer.activations", "with save_on_cpu(pin_memory=pinned):", "with nullcontext():", "memory"),
    ("trainer.optimizer", "self._offload = offload", "self._offload = False", "memory"),
    ("trainer.lora", "on_host=config.offload_optimizer", "on_host=False", "memory of adapters"),
    # weights that do not follow their adapters
    ("trainer.lora", "super().apply(lr)\n        self.adapters.merge()", "super().apply(lr)", "adapters"),
    # waiting in every layer
    ("models.experts", "torch.searchsorted(expert, every_E, right=True, out_int32=True)",
     "flat.bincount(minlength=module.num_experts).cumsum(0).int()", "waits"),
    ("inference.engine.sampling_params", "masked_fill_(logits_V < logits_V.topk(self.top_k).values[-1], -math.inf)",
     "__setitem__(logits_V < logits_V.topk(self.top_k).values[-1], -math.inf)", "waits"),
    ("inference.engine.attention_metadata", "(R, T), (H, K) = self.position_RT.shape,",
     "(R, T), (H, K) = (len(self.rows), int(self.slot_N.max()) + 1),", "waits"),
    # what deterministic algorithms need, and a sum without an order
    ("trainer.rl.process", 'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")', "pass", "deterministic"),
    ("models.experts", "counts_E.index_add_(0, layer.flatten(), w)",
     "counts_E += torch.bincount(layer.flatten(), w, self.experts)", "deterministic"),
)  # fmt: skip
MISTAKES = LEFT_OUT + OTHERS
OF_EXPERTS = ("models.experts", "models.router_replay")  # tried with a model that has some, as those of an engine are
ENGINE = ("answers", "documents", "versions", "waits")
NOT_OURS = ("SyntaxError", "NameError", "ImportError", "AttributeError")  # of what was planted, not of a device


def plant(module: ModuleType, right: str, wrong: str) -> None:
    """Compile a module with the mistake, and put what it defines in the place of what others have imported of it."""
    text = Path(str(module.__file__)).read_text()
    assert right in text, f"{module.__name__} no longer says {right!r}"
    before = dict(vars(module))
    exec(compile(text.replace(right, wrong), str(module.__file__), "exec"), vars(module))
    new = {id(before[name]): value for name, value in vars(module).items() if callable(before.get(name))}
    for other in [m for name, m in sys.modules.items() if name.startswith(("etude.", "tests."))]:
        for name, value in list(vars(other).items()):
            if id(value) in new:
                setattr(other, name, new[id(value)])


def in_a_fork(work: Callable[[], None]) -> str:
    """How `work` failed; "" if it did not."""
    with tempfile.TemporaryFile("w+") as file:
        pid = os.fork()
        if not pid:
            torch.set_num_threads(1)
            code = 0
            try:
                work()
            except BaseException:
                code = 1
                file.write(traceback.format_exc())
                file.flush()
            os._exit(code)
        deadline = time.monotonic() + FORK_SECONDS
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError(f"a fork did not end within {FORK_SECONDS:.0f} s: was the device used before?")
            time.sleep(0.02)
        failed = ended[1] != 0
        file.seek(0)
        return (file.read() or "it was killed") if failed else ""


def judged(name: str, folder: Path, changes: list[tuple[str, str, str]]) -> None:
    """Makes what a check needs, then the changes of modules (module, right, wrong), and runs the check by its name."""
    moe = save_random_model(folder / "moe", "moe")
    played = (
        None if name in ENGINE or name == "published" else played_by("moe" if folder.name == "moe" else "qwen3", folder)
    )
    store = store_of_two_versions(moe, folder / "versions") if name == "versions" else None
    of = {"answers": test_engine.answers, "documents": test_engine.answers_over_documents}
    if store is not None:
        of["versions"] = lambda place, model: test_engine.answers_of_versions(place, model, store)
    host = of[name]("cpu", moe) if name in of else []
    for module, right, wrong in changes:
        plant(importlib.import_module(f"etude.{module}"), right, wrong)
    flex._compiled = lambda: dense_flex  # also of the module that was compiled anew
    with fakegpu() as syncs:
        device = Device(NAME, syncs)
        if name in of:
            test_engine.same(of[name](SECOND, moe), host)
        elif name == "waits":
            test_engine.waits(Device(SECOND, syncs), moe)
        elif name == "published":
            test_weights.test_published_from_a_device(device, folder)
        else:
            assert played is not None
            trained(device, played, name)


def trained(device: Device, played: Played, name: str) -> None:
    """A check of the trainer."""
    if name in ("rows", "packed"):
        test_trainer.test_a_step(device, played, name)
    elif name in ("ppo", "gspo"):
        test_trainer.test_presets(device, played, name)
    elif name == "adapters":
        test_trainer.test_adapters(device, played)
    elif name == "deterministic":
        test_trainer.test_a_deterministic_step(device, played)
    else:
        lora = LoraConfig(rank=4) if name == "memory of adapters" else None
        test_trainer.test_memory_options(device, played, lora)


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_every_mistake_is_found(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Those of trainer and engine with a mixture of experts, where their modules need one; the others with a dense
    model. Modules that are compiled anew as they stand give no error."""
    if request.config.getoption("--device") != NAME:
        pytest.skip("the stand-in is judged")
    mine = [m for m in MISTAKES if (m[0] in OF_EXPERTS or m[3] in ENGINE) == (kind == "moe")]
    assert len(MISTAKES) >= 20

    def tried(name: str, changes: list[tuple[str, str, str]]) -> str:
        folder = tmp_path / str(next(number)) / kind
        folder.mkdir(parents=True)
        return in_a_fork(partial(judged, name, folder, changes))

    number = itertools.count()
    for name in sorted({name for *_, name in mine}):
        assert not (error := tried(name, [(m, right, right) for m, right, _, n in mine if n == name])), error
    for module, right, wrong, name in mine:
        error = tried(name, [(module, right, wrong)])
        assert error, f"not found: {module} says {wrong!r}"
        assert not error.strip().splitlines()[-1].startswith(NOT_OURS), error
