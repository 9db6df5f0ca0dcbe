"""Engines: of a run, behind `etude serve`, and in evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field

from etude.config.sections import Section


class EngineConfig(Section):
    """What an engine may use and how it computes: in a run, behind `etude serve`, and in evaluations."""

    threads: int = Field(default=1, ge=1, description="CPU threads")
    device: str = Field(default="cpu", description="PyTorch device of the model")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="type that the model computes in; log-probabilities are float32"
    )
    max_batch: int = Field(default=128, ge=1, description="sequences computed at a time; others wait")
    prefill_tokens: int = Field(
        default=1024, ge=1, description="prompt tokens of one pass; and as many of documents, in a pass of their own"
    )
    cache_mb: float = Field(
        default=512, gt=0, description="MB for keys and values of running sequences and of kept prefixes"
    )
    documents_mb: float = Field(default=256, gt=0, description="MB for keys and values of documents")
    speculate: bool = Field(
        default=True, description="draft text that the answer may repeat; never in deterministic mode"
    )


class InferenceConfig(EngineConfig):
    """The inference servers of a run. What else they are told follows from other tables of the run."""

    servers: int = Field(default=1, ge=1, description="inference servers of the run")
    port: int = Field(default=0, ge=0, le=65535, description="first port; 0 picks free ones")


class WeightSource(Section):
    """Where a server takes new versions of its weights from."""

    weights: str = Field(description="URL of the store whose newest version is served")
    relay: str | None = Field(default=None, description="URL of the cluster's relay, asked before the store")
    peers: tuple[str, ...] = Field(default=(), description="URLs of servers that may repair this one's weights")
    coordinator: str | None = Field(default=None, description="URL of the coordinator of this server's replica")
    member: str = Field(default="", description="name of this server in its replica")
    public_key: Path | None = Field(default=None, description="serve only versions that this key has signed")
    accepted: Path | None = Field(default=None, description="file that remembers the newest signed version served")

    @pydantic.model_validator(mode="after")
    def _a_memory_needs_a_key(self) -> WeightSource:
        if self.accepted is not None and self.public_key is None:
            raise ValueError("--accepted needs --public-key: without a key every manifest is believed")
        return self


class ServerConfig(EngineConfig):
    """One inference server: of `etude serve`, of an evaluation, or of a run, whose tables it is then made from."""

    model: str = Field(description="Hugging Face folder")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    threads: int = Field(default=2, ge=1, description="CPU threads")
    max_length: int | None = Field(
        default=None, ge=2, description="tokens of prompt and answer together; none: the model's context"
    )
    deterministic: bool = Field(default=False, description="the same request gives the same bits, whatever runs beside")
    routes: bool = Field(default=False, description="keep the experts of every token for requests that ask for them")
    source: WeightSource | None = None
    ready_file: Path | None = Field(default=None, description="file written with URL and PID once the server answers")
