"""Configuration of engines: of a run, behind `etude serve`, and in evaluations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pydantic
from pydantic import Field

from etude.config.sections import Section, option


class EngineConfig(Section):
    """The resources of an engine, and its way of computing: in a run, behind `etude serve`, and in evaluations."""

    threads: int = option(1, "CPU threads", ge=1)
    device: str = option("cpu", "PyTorch device of the model")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "type of the computation; auto: float32 on the CPU, elsewhere the checkpoint's; logits are float32"
    )
    max_batch: int = option(128, "sequences computed at a time; others wait", ge=1)
    prefill_tokens: int = option(1024, "prompt tokens of one pass; as many of documents, in a pass of their own", ge=1)
    cache_mb: float | None = option(
        None,
        "MB for keys and values of sequences and kept prefixes; none: on the CPU the size of 16 long sequences, "
        "between 512 and an eighth of the memory, with CUDA 0.8 of the free memory",
        gt=0,
    )
    documents_mb: float = option(256, "MB for keys and values of documents", gt=0)
    speculate: bool = option(True, "draft text that the answer may repeat; never in deterministic mode")

    @property
    def on_cpu(self) -> bool:
        """Whether the model is on the CPU."""
        return self.device.partition(":")[0] == "cpu"

    @property
    def in_float32(self) -> bool:
        """Whether the computation is known to be in float32 before the checkpoint is read."""
        return self.dtype == "float32" or (self.dtype == "auto" and self.on_cpu)


Engine = Literal["etude", "vllm"]
_OF_THE_RUN = {
    "--gpu-memory-utilization": "inference.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "inference.cache_mb",
    "--max-num-seqs": "inference.max_batch",
    "--max-model-len": "rollout.context",
    "--model": "model.path",
    "--port": "inference.port",
}


_WORKERS = ("--tensor-parallel-size", "-tp")
_NOT_FED = {
    "pipeline parallelism": ("--pipeline-parallel-size", "-pp"),
    "data parallelism": ("--data-parallel-size", "-dp"),
    "context parallelism": ("--prefill-context-parallel-size", "-pcp", "--decode-context-parallel-size", "-dcp"),
    "expert parallelism": ("--enable-expert-parallel", "-ep"),
}


class InferenceConfig(EngineConfig):
    """The inference servers of a run. Their other settings follow from other tables of the run."""

    engine: Engine = option("etude", "the engine of the servers: etude's own or vllm (docs/serving.md)")
    urls: tuple[str, ...] = option((), "servers of yours that already run, in place of new ones")
    servers: int = option(1, "inference servers of the run", ge=1)
    port: int = option(0, "first port; 0 picks free ones", ge=0, le=65535)
    start_seconds: float | None = option(
        None,
        "deadline of a server's start; none: 180 seconds and 20 for each GB of the model, for vLLM, which may compile "
        "first, 1,800 and 20",
        gt=0,
    )
    python: str | None = option(None, "Python with vLLM; none: $ETUDE_VLLM_PYTHON")
    gpu_memory_utilization: float = option(0.92, "share of its GPU's memory that a server of vLLM takes", gt=0, le=1)
    args: tuple[str, ...] = option((), "further arguments of vLLM's server")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _others_compute_in_the_published_type(cls, data: Any) -> Any:
        """The default of other engines is bfloat16, the type of the published tensors."""
        if not isinstance(data, dict):
            return data
        table = cast(dict[str, Any], data)
        return table if table.get("engine", "etude") == "etude" else {"dtype": "bfloat16", **table}

    @pydantic.model_validator(mode="after")
    def _options_belong_to_the_engine(self) -> InferenceConfig:
        fields = type(self).model_fields
        changed = [name for name in fields if getattr(self, name) != fields[name].default]
        of_etude = {"threads", "prefill_tokens", "documents_mb", "speculate"}
        of_others = {"python", "args", "gpu_memory_utilization"}
        of_starting = {"servers", "port", "start_seconds", *of_others}
        if self.engine != "etude" and (wrong := [name for name in changed if name in of_etude]):
            raise ValueError(f"{wrong[0]} is an option of etude's engine: for {self.engine}, give its own with args")
        if self.engine == "etude" and (wrong := [name for name in changed if name in of_others]):
            raise ValueError(f'{wrong[0]} is not an option of etude\'s engine: set engine = "vllm", or leave it out')
        if self.urls and (wrong := [name for name in changed if name in of_starting]):
            raise ValueError(f"urls are servers that others have started: drop {wrong[0]}")
        if self.engine == "vllm":
            self._check_vllm(changed)
        if self.engine != "etude" and self.dtype != "bfloat16":
            raise ValueError(f"{self.engine} serves the published tensors, which are bfloat16: drop dtype")
        if wrong := [url for url in self.urls if not re.fullmatch(r"https?://[^/@\s]+/?", url)]:
            raise ValueError(f"{wrong[0]!r} is not a URL like http://host:8000, without user and path")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("urls name a server twice")
        return self

    def _check_vllm(self, changed: Sequence[str]) -> None:
        """Raises ValueError for memory that is not that of the device, and for arguments that the run gives itself."""
        if self.on_cpu and "gpu_memory_utilization" in changed:
            raise ValueError('gpu_memory_utilization is for a GPU: with device = "cpu", cache_mb sets vLLM\'s memory')
        if not self.on_cpu and "cache_mb" in changed:
            raise ValueError("cache_mb is what gpu_memory_utilization leaves to vLLM on a GPU: set that, and drop it")
        names = [word.partition("=")[0].replace("_", "-") for word in self.args]
        if wrong := [name for name in names if name in _OF_THE_RUN]:
            raise ValueError(f"args has {wrong[0]}, which the run gives: set {_OF_THE_RUN[wrong[0]]}")
        for kind, own in _NOT_FED.items():
            if wrong := [name for name in names if name in own]:
                raise ValueError(f"args has {wrong[0]}: servers with {kind} are not updated, use {_WORKERS[0]} alone")
        try:
            _ = self.workers
        except (ValueError, IndexError):
            raise ValueError(f"args has {_WORKERS[0]} without a number of workers") from None

    @property
    def workers(self) -> int:
        """The workers of each server that the run starts, which on a GPU have one each."""
        values = [word.partition("=") for word in self.args]
        at = [i for i, (name, _, _) in enumerate(values) if name.replace("_", "-") in _WORKERS]
        return max(int(values[at[-1]][2] or self.args[at[-1] + 1]), 1) if at else 1

    @property
    def count(self) -> int:
        """The number of servers in the run."""
        return len(self.urls) or self.servers

    @property
    def vllm_cache_mb(self) -> float:
        """MB for keys and values of a server of vLLM on the CPU; on a GPU it takes a share."""
        return self.cache_mb or 4096.0

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each server that the run starts. Each worker of vLLM has a GPU, from `device` on."""
        if self.urls:
            return ()
        if self.engine == "etude" or self.on_cpu:
            return (self.device,) * self.servers
        kind, _, first = self.device.partition(":")
        return tuple(f"{kind}:{int(first or 0) + number}" for number in range(self.servers * self.workers))


