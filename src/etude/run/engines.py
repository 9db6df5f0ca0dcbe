"""The inference servers of a run or an evaluation: processes that are started, watched and stopped by their parent.

Servers of vLLM run in a separate Python environment, to which only the package etude of this one is added.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

import etude
from etude import processes
from etude.config import InferenceConfig, RLConfig, ServerConfig, WeightSource
from etude.errors import UserError
from etude.models import size_of
from etude.protocol import TOKEN_VARIABLE, new_token, own_token
from etude.protocol.backends import EngineBackend, EtudeBackend, VllmBackend, WeightsOf
from etude.run.vllm_environment import reason_of, vllm_python
from etude.runfolder import PRIVATE
from etude.store import write_durably

LOOPBACK_HOST = "127.0.0.1"
START_SECONDS = {"etude": 180.0, "vllm": 1800.0}  # vLLM may compile first
START_SECONDS_A_GB = 20.0
WORKER = "etude.inference.vllm.worker.WorkerExtension"
GUARD = "etude.inference.vllm.guard.TokenGuard"


def server_config(
    folder: Path, config: RLConfig, number: int, *, host: str = LOOPBACK_HOST, kept: Path | None = None
) -> ServerConfig:
    """The configuration of inference server `number` of the run in `folder`, which listens at `host`. `kept` is the
    folder for its own files, by default that of the run."""
    inference, key = config.inference, config.weights.signing_key
    engine = inference.model_dump(exclude=set(InferenceConfig.model_fields) - set(ServerConfig.model_fields))
    source = WeightSource(
        weights=f"{config.store or folder}/weights",
        relay=config.weights.relay,
        trainer_dtype=config.trainer.dtype,
        public_key=Path(f"{key}.pub") if key else None,
        accepted=(kept or folder) / f"accepted-{number}.json" if key else None,
    )
    own = {
        "model": config.model.path,
        "host": host,
        "port": inference.port and inference.port + number,
        "source": source,
        "max_model_len": config.rollout.context,
        "deterministic": config.deterministic,
        "routes": config.trainer.router_replay,
    }
    return ServerConfig.model_validate(engine | own)


@dataclass(frozen=True)
class StartedEngine:
    """An inference server whose process is started. `known` is its URL, empty while the server chooses the port."""

    child: processes.Child
    logs: Path
    number: int
    known: str = ""

    def url(self, seconds: float) -> str:
        """The server's URL once it answers. Raises UserError if it ends, or does not answer within `seconds`."""
        if not self.known:
            return engine_url(self.child, self.logs, self.number, seconds)
        _wait_for_health(self.child, self.known, time.monotonic() + seconds, seconds)
        return self.known


def start_engine(
    folder: Path,
    config: RLConfig,
    logs: Path,
    token: str,
    number: int = 0,
    *,
    host: str = LOOPBACK_HOST,
    placed: bool = False,
    holds: Sequence[int] = (),
) -> StartedEngine:
    """Starts inference server `number` of the run in `folder`, with the API key `token`; it listens at `host`.
    `placed`: its GPUs are those that this process sees, and its own files go into `logs`. The server keeps the
    descriptors `holds` open."""
    if config.inference.engine == "vllm":
        return _start_vllm(config, logs, token, number, host, placed, holds)
    kept = logs if placed else None
    own = server_config(folder, config, number, host=host, kept=kept)
    return StartedEngine(spawn_engine(own, logs, number, token, holds=holds), logs, number)


def start_engines(
    folder: Path, config: RLConfig, logs: Path, token: str, *, holds: Sequence[int] = ()
) -> tuple[list[processes.Child], list[str]]:
    """Starts the inference servers of a run with the API key `token`; returns their processes and URLs once all answer.
    With inference.urls there are no processes. Raises UserError if a server does not answer. The servers keep the
    descriptors `holds` open. Start the trainer afterwards: vLLM measures its device, and refuses to start unless its
    share is free, and to go on if the free memory grows meanwhile."""
    inference, engines = config.inference, list[StartedEngine]()
    if inference.urls:
        return [], list(inference.urls)
    try:
        for number in range(inference.servers):
            engines.append(start_engine(folder, config, logs, token, number, holds=holds))
        seconds = start_seconds(inference, config.model.path)
        urls = [engine.url(seconds) for engine in engines]
    except BaseException:
        for engine in engines:
            engine.child.stop(1)
        raise
    return [engine.child for engine in engines], urls


def start_seconds(inference: InferenceConfig, model: str | Path) -> float:
    """The deadline of a server's start."""
    by_size = START_SECONDS[inference.engine] + START_SECONDS_A_GB * size_of(Path(model)) / 1e9
    return inference.start_seconds or by_size


def backend_of(folder: Path, config: RLConfig) -> EngineBackend:
    """The client's backend for the servers of the run in `folder`. Raises UserError."""
    if config.inference.engine == "etude":
        return EtudeBackend()
    from etude.models import expert_layers

    layers = expert_layers(Path(config.model.path)) if config.trainer.router_replay else None
    name = f"{config.name[:64]}-{secrets.token_hex(8)}"
    key = config.weights.signing_key
    weights = WeightsOf(
        f"{config.store or folder.absolute()}/weights", config.weights.relay or "", f"{key}.pub" if key else ""
    )
    return VllmBackend(name, weights, context=config.rollout.context, expert_layers=layers)


