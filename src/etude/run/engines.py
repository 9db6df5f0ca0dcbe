"""The inference servers of a run: started with the run's configuration, and ended with it."""

from __future__ import annotations

import json
from pathlib import Path

from etude import processes
from etude.config import RLConfig
from etude.errors import UserError

START_SECONDS = 180.0


def start_engines(folder: Path, config: RLConfig, logs: Path) -> tuple[list[processes.Child], list[str]]:
    """The inference servers of a run and their URLs, ready to answer."""
    inference = config.inference
    argv = ["--model", config.model.path, "--weights", f"{config.store or folder}/weights"]
    argv += ["--threads", str(inference.threads), "--device", inference.device, "--dtype", inference.dtype]
    argv += ["--max-batch", str(inference.max_batch), "--max-length", str(config.rollout.context)]
    argv += ["--relay", config.weights.relay] if config.weights.relay else []
    argv += ["--documents-mb", str(inference.documents_mb)]
    argv += ["--deterministic"] if config.deterministic else []
    argv += [] if inference.speculate else ["--no-speculate"]
    argv += ["--routes"] if config.trainer.router_replay else []
    key = config.weights.signing_key
    argv += ["--public-key", f"{key}.pub"] if key else []
    own = [["--accepted", str(folder / f"accepted-{i}.json")] if key else [] for i in range(inference.servers)]
    children = [
        spawn_engine([*argv, *own[i], "--port", str(inference.port and inference.port + i)], logs, i)
        for i in range(inference.servers)
    ]
    try:
        return children, [engine_url(child, logs, i) for i, child in enumerate(children)]
    except UserError:
        for child in children:
            child.stop(1)
        raise


def spawn_engine(argv: list[str], logs: Path, number: int) -> processes.Child:
    """An inference server that dies with this process; `engine_url` waits until it is ready."""
    ready = ["--ready-file", str(logs / f"inference-{number}.json"), "--parent-death"]
    return processes.start(
        "inference server", ["etude.inference.server.server", *argv, *ready], logs / f"inference-{number}.log"
    )


def engine_url(engine: processes.Child, logs: Path, number: int) -> str:
    """Where a spawned server answers. Raises UserError if it dies or is not ready in time."""
    return json.loads(processes.wait_for_file(logs / f"inference-{number}.json", engine, START_SECONDS))["url"]
