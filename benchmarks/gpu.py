"""`make gpu`: what waits for a GPU, in steps of less than eight minutes, each in a process of its own.

    python -m benchmarks.gpu [--out DIR] [--steps NAME,...] [--device DEVICE] [--small] [--dry-run]

Every step writes DIR/NAME.json: {"step", "status", "seconds", "figures", "why"}. A step first asks what is there; what
is missing (a GPU, a package, a C compiler, vLLM) makes its status "absent", which is no failure. Nothing needs the
network, and this file itself no package. `--dry-run` prints the steps and what is missing for each.
`--device cpu --small` runs them on any machine. vLLM is that of ETUDE_VLLM_PYTHON, or the one beside this Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SECONDS = 460.0  # of a step, at most
ROOT = Path(__file__).resolve().parent.parent
RUN = """
stage = "rl"
name = "gpu"
[model]
path = {model!r}
[tasks]
environment = "recipes.environments.reverse_text:ReverseText"
arguments = {{ count = 40 }}
[rollout]
prompts = 4
group = 8
turns = 1
tokens = 32
context = 256
[trainer]
steps = {steps}
lr = 1e-3
dtype = "bfloat16"
device = {device!r}
[inference]
device = {device!r}
dtype = "bfloat16"
{inference}
{tables}
[guards]
act = false
[eval]
samples = 1
"""


@dataclass(frozen=True)
class Setting:
    """Where a step runs: a PyTorch device, with models of real size or, for a try of the script, of a small one."""

    device: str
    small: bool
    out: Path

    @property
    def shape(self) -> PretrainedConfig:
        """Qwen3-0.6B's, or a small one of the same class."""
        from transformers import Qwen3Config

        if self.small:
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 72_000}  # fmt: skip
            return Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=4096)
        from benchmarks.models import qwen3_600m

        return qwen3_600m()

    @property
    def eight(self) -> PretrainedConfig:
        """Qwen3-8B's, or a small one of the same class."""
        from benchmarks.gpu_8b import shape

        return shape(self.small)


class Absent(Exception):
    """What a step needs is not on this machine."""


def machine(setting: Setting) -> dict[str, Any]:
    """What is there; "" for what is not."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figures: dict[str, Any] = {
        "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "gib": round(pages / 2**30, 1),
        "compiler": compiler(), "torch": _version("torch"), "triton": _version("triton"), "vllm": vllm(),
        "packages_missing": packages_missing(), "packages_older": packages_older(),
    }  # fmt: skip
    if figures["torch"] and setting.device.startswith("cuda"):
        import torch

        figures["cuda"] = torch.version.cuda or ""
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(setting.device)
            figures |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1)}
    return figures


def device_tests(setting: Setting) -> dict[str, Any]:
    """Trainer, engine and weights on the device against the host."""
    if setting.device == "cpu":
        return _pytest("tests/device", "--device", "fakegpu")
    return _pytest("tests/device", "--device", setting.device, "--ignore", "tests/device/test_planted.py")


def flex(setting: Setting) -> dict[str, Any]:
    """The compiled attention of shared prompts, forward and backward, against the host."""
    return _pytest("tests/models/test_flex.py", "-m", "gpu")


def triton_kernels(setting: Setting) -> dict[str, Any]:
    """The codec's kernels, compiled."""
    return _pytest("tests/weights/test_triton_kernels.py")


def deterministic(setting: Setting) -> dict[str, Any]:
    """Whether two runs of deterministic mode publish the same bits."""
    digests = [_published(setting, f"deterministic-{number}", "--deterministic") for number in (1, 2)]
    if digests[0] != digests[1]:
        raise RuntimeError(f"two runs published different bits: {digests}")
    return {"versions": len(digests[0])}


