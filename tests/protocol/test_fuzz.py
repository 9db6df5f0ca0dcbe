"""Each server under requests that are wrong in every way: no failure, nothing kept, honest requests right throughout.

`make fuzz` runs for ten minutes per server. Each prints a row of a table; times are told, not judged.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.live_gateway import live_folder, process
from benchmarks.live_stub import TEXT

from etude import processes
from etude.config import ServerConfig
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.weights.publisher import Publisher
from tests.helpers.fuzzing import HEADING, ApiRoute, FuzzTarget, fuzz

NANO = Path(__file__).parents[2] / "models" / "nano"
SECONDS = float(os.environ.get("ETUDE_FUZZ_SECONDS", "30"))
START_SECONDS = 180
TOKEN = "fuzz-0123456789"
SEED = 1

MESSAGES = [{"role": "system", "content": "Work."}, {"role": "user", "content": [{"type": "text", "text": "Fix `f`."}]}]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}]


def request(method: str, path: str, body: dict[str, Any] | None = None, *headers: bytes) -> bytes:
    """A whole request, after whose answer the connection ends."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close", *headers]
    if body is not None:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(data)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + data


def answered(body: bytes) -> Any:
    return json.loads(body)


@contextmanager
def engine(folder: Path) -> Iterator[FuzzTarget]:
    # Small caches are full soon; then memory that grows is a leak.
    config = ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=24, documents_mb=8)
    child = spawn_engine(config, folder, token=TOKEN)
    try:
        port = int(engine_url(child, folder).rpartition(":")[2])
        key = f"Authorization: Bearer {TOKEN}".encode()
        common = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 1, "stop": ["zz"], "user": "u"}
        prediction = {"type": "content", "content": "return x"}
        chat = common | {"model": "nano", "messages": MESSAGES, "tools": TOOLS, "stream": False, "logprobs": True}
        completion = common | {"model": "nano", "prompt": "def f(x):\n", "logprobs": 1, "prediction": prediction}
        generate = {
            "ids": [40, 41, 42],
            "max_tokens": 3,
            "temperature": 1.0,
            "top_p": 1.0,
            "stop": [5],
            "seed": 3,
            "session": "s",
            "documents": [[50, 51]],
            "stream": False,
        }
        apply = {"code": "a = 1\nb = 2\n", "update": "a = 1\nb = 3\n", "instruction": "", "temperature": 0.0, "seed": 0}
        sampling = {
            "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
            "logit_bias": {"50": 1.0}, "stop_token_ids": [5],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}},
        }  # fmt: skip
        listing = {"type": "function", "function": {"name": "list", "parameters": {"type": "object"}}}
        forced = {"tools": [listing], "tool_choice": "required", "top_logprobs": 2}
        anthropic = {
            "model": "nano", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
            "thinking": {"type": "disabled"},
            "tool_choice": {"type": "auto"}, "tools": [{"name": "list", "input_schema": {"type": "object"}}],
        }  # fmt: skip
        chat_stream = chat | {"stream": True, "stream_options": {"include_usage": True}}
        routes = (
            ApiRoute("POST", "/v1/chat/completions", chat),
            ApiRoute("POST", "/v1/chat/completions", chat_stream),
            ApiRoute("POST", "/v1/completions", completion),
            ApiRoute("POST", "/v1/completions", completion | {"stream": True}),
            ApiRoute("POST", "/generate", generate),
            ApiRoute("POST", "/generate", generate | {"stream": True}),
            ApiRoute("POST", "/score", {"sequences": [[40, 41, 42], [50, 51]]}),
            ApiRoute("POST", "/v1/apply", apply),
            ApiRoute("POST", "/v1/chat/completions", chat | sampling | forced),
            ApiRoute("POST", "/v1/completions", completion | sampling | {"echo": True, "prompt": [[40, 41], [42, 43]]}),
            ApiRoute("POST", "/v1/completions", completion | {"bad_words": ["zebra"], "suffix": "x", "top_p": 0}),
            ApiRoute("POST", "/v1/responses", {"input": "x", "tools": [], "text": {}, "max_output_tokens": 3}),
            ApiRoute("POST", "/v1/messages", anthropic),
            ApiRoute("POST", "/v1/messages/count_tokens", anthropic),
            ApiRoute("POST", "/tokenize", {"prompt": "def f(x):"}),
            ApiRoute("POST", "/tokenize", {"messages": MESSAGES, "tools": TOOLS}),
            ApiRoute("POST", "/detokenize", {"tokens": [40, 41]}),
            ApiRoute("GET", "/v1/models"),
            ApiRoute("GET", "/v1/models/a/b"),
            ApiRoute("GET", "/health"),
            ApiRoute("GET", "/metrics"),
            ApiRoute("GET", "/is_paused"),
            ApiRoute("POST", "/resume"),
            ApiRoute("GET", "/weights/chunks/0?version=0"),
            ApiRoute("GET", f"/weights/chunks/{'9' * 4000}?version=-1"),
            ApiRoute("POST", "/pause", None, (b"Origin: http://evil.example",)),
        )
        plain = {"ids": [3, *range(100, 130)], "max_tokens": 4, "temperature": 0.0}
        yield FuzzTarget(
            "serve",
            port,
            child.popen.pid,
            routes,
            request("POST", "/generate", plain, key),
            lambda body: len(answered(body)["ids"]) == 4,
            (key,),
        )
    finally:
        child.stop(30)
    assert child.exit_code == 0, child.log.read_text()[-3000:]
    assert "Traceback" not in child.log.read_text()