class WeightSource(Section):
    """The place from which a server takes new versions of its weights."""

    weights: str = Field(description="URL of the store whose newest version is served")
    relay: str | None = option(None, "URL of the cluster's relay, which is tried before the store")
    trainer_dtype: Literal["float32", "bfloat16"] = option("float32", "type that the store's trainer computes in")
    peers: tuple[str, ...] = option((), "URLs of servers that may repair this one's weights")
    public_key: Path | None = option(None, "serve only versions that this key has signed")
    accepted: Path | None = option(None, "file that remembers the newest signed version served")

    @pydantic.model_validator(mode="after")
    def _a_memory_needs_a_key(self) -> WeightSource:
        if self.accepted is not None and self.public_key is None:
            raise ValueError("--accepted needs --public-key: without a key every manifest is believed")
        return self


class ServerConfig(EngineConfig):
    """One inference server: of `etude serve`, of an evaluation, or of a run, which fills it from its own tables."""

    model: str = Field(description="Hugging Face folder")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one", ge=0, le=65535)
    threads: int = option(2, "CPU threads", ge=1)
    max_model_len: int | None = option(None, "tokens of prompt and answer together; none: the model's context", ge=64)
    served_model_name: tuple[str, ...] = option((), "names of the model in requests; the first is the name in answers")
    deterministic: bool = option(False, "the same request gives the same bits, whatever runs beside")
    routes: bool = option(False, "keep the experts of every token for requests that ask for them")
    source: WeightSource | None = None
    ready_file: Path | None = option(None, "file written with URL and PID once the server answers")