def trainer(setting: Setting) -> dict[str, Any]:
    """Tokens per second and peak memory of forward and backward passes, against transformers with the same attention
    and checkpointing; medians of five."""
    import torch

    from benchmarks.models import pass_of, tokens_of
    from etude.trainer.activations import checkpoint_activations

    count, length = (2, 64) if setting.small else (8, 2048)
    tokens = tokens_of(count, length, setting.shape.vocab_size)
    figures: dict[str, Any] = {"tokens": count * length}
    for name in ("plain", "checkpointed"):
        model = random_model(setting)
        if name == "checkpointed":
            checkpoint_activations(model)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        reset_peak(setting)
        seconds = timed(setting, lambda model=model: pass_of(model, tokens))
        figures |= {f"{name}/tokens_per_s": count * length / seconds, f"{name}/peak_gib": peak(setting)}
    model = random_model(setting, "sdpa")
    model.gradient_checkpointing_enable()
    ids_BT = torch.randint(0, setting.shape.vocab_size, (1, length), device=setting.device)

    def theirs() -> None:
        for _ in range(count):
            model(ids_BT, labels=ids_BT).loss.backward()

    reset_peak(setting)
    seconds = timed(setting, theirs)
    figures |= {"transformers/tokens_per_s": count * length / seconds, "transformers/peak_gib": peak(setting)}
    return figures | {"vs-transformers": figures["checkpointed/tokens_per_s"] * seconds / (count * length)}


def engine(setting: Setting) -> dict[str, Any]:
    """Tokens per second of answers, with peak memory, against transformers' generate."""
    import torch

    prompt, answer, batches = _sizes(setting)
    figures: dict[str, Any] = {}
    model = random_model(setting)
    for batch in batches:
        ours = _engine(setting, model)
        reset_peak(setting)
        for _ in range(2):  # the first round compiles
            prompts = torch.randint(1, setting.shape.vocab_size, (batch, prompt)).tolist()
            begun = time.perf_counter()
            for future in _submitted(ours, prompts, answer):
                future.result(SECONDS)
            figures[f"etude/b{batch}"] = batch * answer / (time.perf_counter() - begun)
        figures[f"etude/b{batch}/peak_gib"] = peak(setting)
        ours.close()
        plain = random_model(setting, "sdpa").eval()
        generate = partial(plain.generate, torch.tensor(prompts, device=setting.device))
        seconds = timed(setting, partial(generate, max_new_tokens=answer, min_new_tokens=answer), 1)
        figures[f"transformers/b{batch}"] = batch * answer / seconds
    return figures


def adapters_8b(setting: Setting) -> dict[str, Any]:
    """Adapters of a model of 8B parameters in the trainer."""
    from benchmarks import gpu_8b

    return gpu_8b.adapters(setting)


def decode_8b(setting: Setting) -> dict[str, Any]:
    """The engine with a model of 8B parameters."""
    from benchmarks import gpu_8b

    return gpu_8b.decode(setting)


def vllm_engine(setting: Setting) -> dict[str, Any]:
    """Tokens per second of vLLM, as `engine` measures its own."""
    prompt, answer, batches = _sizes(setting)
    words = [ROOT / "benchmarks" / "gpu_vllm.py", _model_folder(setting), setting.shape.vocab_size, prompt, answer]
    command = [_environment()["ETUDE_VLLM_PYTHON"], *map(str, words), *map(str, batches)]
    return json.loads(_output(setting, command).strip().splitlines()[-1])


def swap(setting: Setting) -> dict[str, Any]:
    """How long a version takes from the trainer's tensors to an engine's, 1 % of the weights changed, and for how long
    of that its running requests stand still."""
    import torch

    from etude.models.loading import named_tensors
    from etude.store import open_store
    from etude.weights.publisher import Publisher
    from etude.weights.receiver import Receiver

    model, store = random_model(setting).eval(), open_store(str(_emptied(setting.out / "swap")))
    live = named_tensors(model)
    tensors = {name: tensor.clone() for name, tensor in live.items()}
    publisher = Publisher(store, 16)
    publisher.publish(0, tensors, (), {})
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll(0))
    for tensor in tensors.values():
        tensor += (torch.rand_like(tensor) < 0.01) * tensor / 64
    begun = time.perf_counter()
    publisher.publish(1, tensors, (), {})
    published = time.perf_counter()
    update = receiver.poll(1)
    fetched = time.perf_counter()
    ours = _engine(setting, model)
    prompt, answer, batches = _sizes(setting)
    prompts = torch.randint(1, setting.shape.vocab_size, (batches[-1], prompt)).tolist()
    answers = _submitted(ours, prompts, answer)
    pause = ours.swap(1, partial(receiver.apply, update)).result(SECONDS)
    for future in answers:
        future.result(SECONDS)
    ours.close()
    return {"publish_s": published - begun, "fetch_s": fetched - published, "pause_s": pause}


