"""vLLM's routes with etude's engine behind them: bodies as vLLM 0.32 takes and sends them, and what it refuses.

The worker's methods, the receiver and the weights are real; so are log-probabilities, experts and versions. It keeps
a trace of its swaps: how many tokens of each request had been sampled when new weights came.
"""

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.config import EngineConfig
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.inference.vllm.worker import Following, WorkerExtension
from etude.models.files import expert_layers
from etude.models.loading import load_model, named_tensors
from etude.records import Generation
from etude.store import open_store
from etude.weights.manifest import newest_manifest
from etude.weights.receiver import Receiver
from tests.helpers.http_apps import answering

PARAMS = {
    "max_tokens", "temperature", "top_p", "seed", "stop_token_ids", "logprobs", "prompt_logprobs", "ignore_eos",
    "detokenize", "routed_experts_prompt_start", "stream_interval",
}  # fmt: skip
FIELDS = {"request_id", "token_ids", "sampling_params", "cache_salt", "stream", "stream_options"}


@dataclass
class FakeVllm:
    """One server. `trace` holds, for each swap, its version and the sampled tokens of the requests that ran."""

    engine: Engine
    layers: list[int]  # of the model, and of which experts are returned
    configuration: dict[str, Any] = field(default_factory=dict[str, Any])
    trace: list[tuple[int, dict[str, int]]] = field(default_factory=list[tuple[int, dict[str, int]]])
    salts: list[str] = field(default_factory=list[str])
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])  # spans
    calls: list[str] = field(default_factory=list[str])
    token_seconds: float = 0.0  # that a token takes longer
    off: float = 0.0  # of the log-probabilities of sampled tokens
    _live: dict[str, int] = field(default_factory=dict[str, int])
    _names: dict[int, str] = field(default_factory=lambda: {-1: "default"})
    _worker: WorkerExtension | None = None

    def app(self) -> Starlette:
        """The routes."""
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/collective_rpc", self.rpc, methods=["POST"]),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
                Route("/update_weight_version", self.name, methods=["POST"]),
                Route("/is_paused", lambda _: JSONResponse({"is_paused": self.engine.is_paused})),
                Route("/health", lambda _: Response()),
                Route("/version", lambda _: JSONResponse({"version": "0.32.0"})),
                Route("/server_info", lambda _: JSONResponse({"vllm_config": self.vllm_config()})),
                Route("/weight_info", lambda _: JSONResponse({"weight_version": self._names[self.engine.version]})),
                Route("/metrics", self.metrics),
            ]
        )

    def vllm_config(self) -> dict[str, Any]:
        model = {
            "dtype": "torch.bfloat16", "max_model_len": self.engine.max_length, "quantization": None,
            "logprobs_mode": "processed_logprobs",
        }  # fmt: skip
        worker = "etude.inference.vllm.worker.WorkerExtension"
        parallel = {
            "pipeline_parallel_size": 1, "data_parallel_size": 1, "decode_context_parallel_size": 1,
            "enable_expert_parallel": False, "tensor_parallel_size": 1, "worker_extension_cls": worker,
        }  # fmt: skip
        config: dict[str, Any] = {"model_config": model, "parallel_config": parallel, "speculative_config": None}
        for name, values in self.configuration.items():
            config[name] = values if config[name] is None else config[name] | values
        return config

    # Requests

    async def generate(self, http: HTTPRequest) -> Response:
        body = await http.json()
        params = body["sampling_params"]
        if wrong := (set(body) - FIELDS) | (set(params) - PARAMS):
            return _refused(f"unknown fields {sorted(wrong)}")
        salt = body.get("cache_salt")
        if salt is not None and (not salt or len(salt) > 128 or set(salt) & set("@/\\\0")):
            return _refused("Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/'")
        if len(body["token_ids"]) + params["max_tokens"] > self.engine.max_length:
            return _refused("the prompt and max_tokens are longer than max_model_len")
        if "prompt_logprobs" in params:
            return JSONResponse(await self._scored(body["token_ids"]))
        self.salts.append(salt)
        key = body["request_id"]
        self._live[key] = 0
        start = params.get("routed_experts_prompt_start", 0)
        request = Request(
            ids=body["token_ids"], max_tokens=params["max_tokens"], temperature=params["temperature"],
            top_p=params["top_p"], seed=params["seed"], stop=tuple(params["stop_token_ids"]), session=salt,
            routes_from=start,
        )  # fmt: skip
        loop, came = asyncio.get_running_loop(), asyncio.Queue[tuple[int, float] | None]()

        def count(token: int, logprob: float) -> None:
            self._live[key] += 1
            time.sleep(self.token_seconds)
            loop.call_soon_threadsafe(came.put_nowait, (token, logprob + self.off))

        sequence = self.engine.submit(request, count)
        sequence.future.add_done_callback(lambda _: loop.call_soon_threadsafe(came.put_nowait, None))
        assert body["stream"], "answers come as events"
        return StreamingResponse(self._events(key, sequence, came, body), media_type="text/event-stream")

    async def _events(self, key: str, sequence: Any, came: asyncio.Queue, body: dict[str, Any]) -> AsyncIterator[str]:
        """The first token at once, then so many together; the rest with the end."""
        every, sent = body["sampling_params"].get("stream_interval", 1), 0
        ready: list[tuple[int, float]] = []
        try:
            while (sampled := await came.get()) is not None:
                ready.append(sampled)
                if sent and len(ready) < every:
                    continue
                content = [{"token_id": token, "logprob": logprob} for token, logprob in ready]
                choice = {"index": 0, "token_ids": [token for token, _ in ready], "finish_reason": None}
                yield f"data: {json.dumps({'choices': [choice | {'logprobs': {'content': content}}]})}\n\n"
                sent, ready = sent + len(ready), []
            whole = self._answer(key, sequence.future.result(), body)
            last = whole["choices"][0]
            last |= {
                "token_ids": last["token_ids"][sent:], "logprobs": {"content": last["logprobs"]["content"][sent:]}
            }  # fmt: skip
            yield f"data: {json.dumps({'choices': [last]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': whole['usage']})}\n\ndata: [DONE]\n\n"
        finally:
            sequence.abort()

    def _answer(self, key: str, generation: Generation, body: dict[str, Any]) -> dict[str, Any]:
        assert generation.routes is not None
        moe_TLK = generation.routes.array().astype(np.uint8)
        all_TLK = np.zeros((len(moe_TLK), len(self.layers), moe_TLK.shape[2]), np.uint8)
        all_TLK[:, [i for i, layer in enumerate(self.layers) if layer >= 0]] = moe_TLK
        buffer = io.BytesIO()
        np.save(buffer, all_TLK)
        self._live.pop(key)
        self.answers[key] = spans = self._spans(generation.versions)
        content = [
            {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": i, "logprob": p, "rank": 1}]}
            for i, p in zip(generation.ids, (logprob + self.off for logprob in generation.logprobs), strict=True)
        ]
        choice = {
            "index": 0, "finish_reason": generation.finish_reason, "token_ids": generation.ids,
            "routed_experts": base64.b64encode(buffer.getvalue()).decode(), "weight_versions": spans,
            "logprobs": {"content": content},
        }  # fmt: skip
        usage = {"prompt_tokens_details": {"cached_tokens": generation.cached_tokens}}
        return {"request_id": f"generate-tokens-{key}", "choices": [choice], "usage": usage}

    def _spans(self, versions: list[int]) -> list[dict[str, Any]]:
        edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
        return [{"version": self._names[versions[a]], "start": a, "end": b} for a, b in pairwise(edges)]

    async def _scored(self, ids: list[int]) -> dict[str, Any]:
        version, logprobs = await asyncio.wrap_future(self.engine.score(ids))
        found = [{str(i): {"logprob": p, "rank": 1}} for i, p in zip(ids[1:], logprobs, strict=True)]
        choice = {"token_ids": [0], "weight_versions": [{"version": self._names[version], "start": 0, "end": 1}]}
        return {"prompt_logprobs": [None, *found], "choices": [choice]}

    # Development mode

    async def rpc(self, http: HTTPRequest) -> Response:
        body = await http.json()
        method, arguments = body["method"], body["args"]
        self.calls.append(method)
        if method == "etude_open":
            answer = self._open(*arguments)
        elif method == "etude_swap":
            assert self.engine.is_paused, "a swap is for a scheduler that stands still"
            answer = await self._swap(*arguments)
        else:
            answer = await asyncio.to_thread(getattr(self._worker, method), *arguments)
        return JSONResponse({"results": [answer]})

    def _open(self, url: str, relay: str, public_key: str) -> dict[str, Any]:
        if self._worker is None:
            store = open_store(url)
            if newest_manifest(store) is None:
                return {"error": f"{url} has no version yet; feed it after the first one is published"}
            live = named_tensors(self.engine.model)
            self._worker = WorkerExtension()
            self._worker._etude = Following((url, relay, public_key), self.engine.model, Receiver(store, live))
        return {"version": self._worker._etude.receiver.version}

    async def _swap(self, version: str) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []

        def apply() -> None:
            assert self._worker is not None
            answers.append(self._worker.etude_swap(version))
            self.trace.append((int(version), dict(self._live)))

        await asyncio.wrap_future(self.engine.swap(int(version), apply))
        return answers[0]

    async def name(self, http: HTTPRequest) -> Response:
        assert self.engine.is_paused, "versions of tokens are exact only if the name changes while nothing runs"
        self.calls.append("name")
        self._names[self.engine.version] = (await http.json())["new_version"]
        return JSONResponse({"success": True})

    async def pause(self, http: HTTPRequest) -> Response:
        assert http.query_params["mode"] == "keep"
        self.calls.append("pause")
        self.engine.pause("keep", clear_cache=False)
        return JSONResponse({"status": "paused"})

    async def resume(self, http: HTTPRequest) -> Response:
        self.calls.append("resume")
        self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def metrics(self, http: HTTPRequest) -> Response:
        running, waiting = self.engine.load
        figures = {
            "num_requests_running": running, "num_requests_waiting": waiting,
            "generation_tokens_total": self.engine.counters.sampled_tokens,
        }  # fmt: skip
        lines = [f'vllm:{name}{{engine="0",model_name="m"}} {float(value)}' for name, value in figures.items()]
        return PlainTextResponse("\n".join(lines))


def _refused(why: str) -> Response:
    return JSONResponse({"error": {"message": why, "type": "BadRequestError", "code": 400}}, status_code=400)


@contextmanager
def fake_vllm(model: Path, **configuration: Any) -> Iterator[tuple[str, FakeVllm]]:
    """The URL of a server of `model`, and the server. `configuration`: tables of vLLM's that differ."""
    with torch.inference_mode(False):
        loaded = load_model(model)
    engine = Engine(loaded, EngineConfig(max_batch=16), version=-1, max_length=512, routes=True)
    moe = set(expert_layers(model))
    layers = [layer if layer in moe else -1 for layer in range(loaded.config.num_hidden_layers)]
    engine.start()
    engine.generate(Request(ids=[0, 1], max_tokens=3))  # the kernels compile here, not while a client waits
    server = FakeVllm(engine, layers, configuration)
    try:
        with answering(server.app()) as url:
            yield url, server
    finally:
        engine.close()