@contextmanager
def small(
    folder: Path, name: str, *argv: str, token: str = "", ends: int = -signal.SIGTERM
) -> Iterator[tuple[int, int]]:
    ready = folder / "ready.json"
    child = processes.start(name, [*argv, "--ready-file", str(ready)], folder / f"{name}.log", {"ETUDE_API_KEY": token})
    try:
        told = json.loads(processes.wait_for_file(ready, child, START_SECONDS))
        yield int(told["url"].rpartition(":")[2]), child.popen.pid
    finally:
        child.stop(30)
    assert child.exit_code == ends, child.log.read_text()[-3000:]
    assert "Traceback" not in child.log.read_text()


@contextmanager
def relay(folder: Path) -> Iterator[FuzzTarget]:
    store = open_store(str(folder / "weights"))
    tensors = {"a": torch.arange(300_000, dtype=torch.float32).bfloat16()}
    part = Publisher(store).publish(0, tensors, (), {}).payload[0]
    path = f"/{part.key}?blake3={part.digest}"
    routes = (
        ApiRoute("GET", path),
        ApiRoute("GET", path, None, (b"Range: bytes=5-70",)),
        ApiRoute("GET", "/health"),
        ApiRoute("GET", f"/{part.key}?blake3={'0' * 64}"),
        ApiRoute("GET", f"/payloads/../x?blake3={part.digest}"),
        ApiRoute("GET", f"/payloads/gone?blake3={part.digest}"),
        ApiRoute("GET", f"/payloads/%2e%2e%2fx?blake3={part.digest}"),
        ApiRoute("POST", path, {"a": 1}),
    )
    with small(folder, "relay", "etude.weights.relay", "--store", store.url, "--budget-mb", "8") as (port, pid):
        data = store.get(part.key)
        yield FuzzTarget("relay", port, pid, routes, request("GET", path), lambda body: body == data)