def sft(setting: Setting) -> dict[str, Any]:
    """A model of random weights is fine-tuned on conversations, and its folder loads with plain transformers."""
    from transformers import AutoModelForCausalLM

    folder, output = _model_folder(setting), _emptied(setting.out / "outputs" / "sft")
    words = [{"role": "user", "content": "Reverse: abc"}, {"role": "assistant", "content": "cba"}]
    data = setting.out / "chat.jsonl"
    data.write_text("".join(json.dumps({"messages": words}) + "\n" for _ in range(64)))
    config = setting.out / "sft.toml"
    config.write_text(SFT.format(model=str(folder), data=str(data), device=setting.device))
    _etude(setting, "train", str(config))
    AutoModelForCausalLM.from_pretrained(output / "checkpoint")
    return {"files": sorted(path.name for path in (output / "checkpoint").iterdir())}


def rl(setting: Setting) -> dict[str, Any]:
    """A run of etude's engine and trainer on the device."""
    return _versions(_published(setting, "rl"), STEPS_OF_A_RUN)


def rl_adapters(setting: Setting) -> dict[str, Any]:
    """The same run with adapters in place of all weights."""
    return _versions(_published(setting, "rl-adapters", tables="[trainer.lora]\nrank = 8"), STEPS_OF_A_RUN)


def rl_on_vllm(setting: Setting) -> dict[str, Any]:
    """The same with vLLM as the engine, on the trainer's GPU."""
    lines = 'engine = "vllm"\ngpu_memory_utilization = 0.3\nargs = ["--enforce-eager"]'
    return _versions(_published(setting, "rl-vllm", inference=lines), STEPS_OF_A_RUN)


def resume(setting: Setting) -> dict[str, Any]:
    """A run that is killed after its first optimizer step goes on."""
    return _versions(_published(setting, "resume", steps=8, killed=True), 8)


def _versions(digests: list[str], steps: int) -> dict[str, Any]:
    if len(digests) != steps + 1:
        raise RuntimeError(f"{len(digests)} versions after {steps} steps")
    return {"versions": len(digests)}


@dataclass(frozen=True)
class Step:
    """A step of the script."""

    work: Callable[[Setting], dict[str, Any]]
    real_gpu: bool = False  # no device but a GPU will do
    compiles: bool = True  # on a GPU with Triton, which needs a C compiler
    vllm: bool = False


STEPS = {
    "machine": Step(machine), "device-tests": Step(device_tests), "flex": Step(flex, real_gpu=True),
    "triton": Step(triton_kernels, real_gpu=True), "deterministic": Step(deterministic), "trainer": Step(trainer),
    "engine": Step(engine, compiles=False), "adapters-8b": Step(adapters_8b), "decode-8b": Step(decode_8b),
    "swap": Step(swap), "sft": Step(sft), "rl": Step(rl), "rl-adapters": Step(rl_adapters),
    "resume": Step(resume), "vllm": Step(vllm_engine, real_gpu=True, vllm=True),
    "rl-vllm": Step(rl_on_vllm, real_gpu=True, vllm=True),
}  # fmt: skip
STEPS_OF_A_RUN = 3
SFT = """
stage = "sft"
name = "sft"
model.path = {model!r}
[data]
files = [{data!r}]
[trainer]
device = {device!r}
dtype = "bfloat16"
length = 128
batch = 8
"""


def missing(name: str, setting: Setting) -> str:
    """Why a step cannot run here; empty if it can, as far as is known before it starts."""
    step, on_gpu = STEPS[name], setting.device.startswith("cuda")
    if name == "machine":
        return ""
    if packages := packages_missing():
        return f"{len(packages)} packages are not installed: {', '.join(packages[:3])}{', ...' * (len(packages) > 3)}"
    if on_gpu and not _cuda_is_available():
        return "no GPU that PyTorch can use"
    if step.real_gpu and not on_gpu:
        return f"{setting.device} is no GPU"
    if on_gpu and step.compiles and not _version("triton"):
        return "Triton is not installed"
    if on_gpu and step.compiles and not compiler():
        return "no C compiler, which Triton needs"
    return "vLLM is not installed" if step.vllm and not vllm() else ""


def packages_missing() -> list[str]:
    """What etude[train] needs and is not installed beside this Python."""
    return [name for name in _wanted() if not _version(name)]