def _start_vllm(
    config: RLConfig, logs: Path, token: str, number: int, host: str, placed: bool, holds: Sequence[int]
) -> StartedEngine:
    inference, folder = config.inference, logs / "package"
    folder.mkdir(exist_ok=True)  # for PYTHONPATH: no other package of this environment is in it
    link = folder.absolute() / "etude"
    if not link.exists():
        link.symlink_to(Path(etude.__file__).parent, target_is_directory=True)
    port = inference.port + number if inference.port else _free_port(host)
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(link.parent), os.environ.get("PYTHONPATH")))),
        TOKEN_VARIABLE: token,
        "HF_HUB_OFFLINE": "1",
        "VLLM_API_KEY": token,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.trainer.router_replay:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # this runner returns experts
    if not inference.on_cpu and not placed:
        env["CUDA_VISIBLE_DEVICES"] = visible_devices(inference, number)
    log = logs / f"inference-{number}.log"
    words, python = vllm_arguments(config, port, host), vllm_python(inference)
    child = processes.start("inference server", words, log, env, holds=holds, python=python, reason=reason_of)
    return StartedEngine(child, logs, number, f"http://{host}:{port}")


def visible_devices(inference: InferenceConfig, number: int) -> str:
    """CUDA_VISIBLE_DEVICES of a server: a GPU for each of its workers. Raises UserError for one that this process does
    not see."""
    own = inference.devices[number * inference.workers : (number + 1) * inference.workers]
    return ",".join(map(_visible, own))


def _visible(device: str) -> str:
    """The GPU in CUDA_VISIBLE_DEVICES; the numbers of a configuration are those of the GPUs that this process sees."""
    number, seen = int(device.partition(":")[2] or 0), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else seen.split(",")
    if names is not None and number >= len(names):
        raise UserError(f"an inference server needs {device}, and CUDA_VISIBLE_DEVICES = {seen} has {len(names)}")
    return str(number) if names is None else names[number]


def vllm_arguments(config: RLConfig, port: int, host: str = LOOPBACK_HOST) -> list[str]:
    """The module and arguments of a vLLM server of the run."""
    inference = config.inference
    share, cache = inference.gpu_memory_utilization, int(inference.vllm_cache_mb * 2**20)
    options = {
        "--host": host,
        "--port": port,
        "--dtype": inference.dtype,
        "--max-model-len": config.rollout.context,
        "--max-num-seqs": inference.max_batch,
        # On a CPU the share would be one of the whole machine's memory.
        **({"--kv-cache-memory-bytes": cache} if inference.on_cpu else {"--gpu-memory-utilization": share}),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": WORKER,
        "--middleware": GUARD,  # vLLM's key leaves the routes of its development mode open to the network
    }
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details"]
    if config.trainer.router_replay:
        flags.append("--enable-return-routed-experts")
    words = [str(word) for pair in options.items() for word in pair]
    return ["vllm.entrypoints.cli.main", "serve", config.model.path, *words, *flags, *inference.args]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as free:
        return free.getsockname()[1]


def _wait_for_health(child: processes.Child, url: str, deadline: float, seconds: float) -> None:
    while time.monotonic() < deadline:
        if child.exit_code is not None:
            raise UserError(f"{child.end()}; see {child.log}")
        try:
            if httpx2.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.5)
    raise UserError(
        f"the {child.name} was not ready after {seconds:.0f} seconds; see {child.log}, or raise inference.start_seconds"
    )


def engine_token() -> str:
    """The API key of this process's engines: the environment's, which relays take too, else a new key.
    Raises UserError."""
    return own_token() or new_token()


def spawn_engine(
    config: ServerConfig, logs: Path, number: int = 0, token: str | None = None, *, holds: Sequence[int] = ()
) -> processes.Child:
    """Starts an inference server that dies with this process; `engine_url` waits until it is ready. The server reads
    its configuration from a file in `logs`; its API key `token` is in its environment alone."""
    path, ready = _config_file(logs, number), _ready_file(logs, number)
    ready.unlink(missing_ok=True)
    text = config.model_copy(update={"ready_file": ready}).model_dump_json(indent=2) + "\n"
    write_durably(path, text.encode(), PRIVATE)
    return processes.start(
        "inference server",
        ["etude.inference.server.server", str(path)],
        logs / f"inference-{number}.log",
        {TOKEN_VARIABLE: token or ""},
        holds=holds,
    )


def engine_url(engine: processes.Child, logs: Path, number: int = 0, seconds: float | None = None) -> str:
    """The URL of a spawned server once it answers. Raises UserError if it dies or is not ready after `seconds`, by
    default after the time that its model's size allows."""
    if seconds is None:
        model = json.loads(_config_file(logs, number).read_text())["model"]
        seconds = start_seconds(InferenceConfig(), model)
    return json.loads(processes.wait_for_file(_ready_file(logs, number), engine, seconds))["url"]


def _config_file(logs: Path, number: int) -> Path:
    return logs / f"inference-{number}.config.json"


def _ready_file(logs: Path, number: int) -> Path:
    return logs / f"inference-{number}.json"
