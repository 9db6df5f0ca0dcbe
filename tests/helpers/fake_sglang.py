"""SGLang's routes with etude's engine behind them: bodies as SGLang takes and sends them at commit 460534be8866.

It keeps a trace of its updates: how many tokens of each request had been sampled when new weights came.
"""

import asyncio
import base64
import json
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
from etude.models.files import expert_layers
from etude.models.loading import load_model, named_tensors
from tests.helpers.http_apps import answering

FIELDS = {
    "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "cache_salt", "stream",
    "return_routed_experts", "routed_experts_start_len",
}  # fmt: skip
PARAMS = {"max_new_tokens", "temperature", "ignore_eos", "stop_token_ids", "skip_special_tokens"}


@dataclass
class FakeSglang:
    """One server. `trace` holds, for each update, the sampled tokens of the requests that ran."""

    engine: Engine
    layers: list[bool]  # of the model: whether they have experts
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    trace: list[tuple[str, dict[str, int]]] = field(default_factory=list[tuple[str, dict[str, int]]])
    salts: list[str] = field(default_factory=list[str])
    _live: dict[str, int] = field(default_factory=dict[str, int])
    _names: dict[int, str] = field(default_factory=lambda: {-1: "default"})

    def app(self) -> Starlette:
        posts = {
            "/generate": self.generate, "/pause_generation": self.pause, "/continue_generation": self.go_on,
            "/update_weights_from_disk": self.update,
        }  # fmt: skip
        info = {"version": "0.5.23", "dtype": "bfloat16", "context_length": 512, "enable_metrics": True}
        gets = {
            "/get_server_info": lambda _: JSONResponse(info | self.info),
            "/health": lambda _: Response(),
            "/metrics": lambda _: PlainTextResponse(f'sglang:num_running_reqs{{a="b"}} {float(self.engine.load[0])}'),
        }
        return Starlette(
            routes=[Route(path, end, methods=["POST"]) for path, end in posts.items()]
            + [Route(path, end) for path, end in gets.items()]
        )

    async def generate(self, http: HTTPRequest) -> Response:
        body = await http.json()
        params = body["sampling_params"]
        assert not (set(body) - FIELDS), set(body) - FIELDS
        assert not (set(params) - PARAMS), set(params) - PARAMS
        if body.get("logprob_start_len") == 0:
            version, found = await asyncio.wrap_future(self.engine.score(body["input_ids"]))
            entries = [[p, i, None] for p, i in zip([None, *found], body["input_ids"], strict=True)]
            meta = {"input_token_logprobs": entries, "weight_versions": self._spans([version])}
            return JSONResponse({"output_ids": [0], "meta_info": meta})
        self.salts.append(body["cache_salt"])
        key = body["rid"]
        self._live[key] = 0
        request = Request(
            ids=body["input_ids"], max_tokens=params["max_new_tokens"], temperature=params["temperature"],
            stop=tuple(params["stop_token_ids"]), session=body["cache_salt"], seed=len(self.salts),
            routes_from=body.get("routed_experts_start_len", 0),
        )  # fmt: skip

        def count(token: int, _: float) -> None:
            self._live[key] += 1

        sequence = self.engine.submit(request, count)
        if body["stream"]:
            return StreamingResponse(self._events(key, sequence, body), media_type="text/event-stream")
        try:
            await asyncio.wrap_future(sequence.future)
        finally:
            sequence.abort()
        return JSONResponse(self._answer(key, sequence.future.result(), body))

    async def _events(self, key: str, sequence: Any, body: dict[str, Any]) -> AsyncIterator[str]:
        whole = self._answer(key, await asyncio.wrap_future(sequence.future), body)
        half = {"output_ids": whole["output_ids"][:3], "meta_info": {"finish_reason": None}}
        for event in (half, whole):
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    def _answer(self, key: str, generation: Any, body: dict[str, Any]) -> dict[str, Any]:
        moe_TLK = generation.routes.array().astype("<i4")
        all_TLK = np.zeros((len(moe_TLK), len(self.layers), moe_TLK.shape[2]), "<i4")
        all_TLK[:, [i for i, has in enumerate(self.layers) if has]] = moe_TLK
        self._live.pop(key)
        experts = base64.b64encode(all_TLK.tobytes()).decode() if body.get("return_routed_experts") else None
        entries = [[p, i, None] for p, i in zip(generation.logprobs, generation.ids, strict=True)]
        meta = {
            "id": key, "finish_reason": {"type": generation.finish_reason}, "cached_tokens": generation.cached_tokens,
            "output_token_logprobs": entries, "weight_versions": self._spans(generation.versions),
            "routed_experts": experts,
        }  # fmt: skip
        return {"output_ids": generation.ids, "meta_info": meta}

    def _spans(self, versions: list[int]) -> list[dict[str, Any]]:
        edges = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
        return [{"version": self._names[versions[a]], "start": a, "end": b} for a, b in pairwise(edges)]

    async def pause(self, http: HTTPRequest) -> Response:
        assert (await http.json()) == {"mode": "in_place"}
        self.engine.pause("keep", clear_cache=False)
        return JSONResponse({"status": "ok"})

    async def go_on(self, http: HTTPRequest) -> Response:
        self.engine.resume()
        return JSONResponse({"status": "ok"})

    async def update(self, http: HTTPRequest) -> Response:
        body = await http.json()
        assert self.engine.is_paused
        assert body["flush_cache"] is False, "a flush fails while requests run"
        if not Path(body["model_path"]).is_dir():
            return JSONResponse({"success": False, "message": "no such folder"}, status_code=400)
        new = named_tensors(load_model(body["model_path"]))

        def apply() -> None:
            with torch.no_grad():
                for name, tensor in named_tensors(self.engine.model).items():
                    tensor.copy_(new[name])
            self.trace.append((body["weight_version"], dict(self._live)))

        number = len(self._names)
        self._names[number] = body["weight_version"]
        await asyncio.wrap_future(self.engine.swap(number, apply))
        return JSONResponse({"success": True, "message": "ok"})


@contextmanager
def fake_sglang(model: Path) -> Iterator[tuple[str, FakeSglang]]:
    """The URL of a server of `model`, and the server."""
    loaded = load_model(model)
    engine = Engine(loaded, EngineConfig(max_batch=16), version=-1, max_length=512, routes=True)
    moe = set(expert_layers(model))
    server = FakeSglang(engine, [layer in moe for layer in range(loaded.config.num_hidden_layers)])
    engine.start()
    engine.generate(Request(ids=[0, 1], max_tokens=3))  # the kernels compile here, not while a client waits
    try:
        with answering(server.app()) as url:
            yield url, server
    finally:
        engine.close()