def packages_older() -> list[str]:
    """What is installed, but older than etude[train] asks for; the steps run nevertheless."""
    from packaging.version import Version

    there = {name: _version(name) for name in _wanted()}
    return [
        f"{name} {there[name]} < {least}"
        for name, least in _wanted().items() if there[name] and least and Version(there[name]) < Version(least)
    ]  # fmt: skip


@cache
def _wanted() -> dict[str, str]:
    """The packages of etude[train], and the least version of each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines, wanted = [*project["dependencies"], "etude[train]"], dict[str, str]()
    for line in lines:
        if more := re.match(r"etude\[(\w+)\]", line):
            lines += project["optional-dependencies"][more[1]]
            continue
        name, _, least = line.partition(">=")
        wanted[name] = least
    return wanted


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def compiler() -> str:
    """The C compiler that Triton finds; empty without one."""
    return os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc") or ""


def vllm() -> str:
    """The version of the vLLM that ETUDE_VLLM_PYTHON names, or of the one beside this Python; empty without one."""
    if python := os.environ.get("ETUDE_VLLM_PYTHON"):
        code = "import importlib.metadata as m; print(m.version('vllm'))"
        try:
            return subprocess.run(
                [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""
    return _version("vllm")


def _sizes(setting: Setting) -> tuple[int, int, tuple[int, int]]:
    """Tokens of prompts and answers, and how many requests there are at a time."""
    return (16, 8, (1, 4)) if setting.small else (512, 128, (1, 32))


def _engine(setting: Setting, model: PreTrainedModel) -> Any:
    """An engine that runs."""
    from etude.config import EngineConfig
    from etude.inference.engine.engine import Engine

    cache_mb = 64 if setting.small else 8192
    ours = Engine(model.eval(), EngineConfig(device=setting.device, dtype="bfloat16", cache_mb=cache_mb))
    ours.start()
    return ours


def _submitted(engine: Any, prompts: list[list[int]], answer: int) -> list[Any]:
    """Futures of answers of just so many tokens."""
    from etude.inference.engine.requests import Request

    requests = [Request(ids=ids, max_tokens=answer, seed=i, stop=()) for i, ids in enumerate(prompts)]
    return [engine.submit(request).future for request in requests]


def random_model(setting: Setting, attention: str = "") -> PreTrainedModel:
    """Random bfloat16 weights on the device, with etude's attention unless another is named."""
    import torch
    from transformers import AutoModelForCausalLM

    from etude.models import attention as own
    from etude.models import experts

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        setting.shape, dtype=torch.bfloat16, attn_implementation=attention or own.NAME,
        **({} if attention else {"experts_implementation": experts.NAME}),
    )  # fmt: skip
    return model.to(setting.device).train()


def _model_folder(setting: Setting) -> Path:
    """A model and a tokenizer that a run can start from, made without the network; whole, or not there."""
    folder = setting.out / ("model-small" if setting.small else "model")
    if not folder.exists():
        import torch
        from tests.helpers.folders import big_tokenizer
        from tests.helpers.speakers import TEMPLATE, write_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        part = _emptied(folder.with_suffix(".part"))
        AutoModelForCausalLM.from_config(setting.shape, dtype=torch.bfloat16).save_pretrained(part)
        write_model(part, big_tokenizer(setting.shape.vocab_size), TEMPLATE)
        part.rename(folder)
    return folder


def _emptied(folder: Path) -> Path:
    """The folder without what an earlier try left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _published(
    setting: Setting,
    name: str,
    *flags: str,
    inference: str = "",
    tables: str = "",
    steps: int = STEPS_OF_A_RUN,
    killed: bool = False,
) -> list[str]:
    """Digests of the versions of a short run; `inference` are further lines of that table, `tables` further tables."""
    from etude.store import open_store
    from etude.weights.manifest import manifests, published_versions

    folder, config, run = _model_folder(setting), setting.out / f"{name}.toml", setting.out / "outputs" / name
    shutil.rmtree(run, ignore_errors=True)
    inference = inference or f"cache_mb = {64 if setting.small else 4096}"
    config.write_text(
        RUN.format(model=str(folder), steps=steps, device=setting.device, inference=inference, tables=tables)
    )
    words = ["train", str(config), "--name", name, "--rollout.staleness", "0", *flags]
    if killed:
        with (setting.out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                _command(words), cwd=setting.out, env=_environment(), start_new_session=True, stdout=log, stderr=log
            )
        end = time.monotonic() + SECONDS / 2
        while not (run / "weights").exists() or len(published_versions(open_store(str(run / "weights")))) < 2:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the run ended with {process.poll()} before its first step: {log.name}")
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        words = ["train", "--resume", str(run)]
    _etude(setting, *words)
    return [manifest.digest for manifest in manifests(open_store(str(run / "weights")))]


def _etude(setting: Setting, *words: str) -> None:
    _output(setting, _command(list(words)))


def _output(setting: Setting, command: list[str]) -> str:
    done = subprocess.run(command, cwd=setting.out, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])
    return done.stdout


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "etude.cli.main", *words]


def _environment() -> dict[str, str]:
    """Without the network, and with the vLLM beside this Python unless another is named."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"ETUDE_VLLM_PYTHON": sys.executable, **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(paths)}  # fmt: skip