@contextmanager
def gateway(folder: Path) -> Iterator[FuzzTarget]:
    """Before a server that answers all chats alike, so that what is refused is refused by the gateway."""
    with process(folder, "stub", "benchmarks.live_stub", "stub") as upstream:
        config, api_key = live_folder(folder / "gateway", upstream)
        argv = ["etude.cli.main", "live", "serve", str(config)]
        with small(folder, "gateway", *argv, token=TOKEN, ends=0) as (port, pid):
            key = f"Authorization: Bearer {api_key}".encode()
            operator = (f"Authorization: Bearer {TOKEN}".encode(),)
            chat = {"model": "stub", "messages": MESSAGES, "user": "u", "metadata": {"user_id": "v"}, "stream": False}
            turn = "0" * 26
            signal_ = {"response_id": turn, "name": "undone", "value": 1, "source": "client", "event_id": "e"}
            rated = {"response_id": turn, "name": "rating", "value": 0.5, "event_id": "r"}
            judged = {"gen_ai.response.id": turn, "gen_ai.evaluation.name": "rating"}
            otel = {"name": "gen_ai.evaluation.result", "attributes": judged | {"gen_ai.evaluation.score.value": 1}}
            edit = {"id": turn, "path": "a.py", "base": "b", "old_lines": [1, 2], "new": "n", "characters": 3}
            named = (b"X-Etude-User: u", b"X-Etude-Session: s", b"X-Etude-Kind: side", b"X-Etude-Organisation: o")
            routes = (
                ApiRoute("POST", "/v1/chat/completions", chat),
                ApiRoute("POST", "/v1/chat/completions", chat, named),
                ApiRoute("POST", "/v1/chat/completions", chat, (b"X-Etude-Kind: none", b"X-Etude-User: \xff")),
                ApiRoute("POST", "/v1/chat/completions", chat, (b"X-Etude-Consent: no", b"X-Etude-Asker: k/1")),
                ApiRoute("POST", "/v1/feedback", signal_),
                ApiRoute("POST", "/v1/feedback", rated),
                ApiRoute("POST", "/v1/feedback", otel),
                ApiRoute("POST", "/v1/suggestions", {"turn": turn, "suggestions": [edit]}),
                ApiRoute("GET", "/v1/models"),
                ApiRoute("GET", "/health", None, operator),
                ApiRoute("GET", "/metrics", None, operator),
                ApiRoute("GET", "/v1/turns/x"),
            )
            yield FuzzTarget(
                "gateway",
                port,
                pid,
                routes,
                request("POST", "/v1/chat/completions", chat, key),
                lambda body: answered(body)["choices"][0]["message"]["content"] == TEXT,
                (key,),
                pooled=8,  # four connections to the database, of two files each
            )


@contextmanager
def endpoint(folder: Path) -> Iterator[FuzzTarget]:
    ready = folder / "endpoint.json"
    words = ["tests.helpers.endpoint_process", str(ready)]
    child = processes.start("endpoint", words, folder / "endpoint.log", {"PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        told = json.loads(processes.wait_for_file(ready, child, START_SECONDS))
        key = f"Authorization: Bearer {told['key']}".encode()
        chat = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 9, "stop": ["zz"], "stream": False}
        tool = {"name": "bash", "description": "Run.", "input_schema": SCHEMA}
        user = [{"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
        messages = {
            "model": "m",
            "system": "Work.",
            "messages": user,
            "tools": [tool],
            "max_tokens": 9,
            "stream": False,
        }
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}]
        responses = {"model": "m", "instructions": "Work.", "input": given, "tools": [], "store": True, "stream": False}
        routes = (
            *(ApiRoute("POST", "/v1/chat/completions", chat | {"stream": stream}) for stream in (False, True)),
            *(ApiRoute("POST", "/v1/messages", messages | {"stream": stream}) for stream in (False, True)),
            *(ApiRoute("POST", "/v1/responses", responses | {"stream": stream}) for stream in (False, True)),
            ApiRoute("POST", "/v1/messages/count_tokens", messages),
            ApiRoute("GET", "/v1/models"),
            ApiRoute("GET", "/v1/models/a/b"),
            ApiRoute("POST", "/v1/responses", responses | {"previous_response_id": "r"}),
        )
        honest = request("POST", "/v1/chat/completions", chat, key)
        yield FuzzTarget(
            "endpoint",
            told["port"],
            told["pid"],
            routes,
            honest,
            lambda body: answered(body)["choices"][0]["message"]["role"] == "assistant",
            (key,),
        )
    finally:
        child.stop(30)
    assert child.exit_code == 0, child.log.read_text()[-3000:]
    assert "Traceback" not in child.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("started", [engine, relay, endpoint, gateway])
def test_a_server_under_fuzz(
    started: Callable[[Path], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path) as target:
        report = asyncio.run(fuzz(target, SECONDS, SEED))
        with capsys.disabled():
            print(f"\n{HEADING}\n{report.row(target.name)}")
    assert report.wrong == []
    assert report.honest_wrong == 0
    assert report.halves_open == 0
    assert report.descriptors[1] <= report.descriptors[0] + target.pooled
    # Allocators keep what they once held, so a bound that cannot fail by chance is wider than what the table shows.
    assert max(report.memory) < 1.15 * report.memory[0] + (48 << 20)
    assert report.statuses["400"] > 0
    assert report.statuses["200"] > 0
    assert report.statuses["403"] > 0