def _pytest(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--show-capture=no", "--tb=short", *words],
        cwd=ROOT, env=_environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if package := re.search(r"ModuleNotFoundError: No module named '([^']+)'", done.stdout):
        raise Absent(f"the tests need {package[1]}, which is not installed")
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode or " passed" not in last:
        raise RuntimeError((done.stdout + done.stderr)[-1500:])
    return {"tests": last}


def timed(setting: Setting, work: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of `work`, the median after one try."""
    import torch

    seconds: list[float] = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        work()
        if setting.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def reset_peak(setting: Setting) -> None:
    import torch

    if setting.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def peak(setting: Setting) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if setting.device.startswith("cuda") else 0.0


def _version(package: str) -> str:
    """Of an installed package; empty without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run_step(name: str, setting: Setting) -> dict[str, Any]:
    """In the step's own process."""
    begun, result = time.perf_counter(), {"step": name, "status": "ok", "figures": {}, "why": missing(name, setting)}
    if result["why"]:
        return result | {"status": "absent", "seconds": 0.0}
    try:
        result["figures"] = STEPS[name].work(setting)
    except Absent as e:
        result |= {"status": "absent", "why": str(e)}
    except Exception as e:
        result |= {"status": "failed", "why": f"{type(e).__name__}: {e}"}
    return result | {"seconds": round(time.perf_counter() - begun, 1)}


def main() -> int:
    """Runs the steps, or with `--step` one in this process; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--steps", default=",".join(STEPS), help="names, separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: a try of the script")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        print(f"there is no step {unknown[0]}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    setting = Setting(arguments.device, arguments.small, arguments.out.resolve())
    if arguments.dry_run:
        for name in names:
            why = missing(name, setting)
            print(f"{name:14} {'absent: ' + why if why else 'can run'}")
        return 0
    setting.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if arguments.step:
        _write(setting, _run_step(arguments.step, setting))
        return 0
    results = [_own_process(name, setting) for name in names]
    return int(any(result["status"] in ("failed", "timeout") for result in results))


def _own_process(name: str, setting: Setting) -> dict[str, Any]:
    (setting.out / f"{name}.json").unlink(missing_ok=True)
    words = ["--step", name, "--device", setting.device, "--out", str(setting.out)]
    command = [sys.executable, "-m", "benchmarks.gpu", *words, *(["--small"] if setting.small else [])]
    process = subprocess.Popen(command, cwd=ROOT, env=_environment(), start_new_session=True)
    try:
        process.wait(SECONDS)
        if not (setting.out / f"{name}.json").exists():
            why = f"the process ended with {process.returncode}"
            _write(setting, {"step": name, "status": "failed", "figures": {}, "why": why, "seconds": 0.0})
    except (subprocess.TimeoutExpired, SystemExit) as stopped:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(stopped, SystemExit):  # SIGTERM: a step does not outlive the script
            raise
        why = f"more than {SECONDS:.0f} s"
        _write(setting, {"step": name, "status": "timeout", "figures": {}, "why": why, "seconds": SECONDS})
    result = json.loads((setting.out / f"{name}.json").read_text())
    print(
        f"{name:14} {result['status']:8} {result['seconds']:6.1f} s  {result['why'] or json.dumps(result['figures'])}",
        flush=True,
    )
    return result


def _write(setting: Setting, result: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=setting.out, delete=False) as file:
        json.dump(result, file, indent=1)
    os.replace(file.name, setting.out / f"{result['step']}.json")


if __name__ == "__main__":
    sys.exit(main())
